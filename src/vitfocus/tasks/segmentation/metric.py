"""mIoU, mAcc and aAcc from the numbers of correct, true and predicted pixels per class, summed over images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.data.segmentation.layouts import IGNORE


def class_counts(truth: Tensor, guess: Tensor, classes: int, ignore: int = IGNORE) -> Tensor:
    """Count the pixels of each image and class.

    Args:
        truth: True classes (B, ...).
        guess: Predicted classes (B, ...).
        classes: Number of classes.
        ignore: Pixels with this true class are left out.

    Returns:
        The numbers of correct, true and predicted pixels, int64 (B, 3, classes).

    Raises:
        VitfocusError: `truth` has a class outside the range.

    Example:
        >>> class_counts(torch.tensor([[0, 1, 1, 255]]), torch.tensor([[0, 0, 1, 1]]), classes=2).tolist()
        [[[1, 1], [1, 2], [2, 1]]]
    """
    truth, guess = truth.flatten(1), guess.flatten(1)
    counted = truth != ignore
    rows = torch.arange(len(truth), device=truth.device)[:, None].expand_as(truth)[counted]
    truth, guess = truth[counted].long(), guess[counted].long()
    if len(truth) and not 0 <= int(truth.min()) <= int(truth.max()) < classes:
        raise VitfocusError(f"A mask has the class {int(truth.max())}, but the model has {classes} classes.")
    cells = (rows * classes + truth) * classes + guess
    confusion = torch.bincount(cells, minlength=len(counted) * classes**2).view(-1, classes, classes)
    return torch.stack([confusion.diagonal(dim1=1, dim2=2), confusion.sum(2), confusion.sum(1)], 1)


def scores_of(counts: Tensor) -> dict[str, float]:
    """Scores in [0, 1] from counts (3, classes), a sum of `class_counts` over images.

    Returns:
        `miou` over the classes that occur in truth or prediction, `macc` over those in truth, `aacc` over all pixels.

    Example:
        >>> scores_of(torch.tensor([[3, 3, 0], [4, 4, 0], [4, 4, 0]]))
        {'miou': 0.6, 'macc': 0.75, 'aacc': 0.75}
    """
    hits, truth, predicted = counts
    union = truth + predicted - hits
    hits = hits.double()
    return {
        "miou": _mean(hits[union > 0] / union[union > 0]),
        "macc": _mean(hits[truth > 0] / truth[truth > 0]),
        "aacc": float(hits.sum() / truth.sum()) if truth.sum() else 0.0,
    }


def iou_by_class(counts: Tensor, names: Any) -> dict[str, float | None]:
    """The IoU of each class; None for a class that does not occur."""
    hits, truth, predicted = counts
    union = truth + predicted - hits
    values = [float(hit / whole) if whole else None for hit, whole in zip(hits.double(), union, strict=True)]
    return dict(zip(names, values, strict=True))


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
