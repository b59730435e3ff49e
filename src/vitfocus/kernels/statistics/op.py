"""Statistics of an observed attention by the fastest backend, as `vitfocus::statistics` and `vitfocus::pair_products`.

`statistics` chooses: Triton kernels on a GPU, tiles in plain torch elsewhere, whole maps if the reference is forced.
`Histogram` counts a stream of values where they are. The statistics are defined in `reference.py`; which of
them a diagnosis shows, in `vitfocus.attention`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.kernels.attention import AttentionInputs, Observation, matched
from vitfocus.kernels.backends import chosen
from vitfocus.kernels.inputs import readable, with_four_axes
from vitfocus.kernels.shared_memory import MOST_CHANNELS
from vitfocus.kernels.statistics.chunked import tiled_statistics
from vitfocus.kernels.statistics.reference import THRESHOLD, Grids, Numbers, Statistics, map_statistics, top_tokens


@torch.no_grad()
def statistics(
    seen: Observation,
    other: Observation | None = None,
    *,
    grids: Grids | None = None,
    threshold: float = THRESHOLD,
    top: int | None = None,
    budget: int | None = None,
) -> Statistics:
    """`map_statistics` of an observed attention, without gradients and with memory linear in the number of tokens.

    `other` holds the attention of the same images after corruption; `top` is the number of most attended keys, and
    `budget` limits the elements per tile. Heads of more than 256 channels are computed in tiles.

    >>> q, k = torch.randn(2, 2, 3, 5, 8).unbind()
    >>> whole = map_statistics((q @ k.mT).softmax(-1))
    >>> torch.allclose(statistics(Observation(query=q, key=k)).numbers, whole.numbers, atol=1e-5)
    True
    """
    top = top_tokens(seen.shape[3]) if top is None else top
    if 0 in seen.shape[1:]:
        raise VitfocusError(f"Statistics need a head, a query and a key; the attention has the shape {seen.shape}.")
    if other is not None and other.shape != seen.shape:
        raise VitfocusError(f"The statistics compare attention of one shape, not {seen.shape} with {other.shape}.")
    seen = seen if seen.bias is None else _biased(seen)
    other = other if other is None or other.bias is None else _biased(other)
    name = backend_for(seen)
    if name == "triton" and other is not None and not _alike(seen, other):
        name = "chunked"
    if name == "chunked":
        return tiled_statistics(seen, other, grids, threshold, top, budget)
    if name == "reference":
        maps = None if other is None else other.attention()
        return map_statistics(seen.attention(), maps, grids=grids, threshold=threshold, top=top)
    one = _inputs(seen)
    sides = [*grids.query, *grids.key, grids.prefix] if grids is not None else []
    options = (seen.scale, sides, threshold, top)
    entropy, numbers = _statistics(*one, *options) if _is_traced(*one) else _launch().statistics(one, *options)
    return Statistics(entropy, numbers, None if other is None else _products(one, _inputs(other), seen.scale))


def backend_for(seen: Observation) -> str:
    """The backend for an observed attention."""
    if seen.query is None or seen.key is None or not seen.query.shape[0]:
        return "chunked"
    name = chosen(seen.query, seen.key, seen.bias)
    return "chunked" if name == "triton" and seen.query.shape[3] > MOST_CHANNELS else name


def _biased(seen: Observation) -> Observation:
    """The same observation, whose bias has four axes."""
    return replace(seen, bias=with_four_axes(seen.bias, seen.shape))


def _alike(seen: Observation, other: Observation) -> bool:
    """Whether one launch takes both: queries of the same width, multiplied by the same scale."""
    if backend_for(other) != "triton" or other.scale != seen.scale or other.query is None or seen.query is None:
        return False
    return other.query.shape[3] == seen.query.shape[3]


def _inputs(seen: Observation) -> AttentionInputs:
    assert seen.query is not None and seen.key is not None
    query, key = (readable(one) for one in matched(seen.query, seen.key))
    return query, key, seen.bias, seen.lse


def _products(one: AttentionInputs, other: AttentionInputs, scale: float) -> Tensor:
    """Inner products of two maps p and r of each image and head: ⟨p, r⟩, ⟨p, p⟩ and ⟨r, r⟩, (3, B, H)."""
    if _is_traced(*one, *other):
        made: Tensor = _pair_products(*one, *other, scale)
        return made
    made = _launch().pair_products(one, other, scale)
    return made


def _is_traced(*tensors: Tensor | None) -> bool:
    """Whether torch traces or differentiates, so that it must see an operator.

    Otherwise the operator's function is called directly: calling the operator costs the host as much as several
    launches.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.compiler.is_compiling() or any(type(tensor) is not Tensor for tensor in given):
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)


def _launch() -> Any:
    """The Triton kernels, imported when the first one runs."""
    from vitfocus.kernels.statistics import triton

    return triton


@torch.library.custom_op("vitfocus::statistics", mutates_args=())
def _statistics(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    lse: Tensor | None,
    scale: float,
    sides: list[int],
    threshold: float,
    top: int,
) -> tuple[Tensor, Tensor]:
    """The rows' entropies and the `Numbers`; `sides` holds the sides of both grids and the prefix, or is empty."""
    made: tuple[Tensor, Tensor] = _launch().statistics((query, key, bias, lse), scale, sides, threshold, top)
    return made


@_statistics.register_fake
def _(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    entropy = query.new_empty(batch, heads, queries, dtype=torch.float32)
    return entropy, query.new_empty(len(Numbers._fields), batch, heads, dtype=torch.float32)


@torch.library.custom_op("vitfocus::pair_products", mutates_args=())
def _pair_products(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    lse: Tensor | None,
    other_query: Tensor,
    other_key: Tensor,
    other_bias: Tensor | None,
    other_lse: Tensor | None,
    scale: float,
) -> Tensor:
    """Inner products of two maps, (3, B, H)."""
    one, two = (query, key, bias, lse), (other_query, other_key, other_bias, other_lse)
    made: Tensor = _launch().pair_products(one, two, scale)
    return made


@_pair_products.register_fake
def _(query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(3, *query.shape[:2], dtype=torch.float32)


def token_norms(tokens: Tensor) -> Tensor:
    """The norms of tokens (B, N, C), in float32 or float64: (B, N).

    >>> token_norms(torch.tensor([[[3.0, 4.0], [0.0, 0.0]]]))
    tensor([[5., 0.]])
    """
    if chosen(tokens) == "triton" and tokens.stride(2) == 1 and tokens.numel():
        made: Tensor = _launch().token_norms(tokens)
        return made
    return torch.linalg.vector_norm(tokens, dim=-1, dtype=torch.promote_types(tokens.dtype, torch.float32))


class Histogram:
    """How many values lie in each of `bins` equal bins between `low` and `high`; values outside are not counted.

    >>> histogram = Histogram(0.0, 4.0, 4, torch.device("cpu"))
    >>> histogram.add(torch.tensor([0.5, 2.5])); histogram.add(torch.tensor([2.0, 4.0, 5.0]))
    >>> histogram.counts().tolist()
    [1, 0, 2, 1]
    """

    #: How many values 32 bits count, whichever bin they are in.
    MOST = (1 << 31) - 1

    def __init__(self, low: float, high: float, bins: int, device: torch.device) -> None:
        self.low, self.high, self.bins, self.total = low, high, bins, 0
        self.memory = torch.zeros(bins, dtype=torch.int32, device=device)
        #: Whether the kernel counts, which keeps the bins in an order of its own.
        self.by_kernel = chosen(torch.empty(0, dtype=torch.float32, device=device)) == "triton"

    def add(self, values: Tensor) -> None:
        """Count every value of a float32 tensor (n,)."""
        self.total += len(values)
        if self.total > self.MOST:
            self.memory = self.memory.long()
        if self.by_kernel:
            _launch().count(values, self.memory, self.low, self.high)
            return
        for part in values.split(1 << 24):  # histc counts in single precision
            self.memory += torch.histc(part, self.bins, self.low, self.high).to(self.memory.dtype)

    def counts(self) -> Tensor:
        """The number of values in each bin, (bins,), int32 or int64."""
        made: Tensor = _launch().gathered(self.memory) if self.by_kernel else self.memory
        return made
