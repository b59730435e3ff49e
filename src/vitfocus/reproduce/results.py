"""The results of an item: the paper's numbers beside ours, as a table and as plain data.

Our numbers come from a run's results, its training curve, a diagnosis, or an evaluation of its model. Parameters and
FLOPs are counted without a run. Diagnoses and evaluations are saved in the run's folder and reused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.core.modules import SkipInitialisation
from vitfocus.core.statistics import wilson_interval
from vitfocus.core.tables import Table, counted
from vitfocus.data.segmentation.dataset import has_acdc_test
from vitfocus.data.vqa.dataset import splits_in
from vitfocus.reproduce.items import MEASURES, Item, Measure, Printed, SuiteMetric, TableRow
from vitfocus.reproduce.plan import (
    CLASSES,
    SEVERITY,
    DataFolders,
    PlannedRun,
    describe_data,
    diagnosis_of,
    model_of,
    training_metrics,
    validation_data,
)
from vitfocus.robustness.evaluation import evaluate
from vitfocus.robustness.results import Scores, load_scores
from vitfocus.robustness.suites import TASK_SUITES
from vitfocus.tasks.base import model_arguments
from vitfocus.treatments.cost import count_cost, count_parameters
from vitfocus.treatments.save_load import create_model


@dataclass(frozen=True)
class Measurement:
    """A number, half the width of its 95 % interval if known, and its title if that differs at this scale."""

    number: float
    interval: float | None = None
    title: str = ""
    notes: tuple[str, ...] = ()
    images: int | None = None  # that it was measured on


@dataclass(frozen=True)
class NotMeasured:
    """The reason why a number was not measured."""

    why: str


@dataclass
class RowResult:
    """One row: its run, its data and what was measured."""

    row: TableRow
    scale: str
    run: PlannedRun | None = None
    images: tuple[int, int] | None = None  # trained on, validated on; None: nothing was trained
    values: dict[str, Measurement] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)  # of data, model, libraries and device
    measured: bool = False  # with a model, trained here or given

    @property
    def where(self) -> str:
        """Scale and data in a few words."""
        if self.run is None:
            return f"{self.scale}: {'computed, no data' if self.row.computed else 'quoted from the paper, not run'}"
        if not self.measured:
            return f"{self.scale}: counted only, {image_size(self.run)} px"
        return describe_data(self.run, self.images)

    def where_measured(self, name: str) -> str:
        """`where`, and the number of images if it is not all that the run was validated on."""
        value = self.values.get(name)
        every = self.images[1] if self.images else None
        if value is None or value.images is None or value.images == every:
            return self.where
        return f"{self.where}, measured on {counted(value.images, 'image')}"


@dataclass
class ItemResult:
    """An item at a scale. `missing` says why numbers were not measured; `figures` are files."""

    item: Item
    scale: str
    folders: DataFolders | None = None
    rows: list[RowResult] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    changed: tuple[str, ...] = ()
    limit: int | None = None  # of the images in evaluations and diagnoses
    severity: int = SEVERITY  # of the noise in diagnoses and figures

    def table(self) -> Table:
        """One line per number: the paper's, ours, and the difference of each from its untreated row."""
        lines = []
        for outcome in self.rows:
            names = [*self.item.measures, *(name for name in outcome.values if name not in self.item.measures)]
            for name in names:
                value, printed = outcome.values.get(name), outcome.row.paper.get(name)
                if value is None and printed is None:
                    continue
                lines.append(
                    [
                        outcome.row.label,
                        _heading(name, value),
                        printed_text(printed),
                        value_text(name, value),
                        *self._changes(outcome, name),
                        outcome.where_measured(name),
                    ]
                )
        columns = ["row", "measure", "paper", "ours", "Δ paper", "Δ ours", "scale: data of ours"]
        return Table("", columns, lines)

    def __str__(self) -> str:
        return self.text(styled=sys.stdout.isatty())

    def text(self, *, styled: bool = False) -> str:
        """The table, untruncated, and the notes below it."""
        title = f"{self.item.name} ({self.item.paper}): {self.item.title}. The paper's numbers: {self.item.data}."
        table = self.table().text(styled=styled)
        return "\n".join([title, table, *(f"- {note}" for note in self.all_notes())])

    def all_notes(self) -> list[str]:
        """The item's notes, what is assumed and differs from the paper, what was changed, and what was not measured."""
        given = [text.partition("=")[0] for text in self.changed]
        kinds = ("assumed", "differs") if self.scale == "imagenet" else ("assumed",)
        notes = list(self.item.notes)
        for kind in kinds:
            texts = (*getattr(self.item, kind), *self.item.stated(kind, self.scale, given))
            notes += [f"{kind.capitalize()}: {text}" for text in texts]
        changed = [f"The recipes were changed: {' '.join(self.changed)}."] if self.changed else []
        if self.limit is not None:
            changed.append(f"Evaluations and diagnoses of trained models used at most {counted(self.limit, 'image')}.")
        return [*notes, *changed, *dict.fromkeys(self.missing)]

    def _changes(self, outcome: RowResult, name: str) -> tuple[str, str]:
        plain = self.item.baseline(outcome.row)
        base = next((one for one in self.rows if one.row is plain), None) if plain is not None else None
        if base is None or MEASURES[name].source == "counted":
            return "", ""
        digits = MEASURES[name].digits
        before, after = (_number(one.row.paper.get(name)) for one in (base, outcome))
        ours = outcome.values.get(name), base.values.get(name)
        return (
            f"{after - before:+.{digits}f}" if before is not None and after is not None else "",
            f"{ours[0].number - ours[1].number:+.{digits}f}" if ours[0] is not None and ours[1] is not None else "",
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "item": self.item.name,
            "title": self.item.title,
            "paper": self.item.paper,
            "paper_data": self.item.data,
            "scale": self.scale,
            "changed": list(self.changed),
            "rows": [self._row(outcome) for outcome in self.rows],
            "figures": [str(path) for path in self.figures],
            "protocol": self.item.protocol,
            "notes": self.all_notes(),
        }

    def _row(self, outcome: RowResult) -> dict[str, Any]:
        run = outcome.run
        return {
            "label": outcome.row.label,
            "scale": self.scale,
            "data": outcome.where,
            "spec": run.spec if run else None,
            "run": str(run.folder) if run and outcome.measured else None,
            "recipe_sha256": run.digest if run and run.recipe else None,
            "fingerprint": outcome.fingerprint,
            "measures": {
                name: {
                    "title": _heading(name, value),
                    "paper": outcome.row.paper.get(name),
                    "ours": value and value.number,
                    "interval": value and value.interval,
                    "images": value and value.images,
                }
                for name in dict.fromkeys((*self.item.measures, *outcome.values, *outcome.row.paper))
                if (value := outcome.values.get(name)) or name in outcome.row.paper
            },
        }

    def save(self, folder: Path) -> None:
        """Write outcome.json and the table as text."""
        write_text(folder / "outcome.json", json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")
        write_text(folder / "table.txt", self.text() + "\n")


def _heading(name: str, value: Measurement | None) -> str:
    """The measure's heading; both headings if ours differs at this scale."""
    measure = MEASURES[name]
    return f"{measure.heading}, ours: {value.title}" if value is not None and value.title else measure.heading


def _number(printed: Printed | None) -> float | None:
    if isinstance(printed, tuple):
        return printed[0]
    return None if printed is None or isinstance(printed, str) else float(printed)


def printed_text(printed: Printed | None) -> str:
    """A paper's number as it prints it.

    >>> printed_text(80.5), printed_text((40.22, 0.15)), printed_text("Yes"), printed_text(None)
    ('80.5', '40.22 ± 0.15', 'Yes', '–')
    """
    if printed is None:
        return "–"
    return " ± ".join(map(str, printed)) if isinstance(printed, tuple) else str(printed)


def value_text(name: str, value: Measurement | None) -> str:
    """Our number with its interval, or a dash if it was not measured."""
    if value is None:
        return "–"
    digits = MEASURES[name].digits
    small = MEASURES[name].source == "counted" and 0 < abs(value.number) < 1
    text = f"{value.number:.2g}" if small else f"{value.number:.{digits}f}"
    return text if value.interval is None else f"{text} ± {value.interval:.{digits}f}"


@dataclass(frozen=True)
class MeasureSettings:
    """How rows are measured: the data, the maximum number of images, and options by suite."""

    folders: DataFolders | None
    limit: int | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def severity(self) -> int:
        """Severity of the noise in diagnoses."""
        return int(self.options.get("diagnosis", {}).get("severity", SEVERITY))


def measure(
    name: str, run: PlannedRun, results: Mapping[str, Any], settings: MeasureSettings
) -> Measurement | NotMeasured:
    """Measure a run's model."""
    column = MEASURES[name]
    if column.source == "result" and run.weights:
        assert run.recipe is not None
        return _from_suite(column, SuiteMetric(TASK_SUITES[run.recipe.task], (column.key,)), run, settings)
    if column.source == "result":
        return _from_results(column, results)
    if column.source == "curve" and run.weights:
        return NotMeasured(f"{column.title} needs a training run, and {run.row.label} was given its weights")
    if column.source == "curve":
        return _from_curve(column, training_metrics(run))
    if column.source == "diagnosis":
        return _from_diagnosis(column, diagnosis_of(run, settings.limit, settings.severity))
    if column.source == "suite":
        suite = column.suites.get(run.scale)
        if suite is None:
            return NotMeasured(f"{column.title} has no counterpart at the scale {run.scale}")
        return _from_suite(column, suite, run, settings)
    raise AssertionError(f"{name} is not measured on a run")


def count(name: str, run: PlannedRun, plain: PlannedRun | None) -> Measurement | NotMeasured:
    """Parameters or FLOPs of a run's model; additions are relative to `plain`, the untreated model."""
    kind, _, added = name.partition("_")
    unit = 1e9 if name == "flops" else 1e6
    if not added:
        return Measurement(count_model(kind, run) / unit)
    if plain is None:
        return NotMeasured(f"{run.row.label} has no untreated row to compare with")
    return Measurement((count_model(kind, run) - count_model(kind, plain)) / unit)


def count_model(kind: str, run: PlannedRun) -> int:
    """The parameters of a run's model, or its multiply-adds for one image at the size that the run uses."""
    return _count(kind, run.spec, _arguments(run), image_size(run))


@functools.cache
def _count(kind: str, spec: str, arguments: str, size: int) -> int:
    model = _build(spec, arguments)
    return count_parameters(model) if kind == "parameters" else count_cost(model, size).flops


@functools.lru_cache(maxsize=4)  # parameters and FLOPs are counted one after the other
def _build(spec: str, arguments: str) -> Any:
    """The model on the meta device, where nothing is computed."""
    with torch.device("meta"), SkipInitialisation():
        return create_model(spec, **json.loads(arguments))


def image_size(run: PlannedRun) -> int:
    """The side of the images that a run's model is counted on."""
    return run.recipe.data.size if run.recipe is not None else 224


def _arguments(run: PlannedRun) -> str:
    """The arguments that the run's task builds its model with, as JSON so that they can be cached."""
    if run.recipe is None:
        return "{}"
    source, task = run.recipe.data.source, run.recipe.task
    if source not in CLASSES:
        raise VitfocusError(f"The number of classes of {source} is not known.")
    classes = CLASSES[source] + (source == "shapes" and task == "segment")  # Shapes' masks also have a background
    return json.dumps(model_arguments(run.recipe, classes), sort_keys=True)


def _from_curve(measure: Measure, rows: list[dict[str, Any]]) -> Measurement | NotMeasured:
    """The mean over the last epoch."""
    logged = [row for row in rows if row["kind"] == "train" and isinstance(row.get(measure.key), int | float)]
    points = [(row["epoch"], row[measure.key]) for row in logged]
    if not points:
        return NotMeasured("the run logged no such number")
    last = points[-1][0]
    return Measurement(fmean([value for epoch, value in points if epoch > last - 1]))


def _from_results(measure: Measure, results: Mapping[str, Any]) -> Measurement | NotMeasured:
    last, images = results.get("last", {}), int(results.get("val_images", 0))
    if measure.key not in last:
        return NotMeasured(f"the run's results hold no {measure.key}")
    share = float(last[measure.key])
    interval = None
    if measure.key in ("top1", "top5") and images:
        low, high = wilson_interval(share, images)
        interval = 50 * (high - low)
    split = results.get("splits", {}).get("val", "")
    title = f"{measure.title.partition(' on ')[0]} on {split}" if split else ""
    return Measurement(measure.scale * share, interval, title, images=images or None)


def _from_diagnosis(measure: Measure, diagnosis: Diagnosis) -> Measurement | NotMeasured:
    key, _, statistic = measure.key.partition("@")
    values = [row[key] for row in diagnosis.rows if key in row]
    if not values:
        return NotMeasured(f"no layer has {measure.title}")
    half = len(values) // 2
    if statistic == "rise" and not half:
        return NotMeasured("there is only one layer")
    number = {
        "": lambda: fmean(values),
        "pairs": lambda: fmean(row[key] / (_placed_tokens(row) - 1) for row in diagnosis.rows if key in row),
        "last": lambda: values[-1],
        "rise": lambda: fmean(values[half:]) - fmean(values[:half]),
    }[statistic]()
    return Measurement(measure.scale * number, images=diagnosis.images)


def _placed_tokens(row: Mapping[str, Any]) -> int:
    """The number of patch tokens of a layer."""
    return round(math.exp(row["entropy_bound"])) - ("entropy_cls" in row)


def _from_suite(
    measure: Measure, suite: SuiteMetric, run: PlannedRun, settings: MeasureSettings
) -> Measurement | NotMeasured:
    folder = settings.folders.find(suite.data) if suite.data and settings.folders else None
    if suite.data and folder is None and not suite.generated:
        return NotMeasured(f"{measure.title} needs its images: --data {suite.data}=DIR")
    scores = _scores(suite, run, folder, settings)
    found: Any = next(iter(scores.models.values()))
    single = {
        key: f"{value[0]:g}" for key, value in _options(suite, folder, settings).items() if key in ("eps", "sizes")
    }
    path = [step.format(**single) for step in suite.path]
    for step in path:
        if not isinstance(found, Mapping) or step not in found:
            return NotMeasured(f"the suite {suite.suite} gave no {' '.join(path)}")
        holder, found = found, found[step]
    low, high = holder.get(f"{path[-1]}_interval", (None, None))
    interval = None if low is None or high is None else (high - low) / 2
    title = suite.title
    if suite.suite == "answers":
        title = f"{measure.title.partition(' on ')[0]} on {scores.fingerprint['protocol']['split']}"
    return Measurement(float(found), interval, title, scores.notes, scores.images)


def submissions(measures: Sequence[str], run: PlannedRun, settings: MeasureSettings) -> list[str]:
    """Write predictions for test splits without public labels, if their images are available.

    Returns:
        Sentences that say where the files are.
    """
    found = []
    data = run.recipe.data if run.recipe is not None else None
    if "vqa" in measures and data is not None and data.source == "vqav2":
        if "test-dev2015" in splits_in(data.root):
            suite = SuiteMetric("answers", (), options={"split": "test-dev2015"})
            file = _folder(suite, run, None, settings) / "answers.json"
            _scores(suite, run, None, settings)
            found.append(f"Answers of {run.row.label} to test-dev2015, for the evaluation server: {file}.")
        else:
            found.append("Answers for the evaluation server: put the questions and images of test-dev2015 into --data.")
    folder = settings.folders.find("acdc") if settings.folders else None
    if "acdc" in measures and folder is not None and has_acdc_test(folder):
        place = run.folder / "submissions" / "acdc-test"
        suite = SuiteMetric("acdc", (), "acdc", options={"split": "test", "submission": str(place)})
        _scores(suite, run, folder, settings)
        found.append(f"Predictions of {run.row.label} on ACDC test, for its server: {place}.")
    return found


def _options(suite: SuiteMetric, folder: Path | None, settings: MeasureSettings) -> dict[str, Any]:
    given = {**suite.options, **settings.options.get(suite.suite, {})}
    return given | ({suite.folder_option: str(folder)} if suite.folder_option and folder else {})


def _limit(suite: SuiteMetric, settings: MeasureSettings) -> int | None:
    return min(suite.limit or settings.limit or 0, settings.limit or suite.limit or 0) or None


def _folder(suite: SuiteMetric, run: PlannedRun, folder: Path | None, settings: MeasureSettings) -> Path:
    """The folder of an evaluation, named by a digest of its settings."""
    content = [suite.suite, _options(suite, folder, settings), _limit(suite, settings), str(folder or "")]
    described = json.dumps(content, sort_keys=True)
    return run.folder / "evaluations" / f"{suite.suite}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"


def _scores(suite: SuiteMetric, run: PlannedRun, folder: Path | None, settings: MeasureSettings) -> Scores:
    images = _limit(suite, settings)
    options = _options(suite, folder, settings)
    out = _folder(suite, run, folder, settings)
    if (out / "results.json").is_file():
        return load_scores(out)
    data = folder if folder is not None and not suite.folder_option else validation_data(run)
    models = {run.row.label: model_of(run)}
    return evaluate(models, suite.suite, data, limit=images, out=out, resume=True, **options)


def softmax_surface(extent: float = 5.0, points: int = 81) -> tuple[Tensor, Tensor, Tensor]:
    """CB's Figure 5: the axis (P,), softmax's first output and the nuclear norm of its Jacobian (P, P) over (x1, x2).

    >>> axis, output, steepness = softmax_surface(points=5)
    >>> axis.tolist(), output[2, 2].item(), steepness.argmax(0).tolist()
    ([-5.0, -2.5, 0.0, 2.5, 5.0], 0.5, [0, 1, 2, 3, 4])
    """
    axis = torch.linspace(-extent, extent, points, dtype=torch.float64)
    inputs = torch.cartesian_prod(axis, axis)
    jacobians = vmap(jacrev(lambda x: x.softmax(0)))(inputs)
    steepness = torch.linalg.matrix_norm(jacobians, "nuc")
    output = inputs.softmax(1)[:, 0]
    return axis, output.unflatten(0, (points, points)), steepness.unflatten(0, (points, points))


def _softmax() -> dict[str, Measurement]:
    axis, _, steepness = softmax_surface()
    first, second = (int(place) for place in torch.unravel_index(steepness.argmax(), steepness.shape))
    middle = len(axis) // 2
    return {
        "steepest_at": Measurement(abs(float(axis[first] - axis[second]))),
        "gradient_uniform": Measurement(float(steepness[middle, middle])),
    }


#: Computations that need no model, by the name in an item's TOML.
COMPUTED: dict[str, Callable[[], dict[str, Measurement]]] = {"softmax": _softmax}
