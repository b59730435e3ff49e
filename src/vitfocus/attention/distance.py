"""Relative distance: how far attention reaches across the image, in units of its height and width.

Context Broadcasting, Figure 7b: the expectation over i ≠ j of a_ij ‖p_i − p_j‖₁. Only tokens with a place count: prefix
tokens are dropped, and what is left is not renormalised, so attention to the class token shortens the distance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitfocus.anatomy.block import Size
from vitfocus.attention.reading import Geometry, Mean, Number, Reading, Tile
from vitfocus.kernels.statistics.op import Numbers, Statistics


def relative_distance(maps: Tensor, query_grid: Size, key_grid: Size | None = None, prefix_tokens: int = 0) -> Tensor:
    """Mean over queries of Σ_j a_ij ‖p_i − p_j‖₁, with coordinates from 0 to 1: maps (..., Q, K) to (...).

    >>> relative_distance(torch.eye(4), (2, 2)), relative_distance(torch.full((4, 4), 0.25), (2, 2))
    (tensor(0.), tensor(1.))
    """
    queries, keys = places(query_grid, maps), places(key_grid or query_grid, maps)
    between = torch.cdist(queries, keys, p=1)
    return (maps[..., prefix_tokens:, prefix_tokens:] * between).sum(dim=-1).mean(dim=-1)


def places(grid: Size, like: Tensor) -> Tensor:
    """Every token's row and column as fractions, i/(H−1) and j/(W−1), or 0 where the side is 1: (H·W, 2)."""
    return torch.cartesian_prod(_along(grid[0], like), _along(grid[1], like))


def _along(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, device=like.device, dtype=like.dtype) / max(length - 1, 1)


class DistanceReading(Reading):
    """The mean over images, heads and patch queries.

    It is linear in the map, so the heads' average is enough; and ‖·‖₁ is a distance in rows plus one in columns, so
    the attention each row and each column of the key grid receives is enough too: H + W numbers instead of H·W.
    """

    def __init__(self) -> None:
        self.mean = Mean()

    def begin(self, images: int, heads: int, geometry: Geometry) -> None:
        """Note where the tokens are."""
        self.images, self.geometry = images, geometry

    def make_room(self, like: Tensor) -> None:
        """Place the tokens, and start with no distance."""
        if self.geometry.placed:
            assert self.geometry.query_grid is not None and self.geometry.key_grid is not None
            self.places = places(self.geometry.query_grid, like)
            self.key_rows, self.key_columns = (_along(side, like) for side in self.geometry.key_grid)
            self.sum = like.new_zeros(self.images)

    def add(self, tile: Tile) -> None:
        """Add the tile's part of the sum over queries."""
        prefix = self.geometry.prefix_tokens
        if not self.geometry.placed or tile.rows.stop <= prefix:
            return
        first = max(tile.rows.start, prefix)
        queries = self.places[first - prefix : tile.rows.stop - prefix]
        patches = tile.head_mean[:, first - tile.rows.start :, prefix:].unflatten(-1, self.geometry.key_grid)
        down = (patches.sum(dim=-1) * (queries[:, :1] - self.key_rows).abs()).sum(dim=(1, 2))
        across = (patches.sum(dim=-2) * (queries[:, 1:] - self.key_columns).abs()).sum(dim=(1, 2))
        self.sum += down + across

    def end(self) -> None:
        """Average over the queries."""
        if self.geometry.placed:
            patches = self.geometry.queries - self.geometry.prefix_tokens
            self.mean.add(self.sum, count=self.images, weight=1 / patches)
            del self.sum

    def look(self, made: Statistics, products: Tensor | None) -> None:
        """Count the images."""
        self.mean.expect(self.images if self.geometry.placed else 0)

    def fill(self, totals: Numbers) -> None:
        """Take in the distances."""
        self.mean.give(totals.distance)

    def row(self) -> dict[str, Number]:
        """`distance`, absent where tokens have no place."""
        return {"distance": self.mean.value} if self.mean.count else {}
