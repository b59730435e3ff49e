"""Softmax gradient: how strongly the softmax answers a change of its input, per row and without its scale λ.

The nuclear norm of the softmax's Jacobian is λ Σ_j (a_j − a_j²) (Context Broadcasting, Section 3): largest, 1 − 1/K, at
uniform attention, which is why uniform attention is hard to hold.
"""

from __future__ import annotations

from torch import Tensor

from vitfocus.attention.reading import Geometry, Mean, Number, Reading, Tile
from vitfocus.kernels.statistics.op import Numbers, Statistics


def softmax_gradient(maps: Tensor) -> Tensor:
    """Nuclear norm of the softmax's Jacobian at every row, over λ: maps (..., Q, K) to (..., Q).

    >>> import torch
    >>> softmax_gradient(torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]))
    tensor([0.7500, 0.0000])
    """
    return (maps - maps**2).sum(dim=-1)


class GradientReading(Reading):
    """The mean over images, heads and rows; as rows sum to one, 1 minus the mean sum of squares."""

    def __init__(self) -> None:
        self.squares = Mean()

    def begin(self, images: int, heads: int, geometry: Geometry) -> None:
        """Count the rows to come."""
        self.rows = images * heads * geometry.queries

    def make_room(self, like: Tensor) -> None:
        """Start with no squares."""
        self.sum = like.new_zeros(())

    def add(self, tile: Tile) -> None:
        """Add the squares, which stand on the diagonal of the heads' inner products."""
        self.sum += tile.gram.diagonal(dim1=-2, dim2=-1).sum()

    def end(self) -> None:
        """Carry them over."""
        self.squares.add(self.sum, count=self.rows)
        del self.sum

    def look(self, made: Statistics, products: Tensor | None) -> None:
        """Count the rows."""
        self.squares.expect(self.rows)

    def fill(self, totals: Numbers) -> None:
        """Take in the squares."""
        self.squares.give(totals.squares)

    def row(self) -> dict[str, Number]:
        """`gradient`, from 0 to 1 − 1/K."""
        return {"gradient": self.squares.value.then(lambda squares: 1 - squares)}
