"""Augmentation on the device, a batch at a time: crop, flip, RandAugment, erasing, mixup and cutmix.

Every image's draws are one row of uniform numbers, made on the CPU from (seed, step) for the whole batch of all
processes, of which each process takes its rows. So a step sees the same images however it is divided, on any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitfocus.data import randaugment
from vitfocus.data.sample_order import DRAWS, MIX, seed_for
from vitfocus.recipes.settings import Augment

_PLACE, _ERASE = 5, 7  # uniform numbers an image takes for its crop and flip, and for its erasing
_FIELD = 512  # side of the noise field that erasing cuts from


@dataclass
class Batch:
    """Normalised images, their labels, and the labels mixed in: the target is `share`·labels + `rest`·others.

    A batch that was never mixed has `share` None; else the two are scalars on the device.
    """

    images: Tensor
    labels: Tensor
    others: Tensor
    share: Tensor | None = None
    rest: Tensor | None = None


def draw_uniform(seed: int, step: int, batch: int, columns: int) -> Tensor:
    """The whole batch's uniform numbers, (batch, columns) on the CPU."""
    generator = torch.Generator().manual_seed(seed_for(seed, DRAWS, step))
    return torch.rand(batch, columns, generator=generator)


class Augmenter:
    """Carries an `Augment` section out. `device_crop`: images come whole and are cropped and changed here."""

    def __init__(
        self,
        section: Augment,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device | str,
        device_crop: bool,
    ) -> None:
        self.section, self.device_crop = section, device_crop
        self.mean = torch.tensor(mean, device=device)[:, None, None] * 255
        self.std = torch.tensor(std, device=device)[:, None, None] * 255
        wanted = section.randaugment if device_crop else ""
        self.policy = randaugment.parse_policy(wanted) if wanted else None
        layers = self.policy.layers if self.policy else 0
        self.columns = _PLACE + _ERASE + layers * randaugment.DRAWS
        generator = torch.Generator().manual_seed(0)
        self.field = torch.randn(3, _FIELD, _FIELD, generator=generator).to(device) if section.erase else None

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Images uint8 (B, C, H, W) become normalised floats; `uniform` (B, columns) holds their draws."""
        images, section = images.float(), self.section
        if self.device_crop:
            if section.crop == "pad":
                images = _pad_crop(images, uniform, section.padding)
            elif section.crop == "resized":
                images = _resized_crop(images, uniform, section.scale)
            if section.flip:
                images = torch.where((uniform[:, 4] < section.flip)[:, None, None, None], images.flip(3), images)
            if self.policy is not None:
                images = randaugment.rand_augment(images, uniform[:, _PLACE + _ERASE :], self.policy)
        images = (images - self.mean) / self.std
        if self.field is not None:
            images = _erase(images, uniform[:, _PLACE : _PLACE + _ERASE], section.erase, self.field)
        return images


def mix(batch: Batch, section: Augment, seed: int, step: int) -> Batch:
    """Mixup or cutmix between neighbours 2k and 2k+1, with one share for the step; the last of an odd batch stays.

    Neighbours, and not the reversed batch, so that a batch divided over processes is mixed as one.
    """
    numbers = draw_mix(section, seed, step, (int(batch.images.shape[-2]), int(batch.images.shape[-1])))
    return batch if numbers is None else apply_mix(batch, numbers.to(batch.images.device))


def draw_mix(section: Augment, seed: int, step: int, size: tuple[int, int]) -> Tensor | None:
    """What a step is mixed by, eight numbers, or None where a recipe never mixes.

    They are: how much of each image and of its neighbour is blended, then top, bottom, left and right of the box that
    is the neighbour's, then what the image's label and the neighbour's count. A step that is not mixed is one whose
    neighbour counts 0: as numbers, so that one recording of a step's work serves every step.
    """
    mixup, cutmix = section.mixup, section.cutmix
    if not (mixup or cutmix) or not section.mix_probability:
        return None
    draw = np.random.default_rng(seed_for(seed, MIX, step))
    skip, kind = draw.random(2)
    if skip >= section.mix_probability:
        return torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    use_cutmix = bool(cutmix) and (not mixup or kind < section.cutmix_share)
    share = float(draw.beta(cutmix, cutmix) if use_cutmix else draw.beta(mixup, mixup))
    if not use_cutmix:
        return torch.tensor([share, 1 - share, 0.0, 0.0, 0.0, 0.0, share, 1 - share])
    height, width = size
    side = math.sqrt(1 - share)
    top, bottom = _span(draw, height, side)
    left, right = _span(draw, width, side)
    share = 1 - (bottom - top) * (right - left) / (height * width)
    return torch.tensor([1.0, 0.0, top, bottom, left, right, share, 1 - share])


def apply_mix(batch: Batch, numbers: Tensor) -> Batch:
    """Mix by `draw_mix`'s numbers, which lie on the images' device."""
    images, labels, even = batch.images, batch.labels, len(batch.images) // 2 * 2
    swapped = torch.cat([images[:even].unflatten(0, (-1, 2)).flip(1).flatten(0, 1), images[even:]])
    others = torch.cat([labels[:even].view(-1, 2).flip(1).flatten(), labels[even:]])
    own, other, top, bottom, left, right, share, rest = numbers.unbind()
    rows = torch.arange(images.shape[-2], device=images.device)
    columns = torch.arange(images.shape[-1], device=images.device)
    inside = ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))
    blended = own * images + other * swapped
    blended[even:] = images[even:]
    return Batch(torch.where(inside, swapped, blended), labels, others, share, rest)


def enlarge(images: Tensor, side: int) -> Tensor:
    """Images (B, C, H, W) at `side` × `side` pixels, bicubic, as the suites enlarge them; 0: as they are."""
    return F.interpolate(images, size=(side, side), mode="bicubic", antialias=True) if side else images


def _span(draw: np.random.Generator, size: int, part: float) -> tuple[int, int]:
    cut, centre = int(size * part), int(draw.integers(size))
    return max(0, centre - cut // 2), min(size, centre + cut // 2)


def _pad_crop(images: Tensor, uniform: Tensor, padding: int) -> Tensor:
    """A crop of the image's own size out of the image with zeros around it."""
    batch, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    offset = (uniform[:, :2] * (2 * padding + 1)).long()
    rows = (offset[:, 0, None] + torch.arange(height, device=images.device))[:, None, :, None]
    columns = (offset[:, 1, None] + torch.arange(width, device=images.device))[:, None, None, :]
    index = (rows * (width + 2 * padding) + columns).expand(-1, channels, -1, -1)
    return padded.flatten(2).gather(2, index.reshape(batch, channels, -1)).view_as(images)


def _resized_crop(images: Tensor, uniform: Tensor, scale: tuple[float, float]) -> Tensor:
    """A random part of the area, aspect 3/4 to 4/3, resized to the image's own size, bilinear."""
    area = scale[0] + (scale[1] - scale[0]) * uniform[:, 2]
    ratio = torch.exp((2 * uniform[:, 3] - 1) * math.log(4 / 3))
    high, wide = (area / ratio).sqrt().clamp(max=1), (area * ratio).sqrt().clamp(max=1)
    down, across = (1 - high) * (2 * uniform[:, 0] - 1), (1 - wide) * (2 * uniform[:, 1] - 1)
    zero = torch.zeros_like(high)
    rows = torch.stack([torch.stack([wide, zero, across], 1), torch.stack([zero, high, down], 1)], 1)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False).round()


def _erase(images: Tensor, uniform: Tensor, probability: float, field: Tensor) -> Tensor:
    """Noise in one rectangle of 2 % to a third of the area, aspect 0.3 to 3.3, as in timm's "pixel" mode.

    The noise is cut out of a fixed field at a random place: it needs no draw of its own for every pixel.
    """
    height, width = images.shape[-2:]
    acts, size, aspect, down, across, row, column = uniform.unbind(1)
    area = (0.02 + (1 / 3 - 0.02) * size) * height * width
    ratio = torch.exp((2 * aspect - 1) * math.log(1 / 0.3))
    high = (area * ratio).sqrt().round().clamp(1, height - 1)
    wide = (area / ratio).sqrt().round().clamp(1, width - 1)
    top, left = (down * (height - high + 1)).floor(), (across * (width - wide + 1)).floor()
    y, x = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    inside_rows = (y >= top[:, None]) & (y < (top + high)[:, None])
    inside_columns = (x >= left[:, None]) & (x < (left + wide)[:, None])
    inside = (acts < probability)[:, None, None] & inside_rows[:, :, None] & inside_columns[:, None, :]
    rows = ((row * _FIELD).long()[:, None] + y) % _FIELD
    columns = ((column * _FIELD).long()[:, None] + x) % _FIELD
    noise = field[:, rows[:, :, None], columns[:, None, :]].transpose(0, 1)
    return torch.where(inside[:, None], noise.to(images.dtype), images)
