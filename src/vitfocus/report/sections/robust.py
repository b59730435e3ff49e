"""Robustness: heat maps of corruption by severity with the difference, and the conditions of other suites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitfocus.corruptions import CORRUPTIONS
from vitfocus.report.charts.dots import dot_chart
from vitfocus.report.charts.heat import difference_map, heat_map
from vitfocus.report.charts.svg import short
from vitfocus.report.page import Cell, Page
from vitfocus.report.subjects import scores_name
from vitfocus.report.verdict import BY_CONDITION, MEASURES, Test, Value

Cells = dict[tuple[str, int], float]


@dataclass(frozen=True)
class Grid:
    """A number by corruption and severity: what it is called, and the cells of every model that has them."""

    measure: str
    more_is_better: bool
    cells: dict[str, Cells]


def add_robustness(page: Page, taken: Sequence[Test], colours: Mapping[str, int]) -> None:
    """A heat map a model for suites of corruptions; a chart of conditions for the others."""
    if not taken:
        return
    page.section("Robustness")
    for test in taken:
        summaries = {name: scores.models[scores_name(scores)] for name, scores in test.scores.items()}
        if (grid := _grid(summaries)) is not None:
            _heat(page, test, grid)
    conditions = _conditions(taken)
    if conditions:
        page.heading("By suite and condition")
        drawn = []
        for key, found in conditions.items():
            title = f"{MEASURES[key][0]} by suite"
            drawn.append((title, dot_chart(title, found, colours, f"{MEASURES[key][0]} (%)"), ""))
        page.figures(*drawn)
        better = {key: "more is better" if MEASURES[key][2] else "less is better" for key in conditions}
        said = "; ".join(f"{MEASURES[key][0]}: {text}" for key, text in better.items())
        page.text(f"Whiskers are 95 % intervals, where they are known. {said}.", quiet=True)
    notes = list(dict.fromkeys(note for test in taken for s in test.scores.values() for note in s.notes))
    if notes:
        page.points(notes)


def _grid(summaries: Mapping[str, Mapping[str, Any]]) -> Grid | None:
    """Errors in percent where images were classified under corruptions, mIoU where they were segmented."""
    errors: dict[str, Cells] = {}
    overlaps: dict[str, Cells] = {}
    for model, summary in summaries.items():
        for name, cell in summary.get("cells", {}).items():
            corruption, slash, severity = name.partition("/")
            if "corruptions" in summary and slash and severity.isdigit() and "error" in cell:
                errors.setdefault(model, {})[corruption, int(severity)] = float(cell["error"])
            for severity, value in cell.get("severities", {}).items():
                overlaps.setdefault(model, {})[name, int(severity)] = float(value)
    if errors:
        return Grid("error", False, errors)
    return Grid("mIoU", True, overlaps) if overlaps else None


def _heat(page: Page, test: Test, grid: Grid) -> None:
    cells, measure = grid.cells, grid.measure
    known = [key for found in cells.values() for key in found]
    names = {name for name, _ in known}
    rows = [name for name in CORRUPTIONS if name in names] + sorted(names - set(CORRUPTIONS))
    severities = sorted({severity for _, severity in known})
    values = [value for found in cells.values() for value in found.values()]
    limits = (min(values), max(values))
    page.heading(f"{test.name}: {measure} (%) by corruption and severity")
    drawn = [
        (
            f"{test.name} {measure} {name}",
            heat_map(f"{short(name, 36)}: {measure} (%)", found, rows, severities, limits),
            "",
        )
        for name, found in cells.items()
    ]
    first, *others = cells
    gaps = {name: {k: v - cells[first][k] for k, v in cells[name].items() if k in cells[first]} for name in others}
    for name, gap in gaps.items():
        title = f"{short(name, 17)} − {short(first, 17)} (points)"
        picture = difference_map(title, gap, rows, severities, _reach(gaps), grid.more_is_better)
        drawn.append((f"{test.name} difference {name}", picture, ""))
    page.figures(*drawn, size="small")
    if gaps:
        sign = 1 if grid.more_is_better else -1
        better = {name: sum(sign * value > 0 for value in gap.values()) for name, gap in gaps.items()}
        said = "; ".join(f"{name} is better in {better[name]} of {len(gap)} cells" for name, gap in gaps.items())
        page.text(f"Blue: better than {first}; orange: worse. {said}.")
    headings = ["corruption", "severity", *cells, *(f"{name} − {first}" for name in others)]
    lines = [
        [row, severity, *(_number(found, row, severity) for found in cells.values())]
        + [_number(gaps[name], row, severity) for name in others]
        for row in rows
        for severity in severities
    ]
    page.table(f"{test.name}: {measure} (%) in every cell", headings, lines, folded=True)


def _reach(gaps: Mapping[str, Cells]) -> float:
    """The greatest difference, at which the colours are strongest."""
    return max((abs(value) for gap in gaps.values() for value in gap.values()), default=0.0) or 1.0


def _number(cells: Cells, row: str, severity: int) -> Cell | None:
    value = cells.get((row, severity))
    return Cell(f"{value:z.2f}", value) if value is not None else None


def _conditions(taken: Sequence[Test]) -> dict[str, list[tuple[str, dict[str, Value]]]]:
    """Rows of the dot charts, by measure: the clean cell of suites of corruptions, every cell of the others."""
    found: dict[str, list[tuple[str, dict[str, Value]]]] = {}
    for test in taken:
        summaries = {name: scores.models[scores_name(scores)] for name, scores in test.scores.items()}
        heat = any("corruptions" in summary for summary in summaries.values())
        cells = dict.fromkeys(cell for summary in summaries.values() for cell in summary.get("cells", ()))
        for cell in [cell for cell in cells if not heat or cell == "clean"]:
            for key in (*BY_CONDITION, "box_ap", "mask_ap"):
                values = {
                    name: _value(summary["cells"][cell], key)
                    for name, summary in summaries.items()
                    if key in summary.get("cells", {}).get(cell, {})
                }
                if values:
                    label = test.name if len(cells) == 1 else f"{test.name}: {cell}"
                    found.setdefault(key, []).append((label, values))
    return found


def _value(cell: Mapping[str, Any], key: str) -> Value:
    ends = cell.get("flip_interval" if key == "flip_probability" else f"{key}_interval")
    return Value(float(cell[key]), (float(ends[0]), float(ends[1])) if ends else None)
