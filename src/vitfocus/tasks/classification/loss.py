"""The terms of the classification loss: cross-entropy, attention diversification, distillation from a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.anatomy import anatomy, pixels_of
from vitfocus.core.errors import VitfocusError, reason
from vitfocus.core.modules import logits_of
from vitfocus.data.classification.augmentation import ClassificationBatch
from vitfocus.tasks.base import DiversityTerm
from vitfocus.tasks.building import start_from
from vitfocus.treatments.save_load import create_model, load

if TYPE_CHECKING:
    from vitfocus.recipes.settings import Distill, Loss


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
        self.net = (
            load(section.teacher)
            if saved
            else create_model(section.teacher, pretrained=section.pretrained, num_classes=classes).eval()
        )
        if section.weights:
            start_from(self.net, section.weights)
        self.net.requires_grad_(False)
        own_mean, own_std, _ = pixels_of(self.net)
        scale = torch.tensor(std) / torch.tensor(own_std)
        shift = (torch.tensor(mean) - torch.tensor(own_mean)) / torch.tensor(own_std)
        self.register_buffer("scale", scale[:, None, None], persistent=False)
        self.register_buffer("shift", shift[:, None, None], persistent=False)
        self.size = self._fixed_size()
        self._try(classes)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """The teacher's logits."""
        images = images * self.scale + self.shift  # type: ignore[operator]
        if self.size is not None and tuple(images.shape[-2:]) != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return logits_of(self.net(images))

    def _try(self, classes: int) -> None:
        """Run the teacher on one image, so that a misfit is an error before training."""
        try:
            shape = tuple(self(torch.zeros(1, 3, *pixels_of(self.net).size)).shape)
        except Exception as error:  # libraries raise many types for unexpected images
            raise VitfocusError(
                f"The teacher {self.section.teacher} does not accept images: {reason(error)}."
            ) from None
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

    def _fixed_size(self) -> tuple[int, int] | None:
        """The image size of a transformer; None for a convolutional network, which accepts any."""
        try:
            return anatomy(self.net).build_size
        except VitfocusError:
            return None


class Losses:
    """Computes the terms, whose sum is the loss; `names` lists those of this run."""

    def __init__(self, section: Loss, model: nn.Module, teacher: Teacher | None = None) -> None:
        self.section, self.teacher = section, teacher
        self.diversity = DiversityTerm(model, section.adl_warmup_epochs)
        self.names = ["ce", *self.diversity.names] + ["distill"] * (teacher is not None)

    def __call__(self, output: Any, batch: ClassificationBatch, epoch: float) -> list[Tensor]:
        """The terms in the order of `names`."""
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
