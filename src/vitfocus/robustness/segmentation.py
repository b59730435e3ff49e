"""Segmentation under noise, the protocol of Context Broadcasting's Table 9: five kinds of noise, five repeats each.

Every condition is scored by mIoU over a confusion matrix that is added up batch by batch; a random noise is drawn anew
for each repeat, and its mean is given with the 95 % interval of the repeats. A blur draws nothing and runs once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from vitfocus.errors import VitfocusError
from vitfocus.robustness.fingerprint import versions
from vitfocus.robustness.noise import NOISES, REPEATS, add_noise, repeat_interval
from vitfocus.robustness.pixels import PixelModel, evaluating, named_models
from vitfocus.robustness.plan import Summary
from vitfocus.robustness.results import Scores

NAME = "segmentation-noise"


def mean_iou(confusion: Tensor) -> float:
    """mIoU of a confusion matrix (truth by prediction), over the classes that occur in either, in percent.

    >>> mean_iou(torch.tensor([[3, 1, 0], [1, 3, 0], [0, 0, 0]]))
    60.0
    """
    hits = confusion.diagonal().double()
    union = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    return float(100 * (hits[union > 0] / union[union > 0]).mean())


def segmentation_noise(
    model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
    data: Any,
    *,
    seed: int = 0,
    repeats: int = REPEATS,
    ignore: int = 255,
    limit: int | None = None,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    precision: str = "float32",
    out: str | Path | None = None,
) -> Scores:
    """mIoU of one model or several, clean and under each noise.

    `data` is a Dataset of (image, mask), or batches of (images, masks): uint8 (B, 3, H, W), not normalised, and integer
    class maps (B, H, W), in which `ignore` does not count. The models give one map of logits a class, at any size.
    """
    if not isinstance(repeats, int) or repeats < 2:
        raise VitfocusError(f"{NAME} needs repeats of at least 2 for an interval, not {repeats!r}.")
    device = torch.device(device)
    modules = named_models(model)
    models = [PixelModel(name, module, precision) for name, module in modules.items()]
    measured = {one.name: {cell: [] for cell in ("clean", *NOISES)} for one in models}  # type: dict[str, dict[str, list]]
    count, digest = 0, ""
    with evaluating(list(modules.values()), device), torch.no_grad():
        for repeat in range(repeats):
            cells = [c for c in ("clean", *NOISES) if repeat == 0 or not (c == "clean" or c.startswith("blur"))]
            matrices, count, digest = _pass(models, data, cells, seed + repeat, ignore, limit, batch_size, device)
            for name, by_cell in matrices.items():
                for cell, confusion in by_cell.items():
                    measured[name][cell].append(mean_iou(confusion))
    summaries = {name: _summary(values) for name, values in measured.items()}
    fingerprint = {
        "suite": NAME,
        "protocol": {"seed": seed, "repeats": repeats, "ignore": ignore, "precision": precision},
        "data": {"digest": digest, "limit": limit, "images": count},
        "libraries": versions(),
        "models": {one.name: one.describe() for one in models},
    }
    note = f"Random noises: mean and 95 % interval of {repeats} repeats; clean and blur draw nothing and ran once."
    scores = Scores(NAME, count, summaries, (note,), fingerprint)
    if out is not None:
        scores.save(out)
    return scores


def _pass(
    models: Sequence[PixelModel],
    data: Any,
    cells: Sequence[str],
    seed: int,
    ignore: int,
    limit: int | None,
    batch_size: int | None,
    device: torch.device,
) -> tuple[dict[str, dict[str, Tensor]], int, str]:
    """Every model's confusion matrix in every condition, over the data once."""
    matrices: dict[str, dict[str, Tensor]] = {one.name: {} for one in models}
    count, state = 0, hashlib.blake2b(digest_size=16)
    for images, masks in _batches(data, limit, batch_size or 8):
        state.update(images.contiguous().numpy().tobytes() + masks.contiguous().numpy().tobytes())
        ids = list(range(count, count + len(images)))
        count += len(images)
        images, masks = images.to(device), masks.to(device).long()
        for cell in cells:
            noisy = images if cell == "clean" else add_noise(images, cell, seed=seed, ids=ids)
            for one in models:
                confusion = _confusion(one, noisy, masks, ignore)
                matrices[one.name][cell] = matrices[one.name].get(cell, 0) + confusion
    if count == 0:
        raise VitfocusError("There are no images to segment: the data was empty.")
    return matrices, count, state.hexdigest()


def _confusion(model: PixelModel, images: Tensor, masks: Tensor, ignore: int) -> Tensor:
    logits = model(images)
    if logits.ndim != 4:
        raise VitfocusError(f"{model.name} gives {tuple(logits.shape)}; {NAME} needs a map of logits a class.")
    classes = logits.shape[1]
    if logits.shape[-2:] != masks.shape[-2:]:
        logits = F.interpolate(logits, size=masks.shape[-2:], mode="bilinear", align_corners=False)
    counted = masks != ignore
    truth, guess = masks[counted], logits.argmax(1)[counted]
    if len(truth) and not 0 <= int(truth.min()) <= int(truth.max()) < classes:
        raise VitfocusError(f"A mask holds class {int(truth.max())}, and {model.name} knows {classes} classes.")
    return torch.bincount(truth * classes + guess, minlength=classes**2).view(classes, classes)


def _batches(data: Any, limit: int | None, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(data, str | Path):
        raise VitfocusError(f"{NAME} takes a data set or batches of (image, mask), not a folder such as {str(data)!r}.")
    source = DataLoader(data, batch_size) if isinstance(data, Dataset) else data
    if isinstance(source, Iterator):
        raise VitfocusError(f"{NAME} reads its data once a repeat: pass a list, loader or data set, not a generator.")
    left = limit
    for pair in source:
        images, masks = pair[0], pair[1]
        if images.dtype != torch.uint8 or images.ndim != 4 or masks.shape != images.shape[:1] + images.shape[2:]:
            shapes = f"{images.dtype} {tuple(images.shape)} and {tuple(masks.shape)}"
            raise VitfocusError(f"{NAME} takes uint8 images (B, 3, H, W) with masks (B, H, W), not {shapes}.")
        if left is not None:
            images, masks = images[:left], masks[:left]
            left -= len(images)
        if len(images):
            yield images.cpu(), masks.cpu()


def _summary(measured: Mapping[str, Sequence[float]]) -> Summary:
    cells: dict[str, Summary] = {}
    for cell, values in measured.items():
        cells[cell] = {"miou": values[0]}
        if len(values) > 1:
            mean, half = repeat_interval(values)
            cells[cell] = {"miou": mean, "miou_interval": [mean - half, mean + half], "repeats": list(values)}
    return {"miou": cells["clean"]["miou"], "cells": cells}
