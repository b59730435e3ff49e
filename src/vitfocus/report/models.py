"""The models: a diagram of blocks and treatments, the cost, and the training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from typing import Any, NamedTuple

from vitfocus.core.metrics import METRICS
from vitfocus.report.charts import Line, drawing, element, line_chart, text
from vitfocus.report.model_card import BlockCard, Card
from vitfocus.report.page import Cell, Page
from vitfocus.report.runs import ReportModel
from vitfocus.tasks import items_of
from vitfocus.treatments import TREATMENTS, all_treatments

COLUMN, GAP, PER_ROW, LEFT = 50.0, 14.0, 12, 84.0
PART, SLOT = 26.0, 15.0


class _LayoutRow(NamedTuple):
    """A row of the diagram: a part of a block, or a slot between two parts, and the places of treatments in it."""

    name: str
    places: tuple[str, ...]
    height: float = SLOT


#: A block from its output (top) to its input.
_LAYOUT = (
    _LayoutRow("after block", ("block.end",)),
    _LayoutRow("after MLP", ("mlp.end",)),
    _LayoutRow("MLP", ("mlp.mid", "mlp"), PART),
    _LayoutRow("before MLP", ("mlp.front",)),
    _LayoutRow("after attn.", ("attention.end",)),
    _LayoutRow("attention", ("attention.mid", "attention.map", "attention"), PART),
    _LayoutRow("before attn.", ("pool", "attention.front")),
)


def add_treatments(page: Page, models: Sequence[ReportModel]) -> None:
    """One diagram per treated model, and a table of all treated places."""
    drawn, lines, used = [], [], []
    for model in models:
        card = model.card or Card([])
        places = [(block, treated) for block in card.blocks for treated in block.treated]
        if not places:
            continue
        specs = " + ".join(card.treatments)
        diagram = block_diagram(model.name, card.blocks)
        drawn.append((f"treatments of {model.name}", diagram, f"{model.name}: {specs}."))
        lines += [[model.name, block.depth, block.name, t.spec, t.place] for block, t in places]
        used += [treated.treatment for _, treated in places]
    if not drawn:
        return
    page.section("Treatments")
    page.figures(*drawn, size="single")
    page.text("Blocks from first to last; inside a block, tokens flow from bottom to top.", quiet=True)
    page.points([f"{kind.label}: {kind.about}." for kind in all_treatments() if kind.name in used])
    page.table("treated places", ["model", "block", "name", "treatment", "place"], lines, folded=True)


def block_diagram(title: str, blocks: Sequence[BlockCard]) -> str:
    """The blocks of a card as SVG text, at most twelve per line, stages separated."""
    used = {treated.place for block in blocks for treated in block.treated}
    layout = [row for row in _LAYOUT if row.height == PART or used & set(row.places)]
    tall = sum(row.height for row in layout)
    lines = [blocks[start : start + PER_ROW] for start in range(0, len(blocks), PER_ROW)]
    parts: list[str] = []
    y, right = 8.0, 0.0
    for line in lines:
        below = y
        for row in layout:
            kind = "ink" if row.height == PART else "quiet"
            parts.append(text(LEFT - 10, below + row.height / 2 + 4, row.name, "end", kind))
            below += row.height
        x, stage = LEFT, line[0].stage
        for block in line:
            if block.stage != stage:
                x, stage = x + GAP, block.stage
            parts += _block(block, layout, x, y)
            parts.append(text(x + COLUMN / 2 - 2, y + tall + 15, str(block.depth), "middle", "quiet"))
            x += COLUMN
        parts.append(text(LEFT - 10, y + tall + 15, "block", "end", "quiet"))
        right = max(right, x)
        y += tall + 30
    return drawing(max(right, 320.0), y, parts, title)


def _block(block: BlockCard, layout: Sequence[_LayoutRow], x: float, y: float) -> list[str]:
    rows, columns = block.grid
    hint = f"{block.name}: {block.kind} attention, grid {rows}×{columns}, width {block.width}"
    hint += "".join(f"; {treated.spec} at {treated.place}" for treated in block.treated)
    parts = [element("title", escape(hint))]
    for row in layout:
        here = [treated for treated in block.treated if treated.place in row.places]
        if row.height == PART:
            absent = not block.mlp if row.name == "MLP" else block.kind == "none"
            kind = "part absent" if absent else "part"
            parts.append(element("rect", x=x, y=y + 1, width=COLUMN - 5, height=row.height - 2, rx=4, kind=kind))
        for index, treated in enumerate(here):
            parts.append(_badge(treated.treatment, x + 4, y + (row.height - 13) / 2, (COLUMN - 13) / len(here), index))
        y += row.height
    return [element("g", "".join(parts))]


def _badge(treatment: str, x: float, y: float, width: float, index: int) -> str:
    kind = TREATMENTS.get(treatment)  # a card may name a treatment that is not installed here
    name, number = (kind.label, kind.colour) if kind is not None else (treatment[:3], 6)
    left = x + width * index
    return element("rect", x=left, y=y, width=width - 1, height=13, rx=6, kind=f"badge c{number}") + text(
        left + (width - 1) / 2, y + 10, name, "middle", "badge-text"
    )


def add_cost(page: Page, models: Sequence[ReportModel]) -> None:
    """A table of costs, one column per model, with separate rows for different conditions of measurement."""
    rows: list[list[Any]] = []
    letters: dict[str, str] = {}
    for costs_of in (_counts, _measured, _training_costs):
        costs = [costs_of(model) for model in models]
        for label, condition in dict.fromkeys(key for found in costs for key in found):
            if condition != _COUNTED:
                letters.setdefault(condition, chr(ord("a") + len(letters)))
            first, *others = values = [found.get((label, condition)) for found in costs]
            cells = [Cell(*value) if value else None for value in values]
            for value in others:
                ratio = value[1] / first[1] if value and first and first[1] else None
                cells.append(None if ratio is None else Cell(f"{ratio:.3f}", ratio))
            rows.append([label, letters.get(condition, condition), *cells])
    if not rows:
        return
    page.section("Cost")
    name, *names = [model.name for model in models]
    page.table("costs", ["cost", "measured", name, *names, *(f"{other} ÷ {name}" for other in names)], rows)
    page.points([f"{letter}: {condition}." for condition, letter in letters.items()])
    page.text(
        "Multiply-adds count matrix products and convolutions for one image (papers call them FLOPs). Times are "
        "medians with the range in brackets; a wide range means that the machine was busy. A training step is a "
        "forward pass, a backward pass and a step of AdamW; its memory is the weights, the optimiser's state and the "
        "peak allocation of the step.",
        quiet=True,
    )


_COUNTED = "counted"
#: The text in the table and the number, by label and conditions of measurement.
Costs = dict[tuple[str, str], tuple[str, float]]


def _counts(model: ReportModel) -> Costs:
    """Parameters and multiply-adds."""
    costs: Costs = {}
    card = model.card or Card([])
    described = [one for scores in model.scores for one in scores.fingerprint.get("models", {}).values()]
    trained = model.training.results if model.training is not None else {}
    counts = [card.parameters, trained.get("parameters"), *(one.get("parameters") for one in described)]
    if count := next(filter(None, counts), None):
        costs["parameters", _COUNTED] = f"{count:,}", float(count)
    if card.multiply_adds:
        costs["multiply-adds per image (G)", _COUNTED] = f"{card.multiply_adds / 1e9:.4g}", card.multiply_adds / 1e9
    return costs


def _measured(model: ReportModel) -> Costs:
    """Times and memory on the model's card."""
    cost = model.card.cost if model.card is not None else None
    if cost is None:
        return {}
    condition = f"batch {cost.batch}, {cost.dtype}, {cost.device}, torch {cost.torch}, timed separately"
    costs: Costs = {}
    for label, taken in (("forward pass (ms)", cost.forward_seconds), ("training step (ms)", cost.step_seconds)):
        median, low, high = (1e3 * seconds for seconds in (taken.median, *taken.range))
        costs[label, condition] = f"{_digits(median)} [{_digits(low)} to {_digits(high)}]", median
    mib = cost.memory_bytes / 2**20
    costs["memory of a step (MiB)", condition] = _digits(mib), mib
    return costs


def _training_costs(model: ReportModel) -> Costs:
    """Times and memory that the training run recorded."""
    results = model.training.results if model.training is not None else {}
    if model.training is None or not all(results.get(key) for key in ("steps", "seconds", "device")):
        return {}
    batch, torch = model.training.recipe.get("data", {}).get("batch"), results.get("versions", {}).get("torch")
    parts = [batch and f"batch {batch}", results.get("precision"), results["device"], torch and f"torch {torch}"]
    condition = ", ".join([*(str(part) for part in parts if part), "during training"])
    values = {
        "step of the training run (ms)": 1e3 * results["seconds"] / results["steps"],
        f"{items_of(str(results.get('task')))} per second of the training run": results.get("images_per_second", 0.0),
        "whole training run (s)": results["seconds"],
        "peak memory of the training run (MiB)": results.get("peak_memory_bytes", 0.0) / 2**20,
    }
    return {(label, condition): (_digits(value), value) for label, value in values.items() if value}


def _digits(value: float) -> str:
    """Three digits, and no exponent for large numbers.

    >>> _digits(2783.4), _digits(0.012345), _digits(81.26)
    ('2,783', '0.0123', '81.3')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


#: Losses by kind of row and key: title and axis.
_LOSSES = {
    ("train", "loss"): ("Training loss", "training loss (nats, all terms)"),
    ("eval", "loss"): ("Validation loss", "validation loss (nats)"),
    ("train", "adl"): ("Attention diversification loss", "weight × ADL (no unit)"),
    ("train", "distill"): ("Distillation loss", "distillation loss (nats)"),
    ("attention", "entropy_share"): ("Entropy during training", "entropy, share of its maximum (mean over layers)"),
    ("attention", "overfocus"): ("Overfocus during training", "attention of the top 5 % of tokens (mean over layers)"),
}
#: The maximum number of metrics that are drawn; a detector logs a dozen.
_MAX_METRICS = 6
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
    for key in order[:_MAX_METRICS]:
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
