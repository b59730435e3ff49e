"""Launching the statistics' kernels: block sizes, buffers, order."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from vitfocus.kernels.diversity.launch import normalisers
from vitfocus.kernels.launch_device import on_its_device
from vitfocus.kernels.shared_memory import padded, room, shrink
from vitfocus.kernels.statistics import triton as kernels
from vitfocus.kernels.statistics.op import Attention, Numbers

#: How many columns at a time a program of the last pass goes through.
_COLUMNS = 1024


@on_its_device
def statistics(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    lse: Tensor | None,
    scale: float,
    sides: list[int],
    threshold: float,
    top: int,
) -> tuple[Tensor, Tensor]:
    """The results of the operator, in few launches: at a GPU's pace the host has no time for many."""
    batch, heads, queries, width = query.shape
    keys, device = key.shape[2], query.device
    norms, given, strides = _inputs((query, key, bias, lse), scale)
    rows, settings = _settings(heads, 1, width, query.element_size(), queries, keys, bias is not None, room(device))
    grid = (batch, -(-queries // rows))  # windows may be many, and only the first axis is long
    entropy = torch.empty(batch, heads, queries, dtype=torch.float32, device=device)
    lengths = torch.empty(2, batch, queries, dtype=torch.float32, device=device)
    sums = torch.zeros(batch * ((heads + 3) * keys + heads + 2), dtype=torch.int64, device=device)
    numbers = torch.empty(len(Numbers._fields), batch, heads, dtype=torch.float32, device=device)
    bound = threshold / keys
    places = _places(sides)
    kernels.dense_pass[grid](
        query, key, norms, given, entropy, lengths, sums, scale, bound, queries, keys, *places, *strides,
        G=heads, **settings, PLACED=bool(sides),
    )  # fmt: skip
    kernels.unit_pass[grid](
        query, key, norms, given, lengths, sums, scale, bound, queries, keys, *strides, G=heads, **settings
    )
    kernels.conclude_pass[batch, heads + 1](
        entropy, sums, numbers, bound, queries, keys, top, max(queries - places[0], 1), **_last(heads, queries, keys)
    )
    return entropy, numbers


@on_its_device
def pair_products(one: Attention, two: Attention, scale: float) -> Tensor:
    """Inner products of two maps, (3, B, H)."""
    (query, key, bias, _), (other_query, other_key, _, _) = one, two
    batch, heads, queries, width = query.shape
    norms, given, strides = _inputs(one, scale)
    other_norms, other_given, other_strides = _inputs(two, scale)
    products = torch.empty(3, batch, heads, queries, dtype=torch.float32, device=query.device)
    item, space = query.element_size(), room(query.device)
    rows, settings = _settings(1, 2, width, item, queries, key.shape[2], bias is not None, space)
    kernels.pair_pass[batch * heads, -(-queries // rows)](
        query, key, norms, given, other_query, other_key, other_norms, other_given, products, scale, heads, queries,
        key.shape[2], *strides, *other_strides, **settings,
    )  # fmt: skip
    return products.sum(dim=-1)


def _inputs(attention: Attention, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Normalisers, a bias or what stands in for none, and the strides of queries, keys and bias."""
    query, key, bias, lse = attention
    norms = normalisers(query, key, bias, scale) if lse is None else lse.contiguous()
    shape = (*query.shape[:3], key.shape[2])
    bias_strides = bias.expand(shape).stride() if bias is not None else (0, 0, 0, 0)
    return norms, bias if bias is not None else query, (query.stride(), key.stride(), bias_strides)


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
    rows, cols = shrink("row", heads, width, item, rows, cols, space)
    rows = min(rows, max(16, triton.next_power_of_2(queries)))
    cols = min(cols, max(16, triton.next_power_of_2(keys)))
    ahead = (2 * cols + (rows if rows == 64 else 0)) * token
    return rows, cols, 2 if ahead <= 100 * 1024 and item < 4 else 1
