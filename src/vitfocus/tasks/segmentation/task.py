"""Semantic segmentation, scored by mIoU, mAcc and aAcc."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.anatomy import input_spec, unwrap
from vitfocus.core.errors import VitfocusError
from vitfocus.core.metrics import METRICS
from vitfocus.core.modules import eval_mode, logits_of
from vitfocus.core.registry import COMPOSED_MODELS
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.loader import Broken, Samples, first_images, read_or_broken, strided_batches
from vitfocus.data.segmentation.batches import (
    RandomCrop,
    SegmentationBatch,
    largest_label,
    stack_by_size,
    stack_masks,
    whole_images,
)
from vitfocus.data.segmentation.dataset import IGNORE, SegmentationDataset, open_masks
from vitfocus.tasks.base import DENSE_TASK_KEYS, RunContext, Task, build_model, model_arguments
from vitfocus.tasks.segmentation.evaluation import InferenceSettings, class_counts, predict, scores_of
from vitfocus.treatments.builder import split_library
from vitfocus.treatments.spec import split_spec

if TYPE_CHECKING:
    from accelerate import Accelerator

_CHECKED = 8  # masks of each split whose classes are checked before training; the others are when they are read


class SegmentationTask(Task):
    """UperNet, SegFormer or a decoder of segmentation-models-pytorch on any backbone."""

    name: ClassVar[str] = "segment"
    best: ClassVar[str] = "miou"
    reads: ClassVar[Mapping[str, frozenset[str]]] = DENSE_TASK_KEYS

    train: SegmentationDataset
    val: SegmentationDataset

    def open_data(self) -> None:
        """Open both splits; the number of classes is the data set's or model.arguments.num_classes."""
        data, (least, most) = self.recipe.data, self.recipe.segment.scale
        if not 0 < least <= most:
            raise VitfocusError(
                f"segment.scale={least:g}, {most:g} is not a range of factors above 0; expected the smallest first."
            )
        self.train, self.val = open_masks(data, "train"), open_masks(data, "val")
        for split, masks in (("train", self.train), ("val", self.val)):
            if not len(masks):
                raise VitfocusError(f"The {split} split of {data.source} has no images.")
        names, given = list(self.train.classes), self.recipe.model.arguments.get("num_classes")
        if given is None and not names:
            raise VitfocusError(
                f"{data.root} does not say which classes its masks have: write their names into classes.txt, one per "
                "line, or set model.arguments.num_classes."
            )
        count = int(given) if given is not None else len(names)
        self.classes = (names + [f"class {number}" for number in range(len(names), count)])[:count]

    def build_model(self) -> nn.Module:
        """The recipe's segmenter."""
        model = build_model(self.recipe, self.arguments())
        if split_library(split_spec(self.recipe.model.spec)[0])[0] not in COMPOSED_MODELS:
            raise VitfocusError(
                f"{self.recipe.model.spec} predicts one label per image, not one per pixel: add a head, such as "
                f"upernet:{self.recipe.model.spec}."
            )
        self.dry_run(model, self.recipe.data.size, model)
        return model

    def arguments(self) -> dict[str, Any]:
        return model_arguments(self.recipe, len(self.classes))

    @property
    def inference_settings(self) -> InferenceSettings:
        """Sliding window, flip and size at test time."""
        section = self.recipe.segment
        return InferenceSettings(section.window, section.stride, section.test_flip, section.short_side)

    def start(self, model: nn.Module, context: RunContext) -> None:
        """Check some masks; worker processes make training crops, which are normalised on the device."""
        super().start(model, context)
        for masks in (self.train, self.val):
            for index in evenly_spaced(len(masks), _CHECKED):
                sample = read_or_broken(masks, index)
                if not isinstance(sample, Broken):
                    self._require_classes(torch.from_numpy(sample[1])[None], [masks.name(index)])
        section = self.recipe.segment
        self.auxiliary = getattr(model, "auxiliary", None) is not None
        self.names = ["ce", *["aux"] * self.auxiliary, *["adl"] * self.diversifies]
        crop = RandomCrop(
            self.recipe.data.size,
            scale=section.scale,
            short_side=section.short_side,
            flip=self.recipe.augment.flip,
            photometric=section.photometric,
            most_of_one=section.most_of_one,
            fill=input_spec(model).mean,
        )
        samples = Samples(self.train, crop, self.recipe.engine.seed)
        self.batches = self.sample_batches(samples, stack_masks, self._finish)

    def terms(self, model: nn.Module, batch: SegmentationBatch, epoch: float) -> list[Tensor]:
        """Pixel-wise cross-entropy of both heads, and attention diversification."""
        output = model(batch.images)
        terms = [pixel_loss(logits_of(output), batch.masks)]
        if self.auxiliary:
            terms.append(self.recipe.segment.auxiliary * pixel_loss(output["aux"], batch.masks))
        return terms + self.diversity_terms(epoch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """mIoU, mAcc and aAcc over all validation images; every image counts once."""
        model = unwrap(model)  # a compiled model would be compiled again for every image size
        count = len(self.classes)
        counts = torch.zeros(3, count, dtype=torch.int64, device=accelerator.device)
        settings, device = self.inference_settings, self.context.device
        samples = whole_images(self.val, settings.short_side)
        indices = strided_batches(len(self.val), self.context.partition)
        with eval_mode(model):
            for readable, parts in self.validation_batches(samples, indices, stack_by_size):
                for rows, images, masks in parts:
                    self._require_classes(masks, (self.val.name(readable[row]) for row in rows))
                    with accelerator.autocast():
                        scores = predict(model, self.normalise(images), settings, masks.shape[-2:])
                    counts += class_counts(masks.to(device), scores.argmax(1), count).sum(0)
        return scores_of(accelerator.reduce(counts).cpu())

    def sample_images(self, count: int) -> Tensor | None:
        """A few whole validation images, at the size of the training crops."""
        return first_images(self.val, count // 8, self.recipe.data.size)

    def headline(self, scores: Mapping[str, float]) -> str:
        return ", ".join(f"{METRICS[key].short} {100 * scores[key]:.2f} %" for key in ("miou", "macc", "aacc"))

    def card(self) -> dict[str, Any]:
        """The classes, the data set's name (for its colours and layout), image size and test settings."""
        data = {"source": self.recipe.data.source, "size": self.recipe.data.size}
        return {**super().card(), **data, "test": vars(self.inference_settings)}

    def facts(self) -> dict[str, Any]:
        return {"classes": len(self.classes), "test": vars(self.inference_settings)}

    def _finish(self, batch: tuple[Tensor, Tensor], step: int, rows: Tensor) -> SegmentationBatch:
        images, masks = batch
        order, first = self.batches.order, step * self.recipe.data.batch
        self._require_classes(masks, (self.train.name(int(order.indices(n, n + 1))) for n in (first + rows).tolist()))
        return SegmentationBatch(self.normalise(images), masks.to(self.context.device, non_blocking=True).long())

    def _require_classes(self, masks: Tensor, names: Iterable[str]) -> None:
        """Raise a `VitfocusError` for the first mask with a class that the model lacks; `names` are of its image."""
        if largest_label(masks) < len(self.classes):
            return
        for mask, name in zip(masks, names, strict=True):
            if (largest := largest_label(mask)) >= len(self.classes):
                raise VitfocusError(
                    f"The mask of {name} has the class {largest}, but the model has {len(self.classes)} classes: set "
                    f"model.arguments.num_classes={largest + 1}, or use {IGNORE} for pixels to ignore."
                )


def pixel_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy over all pixels that are not ignored; 0 if there are none.

    >>> pixel_loss(torch.zeros(1, 4, 2, 2), torch.full((1, 2, 2), 255)).item()
    0.0
    """
    total = F.cross_entropy(logits.float(), masks, ignore_index=IGNORE, reduction="sum")
    return total / (masks != IGNORE).sum().clamp(min=1)
