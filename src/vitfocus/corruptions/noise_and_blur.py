"""Noise, drawn independently for every value, and blurs: Gaussian, defocus, glass, motion, zoom.

Each function takes uint8 images (B, 3, H, W), its setting and its draws, and returns uint8 images.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from vitfocus.corruptions.base import Draws, Setting, to_uint8
from vitfocus.corruptions.filters import clipped_zoom, correlate, correlate3, gaussian, streak


def gaussian_noise(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Add normal noise."""
    noise = draws.normal(x.shape[1:])
    return to_uint8(noise.mul_(255.0 * setting.constants).add_(x))


def speckle_noise(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Add normal noise in proportion to the value."""
    noise = draws.normal(x.shape[1:])
    return to_uint8(noise.mul_(setting.constants).add_(1.0).mul_(x))


def impulse_noise(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Replace a share of the values, half by white (salt), half by black (pepper)."""
    draw = draws.uniform(x.shape[1:])
    salt, pepper = draw < setting.constants / 2, draw >= 1 - setting.constants / 2
    return x.masked_fill(salt, 255).masked_fill_(pepper, 0)


@functools.lru_cache(maxsize=16)
def _poisson_tables(photons: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Thresholds of the 256 Poisson laws that 8-bit values can have, and the 8-bit value of each count.

    Counts above `photons` are clipped to white anyway, so a row holds P(count <= k) for k < photons, scaled to 31 bits
    and padded to a power of two.
    """
    rate = torch.arange(256, dtype=torch.float64)[:, None] / 255 * photons
    k = torch.arange(photons, dtype=torch.float64)
    log_mass = torch.where(rate > 0, k * rate.clamp_min(1e-300).log(), torch.where(k == 0, 0.0, -torch.inf))
    cumulative = (log_mass - rate - torch.lgamma(k + 1)).exp().cumsum(1)
    size = 1 << photons.bit_length()
    table = torch.full((256, size), 2**31 - 1, dtype=torch.int32)
    table[:, :photons] = (cumulative * 2**31).clamp(max=2**31 - 1).to(torch.int32)
    counts = torch.arange(size, dtype=torch.float64) / photons
    return table.flatten().to(device), to_uint8(counts.clamp(0, 1) * 255).to(device)


def shot_noise(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Count photons: Poisson(value x photons) / photons, by exact inversion.

    A binary search in the cumulative distribution of the value, in integers, so that the count is the same on every
    device.
    """
    photons = setting.constants
    table, values = _poisson_tables(photons, x.device)
    size = 1 << photons.bit_length()
    draw = (draws.bits(x[0].numel()) >> 1 & 0x7FFFFFFF).flatten()
    start = x.flatten().to(torch.int32).mul_(size)
    found = start.clone()
    step = size // 2
    while step:
        above = draw >= table.index_select(0, found + (step - 1))
        found.add_(above, alpha=step)
        step //= 2
    return values.index_select(0, found.sub_(start)).view(x.shape)


def gaussian_blur(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Gaussian blur with replicated edges."""
    return to_uint8(gaussian(x, setting.constants))


@functools.lru_cache(maxsize=16)
def disk(radius: float, alias_sigma: float) -> tuple[tuple[float, ...], ...]:
    """The antialiased disk of the reference, in float32 as there, so that its sum differs from 1 by the same amount.

    A radius that reaches the edge of its grid (8 and 10) adds up to 1 % to the sum, through the mirrored border of the
    antialiasing blur, which brightens the image; it is kept.
    """
    reach = 8 if radius <= 8 else int(radius)
    line = np.arange(-reach, reach + 1)
    aliased = (line[:, None] ** 2 + line[None] ** 2 <= radius**2).astype(np.float32)
    aliased /= aliased.sum()
    half = 1 if radius <= 8 else 2
    taps = np.exp(-(np.arange(-half, half + 1) ** 2) / (2.0 * alias_sigma**2))
    taps = (taps / taps.sum()).astype(np.float32)
    padded = np.pad(aliased, half, mode="reflect")
    size = len(line)
    rows = sum(taps[i] * padded[:, i : i + size] for i in range(2 * half + 1))
    kernel = sum(taps[i] * rows[i : i + size] for i in range(2 * half + 1))
    return tuple(tuple(float(v) for v in row) for row in np.asarray(kernel))


def defocus_blur(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Correlate with a disk, mirrored at the edges."""
    kernel = disk(*setting.constants)
    reach = max(abs(i - len(kernel) // 2) for i, row in enumerate(kernel) if any(row))
    middle = slice(len(kernel) // 2 - reach, len(kernel) // 2 + reach + 1)
    kernel = tuple(row[middle] for row in kernel[middle])
    if reach == 1:
        return to_uint8(correlate3(x.double(), kernel))
    return to_uint8(correlate(x, kernel))


def motion_blur(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """A one-sided streak along an angle between -45 and 45 degrees."""
    radius, sigma = setting.constants
    angle = draws.uniform(()) * 90.0 - 45.0
    return to_uint8(streak(x, radius, sigma, angle))


def zoom_blur(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """The mean of the image and of its zooms, factor 1 among them; float32 sums, as in the reference."""
    stop, step = setting.constants
    image = x.double() / 255
    factors = np.arange(1, stop, step).tolist()
    trim = "corner" if setting.flavour == "any" else "centre"
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for factor in factors:
        total.add_(clipped_zoom(image, factor, trim).float())
    return to_uint8(total.add_(image.float()).div_(len(factors) + 1).clamp_(0, 1).mul_(255))


_JUMPS = 6


def _glass_sources(height: int, width: int, reach: int, draws: Draws, stream: int) -> Tensor:
    """Where each pixel's new value comes from in one pass of the glass blur: flat indices, (B, H*W).

    The reference scans from the bottom right and "swaps" each pixel with a neighbour at an offset in [-reach, reach-1];
    because the two sides are views of one array, the swap only copies: pixel <- neighbour. A neighbour later in raster
    order was overwritten before and passes on the value it received; an earlier one still has its old value. So the
    pixels form chains that run forward in raster order until they reach an unvisited pixel, and pointer doubling
    resolves all chains at once. A chain continues with a probability below 1/2, so 2**6 links are never reached.
    """
    device = draws.ids.device
    index = torch.arange(height * width, device=device).view(height, width)
    inner = (slice(None), slice(reach + 1, height - reach + 1), slice(reach + 1, width - reach + 1))
    area = index[inner[1:]]
    bits = draws.bits(area.numel(), stream).view(len(draws), *area.shape)
    span = 2 * reach
    across = ((bits & 0xFFFF) * span >> 16) - reach
    down = ((bits >> 16 & 0xFFFF) * span >> 16) - reach
    target = index.expand(len(draws), -1, -1).clone()
    target[inner] = area + (down * width + across)
    target = target.flatten(1)
    if reach == 1:  # offsets are -1 and 0: nothing read has been written yet
        return target
    position = index.flatten()
    visited = torch.zeros(height, width, dtype=torch.bool, device=device)
    visited[inner[1:]] = True
    forward = (target > position) & visited.flatten()[target]
    # The end of a chain points to itself during pointer jumping; its own target is looked up last.
    follow = torch.where(forward, target, position)
    for _ in range(_JUMPS):
        follow = follow.gather(1, follow)
    return target.gather(1, follow)


def glass_blur(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Blur, shuffle pixels locally, blur again."""
    sigma, reach, passes = setting.constants
    height, width = x.shape[-2:]
    x = to_uint8(gaussian(x, sigma))
    if min(height, width) > 2 * reach:
        source = _glass_sources(height, width, reach, draws, 0)
        for step in range(1, passes):
            source = source.gather(1, _glass_sources(height, width, reach, draws, step))
        x = x.flatten(2).gather(2, source.unsqueeze(1).expand(-1, x.shape[1], -1)).view(x.shape)
    return to_uint8(gaussian(x, sigma))
