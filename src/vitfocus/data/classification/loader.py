"""Batches for training: from a tensor on the device (`resident`) or through timm's transforms and worker processes.

Both give the same thing, the part of a step that one process takes, as a `Batch` on the device, and both are a function
of the step's number: nothing about them needs to be saved.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitfocus.core.errors import VitfocusError
from vitfocus.data.augmentation import Augmenter, Batch, apply_mix, draw_mix, draw_uniform, enlarge, mix
from vitfocus.data.classification.dataset import Broken, BrokenLog, Images, read_or_broken
from vitfocus.data.sample_order import SAMPLE, Stream, seed_for
from vitfocus.recipes.settings import Augment, Data


@dataclass(frozen=True)
class Share:
    """Which rows of a batch one process takes, and in how many parts."""

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
        """Images in one part."""
        return self.batch // (self.processes * self.parts)

    def rows(self, part: int) -> tuple[int, int]:
        """First and last row of a part."""
        first = (self.rank * self.parts + part) * self.size
        return first, first + self.size


class ResidentBatches:
    """The whole set as one uint8 tensor on the device; augmentation happens there too, and enlarging after it."""

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor,
        stream: Stream,
        augmenter: Augmenter,
        share: Share,
        compiled: bool = False,
        side: int = 0,
    ) -> None:
        self.pixels, self.labels = pixels.to(stream.device), labels.to(stream.device)
        self.stream, self.share, self.augmenter, self.side = stream, share, augmenter, side
        self.augment: Callable[[Tensor, Tensor], Tensor] = torch.compile(augmenter) if compiled else augmenter
        self._drawn: tuple[int, Tensor] = (-1, torch.empty(0))

    def iterate(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """The parts of the steps from start to stop, in order."""
        for step in range(start, stop):
            for part in range(self.share.parts):
                yield self.part(step, part)

    def part(self, step: int, part: int) -> Batch:
        """One part of one step."""
        return self.make(*self.inputs(step, part))

    def inputs(self, step: int, part: int = 0) -> tuple[Tensor, ...]:
        """All that distinguishes one part from another, on the device: indices, draws, and numbers to mix by."""
        first, last = self.share.rows(part)
        device, seed = self.stream.device, self.stream.seed
        index = self.stream.indices(step * self.share.batch + first, step * self.share.batch + last)
        if self._drawn[0] != step:
            drawn = draw_uniform(seed, step, self.share.batch, self.augmenter.columns)
            mine = drawn[self.share.rows(0)[0] : self.share.rows(self.share.parts - 1)[1]]
            self._drawn = (step, to_device(mine, device))
        uniform = self._drawn[1][part * self.share.size : (part + 1) * self.share.size]
        size = (int(self.pixels.shape[-2]), int(self.pixels.shape[-1]))
        numbers = draw_mix(self.augmenter.section, seed, step, size)
        return (index, uniform) if numbers is None else (index, uniform, to_device(numbers, device))

    def make(self, index: Tensor, uniform: Tensor, numbers: Tensor | None = None) -> Batch:
        """The part that these inputs describe: work on the device alone, the same for every step."""
        images = self.augment(self.pixels.index_select(0, index), uniform)
        labels = self.labels.index_select(0, index)
        batch = Batch(images, labels, labels)
        batch = batch if numbers is None else apply_mix(batch, numbers)
        return replace(batch, images=enlarge(batch.images, self.side))


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy that a GPU makes when it gets there: out of pageable memory, the host would wait for the GPU first."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class LoaderBatches:
    """Images read and transformed one by one in worker processes, finished on the device."""

    def __init__(
        self,
        images: Images,
        data: Data,
        stream: Stream,
        augmenter: Augmenter,
        share: Share,
        log: BrokenLog,
        say: Callable[[str], None] = print,
        device: torch.device | str = "cpu",
        classes: int | None = None,
    ) -> None:
        self.stream, self.share, self.augmenter, self.log, self.say = stream, share, augmenter, log, say
        self.classes = classes
        self.data, self.device = data, torch.device(device)
        self.samples = Samples(images, train_transform(data, augmenter.section), stream.seed)

    def iterate(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """The parts of the steps from start to stop, in order; the workers run ahead."""
        device = self.device
        loader = _loader(self.samples, self._keys(start, stop), self.data.workers, device)
        for number, (pixels, labels, rows, broken) in enumerate(loader):
            for one in self.log.add(broken):
                self.say(f"Skipped an unreadable image: {one}")
            if not len(labels):
                raise VitfocusError("Every image of a batch is unreadable; the last one: " + str(broken[-1]))
            if self.classes is not None and int(labels.max()) >= self.classes:
                raise VitfocusError(
                    f"A training image has the label {int(labels.max())}, and the model knows {self.classes} classes: "
                    "set model.arguments.num_classes."
                )
            step, part = start + number // self.share.parts, number % self.share.parts
            first, _ = self.share.rows(part)
            uniform = draw_uniform(self.stream.seed, step, self.share.batch, self.augmenter.columns)[first + rows]
            images = self.augmenter(pixels.to(device, non_blocking=True), to_device(uniform, device))
            labels = labels.to(device, non_blocking=True)
            yield mix(Batch(images, labels, labels), self.augmenter.section, self.stream.seed, step)

    def _keys(self, start: int, stop: int) -> Iterator[list[tuple[int, int]]]:
        for step in range(start, stop):
            for part in range(self.share.parts):
                first, last = (step * self.share.batch + row for row in self.share.rows(part))
                yield list(zip(self.stream.indices(first, last).tolist(), range(first, last), strict=True))


class Samples(Dataset[Any]):
    """Image by (index, position): the position names the draws of its transform, whichever worker runs it."""

    def __init__(self, images: Images, transform: Callable[[Any], Any], seed: int) -> None:
        self.images, self.transform, self.seed = images, transform, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int] | Broken:
        index, position = key
        item = read_or_broken(self.images, index)
        if isinstance(item, Broken):
            return item
        with seeded(seed_for(self.seed, SAMPLE, position)):
            return torch.as_tensor(self.transform(item[0])), item[1]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's generators seeded inside, and as they were outside. timm's transforms use all."""
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


def collate(items: list[Any]) -> tuple[Tensor, Tensor, Tensor, list[Broken]]:
    """Pixels, labels and row numbers of the readable items, and the broken ones."""
    good = [(row, item) for row, item in enumerate(items) if not isinstance(item, Broken)]
    broken = [item for item in items if isinstance(item, Broken)]
    pixels = torch.stack([item[0] for _, item in good]) if good else torch.empty(0)
    labels = torch.tensor([item[1] for _, item in good], dtype=torch.long)
    return pixels, labels, torch.tensor([row for row, _ in good], dtype=torch.long), broken


def train_transform(data: Data, augment: Augment) -> Callable[[Any], Any]:
    """timm's training transform to uint8; erasing, normalising and mixing are left to the device."""
    from timm.data import create_transform
    from torchvision import transforms

    try:
        transform: Any = create_transform(
            data.size,
            is_training=True,
            scale=augment.scale,
            hflip=augment.flip,
            auto_augment=augment.randaugment or None,
            color_jitter=augment.colour_jitter,
            interpolation=data.interpolation,
            use_prefetcher=True,
        )
    except (AssertionError, ValueError) as error:
        policy = augment.randaugment
        raise VitfocusError(f"timm does not know the policy augment.randaugment={policy!r}: {error}.") from None
    if augment.crop != "resized":
        whole = [transforms.Resize((data.size, data.size), transforms.InterpolationMode(data.interpolation))]
        pad = [transforms.RandomCrop(data.size, padding=augment.padding)] if augment.crop == "pad" else []
        transform.transforms[0] = transforms.Compose([*whole, *pad])
    return mend_posterize(transform)


def mend_posterize(transform: Any) -> Any:
    """timm's RandAugment may ask Pillow to keep 0 bits, which Pillow 13 refuses; it always meant a black image."""
    from timm.data.auto_augment import posterize

    for step in transform.transforms:
        for operation in getattr(step, "ops", ()):
            if getattr(operation, "aug_fn", None) is posterize:
                operation.aug_fn = _posterise
    return transform


def _posterise(image: Any, bits: int, **_: Any) -> Any:
    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


def _loader(samples: Dataset[Any], keys: Any, workers: int, device: torch.device) -> DataLoader[Any]:
    return DataLoader(
        samples,
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        prefetch_factor=4 if workers else None,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # torch's own is the step's: a resumed run must find it untouched
    )


def _ignore_signals(worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the workers too, and only the main process shall act on them.

    They end when their iterator is closed, which the engine sees to, or when the main process is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
