"""Mixing patches: products of tokens (B, N, C) with the matrix M of mixing coefficients, made in registers.

M has a row for each patch: M[i, j] is the weight of patch j in patch i, nonzero only where j lies on one of the rings
of eight around i, one ring per dilation. A program owns a rectangle of patches; what they need lies in a window around
it. It makes the rectangle's part of M once and multiplies it with a few channels of the window at a time, so that loads
of the next channels overlap with the product. Prefix tokens pass through.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.backends import on_device_of_first
from vitfocus.kernels.shared_memory import available, power_of_two

#: Programs that keep a large GPU busy.
BUSY = 264


@triton.jit
def _rectangle(block, height, width, BH: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr):
    """The patches that a program owns: row, column, and whether they exist; also the first row and column."""
    across = tl.cdiv(width, BW)
    top, left = (block // across) * BH, (block % across) * BW
    place = tl.arange(0, BM)
    row, column = top + place // BW, left + place % BW
    return top, left, row, column, (place < BH * BW) & (row < height) & (column < width)


@triton.jit
def _window(top, left, height, width, REACH: tl.constexpr, NH: tl.constexpr, NW: tl.constexpr, BN: tl.constexpr):
    """The NH × NW patches around a rectangle: row, column, index, and whether they exist; the others lie far away."""
    first_row = tl.maximum(tl.minimum(top - REACH, height - NH), 0)
    first_column = tl.maximum(tl.minimum(left - REACH, width - NW), 0)
    place = tl.arange(0, BN)
    ok = place < NH * NW
    row, column = tl.where(ok, first_row + place // NW, -65536), first_column + place % NW
    return row, column, row * width + column, ok


@triton.jit
def _rings(row, column, their_row, their_column):
    """Which ring around patch i patch j is on, for a tile of pairs: 0 itself, k the k-th, -1 none of them."""
    down = tl.abs(row[:, None] - their_row[None, :])
    across = tl.abs(column[:, None] - their_column[None, :])
    far, near = tl.maximum(down, across), tl.minimum(down, across)
    return tl.where((near == 0) | (near == far), far, -1)


@triton.jit
def _coefficients(weights, row, column, their_row, their_column, patch, ok, K: tl.constexpr):
    """Coefficients of a tile of pairs, each from the K weights of `patch`, the second of the pair.

    A thread then has few patches to load weights for: a warp's 32 threads lie along the second dimension of a tile.
    """
    ring = _rings(row, column, their_row, their_column)
    own = tl.load(weights + patch * K, mask=ok, other=0.0)
    made = tl.zeros(ring.shape, tl.float32)
    for k in tl.static_range(1, K):
        share = tl.load(weights + patch * K + k, mask=ok, other=0.0) / 9
        own += share
        made = tl.where(ring == k, share[None, :], made)
    return tl.where(ring == 0, own[None, :], made)


@triton.jit
def mix(tokens, weights, spread, matrix, out, count, height, width, prefix, C, groups, chunks,
        PRECISION: tl.constexpr, TRANSPOSE: tl.constexpr, ADD: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
        KEPT: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, NH: tl.constexpr, NW: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """out = M · tokens or, with TRANSPOSE, Mᵀ · tokens; with ADD plus spread (B, N, P) · matrix (P, C)."""
    blocks = tl.cdiv(height, BH) * tl.cdiv(width, BW)
    program = tl.program_id(0)
    block, group, batch = program % blocks, (program // blocks) % groups, (program // (blocks * groups)).to(tl.int64)
    top, left, row, column, ok = _rectangle(block, height, width, BH, BW, BM)
    their_row, their_column, theirs, there = _window(top, left, height, width, K - 1, NH, NW, BN)
    patch = row * width + column
    mine = weights + batch * (height * width) * K
    dtype: tl.constexpr = tokens.dtype.element_ty
    if TRANSPOSE:
        made = _coefficients(mine, row, column, their_row, their_column, theirs, there, K).to(dtype)
    else:
        made = tl.trans(_coefficients(mine, their_row, their_column, row, column, patch, ok, K).to(dtype))
    first = batch * count + prefix
    image, image_out = tokens + first * C, out + first * C
    if ADD:
        taps = tl.arange(0, PP)
        near = spread + first * P + patch[:, None] * P + taps[None, :]
        slopes = tl.load(near, mask=ok[:, None] & (taps < P)[None, :], other=0.0)
    token = tl.arange(0, KEPT)
    kept = token < tl.where(block == 0, prefix, 0)  # prefix tokens, which one program of an image copies
    for chunk in tl.range(group * chunks, (group + 1) * chunks, num_stages=STAGES):
        channels = chunk * BC + tl.arange(0, BC)
        inside = ((channels < C) | EVEN)[None, :]
        alone = (token - prefix)[:, None] * C + channels[None, :]
        value = tl.load(image + alone, mask=kept[:, None] & inside, other=0.0)
        tile = tl.load(image + theirs[:, None] * C + channels[None, :], mask=there[:, None] & inside, other=0.0)
        mixed = tl.dot(made, tile, input_precision=PRECISION)
        if ADD:
            rows = tl.load(matrix + taps[:, None] * C + channels[None, :], mask=(taps < P)[:, None] & inside, other=0.0)
            mixed = tl.dot(slopes, rows, mixed, input_precision=PRECISION)
        place = patch[:, None] * C + channels[None, :]
        tl.store(image_out + place, mixed.to(out.dtype.element_ty), mask=ok[:, None] & inside)
        tl.store(image_out + alone, value.to(out.dtype.element_ty), mask=kept[:, None] & inside)


@triton.jit
def score_gradient(tokens, weights, gradient, made, count, height, width, prefix, C, PRECISION: tl.constexpr,
                   EVEN: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, NH: tl.constexpr,
                   NW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """The scores' gradient (B, H·W, K): gradient · tokensᵀ is that of each M[i, j], summed over each ring."""
    blocks = tl.cdiv(height, BH) * tl.cdiv(width, BW)
    block, batch = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    top, left, row, column, ok = _rectangle(block, height, width, BH, BW, BM)
    their_row, their_column, theirs, there = _window(top, left, height, width, K - 1, NH, NW, BN)
    patch = row * width + column
    start = (batch * count + prefix) * C
    image, slope = tokens + start, gradient + start
    worth = tl.zeros([BM, BN], tl.float32)
    for channel in tl.range(0, C, BC, num_stages=STAGES):
        channels = channel + tl.arange(0, BC)
        inside = ((channels < C) | EVEN)[None, :]
        left_tile = tl.load(slope + patch[:, None] * C + channels[None, :], mask=ok[:, None] & inside, other=0.0)
        right_tile = tl.load(image + theirs[:, None] * C + channels[None, :], mask=there[:, None] & inside, other=0.0)
        worth = tl.dot(left_tile, tl.trans(right_tile), worth, input_precision=PRECISION)
    ring = _rings(row, column, their_row, their_column)
    centre = tl.sum(tl.where(ring == 0, worth, 0.0), 1)
    start = batch * (height * width) * K
    weight = tl.load(weights + start + patch * K, mask=ok, other=0.0)
    values, kept, inner = (centre,), (weight,), weight * centre
    for k in tl.static_range(1, K):
        value = (tl.sum(tl.where(ring == k, worth, 0.0), 1) + centre) / 9
        weight = tl.load(weights + start + patch * K + k, mask=ok, other=0.0)
        values, kept = values + (value,), kept + (weight,)
        inner += weight * value
    for k in tl.static_range(K):
        tl.store(made + start + patch * K + k, kept[k] * (values[k] - inner), mask=ok)


@lru_cache
def _best_window(height: int, width: int, reach: int, most: int) -> tuple[int, ...]:
    best: tuple[tuple[int, int], tuple[int, ...]] | None = None
    for high in range(1, min(height, most) + 1):
        wide = min(width, most // high)
        wide = -(-width // -(-width // wide))  # as narrow as the same number of rectangles allows
        down, across = -(-height // high), -(-width // wide)
        # One or two rectangles along an axis touch its ends, beyond which there is nothing.
        rows, columns = min(height, high + min(2, down - 1) * reach), min(width, wide + min(2, across - 1) * reach)
        blocks = down * across
        padded = max(16, power_of_two(rows * columns))
        cost = (blocks * padded, blocks * rows * columns)
        if best is None or cost < best[0]:
            best = (cost, (high, wide, rows, columns, padded))
    assert best is not None
    return best[1]


@torch.compiler.assume_constant_result
def best_window(height: int, width: int, reach: int, most: int) -> tuple[int, ...]:
    """The rectangle of at most so many patches that needs the fewest products, and the window around it.

    >>> best_window(14, 14, 3, 64)
    (7, 7, 10, 10, 128)
    """
    return _best_window(height, width, reach, most)


def tile_sizes(
    kernel: str, patches: int, channels: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, int, int, int]:
    """Patches of a program, channels at a time, warps and stages, for a window of so many patches.

    As measured on an H200 for half precision.

    >>> tile_sizes("mix", 128, 384, torch.bfloat16, torch.device("cpu"))
    (64, 64, 4, 3)
    """
    chunk, roomy = max(16, power_of_two(channels)), available(device) >= 160 * 1024
    if dtype == torch.float32:
        return 16, min(32 if patches <= 256 else 16, chunk), 4, 2
    if patches > 256 or (kernel == "mix" and patches > 128):  # with fewer warps, M does not fit into registers
        rows = 64 if roomy or patches <= 256 else 32  # M takes shared memory, too
        return rows, min(64 if roomy and patches <= 256 else 32, chunk), 8, 3 if roomy and patches <= 256 else 2
    if kernel == "score" and patches == 128:
        return 64, min(64, chunk), 8, 3 if roomy else 2
    return 64, min(64, chunk), 4, 3 if roomy else 2


def _settings(kernel: str, tokens: Tensor, weights: Tensor, grid: tuple[int, int]) -> tuple[int, dict[str, Any]]:
    """The number of rectangles in a grid, and the constants that both kernels have."""
    branches, channels = weights.shape[2], tokens.shape[2]
    rows = 16 if tokens.dtype == torch.float32 else 64
    window = best_window(*grid, branches - 1, rows)
    rows, chunk, warps, stages = tile_sizes(kernel, window[4], channels, tokens.dtype, tokens.device)
    if rows < window[0] * window[1]:  # the rectangle for as many rows as fit
        window = best_window(*grid, branches - 1, rows)
    shape = dict(zip(("BH", "BW", "NH", "NW", "BN"), window, strict=True))
    blocks = -(-grid[0] // shape["BH"]) * -(-grid[1] // shape["BW"])
    return blocks, {**shape, "BM": rows, "BC": chunk, "K": branches, "num_warps": warps, "STAGES": stages}


def mix_tokens(tokens: Tensor, weights: Tensor, grid: tuple[int, int]) -> Tensor:
    """M · tokens (B, N, C), for weights (B, H·W, K)."""
    return _product(tokens, weights, grid, "mix", tokens, tokens)


def unmix_gradient(
    gradient: Tensor, weights: Tensor, grid: tuple[int, int], spread: Tensor | None = None, matrix: Tensor | None = None
) -> Tensor:
    """Mᵀ · gradient (B, N, C), for weights (B, H·W, K); plus spread (B, N, P) · matrix (P, C)."""
    if spread is None or matrix is None:
        return _product(gradient, weights, grid, "unmix", gradient, gradient)
    return _product(gradient, weights, grid, "unmix", spread, matrix, matrix.shape[0])


@on_device_of_first
def _product(
    tokens: Tensor, weights: Tensor, grid: tuple[int, int], kernel: str, spread: Tensor, matrix: Tensor, rows: int = 0
) -> Tensor:
    batch, count, channels = tokens.shape
    out = torch.empty_like(tokens)
    blocks, settings = _settings(kernel, tokens, weights, grid)
    chunks = -(-channels // settings["BC"])
    groups = min(chunks, -(-BUSY // max(1, blocks * batch)))
    each = -(-chunks // groups)
    groups, prefix = -(-chunks // each), count - grid[0] * grid[1]
    mix[(blocks * groups * batch,)](
        tokens, weights, spread, matrix, out, count, *grid, prefix, channels, groups, each,
        PRECISION="tf32x3", TRANSPOSE=kernel == "unmix", ADD=rows > 0, P=rows, PP=max(16, power_of_two(max(1, rows))),
        KEPT=power_of_two(max(1, prefix)), EVEN=channels % settings["BC"] == 0 and chunks % each == 0, **settings,
    )  # fmt: skip
    return out


@on_device_of_first
def score_gradients(gradient: Tensor, tokens: Tensor, weights: Tensor, grid: tuple[int, int]) -> Tensor:
    """The gradient of the scores (B, H·W, K), whose softmax are the weights."""
    batch, count, channels = tokens.shape
    made = torch.empty_like(weights)
    blocks, settings = _settings("score", tokens, weights, grid)
    score_gradient[(blocks * batch,)](
        tokens, weights, gradient, made, count, *grid, count - grid[0] * grid[1], channels,
        PRECISION="tf32x3", EVEN=channels % settings["BC"] == 0, **settings,
    )  # fmt: skip
    return made
