"""The first convolution of the pooling's predictor as a product of tokens (B, N, C) with a (P, C) matrix.

The matrix has a row for each of the nine positions and each of the K branches, padded to a multiple of eight. cuBLAS
multiplies; these kernels arrange the matrix, and compute the convolution's gradient in its own layout (K, C, 3, 3).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.backends import on_device_of_first
from vitfocus.kernels.shared_memory import power_of_two

#: Tokens at a time, channels, most programs, warps and stages of `tap_products`, for half precision and for float32.
PRODUCTS = {2: (64, 128, 264, 4, 3), 4: (32, 64, 264, 4, 2)}


@triton.jit
def arrange_taps(first, matrix, size, C, K: tl.constexpr, BLOCK: tl.constexpr):
    """The weights (K, C, 3, 3) as (P, C), a row for each position and branch, and rows of 0."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, channel = place // C, place % C
    tap, k = row // K, row % K
    value = tl.load(first + (k * C + channel) * 9 + tap, mask=row < 9 * K, other=0.0)
    tl.store(matrix + place, value.to(matrix.dtype.element_ty), mask=place < size)


@triton.jit
def tap_products(slope, tokens, parts, total, C, steps, PRECISION: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr,
                 PP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """slopeᵀ · tokens, (P, total) with (total, C), in parts: one program per part and per BC channels.

    `parts` gets the first ROWS of P rows, (parts, ROWS, C).
    """
    chunks = tl.cdiv(C, BC)
    part = tl.program_id(0) // chunks
    taps, channels = tl.arange(0, PP), (tl.program_id(0) % chunks) * BC + tl.arange(0, BC)
    made = tl.zeros([PP, BC], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        first = (part * steps + step) * BT
        place, ok = tl.arange(0, BT), first + tl.arange(0, BT) < total
        slope_at, token_at = slope + first.to(tl.int64) * P, tokens + first.to(tl.int64) * C
        left = tl.load(slope_at + place[:, None] * P + taps[None, :], mask=ok[:, None] & (taps < P)[None, :], other=0.0)
        inside = ok[:, None] & (channels < C)[None, :]
        right = tl.load(token_at + place[:, None] * C + channels[None, :], mask=inside, other=0.0)
        made = tl.dot(tl.trans(left), right, made, input_precision=PRECISION)
    here = parts + part.to(tl.int64) * (ROWS * C) + taps[:, None] * C + channels[None, :]
    tl.store(here, made, mask=(taps < ROWS)[:, None] & (channels < C)[None, :])


@triton.jit
def tap_gradient(parts, out, count, C, K: tl.constexpr, BC: tl.constexpr, AT_ONCE: tl.constexpr):
    """Add up parts (count, 9 · K, C) as the gradient of the weights, (K, C, 3, 3)."""
    chunks = tl.cdiv(C, BC)
    row, channel = tl.program_id(0) // chunks, (tl.program_id(0) % chunks) * BC + tl.arange(0, BC)
    made = tl.zeros([AT_ONCE, BC], tl.float32)
    for first in range(0, count, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        place = (part.to(tl.int64) * (9 * K * C))[:, None] + (row * C + channel)[None, :]
        made += tl.load(parts + place, mask=(part < count)[:, None] & (channel < C)[None, :], other=0.0)
    place = ((row % K) * C + channel) * 9 + row // K
    tl.store(out + place, tl.sum(made, 0).to(out.dtype.element_ty), mask=channel < C)


def matrix_rows(branches: int) -> int:
    """Values that a token passes to its neighbours, padded to a multiple of eight for fast matrix products.

    >>> matrix_rows(4)
    40
    """
    return -(-9 * branches // 8) * 8


@on_device_of_first
def first_matrix(first: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights (K, C, 3, 3) as a matrix (P, C) in this dtype."""
    branches, channels = first.shape[:2]
    matrix = torch.empty(matrix_rows(branches), channels, dtype=dtype, device=first.device)
    size, block = matrix.numel(), 256
    arrange_taps[(-(-size // block),)](first, matrix, size, channels, K=branches, BLOCK=block, num_warps=4)
    return matrix


@on_device_of_first
def first_gradient(slope: Tensor, tokens: Tensor, first: Tensor) -> Tensor:
    """The gradient of the weights `first` from that of what tokens contribute to their neighbours, (B, N, P)."""
    branches, channels = first.shape[:2]
    total, rows, padded = tokens.shape[0] * tokens.shape[1], slope.shape[2], max(16, power_of_two(slope.shape[2]))
    block, wide, most, warps, stages = PRODUCTS[tokens.element_size()]
    wide = max(16, min(wide if padded <= 64 and channels % wide == 0 else wide // 2, power_of_two(channels)))
    chunks = -(-channels // wide)
    steps = -(-total // (block * max(1, most // chunks)))
    count = -(-total // (block * steps))
    parts = torch.empty(count, 9 * branches, channels, dtype=torch.float32, device=tokens.device)
    tap_products[(count * chunks,)](
        slope, tokens, parts, total, channels, steps, PRECISION="tf32x3", ROWS=9 * branches, P=rows, PP=padded,
        BT=block, BC=wide, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    made = torch.empty_like(first, memory_format=torch.contiguous_format)
    wide = min(128, power_of_two(channels))
    tap_gradient[(9 * branches * -(-channels // wide),)](
        parts, made, count, channels, K=branches, BC=wide, AT_ONCE=32, num_warps=4
    )
    return made
