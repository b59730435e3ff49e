"""Write a report: the attention of two models side by side, and an interactive explorer.

The report is a single HTML file that opens from disk. On the command line: `vitfocus report RUN [RUN ...] --explore`.
"""

import torch

import vitfocus as vf
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.report import report
from vitfocus.report.explorer import explorer_data

torch.manual_seed(0)
tiny = {"img_size": 64, "patch_size": 8, "depth": 3}
models = {
    "plain": vf.create_model("vit_tiny_patch16_224", **tiny),
    "cb": vf.create_model("vit_tiny_patch16_224+cb", **tiny),
}
images, _ = shapes_batch(range(8), split="val", size=64)

for name, model in models.items():
    vf.diagnose(model, images, against="gaussian_noise/3", name=name).save(f"runs/examples/report/{name}")

page = report(
    "runs/examples/report/plain",
    "runs/examples/report/cb",
    out="runs/examples/report/report.html",
    title="Plain and Context Broadcasting",
    explorer=explorer_data(models, images[:2]),
)
print(f"{' and '.join(page.models)}: {page.path}, {page.size / 1e6:.1f} MB")
