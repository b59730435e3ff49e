"""The loop: one decoded batch feeds every condition of its group and every model, and each image counts once.

Corruption, normalisation and models run on the device, without waiting for it; outcomes come back when a part is kept:
every twenty seconds, at the end, and when anything goes wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitfocus.errors import VitfocusError
from vitfocus.robustness.cells import Watched
from vitfocus.robustness.pixels import PixelModel
from vitfocus.robustness.plan import Columns, Group, Plan, Samples, in_order
from vitfocus.robustness.processes import Processes
from vitfocus.robustness.progress import Advance, progress
from vitfocus.robustness.runfolder import RunFolder
from vitfocus.robustness.sources import Batch, Share, digest_of

KEEP_EVERY = 20.0
"""Seconds of work that a crash may cost."""


def run(
    plan: Plan,
    models: Sequence[PixelModel],
    classes: int,
    processes: Processes,
    batch_size: int,
    folder: RunFolder | None = None,
    show: bool = True,
    title: str = "Evaluating",
) -> tuple[Samples, dict[str, str]]:
    """Measure every condition; return the samples on every process, and a digest of each group's data."""
    kept: dict[str, Columns] = {}
    if folder is not None and processes.first:
        kept = {group.name: _merge(folder.read_parts(group.name)) for group in plan.groups}
    kept = processes.agree(kept)
    done = sum(len(kept[g.name]["positions"]) * len(g.cells) for g in plan.groups if kept.get(g.name))
    samples: Samples = {}
    digests: dict[str, str] = {}
    with progress(title, plan.steps, done, show and processes.first) as advance:
        for group in plan.groups:
            columns = _run_group(
                group, models, classes, processes, batch_size, folder, kept.get(group.name, {}), advance
            )
            digests[group.name] = group.source.digest or digest_of(
                f"{check} {label}" for check, label in zip(columns["checksum"], columns["label"], strict=True)
            )
            for i, cell in enumerate(group.cells):
                samples[cell.name] = {
                    model.name: {k.partition("|")[2]: v for k, v in columns.items() if k.startswith(f"{i}.{j}|")}
                    for j, model in enumerate(models)
                }
    return samples, digests


def _run_group(
    group: Group,
    models: Sequence[PixelModel],
    classes: int,
    processes: Processes,
    batch_size: int,
    folder: RunFolder | None,
    kept: Columns,
    advance: Advance,
) -> Columns:
    share = Share(frozenset(kept["positions"].tolist()) if kept else frozenset(), processes.rank, processes.world)
    parts: list[Columns] = []
    pending: list[dict[str, Tensor]] = []
    last = time.monotonic()

    def keep() -> None:
        if not pending:
            return
        part = {name: torch.cat([item[name] for item in pending]).cpu().numpy() for name in pending[0]}
        pending.clear()
        parts.append(part)
        if folder is not None:
            folder.write_part(group.name, part)

    try:
        for batch in group.source.batches(batch_size, share):
            _check(batch, classes)
            if not (parts or pending):
                _try_size(batch, group, models, processes.device)
            item = {"positions": batch.positions}
            if group.source.digest is None:
                item |= {"checksum": _checksum(batch.images), "label": batch.labels.view(len(batch), -1)[:, 0]}
            batch = batch.to(processes.device)
            for i, cell in enumerate(group.cells):
                for j, outcome in enumerate(cell(batch, models)):
                    item |= {f"{i}.{j}|{name}": values for name, values in outcome.items()}
                advance(len(batch) * processes.world, cell.name)
            pending.append(item)
            if time.monotonic() - last > KEEP_EVERY:
                keep()
                last = time.monotonic()
    finally:
        keep()
    everything = [part for content in processes.gather(parts) for part in content]
    columns = _merge([kept, *everything] if kept else everything)
    _account(group, columns)
    return columns


def _merge(parts: list[Columns]) -> Columns:
    """Parts as one, in order of position; an image that two parts hold (a crash between them) counts once."""
    if not parts:
        return {}
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    _, first = np.unique(columns["positions"], return_index=True)
    return in_order(columns["positions"][first], {name: values[first] for name, values in columns.items()})


def _account(group: Group, columns: Columns) -> None:
    """Every image once, none twice."""
    expected = group.source.count
    found = columns["positions"].tolist() if columns else []
    if not found:
        raise VitfocusError("The data holds no images, so there is nothing to measure.")
    if found != list(range(len(found) if expected is None else expected)):
        raise RuntimeError(f"{group.name}: {len(found)} images were measured, but there are {expected}.")


def _try_size(batch: Batch, group: Group, models: Sequence[PixelModel], device: torch.device) -> None:
    """Ask the models whether they take images of this size, where it is not their own."""
    size = (batch.images.shape[-2], batch.images.shape[-1])
    for model in models:
        if size != model.size and not model.resize and not any(isinstance(cell, Watched) for cell in group.cells):
            model.classes(size, device)


def _check(batch: Batch, classes: int) -> None:
    """What only the data itself can tell: values in range, labels the model knows."""
    images, labels = batch.images, batch.labels
    if images.dtype != torch.uint8:
        if not images.is_floating_point():
            raise VitfocusError(f"Images have dtype {images.dtype}; expected uint8, or floats in [0, 1].")
        low, high = (float(value) for value in images.aminmax())
        if low < -1e-3 or high > 1 + 1e-3:
            raise VitfocusError(
                f"Float images lie in [{low:.3g}, {high:.3g}]; expected [0, 1]: evaluate itself normalises."
            )
    if labels.numel() and (int(labels.max()) >= classes or (labels.ndim == 1 and int(labels.min()) < 0)):
        raise VitfocusError(
            f"The data has the label {int(labels.max() if labels.max() >= classes else labels.min())}, "
            f"but the model knows the classes 0 to {classes - 1}."
        )


def _checksum(images: Tensor) -> Tensor:
    """A number per image by which another set of images is noticed."""
    whole: Any = images if images.dtype == torch.uint8 else images.mul(255).round().to(torch.uint8)
    return whole.flatten(1).sum(1, dtype=torch.int64).cpu()
