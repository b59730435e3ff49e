"""The linear filters the corruptions share, with the boundary rules and the arithmetic of SciPy, OpenCV and Pillow.

Images are (..., H, W). A separable filter is two small matrices, one per axis, which represent any boundary rule
exactly and cost the same for any width; matrices are built once per (size, parameters, device).

The reference truncates float64 results to 8 bits, so deterministic filters use float64 as well: they equal the
reference pixel for pixel, and TF32 does not affect them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK = {"cpu": 32, "cuda": 256}  # rows of a band matrix applied at once: short for caches, long for GPUs


def fold(index: Tensor, size: int, mode: str) -> Tensor:
    """Map positions outside [0, size) inside: "nearest", "reflect" (d c b a | a b c d) or "mirror" (d c b | a b c d).

    >>> fold(torch.arange(-3, 6), 3, "reflect").tolist()
    [2, 1, 0, 0, 1, 2, 2, 1, 0]
    >>> fold(torch.arange(-3, 6), 3, "mirror").tolist()
    [1, 2, 1, 0, 1, 2, 1, 0, 1]
    """
    if mode == "nearest" or size == 1:
        return index.clamp(0, size - 1)
    if mode == "reflect":
        index = index.remainder(2 * size)
        return torch.minimum(index, 2 * size - 1 - index)
    index = index.remainder(2 * size - 2)
    return torch.minimum(index, 2 * size - 2 - index)


@functools.lru_cache(maxsize=32)
def _gaussian_matrix(size: int, sigma: float, mode: str, truncate: float, device: torch.device) -> Tensor:
    """SciPy's sampled Gaussian along one axis, (size, size)."""
    offset = torch.arange(-int(truncate * sigma + 0.5), int(truncate * sigma + 0.5) + 1)
    weights = torch.exp(-0.5 / (sigma * sigma) * offset.double() ** 2)
    weights = weights / weights.sum()
    position = torch.arange(size)[:, None] + offset
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix.scatter_add_(1, fold(position, size, mode), weights.expand(size, -1))
    return matrix.to(device)


def _band(x: Tensor, matrix: Tensor, radius: int, axis: int) -> Tensor:
    """Apply a band matrix along axis 1 or 2 of (N, H, W), in blocks that read only `radius` pixels around."""
    size = x.shape[axis]
    block = _BLOCK.get(x.device.type, _BLOCK["cuda"])
    if size <= 2 * block or 2 * radius + block >= size:
        return matrix @ x if axis == 1 else x @ matrix.mT
    result = torch.empty_like(x)
    for start in range(0, size, block):
        stop = min(start + block, size)
        low = max(start - radius, 0)
        width = min(stop + radius, size) - low
        part = matrix[start:stop, low : low + width].expand(len(x), -1, -1)
        source, target = x.narrow(axis, low, width), result.narrow(axis, start, stop - start)
        pair = (part, source) if axis == 1 else (source, part.mT)
        torch.bmm(*pair, out=target)
    return result


def gaussian(x: Tensor, sigma: float | Sequence[float], mode: str = "nearest", truncate: float = 4.0) -> Tensor:
    """Gaussian blur of the last two axes with SciPy's kernel and boundary rules; one sigma or one per axis, float64."""
    shape = x.shape
    x = x.double().flatten(0, -3) if x.dim() > 2 else x.double()[None]
    sigmas = (sigma, sigma) if isinstance(sigma, int | float) else sigma
    for axis, s in enumerate(sigmas, start=1):
        radius = int(truncate * s + 0.5)
        if radius:
            x = _band(x, _gaussian_matrix(x.shape[axis], float(s), mode, truncate, x.device), radius, axis)
    return x.reshape(shape)


def _fast_length(size: int) -> int:
    """The next FFT length with no prime factor above 5."""
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 1


@functools.lru_cache(maxsize=32)
def _spectrum(kernel: tuple[tuple[float, ...], ...], size: tuple[int, int], device: torch.device) -> Tensor:
    taps = torch.tensor(kernel, dtype=torch.float64).flip(0, 1)
    return torch.fft.rfft2(taps, s=size).to(device)


def _mirrored(x: Tensor, down: int, right: int) -> Tensor:
    """Pad (..., H, W) by `down` rows and `right` columns on each side, mirrored."""
    for axis, reach in ((-2, down), (-1, right)):
        size = x.shape[axis]
        x = x.index_select(axis, fold(torch.arange(-reach, size + reach, device=x.device), size, "mirror"))
    return x


def correlate(x: Tensor, kernel: tuple[tuple[float, ...], ...]) -> Tensor:
    """Correlation with a wide, odd, non-separable kernel through the FFT, mirrored at the border, float64."""
    height, width = x.shape[-2:]
    down, right = len(kernel) // 2, len(kernel[0]) // 2
    padded = _mirrored(x, down, right).double()
    size = (_fast_length(height + 2 * down), _fast_length(width + 2 * right))
    spectrum = torch.fft.rfft2(padded, s=size).mul_(_spectrum(kernel, size, x.device))
    result = torch.fft.irfft2(spectrum, s=size)
    return result[..., 2 * down : 2 * down + height, 2 * right : 2 * right + width]


def correlate3(x: Tensor, kernel: Sequence[Sequence[float]]) -> Tensor:
    """Correlation with a 3x3 kernel, mirrored at the border as in OpenCV; exact on whole numbers."""
    height, width = x.shape[-2:]
    padded = _mirrored(x, 1, 1)
    total = torch.zeros_like(x)
    for i, row in enumerate(kernel):
        for j, weight in enumerate(row):
            if weight:
                total.add_(padded[..., i : i + height, j : j + width], alpha=weight)
    return total


def clipped_zoom(x: Tensor, factor: float, trim: str = "centre") -> Tensor:
    """Crop the middle 1/factor and zoom it back with order-1 splines, corners on corners as SciPy does.

    The zoom can come out a few pixels larger than (H, W): `trim` cuts them off evenly ("centre"), at the bottom and
    right ("corner"), or not at all ("none").
    """
    shape = x.shape[-2:]
    crop = [math.ceil(size / factor) for size in shape]
    top, left = ((size - c) // 2 for size, c in zip(shape, crop, strict=True))
    zoomed = [round(c * factor) for c in crop]
    x = x[..., top : top + crop[0], left : left + crop[1]]
    if zoomed != crop:
        x = F.interpolate(x, size=zoomed, mode="bilinear", align_corners=True)
    if trim == "none":
        return x
    top, left = ((z - size) // 2 if trim == "centre" else 0 for z, size in zip(zoomed, shape, strict=True))
    return x[..., top : top + shape[0], left : left + shape[1]]


def streak(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """ImageMagick's motion blur: a one-sided Gaussian of 2 radius + 1 taps along an angle (degrees, one per image).

    Taps fall on whole pixels, ceil(step - 0.5) away, and edge pixels are replicated. (B, C, H, W) in any dtype;
    float32 out, unrounded.
    """
    width = 2 * radius + 1
    steps = torch.arange(width, dtype=torch.float64, device=x.device)
    heights = [math.exp(-(step**2) / (2.0 * sigma * sigma)) for step in range(width)]
    weights = [height / sum(heights) for height in heights]
    radians = torch.deg2rad(angle.double())[:, None]
    right = torch.ceil(steps * torch.cos(radians) - 0.5).long()
    down = torch.ceil(steps * torch.sin(radians) - 0.5).long()
    if x.device.type == "cpu":
        return _streak_by_slices(x, weights, down.tolist(), right.tolist())
    return _streak_by_gather(x, weights, down, right)


def _streak_by_gather(x: Tensor, weights: list[float], down: Tensor, right: Tensor) -> Tensor:
    """Every image of the batch at once, tap by tap: for devices with slow kernel launches."""
    batch, channels, height, width = x.shape
    flat = x.reshape(batch, channels, -1)
    total = torch.zeros(flat.shape, dtype=torch.float32, device=x.device)
    rows = torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device)
    for tap, weight in enumerate(weights):
        row = (rows + down[:, tap, None]).clamp_(0, height - 1).mul_(width)
        column = (columns + right[:, tap, None]).clamp_(0, width - 1)
        index = (row[:, :, None] + column[:, None, :]).view(batch, 1, -1).expand(-1, channels, -1)
        total.add_(flat.gather(2, index), alpha=weight)
    return total.view(x.shape)


def _streak_by_slices(x: Tensor, weights: list[float], down: list[list[int]], right: list[list[int]]) -> Tensor:
    """Image by image, each tap a slice of the padded image: for devices with slow gathers."""
    height, width = x.shape[-2:]
    reach = len(weights)
    padded = F.pad(x.float(), (reach, reach, reach, reach), mode="replicate")
    total = torch.zeros(x.shape, dtype=torch.float32)
    for image, target, dys, dxs in zip(padded, total, down, right, strict=True):
        for weight, dy, dx in zip(weights, dys, dxs, strict=True):
            top, left = reach + dy, reach + dx
            target.add_(image[:, top : top + height, left : left + width], alpha=weight)
    return total
