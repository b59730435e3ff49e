"""`reproduce`: train an item's rows (or resume), measure, draw, and compare with the paper's numbers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitfocus.core.arguments import check_int, checked
from vitfocus.core.environment import Processes, is_main_process, join_processes
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.tables import Table
from vitfocus.reproduce.figures import draw
from vitfocus.reproduce.items import MEASURES, Item, TableRow
from vitfocus.reproduce.plan import (
    SEVERITY,
    DataFolders,
    PlannedItem,
    PlannedRun,
    needs_training,
    plan_item,
    plan_row,
    why_not_pretrained,
)
from vitfocus.reproduce.results import (
    COMPUTED,
    ItemResult,
    Measurement,
    MeasureSettings,
    NotMeasured,
    RowResult,
    count,
    measure,
    printed_text,
    submissions,
    value_text,
)
from vitfocus.robustness.suites import SUITES, Option
from vitfocus.train.run import train

_FINGERPRINT = ("data_sha256", "model_sha256", "versions", "device", "precision")


class Stopped(Exception):
    """A signal ended a run early; its state is saved, and the same command resumes it."""


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
    weights: Sequence[str] = (),
    pretrained: bool = False,
    options: Sequence[str] = (),
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
        weights: "ROW=FILE" for rows that are measured with these weights instead of being trained; ROW is a row's
            number or label, FILE a file of weights or a folder that `vitfocus.save` wrote.
        pretrained: Measure rows with the weights of their library, which may be downloaded, and train nothing.
        options: "SUITE.NAME=VALUE" for options of the evaluation suites, such as "fgsm.eps=2".

    Returns:
        One result, or one per part ("cb/table4" has a and b).

    Raises:
        VitfocusError: If there is no such item, scale or row, or data are missing.
        Stopped: If a signal ended a run early.

    Example:
        >>> result = reproduce("cb/table5", "imagenet", rows=[1], count_only=True)[0]
        >>> row = result.rows[0]
        >>> row.row.label, round(row.values["parameters"].number, 1), row.row.paper["parameters"]
        ('ViT-Ti', 5.7, 5.7)
    """
    changed = suite_options(options)
    planned = plan_item(name, scale, data, out, overrides, rows, count_only, weights, pretrained)
    _refuse_unmeasured(changed, planned)
    outcomes = []
    for one in planned:
        item = one.item
        limit = images if needs_training(item) else None
        settings = MeasureSettings(one.folders, images, changed)
        outcome = ItemResult(
            item, scale, one.folders, changed=(*overrides, *options), limit=limit, severity=settings.severity
        )
        for number, row in enumerate(one.rows, 1):
            _say(f"{item.name} at {scale} scale, row {number} of {len(one.rows)}: {row.label}")
            outcome.rows.append(_run_row(one, row, outcome, settings))
        if count_only and needs_training(item) and any(row.model for row in one.rows):
            outcome.missing.append("A dash marks what --count leaves out: nothing was trained, measured or drawn.")
        if not count_only and is_main_process():
            where = Path(out) / scale / "items" / item.name.replace("/", "-")
            with Processes(0, 1, torch.device("cpu")).lock(where, wait=True):  # other rows may end at the same time
                outcome.figures = draw(outcome, where, images)
                outcome.save(where)
        outcomes.append(outcome)
    return outcomes


_SEVERITY = Option("severity", int, False, SEVERITY, "a severity of the noise, 1 to 5")
_OPTIONS = {"diagnosis": [_SEVERITY], **{name: suite.option_list for name, suite in SUITES.items()}}


def suite_options(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options of suites by suite, from "SUITE.NAME=VALUE"; several values are separated by commas.

    >>> suite_options(["fgsm.eps=0.5,1", "cityscapes-c.types=all"])
    {'fgsm': {'eps': (0.5, 1.0)}, 'cityscapes-c': {'types': 'all'}}
    """
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        key, equals, value = text.partition("=")
        suite, _, name = key.partition(".")
        if not (equals and name) or suite not in _OPTIONS:
            raise VitfocusError(f"--option {text} is not SUITE.NAME=VALUE: {nearest(suite, _OPTIONS)}")
        known = {option.name: option for option in _OPTIONS[suite]}
        if name not in known:
            raise VitfocusError(f"The suite {suite} has no option {name!r}: {nearest(name, known)}")
        option = known[name]
        kind: Any = (lambda word: word.lower() in ("1", "true", "yes")) if option.type is bool else option.type
        try:
            values = tuple(kind(word) for word in value.split(",")) if option.several else kind(value)
        except (TypeError, ValueError):
            raise VitfocusError(f"--option {text}: {name} takes {option.help}, not {value!r}.") from None
        if option is _SEVERITY:
            check_int("diagnosis.severity", values, 1, 5)
        found.setdefault(suite, {})[name] = values
    return found


def _refuse_unmeasured(options: Mapping[str, Any], planned: Sequence[PlannedItem]) -> None:
    measures = [MEASURES[name] for one in planned for name in one.item.measures]
    used = {suite.suite for measure in measures for suite in measure.suites.values()}
    used |= {"diagnosis"} if any(measure.key == "stability" for measure in measures) else set()
    for suite, given in options.items():
        if suite not in used:
            raise VitfocusError(f"--option {suite}: {planned[0].item.name} does not measure that suite.")
        for name in ("eps", "sizes"):
            if len(given.get(name, ())) > 1:
                raise VitfocusError(f"--option {suite}.{name} has several values, and the table shows one: choose it.")


@dataclass(frozen=True)
class Trial:
    """A row measured with one value of an option that the paper does not state."""

    row: str
    measure: str
    option: str
    value: Any
    ours: Measurement | NotMeasured
    paper: Any

    @property
    def off(self) -> float | None:
        """Our number minus the paper's; None if either is missing."""
        printed = self.paper[0] if isinstance(self.paper, tuple) else self.paper
        return self.ours.number - printed if isinstance(self.ours, Measurement) and printed is not None else None

    @property
    def agrees(self) -> bool:
        """Whether the paper's number lies in our interval."""
        wide = self.ours.interval if isinstance(self.ours, Measurement) else None
        return self.off is not None and abs(self.off) <= (wide or 0.0) + 0.05  # papers round to 0.1


@checked
def calibrate(
    name: str, scale: str = "imagenet", *, images: int | None = None, options: Sequence[str] = (), **more: Any
) -> list[Trial]:
    """Measure rows with given weights, using each candidate of the values that the paper does not state.

    Args:
        name: The item.
        scale: The scale.
        images: The largest number of images.
        options: Options of suites; "fgsm.eps=1.5,2.5" tries these two instead of the candidates of protocols.toml.
        **more: Other arguments of `reproduce`: data, out, overrides, rows, weights, pretrained.

    Returns:
        One trial per row, measure and value.

    Raises:
        VitfocusError: If the item has no such value, or no row has weights.
    """
    given = suite_options(options)
    planned = plan_item(name, scale, **more)
    facts = {fact.option: fact for one in planned for fact in one.item.facts if fact.option}
    if not facts:
        raise VitfocusError(f"{name} has no value to calibrate: the paper states all options of its evaluations.")
    known = [(one, row, run) for one in planned for row in one.rows if (run := one.runs[row.label]) and run.weights]
    if not known:
        raise VitfocusError("--calibrate measures rows with given weights: give --weights ROW=FILE or --pretrained.")
    rest = {suite: {k: v for k, v in some.items() if f"{suite}.{k}" not in facts} for suite, some in given.items()}
    _refuse_unmeasured(rest, planned)
    trials = []
    for one, row, run in known:
        for option, fact in facts.items():
            suite, _, key = option.partition(".")
            several = isinstance(next(o for o in _OPTIONS[suite] if o.name == key).default, tuple)
            asked = given.get(suite, {}).get(key, fact.tried)
            for measured in set(one.item.measures) & set(fact.measures):
                for value in asked if isinstance(asked, tuple) else (asked,):
                    _say(f"{one.item.name}, {row.label}: {option}={value}")
                    tried = {**rest.get(suite, {}), key: (value,) if several else value}
                    settings = MeasureSettings(one.folders, images, rest | {suite: tried})
                    with _measuring(run):
                        found = measure(measured, run, {}, settings)
                    trials.append(Trial(row.label, measured, option, value, found, row.paper.get(measured)))
    return trials


def calibration_text(trials: Sequence[Trial]) -> str:
    """The trials as a table, and for each measure the value that comes closest to the paper's number."""
    lines, advice = [], []
    for one in trials:
        ours = value_text(one.measure, one.ours) if isinstance(one.ours, Measurement) else one.ours.why
        off = "" if one.off is None else f"{one.off:+.{MEASURES[one.measure].digits}f}"
        heading = MEASURES[one.measure].heading
        lines.append([one.row, heading, f"{one.option}={one.value}", ours, printed_text(one.paper), off])
    for key in dict.fromkeys((one.row, one.measure, one.option) for one in trials):
        close = [one for one in trials if (one.row, one.measure, one.option) == key and one.off is not None]
        if not close:
            continue
        best = min(close, key=lambda one: abs(one.off or 0.0))
        says = (
            "and the paper's number is in its interval"
            if best.agrees
            else "but the paper's number is not in its interval"
        )
        advice.append(
            f"- {best.row}, {MEASURES[best.measure].title}: --option {best.option}={best.value} is closest, {says}."
        )
    table = Table("", ["row", "measure", "option", "ours", "paper", "Δ"], lines)
    return "\n".join([table.text(), *advice])


def train_planned(run: str, planned: Sequence[PlannedItem]) -> None:
    """Train one of an item's runs by its folder's name, and those that it depends on."""
    known = {one.folder.name: one for item in planned for one in item.trained}
    if run not in known:
        raise VitfocusError(f"There is no run {run!r} to train for {planned[0].item.name}: {nearest(run, known)}")
    train_run(known[run])


def _run_row(planned: PlannedItem, row: TableRow, outcome: ItemResult, settings: MeasureSettings) -> RowResult:
    """Train a row and measure it; without data folders, only count it."""
    runs = planned.runs
    run = runs[row.label]
    if row.computed:
        return RowResult(row, outcome.scale, values=COMPUTED[row.computed]())
    if run is None:
        why = row.quoted or f"{row.model} is only counted, at ImageNet scale"
        outcome.missing.append(f"{row.label} is quoted from the paper: {why}.")
        return RowResult(row, outcome.scale)
    results: dict[str, Any] = {}
    if planned.pretrained and run.recipe is not None and not run.weights:
        outcome.missing.append(f"{row.label} was neither trained nor measured: {why_not_pretrained(run)}.")
        settings = replace(settings, folders=None)
    if run.recipe is not None and settings.folders is not None and not run.weights:
        results = train_run(run)
    counts = results.get("train_images"), results.get("val_images")
    found = RowResult(row, outcome.scale, run, counts if None not in counts else None)  # type: ignore[arg-type]
    found.measured = bool(results) or (bool(run.weights) and settings.folders is not None)
    found.fingerprint = {key: results[key] for key in _FINGERPRINT if key in results}
    with _measuring(run) if found.measured else nullcontext():
        _measure_row(planned, found, results, outcome, settings)
    return found


def _measuring(run: PlannedRun) -> AbstractContextManager[None]:
    """Wait until no other process measures this run's model; results that it saved are reused."""
    return join_processes().lock(run.folder / "evaluations", wait=True)


def _measure_row(
    planned: PlannedItem, found: RowResult, results: dict[str, Any], outcome: ItemResult, settings: MeasureSettings
) -> None:
    item, runs, row, run = planned.item, planned.runs, found.row, found.run
    assert run is not None
    for name in item.measures:
        value: Measurement | NotMeasured
        if MEASURES[name].source == "counted":
            plain = item.baseline(row)
            value = count(name, *counted_on(item, row, run, runs.get(plain.label) if plain else None, settings.folders))
        elif settings.folders is None:
            continue
        elif run.recipe is None:
            value = NotMeasured(f"{row.label} is only counted at the scale {run.scale}, not trained")
        else:
            value = measure(name, run, results, settings)
        if isinstance(value, NotMeasured):
            if name in row.paper or (MEASURES[name].source != "counted" and run.recipe is not None):
                outcome.missing.append(f"Not measured: {value.why}.")
        else:
            found.values[name] = value
            outcome.missing += [note for note in value.notes if "generated" in note]
    if found.measured:
        outcome.missing += submissions(item.measures, run, settings)


def counted_on(
    item: Item, row: TableRow, run: PlannedRun, plain: PlannedRun | None, folders: DataFolders | None
) -> tuple[PlannedRun, PlannedRun | None]:
    """The runs whose models are counted: the row's, or those of the model that the paper counted."""
    if not item.count_on:
        return run, plain
    swapped = [TableRow(row.label, item.count_on, treat, set=row.set) for treat in (row.treat, "")]
    counted_runs = [plan_row(item, one, run.scale, folders, run.folder.parent) for one in swapped]
    assert counted_runs[0] is not None
    return counted_runs[0], counted_runs[1] if row.treat else None


def train_run(run: PlannedRun) -> dict[str, Any]:
    """Train a run after those that it depends on, resume it, or read its results; waits for other processes."""
    for first in run.prerequisites:
        train_run(first)
    assert run.recipe is not None
    results = train(run.recipe, out=run.folder, resume="auto", wait=True)
    if not results.get("finished"):
        raise Stopped(str(run.folder))
    return results


def _say(text: str) -> None:
    if is_main_process():
        print(text, file=sys.stderr, flush=True)
