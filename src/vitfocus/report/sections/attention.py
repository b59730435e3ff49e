"""Attention by depth: one chart per reading with a sentence on what it means, the models overlaid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from vitfocus.attention.curves import reading_curves, series
from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.attention.readings import Chart, cell, charts, columns
from vitfocus.core.tables import counted
from vitfocus.report.charts import line_chart, place_map
from vitfocus.report.page import Cell, Page, minus
from vitfocus.report.runs import ReportModel

Diagnoses = dict[str, Diagnosis]


def group_diagnoses(models: Sequence[ReportModel]) -> dict[tuple[int, tuple[int, int], str | None], Diagnoses]:
    """The diagnoses by setting (images, size, corruption) and model."""
    groups: dict[tuple[int, tuple[int, int], str | None], Diagnoses] = {}
    for model in models:
        for diagnosis in model.diagnoses:
            setting = (diagnosis.images, diagnosis.size, diagnosis.against)
            groups.setdefault(setting, {}).setdefault(model.name, diagnosis)
    return groups


def add_attention(page: Page, models: Sequence[ReportModel], colours: Mapping[str, int]) -> None:
    """Charts, findings and a table for every set of images that attention was read on."""
    page.section("Attention by depth")
    for (images, size, against), diagnoses in group_diagnoses(models).items():
        under = f", clean and under {against}" if against else ""
        page.text(f"{', '.join(diagnoses)}: {counted(images, 'image')} of {size[0]}×{size[1]} pixels{under}.")
        drawn = [
            (f"{chart.title} by depth", reading_chart(key, diagnoses, colours), _caption(key, chart, diagnoses))
            for key, chart in charts().items()
            if any(key in row for diagnosis in diagnoses.values() for row in diagnosis.rows)
        ]
        page.figures(*drawn)
        page.figures(*_places(diagnoses), size="small")
        for name, diagnosis in diagnoses.items():
            page.heading(f"Findings for {name}")
            page.points([(one.read, one.explanation) for one in diagnosis.explained])
        for name, diagnosis in diagnoses.items():
            shown = columns()
            keys = [key for key in shown if any(key in row for row in diagnosis.rows)]
            lines = [
                [Cell(cell(row, key), row.get(key)) if key in row else None for key in keys] for row in diagnosis.rows
            ]
            headings = [shown[key][0] for key in keys]
            page.table(f"all layers of {name}, {counted(images, 'image')}{under}", headings, lines, folded=True)


def _places(diagnoses: Diagnoses) -> Iterator[tuple[str, str, str]]:
    """Where the high-norm tokens of each model lie, in the layer that has most of them, if they stand out there."""
    for name, diagnosis in diagnoses.items():
        if not any(one.kind == "high_norm" for one in diagnosis.explained):
            continue
        worst = max(diagnosis.rows, key=lambda row: row.get("high_norm", 0.0))
        places = diagnosis.high_norm_places.get(worst["layer"])
        if places and all(places):
            title = f"Where high-norm tokens lie, layer {worst['layer']}"
            words = f"{name}: the share of the images in which the token of a patch has a high norm, by its place."
            yield f"{title}, {name}", place_map(title, places), words


def reading_chart(key: str, diagnoses: Diagnoses, colours: Mapping[str, int]) -> str:
    """A reading by depth, one line per model."""
    chart, curves = charts()[key], reading_curves(key, diagnoses, colours)
    return line_chart(
        f"{chart.title} by depth",
        curves.lines,
        "layer (0 is the first)",
        chart.axis,
        curves.references,
        (curves.low, curves.high),
        whole_x=True,
    )


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
