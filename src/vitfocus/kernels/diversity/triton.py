"""The Attention Diversification Loss from queries and keys. docs/kernels.md has the derivation.

Forward: `mean_pass` computes the heads' mean map a, `unit_pass` reads it again; after each comes a launch over vectors
of length K. Short sequences have `whole_pass` instead of all of them. Backward: `gradient_pass` turns a into its
gradient, which all heads share; the passes over heads are in gradients.py. Maps of single heads are not stored, and
have `unit_pass_alone`. No pass depends on the number of heads at compile time. All sums have a fixed order, so results
are bitwise reproducible.

Shapes: M maps of G heads, R rows, K keys of which the first `first` are left out. Vectors by row are (M, R), by
column (M, K). Attention is in units of 1/K: a is stored as K·a, rounded to `a`'s dtype, (M, rows, stride), and
everything else is computed from the rounded values. Rounding moves no entry across the threshold.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.tiles import load_rows, logits, single


@triton.jit
def _place(map_index, heads, group):
    """The image and the first head of a map."""
    groups = heads // group
    return map_index // groups, (map_index % groups) * group


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
        above = tl.maximum(mean, least, propagate_nan=tl.PropagateNan.ALL)
        return tl.where(outside, tl.minimum(mean, most), above).to(tl.float16).to(tl.float32)


@triton.jit(do_not_specialize=["skip"])
def mean_pass(
    q, k, norms, bias, rows, a, column_sums, squares, scale, bound, heads, group, keys, row_count, first,
    qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, begin, end, maps, parts, skip,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """The mean map a; if ALONE, the column sums of a (PAPER: t) per block of rows instead. Per row: Σ_j t_ij², t being
    a above the threshold.

    A program covers a part of the columns, so its row sums are partial. Only rows `begin` to `end`, and maps from
    `skip` on.
    """
    scale, bound = single(scale), single(bound)
    blocks, part = tl.cdiv(end - begin, BM), (tl.program_id(0) // tl.cdiv(end - begin, BM)) % parts
    block, map_index = tl.program_id(0) % blocks, tl.program_id(0) // (blocks * parts) + skip
    batch, head = _place(map_index, heads, group)
    numbers = begin + block * BM + tl.arange(0, BM)
    near = tl.minimum(numbers, end - 1)
    query_rows = near + first
    if HAS_ROWS:
        query_rows = tl.load(rows + near).to(tl.int32)
    square = tl.zeros([BM], tl.float32)
    block_sums = (map_index.to(tl.int64) * tl.cdiv(row_count, BM) + begin // BM + block) * span
    mine = a + map_index.to(tl.int64) * (end - begin) * stride
    width = tl.cdiv(tl.cdiv(stride, BN), parts) * BN
    one = 1.0 / group
    start, h = part * width, tl.program_id(0) * 0
    tiles = tl.cdiv(tl.minimum(width, tl.maximum(stride - start, 0)), BN)
    total = tl.zeros([BM, BN], tl.float32)
    # One loop over tiles and heads, so that the next tile's queries and keys are loaded while one ends.
    for _ in range(tiles * group):
        cols = start + tl.arange(0, BN)
        there = tl.minimum(cols, keys - 1)
        query = load_rows(q, batch, head + h, query_rows, (qb, qh, qn, 1), D, DP)
        key = load_rows(k, batch, head + h, there, (kb, kh, kn, 1), D, DP)
        norm = tl.load(norms + (batch * heads + head + h).to(tl.int64) * reach + numbers)
        power = logits(query, key, scale, bias, batch, head + h, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
        total += tl.exp2(power - norm[:, None])
        h += 1
        if h == group:
            mean = total * tl.where((cols >= first) & (cols < keys), one, 0.0)[None, :]
            outside = mean < bound if PAPER else mean <= bound
            mean = _rounded(mean, outside, bound, PAPER, a.dtype.element_ty)
            kept = tl.where(outside, 0.0, mean)
            square += tl.sum(kept * kept, 1)
            if ALONE:
                tl.store(column_sums + block_sums + cols, tl.sum(kept if PAPER else mean, 0))
            else:
                inside = (numbers < end)[:, None] & (cols < stride)[None, :]
                where = ((near - begin) * stride)[:, None] + cols[None, :]
                tl.store(mine + where, mean.to(a.dtype.element_ty), mask=inside)
            total = tl.zeros([BM, BN], tl.float32)
            h = 0
            start += BN
    tl.store(squares + (part * maps + map_index).to(tl.int64) * reach + numbers, square)


@triton.jit
def _finish(total, a, numbers, cols, begin, end, keys, first, stride, group, bound, PAPER: tl.constexpr):
    """Round and store a tile of the sum over heads; its squares above the threshold, by row."""
    mean = total * tl.where((cols >= first) & (cols < keys), 1.0 / group, 0.0)[None, :]
    outside = mean < bound if PAPER else mean <= bound
    mean = _rounded(mean, outside, bound, PAPER, a.dtype.element_ty)
    inside = (numbers < end)[:, None] & (cols < stride)[None, :]
    tl.store(a + ((numbers - begin) * stride)[:, None] + cols[None, :], mean.to(a.dtype.element_ty), mask=inside)
    kept = tl.where(outside, 0.0, mean)
    return tl.sum(kept * kept, 1)


@triton.jit
def _two_tiles(
    q, k, norms, bias, a, scale, bound, batch, head, heads, group, query_rows, numbers, start, begin, end, keys, first,
    stride, reach, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, PAPER: tl.constexpr,
):  # fmt: skip
    """Two tiles of the mean map, beside each other from column `start` on; squares above the threshold, by row."""
    left, right = start + tl.arange(0, BN), start + BN + tl.arange(0, BN)
    total, other = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for h in range(group):
        query = load_rows(q, batch, head + h, query_rows, (qb, qh, qn, 1), D, DP)
        norm = tl.load(norms + (batch * heads + head + h).to(tl.int64) * reach + numbers)
        there = tl.minimum(left, keys - 1)
        key = load_rows(k, batch, head + h, there, (kb, kh, kn, 1), D, DP)
        power = logits(query, key, scale, bias, batch, head + h, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
        total += tl.exp2(power - norm[:, None])
        there = tl.minimum(right, keys - 1)
        key = load_rows(k, batch, head + h, there, (kb, kh, kn, 1), D, DP)
        power = logits(query, key, scale, bias, batch, head + h, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
        other += tl.exp2(power - norm[:, None])
    square = _finish(total, a, numbers, left, begin, end, keys, first, stride, group, bound, PAPER)
    return square + _finish(other, a, numbers, right, begin, end, keys, first, stride, group, bound, PAPER)


@triton.jit(do_not_specialize=["skip"])
def wide_mean_pass(
    q, k, norms, bias, rows, a, squares, scale, bound, heads, group, keys, row_count, first,
    qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, begin, end, maps, parts, skip,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """The mean map a, and Σ_j t_ij² by row, as `mean_pass`; a program has two tiles at a time, and if ONCE no others.

    Without a loop over tiles the compiler needs half the registers.
    """
    scale, bound = single(scale), single(bound)
    blocks, part = tl.cdiv(end - begin, BM), (tl.program_id(0) // tl.cdiv(end - begin, BM)) % parts
    block, map_index = tl.program_id(0) % blocks, tl.program_id(0) // (blocks * parts) + skip
    batch, head = _place(map_index, heads, group)
    numbers = begin + block * BM + tl.arange(0, BM)
    near = tl.minimum(numbers, end - 1)
    query_rows = near + first
    if HAS_ROWS:
        query_rows = tl.load(rows + near).to(tl.int32)
    mine = a + map_index.to(tl.int64) * (end - begin) * stride
    if ONCE:
        square = _two_tiles(
            q, k, norms, bias, mine, scale, bound, batch, head, heads, group, query_rows, numbers, part * 2 * BN, begin,
            end, keys, first, stride, reach, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, D, DP, BM, BN, HAS_BIAS, PAPER,
        )  # fmt: skip
    else:
        square = tl.zeros([BM], tl.float32)
        width = tl.cdiv(tl.cdiv(stride, 2 * BN), parts) * 2 * BN
        for start in range(part * width, tl.minimum((part + 1) * width, stride), 2 * BN):
            square += _two_tiles(
                q, k, norms, bias, mine, scale, bound, batch, head, heads, group, query_rows, numbers, start, begin,
                end, keys, first, stride, reach, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, D, DP, BM, BN, HAS_BIAS, PAPER,
            )  # fmt: skip
    tl.store(squares + (part * maps + map_index).to(tl.int64) * reach + numbers, square)


@triton.jit
def _inverse(length):
    """1 / length, and 0 for rows that count as empty: those shorter than `reference.SHORTEST`."""
    empty = length < 1e-8
    return tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, length))


@triton.jit
def _unit(squares, map_index, numbers, reach, maps, parts):
    """One over the length of these rows, 0 for empty ones; their squares come in parts."""
    square = numbers * 0.0
    for part in range(parts):
        square += tl.load(squares + (part * maps + map_index).to(tl.int64) * reach + numbers)
    return _inverse(tl.sqrt(square))


@triton.jit
def unit_pass(
    a, squares, column_sums, unit_sums, bound, stride, span, reach, begin, end, maps, parts, rows_each, before, blocks,
    BR: tl.constexpr, BK: tl.constexpr, PAPER: tl.constexpr,
):  # fmt: skip
    """Column sums over a block of rows of the map: of a (PAPER: t), and of the rows t at unit length.

    A program has BK columns and `rows_each` rows of `begin` to `end`; its block is one of `blocks`, `before` of which
    come from earlier rows.
    """
    bound = single(bound)
    across, down = tl.cdiv(stride, BK), tl.cdiv(end - begin, rows_each)
    cols = (tl.program_id(0) % across) * BK + tl.arange(0, BK)
    block, map_index = (tl.program_id(0) // across) % down, tl.program_id(0) // (across * down)
    mine = a + map_index.to(tl.int64) * (end - begin) * stride
    last = tl.minimum(begin + (block + 1) * rows_each, end)
    plain, units = tl.zeros([BR, BK], tl.float32), tl.zeros([BR, BK], tl.float32)
    for start in range(begin + block * rows_each, last, BR):
        numbers = start + tl.arange(0, BR)
        inside = (numbers < last)[:, None] & (cols < stride)[None, :]
        where = ((numbers - begin) * stride)[:, None] + cols[None, :]
        mean = tl.load(mine + where, mask=inside, other=0.0).to(tl.float32)
        kept = _above(mean, bound, PAPER)
        plain += kept if PAPER else mean
        units += kept * _unit(squares, map_index, tl.minimum(numbers, last - 1), reach, maps, parts)[:, None]
    where = (map_index.to(tl.int64) * blocks + before + block) * span + cols
    tl.store(column_sums + where, tl.sum(plain, 0), mask=cols < span)
    tl.store(unit_sums + where, tl.sum(units, 0), mask=cols < span)


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
def unit_pass_alone(
    q, k, norms, bias, rows, average, lengths, squares, towards, along, unit_sums, scale, bound,
    heads, group, keys, row_count, first, qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, begin, end, maps,
    parts,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PAPER: tl.constexpr,
):  # fmt: skip
    """Per row: two coefficients of the gradient. Per block of rows: column sums of the rows t at unit length.

    For maps of single heads, which are computed again. Only rows `begin` to `end`.
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
    dot = tl.zeros([BM], tl.float32)
    unit = _unit(squares, map_index, numbers, reach, maps, parts)  # 0 beyond the last row
    sums = unit_sums + (map_index.to(tl.int64) * tl.cdiv(row_count, BM) + begin // BM + block) * span
    query = load_rows(q, batch, head, query_rows, (qb, qh, qn, 1), D, DP)
    norm = tl.load(norms + (batch * heads + head).to(tl.int64) * reach + numbers)
    for start in range(0, stride, BN):
        cols = start + tl.arange(0, BN)
        there = tl.minimum(cols, keys - 1)
        key = load_rows(k, batch, head, there, (kb, kh, kn, 1), D, DP)
        power = logits(query, key, scale, bias, batch, head, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
        exists = tl.where((cols >= first) & (cols < keys), 1.0, 0.0)
        mean = tl.exp2(power - norm[:, None]) * exists[None, :]
        kept = _above(mean, bound, PAPER)
        weight = tl.load(average + map_index.to(tl.int64) * span + cols)
        dot += tl.sum(kept * weight[None, :], 1)
        tl.store(sums + cols, tl.sum(kept * unit[:, None], 0))
    toward = unit * _inverse(tl.load(lengths + map_index))
    row = map_index.to(tl.int64) * reach + numbers
    tl.store(towards + row, toward)
    tl.store(along + row, toward * dot * unit * unit)


@triton.jit
def slope_pass(
    unit_sums, average, lengths, squares, slopes, losses, bounds, blocks, keys, span, row_count, reach, maps, parts,
    BK: tl.constexpr, BR: tl.constexpr, PAPER: tl.constexpr,
):  # fmt: skip
    """A map's loss, the gradient of its sum of cosines with respect to the entries averaged per column, and a bound.

    No entry of the gradient with respect to the map is larger than half the bound: of its two parts, the row's own is
    at most one over the row's length, and the shared one at most the largest slope.
    """
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
    most = tl.zeros([BK], tl.float32)
    for start in range(0, span, BK):
        cols = start + tl.arange(0, BK)
        total = tl.load(slopes + map_index * span + cols, mask=cols < span, other=0.0)
        mean = tl.load(average + map_index * span + cols, mask=cols < span, other=0.0)
        slope = (total - cosine * one_over * mean) * one_over / row_count
        if not PAPER:
            slope = tl.where(mean == 0, 0.0, slope)
        tl.store(slopes + map_index * span + cols, slope, mask=cols < span)
        most = tl.maximum(most, tl.abs(slope))
    longest = tl.zeros([BK], tl.float32)
    for start in range(0, row_count, BK):
        numbers = start + tl.arange(0, BK)
        longest = tl.maximum(longest, _unit(squares, map_index, tl.minimum(numbers, row_count - 1), reach, maps, parts))
    tl.store(bounds + map_index, 2 * (tl.max(most, 0) + tl.max(longest, 0)))
    tl.store(losses + map_index, cosine / row_count)


@triton.jit(do_not_specialize=["skip"])
def gradient_pass(
    a, out, average, lengths, slopes, squares, bounds, bound, stride, span, reach, begin, end, maps, parts, skip,
    BR: tl.constexpr, BK: tl.constexpr, PAPER: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The gradient of the sum of cosines with respect to K·a, over the map's bound; 0 for columns past the end.

    Only rows `begin` to `end`, and maps from `skip` on. TURNED: `out` has columns first, and rows up to a multiple of
    16, which are 0 past the end. Else it may be the map itself.
    """
    bound = single(bound)
    blocks = tl.cdiv(end - begin, BR)
    block, map_index = tl.program_id(0) % blocks, (tl.program_id(0) // blocks + skip).to(tl.int64)
    numbers = begin + block * BR + tl.arange(0, BR)
    near = tl.minimum(numbers, end - 1)
    unit = _unit(squares, map_index, near, reach, maps, parts)
    chunk, row = map_index * (end - begin) * stride, ((near - begin) * stride)[:, None]
    vector = map_index * span
    dot = tl.zeros([BR, BK], tl.float32)
    for start in range(0, stride, BK):
        cols = start + tl.arange(0, BK)
        mean = tl.load(a + chunk + row + cols[None, :], mask=(cols < stride)[None, :], other=0.0).to(tl.float32)
        weight = tl.load(average + vector + cols, mask=cols < stride, other=0.0)
        dot += _above(mean, bound, PAPER) * weight[None, :]
    over = _inverse(tl.load(bounds + map_index))
    toward = unit * _inverse(tl.load(lengths + map_index)) * over
    back = toward * tl.sum(dot, 1) * unit * unit
    for start in range(0, stride, BK):
        cols = start + tl.arange(0, BK)
        there = (cols < stride)[None, :]
        mean = tl.load(a + chunk + row + cols[None, :], mask=there, other=0.0).to(tl.float32)
        weight = tl.load(average + vector + cols, mask=cols < stride, other=0.0)
        shared = tl.load(slopes + vector + cols, mask=cols < stride, other=0.0) * over
        own = toward[:, None] * weight[None, :] - back[:, None] * mean
        if PAPER:
            slope = tl.where(mean < bound, 0.0, own + shared[None, :])
        else:
            slope = tl.where(mean <= bound, 0.0, own) + shared[None, :]
        if TURNED:
            pitch = tl.cdiv(end, 16) * 16
            where = map_index * stride * pitch + (cols[None, :] * pitch + numbers[:, None])
            slope = tl.where((numbers < end)[:, None], slope, 0.0)
            tl.store(out + where, slope.to(out.dtype.element_ty), mask=there & (numbers < pitch)[:, None])
        else:
            where = chunk + row + cols[None, :]
            tl.store(out + where, slope.to(out.dtype.element_ty), mask=there & (numbers < end)[:, None])


@triton.jit
def whole_pass(
    q, k, lse, bias, rows, norms, losses, bounds, slope, scale, bound, heads, group, keys, row_count, first,
    qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, queries, lift,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_LSE: tl.constexpr, PAPER: tl.constexpr,
    WANTS_SLOPE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """A map's loss and normalisers. WANTS_SLOPE: also the gradient of its sum of cosines, and the bound it is over.

    The map has at most BM rows and BN columns. `norms` are as `lower_kernel` writes them, `slope` and `bounds` as
    `gradient_pass` and `slope_pass` do; `lse` (B, H, queries) is read if HAS_LSE.
    """
    scale, bound, lift = single(scale), single(bound), single(lift)
    map_index = tl.program_id(0)
    batch, head = _place(map_index, heads, group)
    numbers, cols = tl.arange(0, BM), tl.arange(0, BN)
    near, there = tl.minimum(numbers, row_count - 1), tl.minimum(cols, keys - 1)
    query_rows = near + first
    if HAS_ROWS:
        query_rows = tl.load(rows + near).to(tl.int32)
    mean = tl.zeros([BM, BN], tl.float32)
    for h in range(group):
        query = load_rows(q, batch, head + h, query_rows, (qb, qh, qn, 1), D, DP)
        key = load_rows(k, batch, head + h, there, (kb, kh, kn, 1), D, DP)
        power = logits(query, key, scale, bias, batch, head + h, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
        pair = (batch * heads + head + h).to(tl.int64)
        if HAS_LSE:
            norm = tl.load(lse + pair * queries + query_rows) * 1.4426950408889634 - lift
        else:
            power = tl.where((cols < keys)[None, :], power, float("-inf"))
            most = tl.max(power, 1)
            most = tl.where(most == float("-inf"), 0.0, most)
            total = tl.sum(tl.exp2(power - most[:, None]), 1)
            norm = most + tl.log2(total) - lift
            # A row with every key masked attends to nothing; without a bias it comes from an infinite query or key.
            norm = tl.where(total == 0, 0.0 if HAS_BIAS else float("nan"), norm)
        norm = tl.where(numbers < row_count, norm, 1e30)
        tl.store(norms + pair * reach + numbers, norm)
        mean += tl.exp2(power - norm[:, None])
    mean *= tl.where((cols >= first) & (cols < keys), 1.0 / group, 0.0)[None, :]
    kept = _above(mean, bound, PAPER)
    unit = _inverse(tl.sqrt(tl.sum(kept * kept, 1)))  # 0 past the last row
    average = tl.sum(kept if PAPER else mean, 0) / row_count
    if not PAPER:
        average = _above(average, bound, False)
    one_over = _inverse(tl.sqrt(tl.sum(average * average, 0)))
    units = tl.sum(kept * unit[:, None], 0)
    cosine = tl.sum(units * average, 0) * one_over
    tl.store(losses + map_index, cosine / row_count)
    if WANTS_SLOPE:
        shared = (units - cosine * one_over * average) * one_over / row_count
        if not PAPER:
            shared = tl.where(average == 0, 0.0, shared)
        largest = 2 * (tl.max(tl.abs(shared), 0) + tl.max(unit, 0))
        tl.store(bounds + map_index, largest)
        over = _inverse(largest)
        toward = unit * one_over * over
        back = toward * tl.sum(kept * average[None, :], 1) * unit * unit
        own = toward[:, None] * average[None, :] - back[:, None] * mean
        if PAPER:
            made = tl.where(mean < bound, 0.0, own + (shared * over)[None, :])
        else:
            made = tl.where(mean <= bound, 0.0, own) + (shared * over)[None, :]
        made = tl.where((numbers < row_count)[:, None], made, 0.0).to(slope.dtype.element_ty)
        if TURNED:
            pitch = tl.cdiv(row_count, 16) * 16
            mine = slope + map_index.to(tl.int64) * stride * pitch
            inside = (numbers < pitch)[:, None] & (cols < stride)[None, :]
            tl.store(mine + (cols[None, :] * pitch + numbers[:, None]), made, mask=inside)
        else:
            mine = slope + map_index.to(tl.int64) * row_count * stride
            inside = (numbers < row_count)[:, None] & (cols < stride)[None, :]
            tl.store(mine + (numbers[:, None] * stride + cols[None, :]), made, mask=inside)


def launch_mean_pass(
    launch: Any, inputs: tuple[Tensor, ...], mean_map: Tensor, sums: Tensor, squares: Tensor, begin: int, end: int,
    skip: int = 0,
) -> None:  # fmt: skip
    """Launch the pass over these rows of the maps, the first `skip` left out. `launch` is `op._Launch`."""
    settings = launch.settings("wide" if launch.wide else "mean")
    grid = (triton.cdiv(end - begin, settings["BM"]) * launch.parts * (launch.maps - skip),)
    rest = (*launch.numbers, begin, end, launch.maps, launch.parts, skip)
    if launch.wide:
        wide_mean_pass[grid](*inputs, mean_map, squares, *rest, **settings, ONCE=launch.once)
    else:
        mean_pass[grid](*inputs, mean_map, sums, squares, *rest, **settings, ALONE=launch.alone)


def launch_unit_pass_alone(launch: Any, inputs: tuple[Tensor, ...], *tensors: Tensor) -> None:
    """Launch the pass over all rows of single heads."""
    settings = launch.settings("mean")
    unit_pass_alone[(triton.cdiv(launch.count, settings["BM"]) * launch.maps,)](
        *inputs, *tensors, *launch.numbers, 0, launch.count, launch.maps, launch.parts, **settings
    )


def launch_unit_pass(
    launch: Any, tile: tuple[int, int], mean_map: Tensor, squares: Tensor, sums: Tensor, units: Tensor, begin: int,
    end: int,
) -> None:  # fmt: skip
    """Launch the pass over these rows of the stored map."""
    (high, wide), each = tile, launch.rows_each
    before = sum(triton.cdiv(last - start, each) for start, last in launch.chunks() if last <= begin)
    unit_pass[(triton.cdiv(launch.stride, wide) * triton.cdiv(end - begin, each) * launch.maps,)](
        mean_map, squares, sums, units, launch.bound, launch.stride, launch.span, launch.reach, begin, end, launch.maps,
        launch.parts, each, before, launch.blocks, BR=high, BK=wide, PAPER=launch.paper, num_warps=4,
    )  # fmt: skip
