"""`reproduce`: train an item's rows (or resume), measure, draw, and compare with the paper's numbers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitfocus.core.arguments import checked
from vitfocus.core.environment import is_main_process
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.reproduce.figures import draw
from vitfocus.reproduce.items import MEASURES, SCALES, Item, Row, load_item
from vitfocus.reproduce.results import COMPUTED, ItemResult, Measurement, NotMeasured, RowResult, count, measure
from vitfocus.reproduce.runs import DataFolders, PlannedRun, plan_row
from vitfocus.train.recipe import full_key, why_unused
from vitfocus.train.run import train

_FINGERPRINT = ("data_sha256", "model_sha256", "versions", "device", "precision")


class Stopped(Exception):
    """A signal ended a run early; what is done is saved, and the same command resumes."""


@checked
def reproduce(
    name: str,
    scale: str = "smoke",
    *,
    data: Sequence[str | Path] | str | Path = (),
    out: str | Path = "runs/reproduce",
    overrides: Sequence[str] = (),
    rows: Sequence[int] = (),
    images: int | None = None,
    count_only: bool = False,
) -> list[ItemResult]:
    """Reproduce a table or figure of the papers.

    Args:
        name: The item, such as "cb/table4a".
        scale: "smoke", "cifar100" or "imagenet"; see `SCALES`.
        data: A folder, or "NAME=FOLDER" for each data set.
        out: The folder of the runs. Tables share runs, and the same call resumes them.
        overrides: Changes to every recipe, such as "epochs=1".
        rows: Numbers of the rows to run, from 1; all if empty.
        images: The largest number of images that models are evaluated on.
        count_only: Only count parameters and FLOPs; nothing is trained.

    Returns:
        One result, or one per part ("cb/table4" has a and b).

    Raises:
        VitfocusError: If there is no such item, scale or row, or data are missing.
        Stopped: If a signal ended a run early.
    """
    if scale not in SCALES:
        raise VitfocusError(f"There is no scale {scale!r}: {nearest(scale, SCALES)}")
    item = load_item(name)
    if scale == "smoke" and data:
        others = " or ".join(f"--scale {other}" for other in SCALES if other != scale)
        raise VitfocusError(f"The smoke scale draws its own images and reads no --data: leave it out, or use {others}.")
    folders = DataFolders.read([data] if isinstance(data, str | Path) else data)
    folder = Path(out) / scale
    items = [load_item(part) for part in item.parts] or [item]
    picked = [(one, _picked(one, rows)) for one in items]
    plans = []
    for one, chosen in picked:
        needed = None if count_only or not trains(one) else folders
        plans.append((one, chosen, needed, _plan(one, chosen, scale, needed, folder, overrides)))
    _refuse_unused(overrides, [run for *_, runs in plans for run in runs.values() if run is not None])
    outcomes = []
    for one, chosen, needed, runs in plans:
        outcome = ItemResult(one, scale, changed=tuple(overrides), limit=images if trains(one) else None)
        for number, row in enumerate(chosen, 1):
            _say(f"{one.name} at {scale} scale, row {number} of {len(chosen)}: {row.label}")
            outcome.rows.append(_run_row(one, row, runs, outcome, needed, images))
        if count_only and trains(one) and any(row.model for row in chosen):
            outcome.missing.append("A dash marks what --count leaves out: nothing was trained, measured or drawn.")
        if not count_only and is_main_process():
            where = folder / "items" / one.name.replace("/", "-")
            outcome.figures = draw(outcome, where, images)
            outcome.save(where)
        outcomes.append(outcome)
    return outcomes


def _plan(
    item: Item, rows: Sequence[Row], scale: str, folders: DataFolders | None, folder: Path, overrides: Sequence[str]
) -> dict[str, PlannedRun | None]:
    """Every row's run, resolved before the first is trained, so that missing data are reported at once.

    Untreated rows that others are compared with are included, picked or not, to count what a treatment adds.
    """
    runs = {row.label: plan_row(item, row, scale, folders, folder, overrides) for row in rows}
    for plain in filter(None, map(item.baseline, rows)):
        if plain.label not in runs:
            runs[plain.label] = plan_row(item, plain, scale, None, folder, overrides)
    return runs


def _refuse_unused(overrides: Sequence[str], runs: Sequence[PlannedRun]) -> None:
    """Refuse an override that has no effect on any run; it may have none on some of them."""
    planned = [run.recipe for first in runs for run in (first, *first.before) if run.recipe is not None]
    for key in (text.partition("=")[0].strip() for text in overrides):
        whys = [why_unused(recipe, full_key(key, recipe.task)) for recipe in planned if key != "task"]
        if whys and all(whys):
            raise VitfocusError(whys[0])


def trains(item: Item) -> bool:
    """Whether an item needs trained models: it has figures, or measures more than can be counted."""
    return bool(item.figures) or any(MEASURES[name].source not in ("counted", "computed") for name in item.measures)


def _picked(item: Item, rows: Sequence[int]) -> list[Row]:
    for number in rows:
        if not 1 <= number <= len(item.rows):
            raise VitfocusError(f"{item.name} has rows 1 to {len(item.rows)}, not {number}.")
    return [row for number, row in enumerate(item.rows, 1) if not rows or number in rows]


def _run_row(
    item: Item,
    row: Row,
    runs: dict[str, PlannedRun | None],
    outcome: ItemResult,
    folders: DataFolders | None,
    images: int | None,
) -> RowResult:
    """Train a row and measure it; without `folders`, only count it."""
    run = runs[row.label]
    if row.computed:
        return RowResult(row, outcome.scale, values=COMPUTED[row.computed]())
    if run is None:
        why = row.quoted or f"{row.model} is only counted, at ImageNet scale"
        outcome.missing.append(f"{row.label} is quoted from the paper: {why}.")
        return RowResult(row, outcome.scale)
    results: dict[str, Any] = {}
    if run.recipe is not None and folders is not None:
        results = train_run(run)
    counts = results.get("train_images"), results.get("val_images")
    found = RowResult(row, outcome.scale, run, counts if None not in counts else None)  # type: ignore[arg-type]
    found.trained = bool(results)
    found.fingerprint = {key: results[key] for key in _FINGERPRINT if key in results}
    for name in item.measures:
        value: Measurement | NotMeasured
        if MEASURES[name].source == "counted":
            plain = item.baseline(row)
            value = count(name, *counted_on(item, row, run, runs.get(plain.label) if plain else None, folders))
        elif folders is None:
            continue
        elif run.recipe is None:
            value = NotMeasured(f"{row.label} is only counted at the scale {run.scale}, not trained")
        else:
            value = measure(name, run, results, folders, images)
        if isinstance(value, NotMeasured):
            if name in row.paper or (MEASURES[name].source != "counted" and run.recipe is not None):
                outcome.missing.append(f"Not measured: {value.why}.")
        else:
            found.values[name] = value
            outcome.missing += [note for note in value.notes if "generated" in note]
    return found


def counted_on(
    item: Item, row: Row, run: PlannedRun, plain: PlannedRun | None, folders: DataFolders | None
) -> tuple[PlannedRun, PlannedRun | None]:
    """The runs whose models are counted: the row's, or those of the model that the paper counted."""
    if not item.count_on:
        return run, plain
    swapped = [Row(row.label, item.count_on, treat, set=row.set) for treat in (row.treat, "")]
    counted_runs = [plan_row(item, one, run.scale, folders, run.folder.parent) for one in swapped]
    assert counted_runs[0] is not None
    return counted_runs[0], counted_runs[1] if row.treat else None


def train_run(run: PlannedRun) -> dict[str, Any]:
    """Train a run, resume it, or read its results; runs that it depends on come first."""
    for first in run.before:
        train_run(first)
    assert run.recipe is not None
    results = train(run.recipe, out=run.folder, resume="auto")
    if not results.get("finished"):
        raise Stopped(str(run.folder))
    return results


def _say(text: str) -> None:
    if is_main_process():
        print(text, file=sys.stderr, flush=True)
