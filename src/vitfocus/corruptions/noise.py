"""Noise: drawn independently for every value of every channel.

Each function takes uint8 images (B, 3, H, W), its setting and its draws, and returns uint8 images.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vitfocus.corruptions.constants import Setting
from vitfocus.corruptions.draws import Draws
from vitfocus.corruptions.filters import to_uint8


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

    A binary search over the value's own cumulative law, in integers, so that every device finds the same count.
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
