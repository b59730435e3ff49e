"""What attention does: charts by depth for a few models, or a gallery with one row per model for many.

The charts of one column of a gallery have the same axes: the depth runs from a model's first layer to its last, and the
values cover all models. Rows can be sorted by every column, and link to the models' own pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from vitfocus.attention.curves import REFERENCE_MODELS, reading_curves, series
from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.attention.findings import reference, reference_values, thresholds_of, uniform_note
from vitfocus.attention.readings import READINGS, Chart, cell, charts, columns
from vitfocus.core.modules import insertion_sentence
from vitfocus.core.tables import Table, counted
from vitfocus.report.charts import area, drawing, element, grid_map, line_chart, marker, path, scale
from vitfocus.report.comparison import read_estimate
from vitfocus.report.explorer import EXPLORER
from vitfocus.report.page import Cell, ChartCell, LinkCell, Page, minus
from vitfocus.report.runs import ReportModel, setting_of

Diagnoses = dict[str, Diagnosis]

#: The readings in a gallery.
_GALLERY_READINGS = ("entropy", "distance", "overfocus", "head_similarity", "stability", "high_norm")
#: From this number of models on, a page about diagnoses is a gallery by default.
_GALLERY_MODELS = 3
#: The size and margin of a small chart, and the number of steps along the depth of the reference models.
_WIDTH, _HEIGHT, _MARGIN, _STEPS = 116.0, 60.0, 5.0, 23


def describe_setting(diagnosis: Diagnosis) -> str:
    """The number and size of the images, and the corruption: "64 images of 224×224 pixels, clean and under fog/3"."""
    under = f", clean and under {diagnosis.against}" if diagnosis.against else ""
    return f"{counted(diagnosis.images, 'image')} of {'×'.join(map(str, diagnosis.size))} pixels{under}"


def group_diagnoses(models: Sequence[ReportModel]) -> list[Diagnoses]:
    """The diagnoses by model, in one group per setting (images, size, corruption)."""
    groups: dict[tuple[Any, ...], Diagnoses] = {}
    for model in models:
        for diagnosis in model.diagnoses:
            groups.setdefault(setting_of(diagnosis), {}).setdefault(model.name, diagnosis)
    return list(groups.values())


def add_attention(page: Page, models: Sequence[ReportModel], colours: Mapping[str, int]) -> None:
    """Charts, findings and a table for every set of images that was diagnosed."""
    page.section("Attention by depth")
    for diagnoses in group_diagnoses(models):
        setting = describe_setting(next(iter(diagnoses.values())))
        page.text(f"{', '.join(diagnoses)}: {setting}.")
        drawn = [
            (f"{chart.title} by depth", reading_chart(key, diagnoses, colours), _caption(key, chart, diagnoses))
            for key, chart in charts().items()
            if any(key in row for diagnosis in diagnoses.values() for row in diagnosis.rows)
        ]
        page.figures(*drawn)
        page.figures(*_high_norm_maps(diagnoses), size="small")
        for name, diagnosis in diagnoses.items():
            page.heading(f"Findings for {name}")
            page.points([(one.read, one.explanation) for one in diagnosis.explained])
        for name, diagnosis in diagnoses.items():
            shown = {k: head for k, (head, *_) in columns().items() if any(k in row for row in diagnosis.rows)}
            lines = [[Cell(cell(row, k), row[k]) if k in row else None for k in shown] for row in diagnosis.rows]
            page.table(f"all layers of {name}, {setting}", list(shown.values()), lines, folded=True)


def _high_norm_maps(diagnoses: Diagnoses) -> Iterator[tuple[str, str, str]]:
    """Where the high-norm tokens of each model lie, in the layer that has most of them, if this is a finding."""
    for name, diagnosis in diagnoses.items():
        if not any(one.kind == "high_norm" for one in diagnosis.explained):
            continue
        layer = max(diagnosis.rows, key=lambda row: row.get("high_norm", 0.0))["layer"]
        shares = diagnosis.high_norm_places.get(layer)
        if shares and all(shares):
            title = f"Where high-norm tokens lie, layer {layer}"
            caption = f"{name}: the share of the images in which the token of a patch has a high norm, by position."
            yield f"{title}, {name}", grid_map(title, shares), caption


def reading_chart(key: str, diagnoses: Diagnoses, colours: Mapping[str, int]) -> str:
    """A reading by depth, one line per model."""
    chart, curves = charts()[key], reading_curves(key, diagnoses, colours)
    y_range = (curves.low, curves.high)
    title = f"{chart.title} by depth"
    return line_chart(title, curves.lines, "layer (0 is the first)", chart.axis, curves.references, y_range, True)


def _caption(key: str, chart: Chart, diagnoses: Diagnoses) -> str:
    """What the reading means, and its mean over the layers."""
    means = {
        name: fmean(value for _, value in points)
        for name, diagnosis in diagnoses.items()
        if (points := series(diagnosis.rows, key, chart.factor))
    }
    unit = f" {chart.unit}" if chart.unit else ""
    text = ", ".join(f"{name} {value:.3g}{unit}" for name, value in means.items())
    return minus(f"{chart.meaning} Mean over the layers: {text}.")


def is_gallery(models: Sequence[ReportModel]) -> bool:
    """Whether a page about these models is a gallery by default: several, all of them diagnosed, none trained."""
    return len(models) >= _GALLERY_MODELS and all(model.diagnoses and model.training is None for model in models)


def add_gallery(page: Page, models: Sequence[ReportModel], target: Path) -> None:
    """The table of the models, the meaning of the readings, and the findings.

    Args:
        page: The page.
        models: The models; those without a diagnosis are left out.
        target: The file that the page will be written to; links are relative to it.
    """
    shown = [(model, model.diagnoses[0]) for model in models if model.diagnoses]
    diagnoses = [diagnosis for _, diagnosis in shown]
    page.section("Models")
    settings = list(dict.fromkeys(map(describe_setting, diagnoses)))
    count = counted(len(diagnoses), "model")
    page.text(
        f"{count} on {settings[0]}."
        if len(settings) == 1
        else f"{count}, diagnosed on different images: only compare models that were diagnosed on the same images."
    )
    page.points([insertion_sentence(model.inserted, model.name) for model, _ in shown if model.inserted])
    readings = _gallery_columns(diagnoses)
    rows = [
        [_name_cell(model, found, target), _accuracy(model), *(one.small_chart(found) for one in readings)]
        for model, found in shown
    ]
    headings = ["model", "top-1 (%)", *(one.heading for one in readings)]
    page.table("gallery", headings, rows, saved=_csv_lines(shown), sortable=True)
    page.text(
        "A chart runs from the first layer of a model to its last, and the number is the mean over the layers. All "
        "charts of a column have the same axes. Dashed: the thresholds of the findings. Grey: "
        f"{REFERENCE_MODELS.partition(',')[0]} on {reference()['images']} photographs.",
        quiet=True,
    )
    if note := uniform_note({model.name: found.rows for model, found in shown}):
        page.text(note)
    page.section("What the readings mean")
    page.points([(f"{one.heading}:", one.meaning) for one in readings])
    page.section("What stands out")
    page.points([(f"{model.name}:", " ".join(one.read for one in found.explained)) for model, found in shown])


def means_table(diagnoses: Sequence[Diagnosis]) -> Table:
    """The means over the layers of the readings of several models, to print."""
    readings = _gallery_columns(diagnoses)
    rows = []
    for one in diagnoses:
        curves = [reading.points(one) for reading in readings]
        means = [f"{fmean(value for _, value in points):.3g}" if points else "–" for points in curves]
        rows.append([one.model, str(len(one.rows)), str(one.images), *means])
    headings = [reading.heading.lower() for reading in readings]
    return Table("Means over the layers", ["model", "layers", "images", *headings], rows)


@dataclass(frozen=True)
class _GalleryColumn:
    """A reading in a gallery, with the ends of the column's axis.

    The entropy is in percent of its bound, so that models with different numbers of tokens can be compared.
    """

    key: str
    chart: Chart
    low: float = 0.0
    high: float = 0.0

    @property
    def factor(self) -> float:
        return 100.0 if self.key == "entropy" else self.chart.factor

    @property
    def heading(self) -> str:
        unit = f" ({self.chart.unit})" if self.chart.unit else ""
        return "Entropy (% of uniform)" if self.key == "entropy" else f"{self.chart.title}{unit}"

    @property
    def meaning(self) -> str:
        said = self.chart.meaning.partition(". ")[0].rstrip(".") + "."
        said += " In percent of the entropy of uniform attention." if self.key == "entropy" else ""
        return f"{said} The axis runs from {self.low:.3g} to {self.high:.3g}."

    def points(self, diagnosis: Diagnosis) -> list[tuple[float, float]]:
        """The values by depth, from 0 (first layer) to 1 (last)."""
        last = max((row["layer"] for row in diagnosis.rows), default=0) or 1
        bound = "entropy_bound" if self.key == "entropy" else ""
        rows = [row for row in diagnosis.rows if self.key in row and (not bound or row.get(bound))]
        return [(row["layer"] / last, self.factor * row[self.key] / (row[bound] if bound else 1.0)) for row in rows]

    def reference_band(self) -> list[tuple[float, float, float]]:
        """The range of the reference models by depth, as (depth, low, high)."""
        depths = [step / _STEPS for step in range(_STEPS + 1)]
        found = [(depth, list(reference_values(self.key, depth).values())) for depth in depths]
        ends = [(depth, self.factor * min(values), self.factor * max(values)) for depth, values in found if values]
        return [(depth, min(low, self.high), min(high, self.high)) for depth, low, high in ends]

    def small_chart(self, diagnosis: Diagnosis) -> ChartCell | None:
        """A small chart with the mean over the layers below it."""
        points = self.points(diagnosis)
        if not points:
            return None
        x = scale(0.0, 1.0, _MARGIN, _WIDTH - _MARGIN)
        y = scale(self.low, self.high, _HEIGHT - _MARGIN, _MARGIN)
        parts = []
        comparable = self.key != "stability" or diagnosis.against == reference()["against"]
        if band := self.reference_band() if comparable else []:
            parts.append(area(band, x, y, "known"))
        for limit, _, _ in thresholds_of(self.key):
            level = y(self.factor * limit)
            parts.append(element("path", d=path([(_MARGIN, level), (_WIDTH - _MARGIN, level)]), kind="reference thin"))
        parts.append(element("line", x1=_MARGIN, x2=_WIDTH - _MARGIN, y1=y(self.low), y2=y(self.low), kind="axis"))
        parts.append(element("path", d=path([(x(a), y(b)) for a, b in points]), kind="line c0"))
        parts.append(marker(0, x(points[-1][0]), y(points[-1][1]), "dot c0", 2.6))
        values = [value for _, value in points]
        mean = fmean(values)
        title = f"{self.chart.title} by depth: first layer {values[0]:.3g}, last {values[-1]:.3g}"
        title += f", from {min(values):.3g} to {max(values):.3g}"
        return ChartCell(f"{mean:.3g}", mean, drawing(_WIDTH, _HEIGHT, parts, title, 1.0))


def _gallery_columns(diagnoses: Sequence[Diagnosis]) -> list[_GalleryColumn]:
    """The readings that any model has; an axis covers all values, the thresholds, and 0."""
    found = []
    for key in _GALLERY_READINGS:
        column = _GalleryColumn(key, charts()[key])
        if values := [value for one in diagnoses for _, value in column.points(one)]:
            values += [column.factor * limit for limit, _, _ in thresholds_of(key)]
            found.append(_GalleryColumn(key, column.chart, min(0.0, *values), max(values)))
    return found


def _name_cell(model: ReportModel, diagnosis: Diagnosis, target: Path) -> LinkCell:
    """The model, the images it was diagnosed on, and links to its own page and explorer."""
    about = f"{counted(len(diagnosis.rows), 'layer')}, {describe_setting(diagnosis)}"
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
    return LinkCell(model.name, f"{about}{'' if diagnosis.trained else ', untrained'}", tuple(links))


def _accuracy(model: ReportModel) -> Cell | None:
    """The top-1 accuracy of the model's first evaluation that has it."""
    for scores in model.scores:
        summary = scores.models[next(iter(scores.models))]
        if "top1" in summary:
            found = read_estimate(summary, "top1")
            return Cell(found.text("z.1f"), found.number)
    return None


def _csv_lines(shown: Sequence[tuple[ReportModel, Diagnosis]]) -> list[list[Any]]:
    """The lines of the CSV file: one per model and layer."""
    keys = [key for key in READINGS if any(key in row for _, one in shown for row in one.rows)]
    lines: list[list[Any]] = [["model", "images", "against", "layer", *keys]]
    for model, one in shown:
        lines += [[model.name, one.images, one.against, row["layer"], *map(row.get, keys)] for row in one.rows]
    return lines
