"""The curves of a reading by depth: lines, thresholds and references, which `plots.py` and the reports draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Protocol

from vitfocus.attention.findings import reference, reference_values, relative_depth, thresholds_of
from vitfocus.attention.readings import LayerRow, charts
from vitfocus.kernels.statistics.reference import uniform_overfocus

Points = Sequence[tuple[float, float]]
Band = Sequence[tuple[float, float, float]]

#: The legend of the band of the reference models.
REFERENCE_MODELS = "DeiT-Ti and ViT-Ti, for comparison"


class Plotted(Protocol):
    """The attributes of a `Diagnosis` that curves need."""

    rows: list[LayerRow]
    against: str | None
    depth: int
    stability_values: dict[int, list[list[float]]]


Diagnoses = Mapping[str, Plotted]


@dataclass(frozen=True)
class Line:
    """A line: points (x, y), a band (x, low, high) and the index of its colour; a model's second line is `dashed`."""

    name: str
    points: Points
    colour: int
    band: Band = ()
    dashed: bool = False
    marked: bool = True


@dataclass(frozen=True)
class Reference:
    """A reference: a line at one level, a level per x, or a band (x, low, high)."""

    name: str
    points: Points = ()
    level: float | None = None
    band: Band = ()


@dataclass(frozen=True)
class Curves:
    """The lines and references of one reading, and the ends of the vertical axis (None: as the values need)."""

    lines: list[Line]
    references: list[Reference]
    low: float | None
    high: float | None


def reading_curves(key: str, diagnoses: Diagnoses, colours: Mapping[str, int]) -> Curves:
    """The curves of a reading, one line per diagnosis, coloured by its name."""
    chart, lines = charts()[key], []
    for name, diagnosis in diagnoses.items():
        if points := series(diagnosis.rows, key, chart.factor):
            lines.append(Line(name, points, colours[name], _band(key, diagnosis)))
            second, label = chart.second
            if second and (points := series(diagnosis.rows, second, chart.factor)):
                lines.append(Line(f"{name}: {label}", points, colours[name], dashed=True))
    references = []
    if key == "entropy":
        bound = series(next(iter(diagnoses.values())).rows, "entropy_bound")
        references.append(Reference("bound log K: uniform attention", bound))
    if key == "overfocus":
        references += uniform_references(diagnoses)
    ends = [y for line in lines for _, y in line.points] + [low for line in lines for _, low, _ in line.band]
    low = chart.low if chart.low is not None else min(0.0, *ends) if chart.high == 1.0 else None
    return Curves(lines, references + _guides(key, diagnoses, chart.factor), low, chart.high)


def series(rows: Sequence[LayerRow], key: str, factor: float = 1.0) -> list[tuple[float, float]]:
    """The values of a reading by layer."""
    return [(float(row["layer"]), factor * row[key]) for row in rows if key in row]


def _band(key: str, diagnosis: Plotted) -> Band:
    """The spread around a line: percentiles of rows for the entropy, quartiles of maps for the stability."""
    if key == "entropy":
        rows = [row for row in diagnosis.rows if "entropy_p15" in row and "entropy_p85" in row]
        return [(row["layer"], row["entropy_p15"], row["entropy_p85"]) for row in rows]
    band = []
    for layer, images in sorted(diagnosis.stability_values.items()) if key == "stability" else ():
        cosines = [value for image in images for value in image]
        if len(cosines) > 1:
            low, _, high = quantiles(cosines, n=4, method="inclusive")
            band.append((float(layer), low, high))
    return band


def uniform_references(diagnoses: Diagnoses) -> list[Reference]:
    """The overfocus of uniform attention in percent: one level if all layers agree, else a line per group of models.

    It depends on the number of keys, which the bound of the entropy gives.
    """
    models: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name, diagnosis in diagnoses.items():
        points = tuple(
            (float(row["layer"]), 100 * uniform_overfocus(round(math.exp(row["entropy_bound"]))))
            for row in diagnosis.rows
            if "overfocus" in row and 0 <= row.get("entropy_bound", -1) < 100
        )
        if points:
            models.setdefault(points, []).append(name)
    if len({level for points in models for _, level in points}) == 1:
        models = dict([next(iter(models.items()))])
    found = []
    for points, names in models.items():
        levels = [level for _, level in points]
        low, high = min(levels), max(levels)
        share = f"{low:.3g} %" if low == high else f"{low:.3g} to {high:.3g} %"
        name = f"{', '.join(names)}: " * (len(models) > 1) + f"uniform attention ({share})"
        found.append(Reference(name, level=low) if low == high else Reference(name, points))
    return found


def _guides(key: str, diagnoses: Diagnoses, factor: float) -> list[Reference]:
    """The thresholds of a reading and the range of the reference models, by the layers of the deepest model."""
    deepest = max(diagnoses.values(), key=lambda one: len(one.rows))
    guides = []
    for threshold, share_of, below in thresholds_of(key):
        rows = [row for row in deepest.rows if key in row and (not share_of or share_of in row)]
        points = [(row["layer"], factor * threshold * (row[share_of] if share_of else 1.0)) for row in rows]
        if points:
            guides.append(Reference(f"threshold: {'low' if below else 'high'}", points))
    if deepest.depth < 2 or (key == "stability" and deepest.against != reference()["against"]):
        return guides
    band = []
    for row in deepest.rows:
        values = reference_values(key, relative_depth(row, deepest.depth)).values() if key in row else ()
        scale = factor * (row.get("entropy_bound", 0.0) if key.startswith("entropy") else 1.0)
        if values and scale:
            band.append((float(row["layer"]), scale * min(values), scale * max(values)))
    return [*guides, Reference(REFERENCE_MODELS, band=band)] if len(band) > 1 else guides
