"""Treat a model in place, fine-tune it in your own loop, and remove the treatments.

The only new line in the loop is `+ vf.auxiliary_loss(model)`, the Attention Diversification Loss of the last forward
pass (0 without ADL).
"""

import timm
import torch
from torch.nn import functional as F

import vitfocus as vf
from vitfocus.data.shapes.dataset import CLASSES, shapes_batch

torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=64, depth=3, num_heads=4, num_classes=len(CLASSES)
)
before = model.state_dict().keys()

# Scaled CB and near-identity TAP start as the identity, so a pretrained model keeps its accuracy.
vf.treat_(
    model,
    vf.ContextBroadcasting(variant="scaled", layers="upper"),
    vf.TokenAwarePooling(branches=3, init="near_identity"),
    vf.AttentionDiversification(weight=0.5),
)
print("applied:", " + ".join(map(str, vf.applied(model))))
print("added:  ", len(model.state_dict().keys() - before), "tensors; none renamed")

optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
images, labels = shapes_batch(range(32), size=32)
x = images.float() / 127.5 - 1
for step in range(21):  # on the same 32 images: enough to see the loss fall
    loss = F.cross_entropy(model(x), labels)
    (loss + vf.auxiliary_loss(model)).backward()
    optimiser.step()
    optimiser.zero_grad()
    if step % 10 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}")

with vf.untreated(model):  # temporarily the plain model, with the current weights
    print("without its treatments:", tuple(model(x).shape))
vf.untreat_(model)  # permanently
assert model.state_dict().keys() == before
