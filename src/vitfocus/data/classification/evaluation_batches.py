"""Batches for evaluation: every image once over all processes, in batches of one size.

Each process takes as many batches as every other (models whose layers talk to each other need that) and the last is
filled up with copies that do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import torch
from torch import Tensor

from vitfocus.data.augmentation import enlarge
from vitfocus.data.classification.dataset import BrokenLog, Images
from vitfocus.data.classification.loader import Samples, Share, _loader
from vitfocus.recipes.settings import Data


class EvaluationBatches:
    """Yields normalised images, labels, and 1 or 0 for whether each counts. One of `resident` and `images` is given."""

    def __init__(
        self,
        data: Data,
        share: Share,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device | str,
        resident: tuple[Tensor, Tensor] | None = None,
        images: Images | None = None,
        log: BrokenLog | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.data, self.share, self.device, self.log, self.say = data, share, torch.device(device), log, say
        self.mean = torch.tensor(mean, device=device)[:, None, None] * 255
        self.std = torch.tensor(std, device=device)[:, None, None] * 255
        self.resident = (resident[0].to(device), resident[1].to(device)) if resident else None
        self.images = images
        self.length = len(resident[1]) if resident else len(images or ())

    def __iter__(self) -> Generator[tuple[Tensor, Tensor, Tensor], None, None]:
        keys = list(self._keys())
        if self.resident is not None:
            pixels, labels = self.resident
            for index, counts in keys:
                where = torch.tensor(index, device=self.device)
                yield self._finish(pixels.index_select(0, where)), labels.index_select(0, where), self._tensor(counts)
            return
        from timm.data import create_transform

        assert self.images is not None and self.log is not None
        transform = create_transform(
            self.data.size, interpolation=self.data.interpolation, crop_pct=self.data.crop, use_prefetcher=True
        )
        sampler = [[(one, 0) for one in index] for index, _ in keys]
        loader = _loader(Samples(self.images, transform, 0), sampler, self.data.workers, self.device)
        for (_, counts), (pixels, labels, rows, broken) in zip(keys, loader, strict=True):
            for one in self.log.add(broken):
                self.say(f"Left out of the evaluation, unreadable: {one}")
            if len(labels):
                yield (
                    self._finish(pixels.to(self.device, non_blocking=True)),
                    labels.to(self.device),
                    self._tensor(counts)[rows.to(self.device)],
                )

    def _keys(self) -> Iterator[tuple[list[int], list[float]]]:
        share = -(-self.length // self.share.processes)
        first = self.share.rank * share
        for start in range(first, first + share, self.share.size):
            positions = range(start, start + self.share.size)
            stop = min(first + share, self.length)
            yield [min(p, self.length - 1) for p in positions], [float(p < stop) for p in positions]

    def _finish(self, pixels: Tensor) -> Tensor:
        values = enlarge(pixels.float(), self.data.enlarge).clamp(0, 255)
        return (values - self.mean) / self.std

    def _tensor(self, counts: list[float]) -> Tensor:
        return torch.tensor(counts, device=self.device)
