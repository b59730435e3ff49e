"""Entropy: how widely a token spreads its attention, from 0 (one token) to log K (all K tokens alike).

Context Broadcasting's Figure 4: trained ViTs stay close to the bound, so uniform attention is what they want and what
softmax learns badly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from vitfocus.attention.reading import Geometry, Later, Mean, Number, Reading, Tile, arrived, compact, resting
from vitfocus.kernels.statistics.op import Numbers, Statistics


def row_entropy(maps: Tensor) -> Tensor:
    """Entropy in nats of every row: maps (..., Q, K) to (..., Q). Masked entries count 0 log 0 = 0.

    >>> row_entropy(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    return torch.special.entr(maps).sum(dim=-1)


class EntropyReading(Reading):
    """Mean and percentiles over images, heads and rows; the class token's own; the bound."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.mean = Mean()
        self.class_mean = Mean()
        self.bounds, self.queries = 0.0, 0

    def begin(self, images: int, heads: int, geometry: Geometry) -> None:
        """Note the bound and where the class token is."""
        self.class_token = geometry.class_token
        self.bounds += images * geometry.queries * math.log(geometry.keys)
        self.queries += images * geometry.queries
        self.shape = (images, heads, geometry.queries)

    def make_room(self, like: Tensor) -> None:
        """Make room for one number a row."""
        self.rows = like.new_zeros(self.shape)

    def add(self, tile: Tile) -> None:
        """Keep the tile's entropies, one number a row."""
        self.rows[..., tile.rows] = tile.entropy

    def end(self) -> None:
        """Pool them."""
        self.mean.add(self.rows)
        self.pool.add(self.rows)
        if self.class_token:
            self.class_mean.add(self.rows[..., 0])
        del self.rows

    def look(self, made: Statistics, products: Tensor | None) -> None:
        """Pool all rows' entropies."""
        images, heads, queries = self.shape
        self.mean.expect(images * heads * queries)
        self.pool.add(made.entropy)
        if self.class_token:
            self.class_mean.expect(images * heads)

    def fill(self, totals: Numbers) -> None:
        """Take in all rows' sum, and that of the first rows."""
        self.mean.give(totals.entropy)
        self.class_mean.give(totals.first)

    def row(self) -> dict[str, Number]:
        """`entropy`, `entropy_p15`, `entropy_p85`, `entropy_cls` and `entropy_bound`, in nats."""
        p15, p85 = self.pool.numbers(0.15, 0.85)
        row: dict[str, Number] = {"entropy": self.mean.value, "entropy_p15": p15, "entropy_p85": p85}
        if self.class_mean.count:
            row["entropy_cls"] = self.class_mean.value
        return row | {"entropy_bound": self.bounds / self.queries}


class Pool:
    """Quantiles of a stream: exact up to `exact` values, from a fine histogram beyond, so that memory stays bounded.

    >>> pool = Pool()
    >>> pool.add(torch.tensor([3.0, 1.0])); pool.add(torch.tensor([2.0]))
    >>> pool.quantiles(0.5, 0.75).tolist()
    [2.0, 2.5]
    """

    #: Entropies lie in [0, log K], but for rounding; fifteen nats cover three million keys, in steps of 6e-5.
    LOW, HIGH, BINS = -1.0, 15.0, 1 << 18

    #: Single precision counts one by one up to here.
    EXACT_COUNTS = 1 << 24

    def __init__(self, exact: int = 1 << 19) -> None:
        self.exact = exact
        self.parts: list[Tensor] = []
        self.count = 0
        self.histogram: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Take in every value of a tensor."""
        self.count += values.numel()
        values = resting(values.detach()).float().flatten()
        if self.count > self.exact:
            self._fold(torch.cat([*self.parts, values]) if self.parts else values)
            self.parts = []
        else:
            self.parts.append(compact(values))

    def quantiles(self, *probabilities: float) -> Tensor:
        """Quantiles with linear interpolation, in double precision."""
        return torch.tensor(arrived(self.numbers(*probabilities)), dtype=torch.float64)

    def numbers(self, *probabilities: float) -> list[Later]:
        """The same as numbers that nobody waits for."""
        return self._from_values(probabilities) if self.histogram is None else self._from_bins(probabilities)

    def _from_values(self, probabilities: Sequence[float]) -> list[Later]:
        # numpy and torch have quantiles, but the one works on the CPU only and the other waits for the GPU.
        ordered = torch.cat(self.parts).sort().values
        places = [probability * (len(ordered) - 1) for probability in probabilities]
        return [Later([[ordered[int(place) : int(place) + 2]]], partial(_between, place % 1)) for place in places]

    def _from_bins(self, probabilities: Sequence[float]) -> list[Later]:
        assert self.histogram is not None
        upto = self.histogram.cumsum(0, dtype=torch.float64)
        wanted = [probability * self.count for probability in probabilities]
        given = torch.tensor(wanted, dtype=torch.float64).to(upto.device, non_blocking=True)
        bins = torch.searchsorted(upto, given).clamp_(max=self.BINS - 1)
        found = zip(wanted, bins, upto[bins], self.histogram[bins], strict=True)
        return [Later([[one] for one in vectors], partial(self._inside, place)) for place, *vectors in found]

    def _inside(self, wanted: float, place: Tensor, upto: Tensor, inside: Tensor) -> float:
        """The value that so many are below, in the bin of that place, in which values lie evenly."""
        share = (wanted - float(upto - inside)) / max(float(inside), 1)
        return max(self.LOW + (float(place) + share) * (self.HIGH - self.LOW) / self.BINS, 0.0)

    def _fold(self, values: Tensor) -> None:
        counts = torch.histc(values, self.BINS, self.LOW, self.HIGH)
        if self.histogram is None:
            self.histogram = counts
            return
        if self.count > self.EXACT_COUNTS:
            self.histogram = self.histogram.double()
        self.histogram += counts


def _between(share: float, values: Tensor) -> float:
    """The value at that share of the way from the first to the last."""
    return float(torch.lerp(values[0], values[-1], share))
