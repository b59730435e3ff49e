"""The gradients of queries, keys and bias from the gradient of the loss with respect to the mean map.

All heads share the latter, so it is stored (`gradient_pass`), unless maps are of single heads, whose slopes follow from
the tile itself. See triton.py, which has the shapes; `attention_gradient` adds them to attention's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.diversity.triton import _place
from vitfocus.kernels.tiles import by_row, load_rows, logits, single, store_rows


@triton.jit
def _program(blocks, heads, group):
    """The block, map, image and head of this program; each head has `blocks` programs."""
    h, block = tl.program_id(0) % group, (tl.program_id(0) // group) % blocks
    map_index = tl.program_id(0) // group // blocks
    batch, head = _place(map_index, heads, group)
    return block, map_index, batch, head + h


@triton.jit
def _tile_slope(
    tile, map_index, numbers, cols, towards, along, average, slopes, first, keys, span, reach, bound,
    PAPER: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The slope of the sum of cosines with respect to a tile of a single head's map: (rows, cols) or TURNED."""
    row, column = map_index.to(tl.int64) * reach + numbers, map_index.to(tl.int64) * span + cols
    toward, back = by_row(tl.load(towards + row), TURNED), by_row(tl.load(along + row), TURNED)
    weight, shared = by_row(tl.load(average + column), not TURNED), by_row(tl.load(slopes + column), not TURNED)
    mean = tl.where(by_row((cols >= first) & (cols < keys), not TURNED), tile, 0.0)
    own = toward * weight - back * mean
    if PAPER:
        return tl.where(mean < bound, 0.0, own + shared)
    return tl.where(mean <= bound, 0.0, own) + shared


@triton.jit
def _slope(
    a, tile, map_index, begin, end, numbers, near, cols, towards, along, average, slopes, first, keys, stride, span,
    reach, bound, ALONE: tl.constexpr, PAPER: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    """The slope of the sum of cosines with respect to K times the map, a tile (rows, cols).

    It is read from memory, where it is in units of the map's bound, or follows from the `tile` of a single head. JOINT:
    `a` has columns first, as `joint_gradient` takes it.
    """
    if ALONE:
        return _tile_slope(
            tile, map_index, numbers, cols, towards, along, average, slopes, first, keys, span, reach, bound, PAPER,
            False,
        )  # fmt: skip
    else:
        # A chunk of a map has fewer than 2³¹ elements, so only its offset needs 64 bits.
        if JOINT:
            pitch = tl.cdiv(end, 16) * 16
            mine = a + map_index.to(tl.int64) * stride * pitch
            place = near[:, None] + cols[None, :] * pitch
        else:
            mine = a + map_index.to(tl.int64) * (end - begin) * stride
            place = ((near - begin) * stride)[:, None] + cols[None, :]
        return tl.load(mine + place, mask=(cols < stride)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _factor(weight, bounds, map_index, share, scale, ALONE: tl.constexpr):
    """What the slopes are multiplied by."""
    factor = tl.load(weight).to(tl.float32) * (share * scale)
    if not ALONE:
        factor *= tl.load(bounds + map_index)
    return factor


@triton.jit
def _query_step(
    q_tile, k, norm, bias, a, batch, head, start, query_rows, numbers, near, weighted, plain, total, scale, bound,
    map_index, towards, along, average, slopes, first, keys, stride, span, reach, begin, end, kb, kh, kn, bb, bh, bq,
    bk, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ALONE: tl.constexpr,
    PAPER: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    cols = start + tl.arange(0, BN)
    there = tl.minimum(cols, keys - 1) if LAST else cols
    key = load_rows(k, batch, head, there, (kb, kh, kn, 1), D, DP)
    power = logits(q_tile, key, scale, bias, batch, head, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
    tile = tl.exp2(power - norm[:, None])
    if ALONE or LAST:
        slope = _slope(
            a, tile, map_index, begin, end, numbers, near, cols, towards, along, average, slopes, first, keys, stride,
            span, reach, bound, ALONE, PAPER, False,
        )  # fmt: skip
    else:
        mine = a + map_index.to(tl.int64) * (end - begin) * stride
        slope = tl.load(mine + ((near - begin) * stride)[:, None] + cols[None, :]).to(tl.float32)
    slope = tile * slope
    total += tl.sum(slope, 1)
    if LAST:
        tile *= tl.where(cols < keys, 1.0, 0.0)[None, :]
    weighted = tl.dot(slope.to(key.dtype), key, weighted, input_precision="tf32x3")
    plain = tl.dot(tile.to(key.dtype), key, plain, input_precision="tf32x3")
    return weighted, plain, total


# The incoming gradients of the layers' losses are numbers of one tensor: their alignment is not compiled in.
@triton.jit(do_not_specialize_on_alignment=["weight"])
def query_gradient(
    q, k, norms, bias, rows, a, average, slopes, towards, along, bounds, inner, weight, out, share, scale, bound,
    heads, group, keys, row_count, first, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, begin, end,
    ob, oh, on,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries of one head, and I(h,i) = Σ_j p_hij · (slope of K·a_ij), by row.

    With p the head's attention, s the slope and I = Σ_j p_j s_j, it is Σ_j p_j (s_j − I) k_j = Σ_j p_j s_j k_j − I Σ_j
    p_j k_j, so that one loop is enough.
    """
    share, scale, bound = single(share), single(scale), single(bound)
    block, map_index, batch, head = _program(tl.cdiv(end - begin, BM), heads, group)
    numbers = begin + block * BM + tl.arange(0, BM)
    near = tl.minimum(numbers, end - 1)
    query_rows = near + first
    if HAS_ROWS:
        query_rows = tl.load(rows + near).to(tl.int32)
    query = load_rows(q, batch, head, query_rows, (qb, qh, qn, 1), D, DP)
    pair = (batch * heads + head).to(tl.int64) * reach
    norm = tl.load(norms + pair + numbers)
    total = tl.zeros([BM], tl.float32)
    weighted, plain = tl.zeros([BM, DP], tl.float32), tl.zeros([BM, DP], tl.float32)
    full = keys // BN * BN
    for start in range(0, full, BN):
        weighted, plain, total = _query_step(
            query, k, norm, bias, a, batch, head, start, query_rows, numbers, near, weighted, plain, total, scale,
            bound, map_index, towards, along, average, slopes, first, keys, stride, span, reach, begin, end, kb, kh, kn,
            bb, bh, bq, bk, D, DP, BN, HAS_BIAS, ALONE, PAPER, False,
        )  # fmt: skip
    if full < keys:
        weighted, plain, total = _query_step(
            query, k, norm, bias, a, batch, head, full, query_rows, numbers, near, weighted, plain, total, scale,
            bound, map_index, towards, along, average, slopes, first, keys, stride, span, reach, begin, end, kb, kh, kn,
            bb, bh, bq, bk, D, DP, BN, HAS_BIAS, ALONE, PAPER, True,
        )  # fmt: skip
    total = total / keys
    tl.store(inner + pair + numbers, total)
    made = (weighted - total[:, None] * plain) * _factor(weight, bounds, map_index, share, scale, ALONE)
    store_rows(out, made, batch, head, query_rows, numbers < end, (ob, oh, on, 1), D, DP)


@triton.jit(do_not_specialize_on_alignment=["weight"])
def key_gradient(
    q, k, norms, bias, rows, a, average, slopes, towards, along, bounds, inner, weight, out, share, scale, bound,
    heads, group, keys, row_count, first, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, begin, end,
    ob, oh, on,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of keys of one head; from the second chunk of rows on it is accumulated."""
    share, scale, bound = single(share), single(scale), single(bound)
    block, map_index, batch, head = _program(tl.cdiv(keys, BN), heads, group)
    cols = block * BN + tl.arange(0, BN)
    there = tl.minimum(cols, keys - 1)
    key = load_rows(k, batch, head, there, (kb, kh, kn, 1), D, DP)
    pair = (batch * heads + head).to(tl.int64) * reach
    made = tl.zeros([BN, DP], tl.float32)
    for start in range(begin, end, BM):
        numbers = start + tl.arange(0, BM)
        near = tl.minimum(numbers, end - 1)
        query_rows = near + first
        if HAS_ROWS:
            query_rows = tl.load(rows + near).to(tl.int32)
        query = load_rows(q, batch, head, query_rows, (qb, qh, qn, 1), D, DP)
        norm = tl.load(norms + pair + numbers)
        shift = tl.load(inner + pair + numbers)
        power = logits(query, key, scale, bias, batch, head, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
        tile = tl.exp2(power - norm[:, None])
        slope = _slope(
            a, tile, map_index, begin, end, numbers, near, cols, towards, along, average, slopes, first, keys, stride,
            span, reach, bound, ALONE, PAPER, False,
        )  # fmt: skip
        delta = (tile * (slope - shift[:, None])).to(query.dtype)
        made = tl.dot(tl.trans(delta), query, made, input_precision="tf32x3")
    made = made * _factor(weight, bounds, map_index, share, scale, ALONE)
    if begin > 0:
        made += load_rows(out, batch, head, there, (ob, oh, on, 1), D, DP).to(tl.float32)
    store_rows(out, made, batch, head, cols, cols < keys, (ob, oh, on, 1), D, DP)


@triton.jit(do_not_specialize_on_alignment=["weight"])
def joint_gradient(
    q, k, norms, bias, rows, a, average, slopes, towards, along, bounds, inner, weight, out, key_out, share, scale,
    bound, heads, group, keys, row_count, first, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, begin,
    end, ob, oh, on, pb, ph, pn,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """The gradients of queries and keys of one head, if one block holds all columns: each tile is computed once.

    Tiles are turned, (cols, rows), and so is the stored slope `a`, whose rows are padded to a multiple of 16.
    """
    share, scale, bound = single(share), single(scale), single(bound)
    _, map_index, batch, head = _program(1, heads, group)
    cols = tl.arange(0, BN)
    there = tl.minimum(cols, keys - 1)
    key = load_rows(k, batch, head, there, (kb, kh, kn, 1), D, DP)
    pair = (batch * heads + head).to(tl.int64) * reach
    factor = _factor(weight, bounds, map_index, share, scale, ALONE)
    exists, one = tl.where(cols < keys, 1.0, 0.0), 1.0 / keys
    key_made = tl.zeros([BN, DP], tl.float32)
    pitch = tl.cdiv(row_count, 16) * 16
    mine = a + map_index.to(tl.int64) * stride * pitch + cols[:, None] * pitch
    for start in range(0, row_count, BM):
        numbers = start + tl.arange(0, BM)
        near = tl.minimum(numbers, row_count - 1)
        query_rows = near + first
        if HAS_ROWS:
            query_rows = tl.load(rows + near).to(tl.int32)
        query = load_rows(q, batch, head, query_rows, (qb, qh, qn, 1), D, DP)
        norm = tl.load(norms + pair + numbers)
        power = logits(key, query, scale, bias, batch, head, there, query_rows, (bb, bh, bk, bq), HAS_BIAS)
        tile = tl.exp2(power - norm[None, :]) * exists[:, None]
        if ALONE:
            slope = _tile_slope(
                tile, map_index, numbers, cols, towards, along, average, slopes, first, keys, span, reach, bound, PAPER,
                True,
            )  # fmt: skip
        else:
            stored = (cols < stride)[:, None] & (numbers < pitch)[None, :]
            slope = tl.load(mine + numbers[None, :], mask=stored, other=0.0).to(tl.float32)
        total = tl.sum(tile * slope, 0) * one
        if HAS_BIAS:
            tl.store(inner + pair + numbers, total)
        delta = (tile * (slope - total[None, :])).to(query.dtype)
        key_made = tl.dot(delta, query, key_made, input_precision="tf32x3")
        made = tl.dot(tl.trans(key), delta, input_precision="tf32x3")
        store_rows(out, tl.trans(made) * factor, batch, head, query_rows, numbers < row_count, (ob, oh, on, 1), D, DP)
    store_rows(key_out, key_made * factor, batch, head, cols, cols < keys, (pb, ph, pn, 1), D, DP)


@triton.jit(do_not_specialize_on_alignment=["weight"])
def bias_gradient(
    q, k, norms, bias, rows, a, average, slopes, towards, along, bounds, inner, weight, out, share, scale, bound,
    heads, group, keys, row_count, first, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, begin, end,
    queries, images, at_once, bias_heads,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, ALONE: tl.constexpr, BY_ROW: tl.constexpr,
    JOINT: tl.constexpr,
):  # fmt: skip
    """The gradient of an additive bias of one head or of all, summed over some images, and over rows unless BY_ROW.

    (chunks, bias_heads, Q or 1, K), where bias_heads is H or 1. A program covers a block of columns (BY_ROW: and
    of rows); without BY_ROW it accumulates, as rows come in chunks.
    """
    share, scale, bound = single(share), single(scale), single(bound)
    row_blocks, col_blocks = tl.cdiv(end - begin, BM), tl.cdiv(keys, BN)
    across = row_blocks if BY_ROW else 1
    tile_index, part = tl.program_id(0) % (across * col_blocks), tl.program_id(0) // (across * col_blocks)
    first_head, chunk, shared = part % bias_heads, part // bias_heads, heads // bias_heads
    cols = (tile_index // across) * BN + tl.arange(0, BN)
    there, col_ok = tl.minimum(cols, keys - 1), cols < keys
    first_block = tile_index % across if BY_ROW else 0
    total = tl.zeros([BM, BN], tl.float32)
    for step in range(chunk * at_once * shared, tl.minimum((chunk + 1) * at_once, images) * shared):
        batch, head = tl.program_id(0) * 0 + step // shared, first_head + step % shared
        map_index = (batch * heads + head) // group
        key = load_rows(k, batch, head, there, (kb, kh, kn, 1), D, DP)
        pair = (batch * heads + head).to(tl.int64) * reach
        for row_block in range(first_block, first_block + 1 if BY_ROW else row_blocks):
            numbers = begin + row_block * BM + tl.arange(0, BM)
            near = tl.minimum(numbers, end - 1)
            query_rows = near + first
            if HAS_ROWS:
                query_rows = tl.load(rows + near).to(tl.int32)
            query = load_rows(q, batch, head, query_rows, (qb, qh, qn, 1), D, DP)
            norm = tl.load(norms + pair + numbers)
            shift = tl.load(inner + pair + numbers)
            power = logits(query, key, scale, bias, batch, head, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
            tile = tl.exp2(power - norm[:, None])
            slope = _slope(
                a, tile, map_index, begin, end, numbers, near, cols, towards, along, average, slopes, first, keys,
                stride, span, reach, bound, ALONE, PAPER, JOINT,
            )  # fmt: skip
            total += tile * (slope - shift[:, None]) * _factor(weight, bounds, map_index, share, 1.0, ALONE)
    start = out + (chunk * bias_heads + first_head).to(tl.int64) * (queries if BY_ROW else 1) * keys
    if BY_ROW:
        numbers = begin + first_block * BM + tl.arange(0, BM)
        near = tl.minimum(numbers, end - 1)
        query_rows = near + first
        if HAS_ROWS:
            query_rows = tl.load(rows + near).to(tl.int32)
        place = start + query_rows[:, None].to(tl.int64) * keys + cols[None, :]
        tl.store(place, total, mask=(numbers < end)[:, None] & col_ok[None, :])
    else:
        before = tl.load(start + cols, mask=col_ok, other=0.0)
        tl.store(start + cols, before + tl.sum(total, 0), mask=col_ok)


class BiasSum:
    """The gradient of a bias: per image if the bias is; else summed over images in parts, to occupy many SMs.

    Nothing is larger than the bias in float32, or `least` bytes: heads and rows that share a bias are summed at once.
    """

    def __init__(self, bias: Tensor, sizes: tuple[int, int, int], settings: dict[str, Any], least: int) -> None:
        self.bias, self.settings, (self.images, self.queries, self.keys) = bias, settings, sizes
        self.by_row = bias.shape[2] > 1 or self.queries == 1
        shape = (bias.shape[1], self.queries if self.by_row else 1, self.keys)
        most = max(1, least // (4 * math.prod(shape)))
        self.at_once = 1 if bias.shape[0] > 1 else -(-self.images // min(64, most, self.images))
        parts = -(-self.images // self.at_once)
        self.sums = torch.zeros(parts, *shape, dtype=torch.float32, device=bias.device)

    def add(self, given: tuple[Any, ...], rest: tuple[Any, ...], begin: int, end: int) -> None:
        """Add what these rows give."""
        row_blocks = -(-(end - begin) // self.settings["BM"]) if self.by_row else 1
        tiles = row_blocks * -(-self.keys // self.settings["BN"])
        parts, heads = self.sums.shape[:2]
        bias_gradient[(tiles * heads * parts,)](
            *given, self.sums, *rest, self.queries, self.images, self.at_once, heads, **self.settings,
            BY_ROW=self.by_row,
        )  # fmt: skip

    def total(self) -> Tensor:
        """The sum in the shape and dtype of the bias."""
        sums = self.sums
        for axis in range(4):
            if self.bias.shape[axis] == 1 and sums.shape[axis] > 1:
                sums = sums.sum(dim=axis, keepdim=True)
        return sums.expand(self.bias.shape).to(self.bias.dtype)


@triton.jit(do_not_specialize_on_alignment=["weight"])
def attention_gradient(
    q, k, v, incoming, lse, slope, bounds, weight, out, scale, share, heads, keys, first, stride, pitch,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ib, ih, iw, op, ob, oh, on,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Attention's own gradients plus those of the loss, of one head: `out` (3, B, H, N, D), strides op, ob, oh, on.

    `incoming` (B, H, N, D) is the gradient of the output, and `weight` that of the loss. Tiles have all keys and BM
    rows, keys first. `slope` (B, stride, pitch) is the loss's slope with respect to K·a as `gradient_pass` writes it,
    keys first: from row `first` on, over the map's bound, and 0 past the last row and column. AHEAD is the number of
    stages of the loop, given to it so that the slope's tiles are loaded ahead, too.
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
    for start in tl.range(0, keys, BM, num_stages=AHEAD):
        numbers = start + tl.arange(0, BM)
        near = tl.minimum(numbers, keys - 1)
        query = load_rows(q, batch, head, near, (qb, qh, qn, 1), D, DP)
        given = load_rows(incoming, batch, head, near, (ib, ih, iw, 1), D, DP)
        norm = tl.where(numbers < keys, tl.load(lse + near) * 1.4426950408889634, 1e30)
        power = logits(key, query, scale, None, batch, head, there, near, (0, 0, 0, 0), False)
        tile = tl.exp2(power - norm[None, :]) * exists[:, None]
        value_made = tl.dot(tile.to(given.dtype), given, value_made, input_precision="tf32x3")
        compared = numbers - first
        inside = (cols < stride)[:, None] & ((compared >= 0) & (compared < pitch))[None, :]
        own = tl.load(mine + compared[None, :], mask=inside, other=0.0)
        back = tl.dot(value, tl.trans(given), input_precision="tf32x3") + own.to(tl.float32) * factor
        back *= tile
        delta = (back - tile * tl.sum(back, 0)[None, :]).to(query.dtype)
        key_made = tl.dot(delta, query, key_made, input_precision="tf32x3")
        made = tl.trans(tl.dot(tl.trans(key), delta, input_precision="tf32x3")) * scale
        store_rows(out, made, batch, head, near, numbers < keys, (ob, oh, on, 1), D, DP)
    store_rows(out + op, key_made * scale, batch, head, cols, cols < keys, (ob, oh, on, 1), D, DP)
    store_rows(out + 2 * op, value_made, batch, head, cols, cols < keys, (ob, oh, on, 1), D, DP)
