"""RandAugment for a whole batch on the device, with timm's operations, magnitudes and probabilities.

Images are float (B, C, H, W) with values 0..255. In each layer every image gets one of fifteen operations. The five
geometric operations are one affine map and the four enhancements one blend, so a layer takes a few passes over the
batch instead of fifteen. Interpolation is bilinear (timm draws bilinear or bicubic), the fill value is 128.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from vitfocus.core.errors import VitfocusError

OPERATIONS = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast",
    "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY",
)  # fmt: skip
DRAWS = 4  # uniform numbers per image and layer: whether to apply, operation, magnitude, sign
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
    """Apply the policy; `uniform` (B, layers · DRAWS) holds random numbers in [0, 1)."""
    for layer in range(policy.layers):
        acts, which, level, sign = uniform[:, layer * DRAWS : (layer + 1) * DRAWS].unbind(1)
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
    zero, one = torch.zeros_like(signed), torch.ones_like(signed)
    angle = torch.where(code == _CODE["Rotate"], -signed * math.radians(30), zero)
    shear_x = torch.where(code == _CODE["ShearX"], signed * 0.3, zero)
    shear_y = torch.where(code == _CODE["ShearY"], signed * 0.3, zero)
    shift_x = torch.where(code == _CODE["TranslateX"], signed * 0.45 * width, zero)
    shift_y = torch.where(code == _CODE["TranslateY"], signed * 0.45 * height, zero)
    cos, sin = angle.cos(), angle.sin()
    # In coordinates centred on the image, in pixels; shears act about the corner, which moves the centre.
    shift_x, shift_y = shift_x + shear_x * height / 2, shift_y + shear_y * width / 2
    rows = torch.stack(
        [
            torch.stack([cos * one, (sin + shear_x) * height / width, 2 * shift_x / width], 1),
            torch.stack([(shear_y - sin) * width / height, cos * one, 2 * shift_y / height], 1),
        ],
        1,
    )
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    return F.grid_sample(images - FILL, grid, mode="bilinear", padding_mode="zeros", align_corners=False) + FILL


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
