"""Evaluate a model on a folder of images with several suites, and save the runs so that they can be resumed.

Here the folder is generated from the built-in data set Shapes. With ImageNet, `data` is its validation folder, and the
suites are "imagenet-c", "imagenet-a", "fgsm" and so on: `vitfocus evaluate --suite list` lists them.
"""

from pathlib import Path

import torch

import vitfocus as vf
from vitfocus.data.shapes.layouts import write_layout

torch.manual_seed(0)
folder = Path("runs/examples/suites")
write_layout(folder / "data", "imagefolder", 0, val_count=40, size=64)
model = vf.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)

for suite, options in {
    "clean": {},
    "occlusion": {"sizes": [112], "drops": [98]},
    "fgsm": {"eps": [1, 4]},
}.items():
    scores = vf.evaluate(model, suite, folder / "data" / "val", out=folder / suite, resume=True, **options)
    print(scores.table())

# The fingerprint of a run records everything that its numbers depend on.
print("fingerprint:", ", ".join(scores.fingerprint))
print("files:", sorted(file.name for file in (folder / "fgsm").iterdir()))
