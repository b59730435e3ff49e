"""Classification: one label an image, scored by top-1, top-5 and cross-entropy."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.anatomy import anatomy, pixels_of, unwrap
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import eval_mode
from vitfocus.data.augmentation import Augmenter, Batch
from vitfocus.data.classification.dataset import Images
from vitfocus.data.classification.evaluation_batches import EvaluationBatches
from vitfocus.data.classification.loader import LoaderBatches, ResidentBatches
from vitfocus.data.classification.sources import is_small, load_all, open_images
from vitfocus.data.sample_order import Stream
from vitfocus.tasks.base import Setting, Task
from vitfocus.tasks.building import HEADS, build_model, model_arguments
from vitfocus.tasks.classification.distillation import Teacher
from vitfocus.tasks.classification.loss import Losses, split_output

if TYPE_CHECKING:
    from accelerate import Accelerator


class Classify(Task):
    """Labelled images, in memory or read one by one, and any classifier of the three libraries."""

    name: ClassVar[str] = "classify"
    best: ClassVar[str] = "top1"

    train: Images
    val: Images

    def open_data(self) -> None:
        """Open both splits, and count the classes."""
        data = self.recipe.data
        self.train = open_images(data, "train")
        self.val = open_images(data, "val", self.train.classes or None)
        given = self.recipe.model.arguments.get("num_classes")
        if given is None and not self.train.classes:
            raise VitfocusError(f"{data.source} does not say how many classes it has: set model.arguments.num_classes.")
        self.count = int(given) if given is not None else len(self.train.classes)
        self.classes = [str(name) for name in self.train.classes]

    def build_model(self) -> nn.Module:
        """The recipe's classifier; with a teacher, its distillation token is trained too."""
        model: Any = build_model(self.recipe, self.count)
        if self.recipe.distill.teacher and hasattr(model, "set_distilled_training"):
            model.set_distilled_training(True)
        self.try_model(
            model, self.recipe.data.enlarge or self.recipe.data.size, lambda image: self._judged(model(image))
        )
        return model

    def _judged(self, output: Any) -> None:
        """Refuse what is no classifier of as many classes."""
        logits = split_output(output)[0]
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if shape != (1, self.count):
            raise VitfocusError(
                f"{self.recipe.model.spec} gives {shape} for an image, and a classifier of {self.count} classes gives "
                f"(1, {self.count}): change model.spec or model.arguments."
            )

    def arguments(self) -> dict[str, Any]:
        """The number of classes, and the image size where it is not the usual one."""
        return model_arguments(self.recipe, self.count)

    def start(self, model: nn.Module, setting: Setting) -> None:
        """Keep the images on the device where they are few; read them in worker processes where not."""
        data, seed, device, share = self.recipe.data, self.recipe.engine.seed, setting.device, setting.share
        self.setting = setting
        self.mean, self.std, _ = mean, std, _ = pixels_of(model)
        teacher = None
        if self.recipe.distill.teacher:
            teacher = Teacher(self.recipe.distill, self.count, mean, std).to(device)
        self.losses = Losses(self.recipe.loss, model, teacher)
        self.names = self.losses.names
        mixes = self.recipe.augment.mix_probability and (self.recipe.augment.mixup or self.recipe.augment.cutmix)
        if mixes and share.size % 2 and share.size < share.batch:
            raise VitfocusError(
                f"batch={share.batch} is divided into parts of {share.size} images, and mixup and cutmix mix pairs of "
                "neighbours: choose a batch of which every part is even."
            )
        small = is_small(self.train) and is_small(self.val)
        self.resident = data.resident == "yes" or (data.resident == "auto" and small)
        if data.enlarge and not self.resident:
            raise VitfocusError(
                f"data.enlarge={data.enlarge} is for images that are kept on the device; these are read at data.size."
            )
        if self.resident and self.recipe.augment.colour_jitter:
            raise VitfocusError(
                "augment.colour_jitter is for images that are read one by one; these are kept on the device: leave it "
                "out, or set data.resident=no."
            )
        if self.resident and data.crop != type(data)().crop:
            setting.say(f"Images that are kept on the device are evaluated whole: data.crop={data.crop:g} is not used.")
        augmenter = Augmenter(self.recipe.augment, mean, std, device, device_crop=self.resident)
        if self.resident:
            pixels, labels = self._load("train", setting)
            shown = self._load("val", setting)
            self.train_images = len(labels)
            stream = Stream(len(labels), data.batch, seed, data.repeats, device=device)
            self.batches: ResidentBatches | LoaderBatches = ResidentBatches(
                pixels, labels, stream, augmenter, share, setting.compiled, data.enlarge
            )
            self.validation = EvaluationBatches(data, share, mean, std, device, resident=shown)
        else:
            self.train_images = len(self.train)
            groups = getattr(self.train, "groups", ())
            stream = Stream(len(self.train), data.batch, seed, data.repeats, groups, device="cpu")
            log, val_log, say = self.broken["train"], self.broken["val"], setting.say
            self.batches = LoaderBatches(self.train, data, stream, augmenter, share, log, say, device, self.count)
            self.validation = EvaluationBatches(data, share, mean, std, device, images=self.val, log=val_log, say=say)
        self.val_images = self.validation.length

    def iterate(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Augmented, normalised, mixed."""
        return self.batches.iterate(start, stop)

    def recordable(self) -> ResidentBatches | None:
        """Images that lie on the device."""
        return self.batches if isinstance(self.batches, ResidentBatches) else None

    def terms(self, model: nn.Module, batch: Batch, epoch: float) -> list[Tensor]:
        """Cross-entropy, and what treatments and a teacher add to it."""
        return self.losses(model(batch.images), batch, epoch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Top-1, top-5 and cross-entropy; every image counts once."""
        sums = torch.zeros(4, dtype=torch.float64, device=accelerator.device)
        with eval_mode(model), closing(iter(self.validation)) as parts:
            for images, labels, counts in self.setting.until_stopped(parts):
                with accelerator.autocast():
                    output: Any = model(images)
                logits = split_output(output)[0].float()
                ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
                loss = F.cross_entropy(logits, labels, reduction="none")
                rows = torch.stack([torch.ones_like(loss), loss, ranked[:, 0].float(), ranked.any(1).float()])
                sums += (rows * counts).sum(1).double()
        count, loss_sum, first, five = accelerator.reduce(sums).tolist()
        count = max(1.0, count)
        return {"top1": first / count, "top5": five / count, "loss": loss_sum / count}

    def headline(self, scores: Mapping[str, float]) -> str:
        """Both accuracies and the loss."""
        return f"top-1 {100 * scores['top1']:.2f} %, top-5 {100 * scores['top5']:.2f} %, loss {scores['loss']:.4f}"

    def digests(self) -> dict[str, str]:
        """Of both splits."""
        return {"train": self.train.digest(), "val": self.val.digest()}

    def facts(self) -> dict[str, Any]:
        """How images were kept and prepared."""
        crop = 1.0 if self.resident else self.recipe.data.crop
        data = self.recipe.data
        preprocessing = {"size": data.enlarge or data.size, "mean": self.mean, "std": self.std, "crop": crop}
        return {"classes": self.count, "resident": self.resident, "preprocessing": preprocessing}

    def head_names(self, model: nn.Module) -> set[str]:
        """The classifier's parameters."""
        try:
            root: Any = anatomy(model).root
        except VitfocusError:  # a classifier that is no transformer
            root = unwrap(model)
        if not hasattr(root, "get_classifier"):  # which timm's models have; torchvision and transformers go by names
            return {name for name, _ in unwrap(model).named_parameters() if name.split(".")[0] in HEADS}
        found = root.get_classifier()
        heads = [head for head in (found if isinstance(found, tuple) else (found,)) if isinstance(head, nn.Module)]
        parts = {id(parameter) for head in heads for parameter in head.parameters()}
        return {name for name, parameter in model.named_parameters() if id(parameter) in parts}

    def _load(self, split: str, setting: Setting) -> tuple[Tensor, Tensor]:
        images = self.train if split == "train" else self.val
        pixels, labels, skipped = load_all(images, self.recipe.data, self.broken[split])
        for one in skipped:
            setting.say(f"Skipped an unreadable image: {one}")
        if len(labels) and int(labels.max()) >= self.count:
            what = {"train": "training", "val": "validation"}[split]
            raise VitfocusError(
                f"The {what} images have labels up to {int(labels.max())}, and the model knows {self.count} classes: "
                "set model.arguments.num_classes."
            )
        return pixels, labels
