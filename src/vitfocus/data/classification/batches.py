"""Batches for classification: from a tensor on the device (resident), or read and transformed in worker processes.

Both yield the part of a step that one process takes as a `ClassificationBatch` on the device. It depends on the seed
and the number of the step only, so no loader state is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.data.classification.augmentation import (
    Augmenter,
    ClassificationBatch,
    apply_mix,
    draw_mix,
    draw_uniform,
    enlarge,
    fix_posterize,
)
from vitfocus.data.classification.dataset import ClassificationDataset
from vitfocus.data.image_files import Normalise, evaluation_preprocessing
from vitfocus.data.loader import (
    BatchPartition,
    BatchReader,
    Broken,
    SampleOrder,
    Samples,
    equal_batches,
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
        """What differs between parts, on the device: indices, random numbers and mixing parameters."""
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


@dataclass
class EvaluationBatches:
    """Yields normalised images, labels, and for each image 1 if it counts and 0 if it only fills the batch.

    Over all processes every image counts once. `images` is a data set, or uint8 images and labels on the device.
    """

    images: ClassificationDataset | tuple[Tensor, Tensor]
    data: Data
    partition: BatchPartition
    normalise: Normalise
    reader: BatchReader = field(default_factory=BatchReader)
    classes: int | None = None

    def __len__(self) -> int:
        return len(self.images[1] if isinstance(self.images, tuple) else self.images)

    def __iter__(self) -> Generator[tuple[Tensor, Tensor, Tensor], None, None]:
        device = self.normalise.device
        for pixels, labels, counts in self._parts():
            values = enlarge(pixels.to(device, non_blocking=True).float(), self.data.enlarge).clamp(0, 255)
            yield self.normalise(values), labels.to(device), torch.tensor(counts, dtype=torch.float32, device=device)

    def first(self, count: int) -> Tensor:
        """The first images, uint8 (B, 3, H, W), at the size at which they are evaluated."""
        if isinstance(self.images, tuple):
            pixels = self.images[0][:count]
        else:
            found = (self._samples()[index] for index in range(min(count, len(self))))
            pixels = torch.stack([one[0] for one in found if not isinstance(one, Broken)])
        return enlarge(pixels.float(), self.data.enlarge).round().clamp(0, 255).byte()

    def _parts(self) -> Iterator[tuple[Tensor, Tensor, list[bool]]]:
        batches = equal_batches(len(self), self.partition)
        if isinstance(self.images, tuple):
            pixels, labels = self.images
            for batch in batches:
                index = torch.tensor([index for index, _ in batch], device=pixels.device)
                yield pixels.index_select(0, index), labels.index_select(0, index), [counts for _, counts in batch]
            return
        for keys, read in self.reader.batches(self._samples(), batches, stack_labelled):
            if read is not None:
                yield *read, [counts for _, counts in keys]

    def _samples(self) -> Samples:
        assert not isinstance(self.images, tuple)
        size, data = (self.data.size, self.data.size), self.data
        preprocessing = evaluation_preprocessing(size, data.interpolation, data.crop, keep=False)
        return transformed_images(self.images, preprocessing.apply, classes=self.classes)


def transformed_images(
    images: ClassificationDataset, transform: Callable[[Any], Any], seed: int = 0, classes: int | None = None
) -> Samples:
    """Images that a transform turns into uint8 tensors, and labels; a label that is not below `classes` is broken."""
    return Samples(images, partial(_transformed, transform), seed, partial(_checked_label, images, classes))


def _transformed(transform: Callable[[Any], Any], sample: tuple[Any, int], seed: int) -> tuple[Tensor, int]:
    with seeded(seed):
        return torch.as_tensor(transform(sample[0])), sample[1]


def _checked_label(images: ClassificationDataset, classes: int | None, index: int) -> tuple[Any, int]:
    image, label = images.read(index)
    if classes is not None and label >= classes:
        known = f"there are {classes} classes, 0 to {classes - 1}: see model.arguments.num_classes"
        raise VitfocusError(f"its label is {label}, but {known}")
    return image, label


def stack_labelled(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
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
