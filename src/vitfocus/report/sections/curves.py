"""Accuracy and loss while training, from metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from vitfocus.report.charts.lines import Line, line_chart
from vitfocus.report.page import Page
from vitfocus.report.subjects import Subject

#: Scores and losses by the names they are logged under: title and axis. Other names are drawn as they are.
_SCORES = {
    "top1": ("Accuracy while training", "top-1 on validation images (%)"),
    "miou": ("mIoU while training", "mIoU on validation images (%)"),
    "pixel_accuracy": ("Pixel accuracy while training", "pixels right on validation images (%)"),
    "box_ap": ("Box AP while training", "box AP on validation images (%)"),
    "mask_ap": ("Mask AP while training", "mask AP on validation images (%)"),
    "accuracy": ("Accuracy while training", "accuracy on validation data (%)"),
}
_LOSSES = {
    ("train", "loss"): ("Training loss", "training loss (nats, all terms)"),
    ("eval", "loss"): ("Validation loss", "validation loss (nats)"),
    ("train", "adl"): ("Attention diversification loss", "weight × ADL (no unit)"),
    ("train", "distill"): ("Distillation loss", "distillation loss (nats)"),
}
#: At most so many scores are drawn; a detector logs a dozen.
_MOST = 6
_NOT_SCORES = frozenset({"step", "epoch", "loss", "kind", "top5"})
_POINTS = 240


def add_curves(page: Page, subjects: Sequence[Subject], colours: Mapping[str, int]) -> None:
    """One chart for every number that was logged."""
    trained = [s for s in subjects if s.training is not None and s.training.rows]
    drawn = []
    for kind, key, factor, title, axis in _curves(trained):
        lines = []
        for subject in trained:
            assert subject.training is not None
            points = _points(subject.training.rows, kind, key, factor)
            if len(points) > 1 or (points and kind == "eval"):
                marked = kind == "eval" and len(points) <= 40
                lines.append(Line(subject.name, points, colours[subject.name], marked=marked))
        if lines:
            drawn.append((f"{title} {key}", line_chart(title, lines, "epoch", axis), ""))
    if not drawn:
        return
    page.section("How training went")
    page.figures(*drawn)
    if any(not subject.training.finished for subject in trained if subject.training is not None):
        unfinished = ", ".join(s.name for s in trained if s.training is not None and not s.training.finished)
        page.text(f"Not finished: {unfinished}. The curves end where the run is now, or was stopped.", quiet=True)
    page.text(
        "The training loss is taken on augmented images and includes every auxiliary term, so it compares between "
        "models only where their losses have the same terms.",
        quiet=True,
    )


def _curves(trained: Sequence[Subject]) -> list[tuple[str, str, float, str, str]]:
    """What to draw: kind of row, key, factor, title and axis; scores first. Shares are drawn in percent."""
    rows = [row for subject in trained if subject.training is not None for row in subject.training.rows]
    logged: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items() if row.get("kind") == "eval" else ():
            if (
                isinstance(value, int | float)
                and isfinite(value)
                and key not in _NOT_SCORES
                and not key.endswith("_raw")
            ):
                logged.setdefault(key, []).append(float(value))
    order = [*(key for key in _SCORES if key in logged), *(key for key in logged if key not in _SCORES)]
    curves = []
    for key in order[:_MOST]:
        share = all(0 <= value <= 1 for value in logged[key])
        title, axis = _SCORES.get(key, (key, f"{key} (%)" if share else key))
        curves.append(("eval", key, 100.0 if share else 1.0, title, axis))
    return curves + [(kind, key, 1.0, *said) for (kind, key), said in _LOSSES.items()]


def _points(rows: Sequence[Mapping[str, Any]], kind: str, key: str, factor: float) -> list[tuple[float, float]]:
    """The curve, thinned to what a chart can show by averaging neighbours."""
    points = [
        (float(row.get("epoch", row["step"])), factor * float(row[key]))
        for row in rows
        if row.get("kind") == kind and isinstance(row.get(key), int | float) and isfinite(row[key])
    ]
    if len(points) <= _POINTS:
        return points
    size = -(-len(points) // _POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
