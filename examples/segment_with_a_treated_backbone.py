"""UperNet on a treated ViT: train on masks in your own loop, measure mIoU, diagnose the backbone, save and load.

`vitfocus train shapes_segment` is a complete training run; detectors ("maskrcnn:...") work in the same way.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

import vitfocus as vf
from vitfocus.data.shapes.dataset import MASK_CLASSES, Shapes
from vitfocus.tasks.segmentation.evaluation import class_counts, scores_of

torch.manual_seed(0)
vit = {"img_size": 48, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 4}
model = vf.create_model(
    "upernet:vit_tiny_patch16_224+cb(layers=upper)", num_classes=len(MASK_CLASSES), channels=16, **vit
)
scenes = Shapes("train", length=32, size=48, task="segment")
pixels, masks = default_collate(scenes.__getitems__(range(32)))
x = pixels.float() / 127.5 - 1

optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(16):
    model.train()
    loss = F.cross_entropy(model(x)["out"], masks) + vf.auxiliary_loss(model)
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    if step % 5 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}")

model.eval()
with torch.no_grad():
    scores = scores_of(class_counts(masks, model(x).argmax(1), len(MASK_CLASSES)).sum(0))
print("mIoU {miou:.2f}, pixel accuracy {aacc:.2f} on the training images".format(**scores))

print(vf.diagnose(model, pixels[:8]))  # finds the transformer inside
vf.save(model, "runs/examples/segmenter")
again = vf.load("runs/examples/segmenter")
assert torch.equal(again(x[:1]), model(x[:1]))
