"""Spatter: drops of water that catch the light, or mud.

The water's relief is an edge map, its distance transform, equalised and embossed: OpenCV's Canny, 5x5 chamfer distance
and histogram equalisation, here for a whole batch at once and on any device, in the same integer arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.corruptions.constants import Setting
from vitfocus.corruptions.draws import Draws
from vitfocus.corruptions.filters import correlate3, gaussian, to_uint8

_WATER = (175, 238, 238)
_MUD = (63, 42, 20)
_UNIT = 10_000  # distances are whole numbers of ten-thousandths of a pixel
_FARTHEST = 20 * _UNIT
_TAN22 = 13573  # tan(22.5 degrees) with 15 fractional bits
_GROW = 48  # pixels a weak edge can continue a strong one
_STEPS = ((10_000, ((0, 1), (1, 0))), (14_000, ((1, 1), (1, -1))), (21_969, ((1, 2), (2, 1), (1, -2), (2, -1))))


def canny(x: Tensor, low: int, high: int) -> Tensor:
    """Canny edges of whole-valued images (B, H, W), L1 gradient, as a mask."""
    padded = F.pad(x.float()[:, None], (1, 1, 1, 1), mode="replicate")[:, 0].int()
    height, width = x.shape[-2:]
    around = {(i, j): padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)}
    right = around[0, 2] + 2 * around[1, 2] + around[2, 2] - around[0, 0] - 2 * around[1, 0] - around[2, 0]
    down = around[2, 0] + 2 * around[2, 1] + around[2, 2] - around[0, 0] - 2 * around[0, 1] - around[0, 2]
    across, along = right.abs(), down.abs()
    size = across + along
    flat = across * _TAN22
    lifted = along << 15
    horizontal = lifted < flat
    vertical = lifted > flat + (across << 16)
    falling = (right ^ down) < 0
    ring = F.pad(size, (1, 1, 1, 1))
    near = {(i, j): ring[:, 1 + i : 1 + i + height, 1 + j : 1 + j + width] for i in (-1, 0, 1) for j in (-1, 0, 1)}
    peak = torch.where(
        falling, (size > near[-1, 1]) & (size > near[1, -1]), (size > near[-1, -1]) & (size > near[1, 1])
    )
    peak = torch.where(vertical, (size > near[-1, 0]) & (size >= near[1, 0]), peak)
    peak = torch.where(horizontal, (size > near[0, -1]) & (size >= near[0, 1]), peak)
    candidate = peak & (size > low)
    edge = torch.zeros(len(x), height + 2, width + 2, dtype=torch.bool, device=x.device)
    inside = edge[:, 1:-1, 1:-1]
    inside.copy_(candidate & (size > high))
    for _ in range(_GROW):
        wide = edge[:, :, :-2] | edge[:, :, 1:-1] | edge[:, :, 2:]
        grown = (wide[:, :-2] | wide[:, 1:-1] | wide[:, 2:]) & candidate
        if x.device.type == "cpu" and torch.equal(grown, inside):
            break
        inside.copy_(grown)
    return inside


def distance(edge: Tensor) -> Tensor:
    """Chamfer distance to the nearest edge, at most 20 pixels, in 1/10,000 pixel: int32 (B, H, W).

    The chamfer norm is a cheapest walk of axial, diagonal and knight's moves. Their order is free, so each direction is
    relaxed on its own, by strides that double; such a walk never leaves the rectangle between its ends.
    """
    far = torch.full_like(edge, _FARTHEST, dtype=torch.int32).masked_fill_(edge, 0)
    for cost, directions in _STEPS:
        for down, right in directions:
            stride = 1
            while stride * cost < _FARTHEST:
                for sign in (stride, -stride):
                    _relax_(far, down * sign, right * sign, stride * cost)
                stride *= 2
    return far


def _relax_(far: Tensor, down: int, right: int, cost: int) -> None:
    """far[i, j] = min(far[i, j], far[i + down, j + right] + cost) wherever both exist."""
    height, width = far.shape[-2:]
    if abs(down) >= height or abs(right) >= width:
        return
    here = (slice(max(-down, 0), height - max(down, 0)), slice(max(-right, 0), width - max(right, 0)))
    there = (slice(max(down, 0), height - max(-down, 0)), slice(max(right, 0), width - max(-right, 0)))
    far[:, *here].clamp_max_(far[:, *there] + cost)


def _equalise(x: Tensor) -> Tensor:
    """Histogram equalisation of whole values below 256 in (B, H, W), as OpenCV: the lowest present value becomes 0."""
    flat = x.flatten(1).long()
    histogram = torch.zeros(len(x), 256, dtype=torch.int64, device=x.device)
    histogram.scatter_add_(1, flat, torch.ones_like(flat))
    lowest = flat.amin(1, keepdim=True)
    first = histogram.gather(1, lowest)
    total = flat.shape[1]
    scale = 255.0 / (total - first).clamp_min(1).float()
    table = ((histogram.cumsum(1) - first).float() * scale).round_().clamp_(0, 255)
    table = torch.where(first == total, lowest.float(), table)
    return table.gather(1, flat).view(x.shape)


def _relief(layer: Tensor) -> Tensor:
    """Light on the water, (B, H, W) float32, from its 8-bit height."""
    box = [[1] * 3] * 3
    far = correlate3(distance(canny(layer, 50, 150)), box).div_(9 * _UNIT, rounding_mode="floor")
    embossed = correlate3(_equalise(far), [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]).clamp_(0, 255)
    return correlate3(embossed, box).div_(9).round_()


def spatter(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Spatter (B, 3, H, W) uint8 images with water (severities 1 to 3) or mud (4 and 5)."""
    mean, spread, sigma, threshold, strength, mud = setting.constants
    layer = draws.normal(x.shape[-2:]).mul_(spread).add_(mean)
    layer = gaussian(layer, sigma)
    colour = torch.tensor(_MUD if mud else _WATER, device=x.device).float().view(1, 3, 1, 1)
    if mud:
        cover = gaussian((layer > threshold).to(layer.dtype), strength).float()
        cover = torch.where(cover < 0.8, 0.0, cover)[:, None]
        return to_uint8(x * (1 - cover) + colour * cover)
    water = torch.where(layer < threshold, 0.0, layer).mul_(255).clamp_(0, 255).floor_().int()
    light = _relief(water) * water
    light = light / light.amax((1, 2), keepdim=True).clamp_min(1)
    return to_uint8((light * strength)[:, None] * colour + x)
