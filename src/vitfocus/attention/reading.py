"""What a reading is: something that looks at attention tile by tile and ends as a few numbers in a layer's row.

A `Tile` is some rows of some images' maps, small enough to stay in the cache; no reading ever sees more at once. Where
a kernel has been through the tiles already, a reading is given what they came to. The file of each reading holds its
definition, a pure function of explicit maps, and below it its streaming form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from vitfocus.anatomy.block import Size
from vitfocus.kernels.statistics.op import Numbers, Statistics


@dataclass(frozen=True, eq=False)
class Later:
    """A number that nobody has waited for yet: `finish` makes it of vectors, once these are on the CPU as doubles.

    Each of `vectors` is given in pieces, of any shape.
    """

    vectors: Sequence[Sequence[Tensor]]
    finish: Callable[..., float]

    def then(self, change: Callable[[float], float]) -> Later:
        """The number changed."""
        return Later(self.vectors, lambda *vectors: change(self.finish(*vectors)))


def arrived(numbers: Sequence[Later]) -> list[float]:
    """The numbers themselves. What they are made of comes over from a GPU at once, in one copy for each dtype.

    >>> arrived([Later([[torch.ones(2), torch.ones(3)], [torch.ones(1)]], lambda a, b: float(a.sum() - b.sum()))])
    [4.0]
    """
    vectors = [vector for number in numbers for vector in number.vectors]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, vector in enumerate(vectors):
        alike.setdefault((vector[0].device, vector[0].dtype), []).append(place)
    here: dict[int, Tensor] = {}
    for places in alike.values():
        whole = torch.cat([piece.flatten() for place in places for piece in vectors[place]]).cpu().double()
        lengths = [sum(piece.numel() for piece in vectors[place]) for place in places]
        here |= zip(places, whole.split(lengths), strict=True)
    in_order = (here[place] for place in range(len(vectors)))
    return [number.finish(*islice(in_order, len(number.vectors))) for number in numbers]


Number = float | Later


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


class Reading(ABC):
    """The streaming form of a reading: for some images `begin`, then `make_room`, `add` for every tile, and `end`.

    Or, where kernels go through the tiles: `begin` and `look`; and when all images are through, `fill`. At last `row`.
    Nothing is brought over from a GPU before it, and it may leave its numbers there, too.
    """

    @abstractmethod
    def begin(self, images: int, heads: int, geometry: Geometry) -> None:
        """Note what is to come: the maps of so many images."""

    @abstractmethod
    def make_room(self, like: Tensor) -> None:
        """Start the sums that tiles are added to; `like` gives the device and the dtype."""

    @abstractmethod
    def add(self, tile: Tile) -> None:
        """Take in one tile."""

    @abstractmethod
    def end(self) -> None:
        """Conclude the images begun last, tile by tile."""

    @abstractmethod
    def look(self, made: Statistics, products: Tensor | None) -> None:
        """Note how many are in the images begun last, and keep what `fill` will not bring.

        `products` (3, B, H) are the inner products with the corrupted maps.
        """

    @abstractmethod
    def fill(self, totals: Numbers) -> None:
        """Take in the numbers of all images that were looked at, added up."""

    @abstractmethod
    def row(self) -> dict[str, Number]:
        """The numbers for the layer's row; empty where they have no meaning."""


class Mean:
    """A running mean in double precision, kept where the values are.

    On a GPU everything done to values is a kernel to launch, so they are kept as they are until there are many. What is
    left to do to each of them, or to those of several tensors that belong together, is `conclude`.

    >>> mean, ratio = Mean(), Mean(torch.div)
    >>> mean.add(torch.tensor([1.0, 2.0])); mean.add(torch.tensor([12.0]), weight=0.5)
    >>> ratio.add(torch.tensor([8.0, 3.0]), torch.tensor([4.0, 1.0]))
    >>> arrived([mean.value, ratio.value])
    [3.0, 2.5]
    """

    #: How many values are kept, in how many tensors.
    MOST, MOST_PARTS = 1 << 14, 32

    def __init__(self, conclude: Callable[..., Tensor] | None = None) -> None:
        self.conclude = conclude
        self.parts: list[tuple[Tensor, ...]] = []
        self.kept = 0
        self.weight = 1.0
        self.total: Tensor | None = None
        self.given: Tensor | None = None
        self.count = 0

    def expect(self, count: int) -> None:
        """Count so many values whose sum is given later."""
        self.count += count

    def give(self, total: Tensor) -> None:
        """The sum of all values that were expected, in place of what was given before."""
        self.given = total if self.count else None

    def add(self, *values: Tensor, count: int | None = None, weight: float = 1.0) -> None:
        """Take in every value of a tensor times `weight`; with a count, values that are the sum of so many."""
        if weight != self.weight:
            self._fold()
            self.weight = weight
        added = values[0].numel()
        self.parts.append(tuple(compact(resting(one), 4) for one in values))
        self.kept += added
        self.count += added if count is None else count
        if self.kept > self.MOST or len(self.parts) > self.MOST_PARTS:
            self._fold()

    @property
    def value(self) -> Later:
        """The mean of all that was added."""
        count, weight, conclude, parts = self.count, self.weight, self.conclude, [*zip(*self.parts, strict=True)]
        totals = [total for total in (self.total, self.given) if total is not None]
        if not totals:
            return Later(parts, lambda *values: float(_sum(values, conclude)) * weight / count)
        if not parts:
            return Later([totals], lambda total: float(total.sum()) / count)
        vectors = [totals, *parts]
        return Later(vectors, lambda total, *values: float(total.sum() + _sum(values, conclude) * weight) / count)

    def _fold(self) -> None:
        if self.parts:
            pieces = zip(*self.parts, strict=True)
            whole = [torch.cat([one.flatten() for one in part]) if len(part) > 1 else part[0] for part in pieces]
            total = _sum(whole, self.conclude) * self.weight
            self.total = total if self.total is None else self.total + total
            self.parts, self.kept = [], 0


def _sum(values: Sequence[Tensor], conclude: Callable[..., Tensor] | None) -> Tensor:
    """The sum in double precision of what becomes of values."""
    return (values[0] if conclude is None else conclude(*values)).sum(dtype=torch.float64)


class Totals:
    """The numbers of all maps, added up in double precision where they are.

    >>> totals = Totals()
    >>> totals.add(torch.ones(9, 2, 3)); totals.add(torch.ones(9, 1, 3))
    >>> totals.numbers.entropy
    tensor(9., dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def add(self, numbers: Tensor) -> None:
        """Take in what `Numbers` names of some images' heads, (9, B, H)."""
        sums = resting(numbers).sum(dim=(1, 2), dtype=torch.float64)
        self.sums = sums if self.sums is None else self.sums.add_(sums)

    @property
    def numbers(self) -> Numbers:
        """Their sums, one number each."""
        assert self.sums is not None
        return Numbers(*self.sums.unbind())


def compact(values: Tensor, most: float = 1) -> Tensor:
    """The values, as a copy where keeping them would keep more than `most` times their memory alive."""
    return values.clone() if values.untyped_storage().nbytes() > most * values.nbytes else values


def resting(values: Tensor) -> Tensor:
    """The values where they can stay in double precision: on the CPU or a CUDA device as they are, else on the CPU."""
    return values if values.device.type in ("cpu", "cuda") else values.cpu()
