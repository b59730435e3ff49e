"""Batches for detection: random flip, resize and crop for training; random numbers depend on (seed, position) only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.data.detection.dataset import Target

_STEP = 32  # pixels between two choices of the short side


@dataclass
class DetectionBatch:
    """Images (3, H, W), each of its own size, and their targets."""

    images: list[Tensor]
    targets: list[Target]


@dataclass(frozen=True)
class DetectionAugment:
    """Augmentation of training images.

    Args:
        sides: Range of the short side, which is drawn in steps of 32.
        longest: The long side is at most this.
        flip: Probability of a horizontal flip.
        jitter: Range of large-scale jitter; (1, 1) is off. It replaces `sides` and `longest`: the long side is resized
            to a random factor times `sides[1]`, and at most a square of that side is cropped.
    """

    sides: tuple[int, int]
    longest: int
    flip: float = 0.5
    jitter: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if not 1 <= self.sides[0] <= self.sides[1]:
            raise VitfocusError(
                f"detect.sides={list(self.sides)} is not a range; expected the smallest side, then the largest."
            )
        if not 0 < self.jitter[0] <= self.jitter[1]:
            raise VitfocusError(
                f"detect.jitter={list(self.jitter)} is not a range of factors above 0; expected the smallest first."
            )

    def __call__(self, sample: tuple[Tensor, Target], seed: int) -> tuple[Tensor, Target]:
        """Augment one image, uint8 (3, H, W), and its target."""
        (image, target), draw = sample, np.random.default_rng(seed)
        if draw.random() < self.flip:
            image, target = flipped(image, target)
        height, width = image.shape[1:]
        if self.jitter == (1.0, 1.0):
            side = int(draw.choice(np.arange(self.sides[0], self.sides[1] + 1, _STEP)))
            return resized(image, target, fitting_scale(height, width, side, self.longest))
        square = self.sides[1]
        scale = float(draw.uniform(*self.jitter)) * square / max(height, width)
        image, target = resized(image, target, scale)
        places = [int(draw.integers(0, max(1, side - square + 1))) for side in image.shape[1:]]
        return cropped(image, target, (places[0], places[1]), square)


def collate(items: Sequence[tuple[Tensor, Target]]) -> DetectionBatch:
    """A batch of images of different sizes."""
    return DetectionBatch([image for image, _ in items], [target for _, target in items])


def fitting_scale(height: int, width: int, shortest: int, longest: int) -> float:
    """The factor that makes the short side `shortest`, but the long side at most `longest`.

    >>> fitting_scale(480, 640, 800, 1333), fitting_scale(100, 1000, 800, 1333)
    (1.6666666666666667, 1.333)
    """
    return min(shortest / min(height, width), longest / max(height, width))


def resized(image: Tensor, target: Target, scale: float) -> tuple[Tensor, Target]:
    """Resize an image and its objects as torchvision's detectors do at test time; objects below a pixel are dropped."""
    height, width = image.shape[1:]
    rows, columns = (max(1, math.floor(side * scale)) for side in (height, width))
    if (rows, columns) == (height, width):
        return image, target
    pixels = F.interpolate(image[None].float(), size=(rows, columns), mode="bilinear", align_corners=False)
    masks = target["masks"]
    if len(masks):
        masks = F.interpolate(masks[:, None], size=(rows, columns), mode="nearest")[:, 0]
    else:
        masks = masks.new_zeros(0, rows, columns)
    factors = torch.tensor([columns / width, rows / height] * 2)
    return pixels[0].round().to(torch.uint8), _large_enough(target["boxes"] * factors, target["labels"], masks)


def flipped(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Flip an image and its objects horizontally.

    >>> image, target = torch.zeros(3, 4, 10), {"boxes": torch.tensor([[1.0, 0.0, 3.0, 2.0]])}
    >>> target |= {"labels": torch.ones(1), "masks": torch.zeros(1, 4, 10)}
    >>> flipped(image, target)[1]["boxes"].tolist()
    [[7.0, 0.0, 9.0, 2.0]]
    """
    boxes = target["boxes"].clone()
    boxes[:, [0, 2]] = image.shape[2] - target["boxes"][:, [2, 0]]
    return image.flip(-1), {**target, "boxes": boxes, "masks": target["masks"].flip(-1)}


def cropped(image: Tensor, target: Target, corner: tuple[int, int], side: int) -> tuple[Tensor, Target]:
    """Crop at most a square at a corner (row, column); objects are cut, and dropped if nothing is left."""
    (top, left), (height, width) = corner, image.shape[1:]
    bottom, right = min(height, top + side), min(width, left + side)
    boxes = target["boxes"] - torch.tensor([left, top, left, top], dtype=torch.float32)
    boxes[:, 0::2].clamp_(0, right - left)
    boxes[:, 1::2].clamp_(0, bottom - top)
    masks = target["masks"][:, top:bottom, left:right]
    return image[:, top:bottom, left:right], _large_enough(boxes, target["labels"], masks)


def _large_enough(boxes: Tensor, labels: Tensor, masks: Tensor) -> Target:
    kept = ((boxes[:, 2:] - boxes[:, :2]) >= 1).all(dim=1)
    return {"boxes": boxes[kept], "labels": labels[kept], "masks": masks[kept]}
