"""Tiles of attention, recomputed from queries and keys: the Triton functions that the diversification loss and the
statistics share, and the kernel that computes the softmax's normalisers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.shared_memory import available, padded, row_tiles

#: Vectors by row are padded to multiples of this, the longest block, so that no mask is needed.
REACH = 128


@triton.jit
def single(number):
    """A float argument in float32: compiled code passes float64, which would promote all further results."""
    return tl.cast(number, tl.float32)


@triton.jit
def load_rows(pointer, batch, head, rows, strides, D: tl.constexpr, DP: tl.constexpr):
    """Rows (T,) of one head of a (B, H, N, D) tensor with these strides: (T, DP), channels padded with zeros.

    All rows must exist: callers repeat the last one beyond the end, because a mask per row would take more
    instructions than the product that follows. Attention to a repeated key is at least finite, between 0 and 1.
    """
    channels = tl.arange(0, DP)
    start = pointer + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    where = rows[:, None].to(tl.int64) * strides[2] + channels[None, :] * strides[3]
    if D == DP:
        return tl.load(start + where)
    else:
        return tl.load(start + where, mask=(channels < D)[None, :], other=0.0)


@triton.jit
def store_rows(pointer, values, batch, head, rows, ok, strides, D: tl.constexpr, DP: tl.constexpr):
    """The opposite of `load_rows`."""
    channels = tl.arange(0, DP)
    start = pointer + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    where = rows[:, None].to(tl.int64) * strides[2] + channels[None, :] * strides[3]
    tl.store(start + where, values.to(pointer.dtype.element_ty), mask=ok[:, None] & (channels < D)[None, :])


@triton.jit
def logits(query, key, scale, bias, batch, head, rows, cols, strides, HAS_BIAS: tl.constexpr):
    """Attention logits of a tile in units of log 2: (T, D) and (S, D) to (T, S), for rows and columns within bounds."""
    scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * (scale * 1.4426950408889634)
    if HAS_BIAS:
        start = bias + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        where = rows[:, None].to(tl.int64) * strides[2] + cols[None, :].to(tl.int64) * strides[3]
        scores += tl.load(start + where).to(tl.float32) * 1.4426950408889634
    return scores


@triton.jit
def by_row(vector, TURNED: tl.constexpr):
    """One value per row of a tile, broadcast over its columns."""
    if TURNED:
        return vector[None, :]
    else:
        return vector[:, None]


@triton.jit
def log_sum_exp(
    q, k, bias, out, scale, heads, queries, keys, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The softmax's normalisers, natural logarithm: (B, H, Q), contiguous. A row with every key masked gives 0."""
    scale = single(scale)
    pair, block = tl.program_id(0), tl.program_id(1)
    batch, head = pair // heads, pair % heads
    row_ok = block * BM + tl.arange(0, BM) < queries
    rows = tl.minimum(block * BM + tl.arange(0, BM), queries - 1)
    query = load_rows(q, batch, head, rows, (qb, qh, qn, 1), D, DP)
    most = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for start in range(0, keys, BN):
        col_ok = start + tl.arange(0, BN) < keys
        cols = tl.minimum(start + tl.arange(0, BN), keys - 1)
        key = load_rows(k, batch, head, cols, (kb, kh, kn, 1), D, DP)
        scores = logits(query, key, scale, bias, batch, head, rows, cols, (bb, bh, bq, bk), HAS_BIAS)
        scores = tl.where(col_ok[None, :], scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp2(most - safe) + tl.sum(tl.exp2(scores - safe[:, None]), 1)
        most = now
    result = (most + tl.log2(total)) / 1.4426950408889634
    # Without a bias nothing is masked, and a row of -inf comes from an infinite query or key.
    result = tl.where(total == 0, 0.0 if HAS_BIAS else float("nan"), result)
    tl.store(out + pair.to(tl.int64) * queries + rows, result, mask=row_ok)


@triton.jit
def lower_kernel(lse, rows, norms, lift, queries, row_count, first, reach, BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr):
    """Normalisers (B, H, Q) to those of the compared rows, (B, H, reach), in units of log 2, minus `lift`.

    Logits minus these are log2(2^lift · attention); attention is 0 past the last row.
    """
    lift = single(lift)
    blocks = tl.cdiv(reach, BLOCK)
    pair, number = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    ok = number < row_count
    place = number + first
    if HAS_ROWS:
        place = tl.load(rows + number, mask=ok, other=0).to(tl.int32)
    norm = tl.load(lse + pair * queries + place, mask=ok, other=0.0) * 1.4426950408889634 - lift
    tl.store(norms + pair * reach + number, tl.where(ok, norm, 1e30), mask=number < reach)


def normalisers(query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """log Σ exp of every row's logits, (B, H, Q)."""
    batch, heads, queries, width = query.shape
    out = torch.empty(batch, heads, queries, dtype=torch.float32, device=query.device)
    rows, columns, stages = row_tiles(width, query.element_size(), queries, key.shape[2], available(query.device))
    log_sum_exp[(batch * heads, -(-queries // rows))](
        query, key, bias if bias is not None else query, out, scale, heads, queries, key.shape[2],
        *strides(query, key, bias), D=width, DP=padded(width), BM=rows, BN=columns, HAS_BIAS=bias is not None,
        num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


def lower_norms(
    lse: Tensor, rows: Tensor | None = None, count: int | None = None, first: int = 0, lift: float = 0.0
) -> Tensor:
    """Normalisers (B, H, Q) of rows, or of `count` from `first` on, as the kernels take them: (B, H, reach), padded.

    In units of log 2, minus `lift`; logits minus these are the log of attention, which is 0 past the last row.
    """
    batch, heads, queries = lse.shape
    count = queries if count is None else count
    reach = -(-count // REACH) * REACH
    made = torch.empty(batch, heads, reach, dtype=torch.float32, device=lse.device)
    block = min(1024, triton.next_power_of_2(reach))
    lower_kernel[(batch * heads * -(-reach // block),)](
        lse, lse if rows is None else rows.contiguous(), made, lift, queries, count, first, reach, BLOCK=block,
        HAS_ROWS=rows is not None, num_warps=4 if block > 256 else 1,
    )  # fmt: skip
    return made


def strides(query: Tensor, key: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """The first three strides of queries and keys, whose last stride is 1, and all four of the bias."""
    shape = (*query.shape[:3], key.shape[2])
    spread = bias.expand(shape).stride() if bias is not None else (0, 0, 0, 0)
    return (*query.stride()[:3], *key.stride()[:3], *spread)
