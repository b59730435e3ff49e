"""Image classification: cross-entropy, diversification and distillation losses, top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.anatomy import anatomy, input_spec, unwrap
from vitfocus.core.errors import VitfocusError, reason
from vitfocus.core.modules import eval_mode, logits_of
from vitfocus.data.classification.augmentation import Augmenter, ClassificationBatch, augment_patches
from vitfocus.data.classification.batches import EvaluationBatches, LoaderBatches, ResidentBatches
from vitfocus.data.classification.dataset import ArrayImages, ClassificationDataset, load_all, open_images
from vitfocus.data.loader import SampleOrder
from vitfocus.tasks.base import HEADS, DiversityTerm, RunContext, Task, build_model, model_arguments, start_from
from vitfocus.treatments.save_load import create_model, load

if TYPE_CHECKING:
    from accelerate import Accelerator

    from vitfocus.recipes import Distill, Loss


class Teacher(nn.Module):
    """A frozen model for distillation as in DeiT: it sees the student's images, mixed, erased and normalised.

    Args:
        section: The [distill] section; its teacher is a timm model or a folder that `vitfocus.save` wrote.
        classes: The student's number of classes.
        mean: The mean of the student's normalisation.
        std: The standard deviation of the student's normalisation.
    """

    def __init__(self, section: Distill, classes: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        saved = Path(section.teacher).is_dir()
        if not saved and not section.pretrained and not section.weights:
            raise VitfocusError(
                f"The teacher {section.teacher} has no weights: set distill.weights to a file, "
                "distill.pretrained=true to let timm download them, or name a folder that vitfocus.save wrote."
            )
        self.section = section
        options: dict[str, Any] = {"pretrained": section.pretrained, "num_classes": classes}
        self.net = load(Path(section.teacher)) if saved else create_model(section.teacher, **options).eval()
        if section.weights:
            start_from(self.net, section.weights)
        self.net.requires_grad_(False)
        mean_of_net, std_of_net = (torch.tensor(values) for values in input_spec(self.net)[:2])
        scale, shift = torch.tensor(std) / std_of_net, (torch.tensor(mean) - mean_of_net) / std_of_net
        self.register_buffer("scale", scale[:, None, None], persistent=False)
        self.register_buffer("shift", shift[:, None, None], persistent=False)
        try:
            self.size: tuple[int, int] | None = anatomy(self.net).build_size
        except VitfocusError:  # a convolutional network accepts any size
            self.size = None
        self._try(classes)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        images = images * self.scale + self.shift  # type: ignore[operator]
        if self.size is not None and tuple(images.shape[-2:]) != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return logits_of(self.net(images))

    def _try(self, classes: int) -> None:
        """Run the teacher on one image, so that a misfit is an error before training."""
        try:
            shape = tuple(self(torch.zeros(1, 3, *input_spec(self.net).size)).shape)
        except Exception as error:  # libraries raise many types for unexpected images
            raise VitfocusError(f"The teacher {self.section.teacher} does not accept images: {reason(error)}") from None
        if shape != (1, classes):
            said = f"{shape[1]} classes" if len(shape) == 2 else f"an output of shape {shape}"
            raise VitfocusError(
                f"The teacher {self.section.teacher} returns {said}, but the student has {classes} classes."
            )

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Hard: cross-entropy with the teacher's prediction. Soft: KL divergence at a temperature, times its square."""
        if self.section.kind == "hard":
            return F.cross_entropy(student, teacher.argmax(1))
        heat = self.section.temperature
        targets = F.log_softmax(teacher.float() / heat, 1)
        return F.kl_div(F.log_softmax(student / heat, 1), targets, reduction="batchmean", log_target=True) * heat**2


class Losses:
    """Computes the terms, whose sum is the loss; `names` lists those of this run."""

    def __init__(self, section: Loss, model: nn.Module, teacher: Teacher | None = None) -> None:
        self.section, self.teacher = section, teacher
        self.diversity = DiversityTerm(model, section.adl_warmup_epochs)
        self.names = ["ce", *self.diversity.names] + ["distill"] * (teacher is not None)

    def __call__(self, output: Any, batch: ClassificationBatch, epoch: float) -> list[Tensor]:
        first, second = split_output(output)
        terms = [cross_entropy(first, batch, self.section.smoothing), *self.diversity(epoch)]
        if self.teacher is not None:
            weight = self.teacher.section.weight
            terms[0] = terms[0] * (1 - weight)
            terms.append(weight * self.teacher.loss(second, self.teacher(batch.images)))
        return terms


def cross_entropy(logits: Tensor, batch: ClassificationBatch, smoothing: float) -> Tensor:
    """Cross-entropy with label smoothing and mixed labels; it is linear in the target, so no dense target is needed."""
    loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
    if batch.weight is None or batch.other_weight is None:
        return loss
    other = F.cross_entropy(logits, batch.other_labels, label_smoothing=smoothing)
    return batch.weight * loss + batch.other_weight * other


def split_output(output: Any) -> tuple[Tensor, Tensor]:
    """The logits, and those of the distillation token; the same if the model has none."""
    if isinstance(output, tuple | list):
        return output[0], output[1]
    logits = logits_of(output)
    return logits, logits


class ClassificationTask(Task):
    """Classification with any model of timm, transformers or torchvision."""

    name: ClassVar[str] = "classify"
    best: ClassVar[str] = "top1"

    train: ClassificationDataset
    val: ClassificationDataset

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
        side = self.recipe.data.enlarge or self.recipe.data.size
        self.try_model(model, side, lambda image: self._judged(model(image)))
        return model

    def _judged(self, output: Any) -> None:
        """Raise an error if the model is not a classifier with the right number of classes."""
        logits = split_output(output)[0]
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if shape != (1, self.count):
            raise VitfocusError(
                f"{self.recipe.model.spec} returns {shape} for an image; a classifier of {self.count} classes returns "
                f"(1, {self.count}): change model.spec or model.arguments."
            )

    def arguments(self) -> dict[str, Any]:
        return model_arguments(self.recipe, self.count)

    def start(self, model: nn.Module, context: RunContext) -> None:
        """Keep small data sets on the device; read others in worker processes."""
        data, seed, device, partition = self.recipe.data, self.recipe.engine.seed, context.device, context.partition
        self.context = context
        self.mean, self.std, _ = mean, std, _ = input_spec(model)
        teacher = None
        if self.recipe.distill.teacher:
            teacher = Teacher(self.recipe.distill, self.count, mean, std).to(device)
        self.losses = Losses(self.recipe.loss, model, teacher)
        side, width = self.recipe.augment.patchwise, data.enlarge or data.size
        if side and (side == 1 or width % side):
            raise VitfocusError(f"augment.patchwise={side} does not divide images of {width} pixels into patches.")
        self.names = [*self.losses.names, *["patchwise"] * bool(side)]
        mixes = self.recipe.augment.mix_probability and (self.recipe.augment.mixup or self.recipe.augment.cutmix)
        if mixes and partition.size % 2 and partition.size < partition.batch:
            raise VitfocusError(
                f"batch={partition.batch} is divided into parts of {partition.size} images, but mixup and cutmix mix "
                "pairs of neighbours: choose a batch size that makes every part even."
            )
        small = isinstance(self.train, ArrayImages) and isinstance(self.val, ArrayImages)
        self.resident = data.resident == "yes" or (data.resident == "auto" and small)
        if data.enlarge and not self.resident:
            raise VitfocusError(
                f"data.enlarge={data.enlarge} is for images that are kept on the device; these are read at data.size."
            )
        if self.resident and self.recipe.augment.colour_jitter:
            raise VitfocusError(
                "augment.colour_jitter works for images that are read one by one, but these are kept on the device: "
                "leave it out, or set data.resident=no."
            )
        if self.resident and data.crop != type(data)().crop:
            context.say(f"Images that are kept on the device are evaluated whole: data.crop={data.crop:g} is not used.")
        self.augmenter = augmenter = Augmenter(self.recipe.augment, mean, std, device, device_crop=self.resident)
        if self.resident:
            pixels, labels = self._load("train", context)
            shown = self._load("val", context)
            self.train_images = len(labels)
            order = SampleOrder(len(labels), data.batch, seed, data.repeats, device=device)
            self.batches: ResidentBatches | LoaderBatches = ResidentBatches(
                pixels, labels, order, augmenter, partition, context.compiled, data.enlarge
            )
            self.validation = EvaluationBatches(data, partition, mean, std, device, resident=shown)
        else:
            self.train_images = len(self.train)
            groups = getattr(self.train, "groups", ())
            order = SampleOrder(len(self.train), data.batch, seed, data.repeats, groups, device="cpu")
            log, val_log, say = self.broken["train"], self.broken["val"], context.say
            self.batches = LoaderBatches(self.train, data, order, augmenter, partition, log, say, device, self.count)
            self.validation = EvaluationBatches(
                data, partition, mean, std, device, images=self.val, log=val_log, say=say, classes=self.count
            )
        self.val_images = self.validation.length

    def capturable_batches(self) -> ResidentBatches | None:
        return self.batches if isinstance(self.batches, ResidentBatches) else None

    def terms(self, model: nn.Module, batch: ClassificationBatch, epoch: float) -> list[Tensor]:
        """Cross-entropy, attention diversification and distillation."""
        return self.losses(model(batch.images), batch, epoch)

    def first_pass(self, model: nn.Module, batch: ClassificationBatch) -> Tensor | None:
        """Cross-entropy on images whose patches are augmented, where the recipe asks for it."""
        side = self.recipe.augment.patchwise
        if not side:
            return None
        images = augment_patches(batch.images, side, self.augmenter.normalise)
        return cross_entropy(split_output(model(images))[0], batch, self.recipe.loss.smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Top-1, top-5 and cross-entropy; every image counts once."""
        sums = torch.zeros(4, dtype=torch.float64, device=accelerator.device)
        with eval_mode(model), closing(iter(self.validation)) as parts:
            for images, labels, counts in self.context.until_stopped(parts):
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

    def sample_images(self, count: int) -> Tensor:
        return self.validation.first(count)

    def headline(self, scores: Mapping[str, float]) -> str:
        return f"top-1 {100 * scores['top1']:.2f} %, top-5 {100 * scores['top5']:.2f} %, loss {scores['loss']:.4f}"

    def facts(self) -> dict[str, Any]:
        crop = 1.0 if self.resident else self.recipe.data.crop
        data = self.recipe.data
        preprocessing = {"size": data.enlarge or data.size, "mean": self.mean, "std": self.std, "crop": crop}
        return {"classes": self.count, "resident": self.resident, "preprocessing": preprocessing}

    def head_names(self, model: nn.Module) -> set[str]:
        try:
            root: Any = anatomy(model).root
        except VitfocusError:  # the classifier is not a transformer
            root = unwrap(model)
        if not hasattr(root, "get_classifier"):  # only timm's models have it
            return {name for name, _ in unwrap(model).named_parameters() if name.split(".")[0] in HEADS}
        found = root.get_classifier()
        heads = [head for head in (found if isinstance(found, tuple) else (found,)) if isinstance(head, nn.Module)]
        parts = {id(parameter) for head in heads for parameter in head.parameters()}
        return {name for name, parameter in model.named_parameters() if id(parameter) in parts}

    def _load(self, split: str, context: RunContext) -> tuple[Tensor, Tensor]:
        images = self.train if split == "train" else self.val
        pixels, labels, skipped = load_all(images, self.recipe.data, self.broken[split])
        for one in skipped:
            context.say(f"Skipped an unreadable image: {one}")
        if len(labels) and int(labels.max()) >= self.count:
            what = {"train": "training", "val": "validation"}[split]
            raise VitfocusError(
                f"The {what} images have labels up to {int(labels.max())}, but the model has {self.count} classes: "
                "set model.arguments.num_classes."
            )
        return pixels, labels
