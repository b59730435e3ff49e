"""Detection and instance segmentation: Mask R-CNN, trained on COCO's layout or Shapes, scored as COCO scores."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from vitfocus.anatomy import unwrap
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import eval_mode
from vitfocus.data.detection.batches import DetectionAugment, DetectionBatch, DetectionSamples, collate
from vitfocus.data.detection.dataset import Detections, mask_tools, open_detections
from vitfocus.data.sample_loader import SampleBatches, evaluation_indices
from vitfocus.data.sample_order import Stream
from vitfocus.tasks.base import DiversityTerm, Setting, Task
from vitfocus.tasks.building import build_with, over_several_gpus
from vitfocus.tasks.detection.inference import Normalise, Searcher
from vitfocus.tasks.detection.metric import coco_scores
from vitfocus.treatments.origin import split_library
from vitfocus.treatments.spec import split_spec

if TYPE_CHECKING:
    from accelerate import Accelerator

_LOSSES = ("loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg")


class Detect(Task):
    """Pictures with objects, and "maskrcnn:NAME" on any timm backbone that gives features."""

    name: ClassVar[str] = "detect"
    best: ClassVar[str] = "box_ap"
    compiles: ClassVar[bool] = False  # proposals are as many as they are
    reads: ClassVar[Mapping[str, frozenset[str]]] = {
        "augment": frozenset({"flip"}),
        "loss": frozenset({"adl_warmup_epochs"}),
        "distill": frozenset(),
        "data": frozenset(
            {"source", "root", "train_split", "val_split", "train_length", "val_length"}
            | {"size", "batch", "repeats", "workers", "broken"}
        ),
    }

    train: Detections
    val: Detections

    def open_data(self) -> None:
        """Open both splits; the tools that the scores need are looked for before an hour of training, too."""
        mask_tools()
        data = self.recipe.data
        if split_library(split_spec(self.recipe.model.spec)[0])[0] != "maskrcnn":
            raise VitfocusError(
                f"task=detect trains a detector, and model.spec={self.recipe.model.spec!r} is none: write "
                "maskrcnn:NAME, such as maskrcnn:vit_tiny_patch16_224."
            )
        self.train = open_detections(data, "train", self.recipe.detect.keep_empty)
        self.val = open_detections(data, "val", classes=self.train.classes)
        if all(one.get("iscrowd") for one in self.val.truth()["annotations"]):
            raise VitfocusError("The validation pictures hold no object, so nothing could be scored: use more of them.")
        self.classes = list(self.train.classes)

    def build_model(self) -> nn.Module:
        """The recipe's detector; over several GPUs its pyramid's normalisations see the whole batch."""
        model: Any = build_with(self.recipe, self.arguments())
        self.try_model(model, self.recipe.data.size, lambda image: model(list(image)))
        if over_several_gpus(self.recipe):
            features = model.backbone.features
            features.resample = nn.SyncBatchNorm.convert_sync_batchnorm(features.resample)
        return model

    def arguments(self) -> dict[str, Any]:
        """The number of classes and the sizes of pictures; the transformer resizes its position embedding itself."""
        section, data = self.recipe.model, self.recipe.data
        arguments: dict[str, Any] = {"num_classes": len(self.classes)}
        arguments |= {"min_size": data.size, "max_size": self.recipe.detect.longest}
        if section.drop_path:
            arguments["drop_path_rate"] = section.drop_path
        return {**arguments, **section.arguments}

    def start(self, model: nn.Module, setting: Setting) -> None:
        """Training pictures in worker processes; those of evaluation as they are."""
        recipe, data, detect = self.recipe, self.recipe.data, self.recipe.detect
        self.setting, self.normalise = setting, Normalise(model, setting.device)
        self.diversity = DiversityTerm(model, recipe.loss.adl_warmup_epochs)
        self.names = [name.removeprefix("loss_") for name in _LOSSES] + self.diversity.names
        self.train_images, self.val_images = len(self.train), len(self.val)
        augment = DetectionAugment(
            (int(detect.sides[0]) or data.size, int(detect.sides[1]) or data.size),
            detect.longest,
            recipe.augment.flip,
            detect.jitter,
        )
        self.batches = SampleBatches(
            DetectionSamples(self.train, augment, recipe.engine.seed),
            Stream(len(self.train), data.batch, recipe.engine.seed, data.repeats),
            setting.share,
            collate,
            self._finish,
            workers=data.workers,
            device=setting.device,
            log=self.broken["train"],
            say=setting.say,
        )

    def iterate(self, start: int, stop: int) -> Generator[DetectionBatch, None, None]:
        """Normalised pictures and their targets."""
        return self.batches.iterate(start, stop)

    def terms(self, model: nn.Module, batch: DetectionBatch, epoch: float) -> list[Tensor]:
        """Mask R-CNN's five losses, and the diversification loss where there is one."""
        losses = model(batch.images, batch.targets)
        return [losses[name] for name in _LOSSES] + self.diversity(epoch)

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """COCO's average precisions of boxes and masks; the first process scores what all have found."""
        from accelerate.utils import broadcast_object_list, gather_object

        setting, workers = self.setting, self.recipe.data.workers
        search = Searcher(self.val, setting.device, setting.share.size, workers, self.broken["val"], setting.say)
        model, indices = unwrap(model), evaluation_indices(len(self.val), setting.share)
        with eval_mode(model):
            batches = setting.until_stopped(search.each(model, indices, accelerator.autocast))
            found = [one for batch in batches for some in batch.values() for one in some]
        if accelerator.num_processes > 1:
            found = gather_object(found)
        scores = [coco_scores(self.val.truth(), found) if accelerator.is_main_process else None]
        if accelerator.num_processes > 1:
            broadcast_object_list(scores)
        assert scores[0] is not None
        return scores[0]

    def headline(self, scores: Mapping[str, float]) -> str:
        """Boxes and masks, each AP and AP50."""
        return ", ".join(
            f"{kind} AP {100 * scores[f'{kind}_ap']:.1f}, AP50 {100 * scores[f'{kind}_ap50']:.1f}"
            for kind in ("box", "mask")
        )

    def digests(self) -> dict[str, str]:
        """Of both splits."""
        return {"train": self.train.digest(), "val": self.val.digest()}

    def card(self) -> dict[str, Any]:
        """The names of the labels 1, 2, ..., and their ids in COCO's json."""
        return {**super().card(), "category_ids": list(self.train.category_ids)}

    def facts(self) -> dict[str, Any]:
        """How pictures were prepared."""
        sizes = {"shortest": self.recipe.data.size, "longest": self.recipe.detect.longest}
        return {"classes": len(self.classes), "preprocessing": sizes}

    def _finish(self, batch: DetectionBatch) -> DetectionBatch:
        device = self.setting.device
        targets = [{key: value.to(device, non_blocking=True) for key, value in one.items()} for one in batch.targets]
        return DetectionBatch([self.normalise(image) for image in batch.images], targets)
