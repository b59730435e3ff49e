"""Detection and instance segmentation with Mask R-CNN on COCO or Shapes, scored by COCO's average precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from vitfocus.anatomy import unwrap
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import eval_mode
from vitfocus.data.detection.batches import DetectionAugment, DetectionBatch, collate
from vitfocus.data.detection.dataset import DetectionDataset, mask_tools, open_detections
from vitfocus.data.loader import Samples, first_images, strided_batches
from vitfocus.tasks.base import DENSE_TASK_KEYS, RunContext, Task, build_model
from vitfocus.tasks.detection.evaluation import check_truth, coco_results, coco_scores
from vitfocus.treatments.builder import split_library
from vitfocus.treatments.spec import split_spec

if TYPE_CHECKING:
    from accelerate import Accelerator

_LOSSES = ("loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg")


class DetectionTask(Task):
    """Mask R-CNN ("maskrcnn:NAME") on any timm backbone that returns features."""

    name: ClassVar[str] = "detect"
    best: ClassVar[str] = "box_ap"
    compiles: ClassVar[bool] = False  # the number of proposals varies
    reads: ClassVar[Mapping[str, frozenset[str]]] = DENSE_TASK_KEYS

    train: DetectionDataset
    val: DetectionDataset

    def open_data(self) -> None:
        """Open both splits; missing scoring tools are an error before training."""
        mask_tools()
        data = self.recipe.data
        if split_library(split_spec(self.recipe.model.spec)[0])[0] != "maskrcnn":
            raise VitfocusError(
                f"task=detect trains a detector, but model.spec={self.recipe.model.spec!r} is not one: write "
                "maskrcnn:NAME, such as maskrcnn:vit_tiny_patch16_224."
            )
        self.train = open_detections(data, "train", self.recipe.detect.keep_empty)
        self.val = open_detections(data, "val", classes=self.train.classes)
        check_truth(self.val.truth())
        self.classes = list(self.train.classes)

    def build_model(self) -> nn.Module:
        """The recipe's detector."""
        model: Any = build_model(self.recipe, self.arguments())
        self.dry_run(model, self.recipe.data.size, lambda image: model(list(image)))
        return model

    def arguments(self) -> dict[str, Any]:
        """The number of classes and the image sizes; the transformer resizes its position embedding itself."""
        section, data = self.recipe.model, self.recipe.data
        arguments: dict[str, Any] = {"num_classes": len(self.classes)}
        arguments |= {"min_size": data.size, "max_size": self.recipe.detect.longest}
        if section.drop_path:
            arguments["drop_path_rate"] = section.drop_path
        return {**arguments, **section.arguments}

    def start(self, model: nn.Module, context: RunContext) -> None:
        """Worker processes read and augment training images."""
        super().start(model, context)
        recipe, size, section = self.recipe, self.recipe.data.size, self.recipe.detect
        self.names = [name.removeprefix("loss_") for name in _LOSSES] + ["adl"] * self.diversifies
        sides = (int(section.sides[0]) or size, int(section.sides[1]) or size)
        augment = DetectionAugment(sides, section.longest, recipe.augment.flip, section.jitter)
        self.batches = self.sample_batches(Samples(self.train, augment, recipe.engine.seed), collate, self._finish)

    def terms(self, model: nn.Module, batch: DetectionBatch, epoch: float) -> list[Tensor]:
        """Mask R-CNN's five losses, and attention diversification."""
        losses = model(batch.images, batch.targets)
        return [losses[name] for name in _LOSSES] + self.diversity_terms(epoch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """COCO's average precision of boxes and masks; the first process scores the detections of all."""
        from accelerate.utils import broadcast_object_list, gather_object

        model = unwrap(model)  # DDP's forward pass would wait for processes with fewer batches
        detections = []
        samples, keys = Samples(self.val, read=self.val.image), strided_batches(len(self.val), self.context.partition)
        with eval_mode(model):
            for indices, images in self.validation_batches(samples, keys):
                with accelerator.autocast():
                    predictions = model([self.normalise(image) for image in images])
                ids = [self.val.image_id(index) for index in indices]
                detections += coco_results(predictions, ids, self.val.category_ids)
        if accelerator.num_processes > 1:
            detections = gather_object(detections)
        scores = [coco_scores(self.val.truth(), detections) if accelerator.is_main_process else None]
        if accelerator.num_processes > 1:
            broadcast_object_list(scores)
        assert scores[0] is not None
        return scores[0]

    def sample_images(self, count: int) -> Tensor | None:
        """A few validation images, made square."""
        return first_images(self.val, count // 16, self.recipe.data.size)

    def headline(self, scores: Mapping[str, float]) -> str:
        return ", ".join(
            f"{kind} AP {100 * scores[f'{kind}_ap']:.1f}, AP50 {100 * scores[f'{kind}_ap50']:.1f}"
            for kind in ("box", "mask")
        )

    def card(self) -> dict[str, Any]:
        """Names of the labels 1, 2, ..., and their COCO ids."""
        return {**super().card(), "category_ids": list(self.train.category_ids)}

    def facts(self) -> dict[str, Any]:
        sizes = {"shortest": self.recipe.data.size, "longest": self.recipe.detect.longest}
        return {"classes": len(self.classes), "preprocessing": sizes}

    def _finish(self, batch: DetectionBatch, step: int, rows: Tensor) -> DetectionBatch:
        device = self.context.device
        targets = [{key: value.to(device, non_blocking=True) for key, value in one.items()} for one in batch.targets]
        return DetectionBatch([self.normalise(image) for image in batch.images], targets)
