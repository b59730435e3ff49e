"""Attention's own backward pass with the gradient of the loss added to it, for up to 256 keys.

See triton.py, which has the shapes, and docs/kernels.md, which has the derivation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitfocus.kernels.tiles import load_rows, logits, single, store_rows


@triton.jit
def attention_gradient(
    q, k, v, incoming, lse, slope, bounds, weight, out, scale, share, heads, keys, first, stride, pitch,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ib, ih, iw, op, ob, oh, on,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradients of queries, keys and values of one head, `out` (3, B, H, N, D) with strides op, ob, oh, on.

    `incoming` (B, H, N, D) is the gradient of the output, and `weight` that of the loss. Tiles have all keys and BM
    rows, keys first. `slope` (B, stride, pitch) is the loss's slope with respect to K·a as `gradient_pass` writes it,
    keys first: from row `first` on, over the map's bound, and 0 past the last row and column.
    """
    scale = single(scale)
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    cols = tl.arange(0, BN)
    there = tl.minimum(cols, keys - 1)
    key = load_rows(k, batch, head, there, (kb, kh, kn, 1), D, DP)
    value = load_rows(v, batch, head, there, (vb, vh, vn, 1), D, DP)
    exists = tl.where(cols < keys, 1.0, 0.0)
    factor = tl.load(weight).to(tl.float32) * tl.load(bounds + batch) * single(share)
    lse += tl.program_id(0).to(tl.int64) * keys
    mine = slope + batch.to(tl.int64) * stride * pitch + cols[:, None] * pitch
    key_made, value_made = tl.zeros([BN, DP], tl.float32), tl.zeros([BN, DP], tl.float32)
    for start in range(0, keys, BM):
        numbers = start + tl.arange(0, BM)
        near = tl.minimum(numbers, keys - 1)
        query = load_rows(q, batch, head, near, (qb, qh, qn, 1), D, DP)
        given = load_rows(incoming, batch, head, near, (ib, ih, iw, 1), D, DP)
        norm = tl.where(numbers < keys, tl.load(lse + near) * 1.4426950408889634, 1e30)
        compared = numbers - first
        inside = (cols < stride)[:, None] & ((compared >= 0) & (compared < pitch))[None, :]
        own = tl.load(mine + compared[None, :], mask=inside, other=0.0).to(tl.float32)
        power = logits(key, query, scale, None, batch, head, there, near, (0, 0, 0, 0), False)
        tile = tl.exp2(power - norm[None, :]) * exists[:, None]
        back = tl.dot(value, tl.trans(given), input_precision="tf32x3") + own * factor
        value_made = tl.dot(tile.to(given.dtype), given, value_made, input_precision="tf32x3")
        back *= tile
        delta = (back - tile * tl.sum(back, 0)[None, :]).to(query.dtype)
        key_made = tl.dot(delta, query, key_made, input_precision="tf32x3")
        made = tl.trans(tl.dot(tl.trans(key), delta, input_precision="tf32x3")) * scale
        store_rows(out, made, batch, head, near, numbers < keys, (ob, oh, on, 1), D, DP)
    store_rows(out + op, key_made * scale, batch, head, cols, cols < keys, (ob, oh, on, 1), D, DP)
    store_rows(out + 2 * op, value_made, batch, head, cols, cols < keys, (ob, oh, on, 1), D, DP)
