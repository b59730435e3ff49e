"""`reproduce`: train an item's rows (or go on with them), measure, draw, and set the paper's numbers beside ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.processes import is_main_process
from vitfocus.reproduce.computed import COMPUTED
from vitfocus.reproduce.drawing import draw
from vitfocus.reproduce.items import SCALES, Item, Row, load_item
from vitfocus.reproduce.measures import MEASURES
from vitfocus.reproduce.measuring import Absent, Value, counted, measured
from vitfocus.reproduce.outcome import Outcome, RowOutcome
from vitfocus.reproduce.planning import Places, Run, plan_row
from vitfocus.train.recipe import full_key, why_unused
from vitfocus.train.run import train

_FINGERPRINT = ("data_sha256", "model_sha256", "versions", "device", "precision")


class Stopped(Exception):
    """A signal ended a run early; what is done is kept, and the same command goes on."""


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
) -> list[Outcome]:
    """Carry out a table or figure such as "cb/table4a"; one outcome, or one for each part ("cb/table4": a and b).

    `data` is a folder, or "NAME=FOLDER" for each data set; `out` keeps the runs, which tables share and which the same
    call resumes. `overrides` change every recipe ("epochs=1"), `rows` picks rows by number from 1, `images` lowers the
    number of images that models are evaluated on. With `count_only` nothing is trained: parameters and FLOPs alone.
    """
    if scale not in SCALES:
        raise VitfocusError(f"There is no scale {scale!r}: {nearest(scale, SCALES)}")
    item = load_item(name)
    if scale == "smoke" and data:
        others = " or ".join(f"--scale {other}" for other in SCALES if other != scale)
        raise VitfocusError(
            f"The smoke scale draws its own images and reads no --data: leave it out, or take {others}."
        )
    places = Places.read([data] if isinstance(data, str | Path) else data)
    folder = Path(out) / scale
    items = [load_item(part) for part in item.parts] or [item]
    picked = [(one, _picked(one, rows)) for one in items]
    plans = []
    for one, chosen in picked:
        needed = None if count_only or not trains(one) else places
        plans.append((one, chosen, needed, _plan(one, chosen, scale, needed, folder, overrides)))
    _refuse_unused(overrides, [run for *_, runs in plans for run in runs.values() if run is not None])
    outcomes = []
    for one, chosen, needed, runs in plans:
        outcome = Outcome(one, scale, changed=tuple(overrides), limit=images if trains(one) else None)
        for number, row in enumerate(chosen, 1):
            _say(f"{one.name} at {scale} scale, row {number} of {len(chosen)}: {row.label}")
            outcome.rows.append(_carry_out(one, row, runs, outcome, needed, images))
        if count_only and trains(one) and any(row.model for row in chosen):
            outcome.absent.append("A dash stands for what --count leaves out: nothing was trained, measured or drawn.")
        if not count_only and is_main_process():
            where = folder / "items" / one.name.replace("/", "-")
            outcome.figures = draw(outcome, where, images)
            outcome.save(where)
        outcomes.append(outcome)
    return outcomes


def _plan(
    item: Item, rows: Sequence[Row], scale: str, places: Places | None, folder: Path, overrides: Sequence[str]
) -> dict[str, Run | None]:
    """Every row's run, resolved before the first is trained, so that what is missing is said at once.

    Untreated rows that others are compared with are there too, picked or not, for what is added to them to be counted.
    """
    runs = {row.label: plan_row(item, row, scale, places, folder, overrides) for row in rows}
    for plain in filter(None, map(item.baseline, rows)):
        if plain.label not in runs:
            runs[plain.label] = plan_row(item, plain, scale, None, folder, overrides)
    return runs


def _refuse_unused(overrides: Sequence[str], runs: Sequence[Run]) -> None:
    """Refuse what changes no run at all; what does nothing to some of them is for the others."""
    planned = [run.recipe for first in runs for run in (first, *first.before) if run.recipe is not None]
    for key in (text.partition("=")[0].strip() for text in overrides):
        whys = [why_unused(recipe, full_key(key, recipe.task)) for recipe in planned if key != "task"]
        if whys and all(whys):
            raise VitfocusError(whys[0])


def trains(item: Item) -> bool:
    """Whether an item needs trained models: it draws them, or measures more than can be counted."""
    return bool(item.figures) or any(MEASURES[name].source not in ("counted", "computed") for name in item.measures)


def _picked(item: Item, rows: Sequence[int]) -> list[Row]:
    for number in rows:
        if not 1 <= number <= len(item.rows):
            raise VitfocusError(f"{item.name} has rows 1 to {len(item.rows)}, and row {number} was asked for.")
    return [row for number, row in enumerate(item.rows, 1) if not rows or number in rows]


def _carry_out(
    item: Item,
    row: Row,
    runs: dict[str, Run | None],
    outcome: Outcome,
    places: Places | None,
    images: int | None,
) -> RowOutcome:
    """Train a row and measure it; with no `places`, count it."""
    run = runs[row.label]
    if row.computed:
        return RowOutcome(row, outcome.scale, values=COMPUTED[row.computed]())
    if run is None:
        why = row.quoted or f"{row.model} is counted at ImageNet scale alone"
        outcome.absent.append(f"{row.label} is the paper's: {why}.")
        return RowOutcome(row, outcome.scale)
    results: dict[str, Any] = {}
    if run.recipe is not None and places is not None:
        results = train_run(run)
    counts = results.get("train_images"), results.get("val_images")
    found = RowOutcome(row, outcome.scale, run, counts if None not in counts else None)  # type: ignore[arg-type]
    found.trained = bool(results)
    found.fingerprint = {key: results[key] for key in _FINGERPRINT if key in results}
    for name in item.measures:
        value: Value | Absent
        if MEASURES[name].source == "counted":
            plain = item.baseline(row)
            value = counted(name, *counted_on(item, row, run, runs.get(plain.label) if plain else None, places))
        elif places is None:
            continue
        elif run.recipe is None:
            value = Absent(f"{row.label} is counted at the scale {run.scale}, and not trained")
        else:
            value = measured(name, run, results, places, images)
        if isinstance(value, Absent):
            if name in row.paper or (MEASURES[name].source != "counted" and run.recipe is not None):
                outcome.absent.append(f"Not measured: {value.why}.")
        else:
            found.values[name] = value
            outcome.absent += [note for note in value.notes if "generated" in note]
    return found


def counted_on(item: Item, row: Row, run: Run, plain: Run | None, places: Places | None) -> tuple[Run, Run | None]:
    """The runs whose models are counted: the row's own, or those of the model that the paper counted."""
    if not item.count_on:
        return run, plain
    swapped = [Row(row.label, item.count_on, treat, set=row.set) for treat in (row.treat, "")]
    counted_runs = [plan_row(item, one, run.scale, places, run.folder.parent) for one in swapped]
    assert counted_runs[0] is not None
    return counted_runs[0], counted_runs[1] if row.treat else None


def train_run(run: Run) -> dict[str, Any]:
    """Train a run, or go on with it, or read what it found; what it stands on first."""
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
