"""Scores: every metric of every evaluation with its confidence interval, and the differences between models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitfocus.report.comparison import Difference, Estimate, MetricRow, detail_sentences, key_rows
from vitfocus.report.page import Cell, Page
from vitfocus.report.runs import ReportModel

_SAVED = ("value", "low", "high", "difference", "difference low", "difference high", "compared with", "paired")


def add_scores(page: Page, models: Sequence[ReportModel], rows: Sequence[MetricRow]) -> None:
    """The differences that the summary does not state, then the table and how to read it."""
    if not rows:
        return
    page.section("Scores")
    stated = key_rows(rows)
    unstated = [row for row in rows if row.headline and row not in stated]
    page.points([*(sentence for row in unstated for sentence in row.sentences()), *detail_sentences(rows)])
    names = [model.name for model in models if any(model.name in row.values for row in rows)]
    others = [name for name in names if any(name in row.differences for row in rows)]
    headings = ["evaluation", "metric", *names, *(f"{name}: difference" for name in others)]
    saved = [["test", "measure", "unit", "model", *_SAVED], *(line for row in rows for line in _csv_lines(row))]
    page.table("scores", headings, [_line(row, names, others) for row in rows], saved=saved)
    if others:
        page.text(
            "Brackets hold 95 % confidence intervals over the images. A difference is to the first model that has the "
            "metric; it is called better or worse if its interval excludes zero. Models are compared image by image on "
            "the same images, except where “unpaired” is noted.",
            quiet=True,
        )
    else:
        page.text("Brackets hold 95 % confidence intervals over the images.", quiet=True)


def _line(row: MetricRow, names: Sequence[str], others: Sequence[str]) -> list[Any]:
    arrow = "↑" if row.higher_is_better else "↓"
    values = [Cell(_text(row.values[name])) if name in row.values else None for name in names]
    return [row.test, f"{row.measure} ({row.unit}) {arrow}", *values, *(_difference(row, name) for name in others)]


def _text(value: Estimate | Difference, sign: str = "") -> str:
    text = f"{value.number:{sign}z.2f}"
    if value.interval is not None:
        text += f" [{value.interval[0]:{sign}z.2f}, {value.interval[1]:{sign}z.2f}]"
    return text


def _difference(row: MetricRow, name: str) -> Cell | None:
    difference = row.differences.get(name)
    if difference is None:
        return None
    unpaired = "unpaired" if difference.interval is not None and not difference.paired else ""
    notes = ", ".join(filter(None, (row.judgement(name), unpaired)))
    return Cell(f"{_text(difference, '+')} {notes}".rstrip())


def _csv_lines(row: MetricRow) -> list[list[Any]]:
    """One line of the CSV file per model."""
    lines = []
    for name, value in row.values.items():
        line: list[Any] = [row.test, row.measure, row.unit, name, value.number, *(value.interval or (None, None))]
        difference = row.differences.get(name)
        if difference is not None:
            line += [difference.number, *(difference.interval or (None, None)), row.first, difference.paired]
        lines.append(line + [None] * (4 + len(_SAVED) - len(line)))
    return lines
