"""Overfocus: whether all queries lean on the same few keys, the vertical lines in an attention map.

TAP and ADL's paper shows the lines (Figures 1 and 3); these two numbers count them. A head's `received` attention is
the mean of its rows: what each key gets. `overfocus` is the share of it that the top 5 % of keys take, in whole keys
(`uniform_overfocus`, about 0.05, where all get alike); `effective_tokens` is the number of keys that would, all alike,
have its entropy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitfocus.attention.entropy import row_entropy
from vitfocus.attention.reading import Geometry, Mean, Number, Reading, Tile
from vitfocus.kernels.statistics.op import Numbers, Statistics

TOP = 0.05


def received(maps: Tensor) -> Tensor:
    """The attention every key receives, mean over queries: maps (..., Q, K) to (..., K)."""
    return maps.mean(dim=-2)


def overfocus(received: Tensor, top: float = TOP) -> Tensor:
    """The share that the most attended `top` of the keys, at least one, receive: (..., K) to (...).

    >>> overfocus(torch.full((40,), 1 / 40)), overfocus(torch.eye(40)[0])
    (tensor(0.0500), tensor(1.))
    """
    return _of_the_top(_shares(received), top)


def _shares(received: Tensor) -> Tensor:
    """What every key receives of all that is given."""
    return received / received.sum(dim=-1, keepdim=True)


def _of_the_top(shares: Tensor, top: float = TOP) -> Tensor:
    """`overfocus` of shares."""
    return shares.topk(top_tokens(shares.shape[-1], top), dim=-1, sorted=False).values.sum(dim=-1)


def top_tokens(keys: int, top: float = TOP) -> int:
    """How many keys are the top ones.

    >>> top_tokens(197), top_tokens(49), top_tokens(4)
    (10, 2, 1)
    """
    return max(1, round(top * keys))


def uniform_overfocus(keys: int, top: float = TOP) -> float:
    """The overfocus where all keys receive alike: `top`, but for the rounding to whole keys.

    >>> uniform_overfocus(40), round(uniform_overfocus(65), 3), uniform_overfocus(4)
    (0.05, 0.046, 0.25)
    """
    return top_tokens(keys, top) / keys


def effective_tokens(received: Tensor) -> Tensor:
    """exp of the entropy of the received attention: (..., K) to (...).

    >>> effective_tokens(torch.tensor([0.5, 0.5, 0.0, 0.0]))
    tensor(2.)
    """
    return row_entropy(_shares(received)).exp()


class FocusReading(Reading):
    """Both numbers, averaged over heads and images."""

    def __init__(self) -> None:
        self.overfocus = Mean()
        self.effective = Mean(torch.exp)

    def begin(self, images: int, heads: int, geometry: Geometry) -> None:
        """Note the size."""
        self.shape = (images, heads, geometry.keys)

    def make_room(self, like: Tensor) -> None:
        """Start with nothing received."""
        self.received = like.new_zeros(self.shape)

    def add(self, tile: Tile) -> None:
        """Add what the tile's queries give."""
        maps = tile.attention.flatten(0, 1)
        given = torch.bmm(maps.new_ones(len(maps), 1, maps.shape[1]), maps)
        self.received += given.view_as(self.received)

    def end(self) -> None:
        """Take both numbers of every head."""
        shares = _shares(self.received)
        self.overfocus.add(_of_the_top(shares))
        self.effective.add(row_entropy(shares))
        del self.received

    def look(self, made: Statistics, products: Tensor | None) -> None:
        """Count the maps."""
        images, heads, _ = self.shape
        self.overfocus.expect(images * heads)
        self.effective.expect(images * heads)

    def fill(self, totals: Numbers) -> None:
        """Take in both numbers."""
        self.overfocus.give(totals.top)
        self.effective.give(totals.effective)

    def row(self) -> dict[str, Number]:
        """`overfocus`, a share, and `effective_tokens`, a number of tokens."""
        return {"overfocus": self.overfocus.value, "effective_tokens": self.effective.value}
