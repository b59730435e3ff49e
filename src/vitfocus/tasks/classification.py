"""Image classification: cross-entropy, diversification and distillation losses, top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.anatomy import anatomy, input_spec, unwrap
from vitfocus.core.errors import VitfocusError, reason
from vitfocus.core.files import is_folder
from vitfocus.core.modules import eval_mode, logits_of
from vitfocus.data.classification.augmentation import (
    Augmenter,
    ClassificationBatch,
    augment_patches,
    draw_uniform,
    mix,
)
from vitfocus.data.classification.batches import (
    EvaluationBatches,
    ResidentBatches,
    stack_labelled,
    train_transform,
    transformed_images,
)
from vitfocus.data.classification.dataset import ArrayImages, ClassificationDataset, load_all, open_images
from vitfocus.data.loader import SampleBatches, SampleOrder, to_device
from vitfocus.tasks.base import HEADS, RunContext, Task, build_model, model_arguments, start_from
from vitfocus.treatments.save_load import create_model, load

if TYPE_CHECKING:
    from accelerate import Accelerator

    from vitfocus.recipes import Distill


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
        saved = is_folder(section.teacher)
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
        """Run the teacher on one image, so that a mismatch is an error before training."""
        try:
            shape = tuple(self(torch.zeros(1, 3, *input_spec(self.net).size)).shape)
        except Exception as error:  # libraries raise many types for unexpected images
            raise VitfocusError(f"The teacher {self.section.teacher} does not accept images: {reason(error)}") from None
        if shape != (1, classes):
            returned = f"{shape[1]} classes" if len(shape) == 2 else f"an output of shape {shape}"
            raise VitfocusError(
                f"The teacher {self.section.teacher} returns {returned}, but the student has {classes} classes."
            )

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Hard: cross-entropy with the teacher's prediction. Soft: KL divergence at a temperature, times its square."""
        if self.section.kind == "hard":
            return F.cross_entropy(student, teacher.argmax(1))
        heat = self.section.temperature
        targets = F.log_softmax(teacher.float() / heat, 1)
        return F.kl_div(F.log_softmax(student / heat, 1), targets, reduction="batchmean", log_target=True) * heat**2


def cross_entropy(logits: Tensor, batch: ClassificationBatch, smoothing: float) -> Tensor:
    """Cross-entropy with label smoothing and mixed labels; it is linear in the target, so no dense target is needed."""
    loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
    if batch.weight is None or batch.other_weight is None:
        return loss
    other = F.cross_entropy(logits, batch.other_labels, label_smoothing=smoothing)
    return batch.weight * loss + batch.other_weight * other


def supervised_terms(
    output: Any,
    batch: ClassificationBatch,
    smoothing: float,
    teacher: Teacher | None = None,
    cross_entropy: Callable[[Tensor, ClassificationBatch, float], Tensor] = cross_entropy,
) -> list[Tensor]:
    """The cross-entropy of a classifier's output, and with a teacher the distillation loss, both weighted."""
    logits, distilled = split_output(output)
    loss = cross_entropy(logits, batch, smoothing)
    if teacher is None:
        return [loss]
    weight = teacher.section.weight
    return [(1 - weight) * loss, weight * teacher.loss(distilled, teacher(batch.images))]


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
        model: Any = build_model(self.recipe, self.arguments())
        if self.recipe.distill.teacher and hasattr(model, "set_distilled_training"):
            model.set_distilled_training(True)
        side = self.recipe.data.enlarge or self.recipe.data.size
        self.dry_run(model, side, lambda image: self._check_output(model(image)))
        return model

    def _check_output(self, output: Any) -> None:
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
        super().start(model, context)
        data, augment, seed, device = self.recipe.data, self.recipe.augment, self.recipe.engine.seed, context.device
        small = isinstance(self.train, ArrayImages) and isinstance(self.val, ArrayImages)
        self.resident = data.resident == "yes" or (data.resident == "auto" and small)
        self._check_settings()
        self.cross_entropy = torch.compile(cross_entropy, dynamic=False) if context.compiled else cross_entropy
        mean, std, _ = input_spec(model)
        self.preprocessing = {"size": data.enlarge or data.size, "mean": mean, "std": std}
        self.teacher: Teacher | None = None
        if self.recipe.distill.teacher:
            self.teacher = Teacher(self.recipe.distill, self.count, mean, std).to(device)
        optional = {"adl": self.diversifies, "distill": self.teacher is not None, "patchwise": bool(augment.patchwise)}
        self.names = ["ce", *(name for name, used in optional.items() if used)]
        self.augmenter = Augmenter(augment, mean, std, device, device_crop=self.resident)
        evaluated: ClassificationDataset | tuple[Tensor, Tensor] = self.val
        if self.resident:
            pixels, labels = self._load("train")
            self.train_images = len(labels)
            order = SampleOrder(len(labels), data.batch, seed, data.repeats, device=device)
            self.batches: ResidentBatches | SampleBatches = ResidentBatches(
                pixels, labels, order, self.augmenter, context.partition, context.compiled, data.enlarge
            )
            evaluated = self._load("val")
        else:
            samples = transformed_images(self.train, train_transform(data, augment), seed, self.count)
            self.batches = self.sample_batches(samples, stack_labelled, self._finish)
        self.validation = EvaluationBatches(
            evaluated, data, context.partition, self.normalise, self.readers["val"], self.count
        )
        self.val_images = len(self.validation)

    def _check_settings(self) -> None:
        """Refuse settings that do not fit together, and report one that has no effect."""
        data, augment, partition = self.recipe.data, self.recipe.augment, self.context.partition
        side, width = augment.patchwise, data.enlarge or data.size
        if side and (side == 1 or width % side):
            raise VitfocusError(f"augment.patchwise={side} does not divide images of {width} pixels into patches.")
        mixes = augment.mix_probability and (augment.mixup or augment.cutmix)
        if mixes and partition.size % 2 and partition.size < partition.batch:
            raise VitfocusError(
                f"batch={partition.batch} is divided into parts of {partition.size} images, but mixup and cutmix mix "
                "pairs of neighbours: choose a batch size that makes every part even."
            )
        if data.enlarge and not self.resident:
            raise VitfocusError(
                f"data.enlarge={data.enlarge} is for images that are kept on the device; these are read at data.size."
            )
        if self.resident and augment.colour_jitter:
            raise VitfocusError(
                "augment.colour_jitter works for images that are read one by one, but these are kept on the device: "
                "leave it out, or set data.resident=no."
            )
        if self.resident and data.crop != type(data)().crop:
            self.context.say(
                f"Images that are kept on the device are evaluated whole: data.crop={data.crop:g} is not used."
            )

    def _finish(self, batch: tuple[Tensor, Tensor], step: int, rows: Tensor) -> ClassificationBatch:
        """Erase, normalise and mix images that were read and transformed."""
        (pixels, labels), seed, device = batch, self.recipe.engine.seed, self.context.device
        uniform = draw_uniform(seed, step, self.context.partition.batch, self.augmenter.columns)[rows]
        images = self.augmenter(pixels.to(device, non_blocking=True), to_device(uniform, device))
        labels = labels.to(device, non_blocking=True)
        return mix(ClassificationBatch(images, labels, labels), self.recipe.augment, seed, step)

    def capturable_batches(self) -> ResidentBatches | None:
        return self.batches if isinstance(self.batches, ResidentBatches) else None

    def terms(self, model: nn.Module, batch: ClassificationBatch, epoch: float) -> list[Tensor]:
        """Cross-entropy, attention diversification and distillation."""
        output = model(batch.images)
        loss, *distilled = supervised_terms(output, batch, self.recipe.loss.smoothing, self.teacher, self.cross_entropy)
        return [loss, *self.diversity_terms(epoch), *distilled]

    def first_pass(self, model: nn.Module, batch: ClassificationBatch) -> Tensor | None:
        """Cross-entropy on images whose patches are augmented, where the recipe asks for it."""
        side = self.recipe.augment.patchwise
        if not side:
            return None
        images = augment_patches(batch.images, side, self.augmenter.normalise)
        return self.cross_entropy(split_output(model(images))[0], batch, self.recipe.loss.smoothing)

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
        preprocessing = {**self.preprocessing, "crop": crop}
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

    def _load(self, split: str) -> tuple[Tensor, Tensor]:
        """All images of a split and their labels, on the device."""
        pixels, labels = load_all(self.train if split == "train" else self.val, self.recipe.data, self.readers[split])
        if len(labels) and int(labels.max()) >= self.count:
            what = {"train": "training", "val": "validation"}[split]
            raise VitfocusError(
                f"The {what} images have labels up to {int(labels.max())}, but the model has {self.count} classes: "
                "set model.arguments.num_classes."
            )
        return pixels.to(self.context.device), labels.to(self.context.device)
