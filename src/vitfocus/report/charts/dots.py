"""A dot chart: one row a condition, one dot with its interval a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from vitfocus.report.charts.lines import Line, legend_of
from vitfocus.report.charts.svg import drawing, element, label, marker, scale, short, text, ticks
from vitfocus.report.verdict import Value

WIDTH = 470.0
ROW = 16.0


def dot_chart(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, Value]]],
    colours: Mapping[str, int],
    axis: str,
    level: float | None = None,
) -> str:
    """Rows of (condition, value by model) as SVG text; whiskers are 95 % intervals, `level` a line to compare with."""
    numbers = [value.number for _, values in rows for value in values.values()] + ([] if level is None else [level])
    numbers += [end for _, values in rows for value in values.values() for end in value.interval or ()]
    low, high = min(numbers), max(numbers)
    room = 0.05 * ((high - low) or 1.0)
    longest = max(len(name) for name, _ in rows)
    left = min(200.0, 16 + 7.0 * longest)
    shown = [name for name in colours if any(name in values for _, values in rows)]
    legend, top = legend_of([Line(name, (), colours[name]) for name in shown], ())
    pitch = ROW * max(1, len(shown)) * 0.75 + 10
    bottom = top + pitch * len(rows) + 4
    x = scale(low - room, high + room, left, WIDTH - 14)
    parts = [text(left, 14, title, kind="ink strong"), *legend]
    for tick in ticks(low - room, high + room):
        parts.append(element("line", x1=x(tick), x2=x(tick), y1=top, y2=bottom, kind="grid"))
        parts.append(text(x(tick), bottom + 15, label(tick), "middle", "quiet"))
    if level is not None:
        parts.append(element("line", x1=x(level), x2=x(level), y1=top, y2=bottom, kind="reference"))
    for index, (name, values) in enumerate(rows):
        middle = top + pitch * (index + 0.5)
        parts.append(text(left - 8, middle + 4, short(name, 30), "end"))
        for place, model in enumerate(shown):
            if model not in values:
                continue
            value, y = values[model], middle + (place - (len(shown) - 1) / 2) * ROW * 0.7
            marks = element("title", _hint(model, value))
            if value.interval is not None:
                ends = [x(end) for end in value.interval]
                marks += element("line", x1=ends[0], x2=ends[1], y1=y, y2=y, kind=f"whisker c{colours[model]}")
            marks += marker(colours[model], x(value.number), y, f"dot c{colours[model]}", 4.2)
            parts.append(element("g", marks))
    parts.append(text((left + WIDTH) / 2, bottom + 34, axis, "middle"))
    return drawing(WIDTH, bottom + 40, parts, title)


def _hint(model: str, value: Value) -> str:
    shown = f"{model}: {value.number:.2f}"
    if value.interval is not None:
        shown += f" [{value.interval[0]:.2f}, {value.interval[1]:.2f}]"
    return escape(shown)
