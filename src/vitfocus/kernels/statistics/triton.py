"""Statistics of attention from queries and keys, without an N×N tensor: two dense passes, and one for pairs of maps.

A program of `row_pass` owns rows and loops over keys; one of `column_pass` owns keys and loops over rows, and needs the
norms that the first pass computed, of each row of the heads' mean and of each head's whole map. So each sum is owned by
one program, which adds it up in a fixed order, and results are bitwise reproducible. Sums of one head are accumulated
in memory, as heads change from step to step; the number of heads is not a compile-time constant. From these sums, whose
size is linear in the tokens, `conclude_pass` computes nine values per head.

`norms` are (B, H, reach), `sums` (B, H, reach, 2) the entropy of each row and its Σ_j p², `lengths` (2, B, reach) one
over the lengths of the heads' mean under both thresholds, `received` (B, H, K) what keys receive, `units` (4, B, K) the
sums over rows of t at unit length, with the threshold > and with ≥, of t with ≥, and of the squared sum of the heads'
maps at unit length.
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
from vitfocus.kernels.shared_memory import LARGE, available, padded, row_tiles
from vitfocus.kernels.statistics.passes import column_pass, one_over_root, row_pass
from vitfocus.kernels.statistics.reference import Numbers
from vitfocus.kernels.tiles import load_rows, logits, lower_norms, normalisers, single

#: Up to so many keys, the two dense passes go over tiles and heads in one loop; beyond, that took longer.
ONE_LOOP_KEYS = 1025
#: Whether the GPU's copy engine loads tiles of half precision.
TMA = False
#: What was fastest, up to `ONE_LOOP_KEYS` keys and beyond, for heads of up to 64 channels in half precision.
FASTEST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"rows": ({}, {}), "columns": ({}, {}), "pair": ({}, {})}
#: Adjacent bins are this many apart in memory. Entropies of a layer are alike, and atomic additions to one cache line
#: take turns.
_APART = 512
_BLOCK = 1024
#: Columns per iteration of a program of the last pass.
_COLUMNS = 4096


@triton.jit
def head_pass(sums, totals, queries, reach, BN: tl.constexpr):
    """Of each head of each image, Σ_ij p² and one over its root: (2, B, H)."""
    pair = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BN], tl.float32)
    for start in range(0, queries, BN):
        rows = start + tl.arange(0, BN)
        total += tl.load(sums + 2 * (pair * reach + rows) + 1, mask=rows < queries, other=0.0)
    tl.store(totals + pair, tl.sum(total, 0))
    tl.store(totals + tl.num_programs(0) + pair, one_over_root(tl.sum(total, 0)))


@triton.jit
def _of_the_top(column, keys, top, BN: tl.constexpr):
    """The sum of the `top` largest of `keys` non-negative values.

    The smallest of these is found by bisection, as the largest value that at least `top` values reach. Non-negative
    floats are ordered as their bits are.
    """
    most = tl.zeros([BN], tl.int32)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        most = tl.maximum(most, tl.load(column + cols, mask=cols < keys, other=0.0).to(tl.int32, bitcast=True))
    reached = tl.max(most, 0) * 0
    missed = tl.max(most, 0) + 1
    while missed - reached > 1:
        middle = reached + ((missed - reached) >> 1)
        count = tl.zeros([BN], tl.int32)
        for start in range(0, keys, BN):
            cols = start + tl.arange(0, BN)
            bits = tl.load(column + cols, mask=cols < keys, other=0.0).to(tl.int32, bitcast=True)
            count += ((bits >= middle) & (cols < keys)).to(tl.int32)
        enough = tl.sum(count, 0) >= top
        reached = tl.where(enough, middle, reached)
        missed = tl.where(enough, missed, middle)
    limit = reached.to(tl.float32, bitcast=True)
    total, count = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.int32)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        values = tl.load(column + cols, mask=cols < keys, other=0.0)
        total += tl.where(values > limit, values, 0.0)
        count += (values > limit).to(tl.int32)
    return tl.sum(total, 0) + (top - tl.sum(count, 0)) * limit


@triton.jit
def _of_head(sums, totals, received, entropy_out, numbers, mine, pairs, queries, keys, reach, top, BN: tl.constexpr):
    """One head's five values, and its rows' entropies without padding."""
    column = received + mine * keys
    given = tl.zeros([BN], tl.float32)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        given += tl.load(column + cols, mask=cols < keys, other=0.0)
    one = 1.0 / tl.sum(given, 0)  # the number of queries, less those with every key masked
    entropy = tl.zeros([BN], tl.float32)
    for start in range(0, queries, BN):
        rows = start + tl.arange(0, BN)
        value = tl.load(sums + 2 * (mine * reach + rows), mask=rows < queries, other=0.0)
        tl.store(entropy_out + mine * queries + rows, value, mask=rows < queries)
        entropy += value
    spread = tl.zeros([BN], tl.float32)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        share = tl.load(column + cols, mask=cols < keys, other=0.0) * one
        spread -= tl.where(share > 0.0, share * tl.log(tl.maximum(share, 1e-37)), 0.0)
    total = tl.sum(entropy, 0)
    nothing = total * 0.0  # 0, or NaN, which a maximum or a logarithm might hide
    tl.store(numbers + mine, total)
    tl.store(numbers + pairs + mine, tl.load(totals + mine) + nothing)
    tl.store(numbers + 2 * pairs + mine, tl.load(sums + 2 * mine * reach))
    tl.store(numbers + 3 * pairs + mine, _of_the_top(column, keys, top, BN) * one + nothing)
    tl.store(numbers + 4 * pairs + mine, tl.exp(tl.sum(spread, 0)) + nothing)


@triton.jit
def _of_image(
    sums, distances, received, units, numbers, batch, images, bound, heads, queries, keys, reach, placed,
    PLACED: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One image's four values, stored at its first head."""
    one = 1.0 / queries
    product, length = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    product_paper, length_paper = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    joint, distance = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    nothing = tl.zeros([BN], tl.float32)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        ok, place = cols < keys, units + batch * keys + cols
        mean = tl.zeros([BN], tl.float32)
        for h in range(heads):
            mean += tl.load(received + (batch * heads + h) * keys + cols, mask=ok, other=0.0)
        mean = mean * (one / heads)
        mean = tl.where(mean > bound, mean, 0.0)
        product += mean * tl.load(place, mask=ok, other=0.0)
        length += mean * mean
        mean = tl.load(place + 2 * images * keys, mask=ok, other=0.0) * one
        product_paper += mean * tl.load(place + images * keys, mask=ok, other=0.0)
        length_paper += mean * mean
        joint += tl.load(place + 3 * images * keys, mask=ok, other=0.0)
    official = one * tl.sum(product, 0) / tl.maximum(tl.sqrt(tl.sum(length, 0)), 1e-8)
    paper = one * tl.sum(product_paper, 0) / tl.maximum(tl.sqrt(tl.sum(length_paper, 0)), 1e-8)
    for start in range(0, queries, BN):
        rows = start + tl.arange(0, BN)
        if PLACED:
            distance += tl.load(distances + batch * reach + rows, mask=rows < queries, other=0.0)
        for h in range(heads):
            value = tl.load(sums + 2 * ((batch * heads + h) * reach + rows), mask=rows < queries, other=0.0)
            nothing += value * 0.0
    official += tl.sum(nothing, 0)
    for start in range(0, heads, BH):
        head = start + tl.arange(0, BH)
        place, first, ok = numbers + (5 * images + batch) * heads + head, head == 0, head < heads
        tl.store(place, tl.where(first, tl.sum(distance, 0) / placed + official * 0.0, 0.0), mask=ok)
        tl.store(place + images * heads, tl.where(first, tl.sum(joint, 0) + official * 0.0, 0.0), mask=ok)
        tl.store(place + 2 * images * heads, tl.where(first, official, 0.0), mask=ok)
        tl.store(place + 3 * images * heads, tl.where(first, paper + official * 0.0, 0.0), mask=ok)


@triton.jit
def conclude_pass(
    sums, totals, distances, received, units, entropy_out, numbers, bound, heads, queries, keys, reach, top,
    placed, PLACED: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Nine values per head, (9, B, H) in the order of `Numbers`: one program per head, and one for the image."""
    bound = single(bound)
    batch, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    images = tl.num_programs(0).to(tl.int64)
    if part < heads:
        _of_head(
            sums, totals, received, entropy_out, numbers, batch * heads + part, images * heads, queries, keys,
            reach, top, BN,
        )  # fmt: skip
    else:
        _of_image(
            sums, distances, received, units, numbers, batch, images, bound, heads, queries, keys, reach, placed,
            PLACED, BH, BN,
        )  # fmt: skip


@triton.jit
def pair_pass(
    q, k, norms, bias, other_q, other_k, other_norms, other_bias, products, scale, heads, queries, keys, reach,
    q_strides, k_strides, bias_strides, other_q_strides, other_k_strides, other_bias_strides,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
    OTHER_BIAS: tl.constexpr,
):  # fmt: skip
    """By row and head of two maps p and r: Σ_j p r, Σ_j p² and Σ_j r², three vectors (B, H, Q) one after the other."""
    scale = single(scale)
    pair, block = tl.program_id(0), tl.program_id(1)
    batch, head = pair // heads, pair % heads
    numbers = block * BM + tl.arange(0, BM)
    rows = tl.minimum(numbers, queries - 1)
    query = load_rows(q, batch, head, rows, q_strides, D, DP)
    other_query = load_rows(other_q, batch, head, rows, other_q_strides, D, DP)
    norm = tl.load(norms + pair.to(tl.int64) * reach + numbers)[:, None]
    other_norm = tl.load(other_norms + pair.to(tl.int64) * reach + numbers)[:, None]
    both, one, two = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for start in range(0, keys, BN):
        cols = start + tl.arange(0, BN)
        there, exists = tl.minimum(cols, keys - 1), tl.where(cols < keys, 1.0, 0.0)
        key = load_rows(k, batch, head, there, k_strides, D, DP)
        log = logits(query, key, scale, bias, batch, head, rows, there, bias_strides, HAS_BIAS)
        clean = tl.exp2(log - norm) * exists[None, :]
        key = load_rows(other_k, batch, head, there, other_k_strides, D, DP)
        log = logits(
            other_query, key, scale, other_bias, batch, head, rows, there, other_bias_strides, OTHER_BIAS
        )  # fmt: skip
        corrupted = tl.exp2(log - other_norm) * exists[None, :]
        both += tl.sum(clean * corrupted, 1)
        one += tl.sum(clean * clean, 1)
        two += tl.sum(corrupted * corrupted, 1)
    place, ok = pair.to(tl.int64) * queries + numbers, numbers < queries
    length = tl.num_programs(0).to(tl.int64) * queries
    tl.store(products + place, both, mask=ok)
    tl.store(products + length + place, one, mask=ok)
    tl.store(products + 2 * length + place, two, mask=ok)


@on_device_of_first
def statistics(
    attention: AttentionInputs, scale: float, sides: list[int], threshold: float, top: int
) -> tuple[Tensor, Tensor]:
    """The results of the operator, in few launches, because launching takes the host longer than the GPU needs."""
    query, key, bias, _ = attention
    batch, heads, queries, width = query.shape
    keys, device = key.shape[2], query.device
    norms, given, (query_strides, key_strides, bias_strides) = _inputs(attention, scale)
    reach = norms.shape[2]
    given_sizes = (width, query.element_size(), queries, keys, bias is not None, available(device))
    form = {"ONE_LOOP": keys <= ONE_LOOP_KEYS, "TMA": TMA}
    by_row = form | block_settings("rows", *given_sizes)
    by_column = form | block_settings("columns", *given_sizes)
    turned = bias_strides[:2] + bias_strides[:1:-1]
    # All accumulators, zeroed in one launch; and lengths, of which one pass may read more rows than the other writes.
    pairs = batch * heads
    zeros = torch.zeros(2 * (pairs + batch) * reach + pairs * keys, dtype=torch.float32, device=device)
    sums, lengths, received = zeros.split([2 * pairs * reach, 2 * batch * reach, pairs * keys])
    rest = torch.empty(batch * (reach + 4 * keys) + 2 * pairs, dtype=torch.float32, device=device)
    distances, units, totals = rest.split([batch * reach, 4 * batch * keys, 2 * pairs])
    entropy = torch.empty(batch, heads, queries, dtype=torch.float32, device=device)
    numbers = torch.empty(len(Numbers._fields), batch, heads, dtype=torch.float32, device=device)
    sizes, bound, places, last = (heads, queries, keys, reach), threshold / keys, _places(sides), _last(queries, keys)
    row_sources, by_row = _sources(query, key, by_row)
    column_sources, by_column = _sources(query, key, by_column)
    # There may be many windows, and only the first grid axis is long enough.
    row_pass[batch, -(-queries // by_row["BM"])](
        *row_sources, norms, given, sums, lengths, distances, scale, bound, *sizes, *places,
        query_strides, key_strides, bias_strides, **by_row, PLACED=bool(sides),
    )  # fmt: skip
    head_pass[(pairs,)](sums, totals, queries, reach, **last)
    column_pass[batch, -(-keys // by_column["BN"])](
        *column_sources, norms, given, lengths, totals, received, units, scale, bound, *sizes, query_strides,
        key_strides, turned, **by_column,
    )  # fmt: skip
    conclude_pass[batch, heads + 1](
        sums, totals, distances, received, units, entropy, numbers, bound, *sizes, top,
        max(queries - places[0], 1), PLACED=bool(sides), BH=16, **last,
    )  # fmt: skip
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
    settings = block_settings("pair", width, item, queries, key.shape[2], bias is not None, space)
    pair_pass[batch * heads, -(-queries // settings["BM"])](
        query, key, norms, given, other_query, other_key, other_norms, other_given, products, scale, heads, queries,
        key.shape[2], norms.shape[2], *strides, *other_strides, **settings, OTHER_BIAS=other_bias is not None,
    )  # fmt: skip
    return products.sum(dim=-1)


def _inputs(attention: AttentionInputs, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Padded normalisers, the bias or a placeholder, and the strides of queries, keys and bias."""
    query, key, bias, lse = attention
    norms = lower_norms(normalisers(query, key, bias, scale) if lse is None else lse.contiguous())
    shape = (*query.shape[:3], key.shape[2])
    bias_strides = bias.expand(shape).stride() if bias is not None else (0, 0, 0, 0)
    return norms, bias if bias is not None else query, (query.stride(), key.stride(), bias_strides)


def _sources(query: Tensor, key: Tensor, settings: dict[str, Any]) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Queries and keys as a kernel with these settings takes them: described to the copy engine, if it reads them."""
    if not (settings["TMA"] and _has_copy_engine(query.device) and all(map(_can_be_described, (query, key)))):
        return (query, key), settings | {"TMA": False}
    from triton.tools.tensor_descriptor import TensorDescriptor

    tiles = ((query, settings["BM"]), (key, settings["BN"]))
    query, key = (TensorDescriptor(one, one.shape, one.stride(), [1, 1, side, settings["DP"]]) for one, side in tiles)
    return (query, key), settings


def _has_copy_engine(device: torch.device) -> bool:
    """Whether this is a GPU of compute capability 9.0 or later; the interpreter has one too."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def _can_be_described(tensor: Tensor) -> bool:
    """Whether a tensor (B, H, N, D) is one that the copy engine reads, and in half precision."""
    *strides, last = tensor.stride()
    aligned = all(stride % 8 == 0 for stride in strides) and tensor.data_ptr() % 16 == 0
    return tensor.element_size() == 2 and last == 1 and aligned


def _places(sides: list[int]) -> tuple[int, int, int, float, float, float, float]:
    """The prefix, the grids' widths, and one step down and across each, as fractions of their sides."""
    if not sides:
        return 0, 1, 1, 0.0, 0.0, 0.0, 0.0
    query_height, query_width, key_height, key_width, prefix = sides
    steps = [1 / max(side - 1, 1) for side in (query_height, query_width, key_height, key_width)]
    return prefix, query_width, key_width, steps[0], steps[1], steps[2], steps[3]


@cache
def block_settings(
    kind: str, width: int, item: int, queries: int, keys: int, biased: bool, space: int
) -> dict[str, Any]:
    """Compile-time arguments of a pass: "rows" or "columns" of one map, or a "pair" of maps."""
    rows, cols, stages = row_tiles(width, item, queries, keys, space, maps=2 if kind == "pair" else 1)
    tile = {"D": width, "DP": padded(width), "BM": rows, "BN": cols, "HAS_BIAS": biased}
    tile |= {"num_warps": 4, "num_stages": stages}
    usual = item == 2 and tile["DP"] <= 64 < min(queries, keys) and not biased and space >= LARGE
    return tile | (FASTEST[kind][keys > ONE_LOOP_KEYS] if usual else {})


@cache
def _last(queries: int, keys: int) -> dict[str, Any]:
    """Compile-time arguments of the passes over vectors."""
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(max(queries, keys))))
    # A single warp sums without synchronising with others.
    return {"BN": columns, "num_warps": 1 if columns <= 256 else 4 if columns <= 1024 else 8}


@triton.jit
def norm_pass(tokens, norms, total, each, channels, image, token, BR: tl.constexpr, BC: tl.constexpr):
    """The norms of `total` tokens, `each` to an image."""
    number = tl.program_id(0) * BR + tl.arange(0, BR)
    start = (number // each).to(tl.int64) * image + (number % each).to(tl.int64) * token
    square = tl.zeros([BR], tl.float32)
    for first in range(0, channels, BC):
        place = first + tl.arange(0, BC)
        ok = (number < total)[:, None] & (place < channels)[None, :]
        value = tl.load(tokens + start[:, None] + place[None, :], mask=ok, other=0.0).to(tl.float32)
        square += tl.sum(value * value, 1)
    tl.store(norms + number, tl.sqrt(square), mask=number < total)


@on_device_of_first
def token_norms(tokens: Tensor) -> Tensor:
    """Norms (B, N) of tokens (B, N, C) with adjacent channels, in float32."""
    batch, each, channels = tokens.shape
    made = torch.empty(batch, each, dtype=torch.float32, device=tokens.device)
    columns = min(1024, triton.next_power_of_2(channels))
    rows = max(1, 4096 // columns)
    norm_pass[(-(-made.numel() // rows),)](
        tokens, made, made.numel(), each, channels, *tokens.stride()[:2], BR=rows, BC=columns, num_warps=4
    )
    return made


@triton.jit
def count_pass(
    values, memory, length, low, high, per_unit, BINS: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr
):
    """Add 1 to the bin of each value. Counts are integers, so their order does not matter."""
    low, high, per_unit = single(low), single(high), single(per_unit)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place, mask=place < length, other=float("nan"))
    inside = (value >= low) & (value <= high)  # NaN is not
    number = tl.minimum(tl.where(inside, (value - low) * per_unit, 0.0).to(tl.int32), BINS - 1)
    number = number % (BINS // APART) * APART + number // (BINS // APART)
    tl.atomic_add(memory + number, 1, mask=inside, sem="relaxed")


@on_device_of_first
def count(values: Tensor, memory: Tensor, low: float, high: float) -> None:
    """Add the counts of values (n,) to those in memory (bins,), whose order `gathered` undoes."""
    bins = len(memory)
    count_pass[(-(-len(values) // _BLOCK),)](
        values, memory, len(values), low, high, bins / (high - low), BINS=bins, APART=_apart(bins), BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip


def gathered(memory: Tensor) -> Tensor:
    """The counts (bins,) in the order of the bins."""
    return memory.view(-1, _apart(len(memory))).T.flatten()


def _apart(bins: int) -> int:
    return _APART if bins % _APART == 0 else 1
