"""Attention among at most 128 tokens: one program has all tokens of one head of one image, forward and backward.

A tile's side is a power of two. 65 tokens, 8 by 8 patches and a class token, would take a tile of 128 and four times
the products, so the last of 2^k + 1 tokens is kept apart (`PLUS`), as vectors. docs/kernels.md has the equations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitfocus.kernels.tiles import single


@triton.jit
def _load_tile(pointer, stride, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr):
    """T tokens of one head, (T, DP), channels padded with zeros; beyond the end the last token is repeated."""
    tokens, channels = tl.minimum(tl.arange(0, T), N - 1), tl.arange(0, DP)
    places = pointer + tokens[:, None] * stride + channels[None, :]
    if D == DP:
        return tl.load(places)
    else:
        return tl.load(places, mask=(channels < D)[None, :], other=0.0)


@triton.jit
def _store_tile(pointer, values, stride, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr):
    """The opposite of `_load_tile`; nothing is written beyond the end."""
    tokens, channels = tl.arange(0, T), tl.arange(0, DP)
    places = pointer + tokens[:, None] * stride + channels[None, :]
    tl.store(places, values.to(pointer.dtype.element_ty), mask=(tokens < N)[:, None] & (channels < D)[None, :])


@triton.jit
def _load_token(pointer, D: tl.constexpr, DP: tl.constexpr):
    """One token in float32, (DP,)."""
    channels = tl.arange(0, DP)
    return tl.load(pointer + channels, mask=channels < D, other=0.0).to(tl.float32)


@triton.jit
def _store_token(pointer, values, D: tl.constexpr, DP: tl.constexpr):
    channels = tl.arange(0, DP)
    tl.store(pointer + channels, values.to(pointer.dtype.element_ty), mask=channels < D)


@triton.jit
def _product(one, two):
    """A matrix product in float32."""
    return tl.dot(one, two, input_precision="tf32x3")


@triton.jit
def _by_token(tile, token):
    """(T, DP) and (DP,) to the products (T,)."""
    return tl.sum(tile.to(tl.float32) * token[None, :], 1)


@triton.jit
def _mixed(weights, tile):
    """(T,) and (T, DP) to the weighted sum (DP,)."""
    return tl.sum(weights[:, None] * tile.to(tl.float32), 0)


@triton.jit
def attend_forward(
    q, k, v, out, lse, scale, heads, qb, qh, qn, kb, kh, kn, vb, vh, vn,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, PLUS: tl.constexpr,
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
    rows = tl.arange(0, T)
    query, key = _load_tile(q, qn, N, D, DP, T), _load_tile(k, kn, N, D, DP, T)
    value = _load_tile(v, vn, N, D, DP, T)
    power = _product(query, tl.trans(key)) * scale
    if N < T:
        power = tl.where((rows < N)[None, :], power, float("-inf"))
    most = tl.max(power, 1)
    if PLUS:  # the last key
        last_query, last_key = _load_token(q + T * qn, D, DP), _load_token(k + T * kn, D, DP)
        last_value = _load_token(v + T * vn, D, DP)
        side = _by_token(query, last_key) * scale
        most = tl.maximum(most, side)
    p = tl.exp2(power - most[:, None])
    total = tl.sum(p, 1)
    mixed = _product(p.to(value.dtype), value)
    if PLUS:
        side = tl.exp2(side - most)
        total += side
        mixed += side[:, None] * last_value[None, :]
    _store_tile(out, mixed / total[:, None], heads * D, N, D, DP, T)
    tl.store(lse + rows, (most + tl.log2(total)) * 0.6931471805599453, mask=rows < N)
    if PLUS:  # the last row
        power, corner = _by_token(key, last_query) * scale, tl.sum(last_query * last_key, 0) * scale
        peak = tl.maximum(tl.max(power, 0), corner)
        last_p, corner = tl.exp2(power - peak), tl.exp2(corner - peak)
        sum_p = tl.sum(last_p, 0) + corner
        _store_token(out + T * heads * D, (_mixed(last_p, value) + corner * last_value) / sum_p, D, DP)
        tl.store(lse + T, (peak + tl.log2(sum_p)) * 0.6931471805599453)


@triton.jit
def attend_backward(
    q, k, v, gradient, lse, out, scale, heads, qb, qh, qn, kb, kh, kn, vb, vh, vn, gb, gh, gn, op, ob, oh, on,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, PLUS: tl.constexpr,
):  # fmt: skip
    """The gradients of queries, keys and values, `op` apart in `out`.

    Attention's own output is not needed: a program has whole rows, so Σ_j p dp is a sum over what it holds.
    """
    scale = single(scale)
    log2 = scale * 1.4426950408889634
    pair = tl.program_id(0)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    q += batch * qb + head * qh
    k += batch * kb + head * kh
    v += batch * vb + head * vh
    gradient += batch * gb + head * gh
    out += batch * ob + head * oh
    lse += pair.to(tl.int64) * N
    rows = tl.arange(0, T)
    query, key = _load_tile(q, qn, N, D, DP, T), _load_tile(k, kn, N, D, DP, T)
    value, incoming = _load_tile(v, vn, N, D, DP, T), _load_tile(gradient, gn, N, D, DP, T)
    norm = tl.load(lse + tl.minimum(rows, N - 1)) * 1.4426950408889634
    half = key.dtype
    if PLUS:
        last_query, last_key = _load_token(q + T * qn, D, DP), _load_token(k + T * kn, D, DP)
        last_value, last_incoming = _load_token(v + T * vn, D, DP), _load_token(gradient + T * gn, D, DP)
        # The last row: a vector over the keys, and a corner.
        last_norm = tl.load(lse + T) * 1.4426950408889634
        row_p, row_dp = tl.exp2(_by_token(key, last_query) * log2 - last_norm), _by_token(value, last_incoming)
        corner_p = tl.exp2(tl.sum(last_query * last_key, 0) * log2 - last_norm)
        corner_dp = tl.sum(last_incoming * last_value, 0)
        row_inner = tl.sum(row_p * row_dp, 0) + corner_p * corner_dp
        row_ds, corner_ds = row_p * (row_dp - row_inner), corner_p * (corner_dp - row_inner)
        _store_token(out + T * on, (_mixed(row_ds, key) + corner_ds * last_key) * scale, D, DP)
        # The last column: a vector over the rows.
        side_p, side_dp = tl.exp2(_by_token(query, last_key) * log2 - norm), _by_token(incoming, last_value)
    p = tl.exp2(_product(query, tl.trans(key)) * log2 - norm[:, None])
    if N < T:
        p = tl.where((rows < N)[:, None] & (rows < N)[None, :], p, 0.0)
    dp = _product(incoming, tl.trans(value))
    inner = tl.sum(p * dp, 1)
    if PLUS:
        inner += side_p * side_dp
        side_ds = side_p * (side_dp - inner)
        _store_token(out + op + T * on, (_mixed(side_ds, query) + corner_ds * last_query) * scale, D, DP)
        _store_token(out + 2 * op + T * on, _mixed(side_p, incoming) + corner_p * last_incoming, D, DP)
    dv = _product(tl.trans(p.to(half)), incoming)
    if PLUS:
        dv += row_p[:, None] * last_incoming[None, :]
    _store_tile(out + 2 * op, dv, on, N, D, DP, T)
    ds = (p * (dp - inner[:, None])).to(half)
    dq = _product(ds, key)
    if PLUS:
        dq += side_ds[:, None] * last_key[None, :]
    _store_tile(out, dq * scale, on, N, D, DP, T)
    dk = _product(tl.trans(ds), query)
    if PLUS:
        dk += row_ds[:, None] * last_query[None, :]
    _store_tile(out + op, dk * scale, on, N, D, DP, T)
