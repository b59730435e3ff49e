"""The Attention Diversification Loss of short sequences, in one launch: one program keeps the mean map of an image.

With at most 128 rows and keys a mean map fits into the registers of a program. It adds up the heads, then computes all
that the passes of triton.py compute one after the other, the gradient with respect to the map included. Nothing is
rounded in between. docs/kernels.md has the derivation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitfocus.kernels.diversity.triton import _above, _inverse, _place
from vitfocus.kernels.tiles import load_rows, logits, single


@triton.jit
def whole_pass(
    q, k, lse, bias, rows, norms, losses, bounds, slope, scale, bound, heads, group, keys, row_count, first,
    qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, queries, lift,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_LSE: tl.constexpr, PAPER: tl.constexpr,
    WANTS_SLOPE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """A map's loss and normalisers. WANTS_SLOPE: also the gradient of its sum of cosines, and the bound it is over.

    The map has at most BM rows and BN columns. `norms` are as `lower_kernel` writes them, `slope` and `bounds` as
    `gradient_pass` and `slope_pass` do; `lse` (B, H, queries) is read if HAS_LSE.
    """
    scale, bound, lift = single(scale), single(bound), single(lift)
    map_index = tl.program_id(0)
    batch, head = _place(map_index, heads, group)
    numbers, cols = tl.arange(0, BM), tl.arange(0, BN)
    near, there = tl.minimum(numbers, row_count - 1), tl.minimum(cols, keys - 1)
    query_rows = near + first
    if HAS_ROWS:
        query_rows = tl.load(rows + near).to(tl.int32)
    mean = tl.zeros([BM, BN], tl.float32)
    for h in range(group):
        query = load_rows(q, batch, head + h, query_rows, (qb, qh, qn, 1), D, DP)
        key = load_rows(k, batch, head + h, there, (kb, kh, kn, 1), D, DP)
        power = logits(query, key, scale, bias, batch, head + h, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
        pair = (batch * heads + head + h).to(tl.int64)
        if HAS_LSE:
            norm = tl.load(lse + pair * queries + query_rows) * 1.4426950408889634 - lift
        else:
            power = tl.where((cols < keys)[None, :], power, float("-inf"))
            most = tl.max(power, 1)
            most = tl.where(most == float("-inf"), 0.0, most)
            total = tl.sum(tl.exp2(power - most[:, None]), 1)
            norm = most + tl.log2(total) - lift
            # A row with every key masked attends to nothing; without a bias it comes from an infinite query or key.
            norm = tl.where(total == 0, 0.0 if HAS_BIAS else float("nan"), norm)
        norm = tl.where(numbers < row_count, norm, 1e30)
        tl.store(norms + pair * reach + numbers, norm)
        mean += tl.exp2(power - norm[:, None])
    mean *= tl.where((cols >= first) & (cols < keys), 1.0 / group, 0.0)[None, :]
    kept = _above(mean, bound, PAPER)
    unit = _inverse(tl.sqrt(tl.sum(kept * kept, 1)))  # 0 past the last row
    average = tl.sum(kept if PAPER else mean, 0) / row_count
    if not PAPER:
        average = _above(average, bound, False)
    one_over = _inverse(tl.sqrt(tl.sum(average * average, 0)))
    units = tl.sum(kept * unit[:, None], 0)
    cosine = tl.sum(units * average, 0) * one_over
    tl.store(losses + map_index, cosine / row_count)
    if WANTS_SLOPE:
        shared = (units - cosine * one_over * average) * one_over / row_count
        if not PAPER:
            shared = tl.where(average == 0, 0.0, shared)
        largest = 2 * (tl.max(tl.abs(shared), 0) + tl.max(unit, 0))
        tl.store(bounds + map_index, largest)
        over = _inverse(largest)
        toward = unit * one_over * over
        back = toward * tl.sum(kept * average[None, :], 1) * unit * unit
        own = toward[:, None] * average[None, :] - back[:, None] * mean
        if PAPER:
            made = tl.where(mean < bound, 0.0, own + (shared * over)[None, :])
        else:
            made = tl.where(mean <= bound, 0.0, own) + (shared * over)[None, :]
        made = tl.where((numbers < row_count)[:, None], made, 0.0).to(slope.dtype.element_ty)
        if TURNED:
            pitch = tl.cdiv(row_count, 16) * 16
            mine = slope + map_index.to(tl.int64) * stride * pitch
            inside = (numbers < pitch)[:, None] & (cols < stride)[None, :]
            tl.store(mine + (cols[None, :] * pitch + numbers[:, None]), made, mask=inside)
        else:
            mine = slope + map_index.to(tl.int64) * row_count * stride
            inside = (numbers < row_count)[:, None] & (cols < stride)[None, :]
            tl.store(mine + (numbers[:, None] * stride + cols[None, :]), made, mask=inside)
