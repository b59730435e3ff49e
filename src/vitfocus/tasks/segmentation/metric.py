"""mIoU, mAcc and aAcc from a confusion matrix that is added up batch by batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.data.segmentation.classes import IGNORE


def confusion(truth: Tensor, guess: Tensor, classes: int, ignore: int = IGNORE) -> Tensor:
    """How often each class (row) was called each (column), int64 (classes, classes); `ignore` does not count.

    >>> confusion(torch.tensor([0, 1, 1, 255]), torch.tensor([0, 0, 1, 1]), classes=2).tolist()
    [[1, 0], [1, 1]]
    """
    counted = truth != ignore
    truth, guess = truth[counted].long(), guess[counted].long()
    if len(truth) and not 0 <= int(truth.min()) <= int(truth.max()) < classes:
        raise VitfocusError(f"A mask holds class {int(truth.max())}, and the model knows {classes} classes.")
    return torch.bincount(truth * classes + guess, minlength=classes**2).view(classes, classes)


def scores_of(matrix: Tensor) -> dict[str, float]:
    """`miou` over the classes that occur in truth or prediction, `macc` over those in truth, `aacc` over all pixels.

    >>> scores_of(torch.tensor([[3, 1, 0], [1, 3, 0], [0, 0, 0]]))
    {'miou': 0.6, 'macc': 0.75, 'aacc': 0.75}
    """
    hits, truth = matrix.diagonal().double(), matrix.sum(1)
    union = truth + matrix.sum(0) - matrix.diagonal()
    return {
        "miou": _mean(hits[union > 0] / union[union > 0]),
        "macc": _mean(hits[truth > 0] / truth[truth > 0]),
        "aacc": float(hits.sum() / truth.sum()) if truth.sum() else 0.0,
    }


def iou_by_class(matrix: Tensor, names: Any) -> dict[str, float | None]:
    """Each class's IoU; None where it occurs nowhere."""
    hits = matrix.diagonal().double()
    union = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    values = [float(hit / whole) if whole else None for hit, whole in zip(hits, union, strict=True)]
    return dict(zip(names, values, strict=True))


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
