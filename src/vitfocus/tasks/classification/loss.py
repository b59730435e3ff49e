"""The terms of the classification loss, each as it is added: cross-entropy, attention diversification, distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.core.modules import logits_of
from vitfocus.data.augmentation import Batch
from vitfocus.tasks.base import DiversityTerm
from vitfocus.tasks.classification.distillation import Teacher

if TYPE_CHECKING:
    from vitfocus.recipes.settings import Loss


class Losses:
    """Computes the terms; their sum is the loss. `names` are those that occur."""

    def __init__(self, section: Loss, model: nn.Module, teacher: Teacher | None = None) -> None:
        self.section, self.teacher = section, teacher
        self.diversity = DiversityTerm(model, section.adl_warmup_epochs)
        self.names = ["ce", *self.diversity.names] + ["distill"] * (teacher is not None)

    def __call__(self, output: Any, batch: Batch, epoch: float) -> list[Tensor]:
        """The terms in the order of `names`."""
        first, second = split_output(output)
        terms = [cross_entropy(first, batch, self.section.smoothing), *self.diversity(epoch)]
        if self.teacher is not None:
            weight = self.teacher.section.weight
            terms[0] = terms[0] * (1 - weight)
            terms.append(weight * self.teacher.loss(second, self.teacher(batch.images)))
        return terms


def cross_entropy(logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
    """Cross-entropy with smoothed, mixed labels: linear in the target, so a mixture needs no dense one."""
    loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
    if batch.share is None or batch.rest is None:
        return loss
    return batch.share * loss + batch.rest * F.cross_entropy(logits, batch.others, label_smoothing=smoothing)


def split_output(output: Any) -> tuple[Tensor, Tensor]:
    """The logits, and those of the distillation token where the model has one (else the same)."""
    if isinstance(output, tuple | list):
        return output[0], output[1]
    logits = logits_of(output)
    return logits, logits
