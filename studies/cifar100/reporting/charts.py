"""The study's figures: differences to plain, readings by depth in panels of a few arms, corruptions by arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reporting.gathered import Study
from reporting.intervals import estimate
from reporting.labels import MODELS, label
from reporting.outcomes import Outcome, by_layer
from vitfocus.report.charts import Line, Reference, colour, dot_chart, drawing, element, ink_on, line_chart, text
from vitfocus.report.comparison import Estimate

#: Arms that are worth a look beside each other; the plain model is in every panel.
PANELS = {
    "where CB stands": ("cb-upper", "cb-all", "cb-front", "cb-attention"),
    "CB, scaled CB and SE": ("cb-upper", "cbs", "se"),
    "TAP and ADL": ("tap", "adl", "adl-paper"),
    "combined": ("tap-adl", "cb-tap-adl", "cbs-tap-adl"),
}
_PLAIN_COLOUR = 6
_FEW = 5


def difference_chart(study: Study, outcome: Outcome, groups: Sequence[str]) -> str | None:
    """Each arm's difference to plain with its interval, the models side by side; None where nothing can be compared."""
    arms = dict.fromkeys(arm for group in groups for arm in study.arms(group) if arm != "plain")
    rows: list[tuple[str, Mapping[str, Estimate]]] = []
    for arm in arms:
        found = {MODELS.get(group, group): study.against_plain(group, arm, outcome) for group in groups}
        values = {name: Estimate(one.mean, one.interval) for name, one in found.items() if one is not None}
        if values:
            rows.append((label(arm), values))
    if not rows:
        return None
    colours = {MODELS.get(group, group): index for index, group in enumerate(groups)}
    way = {1: ", right is better", -1: ", left is better", 0: ""}[outcome.better]
    return dot_chart(f"{outcome.title}: difference to plain", rows, colours, f"{_points(outcome)}{way}", level=0.0)


def _points(outcome: Outcome) -> str:
    return "points" if outcome.unit == "%" else outcome.unit


def panels(study: Study, group: str) -> dict[str, list[str]]:
    """The arms of each panel, without plain; a group with few arms has one panel for all."""
    arms = [arm for arm in study.arms(group) if arm != "plain"]
    if len(arms) < _FEW:
        return {"all arms": arms} if arms else {}
    shown = {name: [arm for arm in members if arm in arms] for name, members in PANELS.items()}
    known = {arm for members in PANELS.values() for arm in members}
    shown["others"] = [arm for arm in arms if arm not in known]
    return {name: members for name, members in shown.items() if members}


def depth_charts(
    study: Study, group: str, path: Sequence[str], title: str, axis: str, references: Sequence[Reference] = ()
) -> list[tuple[str, str, str]]:
    """A reading by depth, a panel for a few arms each, all panels on one scale: what `Page.figures` takes."""
    lines = {arm: _line(study, group, arm, path) for arm in study.arms(group)}
    known = [line for line in lines.values() if line is not None]
    if not known:
        return []
    ends = [y for line in known for _, y in line.points] + [end for line in known for _, *b in line.band for end in b]
    ends += [reference.level for reference in references if reference.level is not None]
    room = 0.04 * ((max(ends) - min(ends)) or 1.0)
    span = (min(ends) - room, max(ends) + room)
    drawn = []
    for name, arms in (panels(study, group) or {"plain": []}).items():
        members = [lines.get("plain"), *(lines[arm] for arm in arms)]
        shown = [_coloured(line, i) for i, line in enumerate(members) if line is not None]
        if not shown:
            continue
        heading = f"{title}, {MODELS.get(group, group)}: {name}"
        chart = line_chart(heading, shown, "layer (0 is the first)", axis, references, span, True)
        drawn.append((heading, chart, ""))
    return drawn


def _line(study: Study, group: str, arm: str, path: Sequence[str]) -> Line | None:
    """Means by layer and their interval as a band."""
    found = [layers for run in study.runs[group][arm].values() if (layers := by_layer(run, *path))]
    if not found:
        return None
    depth = min(len(layers) for layers in found)
    by_depth = [estimate(layers[i] for layers in found) for i in range(depth)]
    band = [(float(i), *one.interval) for i, one in enumerate(by_depth) if one.interval is not None]
    return Line(label(arm), [(float(i), one.mean) for i, one in enumerate(by_depth)], 0, band)


def _coloured(line: Line, index: int) -> Line:
    return Line(line.name, line.points, _PLAIN_COLOUR if index == 0 else index - 1, line.band)


LEFT, CELL_WIDTH, CELL_HEIGHT, HEAD = 128.0, 44.0, 19.0, 118.0


def difference_grid(
    title: str, cells: Mapping[tuple[str, str], float], rows: Sequence[str], columns: Sequence[str]
) -> str:
    """Differences in error by (corruption, arm): blue where the arm errs less than plain; cells say their number."""
    reach = max((abs(value) for value in cells.values()), default=0.0) or 1.0
    parts = [text(8, 14, title, kind="ink strong")]
    for j, column in enumerate(columns):
        x = LEFT + CELL_WIDTH * (j + 0.5) + 3
        parts.append(text(x, HEAD - 6, column, kind="ink", transform=f"rotate(-60 {x:.1f} {HEAD - 6:.1f})"))
    for i, row in enumerate(rows):
        y = HEAD + CELL_HEIGHT * i
        parts.append(text(LEFT - 8, y + 13.5, row.replace("_", " "), "end"))
        for j, column in enumerate(columns):
            x, value = LEFT + CELL_WIDTH * j, cells.get((row, column))
            box: dict[str, Any] = {"x": x, "y": y, "width": CELL_WIDTH - 1, "height": CELL_HEIGHT - 1}
            if value is None:
                parts.append(element("rect", kind="empty", **box))
                continue
            fill = colour(value, (-reach, reach), True)
            parts.append(element("rect", fill="rgb({},{},{})".format(*fill), **box))
            shown = f"{value:+z.1f}".replace("-", "−")
            place: dict[str, Any] = {"x": x + CELL_WIDTH / 2 - 0.5, "y": y + 13.5, "text_anchor": "middle"}
            parts.append(element("text", shown, fill=ink_on(*fill), **place))
    width = max(LEFT + CELL_WIDTH * len(columns) + 70, 352.0)
    drawn = drawing(width, HEAD + CELL_HEIGHT * len(rows) + 8, parts, title)
    # On a narrow screen the grid is scrolled rather than shrunk until nobody can read it.
    return drawn.replace('style="', f'style="min-width:{0.8 * width:.0f}px;', 1)
