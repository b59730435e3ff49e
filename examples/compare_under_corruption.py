"""Compare the robustness of two models, and test whether the difference is significant.

Both models see the same corrupted images, which depend only on seed, image and severity. The comparison is paired by
image, with a bootstrap interval and McNemar's test. Twenty training steps are few, so the intervals are wide.
"""

import torch
from torch.nn import functional as F

import vitfocus as vf
from vitfocus.data.shapes.dataset import Shapes, shapes_batch

TINY = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 4, "num_classes": 10}


def trained(spec: str, steps: int = 20) -> torch.nn.Module:
    """Build a tiny model from the spec and train it for a few steps on Shapes."""
    torch.manual_seed(0)
    model = vf.create_model(spec, **TINY)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        images, labels = shapes_batch(range(32 * step, 32 * step + 32), size=32)
        loss = F.cross_entropy(model(images.float() / 127.5 - 1), labels) + vf.auxiliary_loss(model)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model


models = {"plain": trained("vit_tiny_patch16_224"), "treated": trained("vit_tiny_patch16_224+cb+adl(weight=0.1)")}
scores = vf.evaluate(
    models,
    "cifar10-c",  # the constants of CIFAR-C, for images of 32 pixels
    data=Shapes("val", length=60, size=32),
    corruptions=["gaussian_noise", "contrast"],
    severities=[1, 3, 5],
)
print(scores.table())
print(scores.compare("plain", "treated").table())
