"""Context Broadcasting's one operation: every token, plus a share of the mean of all tokens, in one pass.

Forward and backward are the same kernel, because the operation is its own transpose. A program owns some channels of an
image; if all their tokens fit into registers, they are read and written once, else read once more for the mean.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.backends import on_device_of_first
from vitfocus.kernels.inputs import packed
from vitfocus.kernels.shared_memory import power_of_two
from vitfocus.kernels.tiles import single

#: Channels per program, and the number of values that it can hold in registers.
CHANNELS, MOST = 32, 16384


@triton.jit
def _program(count, C, BT: tl.constexpr, BC: tl.constexpr):
    """This program's group of channels, block of tokens and image, and the number of blocks.

    All on one grid axis: images may be windows, and there may be too many for the other axes' limits.
    """
    parts, blocks, program = tl.cdiv(C, BC), tl.cdiv(count, BT), tl.program_id(0)
    return program % parts, (program // parts) % blocks, (program // (parts * blocks)).to(tl.int64), blocks


@triton.jit
def share_mean_kernel(values, scale, out, means, count, C, kept, HAS_SCALE: tl.constexpr, WHOLE: tl.constexpr,
                      BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """out = kept · x + share · mean(x), share (C,) or 1 − kept. WHOLE: a block has all tokens and computes the mean."""
    kept = single(kept)
    part, block, batch, _ = _program(count, C, BT, BC)
    channels = part * BC + tl.arange(0, BC)
    inside = channels < C
    tokens = block * BT + tl.arange(0, BT)
    start = batch * count * C
    place = tokens[:, None] * C + channels[None, :]
    mask = (tokens < count)[:, None] & inside[None, :]
    tile = tl.load(values + start + place, mask=mask, other=0.0).to(tl.float32)
    if WHOLE:
        mean = tl.sum(tile, 0) / count
        tl.store(means + batch * C + channels, mean, mask=inside)
    else:
        mean = tl.load(means + batch * C + channels, mask=inside, other=0.0)
    if HAS_SCALE:
        shared = mean * tl.load(scale + channels, mask=inside, other=0.0).to(tl.float32)
    else:
        shared = mean * (1.0 - kept)
    tl.store(out + start + place, (kept * tile + shared[None, :]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def block_sums(values, sums, count, C, BT: tl.constexpr, BC: tl.constexpr):
    """The sums over each block of BT tokens: (B, blocks, C)."""
    part, block, batch, blocks = _program(count, C, BT, BC)
    channels = part * BC + tl.arange(0, BC)
    tokens = block * BT + tl.arange(0, BT)
    place = tokens[:, None] * C + channels[None, :]
    mask = (tokens < count)[:, None] & (channels < C)[None, :]
    tile = tl.load(values + batch * count * C + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(sums + (batch * blocks + block) * C + channels, tl.sum(tile, 0), mask=channels < C)


@on_device_of_first
def share_mean(values: Tensor, scale: Tensor | None, kept: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(B, N, C) to the same in that dtype, and the means (B, C) in float32."""
    values, scale = packed(values), None if scale is None else packed(scale)
    batch, count, channels = values.shape
    out = torch.empty_like(values, dtype=dtype)
    rows = max(16, power_of_two(count))
    whole = rows * CHANNELS <= MOST
    parts = -(-channels // CHANNELS)
    if whole:
        means = torch.empty(batch, channels, dtype=torch.float32, device=values.device)
    else:
        rows = 128
        sums = torch.empty(batch, -(-count // rows), channels, dtype=torch.float32, device=values.device)
        block_sums[(parts * sums.shape[1] * batch,)](values, sums, count, channels, BT=rows, BC=CHANNELS, num_warps=4)
        means = sums.sum(dim=1) / count
    share_mean_kernel[(parts * -(-count // rows) * batch,)](
        values, values if scale is None else scale, out, means, count, channels, kept, HAS_SCALE=scale is not None,
        WHOLE=whole, BT=rows, BC=CHANNELS, num_warps=8 if rows > 256 else 4,
    )  # fmt: skip
    return out, means
