"""Attention among at most 128 tokens: one program has all tokens of one head of one image, forward and backward.

Queries, keys and values are read once, where the projection left them, and all three gradients are written where its
backward pass reads them. A tile has T tokens, a power of two. With EXTRA there is one more, as when a class token
precedes 64 patches: it is a vector, whose products are sums over a tile, so that no tile of twice the size is needed.
docs/kernels.md has the equations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitfocus.kernels.tiles import single


@triton.jit
def _load(pointer, stride, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr):
    """The first T tokens of one head, (T, DP), padded with zeros."""
    tokens, channels = tl.arange(0, T), tl.arange(0, DP)
    places = pointer + tokens[:, None] * stride + channels[None, :]
    if T > N:
        return tl.load(places, mask=(tokens < N)[:, None] & (channels < D)[None, :], other=0.0)
    elif DP > D:
        return tl.load(places, mask=(channels < D)[None, :], other=0.0)
    else:
        return tl.load(places)


@triton.jit
def _load_last(pointer, stride, T: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Token T of one head, (DP,), in float32."""
    channels = tl.arange(0, DP)
    return tl.load(pointer + T * stride + channels, mask=channels < D, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, values, stride, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr):
    """The opposite of `_load`."""
    tokens, channels = tl.arange(0, T), tl.arange(0, DP)
    inside = (tokens < N)[:, None] & (channels < D)[None, :]
    values = values.to(pointer.dtype.element_ty)
    tl.store(pointer + tokens[:, None] * stride + channels[None, :], values, mask=inside)


@triton.jit
def _store_last(pointer, values, stride, T: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The opposite of `_load_last`."""
    channels = tl.arange(0, DP)
    tl.store(pointer + T * stride + channels, values.to(pointer.dtype.element_ty), mask=channels < D)


@triton.jit
def _product(one, two):
    """A matrix product in float32."""
    return tl.dot(one, two, input_precision="tf32x3")


@triton.jit
def _along(tile, vector):
    """For each token of a tile (T, DP), its inner product with a vector (DP,).

    As a product with 32 vectors, the least that tensor cores take, of which the others are 0. They are rows that are
    transposed: as columns, with 32 next to each other in memory, Triton 3.6 multiplies them wrongly.
    """
    rows = tl.where((tl.arange(0, 32) == 0)[:, None], vector[None, :], 0.0).to(tile.dtype)
    return tl.sum(_product(tile, tl.trans(rows)), 1)


@triton.jit
def _weighted(weights, tile):
    """The sum of a tile's tokens (T, DP), weighted (T,)."""
    return _along(tl.trans(tile), weights)


@triton.jit
def attend_forward(
    q, k, v, out, lse, scale, heads, qb, qh, qn, kb, kh, kn, vb, vh, vn,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """softmax(scale · q kᵀ) v, (B, N, H, D), and log Σ exp, (B, H, N), both contiguous."""
    scale = single(scale) * 1.4426950408889634
    pair = tl.program_id(0)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    q += batch * qb + head * qh
    k += batch * kb + head * kh
    v += batch * vb + head * vh
    out += (batch * N * heads + head) * D
    lse += pair.to(tl.int64) * N
    query, key, value = _load(q, qn, N, D, DP, T), _load(k, kn, N, D, DP, T), _load(v, vn, N, D, DP, T)
    tokens = tl.arange(0, T)
    p = _product(query, tl.trans(key)) * scale
    if T > N:
        p = tl.where((tokens < N)[None, :], p, float("-inf"))
    most = tl.max(p, 1)
    if EXTRA:  # the last key
        last_key, last_value = _load_last(k, kn, T, D, DP), _load_last(v, vn, T, D, DP)
        column = _along(query, last_key) * scale
        most = tl.maximum(most, column)
    p = tl.exp2(p - most[:, None])
    total = tl.sum(p, 1)
    mixed = _product(p.to(value.dtype), value)
    if EXTRA:
        column = tl.exp2(column - most)
        total += column
        mixed += column[:, None] * last_value[None, :]
    _store(out, mixed / total[:, None], heads * D, N, D, DP, T)
    tl.store(lse + tokens, (most + tl.log2(total)) * 0.6931471805599453, mask=tokens < N)
    if EXTRA:  # the last query
        last_query = _load_last(q, qn, T, D, DP)
        row, corner = _along(key, last_query) * scale, tl.sum(last_query * last_key, 0) * scale
        highest = tl.maximum(tl.max(row, 0), corner)
        row, corner = tl.exp2(row - highest), tl.exp2(corner - highest)
        sum_of_row = tl.sum(row, 0) + corner
        last = (_weighted(row, value) + corner * last_value) / sum_of_row
        _store_last(out, last, heads * D, T, D, DP)
        tl.store(lse + T, (highest + tl.log2(sum_of_row)) * 0.6931471805599453)


@triton.jit(do_not_specialize_on_alignment=["weight"])
def attend_backward(
    gradient, q, k, v, lse, slope, bounds, weight, out, scale, share, heads, first, stride, pitch,
    gb, gh, gn, qb, qh, qn, kb, kh, kn, vb, vh, vn, op, ob, oh, on,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, EXTRA: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
):  # fmt: skip
    """The gradients of queries, keys and values, `op` apart in `out`.

    Attention's own output is not needed: a program has whole rows, so Σ_j p dp is a sum over what it has. HAS_SLOPE:
    plus those of the diversification loss, whose gradient is `weight`; `slope` (B, stride, pitch) is its slope with
    respect to K·a over the map's bound, as `whole_pass` writes it, keys first: from row `first` on, and 0 past the
    last row and column.
    """
    natural = single(scale)
    scale = natural * 1.4426950408889634
    pair = tl.program_id(0)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    q += batch * qb + head * qh
    k += batch * kb + head * kh
    v += batch * vb + head * vh
    gradient += batch * gb + head * gh
    out += batch * ob + head * oh
    lse += pair.to(tl.int64) * N
    tokens = tl.arange(0, T)
    query, key, value = _load(q, qn, N, D, DP, T), _load(k, kn, N, D, DP, T), _load(v, vn, N, D, DP, T)
    given = _load(gradient, gn, N, D, DP, T)
    half = key.dtype
    norm = tl.load(lse + tokens, mask=tokens < N, other=0.0) * 1.4426950408889634
    if HAS_SLOPE:
        factor = tl.load(weight).to(tl.float32) * tl.load(bounds + batch) * single(share)
        slope += batch * stride * pitch - first
        compared = (tokens >= first) & (tokens < N)
    if EXTRA:  # the last key, and the last query, whose row is finished here
        last_query, last_given = _load_last(q, qn, T, D, DP), _load_last(gradient, gn, T, D, DP)
        last_key, last_value = _load_last(k, kn, T, D, DP), _load_last(v, vn, T, D, DP)
        last_norm = tl.load(lse + T) * 1.4426950408889634
        column = tl.exp2(_along(query, last_key) * scale - norm)
        row = tl.exp2(_along(key, last_query) * scale - last_norm)
        d_column, d_row = _along(given, last_value), _along(value, last_given)
        corner = tl.exp2(tl.sum(last_query * last_key, 0) * scale - last_norm)
        d_corner = tl.sum(last_value * last_given, 0)
        if HAS_SLOPE:
            d_column += tl.load(slope + T * pitch + tokens, mask=compared, other=0.0).to(tl.float32) * factor
            d_row += tl.load(slope + tokens * pitch + T).to(tl.float32) * factor
            d_corner += tl.load(slope + T * pitch + T).to(tl.float32) * factor
        last_inner = tl.sum(row * d_row, 0) + corner * d_corner
        d_row, d_corner = row * (d_row - last_inner), corner * (d_corner - last_inner)
    p = tl.exp2(_product(key, tl.trans(query)) * scale - norm[None, :])  # tiles have keys first
    if T > N:
        p = tl.where((tokens < N)[:, None], p, 0.0)
    dp = _product(value, tl.trans(given))
    if HAS_SLOPE:
        inside = (tokens < stride)[:, None] & compared[None, :]
        own = tl.load(slope + tokens[:, None] * pitch + tokens[None, :], mask=inside, other=0.0)
        dp += own.to(tl.float32) * factor
    inner = tl.sum(p * dp, 0)
    if EXTRA:
        inner += column * d_column
        d_column = column * (d_column - inner)
    ds = (p * (dp - inner[None, :])).to(half)
    dv = _product(p.to(half), given)
    if EXTRA:
        dv += row[:, None] * last_given[None, :]
    _store(out + 2 * op, dv, on, N, D, DP, T)
    dk = _product(ds, query)
    if EXTRA:
        dk += d_row[:, None] * last_query[None, :]
    _store(out + op, dk * natural, on, N, D, DP, T)
    dq = _product(tl.trans(ds), key)
    if EXTRA:
        dq += d_column[:, None] * last_key[None, :]
    _store(out, dq * natural, on, N, D, DP, T)
    if EXTRA:
        last_dv = _weighted(column, given) + corner * last_given
        _store_last(out + 2 * op, last_dv, on, T, D, DP)
        last_dk = _weighted(d_column, query) + d_corner * last_query
        _store_last(out + op, last_dk * natural, on, T, D, DP)
        last_dq = _weighted(d_row, key) + d_corner * last_key
        _store_last(out, last_dq * natural, on, T, D, DP)
