"""The models: their blocks with the treatments at their places, and their cost, counted or measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from vitfocus.report.charts import drawing, element, text
from vitfocus.report.model_card import BlockCard, Card, Times
from vitfocus.report.page import Cell, Page
from vitfocus.report.runs import ReportModel
from vitfocus.treatments import TREATMENTS, all_treatments

COLUMN, GAP, PER_ROW, LEFT = 50.0, 14.0, 12, 84.0
PART, SLOT = 26.0, 15.0

#: Slots and parts of a block from its output (top) to its input, and the places of treatments in each.
_LAYOUT = (
    ("slot", ("block.end",)),
    ("slot", ("mlp.end",)),
    ("part", "MLP", ("mlp.mid", "mlp")),
    ("slot", ("mlp.front",)),
    ("slot", ("attention.end",)),
    ("part", "attention", ("attention.mid", "attention.map", "attention")),
    ("slot", ("pool", "attention.front")),
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
    layout = [row for row in _LAYOUT if row[0] == "part" or used & set(row[1])]
    tall = sum(PART if row[0] == "part" else SLOT for row in layout)
    lines = [blocks[start : start + PER_ROW] for start in range(0, len(blocks), PER_ROW)]
    parts: list[str] = []
    y, right = 8.0, 0.0
    for line in lines:
        parts += _names(layout, y)
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


def _names(layout: Sequence[Any], y: float) -> list[str]:
    """The names of the rows, on the left."""
    said = {"mlp.end": "after MLP", "mlp.front": "before MLP", "attention.end": "after attn."}
    said |= {"pool": "before attn.", "attention.front": "before attn.", "block.end": "after block"}
    parts = []
    for row in layout:
        height = PART if row[0] == "part" else SLOT
        name = row[1] if row[0] == "part" else said[row[1][0]]
        parts.append(text(LEFT - 10, y + height / 2 + 4, str(name), "end", "ink" if row[0] == "part" else "quiet"))
        y += height
    return parts


def _block(block: BlockCard, layout: Sequence[Any], x: float, y: float) -> list[str]:
    rows, columns = block.grid
    hint = f"{block.name}: {block.kind} attention, grid {rows}×{columns}, width {block.width}"
    hint += "".join(f"; {treated.spec} at {treated.place}" for treated in block.treated)
    parts = [element("title", escape(hint))]
    for row in layout:
        here = [t for t in block.treated if t.place in (row[2] if row[0] == "part" else row[1])]
        height = PART if row[0] == "part" else SLOT
        if row[0] == "part":
            absent = (row[1] == "MLP" and not block.mlp) or (row[1] == "attention" and block.kind == "none")
            kind = "part absent" if absent else "part"
            parts.append(element("rect", x=x, y=y + 1, width=COLUMN - 5, height=height - 2, rx=4, kind=kind))
        for index, treated in enumerate(here):
            parts.append(_badge(treated.treatment, x + 4, y + (height - 13) / 2, (COLUMN - 13) / len(here), index))
        y += height
    return [element("g", "".join(parts))]


def _badge(treatment: str, x: float, y: float, width: float, index: int) -> str:
    kind = TREATMENTS.get(treatment)  # a card may name a treatment that is not installed here
    name, number = (kind.label, kind.colour) if kind is not None else (treatment[:3], 6)
    left = x + width * index
    return element("rect", x=left, y=y, width=width - 1, height=13, rx=6, kind=f"badge c{number}") + text(
        left + (width - 1) / 2, y + 10, name, "middle", "badge-text"
    )


_COUNTED = "counted"
Measure = Callable[[ReportModel], tuple[str, float] | None]


def add_cost(page: Page, models: Sequence[ReportModel]) -> None:
    """A table of what is known, one column per model."""
    rows: list[list[Any]] = []
    places: dict[str, str] = {}
    for label, place, measure in _measures(models):
        found = [measure(model) for model in models]
        if not any(found):
            continue
        base = found[0]
        cells = [Cell(*one) if one else None for one in found]
        ratios = [
            Cell(f"{one[1] / base[1]:.3f}", one[1] / base[1]) if one and base and base[1] else None for one in found[1:]
        ]
        if place not in places and place != _COUNTED:
            places[place] = chr(ord("a") + len(places))
        rows.append([label, places.get(place, place), *cells, *ratios])
    if not rows:
        return
    page.section("Cost")
    first, *others = [model.name for model in models]
    page.table("costs", ["cost", "measured", first, *others, *(f"{name} ÷ {first}" for name in others)], rows)
    page.points([f"{letter}: {place}." for place, letter in places.items()])
    page.text(
        "Multiply-adds count matrix products and convolutions for one image (papers call them FLOPs). Times are "
        "medians with the range in brackets; a wide range means that the machine was busy. A training step is a "
        "forward pass, a backward pass and a step of AdamW; its memory is the weights, the optimiser's state and the "
        "peak allocation of the step.",
        quiet=True,
    )


def _measures(models: Sequence[ReportModel]) -> list[tuple[str, str, Measure]]:
    """The rows of the table: label, conditions of the measurement, and how to read it."""
    rows: list[tuple[str, str, Measure]] = [
        ("parameters", _COUNTED, _parameters),
        ("multiply-adds per image (G)", _COUNTED, _multiply_adds),
    ]
    for place in dict.fromkeys(place for s in models if (place := _circumstances(s))):
        rows += [
            ("forward pass (ms)", place, _time("forward_seconds", place)),
            ("training step (ms)", place, _time("step_seconds", place)),
            ("memory of a step (MiB)", place, _memory(place)),
        ]
    for place in dict.fromkeys(place for s in models if (place := _training_place(s))):
        rows += [
            ("step of the training run (ms)", place, _training(place, "step")),
            ("images per second of the training run", place, _training(place, "images_per_second")),
            ("whole training run (s)", place, _training(place, "seconds")),
            ("peak memory of the training run (MiB)", place, _training(place, "peak_memory_bytes")),
        ]
    return rows


def _parameters(model: ReportModel) -> tuple[str, float] | None:
    count = model.card.parameters if model.card is not None else None
    if count is None and model.training is not None:
        count = model.training.results.get("parameters")
    for scores in model.scores if count is None else ():
        described = scores.fingerprint.get("models", {})
        count = next((one.get("parameters") for one in described.values()), None)
    return (f"{count:,}", float(count)) if count else None


def _multiply_adds(model: ReportModel) -> tuple[str, float] | None:
    count = model.card.multiply_adds if model.card is not None else None
    return (f"{count / 1e9:.4g}", count / 1e9) if count else None


def _circumstances(model: ReportModel) -> str | None:
    cost = model.card.cost if model.card is not None else None
    if cost is None:
        return None
    return f"batch {cost.batch}, {cost.dtype}, {cost.device}, torch {cost.torch}, timed separately"


def _time(key: str, place: str) -> Measure:
    def measure(model: ReportModel) -> tuple[str, float] | None:
        if model.card is None or model.card.cost is None or _circumstances(model) != place:
            return None
        taken: Times = getattr(model.card.cost, key)
        low, high = (1e3 * end for end in taken.range)
        return f"{_shown(1e3 * taken.median)} [{_shown(low)} to {_shown(high)}]", 1e3 * taken.median

    return measure


def _memory(place: str) -> Measure:
    def measure(model: ReportModel) -> tuple[str, float] | None:
        if model.card is None or model.card.cost is None or _circumstances(model) != place:
            return None
        mib = model.card.cost.memory_bytes / 2**20
        return _shown(mib), mib

    return measure


def _training_place(model: ReportModel) -> str | None:
    results = model.training.results if model.training is not None else {}
    if not results.get("steps") or not results.get("seconds") or not results.get("device"):
        return None
    batch = (model.training.recipe if model.training else {}).get("data", {}).get("batch")
    parts = [f"batch {batch}" if batch else "", str(results.get("precision") or ""), str(results["device"])]
    parts.append(f"torch {results['versions']['torch']}" if "torch" in results.get("versions", {}) else "")
    parts.append("during training")
    return ", ".join(part for part in parts if part)


def _training(place: str, key: str) -> Measure:
    def measure(model: ReportModel) -> tuple[str, float] | None:
        if _training_place(model) != place or model.training is None:
            return None
        results = model.training.results
        value = 1e3 * results["seconds"] / results["steps"] if key == "step" else results.get(key)
        if not value:
            return None
        value = value / 2**20 if key == "peak_memory_bytes" else value
        return _shown(value), float(value)

    return measure


def _shown(value: float) -> str:
    """Three digits, and no exponent for large numbers.

    >>> _shown(2783.4), _shown(0.012345), _shown(81.26)
    ('2,783', '0.0123', '81.3')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
