"""The passes of the statistics over whole maps: `row_pass` and `column_pass`.

A program goes over tiles, and in each tile over heads: in two loops or, with `ONE_LOOP`, in one, so that loads for the
next tile begin before the last head of this one is done. Both forms add the same numbers in the same order. With `TMA`,
queries and keys are tensor descriptors, whose tiles the GPU's copy engine loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitfocus.kernels.tiles import load_rows, logits, single


@triton.jit
def _position(tokens, prefix, width, down, across):
    """Row and column of tokens on a grid of that width, times the step sizes; prefix tokens are at the first patch."""
    place = tl.maximum(tokens - prefix, 0).to(tl.float32)
    row = tl.floor((place + 0.5) * (1.0 / width))  # avoids a division per token
    return row * down, (place - row * width) * across


@triton.jit
def one_over_root(square):
    """One over a norm, from its square; that of an empty row is large but multiplies only zeros."""
    return 1.0 / tl.maximum(tl.sqrt(square), 1e-8)


@triton.jit
def _load(source, batch, head, first, rows, strides, D: tl.constexpr, DP: tl.constexpr, TMA: tl.constexpr):
    """`load_rows`; a tensor descriptor knows its strides, and takes a tile from its first row, with 0 past the end."""
    if TMA:
        return tl.reshape(source.load([batch, head, first, 0]), [rows.shape[0], DP])
    else:
        return load_rows(source, batch, head, rows, strides, D, DP)


@triton.jit
def _row_head(
    total, q, k, norms, bias, sums, scale, batch, h, heads, rows, numbers, first, start, cols, keys, reach, q_strides,
    k_strides, bias_strides, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """A tile's total over heads with one head's map added, whose sums by row are added to that head's."""
    head, place = batch * 0 + h, (batch * heads + h).to(tl.int64) * reach + numbers
    there = tl.minimum(cols, keys - 1)
    query = _load(q, batch, head, first, rows, q_strides, D, DP, TMA)
    key = _load(k, batch, head, start, there, k_strides, D, DP, TMA)
    log = logits(query, key, scale, bias, batch, head, rows, there, bias_strides, HAS_BIAS)
    log -= tl.load(norms + place)[:, None]
    if HAS_BIAS:  # replace -inf by a finite value whose exp2 is 0
        log = tl.maximum(log, -1e30, propagate_nan=tl.PropagateNan.ALL)
    tile = tl.exp2(log)
    if MASKED:
        tile = tile * tl.where(cols < keys, 1.0, 0.0)[None, :]
    total += tile
    both = tl.join(tl.sum(tile * log, 1) * -0.6931471805599453, tl.sum(tile * tile, 1))
    tl.atomic_add(sums + 2 * place[:, None] + tl.arange(0, 2)[None, :], both, sem="relaxed")
    return total


@triton.jit
def _row_mean(
    mean, length, length_paper, distance, cols, bound, row, column, prefix, key_width, key_down, key_across,
    PLACED: tl.constexpr,
):  # fmt: skip
    """The three sums by row, with those of a tile of the heads' mean added."""
    above = tl.where(mean > bound, mean, 0.0)
    length += tl.sum(above * above, 1)
    above = tl.where(mean >= bound, mean, 0.0)
    length_paper += tl.sum(above * above, 1)
    if PLACED:
        down, across = _position(cols, prefix, key_width, key_down, key_across)
        away = tl.abs(row[:, None] - down[None, :]) + tl.abs(column[:, None] - across[None, :])
        distance += tl.sum(tl.where((cols >= prefix)[None, :], mean, 0.0) * away, 1)
    return length, length_paper, distance


@triton.jit
def row_pass(
    q, k, norms, bias, sums, lengths, distances, scale, bound, heads, queries, keys, reach,
    prefix, query_width, key_width, query_down, query_across, key_down, key_across,
    q_strides, k_strides, bias_strides,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, PLACED: tl.constexpr, ONE_LOOP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """By row and head: entropy, Σ_j p². By row of the heads' mean a: Σ_j t² of both thresholds, Σ_j a‖p_i − p_j‖₁."""
    scale, bound, query_down, query_across = single(scale), single(bound), single(query_down), single(query_across)
    key_down, key_across = single(key_down), single(key_across)
    batch, block = tl.program_id(0), tl.program_id(1)
    numbers = block * BM + tl.arange(0, BM)
    rows = tl.minimum(numbers, queries - 1)
    length, length_paper = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    distance, one = tl.zeros([BM], tl.float32), 1.0 / heads
    row, column = _position(rows, prefix, query_width, query_down, query_across)
    full = keys // BN * BN
    # The last tile apart from the others, because masking takes as long as one of the sums.
    for masked in tl.static_range(2):
        start, h = full * masked, batch * 0
        end = (tl.cdiv(keys, BN) * BN - full) * masked + full
        if ONE_LOOP:
            total = tl.zeros([BM, BN], tl.float32)
            for _ in range((end - start) // BN * heads):
                cols = start + tl.arange(0, BN)
                total = _row_head(
                    total, q, k, norms, bias, sums, scale, batch, h, heads, rows, numbers, block * BM, start, cols,
                    keys, reach, q_strides, k_strides, bias_strides, D, DP, HAS_BIAS, masked, TMA,
                )  # fmt: skip
                h += 1
                if h == heads:
                    length, length_paper, distance = _row_mean(
                        total * one, length, length_paper, distance, cols, bound, row, column, prefix, key_width,
                        key_down, key_across, PLACED,
                    )  # fmt: skip
                    total = tl.zeros([BM, BN], tl.float32)
                    h = 0
                    start += BN
        else:
            for first in range(start, end, BN):
                cols = first + tl.arange(0, BN)
                total = tl.zeros([BM, BN], tl.float32)
                for head in range(heads):
                    total = _row_head(
                        total, q, k, norms, bias, sums, scale, batch, head, heads, rows, numbers, block * BM, first,
                        cols, keys, reach, q_strides, k_strides, bias_strides, D, DP, HAS_BIAS, masked, TMA,
                    )  # fmt: skip
                length, length_paper, distance = _row_mean(
                    total * one, length, length_paper, distance, cols, bound, row, column, prefix, key_width, key_down,
                    key_across, PLACED,
                )  # fmt: skip
    mine, images = batch.to(tl.int64) * reach + numbers, tl.num_programs(0).to(tl.int64)
    tl.store(lengths + mine, one_over_root(length))
    tl.store(lengths + images * reach + mine, one_over_root(length_paper))
    if PLACED:
        tl.store(distances + mine, tl.where(numbers >= prefix, distance, 0.0))


@triton.jit
def _column_head(
    total, weighted, q, k, norms, bias, totals, received, scale, batch, h, heads, rows, numbers, first, mine, there,
    cols, keys, reach, images, q_strides, k_strides, bias_strides, D: tl.constexpr, DP: tl.constexpr,
    HAS_BIAS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile's two totals over heads with one head's map added, whose sums by column are added to that head's."""
    head, pair = batch * 0 + h, (batch * heads + h).to(tl.int64)
    query = _load(q, batch, head, first, rows, q_strides, D, DP, TMA)
    key = _load(k, batch, head, mine, there, k_strides, D, DP, TMA)
    log = logits(key, query, scale, bias, batch, head, there, rows, bias_strides, HAS_BIAS)
    tile = tl.exp2(log - tl.load(norms + pair * reach + numbers)[None, :])
    total += tile
    weighted += tile * tl.load(totals + images * heads + pair)
    tl.atomic_add(received + pair * keys + cols, tl.sum(tile, 1), mask=cols < keys, sem="relaxed")
    return total, weighted


@triton.jit
def _column_mean(mean, weighted, official, paper, kept, joint, lengths, mine, images, reach, bound):
    """The four sums by column, with those of a tile of the heads' mean and of their weighted sum added."""
    above = tl.where(mean > bound, mean, 0.0)
    official += tl.sum(above * tl.load(lengths + mine)[None, :], 1)
    above = tl.where(mean >= bound, mean, 0.0)
    paper += tl.sum(above * tl.load(lengths + images * reach + mine)[None, :], 1)
    kept += tl.sum(above, 1)
    joint += tl.sum(weighted * weighted, 1)
    return official, paper, kept, joint


@triton.jit
def column_pass(
    q, k, norms, bias, lengths, totals, received, units, scale, bound, heads, queries, keys, reach,
    q_strides, k_strides, bias_strides,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
    ONE_LOOP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """By column and head: Σ_i p. By column: Σ_i t at unit length for both thresholds, Σ_i t, Σ_i (Σ_h p_h / ‖p_h‖)²."""
    scale, bound = single(scale), single(bound)
    batch, block = tl.program_id(0), tl.program_id(1)
    cols = block * BN + tl.arange(0, BN)
    there, one = tl.minimum(cols, keys - 1), 1.0 / heads
    official, paper = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    kept, joint = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    images = tl.num_programs(0).to(tl.int64)
    if ONE_LOOP:
        start, h = batch * 0, batch * 0
        total, weighted = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
        for _ in range(tl.cdiv(queries, BM) * heads):
            numbers = start + tl.arange(0, BM)
            rows = tl.minimum(numbers, queries - 1)
            total, weighted = _column_head(
                total, weighted, q, k, norms, bias, totals, received, scale, batch, h, heads, rows, numbers, start,
                block * BN, there, cols, keys, reach, images, q_strides, k_strides, bias_strides, D, DP, HAS_BIAS, TMA,
            )  # fmt: skip
            h += 1
            if h == heads:
                official, paper, kept, joint = _column_mean(
                    total * one, weighted, official, paper, kept, joint, lengths,
                    batch.to(tl.int64) * reach + numbers, images, reach, bound,
                )  # fmt: skip
                total, weighted = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
                h = 0
                start += BM
    else:
        for start in range(0, queries, BM):
            numbers = start + tl.arange(0, BM)
            rows = tl.minimum(numbers, queries - 1)
            total, weighted = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
            for h in range(heads):
                total, weighted = _column_head(
                    total, weighted, q, k, norms, bias, totals, received, scale, batch, h, heads, rows, numbers, start,
                    block * BN, there, cols, keys, reach, images, q_strides, k_strides, bias_strides, D, DP, HAS_BIAS,
                    TMA,
                )  # fmt: skip
            official, paper, kept, joint = _column_mean(
                total * one, weighted, official, paper, kept, joint, lengths, batch.to(tl.int64) * reach + numbers,
                images, reach, bound,
            )  # fmt: skip
    place, ok = units + batch.to(tl.int64) * keys + cols, cols < keys
    tl.store(place, official, mask=ok)
    tl.store(place + images * keys, paper, mask=ok)
    tl.store(place + 2 * images * keys, kept, mask=ok)
    tl.store(place + 3 * images * keys, joint, mask=ok)
