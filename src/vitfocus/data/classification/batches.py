"""Batches for classification: from a tensor on the device (resident), or read and transformed in worker processes.

Both yield the part of a step that one process takes as a `ClassificationBatch` on the device. It depends on the seed
and the number of the step only, so no loader state is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitfocus.core.errors import VitfocusError
from vitfocus.data.classification.augmentation import (
    Augmenter,
    ClassificationBatch,
    apply_mix,
    draw_mix,
    draw_uniform,
    enlarge,
    fix_posterize,
    mix,
)
from vitfocus.data.classification.dataset import ClassificationDataset
from vitfocus.data.image_files import Normalise, Preprocessing, standard_preprocessing
from vitfocus.data.loader import (
    SAMPLE,
    BatchPartition,
    Broken,
    BrokenLog,
    Key,
    SampleBatches,
    SampleOrder,
    equal_batches,
    evaluation_batches,
    read_or_broken,
    seed_for,
    seeded,
    to_device,
)
from vitfocus.recipes import Augment, Data


class ResidentBatches:
    """Training batches of a data set that is one uint8 tensor on the device, where it is augmented too.

    Args:
        pixels: All images, uint8 (N, 3, H, W).
        labels: Their labels (N,).
        order: The order of the samples; its device is where everything happens.
        augmenter: The augmentation.
        partition: The rows of each batch that this process takes.
        compiled: Whether the augmentation is compiled.
        side: Augmented images are resized to this many pixels; 0 leaves them as they are.
    """

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor,
        order: SampleOrder,
        augmenter: Augmenter,
        partition: BatchPartition,
        compiled: bool = False,
        side: int = 0,
    ) -> None:
        self.pixels, self.labels = pixels.to(order.device), labels.to(order.device)
        self.order, self.partition, self.augmenter, self.side = order, partition, augmenter, side
        self.augment: Callable[[Tensor, Tensor], Tensor] = torch.compile(augmenter) if compiled else augmenter
        self._drawn: tuple[int, Tensor] = (-1, torch.empty(0))

    def iterate(self, start: int, stop: int) -> Generator[ClassificationBatch, None, None]:
        """This process's parts of the steps from `start` up to `stop`, in order."""
        for step in range(start, stop):
            for part in range(self.partition.parts):
                yield self.make(*self.inputs(step, part))

    def inputs(self, step: int, part: int = 0) -> tuple[Tensor, ...]:
        """What differs between parts, on the device: indices, random numbers and the numbers to mix by."""
        first, last = self.partition.rows(part)
        device, seed = self.order.device, self.order.seed
        index = self.order.indices(step * self.partition.batch + first, step * self.partition.batch + last)
        if self._drawn[0] != step:
            drawn = draw_uniform(seed, step, self.partition.batch, self.augmenter.columns)
            mine = drawn[self.partition.rows(0)[0] : self.partition.rows(self.partition.parts - 1)[1]]
            self._drawn = (step, to_device(mine, device))
        uniform = self._drawn[1][part * self.partition.size : (part + 1) * self.partition.size]
        size = (int(self.pixels.shape[-2]), int(self.pixels.shape[-1]))
        numbers = draw_mix(self.augmenter.section, seed, step, size)
        return (index, uniform) if numbers is None else (index, uniform, to_device(numbers, device))

    def make(self, index: Tensor, uniform: Tensor, numbers: Tensor | None = None) -> ClassificationBatch:
        """The batch of these inputs: the same operations on the device for every step."""
        images = self.augment(self.pixels.index_select(0, index), uniform)
        labels = self.labels.index_select(0, index)
        batch = ClassificationBatch(images, labels, labels)
        batch = batch if numbers is None else apply_mix(batch, numbers)
        return replace(batch, images=enlarge(batch.images, self.side))


class LoaderBatches(SampleBatches):
    """Training batches of images that worker processes read and transform; the rest happens on the device."""

    def __init__(
        self,
        images: ClassificationDataset,
        data: Data,
        order: SampleOrder,
        augmenter: Augmenter,
        partition: BatchPartition,
        log: BrokenLog,
        say: Callable[[str], None] = print,
        device: torch.device | str = "cpu",
        classes: int | None = None,
    ) -> None:
        self.augmenter = augmenter
        samples = TransformedImages(images, train_transform(data, augmenter.section), order.seed, classes)
        super().__init__(
            samples, order, partition, stack, self._finish, workers=data.workers, device=device, log=log, say=say
        )

    def _finish(self, batch: tuple[Tensor, Tensor], step: int, rows: Tensor) -> ClassificationBatch:
        pixels, labels = batch
        uniform = draw_uniform(self.order.seed, step, self.partition.batch, self.augmenter.columns)[rows]
        images = self.augmenter(pixels.to(self.device, non_blocking=True), to_device(uniform, self.device))
        labels = labels.to(self.device, non_blocking=True)
        return mix(ClassificationBatch(images, labels, labels), self.augmenter.section, self.order.seed, step)


class EvaluationBatches:
    """Yields normalised images, labels, and for each image 1 if it counts and 0 if it only fills the batch.

    Over all processes every image counts once. Either `resident` (uint8 images and labels) or `images` is given.
    """

    def __init__(
        self,
        data: Data,
        partition: BatchPartition,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device | str,
        resident: tuple[Tensor, Tensor] | None = None,
        images: ClassificationDataset | None = None,
        log: BrokenLog | None = None,
        say: Callable[[str], None] = print,
        classes: int | None = None,
    ) -> None:
        self.data, self.partition, self.device, self.log, self.say = data, partition, torch.device(device), log, say
        self.classes = classes
        self.normalise = Normalise(mean, std, device)
        self.resident = (resident[0].to(device), resident[1].to(device)) if resident else None
        self.images = images
        self.length = len(resident[1]) if resident else len(images or ())

    def __iter__(self) -> Generator[tuple[Tensor, Tensor, Tensor], None, None]:
        batches = equal_batches(self.length, self.partition)
        for pixels, labels, counts in self._resident(batches) if self.resident else self._read(batches):
            values = enlarge(pixels.to(self.device, non_blocking=True).float(), self.data.enlarge).clamp(0, 255)
            counted = torch.tensor(counts, dtype=torch.float32, device=self.device)
            yield self.normalise(values), labels.to(self.device), counted

    def first(self, count: int) -> Tensor:
        """The first images, uint8 (B, 3, H, W), at the size at which they are evaluated."""
        if self.resident is None:
            assert self.images is not None
            transform = self._preprocessing().apply
            found = (read_or_broken(self.images, index) for index in range(min(count, self.length)))
            pixels = torch.stack([torch.as_tensor(transform(one[0])) for one in found if not isinstance(one, Broken)])
        else:
            pixels = self.resident[0][:count]
        return enlarge(pixels.float(), self.data.enlarge).round().clamp(0, 255).byte()

    def _preprocessing(self) -> Preprocessing:
        return standard_preprocessing((self.data.size, self.data.size), self.data.crop, self.data.interpolation)

    def _resident(self, batches: list[list[tuple[int, bool]]]) -> Iterator[tuple[Tensor, Tensor, list[bool]]]:
        assert self.resident is not None
        pixels, labels = self.resident
        for batch in batches:
            index = torch.tensor([index for index, _ in batch], device=self.device)
            yield pixels.index_select(0, index), labels.index_select(0, index), [counts for _, counts in batch]

    def _read(self, batches: list[list[tuple[int, bool]]]) -> Iterator[tuple[Tensor, Tensor, list[bool]]]:
        assert self.images is not None and self.log is not None
        samples = TransformedImages(self.images, self._preprocessing().apply, 0, self.classes)
        loaded = evaluation_batches(samples, batches, stack, self.data.workers, self.device, self.log, self.say)
        for (pixels, labels), keys, rows in loaded:
            yield pixels, labels, [keys[row][1] for row in rows.tolist()]


class TransformedImages(Dataset[Any]):
    """Transformed images and labels by (index, position); the position seeds the transform in any worker process.

    An image whose label is not below `classes` is broken.
    """

    def __init__(
        self,
        images: ClassificationDataset,
        transform: Callable[[Any], Any],
        seed: int,
        classes: int | None = None,
    ) -> None:
        self.images, self.transform, self.seed, self.classes = images, transform, seed, classes

    def __getitem__(self, key: Key) -> tuple[Tensor, int] | Broken:
        index, position = key
        item = read_or_broken(self.images, index)
        if isinstance(item, Broken):
            return item
        if self.classes is not None and item[1] >= self.classes:
            known = f"there are {self.classes} classes, 0 to {self.classes - 1}: see model.arguments.num_classes"
            return Broken(self.images.name(index), f"its label is {item[1]}, but {known}")
        with seeded(seed_for(self.seed, SAMPLE, position)):
            return torch.as_tensor(self.transform(item[0])), item[1]


def stack(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Images and labels as two tensors."""
    return torch.stack([image for image, _ in items]), torch.tensor([label for _, label in items])


def train_transform(data: Data, augment: Augment) -> Callable[[Any], Any]:
    """timm's training transform up to uint8; erasing, normalisation and mixing happen on the device."""
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
    return fix_posterize(transform)
