"""The evaluation engine: one loop for every task. Each decoded batch is used for all conditions and all models.

An `EvaluationPlan` divides a suite into groups. A group is a source of images and a set of conditions; a condition
changes a batch and scores a model on it. Outcomes are stored per image, by position, condition and model, so that an
interrupted run can be resumed with any batch size and any number of processes. The device is synchronised only when
outcomes are saved: every twenty seconds, at the end, and after an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitfocus.core.arguments import conditions, refuse_unused
from vitfocus.core.environment import Processes
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import home_path
from vitfocus.core.progress import Progress
from vitfocus.data.image_files import digest_of
from vitfocus.robustness.batches import EvaluationBatch, Source, checksums
from vitfocus.robustness.metrics import Summary
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.results import Samples
from vitfocus.robustness.run_folder import Columns, RunFolder
from vitfocus.robustness.suites import DataForm, Suite

Outcome = dict[str, Tensor | list[str]]  # one entry per image

SAVE_EVERY = 20.0
"""Seconds between two saves, which is the work that a crash may cost."""


@dataclass(frozen=True)
class EvaluationArguments:
    """One call of `evaluate`: the suite with its options, the models, the data, and how to run."""

    suite: Suite
    options: Any
    models: tuple[PixelModel, ...]
    data: Any
    processes: Processes
    batch_size: int | None = None
    limit: int | None = None
    seed: int = 0
    workers: int = 0
    progress: bool = False
    out: str | Path | None = None
    normalised: bool = False

    @property
    def device(self) -> torch.device:
        return self.processes.device

    @property
    def folder(self) -> Path | None:
        return home_path(self.data) if isinstance(self.data, str | os.PathLike) else None

    def require_folder(self, layout: str) -> Path:
        """The data's folder, or an error that says what was expected."""
        if self.folder is None:
            raise VitfocusError(f"The suite {self.suite.name} reads a folder: {layout}.")
        if not self.folder.is_dir():
            raise VitfocusError(f"There is no folder {self.folder}; the suite {self.suite.name} reads {layout}.")
        return self.folder

    def refuse_unused(self, form: DataForm) -> None:
        """Refuse options that have no effect on such data, unless they have their default, False, "val" or "shapes"."""
        declared = conditions(type(self.options))
        harmless = {name: (getattr(type(self.options), name), "val", "shapes") for name in declared}
        values = {name: getattr(self.options, name) for name in declared}
        given = [name for name, value in values.items() if value is not False and value not in harmless[name]]
        refuse_unused(given, declared, form)

    @property
    def reading(self) -> dict[str, Any]:
        """How an `ItemSource` reads: worker processes, and pinned memory for a GPU."""
        return {"workers": self.workers, "pin": self.device.type == "cuda"}


@dataclass(frozen=True)
class Condition:
    """One condition, such as "fog/3".

    `change(batch)` returns the images for all models, `attack(model, batch)` those for one model; without either, the
    images of the batch are used. `score(model, images, batch)` returns an outcome with one entry per image.
    """

    name: str
    score: Callable[[PixelModel, Any, EvaluationBatch], Outcome]
    change: Callable[[EvaluationBatch], Any] | None = None
    attack: Callable[[PixelModel, EvaluationBatch], Any] | None = None

    def __call__(self, batch: EvaluationBatch, models: Sequence[PixelModel]) -> list[Outcome]:
        """Each model's outcome on the batch under this condition."""
        images = batch.images if self.change is None else self.change(batch)
        outcomes = []
        for model in models:
            if self.attack is not None:
                images = self.attack(model, batch)
            with torch.no_grad():
                outcomes.append(self.score(model, images, batch))
        return outcomes


@dataclass(frozen=True)
class Group:
    """Conditions that share their images, so that each batch is read once."""

    name: str
    source: Source
    conditions: tuple[Condition, ...]


@dataclass(frozen=True)
class ModelResults:
    """The results of one model: its summary, outcomes per image to keep, and JSON files for the folder of the run."""

    summary: Summary
    samples: Mapping[str, Columns] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationPlan:
    """What a suite measures in one call.

    `protocol` goes into the fingerprint; `reduce` turns one model's outcomes by condition into its numbers; `prepare`
    refuses a batch that cannot be measured, or changes it; `batch_sizes` are the defaults on a CPU and on a GPU. With
    `resize`, models scale images to their own size. `total` counts the images of all groups: the largest, or the sum.
    `unit` is what progress counts.
    """

    groups: tuple[Group, ...]
    protocol: Mapping[str, Any]
    reduce: Callable[[Mapping[str, Columns], int], ModelResults]
    notes: tuple[str, ...] = ()
    prepare: Callable[[EvaluationBatch], EvaluationBatch] = lambda batch: batch
    resize: bool = False
    batch_sizes: tuple[int, int] = (32, 256)
    total: Callable[[Iterable[int]], int] = max
    libraries: tuple[str, ...] = ()
    unit: str = "image"

    @property
    def conditions(self) -> list[str]:
        return [condition.name for group in self.groups for condition in group.conditions]

    @property
    def steps(self) -> int | None:
        """The number of (image, condition) pairs, or None if it is not known."""
        if any(group.source.count is None for group in self.groups):
            return None
        return sum((group.source.count or 0) * len(group.conditions) for group in self.groups)


def run_plan(
    plan: EvaluationPlan,
    models: Sequence[PixelModel],
    processes: Processes,
    batch_size: int,
    folder: RunFolder | None = None,
    show: bool = True,
    title: str = "Evaluating",
) -> tuple[Samples, dict[str, str], int]:
    """Measure every condition: the outcomes on every process, a digest of each group's data, the number of images."""
    saved: dict[str, Columns] = {}
    if folder is not None and processes.first:
        saved = {group.name: _merge(folder.read_parts(group.name)) for group in plan.groups}
    saved = processes.broadcast(saved)
    done = sum(len(saved[g.name]["positions"]) * len(g.conditions) for g in plan.groups if saved.get(g.name))
    outcomes: Samples = {}
    digests: dict[str, str] = {}
    counts: list[int] = []
    left = f", {plan.steps - done:,} {plan.unit} evaluations" if plan.steps is not None else ""
    with Progress(title, plan.steps, done, announcement=f"{title}{left}.", show=show and processes.first) as progress:
        for group in plan.groups:
            part = saved.get(group.name, {})
            columns = _run_group(group, plan.prepare, models, processes, batch_size, folder, part, progress)
            counts.append(len(columns["positions"]))
            digests[group.name] = group.source.digest or digest_of(map(str, columns["checksum"].tolist()))
            for i, condition in enumerate(group.conditions):
                outcomes[condition.name] = {
                    model.name: {k.partition("|")[2]: v for k, v in columns.items() if k.startswith(f"{i}.{j}|")}
                    for j, model in enumerate(models)
                }
    return outcomes, digests, plan.total(counts)


def read_digests(plan: EvaluationPlan, processes: Processes, batch_size: int) -> dict[str, str]:
    """A digest of the data of each group, without measuring anything; data that are not files are read for it."""
    digests: dict[str, str] = {}
    for group in plan.groups:
        if group.source.digest is not None:
            digests[group.name] = group.source.digest
            continue
        batches = group.source.batches(batch_size, rank=processes.rank, world=processes.world)
        parts = [
            {"positions": batch.positions.numpy(), "checksum": checksums(batch).numpy()}
            for batch in map(plan.prepare, batches)
        ]
        columns = _merge([part for content in processes.gather(parts) for part in content])
        digests[group.name] = digest_of(map(str, columns["checksum"].tolist() if columns else []))
    return digests


def _run_group(
    group: Group,
    prepare: Callable[[EvaluationBatch], EvaluationBatch],
    models: Sequence[PixelModel],
    processes: Processes,
    batch_size: int,
    folder: RunFolder | None,
    saved: Columns,
    progress: Progress,
) -> Columns:
    """Measure the unsaved part of a group; images that are not files are read again and compared by checksum."""
    sums = (saved[key].tolist() for key in ("positions", "checksum") if "checksum" in saved)
    known: dict[int, int] = dict(zip(*sums, strict=True))
    done = frozenset(saved["positions"].tolist()) if saved and not known else frozenset[int]()
    parts: list[Columns] = []
    pending: list[dict[str, Any]] = []

    def save() -> None:
        if not pending:
            return
        part = {name: _joined([item[name] for item in pending]) for name in pending[0]}
        pending.clear()
        _refuse_nan(part, group, models)
        parts.append(part)
        if folder is not None:
            folder.write_part(group.name, part)

    last = time.monotonic()
    try:
        for batch in map(prepare, group.source.batches(batch_size, done, processes.rank, processes.world)):
            item: dict[str, Any] = {"positions": batch.positions}
            if group.source.digest is None:
                item["checksum"] = checksums(batch)
                if known and _all_known(item, known):
                    continue
            batch = batch.to(processes.device)
            for i, condition in enumerate(group.conditions):
                for j, outcome in enumerate(condition(batch, models)):
                    item |= {f"{i}.{j}|{name}": values for name, values in outcome.items()}
                progress.advance(len(batch) * processes.world, condition.name)
            if not (parts or pending):
                _refuse_nan({name: _joined([values]) for name, values in item.items()}, group, models)
            pending.append(item)
            if time.monotonic() - last > SAVE_EVERY:
                save()
                last = time.monotonic()
    finally:
        save()
    if known and group.source.count is not None and max(known) >= group.source.count:
        raise VitfocusError(
            _OTHER_DATA.format(f"there were at least {max(known) + 1} images, now {group.source.count}")
        )
    everything = [part for content in processes.gather(parts) for part in content]
    columns = _merge([saved, *everything] if saved else everything)
    expected, found = group.source.count, columns["positions"].tolist() if columns else []
    if not found:
        raise VitfocusError("The data has no images, so there is nothing to measure.")
    if found != list(range(len(found) if expected is None else expected)):
        raise RuntimeError(f"{group.name}: {len(found)} images were measured, but there are {expected}.")
    return columns


def _joined(parts: Sequence[Tensor | list[str]]) -> Any:
    """One column of several batches: numbers, or lines of text."""
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)]).cpu().numpy()
    return np.array([line for part in parts for line in part], object)


def _merge(parts: list[Columns]) -> Columns:
    """Join parts in the order of positions; if an image is in two parts, its first outcome is kept."""
    if not parts:
        return {}
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    _, first = np.unique(columns["positions"], return_index=True)
    return {name: values[first] for name, values in columns.items()}


_OTHER_DATA = "The data differ from those that this run began with ({}), so it cannot be resumed: use another folder."


def _all_known(item: Mapping[str, Tensor], known: Mapping[int, int]) -> bool:
    """Whether a whole batch was measured before; an image that was measured before must not have changed."""
    pairs = list(zip(item["positions"].tolist(), item["checksum"].tolist(), strict=True))
    for position, found in pairs:
        if known.get(position, found) != found:
            raise VitfocusError(_OTHER_DATA.format(f"image {position} or its label differs"))
    return all(position in known for position, _ in pairs)


def _refuse_nan(part: Columns, group: Group, models: Sequence[PixelModel]) -> None:
    """Refuse outputs with NaN, which would count as wrong predictions."""
    for key, values in part.items():
        if values.dtype.kind == "f" and np.isnan(values).any():
            place, _, _ = key.partition("|")
            condition, model = (int(number) for number in place.split("."))
            image = int(part["positions"][np.isnan(values).reshape(len(values), -1).any(1)][0])
            raise VitfocusError(
                f"{models[model].name} returned NaN for image {image} ({group.conditions[condition].name}): it cannot "
                "be scored."
            )
