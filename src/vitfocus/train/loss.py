"""The terms of the training loss, each as it is added: cross-entropy, attention diversification, distillation."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.data.augment import Batch
from vitfocus.train.distill import Teacher
from vitfocus.train.sections import Loss
from vitfocus.treatments import AttentionDiversification, applied, auxiliary_loss


class Losses:
    """Computes the terms; their sum is the loss. `names` are those that occur."""

    def __init__(self, section: Loss, model: nn.Module, teacher: Teacher | None = None) -> None:
        self.section, self.model, self.teacher = section, model, teacher
        self.diversified = any(isinstance(one, AttentionDiversification) for one in applied(model))
        self.names = ["ce"] + ["adl"] * self.diversified + ["distill"] * (teacher is not None)

    def __call__(self, output: Any, batch: Batch, epoch: float) -> list[Tensor]:
        """The terms in the order of `names`."""
        first, second = split_output(output)
        terms = [cross_entropy(first, batch, self.section.smoothing)]
        if self.diversified:
            rise = self.section.adl_warmup_epochs
            terms.append(auxiliary_loss(self.model) * (min(1.0, epoch / rise) if rise else 1.0))
        if self.teacher is not None:
            weight = self.teacher.section.weight
            terms[0] = terms[0] * (1 - weight)
            terms.append(weight * self.teacher.loss(second, self.teacher(batch.images)))
        return terms


def cross_entropy(logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
    """Cross-entropy with smoothed, mixed labels: linear in the target, so a mixture needs no dense one."""
    loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
    if batch.share == 1.0:
        return loss
    return batch.share * loss + (1 - batch.share) * F.cross_entropy(logits, batch.others, label_smoothing=smoothing)


def split_output(output: Any) -> tuple[Tensor, Tensor]:
    """The logits, and those of the distillation token where the model has one (else the same)."""
    if isinstance(output, tuple | list):
        return output[0], output[1]
    logits: Tensor = getattr(output, "logits", output)
    return logits, logits
