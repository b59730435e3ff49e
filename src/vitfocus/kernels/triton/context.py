"""Context Broadcasting's one operation: every token, plus a share of the mean of all tokens, in one pass.

Forward and backward are the same kernel, because the operation is its own transpose. A program owns some channels of an
image; where all their tokens fit into registers they are read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Channels of a program, and the numbers that it can keep.
CHANNELS, MOST = 32, 16384


@triton.jit
def share_mean_kernel(values, scale, out, means, count, C, kept, HAS_SCALE: tl.constexpr, WHOLE: tl.constexpr,
                      BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """out = kept · x + share · mean(x), share (C,) or 1 − kept; the means (B, C) are written too."""
    part, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels = part * BC + tl.arange(0, BC)
    inside = channels < C
    start = batch * count * C
    tokens = tl.arange(0, BT)
    where = tokens[:, None] * C + channels[None, :]
    mask = (tokens < count)[:, None] & inside[None, :]
    if WHOLE:
        tile = tl.load(values + start + where, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(tile, 0) / count
    else:
        total = tl.zeros([BT, BC], tl.float32)
        for first in range(0, count, BT):
            mask = (first + tokens < count)[:, None] & inside[None, :]
            total += tl.load(values + start + first * C + where, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(total, 0) / count
    tl.store(means + batch * C + channels, mean, mask=inside)
    if HAS_SCALE:
        shared = mean * tl.load(scale + channels, mask=inside, other=0.0).to(tl.float32)
    else:
        shared = mean * (1.0 - kept)
    if WHOLE:
        tl.store(out + start + where, (kept * tile + shared[None, :]).to(out.dtype.element_ty), mask=mask)
    else:
        for first in range(0, count, BT):
            mask = (first + tokens < count)[:, None] & inside[None, :]
            place = start + first * C + where
            tile = tl.load(values + place, mask=mask, other=0.0).to(tl.float32)
            tl.store(out + place, (kept * tile + shared[None, :]).to(out.dtype.element_ty), mask=mask)


def share_mean(values: Tensor, scale: Tensor | None, kept: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(B, N, C) to the same in that dtype, and the means (B, C) in float32."""
    values = values.contiguous()
    batch, count, channels = values.shape
    out = torch.empty_like(values, dtype=dtype)
    means = torch.empty(batch, channels, dtype=torch.float32, device=values.device)
    whole = triton.next_power_of_2(count) * CHANNELS <= MOST
    share_mean_kernel[triton.cdiv(channels, CHANNELS), batch](
        values, values if scale is None else scale, out, means, count, channels, kept, HAS_SCALE=scale is not None,
        WHOLE=whole, BT=max(16, triton.next_power_of_2(count)) if whole else 128, BC=CHANNELS, num_warps=4,
    )  # fmt: skip
    return out, means
