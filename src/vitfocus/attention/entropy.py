"""Entropy: how widely a token spreads its attention, from 0 (one token) to log K (all K tokens alike).

Context Broadcasting's Figure 4: trained ViTs stay close to the bound, so uniform attention is what they want and what
softmax learns badly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitfocus.attention.reading import Geometry, Mean, Number, Reading, Sums, Tile, resting


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

    def fill(self, sums: Sums) -> None:
        """Note all rows' entropies."""
        self.rows = sums.statistics.entropy

    def end(self) -> None:
        """Pool them."""
        self.mean.add(self.rows)
        self.pool.add(self.rows)
        if self.class_token:
            self.class_mean.add(self.rows[..., 0])

    def row(self) -> dict[str, Number]:
        """`entropy`, `entropy_p15`, `entropy_p85`, `entropy_cls` and `entropy_bound`, in nats."""
        p15, p85 = self.pool.quantiles(0.15, 0.85)
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

    #: Entropies lie in [0, log K]; sixteen nats cover nine million keys, in steps of 6e-5.
    TOP, BINS = 16.0, 1 << 18

    def __init__(self, exact: int = 1 << 19) -> None:
        self.exact = exact
        self.parts: list[Tensor] = []
        self.count = 0
        self.histogram: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Take in every value of a tensor."""
        self.parts.append(resting(values.detach()).float().flatten())
        self.count += values.numel()
        if self.count > self.exact:
            self._fold()

    def quantiles(self, *probabilities: float) -> Tensor:
        """Quantiles with linear interpolation, in double precision, where the values are."""
        return self._from_values(probabilities) if self.histogram is None else self._from_bins(probabilities)

    def _from_values(self, probabilities: tuple[float, ...]) -> Tensor:
        # numpy and torch have quantiles, but the one works on the CPU only and the other waits for the GPU.
        ordered = torch.cat(self.parts).sort().values
        last = len(ordered) - 1
        places = [probability * last for probability in probabilities]
        near = torch.stack([ordered[min(int(place) + step, last)] for place in places for step in (0, 1)]).double()
        pairs = zip(near[::2], near[1::2], places, strict=True)
        return torch.stack([torch.lerp(low, high, place - int(place)) for low, high, place in pairs])

    def _from_bins(self, probabilities: tuple[float, ...]) -> Tensor:
        self._fold()
        assert self.histogram is not None
        upto = self.histogram.cumsum(0).double()
        wanted = torch.tensor(probabilities, dtype=torch.float64).to(upto.device, non_blocking=True) * self.count
        bins = torch.searchsorted(upto, wanted).clamp(max=self.BINS - 1)
        inside = self.histogram[bins].double()
        share = (wanted - (upto[bins] - inside)) / inside.clamp_min(1)
        return (bins + share) * (self.TOP / self.BINS)

    def _fold(self) -> None:
        for part in self.parts:
            counts = torch.histc(part.clamp(0.0, self.TOP), self.BINS, 0.0, self.TOP).long()
            self.histogram = counts if self.histogram is None else self.histogram + counts
        self.parts = []
