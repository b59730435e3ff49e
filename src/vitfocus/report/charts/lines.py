"""A line chart: several models over depth or over epochs, with bands, reference lines and a legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitfocus.report.charts.svg import drawing, element, label, marker, path, scale, short, text, ticks

WIDTH, HEIGHT = 470.0, 310.0
LEFT, RIGHT, BOTTOM = 60.0, 12.0, 44.0


@dataclass(frozen=True)
class Line:
    """One line: points (x, y), a band (x, low, high), the colour's number; `dashed` for a second line of a model."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    band: Sequence[tuple[float, float, float]] = ()
    dashed: bool = False
    marked: bool = True


@dataclass(frozen=True)
class Reference:
    """A line to compare with: a level, or a level by x."""

    name: str
    points: Sequence[tuple[float, float]] = ()
    level: float | None = None


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    references: Sequence[Reference] = (),
    y_range: tuple[float | None, float | None] = (None, None),
    whole_x: bool = False,
) -> str:
    """The chart as SVG text. `y_range` fixes an end of the axis; `whole_x` puts ticks at whole numbers only."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [bound for line in lines for _, *bounds in line.band for bound in bounds]
    ys += [y for one in references for _, y in one.points] + [r.level for r in references if r.level is not None]
    low_x, high_x = (min(xs), max(xs)) if xs else (0.0, 1.0)
    pad_x = 0.3 if whole_x else 0.0
    low, high = (y_range[0] if y_range[0] is not None else min(ys)), y_range[1] if y_range[1] is not None else max(ys)
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    low, high = low - (room if y_range[0] is None else 0), high + (room if y_range[1] is None else 0)

    legend, top = legend_of(lines, references)
    x = scale(low_x - pad_x, high_x + pad_x, LEFT, WIDTH - RIGHT)
    y = scale(low, high, HEIGHT - BOTTOM, top)
    parts = [text(LEFT, 14, title, kind="ink strong"), *legend]
    parts += [*_axes(x, y, (low_x, high_x), (low, high), whole_x, top, x_label, y_label)]
    for reference in references:
        places = [(x(a), y(b)) for a, b in reference.points]
        if reference.level is not None:
            places = [(LEFT, y(reference.level)), (WIDTH - RIGHT, y(reference.level))]
        parts.append(element("path", d=path(places), kind="reference"))
    for line in lines:
        if line.band:
            around = [(x(a), y(b)) for a, b, _ in line.band] + [(x(a), y(c)) for a, _, c in reversed(line.band)]
            parts.append(element("path", d=path(around, closed=True), kind=f"band c{line.colour}"))
    for line in lines:
        places = [(x(a), y(b)) for a, b in line.points]
        parts.append(element("path", d=path(places), kind=f"line c{line.colour}{' dashed' if line.dashed else ''}"))
        if line.marked and not line.dashed:
            for (a, b), (_, value) in zip(places, line.points, strict=True):
                hint = element("title", f"{value:.4g}")
                parts.append(element("g", hint + marker(line.colour, a, b, f"dot c{line.colour}")))
    return drawing(WIDTH, HEIGHT, parts, title)


def _axes(
    x: object,
    y: object,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    whole_x: bool,
    top: float,
    x_label: str,
    y_label: str,
) -> list[str]:
    assert callable(x) and callable(y)
    parts = []
    for tick in ticks(*y_range):
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick), kind="grid"))
        parts.append(text(LEFT - 6, y(tick) + 4, label(tick), "end", "quiet"))
    for tick in ticks(*x_range, count=8):
        if whole_x and tick != round(tick):
            continue
        parts.append(element("line", x1=x(tick), x2=x(tick), y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, kind="axis"))
        parts.append(text(x(tick), HEIGHT - BOTTOM + 17, label(tick), "middle", "quiet"))
    parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, kind="axis"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle", "ink"))
    middle = (top + HEIGHT - BOTTOM) / 2
    parts.append(text(13, middle, y_label, "middle", "ink", transform=f"rotate(-90 13 {middle:.1f})"))
    return parts


def legend_of(lines: Sequence[Line], references: Sequence[Reference]) -> tuple[list[str], float]:
    """The legend above the chart, wrapped, and where the chart begins below it."""
    parts, x, y = [], LEFT, 34.0
    entries: list[tuple[str, Line | None]] = [(line.name, line) for line in lines]
    entries += [(reference.name, None) for reference in references]
    for name, line in entries:
        shown = short(name, 52)
        width = 30 + 6.6 * len(shown)
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + 17
        if line is None:
            parts.append(element("path", d=path([(x, y - 4), (x + 20, y - 4)]), kind="reference"))
        else:
            dashed = " dashed" if line.dashed else ""
            parts.append(element("path", d=path([(x, y - 4), (x + 20, y - 4)]), kind=f"line c{line.colour}{dashed}"))
            if line.marked and not line.dashed:
                parts.append(marker(line.colour, x + 10, y - 4, f"dot c{line.colour}"))
        parts.append(text(x + 25, y, shown))
        x += width + 8
    return parts, y + 12
