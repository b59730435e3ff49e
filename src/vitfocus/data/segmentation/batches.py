"""Batches for segmentation: random crops for training, whole images for evaluation.

Training uses the usual augmentation: random scale, crop, flip and photometric distortion. Its random numbers depend on
(seed, position) only, so a sample is the same in any worker process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitfocus.data.image_files import to_tensor
from vitfocus.data.loader import Samples
from vitfocus.data.segmentation.dataset import IGNORE, Mask, SegmentationDataset

_TRIES = 10  # random crops until one is not mostly of one class


@dataclass
class SegmentationBatch:
    """Normalised images (B, 3, size, size) and their masks, int64 (B, size, size)."""

    images: Tensor
    masks: Tensor


@dataclass(frozen=True)
class RandomCrop:
    """Augmentation of training images: uint8 (3, size, size) and the mask, uint8 (size, size).

    Args:
        size: Side of the crop. Smaller images are padded with `fill`, where the mask is ignored.
        scale: Range of the random scale.
        short_side: Images are first resized to this short side; 0 keeps their size.
        flip: Probability of a horizontal flip.
        photometric: Whether brightness, contrast, saturation and hue are changed.
        most_of_one: Largest share of one class in a crop, if ten tries find such a crop.
        fill: Colour of the padding, in [0, 1].
    """

    size: int
    scale: tuple[float, float] = (0.5, 2.0)
    short_side: int = 0
    flip: float = 0.5
    photometric: bool = True
    most_of_one: float = 0.75
    fill: Sequence[float] = (0.485, 0.456, 0.406)

    def __call__(self, sample: tuple[Image.Image, Mask], seed: int) -> tuple[Tensor, Tensor]:
        """Augment an RGB image and its mask."""
        draw = np.random.default_rng(seed)
        image, mask = self._crop(*sample, draw)
        mirrored = draw.random() < self.flip
        pixels = to_tensor(distort(image, draw) if self.photometric else image)
        if mirrored:
            pixels, mask = pixels.flip(2), mask.flip(1)
        if mask.shape == (self.size, self.size):
            return pixels.contiguous(), mask.contiguous()
        fill = torch.tensor([round(255 * channel) for channel in self.fill], dtype=torch.uint8)
        canvas = fill[:, None, None].expand(3, self.size, self.size).clone()
        empty = torch.full((self.size, self.size), IGNORE, dtype=torch.uint8)
        canvas[:, : mask.shape[0], : mask.shape[1]] = pixels
        empty[: mask.shape[0], : mask.shape[1]] = mask
        return canvas, empty

    def _crop(self, image: Image.Image, mask: Mask, draw: np.random.Generator) -> tuple[Image.Image, Tensor]:
        """Scale and crop at once: only the crop is resized."""
        wide, high = scaled_size(image.size, self.short_side, float(draw.uniform(*self.scale)))
        size = min(self.size, wide), min(self.size, high)
        stored = Image.fromarray(mask)
        for _ in range(_TRIES):
            left, top = (int(draw.integers(whole - part + 1)) for whole, part in zip((wide, high), size, strict=True))
            ratio = image.width / wide, image.height / high
            box = (left * ratio[0], top * ratio[1], (left + size[0]) * ratio[0], (top + size[1]) * ratio[1])
            box = (box[0], box[1], min(box[2], image.width), min(box[3], image.height))
            cropped = np.asarray(stored.resize(size, Image.Resampling.NEAREST, box=box))
            counts = np.bincount(cropped[cropped != IGNORE], minlength=1)
            if self.most_of_one >= 1 or ((counts > 0).sum() > 1 and counts.max() < self.most_of_one * counts.sum()):
                break
        return image.resize(size, Image.Resampling.BILINEAR, box=box), torch.from_numpy(cropped.copy())


def whole_images(masks: SegmentationDataset, short_side: int = 0) -> Samples:
    """For evaluation: images uint8 (3, h, w), resized to a short side (0: as they are), and unchanged masks."""
    return Samples(masks, partial(_whole, short_side))


def _whole(short_side: int, sample: tuple[Image.Image, Mask], seed: int) -> tuple[Tensor, Tensor]:
    image, mask = sample
    image = image.resize(scaled_size(image.size, short_side), Image.Resampling.BILINEAR)
    return to_tensor(image), torch.from_numpy(np.ascontiguousarray(mask))


def stack_by_size(items: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[list[int], Tensor, Tensor]]:
    """Batches of images and masks, one per size, each with the indices of its items."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, (image, mask) in enumerate(items):
        groups.setdefault((image.shape, mask.shape), []).append(row)
    return [(rows, *stack_masks([items[row] for row in rows])) for rows in groups.values()]


def stack_masks(items: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Images and masks of one size as two tensors."""
    return torch.stack([image for image, _ in items]), torch.stack([mask for _, mask in items])


def scaled_size(size: tuple[int, int], short_side: int, factor: float = 1.0) -> tuple[int, int]:
    """A size with the given short side (0: unchanged), times a factor.

    >>> scaled_size((683, 512), 256), scaled_size((100, 50), 0, 0.5)
    ((342, 256), (50, 25))
    """
    factor *= short_side / min(size) if short_side else 1.0
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def largest_label(masks: Tensor) -> int:
    """The largest class in masks; -1 if all pixels are ignored."""
    return int(masks.to(torch.int16).masked_fill(masks == IGNORE, -1).max()) if masks.numel() else -1


def distort(image: Image.Image, draw: np.random.Generator) -> Image.Image:
    """Photometric distortion: brightness, contrast, saturation and hue, each with probability 0.5.

    Brightness changes by up to 32, contrast (first or last) and saturation by a factor of 0.5 to 1.5, hue by up to 36°.
    """
    sure = draw.random(4) < 0.5
    contrast, saturation = draw.uniform(0.5, 1.5, 2)
    shift, turn, last = draw.uniform(-32, 32), int(draw.integers(-25, 26)), draw.random() < 0.5
    grey = np.arange(256.0)
    first = grey + (shift if sure[0] else 0.0)
    if sure[1] and not last:
        first = first.clip(0, 255) * contrast
    image = image.point(_table(first, 3))
    if sure[2] or sure[3]:
        hue = (np.arange(256) + (turn if sure[3] else 0)) % 256
        strength = grey * (saturation if sure[2] else 1.0)
        image = image.convert("HSV").point([*_table(hue), *_table(strength), *_table(grey)]).convert("RGB")
    return image.point(_table(grey * contrast, 3)) if sure[1] and last else image


def _table(values: np.ndarray, channels: int = 1) -> list[int]:
    """A lookup table for 256 values in the form that Pillow takes."""
    return [int(value) for value in values.round().clip(0, 255)] * channels
