"""Head similarity: whether the heads of a layer look at the same things (TAP and ADL's Figure 4)."""

from __future__ import annotations

from torch import Tensor

from vitfocus.attention.reading import Geometry, Mean, Number, Reading, Sums, Tile
from vitfocus.kernels.statistics import all_cosines


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


def _between_heads(cosines: Tensor, heads: int) -> Tensor:
    """The mean over pairs of different heads, from the sum over all pairs: every head has the cosine 1 with itself."""
    return (cosines - heads) / (heads * (heads - 1))


class HeadReading(Reading):
    """The mean over images."""

    def __init__(self) -> None:
        self.mean = Mean()

    def begin(self, images: int, heads: int, geometry: Geometry) -> None:
        """Note how many heads there are."""
        self.images, self.heads = images, heads
        self.cosines: Tensor | None = None

    def make_room(self, like: Tensor) -> None:
        """Start with empty inner products."""
        self.gram = like.new_zeros(self.images, self.heads, self.heads)

    def add(self, tile: Tile) -> None:
        """Add the tile's inner products."""
        self.gram += tile.gram

    def fill(self, sums: Sums) -> None:
        """Note the cosines."""
        self.cosines = sums.statistics.joint

    def end(self) -> None:
        """Turn the products into a mean cosine."""
        if self.heads > 1:
            cosines = all_cosines(self.gram) if self.cosines is None else self.cosines
            self.mean.add(_between_heads(cosines, self.heads))

    def row(self) -> dict[str, Number]:
        """`head_similarity`, absent where there is one head."""
        return {"head_similarity": self.mean.value} if self.mean.count else {}
