"""Who is better, by how much: sentences first, then every number with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitfocus.report.page import Cell, Page
from vitfocus.report.subjects import Subject
from vitfocus.report.verdict import Row, Value, details


def add_better(page: Page, subjects: Sequence[Subject], rows: Sequence[Row]) -> None:
    """The verdicts, the table, and how far they may be trusted."""
    if not rows:
        return
    alone = len(subjects) == 1
    page.section("How good it is" if alone else "Who is better, and by how much")
    sentences = [*(sentence for row in rows if row.headline for sentence in row.sentences()), *details(rows)]
    if sentences:
        page.points(sentences)
    elif not alone:
        page.text("No two of these models took the same test, so none is called better than another.")
    names = [s.name for s in subjects if any(s.name in row.values for row in rows)]
    others = [name for name in names if any(name in row.differences for row in rows)]
    headings = ["test", "measure", *names, *(f"{name}: difference" for name in others)]
    saved = [["test", "measure", "unit", "model", *_SAVED], *(line for row in rows for line in _saved(row))]
    page.table("scores", headings, [_line(row, names, others) for row in rows], saved=saved)
    page.text(
        "In brackets: 95 % intervals over the images. "
        + (
            "A difference is to the leftmost model with a number; “better” or “worse” is said where the "
            "interval leaves out zero. Models were compared on the same images, image by image, except where "
            "“unpaired” is said."
            if others
            else ""
        ),
        quiet=True,
    )
    if sum(subject.training is not None for subject in subjects) > 1:
        page.text(
            "Each model here is one training run. The intervals do not cover what another seed would change, which on "
            "small data can be several points: train more than one seed before believing a small difference.",
            quiet=True,
        )


def _line(row: Row, names: Sequence[str], others: Sequence[str]) -> list[Any]:
    arrow = "↑" if row.more_is_better else "↓"
    return [
        row.test,
        f"{row.measure} ({row.unit}) {arrow}",
        *(_value(row.values.get(name)) for name in names),
        *(_difference(row, name) for name in others),
    ]


def _value(value: Value | None) -> Cell | None:
    if value is None:
        return None
    shown = f"{value.number:z.2f}"
    if value.interval is not None:
        shown += f" [{value.interval[0]:z.2f}, {value.interval[1]:z.2f}]"
    return Cell(shown)


def _difference(row: Row, name: str) -> Cell | None:
    difference = row.differences.get(name)
    if difference is None:
        return None
    shown = f"{difference.number:+z.2f}"
    if difference.interval is not None:
        shown += f" [{difference.interval[0]:+z.2f}, {difference.interval[1]:+z.2f}]"
    unpaired = "unpaired" if difference.interval is not None and not difference.paired else ""
    return Cell(" ".join(filter(None, (shown, ", ".join(filter(None, (row.verdict(name), unpaired)))))))


_SAVED = ("value", "low", "high", "difference", "difference low", "difference high", "compared with", "paired")


def _saved(row: Row) -> list[list[Any]]:
    """One line of the CSV file for every model."""
    lines = []
    for name, value in row.values.items():
        line: list[Any] = [row.test, row.measure, row.unit, name, value.number, *(value.interval or (None, None))]
        difference = row.differences.get(name)
        if difference is not None:
            line += [difference.number, *(difference.interval or (None, None)), row.first, difference.paired]
        lines.append(line + [None] * (4 + len(_SAVED) - len(line)))
    return lines
