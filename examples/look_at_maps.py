"""Attention maps of selected layers, heads and queries, with fused attention enabled, and images of them."""

import timm
import torch

import vitfocus as vf
from vitfocus.attention.maps import rollout
from vitfocus.attention.plots import map_matrices, png, query_overlay
from vitfocus.core.files import write_bytes
from vitfocus.data.shapes.dataset import shapes_batch

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, depth=3)
images, _ = shapes_batch(range(2), size=64)

# What the class token attends to in the last layer, heads 0 and 2: (images, heads, queries, keys).
maps = vf.attention_maps(model, images, layers=[-1], heads=[0, 2], queries=[0])
print("class token:", tuple(maps[0].shape))

# Attention rollout through all layers.
print("rollout:    ", tuple(rollout(vf.attention_maps(model, images, layers=None)).shape))

# The N x N maps, clean and noisy (overfocus shows as dark columns), and what the patch in row 4, column 4 attends to.
noisy = vf.corrupt(images, "gaussian_noise", severity=3)
pictures = {
    "maps": map_matrices(model, {"clean": images[0], "noisy": noisy[0]}),
    "overlay": query_overlay(model, images[0], query=(4, 4)),
}
for name, figure in pictures.items():
    write_bytes(f"runs/examples/maps/{name}.png", png(figure))
    print(f"wrote runs/examples/maps/{name}.png")
