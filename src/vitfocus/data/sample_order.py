"""The order of training samples: the sample at a position depends on the seed and the position only.

A run reads an endless sequence of positions. Each `length` positions are one epoch, in which every sample occurs once.
Step s takes the positions from s·batch to (s+1)·batch, across the end of an epoch too, so no sample is dropped or read
twice. Since nothing depends on what was read before, a run can resume at any step with any number of processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

ORDER, DRAWS, MIX, SAMPLE, STEP = range(5)  # purposes of a seed, so that they use different random numbers


def seed_for(*keys: int) -> int:
    """Mix several numbers into one 63-bit seed.

    >>> seed_for(0, 1) == seed_for(0, 1), seed_for(0, 1) == seed_for(1, 0)
    (True, False)
    """
    return int(np.random.SeedSequence([key % 2**63 for key in keys]).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch, which timm's transforms use, and restore them later."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.default_generator.set_state(before[2])


class SampleOrder:
    """Which sample is at which position.

    Args:
        length: Number of samples, and of positions per epoch.
        batch: Size of the global batch.
        seed: Seed of the order.
        repeats: Repeated augmentation if above 1: an epoch holds fewer samples, each this many times, in one batch
            unless the end of a batch separates them.
        groups: Sizes of groups such as shards, which add up to `length`. Groups are shuffled, then the samples of each
            `window` groups, so that reading stays nearly sequential.
        window: Number of groups that are shuffled together.
        device: Where indices are returned.

    Example:
        >>> order = SampleOrder(10, batch=4)
        >>> sorted(torch.cat([order.indices(0, 4), order.indices(4, 10)]).tolist())
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
        """The samples at positions start to stop, int64 on the order's device."""
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
        """Repeat the first samples; each batch is shuffled so that copies are not neighbours."""
        order = np.repeat(order[: -(-self.length // self.repeats)], self.repeats)[: self.length]
        first = -(epoch * self.length) % self.batch
        for start in range(first, self.length, self.batch):
            order[start : start + self.batch] = draw.permutation(order[start : start + self.batch])
        return order
