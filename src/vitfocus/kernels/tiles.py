"""Tiles of attention, recomputed from queries and keys: the Triton functions that all attention kernels share.

A *map* is what the diversification loss compares rows of: an image's attention averaged over its G = H heads, or one
head's own (G = 1). The heads of a map are unrolled, so that all their tiles stay in registers while they are averaged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.shared_memory import available, padded, shrink

LOG2E = 1.4426950408889634


@triton.jit
def load_rows(pointer, batch, head, rows, ok, strides, D: tl.constexpr, DP: tl.constexpr):
    """Rows (T,) of one head of a (B, H, N, D) tensor with these strides: (T, DP), padded with zeros."""
    channels = tl.arange(0, DP)
    start = pointer + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    where = rows[:, None] * strides[2] + channels[None, :] * strides[3]
    return tl.load(start + where, mask=ok[:, None] & (channels < D)[None, :], other=0.0)


@triton.jit
def store_rows(pointer, values, batch, head, rows, ok, strides, D: tl.constexpr, DP: tl.constexpr):
    """The opposite of `load_rows`."""
    channels = tl.arange(0, DP)
    start = pointer + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    where = rows[:, None] * strides[2] + channels[None, :] * strides[3]
    tl.store(start + where, values.to(pointer.dtype.element_ty), mask=ok[:, None] & (channels < D)[None, :])


@triton.jit
def logits(query, key, scale, bias, batch, head, rows, row_ok, cols, col_ok, strides, HAS_BIAS: tl.constexpr):
    """Attention logits of a tile in units of log 2: (T, D) and (S, D) to (T, S). Padded keys give 0, not -inf."""
    scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * (scale * 1.4426950408889634)
    if HAS_BIAS:
        start = bias + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        where = rows[:, None] * strides[2] + cols[None, :] * strides[3]
        added = tl.load(start + where, mask=row_ok[:, None] & col_ok[None, :], other=0.0)
        scores += added.to(tl.float32) * 1.4426950408889634
    return scores


@triton.jit
def load_heads(
    pointer, batch, head, rows, ok, strides, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """`load_rows` of G heads, a tuple."""
    loaded = ()
    for h in tl.static_range(G):
        loaded = loaded + (load_rows(pointer, batch, head + h, rows, ok, strides, D, DP),)
    return loaded


@triton.jit
def load_vectors(pointer, first, length, places, ok, G: tl.constexpr):
    """The same places of G vectors of that length that lie one after the other, a tuple."""
    loaded = ()
    for h in tl.static_range(G):
        loaded = loaded + (tl.load(pointer + (first + h).to(tl.int64) * length + places, mask=ok, other=0.0),)
    return loaded


@triton.jit
def zeros(G: tl.constexpr, shape: tl.constexpr):
    """G tensors of zeros, a tuple."""
    made = ()
    for _ in tl.static_range(G):
        made = made + (tl.zeros(shape, tl.float32),)
    return made


@triton.jit
def by_row(vector, TURNED: tl.constexpr):
    """A number for each row of a tile, spread over its columns."""
    if TURNED:
        return vector[None, :]
    else:
        return vector[:, None]


@triton.jit
def head_tiles(
    queries, keys, norms, scale, bias, batch, head, rows, row_ok, cols, col_ok, strides,
    G: tl.constexpr, HAS_BIAS: tl.constexpr, NARROW: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The tile of every head's attention, a tuple, and their mean, (rows, cols) or TURNED (cols, rows).

    NARROW keeps the tiles in the queries' dtype. Beyond the last row or key stand numbers without a meaning, finite
    ones: whoever sums over them multiplies by zero.
    """
    tiles = ()
    for h in tl.static_range(G):
        norm = by_row(norms[h] * 1.4426950408889634, TURNED)
        if TURNED:
            turned = (strides[0], strides[1], strides[3], strides[2])
            power = -norm + logits(
                keys[h], queries[h], scale, bias, batch, head + h, cols, col_ok, rows, row_ok, turned, HAS_BIAS
            )
        else:
            power = -norm + logits(
                queries[h], keys[h], scale, bias, batch, head + h, rows, row_ok, cols, col_ok, strides, HAS_BIAS
            )
        # Attention is at most 1; only beyond the last key could it be more, and overflow.
        tile = tl.exp2(tl.minimum(power, 0.0, propagate_nan=tl.PropagateNan.ALL))
        if h == 0:
            total = tile
        else:
            total += tile
        tiles = tiles + (tile.to(queries[h].dtype) if NARROW else tile,)
    return tiles, total * (1.0 / G)


@triton.jit
def log_sum_exp(
    q, k, bias, out, scale, heads, queries, keys, q_strides, k_strides, bias_strides,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The softmax's normalisers, natural logarithm: (B, H, Q), contiguous. A row with every key masked gives 0."""
    pair, block = tl.program_id(0), tl.program_id(1)
    batch, head = pair // heads, pair % heads
    rows = block * BM + tl.arange(0, BM)
    row_ok = rows < queries
    query = load_rows(q, batch, head, rows, row_ok, q_strides, D, DP)
    most = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        col_ok = cols < keys
        key = load_rows(k, batch, head, cols, col_ok, k_strides, D, DP)
        scores = logits(query, key, scale, bias, batch, head, rows, row_ok, cols, col_ok, bias_strides, HAS_BIAS)
        scores = tl.where(col_ok[None, :], scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp2(most - safe) + tl.sum(tl.exp2(scores - safe[:, None]), 1)
        most = now
    result = tl.where(total > 0, (most + tl.log2(total)) / 1.4426950408889634, 0.0)
    tl.store(out + pair.to(tl.int64) * queries + rows, result, mask=row_ok)


def normalisers(query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """log Σ exp of every row's logits, (B, H, Q)."""
    batch, heads, queries, width = query.shape
    out = torch.empty(batch, heads, queries, dtype=torch.float32, device=query.device)
    spread = bias.expand(batch, heads, queries, key.shape[2]).stride() if bias is not None else (0, 0, 0, 0)
    item = query.element_size()
    rows, columns = shrink("row", 1, width, item, 64 if queries > 32 else 16, 64, available(query.device))
    log_sum_exp[batch * heads, triton.cdiv(queries, rows)](
        query, key, bias if bias is not None else query, out, scale, heads, queries, key.shape[2], query.stride(),
        key.stride(), spread, D=width, DP=padded(width), BM=rows, BN=columns, HAS_BIAS=bias is not None,
        num_warps=4, num_stages=1 if item == 4 else 3,
    )  # fmt: skip
    return out
