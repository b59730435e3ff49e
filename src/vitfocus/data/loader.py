"""The loader that every task shares: sample order, how a batch is divided, worker processes, unreadable samples.

A training batch depends on the seed and the number of the step only, whichever worker process reads it, so a loader has
no state to save. A run reads an endless sequence of positions. Each `length` positions are one epoch, in which every
sample occurs once. Step s takes the positions from s·batch to (s+1)·batch, across the end of an epoch too.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitfocus.core.errors import VitfocusError, reason
from vitfocus.data.image_files import to_tensor

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


Key = tuple[int, int]  # index of a sample, and its position in the sample order, which seeds its augmentation


@dataclass(frozen=True)
class BatchPartition:
    """Which rows of a global batch one process takes, and in how many parts (gradient accumulation)."""

    batch: int
    rank: int = 0
    processes: int = 1
    parts: int = 1

    def __post_init__(self) -> None:
        if self.batch % (self.processes * self.parts):
            raise VitfocusError(
                f"batch={self.batch} cannot be divided by {self.processes} processes × accumulate={self.parts}."
            )

    @property
    def size(self) -> int:
        return self.batch // (self.processes * self.parts)

    def rows(self, part: int) -> tuple[int, int]:
        """First row of a part, and the row after its last."""
        first = (self.rank * self.parts + part) * self.size
        return first, first + self.size


@dataclass
class Broken:
    """A sample that could not be read, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass
class BrokenLog:
    """Counts the unreadable images of a run, or raises at the first one if `fatal`."""

    fatal: bool
    found: dict[str, str] = field(default_factory=dict)

    def add(self, broken: Sequence[Broken]) -> list[Broken]:
        """Record these samples; returns those that were not recorded before."""
        if broken and self.fatal:
            raise VitfocusError(f"An image cannot be read: {broken[0]}. Set data.broken=skip to leave such images out.")
        new = {one.name: one for one in broken if one.name not in self.found}  # a batch may hold copies of one
        self.found.update({one.name: one.reason for one in new.values()})
        return list(new.values())


class Readable(Protocol):
    """A data set whose samples are read by index. Any exception from `read` means that the sample is broken."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """One sample."""

    def name(self, index: int) -> str:
        """The sample's name in messages."""


def read_or_broken(dataset: Readable, index: int, read: Callable[[int], Any] | None = None) -> Any:
    """One sample of a data set, by its `read` or another method of it, or a `Broken` that says what is wrong."""
    try:
        return (read or dataset.read)(index)
    except Exception as error:  # image decoders raise exceptions of many types
        name = dataset.name(index)
        return Broken(name, reason(error).removeprefix(f"{name} "))


def first_images(dataset: Readable, count: int, size: int) -> Tensor | None:
    """The first readable images of a data set, resized to uint8 (B, 3, size, size); None if there are none."""
    found = (read_or_broken(dataset, index) for index in range(min(count, len(dataset))))
    images = [one[0] for one in found if not isinstance(one, Broken)]
    pixels = [image if isinstance(image, Tensor) else to_tensor(image) for image in images]
    resized = [F.interpolate(one[None].float(), (size, size), mode="bilinear", antialias=True) for one in pixels]
    return torch.cat(resized).round().clamp(0, 255).byte() if resized else None


def read_ahead(
    samples: Dataset[Any], keys: Iterable[Any], collate: Callable[[list[Any]], Any], workers: int, device: torch.device
) -> Iterator[tuple[Any, Tensor, list[Broken]]]:
    """Read batches in `workers` processes, in order.

    Args:
        samples: Maps a key to a sample or a `Broken`.
        keys: One list of keys per batch.
        collate: Makes a batch of a list of samples, in the worker process.
        workers: Number of worker processes; 0 reads in this one.
        device: Where the batches are going; for a GPU they are put into pinned memory.

    Yields:
        For each list of keys the batch of the readable samples (None if there are none), their row numbers, and the
        unreadable samples.
    """
    yield from DataLoader(
        samples,
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=_Collate(collate),
        pin_memory=device.type == "cuda",
        prefetch_factor=4 if workers else None,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # without it a loader draws from torch's generator, which a resumed run restores
    )


class SampleBatches:
    """Training batches of samples that are read one by one.

    Args:
        samples: Maps (index, position) to a sample or a `Broken`.
        order: Which sample is at which position.
        partition: The rows of each batch that this process takes.
        collate: Makes a batch of a list of samples, in the worker process.
        finish: Called in this process as `finish(batch, step, rows)`, where `rows` (B,) are the rows of the global
            batch that could be read; returns what `iterate` yields.
        workers: Number of worker processes.
        device: Where the batches are going.
        log: Records unreadable samples; by default the first one raises.
        say: Called with a sentence about each unreadable sample.
    """

    def __init__(
        self,
        samples: Dataset[Any],
        order: SampleOrder,
        partition: BatchPartition,
        collate: Callable[[list[Any]], Any],
        finish: Callable[[Any, int, Tensor], Any] = lambda batch, step, rows: batch,
        *,
        workers: int = 0,
        device: torch.device | str = "cpu",
        log: BrokenLog | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.samples, self.order, self.partition = samples, order, partition
        self.collate, self.finish, self.workers = collate, finish, workers
        self.device, self.log, self.say = torch.device(device), log or BrokenLog(fatal=True), say

    def iterate(self, start: int, stop: int) -> Generator[Any, None, None]:
        """This process's parts of the steps from `start` up to `stop`, in order."""
        loaded = read_ahead(self.samples, self._keys(start, stop), self.collate, self.workers, self.device)
        for number, (batch, rows, broken) in enumerate(loaded):
            for one in self.log.add(broken):
                self.say(f"Skipped an unreadable image: {one}")
            if batch is None:
                raise VitfocusError(f"Every image of a batch is unreadable; the last one is {broken[-1]}.")
            step, part = divmod(number, self.partition.parts)
            yield self.finish(batch, start + step, self.partition.rows(part)[0] + rows)

    def _keys(self, start: int, stop: int) -> Iterator[list[Key]]:
        for step in range(start, stop):
            for part in range(self.partition.parts):
                first, last = (step * self.partition.batch + row for row in self.partition.rows(part))
                yield list(zip(self.order.indices(first, last).tolist(), range(first, last), strict=True))


def evaluation_batches(
    samples: Dataset[Any],
    keys: Iterable[Any],
    collate: Callable[[list[Any]], Any],
    workers: int,
    device: torch.device,
    log: BrokenLog | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[tuple[Any, list[Any], Tensor]]:
    """Batches for evaluation: like `read_ahead`, but unreadable samples are reported and left out.

    Yields:
        Each batch that has a readable sample, its list of keys, and the row numbers of the readable samples.
    """
    log, keys = log or BrokenLog(fatal=True), list(keys)
    for batch_keys, (batch, rows, broken) in zip(
        keys, read_ahead(samples, keys, collate, workers, device), strict=True
    ):
        for one in log.add(broken):
            say(f"Left out of the evaluation, unreadable: {one}")
        if batch is not None:
            yield batch, batch_keys, rows


def equal_batches(length: int, partition: BatchPartition) -> list[list[tuple[int, bool]]]:
    """Indices of this process's evaluation batches, each index with whether it counts.

    Over all processes every index counts once. All batches have the same size and all processes the same number of
    batches, which models that synchronise in the forward pass need; the last ones are padded with the last index.

    >>> [equal_batches(3, BatchPartition(4, rank, 2)) for rank in (0, 1)]
    [[[(0, True), (1, True)]], [[(2, True), (2, False)]]]
    """
    each = -(-length // partition.processes)
    first, size = partition.rank * each, partition.size
    stop = min(first + each, length)
    return [
        [(min(place, length - 1), place < stop) for place in range(start, start + size)]
        for start in range(first, first + each, size)
    ]


def strided_indices(length: int, partition: BatchPartition) -> Sequence[int]:
    """The indices this process evaluates if batches need not be equal; over all processes each index once.

    >>> [list(strided_indices(5, BatchPartition(2, rank, 2))) for rank in (0, 1)]
    [[0, 2, 4], [1, 3]]
    """
    return range(partition.rank, length, partition.processes)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy to a device without waiting for it: from pageable memory, the host would wait for the GPU first."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class _Collate:
    """Collates the readable samples and passes the broken ones on."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, items: list[Any]) -> tuple[Any, Tensor, list[Broken]]:
        rows = [row for row, item in enumerate(items) if not isinstance(item, Broken)]
        batch = self.collate([items[row] for row in rows]) if rows else None
        return batch, torch.tensor(rows, dtype=torch.int64), [item for item in items if isinstance(item, Broken)]


def _ignore_signals(worker: int) -> None:
    """Only the main process handles Ctrl-C and a scheduler's SIGTERM, which the workers receive too.

    Workers end when the engine closes their iterator, or when the main process is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
