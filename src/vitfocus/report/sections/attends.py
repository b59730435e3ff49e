"""What attention does by depth: every reading with a sentence that says what it means, the models overlaid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Any

from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.attention.overfocus import TOP, uniform_overfocus
from vitfocus.attention.table import COLUMNS, cell
from vitfocus.core.tables import counted
from vitfocus.report.charts.lines import Line, Reference, line_chart
from vitfocus.report.page import Cell, Page, minus
from vitfocus.report.subjects import Subject

Diagnoses = dict[str, Diagnosis]


@dataclass(frozen=True)
class Reading:
    """A number by depth: its axis, what it means, and how a mean over the layers is written."""

    key: str
    title: str
    axis: str
    meaning: str
    factor: float = 1.0
    unit: str = ""
    low: float | None = None
    high: float | None = None


READINGS = (
    Reading(
        "entropy",
        "Entropy",
        "entropy of a row of attention (nats)",
        "Entropy says how widely a token listens: exp(entropy) is about the number of tokens it listens to, and at the "
        "dashed bound it listens to all alike. The band holds the 15th to 85th percentile of the rows; the dotted line "
        "of a model is its class token.",
        unit="nats",
        low=0.0,
    ),
    Reading(
        "distance",
        "Distance",
        "mean distance to attended tokens (sides, L1)",
        "Distance says how far away the tokens are that a token listens to, in sides of the image (or of the window): "
        "small is local, as a convolution; about 0.67 is what uniform attention over a square gives.",
        unit="sides",
        low=0.0,
    ),
    Reading(
        "overfocus",
        "Overfocus",
        f"attention received by the top {TOP:.0%} of tokens (%)",
        f"Overfocus is the share of all attention that the most attended {TOP:.0%} of the tokens receive. At the "
        "dashed line all tokens receive alike; far above it every query leans on the same few tokens, which show as "
        "vertical lines in the attention map and are easily disturbed.",
        factor=100.0,
        unit="%",
        low=0.0,
    ),
    Reading(
        "stability",
        "Stability",
        "cosine of clean and corrupted maps",
        "Stability is the cosine between a layer's attention on the clean and on the corrupted image: 1 means that it "
        "looks at the same places. The band holds the middle half of all images and heads.",
        high=1.0,
    ),
    Reading(
        "head_similarity",
        "Head similarity",
        "mean cosine between the heads' maps",
        "Head similarity is the cosine between the maps of a layer's heads: near 1 the heads all do the same, so that "
        "one would do; lower means that they look at different things.",
        high=1.0,
    ),
    Reading(
        "diversity_official",
        "Row similarity (ADL)",
        "mean cosine of a row with the mean row",
        "Row similarity is what the Attention Diversification Loss lowers: at 1 all queries attend to the same tokens. "
        "Only attention above twice the uniform share (2/K of K tokens) counts, so a uniform map, which has none, "
        "is at 0.",
        high=1.0,
    ),
    Reading(
        "effective_tokens",
        "Effective tokens",
        "effective number of attended tokens",
        "The effective number of tokens that receive attention, all queries together: small means overfocus.",
        unit="tokens",
        low=0.0,
    ),
    Reading(
        "scaling_mean",
        "Scaling of Context Broadcasting",
        "mean of the scaling weights λ",
        "How much of the mean token the scaled Context Broadcasting learned to add in each block; 0 is none.",
    ),
)


def add_attention(page: Page, subjects: Sequence[Subject], colours: Mapping[str, int]) -> None:
    """Charts, a table and findings for every set of images that attention was read on."""
    groups: dict[tuple[Any, ...], Diagnoses] = {}
    for subject in subjects:
        for diagnosis in subject.diagnoses:
            asked = (diagnosis.images, diagnosis.size, diagnosis.against)
            groups.setdefault(asked, {}).setdefault(subject.name, diagnosis)
    if not groups:
        return
    page.section("What attention does, by depth")
    for (images, size, against), diagnoses in groups.items():
        under = f", clean and under {against}" if against else ""
        page.text(f"{', '.join(diagnoses)}: read on {counted(images, 'image')} of {size[0]}×{size[1]} pixels{under}.")
        drawn = [
            (f"{reading.title} by depth", _chart(reading, diagnoses, colours), _caption(reading, diagnoses))
            for reading in READINGS
            if any(reading.key in row for diagnosis in diagnoses.values() for row in diagnosis.rows)
        ]
        page.figures(*drawn)
        for name, diagnosis in diagnoses.items():
            page.heading(f"What stands out in {name}")
            page.points(diagnosis.findings or ["Nothing stands out by the default thresholds."])
        for name, diagnosis in diagnoses.items():
            keys = [key for key in COLUMNS if any(key in row for row in diagnosis.rows)]
            lines = [
                [Cell(cell(row, key), row.get(key)) if key in row else None for key in keys] for row in diagnosis.rows
            ]
            headings = [COLUMNS[key][0] for key in keys]
            page.table(f"every layer of {name}, {counted(images, 'image')}{under}", headings, lines, folded=True)


def _chart(reading: Reading, diagnoses: Diagnoses, colours: Mapping[str, int]) -> str:
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
        references.append(Reference("bound: all tokens alike", bound))
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
    """Where overfocus lies if all tokens receive alike, which their number decides; one line if one will do."""
    by_model = {name: points for name, diagnosis in diagnoses.items() if (points := _uniform(diagnosis))}
    levels = {level for points in by_model.values() for _, level in points}
    if len(levels) == 1:
        return [_all_alike("", next(iter(by_model.values())))]
    distinct: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name, points in by_model.items():
        distinct.setdefault(tuple(points), []).append(name)
    return [
        _all_alike(f"{', '.join(names)}: " if len(distinct) > 1 else "", points) for points, names in distinct.items()
    ]


def _all_alike(whose: str, points: Sequence[tuple[float, float]]) -> Reference:
    """A level where all layers have it, else a line by layer."""
    low, high = min(level for _, level in points), max(level for _, level in points)
    if low == high:
        return Reference(f"{whose}all tokens alike ({low:.3g} %)", level=low)
    return Reference(f"{whose}all tokens alike ({low:.3g} to {high:.3g} %)", points)


def _uniform(diagnosis: Diagnosis) -> list[tuple[float, float]]:
    """By layer, in percent; the bound of the entropy tells the number of keys."""
    return [
        (float(row["layer"]), 100 * uniform_overfocus(round(math.exp(row["entropy_bound"]))))
        for row in diagnosis.rows
        if "overfocus" in row and 0 <= row.get("entropy_bound", -1) < 100
    ]


def _band(reading: Reading, diagnosis: Diagnosis) -> list[tuple[float, float, float]]:
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


def _caption(reading: Reading, diagnoses: Diagnoses) -> str:
    """What it means, and the means over the layers."""
    means = {
        name: fmean(value for _, value in points)
        for name, diagnosis in diagnoses.items()
        if (points := _series(diagnosis, reading.key, reading.factor))
    }
    unit = f" {reading.unit}" if reading.unit else ""
    said = ", ".join(f"{name} {value:.3g}{unit}" for name, value in means.items())
    return minus(f"{reading.meaning} Mean over the layers: {said}.")
