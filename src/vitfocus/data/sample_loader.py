"""Training batches of anything that is read one by one: pictures with masks, with boxes, with questions.

As in `loading.py`, a batch is a function of the step's number, whichever worker process made it, so nothing about it
needs to be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from vitfocus.core.errors import VitfocusError
from vitfocus.data.classification.dataset import Broken, BrokenLog
from vitfocus.data.classification.loader import Share, _ignore_signals
from vitfocus.data.sample_order import Stream

Key = tuple[int, int]  # index of the item, and its position in the stream, which names its draws


class SampleBatches:
    """The parts of steps, read by `workers` processes that run ahead.

    `samples[index, position]` gives one item, or a `Broken`; `collate` makes a batch of the good ones where they were
    read; `finish` then takes it to the device.
    """

    def __init__(
        self,
        samples: Dataset[Any],
        stream: Stream,
        share: Share,
        collate: Callable[[list[Any]], Any],
        finish: Callable[[Any], Any] = lambda batch: batch,
        *,
        workers: int = 0,
        device: torch.device | str = "cpu",
        log: BrokenLog | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.samples, self.stream, self.share = samples, stream, share
        self.collate, self.finish, self.workers = collate, finish, workers
        self.device, self.log, self.say = torch.device(device), log or BrokenLog(fatal=True), say

    def iterate(self, start: int, stop: int) -> Generator[Any, None, None]:
        """From one step to another, in order."""
        keys: Any = self._keys(start, stop)
        for batch, broken in read_ahead(self.samples, keys, self.collate, self.workers, self.device):
            for one in self.log.add(broken):
                self.say(f"Skipped an unreadable image: {one}")
            if batch is None:
                raise VitfocusError("Every image of a batch is unreadable; the last one: " + str(broken[-1]))
            yield self.finish(batch)

    def _keys(self, start: int, stop: int) -> Iterator[list[Key]]:
        for step in range(start, stop):
            for part in range(self.share.parts):
                first, last = (step * self.share.batch + row for row in self.share.rows(part))
                yield list(zip(self.stream.indices(first, last).tolist(), range(first, last), strict=True))


def read_ahead(
    samples: Dataset[Any], keys: Any, collate: Callable[[list[Any]], Any], workers: int, device: torch.device
) -> Iterator[tuple[Any, list[Broken]]]:
    """Batches of `keys` (lists of keys of `samples`) in order; None in place of one in which nothing was readable."""
    loader = DataLoader(
        samples,
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=_Collate(collate),
        pin_memory=device.type == "cuda",
        prefetch_factor=4 if workers else None,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # torch's own is the step's: a resumed run must find it untouched
    )
    yield from loader


class _Collate:
    """A collate function for the readable items, which hands on the broken ones."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, items: list[Any]) -> tuple[Any, list[Broken]]:
        good = [item for item in items if not isinstance(item, Broken)]
        return self.collate(good) if good else None, [item for item in items if isinstance(item, Broken)]


def evaluation_indices(length: int, share: Share) -> Sequence[int]:
    """Which of so many images this process evaluates: over all processes each once.

    >>> [list(evaluation_indices(5, Share(2, rank, 2))) for rank in (0, 1)]
    [[0, 2, 4], [1, 3]]
    """
    return range(share.rank, length, share.processes)
