"""What a reading is: something that looks at attention tile by tile and ends as a few numbers in a layer's row.

A `Tile` is some rows of some images' maps, small enough to stay in the cache; no reading ever sees more at once. The
file of each reading holds its definition, a pure function of explicit maps, and below it its streaming form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vitfocus.anatomy.records import Size


@dataclass(frozen=True)
class Geometry:
    """What lies behind the rows and columns of a map.

    The first `prefix_tokens` of queries and keys lie on no grid, the rest on the grids, row by row; a grid is None
    where the tokens fit none (text, for instance). `class_token` says whether query 0 is the class token.
    """

    queries: int
    keys: int
    prefix_tokens: int = 0
    class_token: bool = False
    query_grid: Size | None = None
    key_grid: Size | None = None

    @property
    def placed(self) -> bool:
        """Whether every token but the prefix has a place in the image."""
        grids = ((self.query_grid, self.queries), (self.key_grid, self.keys))
        return all(grid is not None and grid[0] * grid[1] + self.prefix_tokens == tokens for grid, tokens in grids)


@dataclass(frozen=True, eq=False)
class Tile:
    """The query rows `rows` of B images' maps: `attention` (B, H, T, K), `entropy` (B, H, T).

    `corrupted` holds the same rows of the same images after corruption, where there is one.
    """

    attention: Tensor
    entropy: Tensor
    rows: slice
    corrupted: Tensor | None = None

    @cached_property
    def head_mean(self) -> Tensor:
        """The heads' average (B, T, K)."""
        batch, heads, rows, keys = self.attention.shape
        weights = self.attention.new_full((batch, 1, heads), 1 / heads)
        return torch.bmm(weights, self.attention.reshape(batch, heads, rows * keys)).view(batch, rows, keys)

    @cached_property
    def gram(self) -> Tensor:
        """Inner products of the heads' rows (B, H, H); on the diagonal, each head's sum of squares."""
        flat = self.attention.flatten(2)
        return torch.bmm(flat, flat.mT)


class Reading:
    """The streaming form of a reading. For some images at a time: `begin`, `add` every tile, `end`; at last `row`."""

    def begin(self, images: int, heads: int, geometry: Geometry, like: Tensor) -> None:
        """Prepare for that many maps; `like` gives the device and the dtype."""

    def add(self, tile: Tile) -> None:
        """Take in one tile."""
        raise NotImplementedError

    def end(self) -> None:
        """Conclude the images begun last."""

    def row(self) -> dict[str, float]:
        """The numbers for the layer's row; empty where they have no meaning."""
        raise NotImplementedError


class Mean:
    """A running mean in double precision.

    >>> mean = Mean()
    >>> mean.add(torch.tensor([1.0, 2.0])); mean.add(torch.tensor([6.0]))
    >>> mean.value
    3.0
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(self, values: Tensor) -> None:
        """Take in every value of a tensor."""
        self.total += float(values.cpu().double().sum())
        self.count += values.numel()

    @property
    def value(self) -> float:
        """The mean of all that was added."""
        return self.total / self.count
