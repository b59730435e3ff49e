"""Diagnose the attention of a model: print the table and the findings, and save the figures.

Replace `model` and `images` with your own: any ViT of timm, transformers or torchvision, and normalised floats or uint8
images, which vitfocus normalises.
"""

import timm
import torch

import vitfocus as vf
from vitfocus.data.shapes.dataset import shapes_batch

torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=64, patch_size=8, depth=4
)  # pretrained=True downloads weights
images, _ = shapes_batch(range(16), split="val", size=64)  # uint8 (16, 3, 64, 64), generated from a seed

diagnosis = vf.diagnose(model, images, against="gaussian_noise/3", name="my model")
print(diagnosis)

last = diagnosis.rows[-1]
print(f"\nlast layer: 5 % of the tokens receive {100 * last['overfocus']:.0f} % of the attention,")
print(f"and under noise its maps have a cosine similarity of {last['stability']:.2f} with the clean ones")

files = diagnosis.save("runs/examples/diagnosis")
print("saved:", ", ".join(file.name for file in files))
