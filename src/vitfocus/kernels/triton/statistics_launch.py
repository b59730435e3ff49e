"""Launching the statistics' kernels: block sizes, buffers, order."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from vitfocus.kernels.statistics import Attention
from vitfocus.kernels.triton import statistics as kernels
from vitfocus.kernels.triton.diversity_launch import normalisers

#: The unit of column sums. As a tensor it turns whole numbers into single precision in one go, whatever the default is.
_UNIT = torch.tensor(1 / kernels.ONE, dtype=torch.float32, device="cpu")


def statistics(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    lse: Tensor | None,
    scale: float,
    sides: list[int],
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of the operator, few tensors for few launches."""
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    norms, given, strides = _inputs((query, key, bias, lse), scale)
    rows, settings = _settings(heads, 1, width, query.element_size(), queries, keys, bias is not None)
    grid = (batch, -(-queries // rows))  # windows may be many, and only the first axis is long
    by_head = torch.empty(2, batch, heads, queries, dtype=torch.float32, device=query.device)
    lengths = torch.empty(2, batch, queries, dtype=torch.float32, device=query.device)
    whole = torch.zeros(batch * ((heads + 4) * keys + 2), dtype=torch.int64, device=query.device)
    bound = threshold / keys
    kernels.dense_pass[grid](
        query, key, norms, given, by_head, lengths, whole, scale, bound, queries, keys, *_places(sides), *strides,
        G=heads, **settings, PLACED=bool(sides),
    )  # fmt: skip
    totals = by_head.sum(dim=-1)
    kernels.unit_pass[grid](
        query, key, norms, given, totals, lengths, whole, scale, bound, queries, keys, *strides, G=heads, **settings
    )
    sums = whole * _UNIT
    # The heads' mean of all rows follows from what keys receive.
    received, _, average, _ = sums.split_with_sizes(
        [batch * keys * n for n in (heads, 1, 1)] + [batch * (2 * keys + 2)]
    )
    torch.mean(received.view(batch, heads, keys), dim=1, out=average.view(batch, keys))
    return by_head, totals, sums


def pair_products(one: Attention, two: Attention, scale: float) -> Tensor:
    """Inner products of two maps, (3, B, H)."""
    (query, key, bias, _), (other_query, other_key, _, _) = one, two
    batch, heads, queries, width = query.shape
    norms, given, strides = _inputs(one, scale)
    other_norms, other_given, other_strides = _inputs(two, scale)
    products = torch.empty(3, batch, heads, queries, dtype=torch.float32, device=query.device)
    rows, settings = _settings(1, 2, width, query.element_size(), queries, key.shape[2], bias is not None)
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
    heads: int, maps: int, width: int, item: int, queries: int, keys: int, biased: bool
) -> tuple[int, dict[str, Any]]:
    """Rows of a program, and what the kernels are compiled for: so many heads of so many maps at a time."""
    rows, cols, stages = block_sizes(heads, maps * width, item, queries, keys)
    padded = max(16, triton.next_power_of_2(width))
    sizes: dict[str, Any] = {"D": width, "DP": padded, "BM": rows, "BN": cols, "HAS_BIAS": biased}
    return rows, sizes | {"num_warps": 4, "num_stages": stages}


def block_sizes(heads: int, width: int, item: int, queries: int, keys: int) -> tuple[int, int, int]:
    """Rows, columns and stages of a program: two programs with every head's queries, and keys ahead, share a core."""
    padded = max(16, triton.next_power_of_2(width))
    rows, cols = 64, 32
    while rows > 16 and heads * rows * padded * item > 65536:
        rows //= 2
    rows = min(rows, max(16, triton.next_power_of_2(queries)))
    cols = min(cols, max(16, triton.next_power_of_2(keys)))
    ahead = heads * (2 * cols + (rows if rows == 64 else 0)) * padded * item
    return rows, cols, 2 if ahead <= 100 * 1024 and item < 4 else 1
