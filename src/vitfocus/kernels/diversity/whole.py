"""The diversification loss of short sequences in one launch: a program has a whole map, all heads, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from vitfocus.kernels.diversity.triton import _above, _inverse, _place
from vitfocus.kernels.tiles import load_rows, logits, single


@triton.jit
def _sloped(mean, own, shared, bound, PAPER: tl.constexpr):
    """The gradient with respect to entries of the map, from those of their own row and of their column's average."""
    if PAPER:
        return tl.where(mean < bound, 0.0, own + shared)
    else:
        return tl.where(mean <= bound, 0.0, own) + shared


@triton.jit
def _store_slope(slope, values, rows, cols, row_ok, col_ok, stride, pitch, TURNED: tl.constexpr):
    """Write a tile of it; TURNED: columns first."""
    where = cols[None, :] * pitch + rows[:, None] if TURNED else rows[:, None] * stride + cols[None, :]
    tl.store(slope + where, values.to(slope.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


@triton.jit
def whole_pass(
    q, k, lse, bias, rows, norms, losses, bounds, slope, scale, bound, heads, group, keys, row_count, first,
    qb, qh, qn, kb, kh, kn, bb, bh, bq, bk, stride, span, reach, queries, lift,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_LSE: tl.constexpr, PAPER: tl.constexpr,
    WANTS_SLOPE: tl.constexpr, TURNED: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """A map's loss and normalisers. WANTS_SLOPE: also the gradient of its sum of cosines, and the bound it is over.

    The map has at most BM rows and BN columns, or with EXTRA one more of both, which are vectors (then without bias,
    `rows` and `first`). `norms` are as `lower_kernel` writes them, `slope` and `bounds` as `gradient_pass` and
    `slope_pass` do; `lse` (B, H, queries) is read if HAS_LSE.
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
    if EXTRA:
        column, row, corner = tl.zeros([BM], tl.float32), tl.zeros([BN], tl.float32), 0.0
    for h in range(group):
        query = load_rows(q, batch, head + h, query_rows, (qb, qh, qn, 1), D, DP)
        key = load_rows(k, batch, head + h, there, (kb, kh, kn, 1), D, DP)
        power = logits(query, key, scale, bias, batch, head + h, query_rows, there, (bb, bh, bq, bk), HAS_BIAS)
        pair = (batch * heads + head + h).to(tl.int64)
        if EXTRA:
            channels, last = tl.arange(0, DP), pair * 0 + BM  # in 64 bits: tokens may lie far apart
            side = q + batch.to(tl.int64) * qb + (head + h).to(tl.int64) * qh + last * qn + channels
            last_query = tl.load(side, mask=channels < D, other=0.0).to(tl.float32) * (scale * 1.4426950408889634)
            side = k + batch.to(tl.int64) * kb + (head + h).to(tl.int64) * kh + last * kn + channels
            last_key = tl.load(side, mask=channels < D, other=0.0).to(tl.float32)
            row_power = tl.sum(key.to(tl.float32) * last_query[None, :], 1)
            corner_power = tl.sum(last_query * last_key, 0)
            last_key *= scale * 1.4426950408889634
            column_power = tl.sum(query.to(tl.float32) * last_key[None, :], 1)
        if HAS_LSE:
            norm = tl.load(lse + pair * queries + query_rows) * 1.4426950408889634 - lift
            if EXTRA:
                last_norm = tl.load(lse + pair * queries + BM) * 1.4426950408889634 - lift
        else:
            power = tl.where((cols < keys)[None, :], power, float("-inf"))
            most = tl.max(power, 1)
            if EXTRA:
                most = tl.maximum(most, column_power)
            most = tl.where(most == float("-inf"), 0.0, most)
            total = tl.sum(tl.exp2(power - most[:, None]), 1)
            if EXTRA:
                total += tl.exp2(column_power - most)
                last_most = tl.maximum(tl.max(row_power, 0), corner_power)
                last_total = tl.sum(tl.exp2(row_power - last_most), 0) + tl.exp2(corner_power - last_most)
                last_norm = last_most + tl.log2(last_total) - lift
            norm = most + tl.log2(total) - lift
            # A row with every key masked attends to nothing; without a bias it comes from an infinite query or key.
            norm = tl.where(total == 0, 0.0 if HAS_BIAS else float("nan"), norm)
        norm = tl.where(numbers < row_count, norm, 1e30)
        tl.store(norms + pair * reach + numbers, norm)
        mean += tl.exp2(power - norm[:, None])
        if EXTRA:
            tl.store(norms + pair * reach + BM + numbers, tl.where(numbers == 0, last_norm, 1e30))
            column += tl.exp2(column_power - norm)
            row += tl.exp2(row_power - last_norm)
            corner += tl.exp2(corner_power - last_norm)
    mean *= tl.where((cols >= first) & (cols < keys), 1.0 / group, 0.0)[None, :]
    kept = _above(mean, bound, PAPER)
    square, average = tl.sum(kept * kept, 1), tl.sum(kept if PAPER else mean, 0)
    if EXTRA:
        column, row, corner = column / group, row / group, corner / group
        kept_column, kept_row = _above(column, bound, PAPER), _above(row, bound, PAPER)
        kept_corner = _above(corner, bound, PAPER)
        square += kept_column * kept_column
        average += kept_row if PAPER else row
        last_unit = _inverse(tl.sqrt(tl.sum(kept_row * kept_row, 0) + kept_corner * kept_corner))
        last_average = (tl.sum(kept_column if PAPER else column, 0) + (kept_corner if PAPER else corner)) / row_count
    unit = _inverse(tl.sqrt(square))  # 0 past the last row
    average /= row_count
    if not PAPER:
        average = _above(average, bound, False)
        if EXTRA:
            last_average = _above(last_average, bound, False)
    length, units = tl.sum(average * average, 0), tl.sum(kept * unit[:, None], 0)
    if EXTRA:
        length += last_average * last_average
        units += kept_row * last_unit
        last_units = tl.sum(kept_column * unit, 0) + kept_corner * last_unit
    one_over = _inverse(tl.sqrt(length))
    cosine = tl.sum(units * average, 0) * one_over
    if EXTRA:
        cosine += last_units * last_average * one_over
    tl.store(losses + map_index, cosine / row_count)
    if WANTS_SLOPE:
        shared = (units - cosine * one_over * average) * one_over / row_count
        if not PAPER:
            shared = tl.where(average == 0, 0.0, shared)
        largest, longest = tl.max(tl.abs(shared), 0), tl.max(unit, 0)
        if EXTRA:
            last_shared = (last_units - cosine * one_over * last_average) * one_over / row_count
            if not PAPER:
                last_shared = tl.where(last_average == 0, 0.0, last_shared)
            largest, longest = tl.maximum(largest, tl.abs(last_shared)), tl.maximum(longest, last_unit)
        largest = 2 * (largest + longest)
        tl.store(bounds + map_index, largest)
        over = _inverse(largest)
        toward = unit * one_over * over
        along = tl.sum(kept * average[None, :], 1)
        if EXTRA:
            along += kept_column * last_average
        back = toward * along * unit * unit
        own = toward[:, None] * average[None, :] - back[:, None] * mean
        made = _sloped(mean, own, (shared * over)[None, :], bound, PAPER)
        made = tl.where((numbers < row_count)[:, None], made, 0.0)
        pitch = tl.cdiv(row_count, 16) * 16
        mine = slope + map_index.to(tl.int64) * stride * (pitch if TURNED else row_count)
        limit = pitch if TURNED else row_count
        _store_slope(mine, made, numbers, cols, numbers < limit, cols < stride, stride, pitch, TURNED)
        if EXTRA:  # the last row, the last column and their corner, with the zeros past the end
            toward = last_unit * one_over * over
            along = tl.sum(kept_row * average, 0) + kept_corner * last_average
            last_back = toward * along * last_unit * last_unit
            made_row = _sloped(row, toward * average - last_back * row, shared * over, bound, PAPER)
            own_column = unit * one_over * over * last_average - back * column
            made_column = _sloped(column, own_column, last_shared * over, bound, PAPER)
            own_corner = toward * last_average - last_back * corner
            made_corner = _sloped(corner, own_corner, last_shared * over, bound, PAPER)
            past = tl.arange(0, 16)
            more_rows, more_cols, is_first = past + BM, past + BN, past == 0
            tile = tl.where(is_first[:, None], made_row[None, :], 0.0)
            _store_slope(mine, tile, more_rows, cols, more_rows < limit, cols < stride, stride, pitch, TURNED)
            tile = tl.where(is_first[None, :], made_column[:, None], 0.0)
            _store_slope(mine, tile, numbers, more_cols, numbers < limit, more_cols < stride, stride, pitch, TURNED)
            tile = tl.where(is_first[:, None] & is_first[None, :], made_corner, 0.0)
            _store_slope(mine, tile, more_rows, more_cols, more_rows < limit, more_cols < stride, stride, pitch, TURNED)
