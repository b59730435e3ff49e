"""Scores and robustness: every metric with intervals and differences, and heat maps of corruptions by severity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vitfocus.core.arguments import parse_digits
from vitfocus.core.metrics import METRICS
from vitfocus.corruptions import CORRUPTIONS
from vitfocus.report.charts import Line, dot_chart, heat_map, line_chart, short
from vitfocus.report.comparison import (
    CONDITION_METRICS,
    Estimate,
    MetricRow,
    SharedTest,
    detail_sentences,
    key_rows,
    read_estimate,
)
from vitfocus.report.page import Cell, Page
from vitfocus.report.runs import ReportModel

_SAVED = ("value", "low", "high", "difference", "difference low", "difference high", "compared with", "paired")


def add_scores(page: Page, models: Sequence[ReportModel], rows: Sequence[MetricRow]) -> None:
    """The differences that the summary does not mention, and the table of all metrics."""
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
    values = [Cell(row.values[name].text()) if name in row.values else None for name in names]
    return [row.test, f"{row.measure} ({row.unit}) {arrow}", *values, *(_difference(row, name) for name in others)]


def _difference(row: MetricRow, name: str) -> Cell | None:
    difference = row.differences.get(name)
    if difference is None:
        return None
    unpaired = "unpaired" if difference.interval is not None and not difference.paired else ""
    remarks = ", ".join(filter(None, (row.judgement(name), unpaired)))
    return Cell(f"{difference.text('+z.2f')} {remarks}".rstrip())


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


Cells = dict[tuple[str, int], float]


@dataclass(frozen=True)
class Grid:
    """A metric by corruption and severity, and the cells of every model that has it, the baseline first."""

    measure: str
    higher_is_better: bool
    cells: dict[str, Cells]

    @property
    def corruptions(self) -> list[str]:
        """The rows of a heat map, in order."""
        names = {name for cells in self.cells.values() for name, _ in cells}
        return [name for name in CORRUPTIONS if name in names] + sorted(names - set(CORRUPTIONS))

    @property
    def severities(self) -> list[int]:
        """The columns of a heat map."""
        return sorted({severity for cells in self.cells.values() for _, severity in cells})

    @property
    def differences(self) -> dict[str, Cells]:
        """Every other model's cells minus the baseline's."""
        first, *others = self.cells.values()
        gaps = [{key: value - first[key] for key, value in cells.items() if key in first} for cells in others]
        return dict(zip(list(self.cells)[1:], gaps, strict=True))

    @property
    def by_severity(self) -> dict[str, list[tuple[float, float]]]:
        """Each model's (severity, mean over the corruptions), over the same corruptions at every severity."""
        means = {}
        for model, cells in self.cells.items():
            whole = [name for name in self.corruptions if all((name, s) in cells for s in self.severities)]
            means[model] = [(float(s), fmean(cells[name, s] for name in whole)) for s in self.severities if whole]
        return means

    def difference_map(self, title: str, gap: Cells) -> str:
        """A heat map of differences: blue where the model is better than the baseline, orange where it is worse."""
        values = [abs(value) for cells in self.differences.values() for value in cells.values()]
        reach = max(values, default=0.0) or 1.0  # the largest difference gets the strongest colour
        limits = (reach, -reach) if self.higher_is_better else (-reach, reach)
        return heat_map(title, gap, self.corruptions, self.severities, limits, signed=True)


def add_robustness(page: Page, tests: Sequence[SharedTest], colours: Mapping[str, int]) -> None:
    """Heat maps per model for suites of corruptions; a chart of conditions for the others."""
    robust = [test for test in tests if test.name.partition(", ")[0] != "clean"]
    if robust:  # otherwise the notes end the section of the scores
        page.section("Robustness")
    for test in robust:
        if (grid := corruption_grid(test)) is not None:
            _add_heat_maps(page, test, grid)
    conditions = _conditions(tests) if robust else {}
    if conditions:
        page.heading("By suite and condition")
        drawn = []
        for key, found in conditions.items():
            title = f"{METRICS[key].title} by suite"
            drawn.append((title, dot_chart(title, found, colours, f"{METRICS[key].title} (%)"), ""))
        page.figures(*drawn)
        better = {METRICS[key].title: "higher" if METRICS[key].higher_is_better else "lower" for key in conditions}
        text = "; ".join(f"{title}: {way} is better" for title, way in better.items())
        page.text(f"Whiskers are 95 % confidence intervals, if known. {text}.", quiet=True)
    page.points(list(dict.fromkeys(note for test in tests for s in test.scores.values() for note in s.notes)))


def severity_chart(test: SharedTest, colours: Mapping[str, int]) -> str | None:
    """The mean over the corruptions by severity, one line per model; None for suites without severities."""
    grid = corruption_grid(test)
    if grid is None:
        return None
    lines = [Line(name, points, colours[name]) for name, points in grid.by_severity.items() if len(points) > 1]
    if not lines:
        return None
    title = f"{test.name}: {grid.measure} by severity"
    return line_chart(title, lines, "severity", f"mean {grid.measure} over the corruptions (%)", whole_x=True)


def difference_chart(test: SharedTest, name: str) -> str | None:
    """The heat map of a model's differences from the first model; None for suites without corruptions."""
    grid = corruption_grid(test)
    if grid is None or name not in grid.differences:
        return None
    title = f"{short(name, 17)} − {short(next(iter(grid.cells)), 17)}: {grid.measure} (points)"
    return grid.difference_map(title, grid.differences[name])


def corruption_grid(test: SharedTest) -> Grid | None:
    """Errors in percent for classification under corruptions, mIoU for segmentation; None for other suites."""
    errors: dict[str, Cells] = {}
    overlaps: dict[str, Cells] = {}
    for model, summary in test.summaries.items():
        for name, cell in summary.get("cells", {}).items():
            corruption, slash, severity = name.partition("/")
            if "corruptions" in summary and slash and parse_digits(severity) is not None and "error" in cell:
                errors.setdefault(model, {})[corruption, int(severity)] = float(cell["error"])
            for severity, value in cell.get("severities", {}).items():
                overlaps.setdefault(model, {})[name, int(severity)] = float(value)
    if errors:
        return Grid("error", False, errors)
    return Grid("mIoU", True, overlaps) if overlaps else None


def _add_heat_maps(page: Page, test: SharedTest, grid: Grid) -> None:
    cells, measure, gaps = grid.cells, grid.measure, grid.differences
    values = [value for found in cells.values() for value in found.values()]
    limits = (min(values), max(values))
    page.heading(f"{test.name}: {measure} (%) by corruption and severity")
    drawn = []
    for name, found in cells.items():
        picture = heat_map(f"{short(name, 36)}: {measure} (%)", found, grid.corruptions, grid.severities, limits)
        drawn.append((f"{test.name} {measure} {name}", picture, ""))
    first, *others = cells
    for name, gap in gaps.items():
        title = f"{short(name, 17)} − {short(first, 17)} (points)"
        drawn.append((f"{test.name} difference {name}", grid.difference_map(title, gap), ""))
    page.figures(*drawn, size="small")
    if gaps:
        sign = 1 if grid.higher_is_better else -1
        better = {name: sum(sign * value > 0 for value in gap.values()) for name, gap in gaps.items()}
        text = "; ".join(f"{name} is better in {better[name]} of {len(gap)} cells" for name, gap in gaps.items())
        page.text(f"Blue: better than {first}; orange: worse. {text}.")
    headings = ["corruption", "severity", *cells, *(f"{name} − {first}" for name in others)]
    lines = [
        [row, severity, *(_number(found, row, severity) for found in cells.values())]
        + [_number(gaps[name], row, severity) for name in others]
        for row in grid.corruptions
        for severity in grid.severities
    ]
    page.table(f"{test.name}: {measure} (%) per cell", headings, lines, folded=True)


def _number(cells: Cells, row: str, severity: int) -> Cell | None:
    value = cells.get((row, severity))
    return Cell(f"{value:z.2f}", value) if value is not None else None


def _conditions(tests: Sequence[SharedTest]) -> dict[str, list[tuple[str, dict[str, Estimate]]]]:
    """Rows of the dot charts by metric: clean images for suites of corruptions, every condition for the others."""
    found: dict[str, list[tuple[str, dict[str, Estimate]]]] = {}
    for test in tests:
        summaries = test.summaries
        heat = any("corruptions" in summary for summary in summaries.values())
        cells = dict.fromkeys(cell for summary in summaries.values() for cell in summary.get("cells", ()))
        for cell in [cell for cell in cells if not heat or cell == "clean"]:
            for key in (*CONDITION_METRICS, "box_ap", "mask_ap"):
                values = {
                    name: read_estimate(summary["cells"][cell], key)
                    for name, summary in summaries.items()
                    if key in summary.get("cells", {}).get(cell, {})
                }
                if values:
                    label = test.name if len(cells) == 1 else f"{test.name}: {cell}"
                    found.setdefault(key, []).append((label, values))
    return found
