"""Attention's own gradients plus those of the diversification loss, in kernels that compute both from the same tiles.

Up to 256 keys, one program has all keys of a head (`attention_gradient`). With more, blocks of queries have a pass, and
then blocks of keys. The loss comes as the slope of the mean map that `gradient_pass` writes, which all heads share.
docs/kernels.md has the derivation.
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
    """Attention's own gradients plus those of the loss, of one head: `out` (3, B, H, N, D), strides op, ob, oh, on.

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


@triton.jit
def _block(blocks, heads):
    """The block, image and head of this program; the heads of an image, which read the same slopes, are adjacent."""
    head, block = tl.program_id(0) % heads, (tl.program_id(0) // heads) % blocks
    return block, tl.program_id(0) // (heads * blocks), head


@triton.jit
def _query_step(
    query, given, norm, base, factor, slope, k, v, batch, head, start, weighted, plain, total, scale, keys, stride,
    kb, kh, kn, vb, vh, vn, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    cols = start + tl.arange(0, BN)
    there = tl.minimum(cols, keys - 1) if LAST else cols
    key = load_rows(k, batch, head, there, (kb, kh, kn, 1), D, DP)
    value = load_rows(v, batch, head, there, (vb, vh, vn, 1), D, DP)
    if LAST:
        own = tl.load(slope + cols[None, :], mask=(cols < stride)[None, :], other=0.0).to(tl.float32)
    else:
        own = tl.load(slope + cols[None, :]).to(tl.float32)
    power = logits(query, key, scale, None, batch, head, there, there, (0, 0, 0, 0), False)
    tile = tl.exp2(power - norm[:, None])
    if LAST:
        tile *= tl.where(cols < keys, 1.0, 0.0)[None, :]
    back = tl.dot(given, tl.trans(value), input_precision="tf32x3")
    back = (back + (own * factor[:, None] - base[:, None])) * tile
    total += tl.sum(back, 1)
    weighted = tl.dot(back.to(key.dtype), key, weighted, input_precision="tf32x3")
    plain = tl.dot(tile.to(key.dtype), key, plain, input_precision="tf32x3")
    return weighted, plain, total


@triton.jit
def attention_query_gradient(
    q, k, v, output, incoming, lse, slope, bounds, weight, out, inner, scale, share, heads, keys, first, stride, begin,
    end, qb, qh, qn, kb, kh, kn, vb, vh, vn, ub, uh, un, ib, ih, iw, ob, oh, on,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries of one head, and per row `inner` (B, H, N): Σ_j p_ij e_ij.

    p is the head's attention and e the gradient with respect to it, of attention's output and of the loss. The gradient
    is Σ_j p e k_j − (Σ_j p e) Σ_j p k_j, so that one loop is enough. Only the output's part of Σ p e, its product with
    the incoming gradient, is known before, and subtracted first: what remains to be subtracted is small.

    `slope` (B, end − begin, stride) is the loss's slope with respect to K·a over the map's bound, of the compared rows
    `begin` to `end`, which are tokens from `first` on. The first chunk has the tokens before them, too.
    """
    scale = single(scale)
    low = tl.where(begin == 0, 0, begin + first)
    high = end + first
    block, batch, head = _block(tl.cdiv(high - low, BM), heads)
    numbers = low + block * BM + tl.arange(0, BM)
    near = tl.minimum(numbers, high - 1)
    query = load_rows(q, batch, head, near, (qb, qh, qn, 1), D, DP)
    given = load_rows(incoming, batch, head, near, (ib, ih, iw, 1), D, DP)
    made = load_rows(output, batch, head, near, (ub, uh, un, 1), D, DP)
    base = tl.sum(given.to(tl.float32) * made.to(tl.float32), 1)
    pair = (batch * heads + head).to(tl.int64) * keys
    norm = tl.load(lse + pair + near) * 1.4426950408889634
    factor = tl.load(weight).to(tl.float32) * tl.load(bounds + batch) * single(share)
    factor = tl.where(near >= first, factor, 0.0)
    chunk = slope + batch.to(tl.int64) * (end - begin) * stride
    mine = chunk + (tl.maximum(near - first - begin, 0) * stride)[:, None]
    total = tl.zeros([BM], tl.float32)
    weighted, plain = tl.zeros([BM, DP], tl.float32), tl.zeros([BM, DP], tl.float32)
    full = keys // BN * BN
    for start in range(0, full, BN):
        weighted, plain, total = _query_step(
            query, given, norm, base, factor, mine, k, v, batch, head, start, weighted, plain, total, scale, keys,
            stride, kb, kh, kn, vb, vh, vn, D, DP, BN, False,
        )  # fmt: skip
    if full < keys:
        weighted, plain, total = _query_step(
            query, given, norm, base, factor, mine, k, v, batch, head, full, weighted, plain, total, scale, keys,
            stride, kb, kh, kn, vb, vh, vn, D, DP, BN, True,
        )  # fmt: skip
    tl.store(inner + pair + near, base + total, mask=numbers < high)
    gradient = (weighted - total[:, None] * plain) * scale
    store_rows(out, gradient, batch, head, near, numbers < high, (ob, oh, on, 1), D, DP)


@triton.jit
def attention_key_gradient(
    q, k, v, incoming, lse, slope, bounds, weight, inner, key_out, value_out, scale, share, heads, keys, first, stride,
    begin, end, qb, qh, qn, kb, kh, kn, vb, vh, vn, ib, ih, iw, ob, oh, on,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values of one head; from the second chunk of rows on they are accumulated.

    Tiles have keys first, so that they are operands of the products as they are. See `attention_query_gradient`.
    """
    scale = single(scale)
    low = tl.where(begin == 0, 0, begin + first)
    high = end + first
    block, batch, head = _block(tl.cdiv(keys, BN), heads)
    cols = block * BN + tl.arange(0, BN)
    there = tl.minimum(cols, keys - 1)
    key = load_rows(k, batch, head, there, (kb, kh, kn, 1), D, DP)
    value = load_rows(v, batch, head, there, (vb, vh, vn, 1), D, DP)
    pair = (batch * heads + head).to(tl.int64) * keys
    scaled = tl.load(weight).to(tl.float32) * tl.load(bounds + batch) * single(share)
    chunk = slope + batch.to(tl.int64) * (end - begin) * stride + cols[:, None]
    key_made, value_made = tl.zeros([BN, DP], tl.float32), tl.zeros([BN, DP], tl.float32)
    for start in range(low, high, BM):
        numbers = start + tl.arange(0, BM)
        near = tl.minimum(numbers, high - 1)
        query = load_rows(q, batch, head, near, (qb, qh, qn, 1), D, DP)
        given = load_rows(incoming, batch, head, near, (ib, ih, iw, 1), D, DP)
        norm = tl.where(numbers < high, tl.load(lse + pair + near) * 1.4426950408889634, 1e30)
        shift = tl.load(inner + pair + near)
        factor = tl.where(near >= first, scaled, 0.0)
        place = (tl.maximum(near - first - begin, 0) * stride)[None, :]
        own = tl.load(chunk + place, mask=(cols < stride)[:, None], other=0.0).to(tl.float32)
        power = logits(key, query, scale, None, batch, head, there, near, (0, 0, 0, 0), False)
        tile = tl.exp2(power - norm[None, :])
        back = tl.dot(value, tl.trans(given), input_precision="tf32x3")
        back = (back + (own * factor[None, :] - shift[None, :])) * tile
        value_made = tl.dot(tile.to(given.dtype), given, value_made, input_precision="tf32x3")
        key_made = tl.dot(back.to(query.dtype), query, key_made, input_precision="tf32x3")
    key_made *= scale
    if begin > 0:
        key_made += load_rows(key_out, batch, head, there, (ob, oh, on, 1), D, DP).to(tl.float32)
        value_made += load_rows(value_out, batch, head, there, (ob, oh, on, 1), D, DP).to(tl.float32)
    store_rows(key_out, key_made, batch, head, cols, cols < keys, (ob, oh, on, 1), D, DP)
    store_rows(value_out, value_made, batch, head, cols, cols < keys, (ob, oh, on, 1), D, DP)
