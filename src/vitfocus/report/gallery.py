"""The gallery: many diagnosed models on one page, one row each, with small charts of the readings by depth.

The charts of a column have the same axes: the depth runs from a model's first layer to its last, and the values cover
all models. Rows can be sorted by every column, and link to the models' own pages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from vitfocus.attention.curves import REFERENCE_MODELS
from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.attention.findings import reference, reference_values, thresholds_of, uniform_note
from vitfocus.attention.readings import READINGS, Chart, charts
from vitfocus.core.modules import insertion_sentence
from vitfocus.core.tables import Table, counted
from vitfocus.report.charts import drawing, element, marker, path, scale
from vitfocus.report.comparison import read_estimate
from vitfocus.report.explorer import EXPLORER
from vitfocus.report.page import Cell, Drawn, Linked, Page
from vitfocus.report.runs import ReportModel

#: The readings that are drawn. Entropy is a share of its bound, so that models with other numbers of tokens compare.
READ = ("entropy", "distance", "overfocus", "head_similarity", "stability", "high_norm")
#: The number of models from which on a page about diagnoses is a gallery, unless it is asked for or refused.
MANY = 3
_WIDTH, _HEIGHT, _EDGE, _PLACES = 116.0, 60.0, 5.0, 23


def is_gallery(models: Sequence[ReportModel]) -> bool:
    """Whether a page about these models is a gallery by default: many, each of them diagnosed, and none trained."""
    return len(models) >= MANY and all(model.diagnoses and model.training is None for model in models)


def add_gallery(page: Page, models: Sequence[ReportModel], target: Path) -> None:
    """The table of the models, what the readings mean, and what stands out.

    Args:
        page: The page.
        models: The models; those without a diagnosis are left out.
        target: The file that the page will be written to, from which its links start.
    """
    shown = [(model, model.diagnoses[0]) for model in models if model.diagnoses]
    diagnoses = [diagnosis for _, diagnosis in shown]
    page.section("Models")
    page.text(_opening(diagnoses))
    page.points([insertion_sentence(model.inserted, model.name) for model, _ in shown if model.inserted])
    read = {key: charts()[key] for key in READ if any(_series(one, key) for one in diagnoses)}
    ends = {key: _ends(key, chart, diagnoses) for key, chart in read.items()}
    rows: list[list[Any]] = []
    for model, diagnosis in shown:
        drawn = [_drawn(key, chart, diagnosis, ends[key]) for key, chart in read.items()]
        rows.append([_name(model, diagnosis, target), _accuracy(model), *drawn])
    headings = ["model", "top-1 (%)", *(_heading(key, chart) for key, chart in read.items())]
    page.table("gallery", headings, rows, saved=_saved(shown), sortable=True)
    page.text(
        "A chart runs from the first layer of a model to its last, and the number is the mean over the layers. All "
        "charts of a column have the same axes. Dashed: the thresholds of the findings. Grey: "
        f"{REFERENCE_MODELS.partition(',')[0]} on {reference()['images']} photographs.",
        quiet=True,
    )
    if note := uniform_note({model.name: found.rows for model, found in shown}):
        page.text(note)
    page.section("What the readings mean")
    page.points([(f"{_heading(key, chart)}:", _meaning(key, chart, ends[key])) for key, chart in read.items()])
    page.section("What stands out")
    page.points([(f"{model.name}:", " ".join(one.read for one in found.explained)) for model, found in shown])


def means_table(diagnoses: Sequence[Diagnosis]) -> Table:
    """The means over the layers of the readings of some models, to print."""
    read = {key: charts()[key] for key in READ if any(_series(one, key) for one in diagnoses)}
    rows = []
    for one in diagnoses:
        series = [_series(one, key, _factor(key, chart)) for key, chart in read.items()]
        means = [f"{fmean(value for _, value in points):.3g}" if points else "–" for points in series]
        rows.append([one.model, str(len(one.rows)), str(one.images), *means])
    headings = [_heading(key, chart).lower() for key, chart in read.items()]
    return Table("Means over the layers", ["model", "layers", "images", *headings], rows)


def _opening(diagnoses: Sequence[Diagnosis]) -> str:
    """How many models, read on what, and whether they can be compared."""
    settings = list(dict.fromkeys(_setting(one) for one in diagnoses))
    if len(settings) == 1:
        return f"{counted(len(diagnoses), 'model')} on {settings[0]}."
    return (
        f"{counted(len(diagnoses), 'model')}, read on different images: compare the readings of models with the same "
        "images only."
    )


def _setting(diagnosis: Diagnosis) -> str:
    size = "×".join(map(str, diagnosis.size))
    under = f", clean and under {diagnosis.against}" if diagnosis.against else ""
    return f"{counted(diagnosis.images, 'image')} of {size} pixels{under}"


def _name(model: ReportModel, diagnosis: Diagnosis, target: Path) -> Linked:
    """The model, what it was read on, and links to its own page and explorer."""
    about = f"{counted(len(diagnosis.rows), 'layer')}, {_setting(diagnosis)}"
    source = next((data.source for data in model.data if data.source), None)
    about += f", of {source}" if source else ""
    links = []
    for folder in model.folders:
        page = folder / "report.html"
        if not page.is_file() or page.resolve() == target.resolve():
            continue
        address = quote(Path(os.path.relpath(page.resolve(), target.resolve().parent)).as_posix())
        links = [("Report", address)]
        if (folder / EXPLORER).is_file():
            links.append(("Explorer", f"{address}#explorer"))
            break
    return Linked(model.name, f"{about}{'' if diagnosis.trained else ', untrained'}", tuple(links))


def _accuracy(model: ReportModel) -> Cell | None:
    """The top-1 accuracy of the model's first evaluation that has it."""
    for scores in model.scores:
        summary = scores.models[next(iter(scores.models))]
        if "top1" not in summary:
            continue
        found = read_estimate(summary, "top1")
        interval = f" [{found.interval[0]:.1f}, {found.interval[1]:.1f}]" if found.interval is not None else ""
        return Cell(f"{found.number:.1f}{interval}", found.number)
    return None


def _heading(key: str, chart: Chart) -> str:
    return "Entropy (% of uniform)" if key == "entropy" else f"{chart.title}{f' ({chart.unit})' if chart.unit else ''}"


def _meaning(key: str, chart: Chart, ends: tuple[float, float]) -> str:
    said = chart.meaning.partition(". ")[0].rstrip(".") + "."
    said += " In percent of the entropy of uniform attention." if key == "entropy" else ""
    return f"{said} The axis runs from {ends[0]:.3g} to {ends[1]:.3g}."


def _factor(key: str, chart: Chart) -> float:
    return 100.0 if key == "entropy" else chart.factor


def _series(diagnosis: Diagnosis, key: str, factor: float = 1.0) -> list[tuple[float, float]]:
    """The values of a reading by depth, from 0 (first layer) to 1 (last)."""
    last = max((row["layer"] for row in diagnosis.rows), default=0) or 1
    rows = [row for row in diagnosis.rows if key in row and (key != "entropy" or row.get("entropy_bound"))]
    return [
        (row["layer"] / last, factor * row[key] / (row["entropy_bound"] if key == "entropy" else 1.0)) for row in rows
    ]


def _known(key: str, factor: float) -> list[tuple[float, float, float]]:
    """The range of the reference models by depth, as (place, low, high)."""
    places = [step / _PLACES for step in range(_PLACES + 1)]
    found = [(place, list(reference_values(key, place).values())) for place in places]
    return [(place, factor * min(values), factor * max(values)) for place, values in found if values]


def _ends(key: str, chart: Chart, diagnoses: Sequence[Diagnosis]) -> tuple[float, float]:
    """The lower and upper end of a column's axis: all values, the thresholds, and 0."""
    factor = _factor(key, chart)
    values = [value for one in diagnoses for _, value in _series(one, key, factor)]
    values += [factor * limit for limit, _, _ in thresholds_of(key)]
    return min(0.0, *values), max(values)


def _drawn(key: str, chart: Chart, diagnosis: Diagnosis, ends: tuple[float, float]) -> Drawn | None:
    """A small chart with the mean over the layers below it."""
    factor = _factor(key, chart)
    points = _series(diagnosis, key, factor)
    if not points:
        return None
    x, y = scale(0.0, 1.0, _EDGE, _WIDTH - _EDGE), scale(*ends, _HEIGHT - _EDGE, _EDGE)
    parts = []
    comparable = key != "stability" or diagnosis.against == reference()["against"]
    if band := _known(key, factor) if comparable else []:
        inside = [(x(a), y(min(b, ends[1])), y(min(c, ends[1]))) for a, b, c in band]
        around = [(a, b) for a, b, _ in inside] + [(a, c) for a, _, c in reversed(inside)]
        parts.append(element("path", d=path(around, closed=True), kind="known"))
    for limit, _, _ in thresholds_of(key):
        level = y(factor * limit)
        parts.append(element("path", d=path([(_EDGE, level), (_WIDTH - _EDGE, level)]), kind="reference thin"))
    parts.append(element("line", x1=_EDGE, x2=_WIDTH - _EDGE, y1=y(ends[0]), y2=y(ends[0]), kind="axis"))
    parts.append(element("path", d=path([(x(a), y(b)) for a, b in points]), kind="line c0"))
    parts.append(marker(0, x(points[-1][0]), y(points[-1][1]), "dot c0", 2.6))
    mean = fmean(value for _, value in points)
    low, high = (f"{pick(value for _, value in points):.3g}" for pick in (min, max))
    title = f"{chart.title} by depth: first layer {points[0][1]:.3g}, last {points[-1][1]:.3g}, from {low} to {high}"
    return Drawn(f"{mean:.3g}", mean, drawing(_WIDTH, _HEIGHT, parts, title, 1.0))


def _saved(shown: Sequence[tuple[ReportModel, Diagnosis]]) -> list[list[Any]]:
    """The rows of the CSV file: one per model and layer."""
    keys = [key for key in READINGS if any(key in row for _, one in shown for row in one.rows)]
    lines: list[list[Any]] = [["model", "images", "against", "layer", *keys]]
    for model, one in shown:
        lines += [[model.name, one.images, one.against, row["layer"], *map(row.get, keys)] for row in one.rows]
    return lines
