"""Tiny stand-ins for the published data sets, and a model fast enough to be called thousands of times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from vitfocus.robustness.classification import wordnet_ids


class Blobs(nn.Module):
    """Logits from a 4x4 thumbnail: not a vision transformer, but its output depends on every part of the image."""

    def __init__(self, classes: int = 1000, size: int = 32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.head = nn.Linear(48, classes)
        self.head.weight.data = torch.randn(classes, 48, generator=generator)
        self.head.bias.data = torch.randn(classes, generator=generator) * 0.1
        self.pretrained_cfg = {"input_size": (3, size, size), "interpolation": "bilinear", "architecture": "blobs"}
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))


def pictures(count: int, size: int = 32, seed: int = 0) -> np.ndarray:
    """Random soft colours, (count, size, size, 3) uint8."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    smooth = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    return (smooth * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def as_input(images: np.ndarray) -> torch.Tensor:
    """Images normalised by hand, with ImageNet's mean and standard deviation."""
    x = torch.from_numpy(np.asarray(images)).permute(0, 3, 1, 2).double() / 255
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    return ((x - mean) / std).float()


@torch.no_grad()
def answers(model: nn.Module, images: np.ndarray) -> np.ndarray:
    """The model's predictions for these images."""
    return model(as_input(images)).argmax(1).numpy()


def half_right(model: nn.Module, images: np.ndarray, classes: int) -> np.ndarray:
    """Labels that equal the model's predictions at even positions only."""
    labels = answers(model, images)
    labels[1::2] = (labels[1::2] + 1) % classes
    return labels


def write_classes(root: Path, images: np.ndarray, names: list[str], suffix: str = "png", stem: str = "{:08d}") -> Path:
    """One folder per class: image i is in the folder names[i]."""
    for index, (image, name) in enumerate(zip(images, names, strict=True)):
        (root / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / name / f"{stem.format(index)}.{suffix}")
    return root


def write_imagenet(
    root: Path, model: nn.Module, count: int = 12, size: int = 32
) -> tuple[Path, np.ndarray, np.ndarray]:
    """A small ImageNet-like set, half of which the model classifies correctly: folder, images, labels."""
    images = pictures(count, size)
    labels = half_right(model, images, 1000)
    write_classes(root, images, [wordnet_ids()[label] for label in labels])
    return root, images, labels
