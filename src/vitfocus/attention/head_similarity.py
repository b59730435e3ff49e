"""Head similarity: whether the heads of a layer look at the same things (TAP and ADL's Figure 4)."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from vitfocus.attention.reading import Geometry, Mean, Number, Reading, Tile
from vitfocus.kernels.statistics.op import Numbers, Statistics, all_cosines

Cosines = TypeVar("Cosines", float, Tensor)


def head_similarity(maps: Tensor) -> Tensor:
    """Mean cosine between the flattened maps of different heads: (B, H, Q, K) to (B,), H at least 2.

    >>> import torch
    >>> same, other = torch.eye(4), torch.eye(4).flip(0)
    >>> head_similarity(torch.stack([torch.stack([same, same]), torch.stack([same, other])]))
    tensor([1., 0.])
    """
    rows = maps.transpose(1, 2)
    # Row by row, then over the rows: one inner product of N² single-precision numbers loses digits at N = 4097.
    return _between_heads(all_cosines((rows @ rows.mT).sum(dim=1)), maps.shape[1])


def _between_heads(cosines: Cosines, heads: int) -> Cosines:
    """The mean over pairs of different heads, from the sum over all pairs: every head has the cosine 1 with itself."""
    return (cosines - heads) / (heads * (heads - 1))


class HeadReading(Reading):
    """The mean over images."""

    def __init__(self) -> None:
        self.mean = Mean()

    def begin(self, images: int, heads: int, geometry: Geometry) -> None:
        """Note how many heads there are."""
        self.images, self.heads = images, heads

    def make_room(self, like: Tensor) -> None:
        """Start with empty inner products."""
        self.gram = like.new_zeros(self.images, self.heads, self.heads)

    def add(self, tile: Tile) -> None:
        """Add the tile's inner products."""
        self.gram += tile.gram

    def end(self) -> None:
        """Turn the products into sums of cosines."""
        if self.heads > 1:
            self.mean.add(all_cosines(self.gram))

    def look(self, made: Statistics, products: Tensor | None) -> None:
        """Count the images."""
        self.mean.expect(self.images if self.heads > 1 else 0)

    def fill(self, totals: Numbers) -> None:
        """Take in the sums of cosines."""
        self.mean.give(totals.joint)

    def row(self) -> dict[str, Number]:
        """`head_similarity`, absent where there is one head."""
        if not self.mean.count:
            return {}
        heads = self.heads
        return {"head_similarity": self.mean.value.then(lambda cosines: _between_heads(cosines, heads))}
