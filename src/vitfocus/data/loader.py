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
from functools import partial
from typing import Any, Protocol, TypeVar

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


Sample = TypeVar("Sample", covariant=True)


class SampleDataset(Protocol[Sample]):
    """A data set whose samples are read by index."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """One sample; any exception means that it is broken."""

    def name(self, index: int) -> str:
        """The sample's name in messages."""

    def digest(self) -> str:
        """A SHA-256 that changes when the data set does."""


def read_or_broken(dataset: Any, index: int, read: Callable[[int], Any] | None = None) -> Any:
    """One sample of a data set, by its `read` or another function, or a `Broken` that says what is wrong."""
    try:
        return (read or dataset.read)(index)
    except Exception as error:  # image decoders raise exceptions of many types
        name = dataset.name(index)
        return Broken(name, reason(error).removeprefix(f"{name} "))


class Samples(Dataset[Any]):
    """Samples of a data set by index or by (index, position), transformed in the worker process that reads them.

    Args:
        dataset: The data set.
        transform: Called as `transform(sample, seed)`, with a seed that depends on `seed` and the position only.
        seed: Seed of the transform.
        read: Reads a sample by its index; by default `dataset.read`.
    """

    def __init__(
        self,
        dataset: SampleDataset[Any],
        transform: Callable[[Any, int], Any] | None = None,
        seed: int = 0,
        read: Callable[[int], Any] | None = None,
    ) -> None:
        self.dataset, self.transform, self.seed, self.read = dataset, transform, seed, read

    def __getitem__(self, key: int | Key) -> Any:
        index, position = key if isinstance(key, tuple) else (key, 0)
        sample = read_or_broken(self.dataset, index, self.read)
        if isinstance(sample, Broken) or self.transform is None:
            return sample
        return self.transform(sample, seed_for(self.seed, SAMPLE, position))


def first_images(dataset: SampleDataset[Any], count: int, size: int) -> Tensor | None:
    """The first readable images of a data set, resized to uint8 (B, 3, size, size); None if there are none."""
    found = (read_or_broken(dataset, index) for index in range(min(count, len(dataset))))
    images = [one[0] for one in found if not isinstance(one, Broken)]
    pixels = [image if isinstance(image, Tensor) else to_tensor(image) for image in images]
    resized = [F.interpolate(one[None].float(), (size, size), mode="bilinear", antialias=True) for one in pixels]
    return torch.cat(resized).round().clamp(0, 255).byte() if resized else None


@dataclass
class BatchReader:
    """Reads batches of samples in worker processes, and records the samples that cannot be read.

    Args:
        workers: Number of worker processes; 0 reads in this one.
        skip: Whether unreadable samples are left out; otherwise the first one raises an error.
        device: Where the batches are going; for a GPU they are put into pinned memory.
        say: Called with a sentence about each unreadable sample.
        broken: The unreadable samples so far: reasons by name.
    """

    workers: int = 0
    skip: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    say: Callable[[str], None] = print
    broken: dict[str, str] = field(default_factory=dict)

    def batches(
        self, samples: Dataset[Any], keys: Iterable[Any], collate: Callable[[list[Any]], Any]
    ) -> Generator[tuple[list[Any], Any], None, None]:
        """Read one batch per list of keys, in order.

        Args:
            samples: Maps a key to a sample or a `Broken`.
            keys: The keys of each batch.
            collate: Makes a batch of a list of samples, in the worker process.

        Yields:
            The keys of the readable samples and their batch, which is None if no sample is readable.
        """
        loaded: Iterable[Any] = DataLoader(
            _Keyed(samples),
            batch_sampler=keys,
            num_workers=self.workers,
            collate_fn=partial(_collate, collate),
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if self.workers else None,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # torch's own generator is not advanced
        )
        for readable, batch, broken in loaded:
            self.report(broken)
            yield readable, batch

    def report(self, broken: Sequence[Broken]) -> None:
        """Record unreadable samples; each is reported once, or raises an error unless it is to be skipped."""
        if broken and not self.skip:
            raise VitfocusError(f"An image cannot be read: {broken[0]}. Set data.broken=skip to leave such images out.")
        for one in broken:
            if one.name not in self.broken:
                self.broken[one.name] = one.reason
                self.say(f"Skipped an unreadable image: {one}")


@dataclass
class SampleBatches:
    """Training batches of samples that are read one by one.

    Args:
        samples: Maps (index, position) to a sample or a `Broken`.
        order: Which sample is at which position.
        partition: The rows of each batch that this process takes.
        collate: Makes a batch of a list of samples, in the worker process.
        finish: Called in this process as `finish(batch, step, rows)`, where `rows` (B,) are the rows of the global
            batch that could be read; returns what `iterate` yields.
        reader: Reads the samples.
    """

    samples: Dataset[Any]
    order: SampleOrder
    partition: BatchPartition
    collate: Callable[[list[Any]], Any]
    finish: Callable[[Any, int, Tensor], Any] = lambda batch, step, rows: batch
    reader: BatchReader = field(default_factory=BatchReader)

    def iterate(self, start: int, stop: int) -> Generator[Any, None, None]:
        """This process's parts of the steps from `start` up to `stop`, in order."""
        loaded = self.reader.batches(self.samples, self._keys(start, stop), self.collate)
        for number, (keys, batch) in enumerate(loaded):
            if batch is None:
                last = list(self.reader.broken)[-1]
                raise VitfocusError(f"Every image of a batch is unreadable, such as {last}.")
            rows = torch.tensor([position % self.partition.batch for _, position in keys])
            yield self.finish(batch, start + number // self.partition.parts, rows)

    def _keys(self, start: int, stop: int) -> Iterator[list[Key]]:
        for step in range(start, stop):
            for part in range(self.partition.parts):
                first, last = (step * self.partition.batch + row for row in self.partition.rows(part))
                yield list(zip(self.order.indices(first, last).tolist(), range(first, last), strict=True))


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


def strided_batches(length: int, partition: BatchPartition) -> list[list[int]]:
    """Indices of this process's evaluation batches if they need not be equal; over all processes each index once.

    >>> [strided_batches(5, BatchPartition(4, rank, 2)) for rank in (0, 1)]
    [[[0, 2], [4]], [[1, 3]]]
    """
    indices = range(partition.rank, length, partition.processes)
    return [list(indices[start : start + partition.size]) for start in range(0, len(indices), partition.size)]


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy to a device without waiting for it: from pageable memory, the host would wait for the GPU first."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class _Keyed(Dataset[Any]):
    """Samples with their keys."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples = samples

    def __getitem__(self, key: Any) -> tuple[Any, Any]:
        return key, self.samples[key]


def _collate(collate: Callable[[list[Any]], Any], items: list[tuple[Any, Any]]) -> tuple[list[Any], Any, list[Broken]]:
    """The keys and the batch of the readable samples, and the broken ones."""
    readable = [(key, sample) for key, sample in items if not isinstance(sample, Broken)]
    batch = collate([sample for _, sample in readable]) if readable else None
    return [key for key, _ in readable], batch, [sample for _, sample in items if isinstance(sample, Broken)]


def _ignore_signals(worker: int) -> None:
    """Only the main process handles Ctrl-C and a scheduler's SIGTERM, which the workers receive too.

    Workers end when the engine closes their iterator, or when the main process is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
