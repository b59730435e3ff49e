"""The order of training images, as arithmetic: what stands at position p depends on the seed and p alone.

A run reads one endless stream. Every stretch of `length` positions is one epoch, in which each image occurs once; step
s takes the positions from s·batch to (s+1)·batch, across the border of an epoch too, so no image is dropped or read
twice. Because nothing depends on what was read before, a run continues anywhere, with any number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ORDER, DRAWS, MIX, SAMPLE, STEP = range(5)  # what a seed is used for


def seed_for(*keys: int) -> int:
    """One 63-bit seed out of several numbers, well mixed.

    >>> seed_for(0, 1) == seed_for(0, 1), seed_for(0, 1) == seed_for(1, 0)
    (True, False)
    """
    return int(np.random.SeedSequence([key % 2**63 for key in keys]).generate_state(1, np.uint64)[0] >> np.uint64(1))


class Stream:
    """Which image stands at which position.

    `repeats` > 1 is repeated augmentation: an epoch is still `length` positions, but holds fewer images, each so many
    times, in one batch but for those that a batch's border cuts. `groups` (sizes that add up to `length`) keeps images
    of a group, such as a shard, near each other: groups are shuffled, then the images of every `window` of them.

    >>> stream = Stream(10, batch=4)
    >>> sorted(torch.cat([stream.indices(0, 4), stream.indices(4, 10)]).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self,
        length: int,
        batch: int,
        seed: int = 0,
        repeats: int = 1,
        groups: Sequence[int] = (),
        window: int = 16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.length, self.batch, self.seed, self.repeats = length, batch, seed, repeats
        self.groups, self.window, self.device = tuple(groups), window, device
        self._orders: dict[int, Tensor] = {}

    def indices(self, start: int, stop: int) -> Tensor:
        """The images at positions start to stop, int64 on the stream's device."""
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.length)
            part = self._order(epoch)[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            draw = np.random.default_rng(seed_for(self.seed, ORDER, epoch))
            order = self._grouped(draw) if self.groups else draw.permutation(self.length)
            if self.repeats > 1:
                order = self._repeated(order, epoch, draw)
            self._orders = {key: value for key, value in self._orders.items() if key == epoch - 1}
            self._orders[epoch] = torch.from_numpy(order).to(self.device)
        return self._orders[epoch]

    def _grouped(self, draw: np.random.Generator) -> np.ndarray:
        starts = np.concatenate([[0], np.cumsum(self.groups)])
        shuffled = draw.permutation(len(self.groups))
        parts = []
        for first in range(0, len(shuffled), self.window):
            near = [np.arange(starts[group], starts[group + 1]) for group in shuffled[first : first + self.window]]
            parts.append(draw.permutation(np.concatenate(near)))
        return np.concatenate(parts)

    def _repeated(self, order: np.ndarray, epoch: int, draw: np.random.Generator) -> np.ndarray:
        """Each of the first images several times, shuffled within every batch so that copies do not stand in a row."""
        order = np.repeat(order[: -(-self.length // self.repeats)], self.repeats)[: self.length]
        first = -(epoch * self.length) % self.batch
        for start in range(first, self.length, self.batch):
            order[start : start + self.batch] = draw.permutation(order[start : start + self.batch])
        return order
