"""The Attention Diversification Loss from queries and keys. docs/kernels.md has the derivation.

Forward: `mean_pass` computes the heads' mean map a, `unit_pass` reads it again; after each comes a launch over vectors
of length K. Backward: a pass by rows and one by columns, each for one head at a time, with the shape of fused
attention's own backward pass; the map's gradient follows from a, which all heads share. No pass depends on the number
of heads at compile time. All sums have a fixed order, so results are bitwise reproducible.

Shapes: M maps of G heads, R rows, K keys of which the first `first` are left out. Vectors by row are (M, R), by
column (M, K). Attention is in units of 1/K: a is stored as K·a, rounded to `a`'s dtype, (M, rows, stride), and
everything else is computed from the rounded values. Rounding moves no entry across the threshold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitfocus.kernels.tiles import by_row, load_rows, logits, single, store_rows


@triton.jit
def _place(map_index, heads, group):
    """The image and the first head of a map."""
    groups = heads // group
    return map_index // groups, (map_index % groups) * group


@triton.jit
def _program(blocks, heads, group):
    """The block, map, image and head of this program; each head has `blocks` programs."""
    h, block = tl.program_id(0) % group, (tl.program_id(0) // group) % blocks
    map_index = tl.program_id(0) // group // blocks
    batch, head = _place(map_index, heads, group)
    return block, map_index, batch, head + h


@triton.jit
def _above(mean, bound, PAPER: tl.constexpr):
    """Entries above the threshold, the rest set to 0; NaN is kept."""
    return tl.where(mean < bound, 0.0, mean) if PAPER else tl.where(mean <= bound, 0.0, mean)


@triton.jit
def _rounded(mean, outside, bound, PAPER: tl.constexpr, DTYPE: tl.constexpr):
    """A tile rounded to that dtype without crossing the threshold; `outside` marks entries not above it. Keeps NaN."""
    if mean.dtype == DTYPE:
        return mean
    else:
        # The neighbours of the threshold in float16, whose order is that of its bits.
        near = tl.cast(bound, tl.float16)
        bits = near.to(tl.int16, bitcast=True)
        over = near.to(tl.float32) >= bound if PAPER else near.to(tl.float32) > bound
        least = tl.where(over, bits, bits + 1).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        most = tl.where(over, bits - 1, bits).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        rounded = mean.to(tl.float16).to(tl.float32)
        above = tl.maximum(rounded, least, propagate_nan=tl.PropagateNan.ALL)
        return tl.where(outside, tl.minimum(rounded, most), above)


@triton.jit
def _mean_tile(
    q, k, norms, bias, batch, head, rows, numbers, cols, share, scale, heads, group, reach,
    q_strides, k_strides, bias_strides, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A tile of K times attention, summed over heads and scaled by each column's `share`; 0 for rows past the end."""
    total = tl.zeros([BM, BN], tl.float32)
    for h in range(group):
        query = load_rows(q, batch, head + h, rows, q_strides, D, DP)
        key = load_rows(k, batch, head + h, cols, k_strides, D, DP)
        norm = tl.load(norms + (batch * heads + head + h).to(tl.int64) * reach + numbers)
        power = logits(query, key, scale, bias, batch, head + h, rows, cols, bias_strides, HAS_BIAS)
        total += tl.exp2(power - norm[:, None])
    return total * share[None, :]


@triton.jit
def mean_pass(
    q, k, norms, bias, rows, a, column_sums, squares, scale, bound, heads, group, keys, row_count, first,
    qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, begin, end, maps, parts,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """The mean map a. Per row: Σ_j t_ij², t being a above the threshold. Per block of rows: column sums of a or t.

    A program covers a part of the columns, so its row sums are partial. Only rows `begin` to `end`.
    """
    scale, bound = single(scale), single(bound)
    blocks, part = tl.cdiv(end - begin, BM), (tl.program_id(0) // tl.cdiv(end - begin, BM)) % parts
    block, map_index = tl.program_id(0) % blocks, tl.program_id(0) // (blocks * parts)
    batch, head = _place(map_index, heads, group)
    numbers = begin + block * BM + tl.arange(0, BM)
    near = tl.minimum(numbers, end - 1)
    query_rows = near + first
    if HAS_ROWS:
        query_rows = tl.load(rows + near).to(tl.int32)
    square = tl.zeros([BM], tl.float32)
    sums = column_sums + (map_index.to(tl.int64) * tl.cdiv(row_count, BM) + begin // BM + block) * span
    mine = a + (map_index.to(tl.int64) * (end - begin) + (near - begin))[:, None] * stride
    width = tl.cdiv(tl.cdiv(stride, BN), parts) * BN
    one = 1.0 / group
    for start in range(part * width, tl.minimum((part + 1) * width, stride), BN):
        cols = start + tl.arange(0, BN)
        mean = _mean_tile(
            q, k, norms, bias, batch, head, query_rows, numbers, tl.minimum(cols, keys - 1),
            tl.where((cols >= first) & (cols < keys), one, 0.0), scale, heads, group, reach,
            (qb, qh, qn, 1), (kb, kh, kn, 1), (bb, bh, bq, bk), D, DP, BM, BN, HAS_BIAS,
        )  # fmt: skip
        outside = mean < bound if PAPER else mean <= bound
        mean = _rounded(mean, outside, bound, PAPER, a.dtype.element_ty)
        kept = _above(mean, bound, PAPER)
        square += tl.sum(kept * kept, 1)
        tl.store(sums + cols, tl.sum(kept if PAPER else mean, 0))
        if STORED:
            inside = (numbers < end)[:, None] & (cols < stride)[None, :]
            tl.store(mine + cols[None, :], mean.to(a.dtype.element_ty), mask=inside)
    tl.store(squares + (part * maps + map_index).to(tl.int64) * reach + numbers, square)


@triton.jit
def _added(sums, map_index, blocks, span, cols, ok, BK: tl.constexpr, BR: tl.constexpr):
    """Column sums over all blocks of rows, loaded BR blocks at a time."""
    total = tl.zeros([BR, BK], tl.float32)
    for start in range(0, blocks, BR):
        block = start + tl.arange(0, BR)
        place = (map_index * blocks + block)[:, None] * span + cols[None, :]
        total += tl.load(sums + place, mask=(block < blocks)[:, None] & ok[None, :], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def column_pass(sums, average, lengths, bound, blocks, keys, span, row_count, BK: tl.constexpr, BR: tl.constexpr,
                PAPER: tl.constexpr):  # fmt: skip
    """The average of the rows, by column, thresholded in the official form, and its norm."""
    bound = single(bound)
    map_index = tl.program_id(0).to(tl.int64)
    length = 0.0
    for start in range(0, span, BK):
        cols = start + tl.arange(0, BK)
        mean = _added(sums, map_index, blocks, span, cols, cols < keys, BK, BR) / row_count
        if not PAPER:
            mean = _above(mean, bound, False)
        tl.store(average + map_index * span + cols, mean, mask=cols < span)
        length += tl.sum(mean * mean, 0)
    tl.store(lengths + map_index, tl.sqrt(length))


@triton.jit
def _inverse(length):
    """1 / length, and 0 for 0."""
    return tl.where(length == 0, 0.0, 1.0 / tl.where(length == 0, 1.0, length))


@triton.jit
def unit_pass(
    q, k, norms, bias, rows, a, average, lengths, squares, towards, along, unit_sums, scale, bound,
    heads, group, keys, row_count, first, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, begin, end, maps,
    parts,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Per row: two coefficients of the gradient. Per block of rows: column sums of the rows t at unit length.

    Only rows `begin` to `end`, whose map is stored unless maps are of single heads. While the average is unknown, it
    and its norm are 0, and only the sums are meaningful.
    """
    scale, bound = single(scale), single(bound)
    blocks = tl.cdiv(end - begin, BM)
    block, map_index = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = _place(map_index, heads, group)
    numbers = begin + block * BM + tl.arange(0, BM)
    near = tl.minimum(numbers, end - 1)
    query_rows = near + first
    if HAS_ROWS:
        query_rows = tl.load(rows + near).to(tl.int32)
    square, dot = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for part in range(parts):
        square += tl.load(squares + (part * maps + map_index).to(tl.int64) * reach + numbers)
    unit = _inverse(tl.sqrt(square))  # 0 beyond the last row
    sums = unit_sums + (map_index.to(tl.int64) * tl.cdiv(row_count, BM) + begin // BM + block) * span
    mine = a + (map_index.to(tl.int64) * (end - begin) + (near - begin))[:, None] * stride
    one = 1.0 / group
    for start in range(0, stride, BN):
        cols = start + tl.arange(0, BN)
        if STORED:
            mean = tl.load(mine + cols[None, :], mask=(cols < stride)[None, :], other=0.0).to(tl.float32)
        else:
            mean = _mean_tile(
                q, k, norms, bias, batch, head, query_rows, numbers, tl.minimum(cols, keys - 1),
                tl.where((cols >= first) & (cols < keys), one, 0.0), scale, heads, group, reach,
                (qb, qh, qn, 1), (kb, kh, kn, 1), (bb, bh, bq, bk), D, DP, BM, BN, HAS_BIAS,
            )  # fmt: skip
        kept = _above(mean, bound, PAPER)
        weight = tl.load(average + map_index.to(tl.int64) * span + cols)
        dot += tl.sum(kept * weight[None, :], 1)
        tl.store(sums + cols, tl.sum(kept * unit[:, None], 0))
    toward = unit * _inverse(tl.load(lengths + map_index))
    row = map_index.to(tl.int64) * reach + numbers
    tl.store(towards + row, toward)
    tl.store(along + row, toward * dot * unit * unit)


@triton.jit
def slope_pass(unit_sums, average, lengths, slopes, losses, blocks, keys, span, row_count, BK: tl.constexpr,
               BR: tl.constexpr, PAPER: tl.constexpr):  # fmt: skip
    """A map's loss, and the gradient of its sum of cosines with respect to the entries averaged per column."""
    map_index = tl.program_id(0).to(tl.int64)
    one_over = _inverse(tl.load(lengths + map_index))
    product = tl.zeros([BK], tl.float32)
    for start in range(0, span, BK):
        cols = start + tl.arange(0, BK)
        total = _added(unit_sums, map_index, blocks, span, cols, cols < keys, BK, BR)
        product += total * tl.load(average + map_index * span + cols, mask=cols < span, other=0.0)
        tl.store(slopes + map_index * span + cols, total, mask=cols < span)
    cosine = tl.sum(product, 0) * one_over
    tl.debug_barrier()
    for start in range(0, span, BK):
        cols = start + tl.arange(0, BK)
        total = tl.load(slopes + map_index * span + cols, mask=cols < span, other=0.0)
        mean = tl.load(average + map_index * span + cols, mask=cols < span, other=0.0)
        slope = (total - cosine * one_over * mean) * one_over / row_count
        if not PAPER:
            slope = tl.where(mean == 0, 0.0, slope)
        tl.store(slopes + map_index * span + cols, slope, mask=cols < span)
    tl.store(losses + map_index, cosine / row_count)


@triton.jit
def _map_slope(
    a, tile, map_index, begin, end, numbers, cols, first, keys, stride, bound, toward, back, weight, shared,
    ALONE: tl.constexpr, PAPER: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The slope of the sum of cosines with respect to K·a, a tile: (rows, cols) or TURNED (cols, rows).

    a is read from memory, or, if a map has one head, is the head's own `tile`. `weight` and `shared` are the average
    and the slopes of the columns; all are 0 for columns past the end.
    """
    shared = by_row(shared, not TURNED)
    if ALONE:
        mean = tl.where(by_row((cols >= first) & (cols < keys), not TURNED), tile, 0.0)
    else:
        # A chunk of a map has fewer than 2³¹ elements, so only its offset needs 64 bits.
        mine = a + map_index.to(tl.int64) * (end - begin) * stride
        place = by_row((numbers - begin) * stride, TURNED) + by_row(cols, not TURNED)
        mean = tl.load(mine + place, mask=by_row(cols < stride, not TURNED), other=0.0).to(tl.float32)
    own = by_row(toward, TURNED) * by_row(weight, not TURNED) - by_row(back, TURNED) * mean
    if PAPER:
        return tl.where(mean < bound, 0.0, own + shared)
    return tl.where(mean <= bound, 0.0, own) + shared


@triton.jit
def query_gradient(
    q, k, norms, bias, rows, a, average, slopes, towards, along, inner, weight, out, share, scale, bound,
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
    row, pair = map_index.to(tl.int64) * reach + numbers, (batch * heads + head).to(tl.int64) * reach
    norm, toward, back = tl.load(norms + pair + numbers), tl.load(towards + row), tl.load(along + row)
    total = tl.zeros([BM], tl.float32)
    weighted, plain = tl.zeros([BM, DP], tl.float32), tl.zeros([BM, DP], tl.float32)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        there = tl.minimum(cols, keys - 1)
        key = load_rows(k, batch, head, there, (kb, kh, kn, 1), D, DP)
        power = logits(query, key, scale, bias, batch, head, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
        tile = tl.exp2(power - norm[:, None])
        column = map_index.to(tl.int64) * span + cols
        weights, common = tl.load(average + column), tl.load(slopes + column)
        slope = tile * _map_slope(
            a, tile, map_index, begin, end, near, cols, first, keys, stride, bound, toward, back,
            weights, common, ALONE, PAPER, False,
        )  # fmt: skip
        total += tl.sum(slope, 1)
        tile *= tl.where(cols < keys, 1.0, 0.0)[None, :]
        weighted = tl.dot(slope.to(key.dtype), key, weighted, input_precision="tf32x3")
        plain = tl.dot(tile.to(key.dtype), key, plain, input_precision="tf32x3")
    total = total / keys
    tl.store(inner + pair + numbers, total)
    made = (weighted - total[:, None] * plain) * (tl.load(weight).to(tl.float32) * (share * scale))
    store_rows(out, made, batch, head, query_rows, numbers < end, (ob, oh, on, 1), D, DP)


@triton.jit
def key_gradient(
    q, k, norms, bias, rows, a, average, slopes, towards, along, inner, weight, out, share, scale, bound,
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
    column = map_index.to(tl.int64) * span + cols
    weights, common = tl.load(average + column), tl.load(slopes + column)
    made = tl.zeros([BN, DP], tl.float32)
    for start in range(begin, end, BM):
        numbers = start + tl.arange(0, BM)
        near = tl.minimum(numbers, end - 1)
        query_rows = near + first
        if HAS_ROWS:
            query_rows = tl.load(rows + near).to(tl.int32)
        query = load_rows(q, batch, head, query_rows, (qb, qh, qn, 1), D, DP)
        row = map_index.to(tl.int64) * reach + numbers
        norm, toward, back = tl.load(norms + pair + numbers), tl.load(towards + row), tl.load(along + row)
        shift = tl.load(inner + pair + numbers)
        power = logits(key, query, scale, bias, batch, head, there, query_rows, (bb, bh, bk, bq), HAS_BIAS)
        tile = tl.exp2(power - norm[None, :])
        slope = _map_slope(
            a, tile, map_index, begin, end, near, cols, first, keys, stride, bound, toward, back,
            weights, common, ALONE, PAPER, True,
        )  # fmt: skip
        made = tl.dot((tile * (slope - shift[None, :])).to(query.dtype), query, made, input_precision="tf32x3")
    made = made * (tl.load(weight).to(tl.float32) * (share * scale))
    if begin > 0:
        made += load_rows(out, batch, head, there, (ob, oh, on, 1), D, DP).to(tl.float32)
    store_rows(out, made, batch, head, cols, cols < keys, (ob, oh, on, 1), D, DP)


@triton.jit
def joint_gradient(
    q, k, norms, bias, rows, a, average, slopes, towards, along, inner, weight, out, key_out, share, scale, bound,
    heads, group, keys, row_count, first, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, begin, end,
    ob, oh, on, pb, ph, pn,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """The gradients of queries and keys of one head, if one block holds all columns: each tile is computed once."""
    share, scale, bound = single(share), single(scale), single(bound)
    _, map_index, batch, head = _program(1, heads, group)
    cols = tl.arange(0, BN)
    there = tl.minimum(cols, keys - 1)
    key = load_rows(k, batch, head, there, (kb, kh, kn, 1), D, DP)
    pair = (batch * heads + head).to(tl.int64) * reach
    factor = tl.load(weight).to(tl.float32) * (share * scale)
    exists, one = tl.where(cols < keys, 1.0, 0.0), 1.0 / keys
    column = map_index.to(tl.int64) * span + cols
    weights, common = tl.load(average + column), tl.load(slopes + column)
    key_made = tl.zeros([BN, DP], tl.float32)
    for start in range(0, row_count, BM):
        numbers = start + tl.arange(0, BM)
        near = tl.minimum(numbers, row_count - 1)
        query_rows = near + first
        if HAS_ROWS:
            query_rows = tl.load(rows + near).to(tl.int32)
        query = load_rows(q, batch, head, query_rows, (qb, qh, qn, 1), D, DP)
        row = map_index.to(tl.int64) * reach + numbers
        norm, toward, back = tl.load(norms + pair + numbers), tl.load(towards + row), tl.load(along + row)
        power = logits(key, query, scale, bias, batch, head, there, query_rows, (bb, bh, bk, bq), HAS_BIAS)
        tile = tl.exp2(power - norm[None, :]) * exists[:, None]
        slope = tile * _map_slope(
            a, tile, map_index, 0, row_count, near, cols, first, keys, stride, bound, toward, back,
            weights, common, ALONE, PAPER, True,
        )  # fmt: skip
        total = tl.sum(slope, 0) * one
        tl.store(inner + pair + numbers, total)
        slope = (slope - tile * total[None, :]).to(query.dtype)
        key_made = tl.dot(slope, query, key_made, input_precision="tf32x3")
        made = tl.dot(tl.trans(key), slope, input_precision="tf32x3")
        store_rows(out, tl.trans(made) * factor, batch, head, query_rows, numbers < row_count, (ob, oh, on, 1), D, DP)
    store_rows(key_out, key_made * factor, batch, head, cols, cols < keys, (pb, ph, pn, 1), D, DP)


@triton.jit
def bias_gradient(
    q, k, norms, bias, rows, a, average, slopes, towards, along, inner, weight, out, share, scale, bound,
    heads, group, keys, row_count, first, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, begin, end,
    queries, images, at_once, bias_heads,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, ALONE: tl.constexpr, BY_ROW: tl.constexpr,
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
            row = map_index.to(tl.int64) * reach + numbers
            norm, toward, back = tl.load(norms + pair + numbers), tl.load(towards + row), tl.load(along + row)
            shift = tl.load(inner + pair + numbers)
            power = logits(query, key, scale, bias, batch, head, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
            tile = tl.exp2(power - norm[:, None])
            column = map_index.to(tl.int64) * span + cols
            weights, common = tl.load(average + column), tl.load(slopes + column)
            slope = _map_slope(
                a, tile, map_index, begin, end, near, cols, first, keys, stride, bound, toward,
                back, weights, common, ALONE, PAPER, False,
            )  # fmt: skip
            total += tile * (slope - shift[:, None])
    total *= tl.load(weight).to(tl.float32) * share
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
