"""The Attention Diversification Loss from queries and keys, without an N×N tensor. docs/kernels.md has the derivation.

Forward: one dense pass over the map (`row_pass`), two over the few columns whose mean is above the threshold
(`dot_pass`, `slope_pass`), and two launches over vectors of length K between them. Backward: one dense pass by rows for
the queries' gradient, one by columns for the keys', and one for a bias that wants a gradient. All sums have a fixed
order, so results repeat bit by bit.

Shapes: M maps of G heads, R rows, K keys of which the first `first` are left out. Vectors by row lie as (M, G, R) or
(M, R), by column as (M, K); `kept` lists the columns that matter, `count` of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitfocus.kernels.tiles import by_row, head_tiles, load_heads, load_vectors, store_rows, zeros


@triton.jit
def _place(map_index, heads, G: tl.constexpr):
    """The image and the first head of a map."""
    groups = heads // G
    return map_index // groups, (map_index % groups) * G


@triton.jit
def _which(rows, block, count, first, BM: tl.constexpr, HAS_ROWS: tl.constexpr):
    """Numbers of a block's rows, which of them exist, and the queries they stand for."""
    numbers = block * BM + tl.arange(0, BM)
    ok = numbers < count
    if HAS_ROWS:
        return numbers, ok, tl.load(rows + numbers, mask=ok, other=0).to(tl.int32)
    return numbers, ok, numbers + first


@triton.jit
def _own(blocks, parts):
    """The block of rows, the part of the columns and the map of this program."""
    mine = tl.program_id(0)
    return mine % blocks, (mine // blocks) % parts, mine // (blocks * parts)


@triton.jit
def _columns(part, parts, keys, BN: tl.constexpr):
    """Where a part of the columns begins and ends."""
    width = tl.cdiv(tl.cdiv(keys, BN), parts) * BN
    return part * width, tl.minimum((part + 1) * width, keys)


@triton.jit
def _above(mean, bound, PAPER: tl.constexpr):
    return mean >= bound if PAPER else mean > bound


@triton.jit
def row_pass(
    q, k, lse, bias, rows, column_sums, squares, overlaps, scale, bound,
    heads, queries, keys, row_count, first, maps, parts, q_strides, k_strides, bias_strides,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr,
):  # fmt: skip
    """Per row: Σ_j t_ij² and, by head, Σ_j p_hij t_ij. Per block of rows: the column sums of a (official) or t (paper).

    a is the heads' mean, t is a where it is above the threshold and 0 elsewhere. A program takes a part of the columns;
    what it finds of a row is a part of the sum.
    """
    blocks = tl.cdiv(row_count, BM)
    block, part, map_index = _own(blocks, parts)
    batch, head = _place(map_index, heads, G)
    numbers, row_ok, query_rows = _which(rows, block, row_count, first, BM, HAS_ROWS)
    query = load_heads(q, batch, head, query_rows, row_ok, q_strides, G, D, DP)
    norms = load_vectors(lse, batch * heads + head, queries, query_rows, row_ok, G)
    square = tl.zeros([BM], tl.float32)
    overlap = zeros(G, [BM])
    sums = column_sums + (map_index * blocks + block).to(tl.int64) * keys
    begin, end = _columns(part, parts, keys, BN)
    for start in range(begin, end, BN):
        cols = start + tl.arange(0, BN)
        col_ok = cols < keys
        key = load_heads(k, batch, head, cols, col_ok, k_strides, G, D, DP)
        tiles, mean = head_tiles(
            query, key, norms, scale, bias, batch, head, query_rows, row_ok, cols, col_ok, bias_strides, G, HAS_BIAS,
            False, False,
        )  # fmt: skip
        mean = tl.where(row_ok[:, None] & ((cols >= first) & col_ok)[None, :], mean, 0.0)
        kept = tl.where(_above(mean, bound, PAPER), mean, 0.0)
        square += tl.sum(kept * kept, 1)
        longer = ()
        for h in tl.static_range(G):
            longer = longer + (overlap[h] + tl.sum(tiles[h] * kept, 1),)
        overlap = longer
        tl.store(sums + cols, tl.sum(kept if PAPER else mean, 0), mask=col_ok)
    mine = (part * maps + map_index).to(tl.int64)
    tl.store(squares + mine * row_count + numbers, square, mask=row_ok)
    for h in tl.static_range(G):
        tl.store(overlaps + (mine * G + h) * row_count + numbers, overlap[h], mask=row_ok)


@triton.jit
def column_pass(sums, average, slopes, kept, weights, counts, lengths, bound, blocks, keys, row_count,
                BK: tl.constexpr, PAPER: tl.constexpr):  # fmt: skip
    """The rows' average, thresholded, by column; which columns are left, their weights, their count and length.

    The columns' slopes begin at 0.
    """
    map_index = tl.program_id(0).to(tl.int64)
    found = 0
    length = 0.0
    for start in range(0, keys, BK):
        cols = start + tl.arange(0, BK)
        ok = cols < keys
        total = tl.zeros([BK], tl.float32)
        for block in range(blocks):
            total += tl.load(sums + (map_index * blocks + block) * keys + cols, mask=ok, other=0.0)
        mean = total / row_count
        above = (mean > (0.0 if PAPER else bound)) & ok
        mean = tl.where(above, mean, 0.0)
        tl.store(average + map_index * keys + cols, mean, mask=ok)
        tl.store(slopes + map_index * keys + cols, tl.zeros_like(mean), mask=ok)
        place = found + tl.cumsum(above.to(tl.int32), 0) - 1
        tl.store(kept + map_index * keys + place, cols, mask=above)
        tl.store(weights + map_index * keys + place, mean, mask=above)
        found += tl.sum(above.to(tl.int32), 0)
        length += tl.sum(mean * mean, 0)
    tl.store(counts + map_index, found)
    tl.store(lengths + map_index, tl.sqrt(length))


@triton.jit
def dot_pass(
    q, k, lse, bias, rows, kept, weights, counts, squares, dots, head_dots, unit_sums, scale, bound,
    heads, queries, keys, row_count, first, q_strides, k_strides, bias_strides,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr,
):  # fmt: skip
    """Over the kept columns j, with their weights w_j. Per row: Σ_j t_ij w_j and, by head, Σ_j p_hij [t_ij > 0] w_j.

    Per block of rows: the sums by column of the rows t_i at unit length.
    """
    blocks = tl.cdiv(row_count, BM)
    block, map_index = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = _place(map_index, heads, G)
    numbers, row_ok, query_rows = _which(rows, block, row_count, first, BM, HAS_ROWS)
    count = tl.load(counts + map_index)
    wanted = numbers < tl.where(count > 0, row_count, 0)  # where no column is kept, nothing is read
    query = load_heads(q, batch, head, query_rows, wanted, q_strides, G, D, DP)
    norms = load_vectors(lse, batch * heads + head, queries, query_rows, wanted, G)
    square = tl.load(squares + map_index.to(tl.int64) * row_count + numbers, mask=row_ok, other=0.0)
    unit = tl.where(square > 0, tl.rsqrt(tl.where(square > 0, square, 1.0)), 0.0)
    dot = tl.zeros([BM], tl.float32)
    by_head = zeros(G, [BM])
    mine = map_index.to(tl.int64) * keys
    sums = unit_sums + (map_index * blocks + block).to(tl.int64) * keys
    for start in range(0, count, BN):
        places = start + tl.arange(0, BN)
        col_ok = places < count
        cols = tl.load(kept + mine + places, mask=col_ok, other=0)
        weight = tl.load(weights + mine + places, mask=col_ok, other=0.0)
        key = load_heads(k, batch, head, cols, col_ok, k_strides, G, D, DP)
        tiles, mean = head_tiles(
            query, key, norms, scale, bias, batch, head, query_rows, row_ok, cols, col_ok, bias_strides, G, HAS_BIAS,
            False, False,
        )  # fmt: skip
        mean = tl.where(row_ok[:, None] & col_ok[None, :], mean, 0.0)
        above = _above(mean, bound, PAPER)
        thresholded = tl.where(above, mean, 0.0)
        dot += tl.sum(thresholded * weight[None, :], 1)
        passed = tl.where(above, weight[None, :], 0.0)
        longer = ()
        for h in tl.static_range(G):
            longer = longer + (by_head[h] + tl.sum(tiles[h] * passed, 1),)
        by_head = longer
        tl.store(sums + places, tl.sum(thresholded * unit[:, None], 0), mask=col_ok)
    tl.store(dots + map_index.to(tl.int64) * row_count + numbers, dot, mask=row_ok)
    for h in tl.static_range(G):
        tl.store(head_dots + (map_index * G + h).to(tl.int64) * row_count + numbers, by_head[h], mask=row_ok)


@triton.jit
def slope_column_pass(unit_sums, kept, weights, counts, lengths, slopes, column_slopes, losses, blocks, keys,
                      row_count, BK: tl.constexpr):  # fmt: skip
    """A map's loss, and the slope of its sum of cosines with respect to what each column's average is taken of."""
    map_index = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + map_index)
    length = tl.load(lengths + map_index)
    one_over = tl.where(length > 0, 1.0 / tl.where(length > 0, length, 1.0), 0.0)
    along = 0.0
    for start in range(0, count, BK):
        places = start + tl.arange(0, BK)
        ok = places < count
        total = tl.zeros([BK], tl.float32)
        for block in range(blocks):
            total += tl.load(unit_sums + (map_index * blocks + block) * keys + places, mask=ok, other=0.0)
        along += tl.sum(total * tl.load(weights + map_index * keys + places, mask=ok, other=0.0), 0)
    for start in range(0, count, BK):
        places = start + tl.arange(0, BK)
        ok = places < count
        total = tl.zeros([BK], tl.float32)
        for block in range(blocks):
            total += tl.load(unit_sums + (map_index * blocks + block) * keys + places, mask=ok, other=0.0)
        weight = tl.load(weights + map_index * keys + places, mask=ok, other=0.0)
        slope = (total - along * weight * one_over * one_over) * one_over / row_count
        tl.store(slopes + map_index * keys + places, slope, mask=ok)
        cols = tl.load(kept + map_index * keys + places, mask=ok, other=0)
        tl.store(column_slopes + map_index * keys + cols, slope, mask=ok)
    tl.store(losses + map_index, along * one_over / row_count)


@triton.jit
def slope_pass(
    q, k, lse, bias, rows, kept, slopes, counts, lengths, squares, dots, overlaps, head_dots, towards, along, inner,
    scale, bound, heads, queries, keys, row_count, first, q_strides, k_strides, bias_strides,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr,
):  # fmt: skip
    """What the backward pass needs of each row: two coefficients, and by head Σ_j p_hij · (slope of a_ij) / G."""
    blocks = tl.cdiv(row_count, BM)
    block, map_index = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = _place(map_index, heads, G)
    numbers, row_ok, query_rows = _which(rows, block, row_count, first, BM, HAS_ROWS)
    count = tl.load(counts + map_index)
    wanted = numbers < tl.where(count > 0, row_count, 0)  # where no column is kept, nothing is read
    query = load_heads(q, batch, head, query_rows, wanted, q_strides, G, D, DP)
    norms = load_vectors(lse, batch * heads + head, queries, query_rows, wanted, G)
    by_head = zeros(G, [BM])
    mine = map_index.to(tl.int64) * keys
    for start in range(0, count, BN):
        places = start + tl.arange(0, BN)
        col_ok = places < count
        cols = tl.load(kept + mine + places, mask=col_ok, other=0)
        slope = tl.load(slopes + mine + places, mask=col_ok, other=0.0)
        key = load_heads(k, batch, head, cols, col_ok, k_strides, G, D, DP)
        tiles, mean = head_tiles(
            query, key, norms, scale, bias, batch, head, query_rows, row_ok, cols, col_ok, bias_strides, G, HAS_BIAS,
            False, False,
        )  # fmt: skip
        passed = tl.zeros([BM, BN], tl.float32) + slope[None, :]
        if PAPER:
            passed = tl.where(mean >= bound, passed, 0.0)
        longer = ()
        for h in tl.static_range(G):
            longer = longer + (by_head[h] + tl.sum(tiles[h] * passed, 1),)
        by_head = longer
    row = map_index.to(tl.int64) * row_count + numbers
    square = tl.load(squares + row, mask=row_ok, other=0.0)
    length = tl.load(lengths + map_index)
    unit = tl.where(square > 0, tl.rsqrt(tl.where(square > 0, square, 1.0)), 0.0)
    toward = tl.where(length > 0, unit / tl.where(length > 0, length, 1.0), 0.0)
    back = toward * tl.load(dots + row, mask=row_ok, other=0.0) * unit * unit
    tl.store(towards + row, toward, mask=row_ok)
    tl.store(along + row, back, mask=row_ok)
    for h in tl.static_range(G):
        place = (map_index * G + h).to(tl.int64) * row_count + numbers
        overlap = tl.load(overlaps + place, mask=row_ok, other=0.0)
        head_dot = tl.load(head_dots + place, mask=row_ok, other=0.0)
        tl.store(inner + place, (toward * head_dot - back * overlap + by_head[h]) / G, mask=row_ok)


@triton.jit
def _mean_slope(
    mean, bound, toward, back, average, slope, row_ok, col_ok, PAPER: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """The slope of the sum of cosines with respect to the heads' mean attention, a tile."""
    own = by_row(toward, TURNED) * by_row(average, not TURNED) - by_row(back, TURNED) * mean
    shared = by_row(slope, not TURNED)
    inside = by_row(row_ok, TURNED) & by_row(col_ok, not TURNED)
    if PAPER:
        return tl.where((mean >= bound) & inside, own + shared, 0.0)
    return tl.where(inside, tl.where(mean > bound, own, 0.0) + shared, 0.0)


@triton.jit
def query_gradient(
    q, k, lse, bias, rows, average, column_slopes, towards, along, inner, weight, out, share, scale, bound,
    heads, queries, keys, row_count, first, parts, q_strides, k_strides, bias_strides, out_strides,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, PARTS: tl.constexpr,
    NARROW: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries, a block of rows of all heads of a map.

    TURNED, tiles and gradients have queries as columns: with few rows and many keys at a time, that is the shape that
    the matrix units of a Hopper take. With PARTS, what a part of the columns gives, (parts · B, H, R, D), of the rows
    that are compared.
    """
    blocks = tl.cdiv(row_count, BM)
    block, part, map_index = _own(blocks, parts)
    batch, head = _place(map_index, heads, G)
    numbers, row_ok, query_rows = _which(rows, block, row_count, first, BM, HAS_ROWS)
    query = load_heads(q, batch, head, query_rows, row_ok, q_strides, G, D, DP)
    norms = load_vectors(lse, batch * heads + head, queries, query_rows, row_ok, G)
    row = map_index.to(tl.int64) * row_count + numbers
    toward = tl.load(towards + row, mask=row_ok, other=0.0)
    back = tl.load(along + row, mask=row_ok, other=0.0)
    shifts = load_vectors(inner, map_index * G, row_count, numbers, row_ok, G)
    gradients = zeros(G, [DP, BM] if TURNED else [BM, DP])
    begin, end = _columns(part, parts, keys, BN)
    for start in range(begin, end, BN):
        cols = start + tl.arange(0, BN)
        col_ok = cols < keys
        mine = map_index.to(tl.int64) * keys + cols
        column_average = tl.load(average + mine, mask=col_ok, other=0.0)
        slope = tl.load(column_slopes + mine, mask=col_ok, other=0.0)
        key = load_heads(k, batch, head, cols, col_ok, k_strides, G, D, DP)
        tiles, mean = head_tiles(
            query, key, norms, scale, bias, batch, head, query_rows, row_ok, cols, col_ok, bias_strides, G, HAS_BIAS,
            NARROW, TURNED,
        )  # fmt: skip
        shared = (cols >= first) & col_ok
        mean_slope = _mean_slope(
            mean, bound, toward, back, column_average, slope, row_ok, shared, PAPER, TURNED
        ) / G  # fmt: skip
        longer = ()
        for h in tl.static_range(G):
            slopes = (tiles[h] * (mean_slope - by_row(shifts[h], TURNED))).to(key[h].dtype)
            if TURNED:
                gradient = tl.dot(tl.trans(key[h]), slopes, gradients[h], input_precision="tf32x3")
            else:
                gradient = tl.dot(slopes, key[h], gradients[h], input_precision="tf32x3")
            longer = longer + (gradient,)
        gradients = longer
    factor = tl.load(weight).to(tl.float32) * share * scale
    if PARTS:
        place, rows_out = part * (tl.num_programs(0) // (blocks * parts) // (heads // G)) + batch, numbers
    else:
        place, rows_out = batch, query_rows
    for h in tl.static_range(G):
        gradient = tl.trans(gradients[h]) if TURNED else gradients[h]
        store_rows(out, gradient * factor, place, head + h, rows_out, row_ok, out_strides, D, DP)


@triton.jit
def key_gradient(
    q, k, lse, bias, rows, average, column_slopes, towards, along, inner, weight, out, share, scale, bound,
    heads, queries, keys, row_count, first, q_strides, k_strides, bias_strides, out_strides,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The gradient of the keys, a block of columns of all heads of a map."""
    blocks = tl.cdiv(keys, BN)
    block, map_index = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = _place(map_index, heads, G)
    cols = block * BN + tl.arange(0, BN)
    col_ok = cols < keys
    key = load_heads(k, batch, head, cols, col_ok, k_strides, G, D, DP)
    mine = map_index.to(tl.int64) * keys + cols
    column_average = tl.load(average + mine, mask=col_ok, other=0.0)
    slope = tl.load(column_slopes + mine, mask=col_ok, other=0.0)
    gradients = zeros(G, [BN, DP])
    for row_block in range(0, tl.cdiv(row_count, BM)):
        numbers, row_ok, query_rows = _which(rows, row_block, row_count, first, BM, HAS_ROWS)
        row = map_index.to(tl.int64) * row_count + numbers
        toward = tl.load(towards + row, mask=row_ok, other=0.0)
        back = tl.load(along + row, mask=row_ok, other=0.0)
        query = load_heads(q, batch, head, query_rows, row_ok, q_strides, G, D, DP)
        norms = load_vectors(lse, batch * heads + head, queries, query_rows, row_ok, G)
        tiles, mean = head_tiles(
            query, key, norms, scale, bias, batch, head, query_rows, row_ok, cols, col_ok, bias_strides, G, HAS_BIAS,
            NARROW, False,
        )  # fmt: skip
        shared = (cols >= first) & col_ok
        mean_slope = _mean_slope(
            mean, bound, toward, back, column_average, slope, row_ok, shared, PAPER, False
        ) / G  # fmt: skip
        longer = ()
        for h in tl.static_range(G):
            place = (map_index * G + h).to(tl.int64) * row_count + numbers
            shift = tl.load(inner + place, mask=row_ok, other=0.0)
            slopes = tl.trans((tiles[h] * (mean_slope - shift[:, None])).to(query[h].dtype))
            longer = longer + (tl.dot(slopes, query[h], gradients[h], input_precision="tf32x3"),)
        gradients = longer
    factor = tl.load(weight).to(tl.float32) * share * scale
    for h in tl.static_range(G):
        store_rows(out, gradients[h] * factor, batch, head + h, cols, col_ok, out_strides, D, DP)


@triton.jit
def bias_gradient(
    q, k, lse, bias, rows, average, column_slopes, towards, along, inner, weight, out, share, scale, bound,
    heads, queries, keys, row_count, first, maps, maps_at_once, q_strides, k_strides, bias_strides, out_strides,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The gradient of an additive bias, summed over some images at a time: (chunks, H, Q, K), a tile of all heads."""
    row_blocks, col_blocks = tl.cdiv(row_count, BM), tl.cdiv(keys, BN)
    tile, part = tl.program_id(0) % (row_blocks * col_blocks), tl.program_id(0) // (row_blocks * col_blocks)
    row_block, col_block = tile % row_blocks, tile // row_blocks
    groups = heads // G
    group, chunk = part % groups, part // groups
    numbers, row_ok, query_rows = _which(rows, row_block, row_count, first, BM, HAS_ROWS)
    cols = col_block * BN + tl.arange(0, BN)
    col_ok = cols < keys
    totals = zeros(G, [BM, BN])
    for image in range(chunk * maps_at_once, tl.minimum((chunk + 1) * maps_at_once, maps)):
        map_index = image * groups + group
        batch, head = _place(map_index, heads, G)
        mine = map_index.to(tl.int64) * keys + cols
        column_average = tl.load(average + mine, mask=col_ok, other=0.0)
        slope = tl.load(column_slopes + mine, mask=col_ok, other=0.0)
        row = map_index.to(tl.int64) * row_count + numbers
        toward = tl.load(towards + row, mask=row_ok, other=0.0)
        back = tl.load(along + row, mask=row_ok, other=0.0)
        query = load_heads(q, batch, head, query_rows, row_ok, q_strides, G, D, DP)
        key = load_heads(k, batch, head, cols, col_ok, k_strides, G, D, DP)
        norms = load_vectors(lse, batch * heads + head, queries, query_rows, row_ok, G)
        tiles, mean = head_tiles(
            query, key, norms, scale, bias, batch, head, query_rows, row_ok, cols, col_ok, bias_strides, G, HAS_BIAS,
            NARROW, False,
        )  # fmt: skip
        shared = (cols >= first) & col_ok
        mean_slope = _mean_slope(
            mean, bound, toward, back, column_average, slope, row_ok, shared, PAPER, False
        ) / G  # fmt: skip
        longer = ()
        for h in tl.static_range(G):
            place = (map_index * G + h).to(tl.int64) * row_count + numbers
            shift = tl.load(inner + place, mask=row_ok, other=0.0)
            longer = longer + (totals[h] + tiles[h] * (mean_slope - shift[:, None]),)
        totals = longer
    factor = tl.load(weight).to(tl.float32) * share
    for h in tl.static_range(G):
        start = out + chunk.to(tl.int64) * out_strides[0] + (group * G + h).to(tl.int64) * out_strides[1]
        where = query_rows[:, None] * out_strides[2] + cols[None, :] * out_strides[3]
        tl.store(start + where, totals[h] * factor, mask=row_ok[:, None] & col_ok[None, :])
