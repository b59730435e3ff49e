"""Attention among at most 128 tokens: one program has all tokens of one head of one image, forward and backward.

Queries, keys and values are read once, where the projection left them, and all three gradients are written where its
backward pass reads them. 65 tokens are a tile of 64 and one of 16, not one of 128: tiles are powers of two, and
`MAIN` and `TAIL` are the lengths of both. docs/kernels.md has the equations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitfocus.kernels.tiles import single


@triton.jit
def _rows(pointer, stride, FIRST: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr):
    """Where T tokens from FIRST on lie, (T, DP), and which of these numbers there are."""
    tokens, channels = FIRST + tl.arange(0, T), tl.arange(0, DP)
    return pointer + tokens[:, None] * stride + channels[None, :], (tokens < N)[:, None] & (channels < D)[None, :]


@triton.jit
def _load(pointer, stride, FIRST: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr):
    """T tokens of one head, padded with zeros."""
    places, ok = _rows(pointer, stride, FIRST, N, D, DP, T)
    return tl.load(places, mask=ok, other=0.0)


@triton.jit
def _store(
    pointer, values, stride, FIRST: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """The opposite of `_load`."""
    places, ok = _rows(pointer, stride, FIRST, N, D, DP, T)
    tl.store(places, values.to(pointer.dtype.element_ty), mask=ok)


@triton.jit
def _power(query, key, scale, FIRST: tl.constexpr, N: tl.constexpr, T: tl.constexpr):
    """Logits of a tile in units of log 2, `scale` included; -inf beyond the last key."""
    power = _product(query, tl.trans(key)) * scale
    if FIRST + T > N:
        power = tl.where((FIRST + tl.arange(0, T) < N)[None, :], power, float("-inf"))
    return power


@triton.jit
def _product(one, two):
    """A matrix product in float32."""
    return tl.dot(one, two, input_precision="tf32x3")


@triton.jit
def _more(one, two, total):
    """The same, added to a total."""
    return tl.dot(one, two, total, input_precision="tf32x3")


@triton.jit
def attend_forward(
    q, k, v, out, lse, scale, heads, qb, qh, qn, kb, kh, kn, vb, vh, vn,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
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
    query, key = _load(q, qn, 0, N, D, DP, MAIN), _load(k, kn, 0, N, D, DP, MAIN)
    value = _load(v, vn, 0, N, D, DP, MAIN)
    half = value.dtype
    p = _power(query, key, scale, 0, N, MAIN)
    most = tl.max(p, 1)
    if TAIL:  # the main rows, the last keys
        last_key, last_value = _load(k, kn, MAIN, N, D, DP, TAIL), _load(v, vn, MAIN, N, D, DP, TAIL)
        side_p = _power(query, last_key, scale, MAIN, N, TAIL)
        most = tl.maximum(most, tl.max(side_p, 1))
    p = tl.exp2(p - most[:, None])
    total = tl.sum(p, 1)
    mixed = _product(p.to(half), value)
    if TAIL:
        side_p = tl.exp2(side_p - most[:, None])
        total += tl.sum(side_p, 1)
        mixed = _more(side_p.to(half), last_value, mixed)
    _store(out, mixed / total[:, None], heads * D, 0, N, D, DP, MAIN)
    rows = tl.arange(0, MAIN)
    tl.store(lse + rows, (most + tl.log2(total)) * 0.6931471805599453, mask=rows < N)
    if TAIL:  # the last rows, as columns
        last = MAIN + tl.arange(0, TAIL)
        last_query = _load(q, qn, MAIN, N, D, DP, TAIL)
        p = _product(key, tl.trans(last_query)) * scale
        corner = _product(last_key, tl.trans(last_query)) * scale
        corner = tl.where((last < N)[:, None], corner, float("-inf"))
        most = tl.maximum(tl.max(p, 0), tl.max(corner, 0))
        p, corner = tl.exp2(p - most[None, :]), tl.exp2(corner - most[None, :])
        total = tl.sum(p, 0) + tl.sum(corner, 0)
        mixed = _more(tl.trans(last_value), corner.to(half), _product(tl.trans(value), p.to(half)))
        _store(out, tl.trans(mixed / total[None, :]), heads * D, MAIN, N, D, DP, TAIL)
        tl.store(lse + last, (most + tl.log2(total)) * 0.6931471805599453, mask=last < N)


@triton.jit
def attend_backward(
    q, k, v, gradient, lse, out, scale, heads, qb, qh, qn, kb, kh, kn, vb, vh, vn, gb, gh, gn, op, ob, oh, on,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """The gradients of queries, keys and values, `op` apart in `out`.

    Attention's own output is not needed: a program has whole rows, so Σ_j p dp is a sum over what it holds. Tiles with
    the few last tokens are multiplied so that these are the columns of a result: the matrix units take 64 rows.
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
    rows = tl.arange(0, MAIN)
    query, key = _load(q, qn, 0, N, D, DP, MAIN), _load(k, kn, 0, N, D, DP, MAIN)
    value, incoming = _load(v, vn, 0, N, D, DP, MAIN), _load(gradient, gn, 0, N, D, DP, MAIN)
    norm = tl.load(lse + rows, mask=rows < N, other=0.0) * 1.4426950408889634
    half = key.dtype
    p = tl.exp2(_power(query, key, scale, 0, N, MAIN) - norm[:, None])
    dp = _product(incoming, tl.trans(value))
    inner = tl.sum(p * dp, 1)
    if TAIL:  # the main rows, the last keys
        last_key, last_value = _load(k, kn, MAIN, N, D, DP, TAIL), _load(v, vn, MAIN, N, D, DP, TAIL)
        side_p = tl.exp2(_power(query, last_key, scale, MAIN, N, TAIL) - norm[:, None])
        side_dp = _product(incoming, tl.trans(last_value))
        inner += tl.sum(side_p * side_dp, 1)
        side_ds = (side_p * (side_dp - inner[:, None])).to(half)
        last_dk = _product(tl.trans(query), side_ds)
        last_dv = _product(tl.trans(incoming), side_p.to(half))
    ds = (p * (dp - inner[:, None])).to(half)
    dq = _product(ds, key)
    if TAIL:
        dq = _more(side_ds, last_key, dq)
    _store(out, dq * natural, on, 0, N, D, DP, MAIN)
    dv = _product(tl.trans(p.to(half)), incoming)
    dk = _product(tl.trans(ds), query)
    if TAIL:  # the last rows, as columns
        last = MAIN + tl.arange(0, TAIL)
        there = last < N
        last_query, last_incoming = _load(q, qn, MAIN, N, D, DP, TAIL), _load(gradient, gn, MAIN, N, D, DP, TAIL)
        norm = tl.load(lse + last, mask=there, other=0.0) * 1.4426950408889634
        p = tl.exp2(_product(key, tl.trans(last_query)) * scale - norm[None, :])
        dp = _product(value, tl.trans(last_incoming))
        corner_p = _product(last_key, tl.trans(last_query)) * scale - norm[None, :]
        corner_p = tl.where(there[:, None], tl.exp2(corner_p), 0.0)
        corner_dp = _product(last_value, tl.trans(last_incoming))
        inner = tl.sum(p * dp, 0) + tl.sum(corner_p * corner_dp, 0)
        ds, corner_ds = (p * (dp - inner[None, :])).to(half), (corner_p * (corner_dp - inner[None, :])).to(half)
        dk, dv = _more(ds, last_query, dk), _more(p.to(half), last_incoming, dv)
    _store(out + op, dk * natural, on, 0, N, D, DP, MAIN)
    _store(out + 2 * op, dv, on, 0, N, D, DP, MAIN)
    if TAIL:
        last_dk = _more(tl.trans(last_query), tl.trans(corner_ds), last_dk)
        last_dv = _more(tl.trans(last_incoming), tl.trans(corner_p.to(half)), last_dv)
        last_dq = _more(tl.trans(last_key), corner_ds, _product(tl.trans(key), ds))
        _store(out, tl.trans(last_dq) * natural, on, MAIN, N, D, DP, TAIL)
        _store(out + op, tl.trans(last_dk) * natural, on, MAIN, N, D, DP, TAIL)
        _store(out + 2 * op, tl.trans(last_dv), on, MAIN, N, D, DP, TAIL)
