"""Statistics of attention from queries and keys, without an N×N tensor: two dense passes, and one for pairs of maps.

`dense_pass` needs the softmax's normalisers; `unit_pass` needs the lengths that the dense pass found, of every row of
the heads' mean and of every head's whole map. Only one head's tile is alive at a time, beside the mean. Of what they
add up, which is linear in the tokens, `conclude_pass` computes nine numbers per head.

`entropies` (B, G, Q) are the rows', `lengths` (2, B, Q) the squared lengths of the heads' mean under both thresholds.
`sums` are one after the other what keys receive, (B, G, K); the sums over rows of t at unit length, with the threshold
> and with ≥, and of t with ≥, (3, B, K); each head's squares, (B, G); distance and joint, (2, B). They meet from all
blocks of rows, in memory linear in K: they are added as whole numbers (units of 2⁻⁴⁰), so their order does not matter
and results repeat bit by bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.attention import AttentionInputs
from vitfocus.kernels.backends import on_device_of_first
from vitfocus.kernels.shared_memory import available, padded, shrink
from vitfocus.kernels.statistics.reference import Numbers
from vitfocus.kernels.tiles import load_heads, load_rows, load_vectors, logits, normalisers, single, zeros

#: How many columns at a time a program of the last pass goes through.
_COLUMNS = 1024


@triton.jit
def _log_tile(
    query, k, norm, scale, bias, batch, head, rows, row_ok, cols, col_ok, k_strides, bias_strides,
    D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """log₂ of one head's attention, in place of -inf a finite number whose power is 0; `norm` is in units of log 2."""
    key = load_rows(k, batch, head, cols, col_ok, k_strides, D, DP)
    scores = logits(query, key, scale, bias, batch, head, rows, row_ok, cols, col_ok, bias_strides, HAS_BIAS)
    log = tl.where(col_ok[None, :], scores - norm[:, None], -1e30)
    return tl.maximum(log, -1e30, propagate_nan=tl.PropagateNan.ALL) if HAS_BIAS else log


@triton.jit
def _norms(lse, first, queries, rows, row_ok, G: tl.constexpr):
    """The normalisers of G heads as `_log_tile` takes them, a tuple."""
    loaded = load_vectors(lse, first, queries, rows, row_ok, G)
    made = ()
    for h in tl.static_range(G):
        made = made + (tl.where(row_ok, loaded[h] * 1.4426950408889634, 1e30),)
    return made


@triton.jit
def _add_columns(sums, tile, ok, BM: tl.constexpr, BN: tl.constexpr, PARTED: tl.constexpr):
    """Add a tile's (T, S) column sums to sums at S places, as whole numbers; PARTED, a warp adds its own rows."""
    if PARTED:
        parts: tl.constexpr = BM // 16
        none = tl.zeros([parts, 1], tl.int32)
        whole = (tl.sum(tl.reshape(tile, [parts, 16, BN]), 1) * 1099511627776.0).to(tl.int64)
        tl.atomic_add(sums[None, :] + none, whole, mask=ok[None, :] & (none == 0), sem="relaxed")
    else:
        tl.atomic_add(sums, (tl.sum(tile, 0) * 1099511627776.0).to(tl.int64), mask=ok, sem="relaxed")


@triton.jit
def _add(sums, value):
    """Add one value to a sum, as a whole number."""
    tl.atomic_add(sums, (value * 1099511627776.0).to(tl.int64), sem="relaxed")


@triton.jit
def _number(places, ok):
    """What was added there."""
    return tl.load(places, mask=ok, other=0).to(tl.float32) * 9.094947017729282e-13


@triton.jit
def _row_sums(tile, BM: tl.constexpr, BN: tl.constexpr, PARTED: tl.constexpr):
    """Row sums of a tile (T, S). PARTED, in four parts, (T, 4): what one thread holds of a row as products leave it.

    `parted_sums` says where; tiles with a bias or fewer rows lie otherwise, and Triton 3.6 sums their parts wrongly.
    """
    if PARTED:
        parts = tl.permute(tl.reshape(tile, [BM, BN // 8, 4, 2]), (0, 2, 1, 3))
        return tl.sum(tl.reshape(parts, [BM, 4, BN // 4]), 2)
    else:
        return tl.sum(tile, 1)


@triton.jit
def _no_sums(count: tl.constexpr, BM: tl.constexpr, PARTED: tl.constexpr):
    """So many row sums of nothing yet, a tuple."""
    return zeros(count, [BM, 4] if PARTED else [BM])


@triton.jit
def _whole(sums, PARTED: tl.constexpr):
    """Row sums (T,) from their parts."""
    if PARTED:
        return tl.sum(sums, 1)
    else:
        return sums


@triton.jit
def _away(rows, cols, prefix, query_width, key_width, query_down, query_across, key_down, key_across):
    """‖p_i − p_j‖₁ between places of the two grids (T, S), 0 for keys of the prefix."""
    query, key = tl.maximum(rows - prefix, 0), tl.maximum(cols - prefix, 0)
    down = tl.abs(((query // query_width) * query_down)[:, None] - ((key // key_width) * key_down)[None, :])
    across = tl.abs(((query % query_width) * query_across)[:, None] - ((key % key_width) * key_across)[None, :])
    return tl.where((cols >= prefix)[None, :], down + across, 0.0)


@triton.jit
def dense_pass(
    q, k, lse, bias, entropies, lengths, sums, scale, bound, queries, keys,
    prefix, query_width, key_width, query_down, query_across, key_down, key_across,
    q_strides, k_strides, bias_strides,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, PARTED: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """By row and head: entropy. By row of the heads' mean a: Σ_j t² of both thresholds.

    By column: Σ_i p of every head, and Σ_i t of the threshold ≥. Of all: every head's Σ_ij p², and Σ_ij a‖p_i − p_j‖₁.
    """
    scale, bound, query_down, query_across = single(scale), single(bound), single(query_down), single(query_across)
    key_down, key_across = single(key_down), single(key_across)
    batch, block = tl.program_id(0), tl.program_id(1)
    rows = block * BM + tl.arange(0, BM)
    row_ok = rows < queries
    query = load_heads(q, batch, batch * 0, rows, row_ok, q_strides, G, D, DP)
    norms = _norms(lse, batch * G, queries, rows, row_ok, G)
    entropy, square = _no_sums(G, BM, PARTED), _no_sums(G, BM, PARTED)
    distance, length, length_paper = _no_sums(3, BM, PARTED)
    first, images = batch.to(tl.int64) * G, tl.num_programs(0).to(tl.int64)
    kept = sums + (images * (G + 2) + batch) * keys
    of_all = sums + images * (G + 3) * keys
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        col_ok = cols < keys
        total = tl.zeros([BM, BN], tl.float32)
        entropies_now, squares_now = (), ()
        for h in tl.static_range(G):
            log = _log_tile(
                query[h], k, norms[h], scale, bias, batch, batch * 0 + h, rows, row_ok, cols, col_ok, k_strides,
                bias_strides, D, DP, HAS_BIAS,
            )  # fmt: skip
            tile = tl.exp2(log)
            total += tile
            entropies_now = entropies_now + (entropy[h] - _row_sums(tile * log, BM, BN, PARTED),)
            squares_now = squares_now + (square[h] + _row_sums(tile * tile, BM, BN, PARTED),)
            _add_columns(sums + (first + h) * keys + cols, tile, col_ok, BM, BN, PARTED)
        entropy, square = entropies_now, squares_now
        mean = total * (1.0 / G)
        above = tl.where(mean > bound, mean, 0.0)
        length += _row_sums(above * above, BM, BN, PARTED)
        above = tl.where(mean >= bound, mean, 0.0)
        length_paper += _row_sums(above * above, BM, BN, PARTED)
        _add_columns(kept + cols, above, col_ok, BM, BN, PARTED)
        if PLACED:
            away = _away(rows, cols, prefix, query_width, key_width, query_down, query_across, key_down, key_across)
            distance += _row_sums(mean * away, BM, BN, PARTED)
    for h in tl.static_range(G):
        place = (first + h) * queries + rows
        tl.store(entropies + place, _whole(entropy[h], PARTED) * 0.6931471805599453, mask=row_ok)
        _add(of_all + first + h, tl.sum(_whole(square[h], PARTED), 0))
    mine = batch.to(tl.int64) * queries + rows
    tl.store(lengths + mine, _whole(length, PARTED), mask=row_ok)
    tl.store(lengths + images * queries + mine, _whole(length_paper, PARTED), mask=row_ok)
    if PLACED:
        _add(of_all + images * G + batch, tl.sum(tl.where(rows >= prefix, _whole(distance, PARTED), 0.0), 0))


@triton.jit
def _one_over_length(lengths, places, ok):
    """One over the lengths whose squares stand there; that of an empty row is large but meets only zeros."""
    return 1.0 / tl.maximum(tl.sqrt(tl.load(lengths + places, mask=ok, other=0.0)), 1e-8)


@triton.jit
def unit_pass(
    q, k, lse, bias, lengths, sums, scale, bound, queries, keys,
    q_strides, k_strides, bias_strides,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, PARTED: tl.constexpr,
):  # fmt: skip
    """By column: the sums of the rows t at unit length, for both thresholds. Of all: Σ_ij (Σ_h p_h / ‖p_h‖)²."""
    scale, bound = single(scale), single(bound)
    batch, block = tl.program_id(0), tl.program_id(1)
    rows = block * BM + tl.arange(0, BM)
    row_ok = rows < queries
    query = load_heads(q, batch, batch * 0, rows, row_ok, q_strides, G, D, DP)
    norms = _norms(lse, batch * G, queries, rows, row_ok, G)
    mine, images = batch.to(tl.int64) * queries + rows, tl.num_programs(0).to(tl.int64)
    unit = _one_over_length(lengths, mine, row_ok)
    unit_paper = _one_over_length(lengths + images * queries, mine, row_ok)
    (together,) = _no_sums(1, BM, PARTED)
    official, paper = sums + (images * G + batch) * keys, sums + (images * (G + 1) + batch) * keys
    of_all = sums + images * (G + 3) * keys
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        col_ok = cols < keys
        total, weighted = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        for h in tl.static_range(G):
            log = _log_tile(
                query[h], k, norms[h], scale, bias, batch, batch * 0 + h, rows, row_ok, cols, col_ok, k_strides,
                bias_strides, D, DP, HAS_BIAS,
            )  # fmt: skip
            tile = tl.exp2(log)
            total += tile
            # Loaded here and not before the loop, where all heads' lengths would hold on to registers.
            square = _number(of_all + batch.to(tl.int64) * G + h, True)
            weighted += tile * tl.rsqrt(tl.maximum(square, 1e-16))
        mean = total * (1.0 / G)
        above = tl.where(mean > bound, mean, 0.0) * unit[:, None]
        _add_columns(official + cols, above, col_ok, BM, BN, PARTED)
        above = tl.where(mean >= bound, mean, 0.0) * unit_paper[:, None]
        _add_columns(paper + cols, above, col_ok, BM, BN, PARTED)
        together += _row_sums(weighted * weighted, BM, BN, PARTED)
    _add(of_all + images * (G + 1) + batch, tl.sum(_whole(together, PARTED), 0))


@triton.jit
def _of_the_top(column, keys, top, BN: tl.constexpr):
    """The sum of the `top` largest of so many whole numbers, none below 0.

    The smallest of them is found by halving: the largest number that at least `top` of them reach.
    """
    most = tl.zeros([BN], tl.int64)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        most = tl.maximum(most, tl.load(column + cols, mask=cols < keys, other=0))
    reached = tl.max(most, 0) * 0
    missed = tl.max(most, 0) + 1
    while missed - reached > 1:
        middle = reached + ((missed - reached) >> 1)
        count = tl.zeros([BN], tl.int32)
        for start in range(0, keys, BN):
            cols = start + tl.arange(0, BN)
            count += (tl.load(column + cols, mask=cols < keys, other=0) >= middle).to(tl.int32)
        enough = tl.sum(count, 0) >= top
        reached = tl.where(enough, middle, reached)
        missed = tl.where(enough, missed, middle)
    total, count = tl.zeros([BN], tl.int64), tl.zeros([BN], tl.int32)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        values = tl.load(column + cols, mask=cols < keys, other=0)
        total += tl.where(values > reached, values, 0)
        count += (values > reached).to(tl.int32)
    return tl.sum(total, 0) + (top - tl.sum(count, 0)) * reached


@triton.jit
def _of_head(entropies, sums, numbers, batch, head, images, queries, keys, top, G: tl.constexpr, BN: tl.constexpr):
    """One head's five numbers."""
    mine, one = batch * G + head, 1.0 / queries
    column = sums + mine * keys
    entropy = tl.zeros([BN], tl.float32)
    for start in range(0, queries, BN):
        rows = start + tl.arange(0, BN)
        entropy += tl.load(entropies + mine * queries + rows, mask=rows < queries, other=0.0)
    spread = tl.zeros([BN], tl.float32)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        share = _number(column + cols, cols < keys) * one
        spread -= tl.where(share > 0.0, share * tl.log(tl.maximum(share, 1e-37)), 0.0)
    largest = _of_the_top(column, keys, top, BN).to(tl.float32) * 9.094947017729282e-13
    total = tl.sum(entropy, 0)
    nothing = total * 0.0  # or not a number, which whole numbers cannot be
    tl.store(numbers + mine, total)
    tl.store(numbers + images * G + mine, _number(sums + images * (G + 3) * keys + mine, True) + nothing)
    tl.store(numbers + 2 * images * G + mine, tl.load(entropies + mine * queries))
    tl.store(numbers + 3 * images * G + mine, largest * one + nothing)
    tl.store(numbers + 4 * images * G + mine, tl.exp(tl.sum(spread, 0)) + nothing)


@triton.jit
def _of_image(
    entropies, sums, numbers, batch, images, bound, queries, keys, placed,
    G: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One image's four numbers, in the place of its first head."""
    one = 1.0 / queries
    product, length = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    product_paper, length_paper = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    units, units_paper = sums + (images * G + batch) * keys, sums + (images * (G + 1) + batch) * keys
    kept, of_all = sums + (images * (G + 2) + batch) * keys, sums + images * (G + 3) * keys + images * G + batch
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        ok = cols < keys
        mean = tl.zeros([BN], tl.float32)
        for h in range(G):
            mean += _number(sums + (batch * G + h) * keys + cols, ok)
        mean = mean * (one / G)
        mean = tl.where(mean > bound, mean, 0.0)
        product += mean * _number(units + cols, ok)
        length += mean * mean
        mean = _number(kept + cols, ok) * one
        product_paper += mean * _number(units_paper + cols, ok)
        length_paper += mean * mean
    official = one * tl.sum(product, 0) / tl.maximum(tl.sqrt(tl.sum(length, 0)), 1e-8)
    paper = one * tl.sum(product_paper, 0) / tl.maximum(tl.sqrt(tl.sum(length_paper, 0)), 1e-8)
    nothing = tl.zeros([BN], tl.float32)
    for start in range(0, G * queries, BN):
        rows = start + tl.arange(0, BN)
        nothing += tl.load(entropies + batch * G * queries + rows, mask=rows < G * queries, other=0.0) * 0.0
    official += tl.sum(nothing, 0)
    heads = tl.arange(0, GP)
    place, first, ok = numbers + (5 * images + batch) * G + heads, heads == 0, heads < G
    tl.store(place, tl.where(first, _number(of_all, True) / placed + official * 0.0, 0.0), mask=ok)
    tl.store(place + images * G, tl.where(first, _number(of_all + images, True) + official * 0.0, 0.0), mask=ok)
    tl.store(place + 2 * images * G, tl.where(first, official, 0.0), mask=ok)
    tl.store(place + 3 * images * G, tl.where(first, paper + official * 0.0, 0.0), mask=ok)


@triton.jit
def conclude_pass(
    entropies, sums, numbers, bound, queries, keys, top, placed,
    G: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Nine numbers per head, (9, B, G) in the order of `Numbers`: one program per head, and one for the image."""
    bound = single(bound)
    batch, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    images = tl.num_programs(0).to(tl.int64)
    if part < G:
        _of_head(entropies, sums, numbers, batch, part, images, queries, keys, top, G, BN)
    else:
        _of_image(entropies, sums, numbers, batch, images, bound, queries, keys, placed, G, GP, BN)


@triton.jit
def pair_pass(
    q, k, lse, bias, other_q, other_k, other_lse, other_bias, products, scale, heads, queries, keys,
    q_strides, k_strides, bias_strides, other_q_strides, other_k_strides, other_bias_strides,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
    OTHER_BIAS: tl.constexpr,
):  # fmt: skip
    """By row and head of two maps p and r: Σ_j p r, Σ_j p² and Σ_j r², three vectors (B, H, Q) one after the other."""
    scale = single(scale)
    pair, block = tl.program_id(0), tl.program_id(1)
    batch, head = pair // heads, pair % heads
    rows = block * BM + tl.arange(0, BM)
    row_ok = rows < queries
    query = load_rows(q, batch, head, rows, row_ok, q_strides, D, DP)
    other_query = load_rows(other_q, batch, head, rows, row_ok, other_q_strides, D, DP)
    norm, other_norm = _norms(lse, pair, queries, rows, row_ok, 1), _norms(other_lse, pair, queries, rows, row_ok, 1)
    both, one, two = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        col_ok = cols < keys
        clean = tl.exp2(_log_tile(
            query, k, norm[0], scale, bias, batch, head, rows, row_ok, cols, col_ok, k_strides, bias_strides,
            D, DP, HAS_BIAS,
        ))  # fmt: skip
        corrupted = tl.exp2(_log_tile(
            other_query, other_k, other_norm[0], scale, other_bias, batch, head, rows, row_ok, cols, col_ok,
            other_k_strides, other_bias_strides, D, DP, OTHER_BIAS,
        ))  # fmt: skip
        both += tl.sum(clean * corrupted, 1)
        one += tl.sum(clean * clean, 1)
        two += tl.sum(corrupted * corrupted, 1)
    place = pair.to(tl.int64) * queries + rows
    length = tl.num_programs(0).to(tl.int64) * queries
    tl.store(products + place, both, mask=row_ok)
    tl.store(products + length + place, one, mask=row_ok)
    tl.store(products + 2 * length + place, two, mask=row_ok)


@on_device_of_first
def statistics(
    attention: AttentionInputs, scale: float, sides: list[int], threshold: float, top: int
) -> tuple[Tensor, Tensor]:
    """The results of the operator, in few launches: at a GPU's pace the host has no time for many."""
    query, key, bias, _ = attention
    batch, heads, queries, width = query.shape
    keys, device = key.shape[2], query.device
    norms, given, strides = _inputs(attention, scale)
    rows, settings = _settings(
        heads, 1, width, query.element_size(), queries, keys, bias is not None, available(device)
    )
    grid = (batch, -(-queries // rows))  # windows may be many, and only the first axis is long
    entropy = torch.empty(batch, heads, queries, dtype=torch.float32, device=device)
    lengths = torch.empty(2, batch, queries, dtype=torch.float32, device=device)
    sums = torch.zeros(batch * ((heads + 3) * keys + heads + 2), dtype=torch.int64, device=device)
    numbers = torch.empty(len(Numbers._fields), batch, heads, dtype=torch.float32, device=device)
    bound = threshold / keys
    places = _places(sides)
    settings = settings | {"PARTED": rows == 64 and bias is None and parted_sums(device)}
    dense_pass[grid](
        query, key, norms, given, entropy, lengths, sums, scale, bound, queries, keys, *places, *strides,
        G=heads, **settings, PLACED=bool(sides),
    )  # fmt: skip
    unit_pass[grid](query, key, norms, given, lengths, sums, scale, bound, queries, keys, *strides, G=heads, **settings)
    conclude_pass[batch, heads + 1](
        entropy, sums, numbers, bound, queries, keys, top, max(queries - places[0], 1), **_last(heads, queries, keys)
    )
    return entropy, numbers


@on_device_of_first
def pair_products(one: AttentionInputs, two: AttentionInputs, scale: float) -> Tensor:
    """Inner products of two maps, (3, B, H)."""
    (query, key, bias, _), (other_query, other_key, other_bias, _) = one, two
    batch, heads, queries, width = query.shape
    norms, given, strides = _inputs(one, scale)
    other_norms, other_given, other_strides = _inputs(two, scale)
    products = torch.empty(3, batch, heads, queries, dtype=torch.float32, device=query.device)
    item, space = query.element_size(), available(query.device)
    rows, settings = _settings(1, 2, width, item, queries, key.shape[2], bias is not None, space)
    pair_pass[batch * heads, -(-queries // rows)](
        query, key, norms, given, other_query, other_key, other_norms, other_given, products, scale, heads, queries,
        key.shape[2], *strides, *other_strides, **settings, OTHER_BIAS=other_bias is not None,
    )  # fmt: skip
    return products.sum(dim=-1)


def _inputs(attention: AttentionInputs, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Normalisers, a bias or what stands in for none, and the strides of queries, keys and bias."""
    query, key, bias, lse = attention
    norms = normalisers(query, key, bias, scale) if lse is None else lse.contiguous()
    shape = (*query.shape[:3], key.shape[2])
    bias_strides = bias.expand(shape).stride() if bias is not None else (0, 0, 0, 0)
    return norms, bias if bias is not None else query, (query.stride(), key.stride(), bias_strides)


def parted_sums(device: torch.device) -> bool:
    """Whether a tile lies in registers such that sums in parts are right, as seen on compute capability 9.0 alone."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


def _places(sides: list[int]) -> tuple[int, int, int, float, float, float, float]:
    """The prefix, the grids' widths, and one step down and across each, as fractions of their sides."""
    if not sides:
        return 0, 1, 1, 0.0, 0.0, 0.0, 0.0
    query_height, query_width, key_height, key_width, prefix = sides
    steps = [1 / max(side - 1, 1) for side in (query_height, query_width, key_height, key_width)]
    return prefix, query_width, key_width, steps[0], steps[1], steps[2], steps[3]


@cache
def _settings(
    heads: int, maps: int, width: int, item: int, queries: int, keys: int, biased: bool, space: int
) -> tuple[int, dict[str, Any]]:
    """Rows of a program, and what the kernels are compiled for: so many heads of so many maps at a time."""
    rows, cols, stages = block_sizes(heads, maps * width, item, queries, keys, space)
    sizes: dict[str, Any] = {"D": width, "DP": padded(width), "BM": rows, "BN": cols, "HAS_BIAS": biased}
    return rows, sizes | {"num_warps": 4, "num_stages": stages}


@cache
def _last(heads: int, queries: int, keys: int) -> dict[str, Any]:
    """What the last pass is compiled for."""
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(max(queries, keys))))
    # One warp adds up without waiting for others.
    warps = 1 if columns <= 256 else 4
    return {"G": heads, "GP": triton.next_power_of_2(heads), "BN": columns, "num_warps": warps}


def block_sizes(heads: int, width: int, item: int, queries: int, keys: int, space: int) -> tuple[int, int, int]:
    """Rows, columns and stages of a program: two programs with every head's queries, and keys ahead, share a core."""
    rows, cols, token = 64, 32, heads * padded(width) * item
    while rows > 16 and rows * token > 65536:
        rows //= 2
    rows, cols = shrink(heads, width, item, rows, cols, space)
    rows = min(rows, max(16, triton.next_power_of_2(queries)))
    cols = min(cols, max(16, triton.next_power_of_2(keys)))
    ahead = (2 * cols + (rows if rows == 64 else 0)) * token
    return rows, cols, 2 if ahead <= 100 * 1024 and item < 4 else 1
