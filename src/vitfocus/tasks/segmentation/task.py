"""Semantic segmentation: a class for every pixel, scored by mIoU, mAcc and aAcc."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.anatomy import pixels_of, unwrap
from vitfocus.core.errors import VitfocusError
from vitfocus.core.metrics import METRICS
from vitfocus.core.modules import eval_mode, logits_of
from vitfocus.core.registry import COMPOSED_MODELS
from vitfocus.data.classification.dataset import BrokenLog
from vitfocus.data.sample_loader import SampleBatches, evaluation_indices, read_ahead
from vitfocus.data.sample_order import Stream
from vitfocus.data.segmentation.augmentation import TrainingCrops
from vitfocus.data.segmentation.classes import IGNORE
from vitfocus.data.segmentation.dataset import Masks, WholePictures, largest_label, open_masks
from vitfocus.tasks.base import DiversityTerm, Setting, Task
from vitfocus.tasks.building import build_model, model_arguments, over_several_gpus
from vitfocus.tasks.segmentation.inference import Protocol, predict
from vitfocus.tasks.segmentation.metric import class_counts, iou_by_class, scores_of
from vitfocus.treatments.origin import split_library
from vitfocus.treatments.spec import split_spec

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class Crops:
    """Normalised pictures (B, 3, size, size) and their masks, int64 (B, size, size)."""

    images: Tensor
    masks: Tensor


class Segment(Task):
    """Pictures with masks, and UperNet, SegFormer or a decoder of segmentation-models-pytorch on any backbone."""

    name: ClassVar[str] = "segment"
    best: ClassVar[str] = "miou"
    reads: ClassVar[Mapping[str, frozenset[str]]] = {
        "augment": frozenset({"flip"}),
        "distill": frozenset(),
        "loss": frozenset({"adl_warmup_epochs"}),
        "data": frozenset(
            {"source", "root", "train_split", "val_split", "train_length", "val_length", "size", "batch", "repeats"}
            | {"workers", "broken"}
        ),
    }

    train: Masks
    val: Masks

    def open_data(self) -> None:
        """Open both splits; the classes are the data set's, or as many as model.arguments.num_classes says."""
        data, (least, most) = self.recipe.data, self.recipe.segment.scale
        if not 0 < least <= most:
            raise VitfocusError(
                f"segment.scale is the least and the greatest factor, above 0, not {least:g}, {most:g}."
            )
        self.train, self.val = open_masks(data, "train"), open_masks(data, "val")
        for split, masks in (("train", self.train), ("val", self.val)):
            if not len(masks):
                raise VitfocusError(f"The {split} split of {data.source} holds no picture.")
        names, given = list(self.train.classes), self.recipe.model.arguments.get("num_classes")
        if given is None and not names:
            raise VitfocusError(
                f"{data.root} does not say which classes its masks have: write their names into classes.txt, one a "
                "line, or set model.arguments.num_classes."
            )
        count = int(given) if given is not None else len(names)
        self.classes = (names + [f"class {number}" for number in range(len(names), count)])[:count]

    def build_model(self) -> nn.Module:
        """The recipe's segmenter; over several GPUs its head's normalisations see the whole batch."""
        model = build_model(self.recipe, len(self.classes))
        if split_library(split_spec(self.recipe.model.spec)[0])[0] not in COMPOSED_MODELS:
            raise VitfocusError(
                f"{self.recipe.model.spec} gives one label a picture and not one a pixel: segmentation wants a head on "
                f"it, such as upernet:{self.recipe.model.spec}."
            )
        self.try_model(model, self.recipe.data.size, model)
        if over_several_gpus(self.recipe):
            for part in ("decoder", "auxiliary"):
                if isinstance(head := getattr(model, part, None), nn.Module):
                    setattr(model, part, nn.SyncBatchNorm.convert_sync_batchnorm(head))
        return model

    def arguments(self) -> dict[str, Any]:
        """The number of classes and whatever the recipe says."""
        return model_arguments(self.recipe, len(self.classes))

    @property
    def protocol(self) -> Protocol:
        """How pictures are tested."""
        section = self.recipe.segment
        return Protocol(section.window, section.stride, section.test_flip, section.short_side)

    def start(self, model: nn.Module, setting: Setting) -> None:
        """Training crops are made in worker processes and normalised on the device."""
        data, section, seed = self.recipe.data, self.recipe.segment, self.recipe.engine.seed
        seen = pixels_of(model)
        self.setting = setting
        statistics = (torch.tensor(values, device=setting.device) for values in (seen.mean, seen.std))
        self.mean, self.std = (values[:, None, None] * 255 for values in statistics)
        self.diversity = DiversityTerm(model, self.recipe.loss.adl_warmup_epochs)
        self.auxiliary = getattr(model, "auxiliary", None) is not None
        self.names = ["ce", *["aux"] * self.auxiliary, *self.diversity.names]
        self.train_images, self.val_images = len(self.train), len(self.val)
        crops = TrainingCrops(
            self.train,
            data.size,
            seed,
            scale=section.scale,
            short_side=section.short_side,
            flip=self.recipe.augment.flip,
            photometric=section.photometric,
            most_of_one=section.most_of_one,
            fill=seen.mean,
        )
        self.batches = SampleBatches(
            crops,
            Stream(len(self.train), data.batch, seed, data.repeats),
            setting.share,
            stack,
            self._finish,
            workers=data.workers,
            device=setting.device,
            log=self.broken["train"],
            say=setting.say,
        )

    def iterate(self, start: int, stop: int) -> Generator[Crops, None, None]:
        """Random crops."""
        return self.batches.iterate(start, stop)

    def terms(self, model: nn.Module, batch: Crops, epoch: float) -> list[Tensor]:
        """Cross-entropy of both heads over the pixels that count, and the attention's diversity."""
        output = model(batch.images)
        terms = [pixel_loss(logits_of(output), batch.masks)]
        if self.auxiliary:
            terms.append(self.recipe.segment.auxiliary * pixel_loss(output["aux"], batch.masks))
        return terms + self.diversity(epoch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """mIoU, mAcc and aAcc over all validation pictures, each read once."""
        model = unwrap(model)  # pictures of many sizes would be compiled one by one
        count = len(self.classes)
        counts = torch.zeros(3, count, dtype=torch.int64, device=accelerator.device)
        share, protocol, device = self.setting.share, self.protocol, self.setting.device
        indices = list(evaluation_indices(len(self.val), share))
        whole = WholePictures(self.val, protocol.short_side)
        parts = whole_batches(
            whole, indices, share.size, self.recipe.data.workers, device, self.broken["val"], self.setting.say
        )
        with eval_mode(model):
            for images, masks, _ in self.setting.until_stopped(parts):
                with accelerator.autocast():
                    scores = predict(model, self._normalised(images), protocol, masks.shape[-2:])
                counts += class_counts(masks.to(device), scores.argmax(1), count).sum(0)
        counts = accelerator.reduce(counts).cpu()
        self.iou = iou_by_class(counts, self.classes)
        return scores_of(counts)

    def headline(self, scores: Mapping[str, float]) -> str:
        """The three scores."""
        return ", ".join(f"{METRICS[key].short} {100 * scores[key]:.2f} %" for key in ("miou", "macc", "aacc"))

    def digests(self) -> dict[str, str]:
        """Of both splits."""
        return {"train": self.train.digest(), "val": self.val.digest()}

    def card(self) -> dict[str, Any]:
        """The classes, the data set's name (for its colours and layout), and how pictures are tested."""
        return {
            **super().card(),
            "source": self.recipe.data.source,
            "size": self.recipe.data.size,
            "test": vars(self.protocol),
        }

    def facts(self) -> dict[str, Any]:
        """How pictures were tested."""
        return {"classes": len(self.classes), "test": vars(self.protocol)}

    def _finish(self, batch: tuple[Tensor, Tensor]) -> Crops:
        images, masks = batch
        if (largest := largest_label(masks)) >= len(self.classes):
            raise VitfocusError(
                f"A training mask holds class {largest}, and the model knows {len(self.classes)}: set "
                "model.arguments.num_classes, or mark what does not count with 255."
            )
        device = self.setting.device
        return Crops(self._normalised(images), masks.to(device, non_blocking=True).long())

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.to(self.setting.device, non_blocking=True).float() - self.mean) / self.std


def stack(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Items of one size as a batch."""
    return torch.stack([image for image, _ in items]), torch.stack([mask for _, mask in items])


def pixel_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy over the pixels that count; 0 where none does.

    >>> pixel_loss(torch.zeros(1, 4, 2, 2), torch.full((1, 2, 2), 255)).item()
    0.0
    """
    total = F.cross_entropy(logits.float(), masks, ignore_index=IGNORE, reduction="sum")
    return total / (masks != IGNORE).sum().clamp(min=1)


def whole_batches(
    pictures: WholePictures,
    indices: list[int],
    at_once: int,
    workers: int,
    device: torch.device,
    log: BrokenLog | None = None,
    say: Any = print,
) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Pictures, masks and their indices, in batches of one size; neighbours of the same size come together."""
    log = log or BrokenLog(fatal=True)
    keyed: Any = _Keyed(pictures)
    keys = [indices[start : start + at_once] for start in range(0, len(indices), at_once)]
    for items, broken in read_ahead(keyed, keys, list, workers, device):
        for one in log.add(broken):
            say(f"Left out of the evaluation, unreadable: {one}")
        groups: dict[tuple[Any, ...], list[Any]] = {}
        for index, image, mask in items or ():
            groups.setdefault((image.shape, mask.shape), []).append((index, image, mask))
        for group in groups.values():
            yield *stack([(image, mask) for _, image, mask in group]), [index for index, _, _ in group]


class _Keyed:
    """Pictures with their indices."""

    def __init__(self, pictures: WholePictures) -> None:
        self.pictures = pictures

    def __getitem__(self, index: int) -> Any:
        item = self.pictures[index]
        return (index, *item) if isinstance(item, tuple) else item
