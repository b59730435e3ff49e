"""Head similarity: whether the heads of a layer look at the same things (TAP and ADL's Figure 4)."""

from __future__ import annotations

from torch import Tensor

from vitfocus.attention.reading import Geometry, Mean, Reading, Tile


def head_similarity(maps: Tensor) -> Tensor:
    """Mean cosine between the flattened maps of different heads: (B, H, Q, K) to (B,), H at least 2.

    >>> import torch
    >>> same, other = torch.eye(4), torch.eye(4).flip(0)
    >>> head_similarity(torch.stack([torch.stack([same, same]), torch.stack([same, other])]))
    tensor([1., 0.])
    """
    rows = maps.transpose(1, 2)
    # Row by row, then over the rows: one inner product of N² single-precision numbers loses digits at N = 4097.
    return _from_products((rows @ rows.mT).sum(dim=1))


def _from_products(gram: Tensor) -> Tensor:
    """The mean cosine from the heads' inner products (B, H, H)."""
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    cosines = gram / (norms[..., None] * norms[..., None, :])
    heads = gram.shape[-1]
    return (cosines.sum(dim=(-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(dim=-1)) / (heads * (heads - 1))


class HeadReading(Reading):
    """The mean over images."""

    def __init__(self) -> None:
        self.mean = Mean()

    def begin(self, images: int, heads: int, geometry: Geometry, like: Tensor) -> None:
        """Start with empty inner products."""
        self.gram = like.new_zeros(images, heads, heads)

    def add(self, tile: Tile) -> None:
        """Add the tile's inner products."""
        self.gram += tile.gram

    def end(self) -> None:
        """Turn them into a mean cosine."""
        if self.gram.shape[-1] > 1:
            self.mean.add(_from_products(self.gram))

    def row(self) -> dict[str, float]:
        """`head_similarity`, absent where there is one head."""
        return {"head_similarity": self.mean.value} if self.mean.count else {}
