"""Weather: snow, frost and fog.

Each function takes uint8 images (B, 3, H, W), its setting and its draws, and returns uint8 images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitfocus.corruptions import frost as overlays
from vitfocus.corruptions.constants import Setting
from vitfocus.corruptions.draws import Draws
from vitfocus.corruptions.filters import clipped_zoom, streak, to_uint8


def snow(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Whiten the image and add two layers of streaked flakes, one the other turned by 180 degrees."""
    mean, spread, zoom, threshold, radius, sigma, keep = setting.constants
    height, width = x.shape[-2:]
    layer = draws.normal((1, height, width), stream=0).mul_(spread).add_(mean)
    layer = clipped_zoom(layer, zoom, "none" if setting.flavour == "any" else "centre")
    layer = torch.where(layer < threshold, 0.0, layer).clamp_(0, 1).mul_(255)
    if setting.flavour != "any":
        layer = layer.floor_()  # an 8-bit image went through ImageMagick
    angle = draws.uniform((), stream=1) * 90.0 - 135.0
    layer = streak(layer, radius, sigma, angle).add_(0.5).floor_()[..., :height, :width]
    image = x.float()
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device).view(1, 3, 1, 1)
    grey = (image * weights).sum(1, keepdim=True)
    white = torch.maximum(image, grey.mul_(1.5).add_(127.5))
    return to_uint8(image.mul_(keep).add_(white, alpha=1 - keep).add_(layer + layer.flip(-2, -1)))


def frost(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Lay a random crop of one of five frost photographs over the image; the sixth is never drawn."""
    image_weight, frost_weight = setting.constants
    height, width = x.shape[-2:]
    sheets = overlays.sheets(setting.frost, setting.flavour, height, width, x.device)
    which = draws.integers(0, len(sheets.heights), stream=0)
    top = draws.integers(0, (sheets.heights[which] - height).clamp_min(1), stream=1)
    left = draws.integers(0, (sheets.widths[which] - width).clamp_min(1), stream=2)
    stride = sheets.widths[which]
    rows = (top[:, None] + torch.arange(height, device=x.device)) * stride[:, None] + sheets.starts[which, None]
    columns = left[:, None] + torch.arange(width, device=x.device)
    index = (rows[:, :, None] + columns[:, None, :]).flatten()
    layer = sheets.pixels.index_select(1, index).view(3, len(draws), height, width).transpose(0, 1)
    # Weights with one decimal too many for float32: sums that are whole numbers stay whole in double.
    return to_uint8(x.double().mul_(image_weight).add_(layer, alpha=frost_weight))


def plasma(size: int, decay: float, draws: Draws) -> Tensor:
    """A cloud in [0, 1] by the diamond-square algorithm on a torus, (B, size, size); `size` is a power of two."""
    uniform = draws.uniform((size * size,)).mul_(2).sub_(1)
    cloud = torch.zeros(len(draws), size, size, device=uniform.device)
    used = 1  # the first point is 0
    wibble = 100.0

    def settle(total: Tensor) -> Tensor:
        nonlocal used
        count = total[0].numel()
        jitter = uniform[:, used : used + count].view(total.shape)
        used += count
        return (total / 4).add_(jitter, alpha=wibble * wibble)

    step = size
    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        total = corners + corners.roll(-1, 1)
        cloud[:, half::step, half::step] = settle(total + total.roll(-1, 2))
        middles = cloud[:, half::step, half::step]
        cloud[:, ::step, half::step] = settle(middles + middles.roll(1, 1) + corners + corners.roll(-1, 2))
        cloud[:, half::step, ::step] = settle(middles + middles.roll(1, 2) + corners + corners.roll(-1, 1))
        step = half
        wibble /= decay
    cloud -= cloud.amin((1, 2), keepdim=True)
    return cloud.div_(cloud.amax((1, 2), keepdim=True))


def fog(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Add a cloud and scale back to the image's own maximum."""
    amount, decay = setting.constants
    side = max(x.shape[-2:])
    base = {"imagenet": 256, "cifar": 32, "any": 1}[setting.flavour]
    cloud = plasma(max(base, 1 << (side - 1).bit_length()), decay, draws)[:, None, : x.shape[-2], : x.shape[-1]]
    brightest = x.amax((1, 2, 3), keepdim=True).float() / 255
    fogged = x + cloud * (255.0 * amount)
    return to_uint8(fogged.mul_(brightest / (brightest + amount)))
