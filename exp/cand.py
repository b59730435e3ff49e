from __future__ import annotations
import triton
import triton.language as tl
from vitfocus.kernels.statistics.triton import _one_over_root, _position
from vitfocus.kernels.tiles import load_rows, logits, single

@triton.jit
def row_pass_flat(
    q, k, norms, bias, entropies, squares, lengths, distances, scale, bound, heads, queries, keys, reach,
    prefix, query_width, key_width, query_down, query_across, key_down, key_across,
    q_strides, k_strides, bias_strides,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, PLACED: tl.constexpr,
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
    for start in tl.range(0, keys, BN, flatten=True):
        cols = start + tl.arange(0, BN)
        there, exists = tl.minimum(cols, keys - 1), tl.where(cols < keys, 1.0, 0.0)
        total = tl.zeros([BM, BN], tl.float32)
        for h in range(heads):
            head, place = batch * 0 + h, (batch * heads + h).to(tl.int64) * reach + numbers
            query = load_rows(q, batch, head, rows, q_strides, D, DP)
            key = load_rows(k, batch, head, there, k_strides, D, DP)
            log = logits(query, key, scale, bias, batch, head, rows, there, bias_strides, HAS_BIAS)
            log -= tl.load(norms + place)[:, None]
            if HAS_BIAS:  # replace -inf by a finite value whose exp2 is 0
                log = tl.maximum(log, -1e30, propagate_nan=tl.PropagateNan.ALL)
            tile = tl.exp2(log) * exists[None, :]
            total += tile
            tl.atomic_add(entropies + place, tl.sum(tile * log, 1) * -0.6931471805599453, sem="relaxed")
            tl.atomic_add(squares + place, tl.sum(tile * tile, 1), sem="relaxed")
        mean = total * one
        above = tl.where(mean > bound, mean, 0.0)
        length += tl.sum(above * above, 1)
        above = tl.where(mean >= bound, mean, 0.0)
        length_paper += tl.sum(above * above, 1)
        if PLACED:
            down, across = _position(cols, prefix, key_width, key_down, key_across)
            away = tl.abs(row[:, None] - down[None, :]) + tl.abs(column[:, None] - across[None, :])
            distance += tl.sum(tl.where((cols >= prefix)[None, :], mean, 0.0) * away, 1)
    mine, images = batch.to(tl.int64) * reach + numbers, tl.num_programs(0).to(tl.int64)
    tl.store(lengths + mine, _one_over_root(length))
    tl.store(lengths + images * reach + mine, _one_over_root(length_paper))
    if PLACED:
        tl.store(distances + mine, tl.where(numbers >= prefix, distance, 0.0))


@triton.jit
def column_pass_flat(
    q, k, norms, bias, lengths, totals, received, units, scale, bound, heads, queries, keys, reach,
    q_strides, k_strides, bias_strides,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """By column and head: Σ_i p. By column: Σ_i t at unit length for both thresholds, Σ_i t, Σ_i (Σ_h p_h / ‖p_h‖)²."""
    scale, bound = single(scale), single(bound)
    batch, block = tl.program_id(0), tl.program_id(1)
    cols = block * BN + tl.arange(0, BN)
    there, one = tl.minimum(cols, keys - 1), 1.0 / heads
    official, paper = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    kept, joint = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    images = tl.num_programs(0).to(tl.int64)
    for start in tl.range(0, queries, BM, flatten=True):
        numbers = start + tl.arange(0, BM)
        rows = tl.minimum(numbers, queries - 1)
        total, weighted = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
        for h in range(heads):
            head, pair = batch * 0 + h, (batch * heads + h).to(tl.int64)
            query = load_rows(q, batch, head, rows, q_strides, D, DP)
            key = load_rows(k, batch, head, there, k_strides, D, DP)
            log = logits(key, query, scale, bias, batch, head, there, rows, bias_strides, HAS_BIAS)
            tile = tl.exp2(log - tl.load(norms + pair * reach + numbers)[None, :])
            total += tile
            weighted += tile * tl.load(totals + images * heads + pair)
            tl.atomic_add(received + pair * keys + cols, tl.sum(tile, 1), mask=cols < keys, sem="relaxed")
        mine = batch.to(tl.int64) * reach + numbers
        mean = total * one
        above = tl.where(mean > bound, mean, 0.0)
        official += tl.sum(above * tl.load(lengths + mine)[None, :], 1)
        above = tl.where(mean >= bound, mean, 0.0)
        paper += tl.sum(above * tl.load(lengths + images * reach + mine)[None, :], 1)
        kept += tl.sum(above, 1)
        joint += tl.sum(weighted * weighted, 1)
    place, ok = units + batch.to(tl.int64) * keys + cols, cols < keys
    tl.store(place, official, mask=ok)
    tl.store(place + images * keys, paper, mask=ok)
    tl.store(place + 2 * images * keys, kept, mask=ok)
    tl.store(place + 3 * images * keys, joint, mask=ok)


@triton.jit
def row_pass_one(
    q, k, norms, bias, entropies, squares, lengths, distances, scale, bound, heads, queries, keys, reach,
    prefix, query_width, key_width, query_down, query_across, key_down, key_across,
    q_strides, k_strides, bias_strides,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, PLACED: tl.constexpr,
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
    total = tl.zeros([BM, BN], tl.float32)
    for step in range(tl.cdiv(keys, BN) * heads):
        h = step % heads
        cols = step // heads * BN + tl.arange(0, BN)
        there, exists = tl.minimum(cols, keys - 1), tl.where(cols < keys, 1.0, 0.0)
        head, place = batch * 0 + h, (batch * heads + h).to(tl.int64) * reach + numbers
        query = load_rows(q, batch, head, rows, q_strides, D, DP)
        key = load_rows(k, batch, head, there, k_strides, D, DP)
        log = logits(query, key, scale, bias, batch, head, rows, there, bias_strides, HAS_BIAS)
        log -= tl.load(norms + place)[:, None]
        if HAS_BIAS:  # replace -inf by a finite value whose exp2 is 0
            log = tl.maximum(log, -1e30, propagate_nan=tl.PropagateNan.ALL)
        tile = tl.exp2(log) * exists[None, :]
        total += tile
        tl.atomic_add(entropies + place, tl.sum(tile * log, 1) * -0.6931471805599453, sem="relaxed")
        tl.atomic_add(squares + place, tl.sum(tile * tile, 1), sem="relaxed")
        if h == heads - 1:
            mean = total * one
            above = tl.where(mean > bound, mean, 0.0)
            length += tl.sum(above * above, 1)
            above = tl.where(mean >= bound, mean, 0.0)
            length_paper += tl.sum(above * above, 1)
            if PLACED:
                down, across = _position(cols, prefix, key_width, key_down, key_across)
                away = tl.abs(row[:, None] - down[None, :]) + tl.abs(column[:, None] - across[None, :])
                distance += tl.sum(tl.where((cols >= prefix)[None, :], mean, 0.0) * away, 1)
            total = tl.zeros([BM, BN], tl.float32)
    mine, images = batch.to(tl.int64) * reach + numbers, tl.num_programs(0).to(tl.int64)
    tl.store(lengths + mine, _one_over_root(length))
    tl.store(lengths + images * reach + mine, _one_over_root(length_paper))
    if PLACED:
        tl.store(distances + mine, tl.where(numbers >= prefix, distance, 0.0))


@triton.jit
def column_pass_one(
    q, k, norms, bias, lengths, totals, received, units, scale, bound, heads, queries, keys, reach,
    q_strides, k_strides, bias_strides,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """By column and head: Σ_i p. By column: Σ_i t at unit length for both thresholds, Σ_i t, Σ_i (Σ_h p_h / ‖p_h‖)²."""
    scale, bound = single(scale), single(bound)
    batch, block = tl.program_id(0), tl.program_id(1)
    cols = block * BN + tl.arange(0, BN)
    there, one = tl.minimum(cols, keys - 1), 1.0 / heads
    official, paper = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    kept, joint = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    images = tl.num_programs(0).to(tl.int64)
    total, weighted = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
    for step in range(tl.cdiv(queries, BM) * heads):
        h = step % heads
        numbers = step // heads * BM + tl.arange(0, BM)
        rows = tl.minimum(numbers, queries - 1)
        head, pair = batch * 0 + h, (batch * heads + h).to(tl.int64)
        query = load_rows(q, batch, head, rows, q_strides, D, DP)
        key = load_rows(k, batch, head, there, k_strides, D, DP)
        log = logits(key, query, scale, bias, batch, head, there, rows, bias_strides, HAS_BIAS)
        tile = tl.exp2(log - tl.load(norms + pair * reach + numbers)[None, :])
        total += tile
        weighted += tile * tl.load(totals + images * heads + pair)
        tl.atomic_add(received + pair * keys + cols, tl.sum(tile, 1), mask=cols < keys, sem="relaxed")
        if h == heads - 1:
            mine = batch.to(tl.int64) * reach + numbers
            mean = total * one
            above = tl.where(mean > bound, mean, 0.0)
            official += tl.sum(above * tl.load(lengths + mine)[None, :], 1)
            above = tl.where(mean >= bound, mean, 0.0)
            paper += tl.sum(above * tl.load(lengths + images * reach + mine)[None, :], 1)
            kept += tl.sum(above, 1)
            joint += tl.sum(weighted * weighted, 1)
            total, weighted = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
    place, ok = units + batch.to(tl.int64) * keys + cols, cols < keys
    tl.store(place, official, mask=ok)
    tl.store(place + images * keys, paper, mask=ok)
    tl.store(place + 2 * images * keys, kept, mask=ok)
    tl.store(place + 3 * images * keys, joint, mask=ok)


