"""Training pictures for segmentation: random scale, crop, mirror image, and light, as the field does it.

Every draw of an item comes from a generator seeded by (seed, position), so an item is the same in any worker process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from vitfocus.data.classification.dataset import Broken
from vitfocus.data.sample_order import SAMPLE, seed_for
from vitfocus.data.segmentation.classes import IGNORE
from vitfocus.data.segmentation.dataset import Mask, Masks, read_pair, scaled_size, to_tensor

_TRIES = 10  # crops drawn in search of one that is not mostly one class


class TrainingCrops(Dataset[tuple[Tensor, Tensor] | Broken]):
    """Items by (index, position): a crop uint8 (3, size, size) and its mask uint8 (size, size).

    What a small picture leaves free of a crop is filled with `fill`, a colour, and does not count.
    """

    def __init__(
        self,
        masks: Masks,
        size: int,
        seed: int,
        *,
        scale: tuple[float, float] = (0.5, 2.0),
        short_side: int = 0,
        flip: float = 0.5,
        photometric: bool = True,
        most_of_one: float = 0.75,
        fill: Sequence[float] = (0.485, 0.456, 0.406),
    ) -> None:
        self.masks, self.size, self.seed = masks, size, seed
        self.scale, self.short_side, self.flip = scale, short_side, flip
        self.photometric, self.most_of_one = photometric, most_of_one
        self.fill = torch.tensor([round(255 * channel) for channel in fill], dtype=torch.uint8)[:, None, None]

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor] | Broken:
        index, position = key
        item = read_pair(self.masks, index)
        if isinstance(item, Broken):
            return item
        draw = np.random.default_rng(seed_for(self.seed, SAMPLE, position))
        image, mask = self._crop(*item, draw)
        mirrored = draw.random() < self.flip
        pixels = to_tensor(distort(image, draw) if self.photometric else image)
        if mirrored:
            pixels, mask = pixels.flip(2), mask.flip(1)
        if mask.shape == (self.size, self.size):
            return pixels.contiguous(), mask.contiguous()
        canvas = self.fill.expand(3, self.size, self.size).clone()
        empty = torch.full((self.size, self.size), IGNORE, dtype=torch.uint8)
        canvas[:, : mask.shape[0], : mask.shape[1]] = pixels
        empty[: mask.shape[0], : mask.shape[1]] = mask
        return canvas, empty

    def _crop(self, image: Image.Image, mask: Mask, draw: np.random.Generator) -> tuple[Image.Image, Tensor]:
        """Scale and crop in one go: only what is kept is resized."""
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


def distort(image: Image.Image, draw: np.random.Generator) -> Image.Image:
    """Brightness, contrast, saturation and hue, each changed half of the time, contrast first or last.

    Brightness by up to 32 steps, contrast and saturation by factors of 0.5 to 1.5, hue by up to 36°.
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
    """What each of 256 values becomes, as Pillow takes it."""
    return [int(value) for value in values.round().clip(0, 255)] * channels
