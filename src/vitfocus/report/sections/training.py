"""Training curves: metrics and losses by epoch, from metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from vitfocus.core.metrics import METRICS
from vitfocus.report.charts import Line, line_chart
from vitfocus.report.page import Page
from vitfocus.report.runs import ReportModel

#: Losses by kind of row and key: title and axis.
_LOSSES = {
    ("train", "loss"): ("Training loss", "training loss (nats, all terms)"),
    ("eval", "loss"): ("Validation loss", "validation loss (nats)"),
    ("train", "adl"): ("Attention diversification loss", "weight × ADL (no unit)"),
    ("train", "distill"): ("Distillation loss", "distillation loss (nats)"),
    ("attention", "entropy_share"): ("Entropy during training", "entropy, share of its maximum (mean over layers)"),
    ("attention", "overfocus"): ("Overfocus during training", "attention of the top 5 % of tokens (mean over layers)"),
}
#: At most this many metrics are drawn; a detector logs a dozen.
_MOST = 6
_NOT_METRICS = frozenset({"step", "epoch", "loss", "kind", "top5"})
_POINTS = 240


def training_charts(models: Sequence[ReportModel], colours: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """One figure per logged metric or loss."""
    trained = [one for one in models if one.training is not None and one.training.rows]
    drawn = []
    for kind, key, factor, title, axis in _curves(trained):
        lines = []
        for model in trained:
            assert model.training is not None
            points = _points(model.training.rows, kind, key, factor)
            if len(points) > 1 or (points and kind == "eval"):
                marked = kind != "train" and len(points) <= 40
                lines.append(Line(model.name, points, colours[model.name], marked=marked))
        if lines:
            drawn.append((f"{title} {key}", line_chart(title, lines, "epoch", axis), ""))
    return drawn


def add_training(page: Page, models: Sequence[ReportModel], colours: Mapping[str, int]) -> None:
    """The curves, and what to consider when comparing them."""
    drawn = training_charts(models, colours)
    if not drawn:
        return
    page.section("Training")
    page.figures(*drawn)
    unfinished = [one.name for one in models if one.training is not None and not one.training.finished]
    if unfinished:
        page.text(
            f"Not finished: {', '.join(unfinished)}. The curves end where the run is now or was stopped.", quiet=True
        )
    page.text(
        "The training loss is computed on augmented images and includes every auxiliary term, so it is comparable only "
        "between models whose losses have the same terms.",
        quiet=True,
    )


def _curves(trained: Sequence[ReportModel]) -> list[tuple[str, str, float, str, str]]:
    """What to draw: kind of row, key, factor, title and axis; metrics first. Shares are drawn in percent."""
    rows = [row for model in trained if model.training is not None for row in model.training.rows]
    logged: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items() if row.get("kind") == "eval" else ():
            number = isinstance(value, int | float) and isfinite(value)
            if number and key not in _NOT_METRICS and not key.endswith("_raw"):
                logged.setdefault(key, []).append(float(value))
    order = [*(key for key in METRICS if key in logged), *(key for key in logged if key not in METRICS)]
    curves = []
    for key in order[:_MOST]:
        share = all(0 <= value <= 1 for value in logged[key])
        title = METRICS[key].title if key in METRICS else key
        axis = f"{title} on validation data{' (%)' if share else ''}"
        title = f"{title[0].upper()}{title[1:]} during training" if key in METRICS else key
        curves.append(("eval", key, 100.0 if share else 1.0, title, axis))
    return curves + [(kind, key, 1.0, *said) for (kind, key), said in _LOSSES.items()]


def _points(rows: Sequence[Mapping[str, Any]], kind: str, key: str, factor: float) -> list[tuple[float, float]]:
    """The curve; long ones are averaged over neighbouring points."""
    points = [
        (float(row.get("epoch", row["step"])), factor * value)
        for row in rows
        if row.get("kind") == kind and (value := _number(row.get(key))) is not None
    ]
    if len(points) <= _POINTS:
        return points
    size = -(-len(points) // _POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _number(value: Any) -> float | None:
    """A logged number, or the mean of one number per layer."""
    if isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
        value = sum(value) / len(value)
    return float(value) if isinstance(value, int | float) and isfinite(value) else None
