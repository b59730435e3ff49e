"""Treatments: each model's blocks from first to last, with the treatments at their places."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from vitfocus.report.model_card import BlockCard, Card
from vitfocus.report.page import Page
from vitfocus.report.runs import ReportModel
from vitfocus.report.svg import drawing, element, text
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
