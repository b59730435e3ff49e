"""Stability: how far a map stays the same when its image is corrupted (TAP and ADL's Figures 1 and 5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.attention.reading import Geometry, Mean, Number, Reading, Tile
from vitfocus.kernels.statistics.op import Numbers, Statistics


def stability(clean: Tensor, corrupted: Tensor) -> Tensor:
    """Cosine between the flattened maps of every image and head: two of (B, H, Q, K) to (B, H).

    >>> maps = torch.eye(4).expand(1, 2, 4, 4)
    >>> stability(maps, maps)
    tensor([[1., 1.]])
    """
    return F.cosine_similarity(clean.flatten(2), corrupted.flatten(2), dim=-1)


class StabilityReading(Reading):
    """The mean, and the cosine of every map, which `take` hands out for the box plots."""

    def __init__(self) -> None:
        self.mean = Mean()
        self.values: list[Tensor] = []

    def begin(self, images: int, heads: int, geometry: Geometry) -> None:
        """Note the size."""
        self.shape = (images, heads)

    def make_room(self, like: Tensor) -> None:
        """Start with empty inner products: of the two with each other, and of each with itself."""
        self.products = like.new_zeros(3, math.prod(self.shape))

    def add(self, tile: Tile) -> None:
        """Add the tile's inner products."""
        assert tile.corrupted is not None
        clean, corrupted = (maps.flatten(2).flatten(0, 1)[:, None] for maps in (tile.attention, tile.corrupted))
        pairs = ((clean, corrupted), (clean, clean), (corrupted, corrupted))
        self.products += torch.stack([torch.bmm(a, b.mT).flatten() for a, b in pairs])

    def end(self) -> None:
        """Turn them into cosines."""
        both, clean, corrupted = self.products
        cosines = (both / (clean * corrupted).sqrt_()).clamp_(max=1).view(self.shape)
        self.mean.add(cosines)
        self.values.append(cosines)
        del self.products

    def look(self, made: Statistics, products: Tensor | None) -> None:
        """Take the inner products of whole maps."""
        assert products is not None
        self.products = products.flatten(1)
        self.end()

    def fill(self, totals: Numbers) -> None:
        """Nothing is left: every look brought its products."""

    def take(self) -> Tensor:
        """The cosines (maps, heads) since this was called last."""
        values, self.values = self.values, []
        return values[0] if len(values) == 1 else torch.cat(values)

    def row(self) -> dict[str, Number]:
        """`stability`, from 0 to 1."""
        return {"stability": self.mean.value}
