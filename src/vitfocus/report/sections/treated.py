"""What was treated where: each model's blocks with the treatments at their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitfocus.report.charts.blocks import block_diagram
from vitfocus.report.page import Page
from vitfocus.report.subjects import Subject
from vitfocus.treatments import all_treatments


def add_treated(page: Page, subjects: Sequence[Subject]) -> None:
    """One diagram a model, and a table of all treated places."""
    drawn, lines, used = [], [], []
    for subject in subjects:
        blocks = (subject.card or {}).get("blocks")
        if not blocks:
            continue
        specs = " + ".join((subject.card or {}).get("treatments", ())) or "untreated"
        drawn.append(
            (f"treatments of {subject.name}", block_diagram(subject.name, blocks), f"{subject.name}: {specs}.")
        )
        lines += [_line(subject.name, block, treated) for block in blocks for treated in block["treated"]]
        used += [treated["treatment"] for block in blocks for treated in block["treated"]]
    if not drawn:
        return
    page.section("What was treated, and where")
    page.figures(*drawn, size="single")
    page.text("Blocks from the first to the last; inside a block the tokens go from the bottom to the top.", quiet=True)
    if used:
        page.points([f"{kind.label}: {kind.about}." for kind in all_treatments() if kind.name in used])
        page.table("treated places", ["model", "block", "name", "treatment", "place"], lines, folded=True)


def _line(model: str, block: dict[str, Any], treated: dict[str, str]) -> list[Any]:
    return [model, block["depth"], block["name"], treated["spec"], treated["place"]]
