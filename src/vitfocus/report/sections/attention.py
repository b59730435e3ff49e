"""Attention by depth: one chart per reading with a sentence on what it means, the models overlaid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.attention.overfocus import TOP, uniform_overfocus
from vitfocus.attention.table import COLUMNS, cell
from vitfocus.core.tables import counted
from vitfocus.report.charts import Line, Reference, line_chart
from vitfocus.report.page import Cell, Page, minus
from vitfocus.report.runs import ReportModel

Diagnoses = dict[str, Diagnosis]


@dataclass(frozen=True)
class ReadingChart:
    """How a reading is drawn by depth: its axis, what it means, and the unit of its mean over the layers."""

    key: str
    title: str
    axis: str
    meaning: str
    factor: float = 1.0
    unit: str = ""
    low: float | None = None
    high: float | None = None


READINGS = (
    ReadingChart(
        "entropy",
        "Entropy",
        "entropy of a row of attention (nats)",
        "How widely a token attends: exp(entropy) is roughly the number of tokens it attends to. At the dashed "
        "bound it attends to all equally. The band spans the 15th to 85th percentile of the rows; the dotted line is "
        "the class token.",
        unit="nats",
        low=0.0,
    ),
    ReadingChart(
        "distance",
        "Distance",
        "mean distance to attended tokens (sides, L1)",
        "How far away the attended tokens are, in sides of the image (or of the window). Small values mean local "
        "attention, like a convolution; uniform attention over a square has about 0.67.",
        unit="sides",
        low=0.0,
    ),
    ReadingChart(
        "overfocus",
        "Overfocus",
        f"attention received by the top {TOP:.0%} of tokens (%)",
        f"The share of all attention that the most attended {TOP:.0%} of the tokens receive. The dashed line is "
        "uniform attention. Far above it, all queries attend to the same few tokens: vertical lines in the attention "
        "map, easily disturbed by noise.",
        factor=100.0,
        unit="%",
        low=0.0,
    ),
    ReadingChart(
        "stability",
        "Stability",
        "cosine similarity, clean and corrupted maps",
        "The cosine similarity between a layer's attention maps on the clean and on the corrupted image: 1 means that "
        "it attends to the same tokens. The band spans the middle half of all images and heads.",
        high=1.0,
    ),
    ReadingChart(
        "head_similarity",
        "Head similarity",
        "mean cosine similarity of the heads' maps",
        "The mean cosine similarity between the maps of a layer's heads. Near 1 the heads are redundant; lower values "
        "mean that they attend to different tokens.",
        high=1.0,
    ),
    ReadingChart(
        "diversity_official",
        "Row similarity (ADL)",
        "mean cosine similarity with the mean row",
        "What the Attention Diversification Loss reduces: at 1 all queries attend to the same tokens. Only attention "
        "above twice the uniform share (2/K of K tokens) counts, so a uniform map has 0.",
        high=1.0,
    ),
    ReadingChart(
        "effective_tokens",
        "Effective tokens",
        "effective number of attended tokens",
        "The effective number of tokens that receive attention from all queries together. Small values mean overfocus.",
        unit="tokens",
        low=0.0,
    ),
    ReadingChart(
        "scaling_mean",
        "Scale of Context Broadcasting",
        "mean of the scaling weights λ",
        "How much of the mean token the scaled Context Broadcasting learned to add in each block; 0 adds nothing.",
    ),
)


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
            (f"{reading.title} by depth", reading_chart(reading, diagnoses, colours), _caption(reading, diagnoses))
            for reading in READINGS
            if any(reading.key in row for diagnosis in diagnoses.values() for row in diagnosis.rows)
        ]
        page.figures(*drawn)
        for name, diagnosis in diagnoses.items():
            page.heading(f"Findings for {name}")
            page.points(diagnosis.findings or ["No reading crosses its threshold."])
        for name, diagnosis in diagnoses.items():
            keys = [key for key in COLUMNS if any(key in row for row in diagnosis.rows)]
            lines = [
                [Cell(cell(row, key), row.get(key)) if key in row else None for key in keys] for row in diagnosis.rows
            ]
            headings = [COLUMNS[key][0] for key in keys]
            page.table(f"all layers of {name}, {counted(images, 'image')}{under}", headings, lines, folded=True)


def reading_chart(reading: ReadingChart, diagnoses: Diagnoses, colours: Mapping[str, int]) -> str:
    """A reading by depth, one line per model."""
    lines: list[Line] = []
    references: list[Reference] = []
    for name, diagnosis in diagnoses.items():
        points = _series(diagnosis, reading.key, reading.factor)
        if not points:
            continue
        lines.append(Line(name, points, colours[name], _band(reading, diagnosis)))
        if reading.key == "entropy" and (of_class := _series(diagnosis, "entropy_cls")):
            lines.append(Line(f"{name}: class token", of_class, colours[name], dashed=True))
    if reading.key == "entropy":
        bound = next(_series(diagnosis, "entropy_bound") for diagnosis in diagnoses.values())
        references.append(Reference("bound: uniform attention", bound))
    if reading.key == "overfocus":
        references += overfocus_references(diagnoses)
    ends = [y for line in lines for _, y in line.points] + [b for line in lines for _, b, _ in line.band]
    low = reading.low if reading.low is not None else min(0.0, *ends) if reading.high == 1.0 else None
    return line_chart(
        f"{reading.title} by depth",
        lines,
        "layer (0 is the first)",
        reading.axis,
        references,
        (low, reading.high),
        True,
    )


def overfocus_references(diagnoses: Diagnoses) -> list[Reference]:
    """The overfocus of uniform attention, which depends on the number of tokens; one line if all models agree."""
    by_model = {name: points for name, diagnosis in diagnoses.items() if (points := _uniform(diagnosis))}
    levels = {level for points in by_model.values() for _, level in points}
    if len(levels) == 1:
        return [_uniform_reference("", next(iter(by_model.values())))]
    distinct: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name, points in by_model.items():
        distinct.setdefault(tuple(points), []).append(name)
    return [
        _uniform_reference(f"{', '.join(names)}: " if len(distinct) > 1 else "", points)
        for points, names in distinct.items()
    ]


def _uniform_reference(whose: str, points: Sequence[tuple[float, float]]) -> Reference:
    """One level if all layers have the same, else a line by layer."""
    low, high = min(level for _, level in points), max(level for _, level in points)
    if low == high:
        return Reference(f"{whose}uniform attention ({low:.3g} %)", level=low)
    return Reference(f"{whose}uniform attention ({low:.3g} to {high:.3g} %)", points)


def _uniform(diagnosis: Diagnosis) -> list[tuple[float, float]]:
    """The uniform level by layer in percent; the bound of the entropy gives the number of keys."""
    return [
        (float(row["layer"]), 100 * uniform_overfocus(round(math.exp(row["entropy_bound"]))))
        for row in diagnosis.rows
        if "overfocus" in row and 0 <= row.get("entropy_bound", -1) < 100
    ]


def _band(reading: ReadingChart, diagnosis: Diagnosis) -> list[tuple[float, float, float]]:
    if reading.key == "entropy":
        keys = ("entropy_p15", "entropy_p85")
        rows = [row for row in diagnosis.rows if all(key in row for key in keys)]
        return [(row["layer"], row[keys[0]], row[keys[1]]) for row in rows]
    if reading.key == "stability":
        band = []
        for layer, values in sorted(diagnosis.stability_values.items()):
            flat = [value for image in values for value in image]
            if len(flat) > 1:
                low, _, high = quantiles(flat, n=4, method="inclusive")
                band.append((float(layer), low, high))
        return band
    return []


def _series(diagnosis: Diagnosis, key: str, factor: float = 1.0) -> list[tuple[float, float]]:
    return [(float(row["layer"]), factor * row[key]) for row in diagnosis.rows if key in row]


def _caption(reading: ReadingChart, diagnoses: Diagnoses) -> str:
    """What the reading means, and its mean over the layers."""
    means = {
        name: fmean(value for _, value in points)
        for name, diagnosis in diagnoses.items()
        if (points := _series(diagnosis, reading.key, reading.factor))
    }
    unit = f" {reading.unit}" if reading.unit else ""
    said = ", ".join(f"{name} {value:.3g}{unit}" for name, value in means.items())
    return minus(f"{reading.meaning} Mean over the layers: {said}.")
