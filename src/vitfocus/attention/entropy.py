"""Entropy: how widely a token spreads its attention, from 0 (one token) to log K (all K tokens alike).

Context Broadcasting's Figure 4: trained ViTs stay close to the bound, so uniform attention is what they want and what
softmax learns badly.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vitfocus.attention.reading import Geometry, Mean, Reading, Tile


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
        self.bound = Mean()

    def begin(self, images: int, heads: int, geometry: Geometry, like: Tensor) -> None:
        """Note the bound and where the class token is."""
        self.class_token = geometry.class_token
        self.bound.add(torch.full((images,), math.log(geometry.keys), dtype=torch.float64))
        self.rows = like.new_zeros(images, heads, geometry.queries)

    def add(self, tile: Tile) -> None:
        """Keep the tile's entropies, one number a row."""
        self.rows[..., tile.rows] = tile.entropy

    def end(self) -> None:
        """Pool them."""
        rows = self.rows.cpu()
        self.mean.add(rows)
        self.pool.add(rows)
        if self.class_token:
            self.class_mean.add(rows[..., 0])

    def row(self) -> dict[str, float]:
        """`entropy`, `entropy_p15`, `entropy_p85`, `entropy_cls` and `entropy_bound`, in nats."""
        p15, p85 = self.pool.quantiles(0.15, 0.85)
        row = {"entropy": self.mean.value, "entropy_p15": p15, "entropy_p85": p85}
        if self.class_mean.count:
            row["entropy_cls"] = self.class_mean.value
        return row | {"entropy_bound": self.bound.value}


class Pool:
    """Quantiles of a stream: exact up to `exact` values, from a fine histogram beyond, so that memory stays bounded.

    >>> pool = Pool()
    >>> pool.add(torch.tensor([3.0, 1.0])); pool.add(torch.tensor([2.0]))
    >>> pool.quantiles(0.5, 0.75)
    [2.0, 2.5]
    """

    #: Entropies lie in [0, log K]; sixteen nats cover nine million keys, in steps of 6e-5.
    TOP, BINS = 16.0, 1 << 18

    def __init__(self, exact: int = 1 << 21) -> None:
        self.exact = exact
        self.parts: list[np.ndarray] = []
        self.count = 0
        self.histogram: np.ndarray | None = None

    def add(self, values: Tensor) -> None:
        """Take in every value of a tensor."""
        self.parts.append(values.detach().float().flatten().numpy(force=True))
        self.count += values.numel()
        if self.count > self.exact:
            self._fold()

    def quantiles(self, *probabilities: float) -> list[float]:
        """Quantiles with linear interpolation."""
        if self.histogram is None:
            return np.quantile(np.concatenate(self.parts).astype(np.float64), probabilities).tolist()
        self._fold()
        edges = np.linspace(0.0, self.TOP, self.BINS + 1)
        return np.interp(np.array(probabilities) * self.count, np.append(0, self.histogram.cumsum()), edges).tolist()

    def _fold(self) -> None:
        if self.histogram is None:
            self.histogram = np.zeros(self.BINS, np.int64)
        for part in self.parts:
            bins = np.clip(part * (self.BINS / self.TOP), 0, self.BINS - 1).astype(np.int64)
            self.histogram += np.bincount(bins, minlength=self.BINS)
        self.parts = []
