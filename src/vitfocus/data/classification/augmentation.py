"""Augmentation of whole batches on the device: crop, flip, RandAugment, random erasing, mixup and cutmix.

The random numbers of an image are one row of uniform numbers, drawn on the CPU from (seed, step) for the global batch.
Each process takes its rows, so a step sees the same images on any device and any number of processes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.data.image_files import Normalise
from vitfocus.data.loader import DRAWS, MIX, seed_for
from vitfocus.recipes import Augment

_CROP, _ERASE = 5, 7  # uniform numbers per image: for crop and flip, and for erasing
_NOISE = 512  # side of the noise image that erasing copies from


@dataclass
class ClassificationBatch:
    """Normalised images and their labels, mixed: the target is `weight`·labels + `other_weight`·other_labels.

    The weights are scalars on the device; None in a batch that was not mixed.
    """

    images: Tensor
    labels: Tensor
    other_labels: Tensor
    weight: Tensor | None = None
    other_weight: Tensor | None = None


def draw_uniform(seed: int, step: int, batch: int, columns: int) -> Tensor:
    """The uniform numbers of the global batch, (batch, columns) on the CPU."""
    generator = torch.Generator().manual_seed(seed_for(seed, DRAWS, step))
    return torch.rand(batch, columns, generator=generator)


class Augmenter:
    """Applies the [augment] section of a recipe to batches on a device.

    Args:
        section: What to apply.
        mean: Mean of each channel, in [0, 1], for the normalisation.
        std: Standard deviation of each channel.
        device: Where the batches are.
        device_crop: Whether crop, flip and RandAugment happen here too; otherwise timm's transform did them already.
    """

    def __init__(
        self,
        section: Augment,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device | str,
        device_crop: bool,
    ) -> None:
        self.section, self.device_crop = section, device_crop
        self.normalise = Normalise(mean, std, device)
        wanted = section.randaugment if device_crop else ""
        self.policy = parse_policy(wanted) if wanted else None
        layers = self.policy.layers if self.policy else 0
        self.columns = _CROP + _ERASE + layers * RANDAUGMENT_DRAWS
        generator = torch.Generator().manual_seed(0)
        self.noise = torch.randn(3, _NOISE, _NOISE, generator=generator).to(device) if section.erase else None

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Augment uint8 images (B, C, H, W) into normalised floats; `uniform` is (B, columns)."""
        images, section = images.float(), self.section
        if self.device_crop:
            if section.crop == "pad":
                images = _pad_crop(images, uniform, section.padding)
            elif section.crop == "resized":
                images = _resized_crop(images, uniform, section.scale)
            if section.flip:
                images = torch.where((uniform[:, 4] < section.flip)[:, None, None, None], images.flip(3), images)
            if self.policy is not None:
                images = rand_augment(images, uniform[:, _CROP + _ERASE :], self.policy)
        images = self.normalise(images)
        if self.noise is not None:
            images = _erase(images, uniform[:, _CROP : _CROP + _ERASE], section.erase, self.noise)
        return images


def mix(batch: ClassificationBatch, section: Augment, seed: int, step: int) -> ClassificationBatch:
    """Mixup or cutmix of images 2k and 2k+1, with one weight per step; the last image of an odd batch is not mixed.

    timm mixes a batch with its reverse; neighbours give the same result when the batch is divided over processes.
    """
    numbers = draw_mix(section, seed, step, (int(batch.images.shape[-2]), int(batch.images.shape[-1])))
    return batch if numbers is None else apply_mix(batch, numbers.to(batch.images.device))


def draw_mix(section: Augment, seed: int, step: int, size: tuple[int, int]) -> Tensor | None:
    """The eight parameters for mixing a step's images, or None if the recipe never mixes.

    They are the blending weights of each image and its neighbour, the top, bottom, left and right of the box taken from
    the neighbour, and the weights of the image's label and the neighbour's. In a step that is not mixed the neighbour
    has weight 0, so the same operations, and the same CUDA graph, serve every step.
    """
    mixup, cutmix = section.mixup, section.cutmix
    if not (mixup or cutmix) or not section.mix_probability:
        return None
    draw = np.random.default_rng(seed_for(seed, MIX, step))
    skip, kind = draw.random(2)
    if skip >= section.mix_probability:
        return torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    use_cutmix = bool(cutmix) and (not mixup or kind < section.cutmix_share)
    weight = float(draw.beta(cutmix, cutmix) if use_cutmix else draw.beta(mixup, mixup))
    if not use_cutmix:
        return torch.tensor([weight, 1 - weight, 0.0, 0.0, 0.0, 0.0, weight, 1 - weight])
    height, width = size
    side = math.sqrt(1 - weight)
    top, bottom = _span(draw, height, side)
    left, right = _span(draw, width, side)
    weight = 1 - (bottom - top) * (right - left) / (height * width)
    return torch.tensor([1.0, 0.0, top, bottom, left, right, weight, 1 - weight])


def apply_mix(batch: ClassificationBatch, numbers: Tensor) -> ClassificationBatch:
    """Mix a batch with the parameters from `draw_mix`, which are on the images' device."""
    images, labels, even = batch.images, batch.labels, len(batch.images) // 2 * 2
    swapped = torch.cat([images[:even].unflatten(0, (-1, 2)).flip(1).flatten(0, 1), images[even:]])
    other_labels = torch.cat([labels[:even].view(-1, 2).flip(1).flatten(), labels[even:]])
    blend, other_blend, top, bottom, left, right, weight, other_weight = numbers.unbind()
    rows = torch.arange(images.shape[-2], device=images.device)
    columns = torch.arange(images.shape[-1], device=images.device)
    inside = ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))
    blended = blend * images + other_blend * swapped
    blended[even:] = images[even:]
    return ClassificationBatch(torch.where(inside, swapped, blended), labels, other_labels, weight, other_weight)


def augment_patches(images: Tensor, side: int, normalise: Normalise) -> Tensor:
    """RVT's patch-wise augmentation of normalised images (B, C, H, W), cut into patches of `side` pixels.

    Each patch gets, each with probability 0.1: a random crop of 85 % to 100 % of its area resized back, Gaussian noise
    of 0.01, and a horizontal flip. Values are clipped to the range of pixels. The draws come from torch's generator.
    """
    batch, channels, height, width = images.shape
    patches = images.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    uniform = torch.rand(6, len(patches), device=images.device)
    crops, noisy, flips = (uniform[:3] < 0.1)[:, :, None, None, None]
    size = (side * (0.85 + 0.15 * uniform[3]).sqrt()).round()
    left, top = ((side - size + 1) * uniform[4:]).floor()
    zero = torch.zeros_like(size)
    scale, across, down = torch.stack([size - 1, 2 * left + size - side, 2 * top + size - side]) / (side - 1)
    resized = _warp(patches, (scale, zero, across, zero, scale, down), "border", align_corners=True)
    patches = torch.where(crops, resized, patches)
    patches = torch.where(noisy, patches + 0.01 * torch.randn_like(patches), patches)
    patches = torch.where(flips, patches.flip(3), patches)
    whole = patches.unflatten(0, (batch, height // side, width // side)).permute(0, 3, 1, 4, 2, 5)
    black, white = normalise(torch.tensor([0.0, 255.0], device=images.device).expand(1, channels, 1, 2)).split(1, 3)
    return whole.reshape(images.shape).clamp(black, white)


def enlarge(images: Tensor, side: int) -> Tensor:
    """Resize images (B, C, H, W) to `side` × `side` pixels, bicubic as in the robustness suites; 0 does nothing."""
    return F.interpolate(images, size=(side, side), mode="bicubic", antialias=True) if side else images


def _span(draw: np.random.Generator, size: int, part: float) -> tuple[int, int]:
    cut, centre = int(size * part), int(draw.integers(size))
    return max(0, centre - cut // 2), min(size, centre + cut // 2)


def _pad_crop(images: Tensor, uniform: Tensor, padding: int) -> Tensor:
    """Pad with zeros and crop to the original size at a random position."""
    batch, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    offset = (uniform[:, :2] * (2 * padding + 1)).long()
    rows = (offset[:, 0, None] + torch.arange(height, device=images.device))[:, None, :, None]
    columns = (offset[:, 1, None] + torch.arange(width, device=images.device))[:, None, None, :]
    index = (rows * (width + 2 * padding) + columns).expand(-1, channels, -1, -1)
    return padded.flatten(2).gather(2, index.reshape(batch, channels, -1)).view_as(images)


def _resized_crop(images: Tensor, uniform: Tensor, scale: tuple[float, float]) -> Tensor:
    """Crop a random share of the area with an aspect ratio of 3/4 to 4/3, and resize it back, bilinear."""
    area = scale[0] + (scale[1] - scale[0]) * uniform[:, 2]
    ratio = torch.exp((2 * uniform[:, 3] - 1) * math.log(4 / 3))
    high, wide = (area / ratio).sqrt().clamp(max=1), (area * ratio).sqrt().clamp(max=1)
    down, across = (1 - high) * (2 * uniform[:, 0] - 1), (1 - wide) * (2 * uniform[:, 1] - 1)
    zero = torch.zeros_like(high)
    return _warp(images, (wide, zero, across, zero, high, down), "border").round()


def _warp(images: Tensor, matrix: tuple[Tensor, ...], padding_mode: str, align_corners: bool = False) -> Tensor:
    """Sample images (B, C, H, W) at affinely transformed positions; `matrix` holds the six entries (B,), row by row."""
    rows = torch.stack(matrix, 1).unflatten(1, (2, 3)).to(images.dtype)
    grid = F.affine_grid(rows, list(images.shape), align_corners=align_corners)
    return F.grid_sample(images, grid, padding_mode=padding_mode, align_corners=align_corners)


def _erase(images: Tensor, uniform: Tensor, probability: float, noise: Tensor) -> Tensor:
    """Fill one rectangle of 2 % to 33 % of the area, aspect ratio 0.3 to 3.3, with noise, as timm's "pixel" mode.

    The noise is a random crop of a fixed noise image, so no random number per pixel is needed.
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
    rows = ((row * _NOISE).long()[:, None] + y) % _NOISE
    columns = ((column * _NOISE).long()[:, None] + x) % _NOISE
    fill = noise[:, rows[:, :, None], columns[:, None, :]].transpose(0, 1)
    return torch.where(inside[:, None], fill.to(images.dtype), images)


OPERATIONS = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast",
    "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY",
)  # fmt: skip
RANDAUGMENT_DRAWS = 4  # uniform numbers per image and layer: whether to apply, operation, magnitude, sign
FILL = 128.0
_CODE = {name: index for index, name in enumerate(OPERATIONS)}


@dataclass(frozen=True)
class Policy:
    """Magnitude (0..10), its standard deviation, layers and their probability; `increasing` is timm's inc1."""

    magnitude: float = 9.0
    spread: float = 0.5
    layers: int = 2
    probability: float = 0.5
    increasing: bool = True


def parse_policy(text: str) -> Policy:
    """Parse a policy in timm's notation.

    >>> parse_policy("rand-m9-mstd0.5-inc1")
    Policy(magnitude=9.0, spread=0.5, layers=2, probability=0.5, increasing=True)
    """
    head, *parts = text.split("-")
    found = {"m": 10.0, "mstd": 0.0, "n": 2.0, "p": 0.5, "inc": 0.0}
    for part in parts:
        match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d*)?)", part)
        if match is None or match[1] not in found:
            raise VitfocusError(
                f"{part!r} in {text!r} is not an option of RandAugment; expected m9, mstd0.5, n2, p0.5 or inc1."
            )
        found[match[1]] = float(match[2])
    if head != "rand":
        raise VitfocusError(f"augment.randaugment={text!r} is not a policy; expected the form rand-m9-mstd0.5-inc1.")
    return Policy(found["m"], found["mstd"], int(found["n"]), found["p"], bool(found["inc"]))


def rand_augment(images: Tensor, uniform: Tensor, policy: Policy) -> Tensor:
    """Apply the policy; `uniform` (B, layers · RANDAUGMENT_DRAWS) holds random numbers in [0, 1)."""
    for layer in range(policy.layers):
        acts, which, level, sign = uniform[:, layer * RANDAUGMENT_DRAWS : (layer + 1) * RANDAUGMENT_DRAWS].unbind(1)
        noise = torch.erfinv((2 * level - 1).clamp(-0.9999, 0.9999)) * math.sqrt(2)
        magnitude = (policy.magnitude + policy.spread * noise).clamp(0, 10) / 10
        code = (which * len(OPERATIONS)).long().clamp(max=len(OPERATIONS) - 1)
        code = torch.where(acts < policy.probability, code, -1)
        images = apply_operations(images, code, magnitude, torch.where(sign < 0.5, -1.0, 1.0), policy.increasing)
    return images


def apply_operations(images: Tensor, code: Tensor, magnitude: Tensor, sign: Tensor, increasing: bool = True) -> Tensor:
    """Apply one operation per image: `code` indexes OPERATIONS (-1: none), `magnitude` is in [0, 1], `sign` -1 or 1."""

    def chosen(*names: str) -> Tensor:
        return torch.stack([code == _CODE[name] for name in names]).any(0)[:, None, None, None]

    signed = magnitude * sign
    moved = _affine(images, code, signed)
    result = torch.where(chosen("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"), moved, images)
    factor = (1 + 0.9 * signed).clamp(min=0.1) if increasing else 0.1 + 1.8 * magnitude
    blended = _blend(images, code, factor[:, None, None, None])
    result = torch.where(chosen("Color", "Contrast", "Brightness", "Sharpness"), blended, result)
    bits = (magnitude * 4).floor()
    step = 2 ** (8 - (4 - bits if increasing else bits))[:, None, None, None]
    result = torch.where(chosen("Posterize"), (images / step).floor() * step, result)
    threshold = (magnitude * 256).floor()
    threshold = torch.where(code == _CODE["Invert"], 0, 256 - threshold if increasing else threshold)
    turned = torch.where(images < threshold[:, None, None, None], images, 255 - images)
    result = torch.where(chosen("Solarize", "Invert"), turned, result)
    lifted = (images + (magnitude * 110).floor()[:, None, None, None]).clamp(max=255)
    result = torch.where(chosen("SolarizeAdd"), torch.where(images < 128, lifted, images), result)
    result = torch.where(chosen("AutoContrast"), auto_contrast(images), result)
    result = torch.where(chosen("Equalize"), equalize(images), result)
    return result.round().clamp(0, 255)


def auto_contrast(images: Tensor) -> Tensor:
    """Stretch each channel to 0..255; a constant channel is unchanged."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    scale = 255 / (high - low).clamp(min=1)
    return torch.where(high > low, ((images - low) * scale).floor().clamp(0, 255), images)


def equalize(images: Tensor) -> Tensor:
    """Equalise the histogram of each channel, with Pillow's arithmetic."""
    batch, channels, height, width = images.shape
    values = images.long().view(batch * channels, -1)
    counts = torch.zeros(batch * channels, 256, dtype=torch.long, device=images.device)
    counts.scatter_add_(1, values, torch.ones_like(values))
    last = torch.where(counts > 0, torch.arange(256, device=images.device), 0).amax(1, keepdim=True)
    step = (height * width - counts.gather(1, last)) // 255
    below = counts.cumsum(1) - counts
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device))
    return table.gather(1, values).view_as(images).to(images.dtype)


def _blend(images: Tensor, code: Tensor, factor: Tensor) -> Tensor:
    """Interpolate with grey, the mean grey, black or a smoothed copy, as Pillow's ImageEnhance does."""
    weights = images.new_tensor([0.299, 0.587, 0.114])
    grey = (images * weights[:, None, None]).sum(1, keepdim=True).round() if images.shape[1] == 3 else images
    code = code[:, None, None, None]
    other = torch.where(code == _CODE["Color"], grey, torch.zeros_like(images))
    other = torch.where(code == _CODE["Contrast"], grey.mean((1, 2, 3), keepdim=True).add(0.5).floor(), other)
    other = torch.where(code == _CODE["Sharpness"], _smooth(images), other)
    return (other + factor * (images - other) + 1e-3).floor().clamp(0, 255)


def _smooth(images: Tensor) -> Tensor:
    """Pillow's SMOOTH filter: weights of 1 around a 5, divided by 13; the border is unchanged."""
    inner = (F.avg_pool2d(images, 3, 1) * 9 + 4 * images[..., 1:-1, 1:-1]) / 13
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = inner.round()
    return smooth


def _affine(images: Tensor, code: Tensor, signed: Tensor) -> Tensor:
    """Rotate, shear and translate with Pillow's conventions: shears and shifts are relative to the top left corner."""
    height, width = images.shape[-2:]
    zero = torch.zeros_like(signed)
    angle = torch.where(code == _CODE["Rotate"], -signed * math.radians(30), zero)
    shear_x = torch.where(code == _CODE["ShearX"], signed * 0.3, zero)
    shear_y = torch.where(code == _CODE["ShearY"], signed * 0.3, zero)
    shift_x = torch.where(code == _CODE["TranslateX"], signed * 0.45 * width, zero)
    shift_y = torch.where(code == _CODE["TranslateY"], signed * 0.45 * height, zero)
    cos, sin = angle.cos(), angle.sin()
    # In coordinates centred on the image, in pixels; shears act about the corner, which moves the centre.
    shift_x, shift_y = shift_x + shear_x * height / 2, shift_y + shear_y * width / 2
    first_row = cos, (sin + shear_x) * height / width, 2 * shift_x / width
    second_row = (shear_y - sin) * width / height, cos, 2 * shift_y / height
    return _warp(images - FILL, (*first_row, *second_row), "zeros") + FILL


def fix_posterize(transform: Any) -> Any:
    """Make posterize of timm's RandAugment return black for 0 bits, which Pillow 13 refuses."""
    from timm.data.auto_augment import posterize

    for step in transform.transforms:
        for operation in getattr(step, "ops", ()):
            if getattr(operation, "aug_fn", None) is posterize:
                operation.aug_fn = _posterise
    return transform


def _posterise(image: Any, bits: int, **_: Any) -> Any:
    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)
