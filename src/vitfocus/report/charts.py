"""The charts of a report as SVG: lines over depth or epochs, dots with intervals, and heat maps.

Colours are classes of `static/page.css` (`c0` … `c6` for models, `ink`, `quiet`, `grid`), so that figures follow the
page's light or dark theme. Saving a figure writes the light colours into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from vitfocus.attention.curves import Band, Line, Points, Reference
from vitfocus.report.comparison import Estimate

#: Number of marker shapes, which distinguish models without colour.
MARKERS = 6
Scale = Callable[[float], float]


def element(tag: str, content: str = "", **attributes: Any) -> str:
    """One SVG element; underscores in names become hyphens, `kind` becomes class, numbers are rounded.

    >>> element("line", x1=1.0, y2=2.3456, kind="grid", stroke_width=2)
    '<line x1="1" y2="2.35" class="grid" stroke-width="2"/>'
    """
    written = "".join(
        f' {"class" if name == "kind" else name.replace("_", "-")}="{escape(_short(value), quote=True)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def text(x: float, y: float, content: str, anchor: str = "start", kind: str = "ink", **more: Any) -> str:
    """A line of text, escaped."""
    return element("text", escape(content), x=x, y=y, text_anchor=anchor, kind=kind, **more)


def drawing(width: float, height: float, parts: Sequence[str], title: str, enlarged: float = 1.35) -> str:
    """A whole figure, shown at most `enlarged` times its size; screen readers announce the title."""
    head = element("title", escape(title))
    return element(
        "svg",
        head + "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_short(width)} {_short(height)}",
        role="img",
        kind="chart",
        style=f"max-width:{_short(width * enlarged)}px",
    )


def marker(shape: int, x: float, y: float, kind: str, size: float = 3.4) -> str:
    """A circle, square, triangle, diamond, inverted triangle or cross."""
    s = size
    if shape % MARKERS == 0:
        return element("circle", cx=x, cy=y, r=s, kind=kind)
    points = {
        1: ((-s, -s), (s, -s), (s, s), (-s, s)),
        2: ((0, -1.2 * s), (1.1 * s, s), (-1.1 * s, s)),
        3: ((0, -1.3 * s), (1.3 * s, 0), (0, 1.3 * s), (-1.3 * s, 0)),
        4: ((0, 1.2 * s), (1.1 * s, -s), (-1.1 * s, -s)),
        5: ((-s, -s / 3), (-s / 3, -s / 3), (-s / 3, -s), (s / 3, -s), (s / 3, -s / 3), (s, -s / 3), (s, s / 3),
            (s / 3, s / 3), (s / 3, s), (-s / 3, s), (-s / 3, s / 3), (-s, s / 3)),
    }[shape % MARKERS]  # fmt: skip
    return element("polygon", points=" ".join(f"{_short(x + a)},{_short(y + b)}" for a, b in points), kind=kind)


def path(points: Points, closed: bool = False) -> str:
    """The `d` of a polyline."""
    steps = " ".join(f"{'M' if i == 0 else 'L'}{_short(x)},{_short(y)}" for i, (x, y) in enumerate(points))
    return steps + ("Z" if closed else "")


def scale(low: float, high: float, start: float, stop: float) -> Scale:
    """A linear map from values to coordinates."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (stop - start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within the range.

    >>> ticks(0, 1), ticks(3.2, 48.0)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [10.0, 20.0, 30.0, 40.0])
    """
    span = high - low
    if not span > 0:
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(name: str, most: int) -> str:
    """A name cut to at most this many characters.

    >>> short("deit_tiny_patch16_224", 12), short("plain", 12)
    ('deit_tiny_p…', 'plain')
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


def label(value: float) -> str:
    """A tick's number without trailing zeros.

    >>> label(0.30000000004), label(20.0), label(1500000)
    ('0.3', '20', '1.5e+06')
    """
    return (f"{value:.6g}" if abs(value) < 1e6 else f"{value:.3g}").replace("-", "−", value < 0)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)


WIDTH, HEIGHT = 470.0, 310.0
LEFT, RIGHT, BOTTOM = 60.0, 12.0, 44.0
#: Dot chart: height of one model's dot. Heat map: position of the first cell, and the size of a cell.
DOT_ROW = 16.0
HEAT_LEFT, HEAT_TOP, CELL_WIDTH, CELL_HEIGHT = 132.0, 40.0, 44.0, 19.0

#: Colour-blind safe: pale to dark blue for errors; blue, white and orange for differences.
_ERRORS = ((247, 251, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107))
_DIFFERENCES = ((33, 102, 172), (146, 197, 222), (247, 247, 247), (253, 184, 99), (179, 88, 6))


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    references: Sequence[Reference] = (),
    y_range: tuple[float | None, float | None] = (None, None),
    whole_x: bool = False,
) -> str:
    """Several lines with bands, reference lines and a legend.

    `y_range` fixes either end of the axis; `whole_x` puts ticks at integers only.
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [bound for line in lines for _, *bounds in line.band for bound in bounds]
    ys += [y for one in references for _, y in one.points] + [r.level for r in references if r.level is not None]
    ys += [bound for one in references for _, *bounds in one.band for bound in bounds]
    low_x, high_x = (min(xs), max(xs)) if xs else (0.0, 1.0)
    pad_x = 0.3 if whole_x else 0.0
    low, high = (y_range[0] if y_range[0] is not None else min(ys)), y_range[1] if y_range[1] is not None else max(ys)
    pad_y = 0.06 * ((high - low) or abs(high) or 1.0)
    low, high = low - (pad_y if y_range[0] is None else 0), high + (pad_y if y_range[1] is None else 0)

    legend, top = _legend(lines, references)
    x = scale(low_x - pad_x, high_x + pad_x, LEFT, WIDTH - RIGHT)
    y = scale(low, high, HEIGHT - BOTTOM, top)
    parts = [text(LEFT, 14, title, kind="ink strong"), *legend]
    parts += _axes(x, y, (low_x, high_x), (low, high), whole_x, top, x_label, y_label)
    for reference in references:
        places = [(x(a), y(b)) for a, b in reference.points]
        if reference.level is not None:
            places = [(LEFT, y(reference.level)), (WIDTH - RIGHT, y(reference.level))]
        parts.append(area(reference.band, x, y, "known") if reference.band else _reference_line(places))
    parts += [area(line.band, x, y, f"band c{line.colour}") for line in lines if line.band]
    for line in lines:
        places = [(x(a), y(b)) for a, b in line.points]
        parts.append(element("path", d=path(places), kind=f"line c{line.colour}{' dashed' if line.dashed else ''}"))
        if line.marked and not line.dashed:
            for (a, b), (_, value) in zip(places, line.points, strict=True):
                hint = element("title", f"{value:.4g}")
                parts.append(element("g", hint + marker(line.colour, a, b, f"dot c{line.colour}")))
    return drawing(WIDTH, HEIGHT, parts, title)


def area(band: Band, x: Scale, y: Scale, kind: str) -> str:
    """The area between the lower and upper ends of a band."""
    around = [(x(a), y(b)) for a, b, _ in band] + [(x(a), y(c)) for a, _, c in reversed(band)]
    return element("path", d=path(around, closed=True), kind=kind)


def _reference_line(places: Points) -> str:
    return element("path", d=path(places), kind="reference")


def _axes(
    x: Scale,
    y: Scale,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    whole_x: bool,
    top: float,
    x_label: str,
    y_label: str,
) -> list[str]:
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


def _legend(lines: Sequence[Line], references: Sequence[Reference]) -> tuple[list[str], float]:
    """The legend above a chart, wrapped, and the y at which the chart starts."""
    parts, x, y = [], LEFT, 34.0
    entries: list[tuple[str, Line | Reference]] = [(line.name, line) for line in lines]
    entries += [(reference.name, reference) for reference in references]
    for name, line in entries:
        shown = short(name, 52)
        width = 30 + 6.6 * len(shown)
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + 17
        if isinstance(line, Reference):
            patch = element("rect", x=x, y=y - 10, width=20, height=12, kind="known")
            parts.append(patch if line.band else _reference_line([(x, y - 4), (x + 20, y - 4)]))
        else:
            dashed = " dashed" if line.dashed else ""
            parts.append(element("path", d=path([(x, y - 4), (x + 20, y - 4)]), kind=f"line c{line.colour}{dashed}"))
            if line.marked and not line.dashed:
                parts.append(marker(line.colour, x + 10, y - 4, f"dot c{line.colour}"))
        parts.append(text(x + 25, y, shown))
        x += width + 8
    return parts, y + 12


def dot_chart(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, Estimate]]],
    colours: Mapping[str, int],
    axis: str,
    level: float | None = None,
) -> str:
    """Rows of (condition, estimate by model); whiskers are 95 % intervals, `level` is a reference line."""
    numbers = [value.number for _, values in rows for value in values.values()] + ([] if level is None else [level])
    numbers += [end for _, values in rows for value in values.values() for end in value.interval or ()]
    low, high = min(numbers), max(numbers)
    pad = 0.05 * ((high - low) or 1.0)
    longest = max(len(name) for name, _ in rows)
    left = min(200.0, 16 + 7.0 * longest)
    shown = [name for name in colours if any(name in values for _, values in rows)]
    legend, top = _legend([Line(name, (), colours[name]) for name in shown], ())
    pitch = DOT_ROW * max(1, len(shown)) * 0.75 + 10
    bottom = top + pitch * len(rows) + 4
    x = scale(low - pad, high + pad, left, WIDTH - 14)
    parts = [text(left, 14, title, kind="ink strong"), *legend]
    for tick in ticks(low - pad, high + pad):
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
            value, y = values[model], middle + (place - (len(shown) - 1) / 2) * DOT_ROW * 0.7
            marks = element("title", escape(f"{model}: {value.text()}"))
            if value.interval is not None:
                ends = [x(end) for end in value.interval]
                marks += element("line", x1=ends[0], x2=ends[1], y1=y, y2=y, kind=f"whisker c{colours[model]}")
            marks += marker(colours[model], x(value.number), y, f"dot c{colours[model]}", 4.2)
            parts.append(element("g", marks))
    parts.append(text((left + WIDTH) / 2, bottom + 34, axis, "middle"))
    return drawing(WIDTH, bottom + 40, parts, title)


def heat_map(
    title: str,
    cells: Mapping[tuple[str, int], float],
    rows: Sequence[str],
    columns: Sequence[int],
    limits: tuple[float, float],
    signed: bool = False,
) -> str:
    """Cells by (corruption, severity) with their numbers; a cell that was not measured is empty.

    `signed` is for differences: colours diverge from zero, blue at the first limit, and numbers show their sign.
    """
    width, height = max(HEAT_LEFT + CELL_WIDTH * len(columns) + 8, 352.0), HEAT_TOP + CELL_HEIGHT * len(rows) + 8
    parts = [text(8, 14, short(title, 50), kind="ink strong")]
    for j, column in enumerate(columns):
        parts.append(text(HEAT_LEFT + CELL_WIDTH * (j + 0.5), HEAT_TOP - 7, str(column), "middle", "quiet"))
    parts.append(text(HEAT_LEFT - 8, HEAT_TOP - 7, "severity", "end", "quiet"))
    for i, row in enumerate(rows):
        y = HEAT_TOP + CELL_HEIGHT * i
        parts.append(text(HEAT_LEFT - 8, y + 13.5, row.replace("_", " "), "end"))
        for j, column in enumerate(columns):
            x = HEAT_LEFT + CELL_WIDTH * j
            if (row, column) not in cells:
                parts.append(element("rect", x=x, y=y, width=CELL_WIDTH - 1, height=CELL_HEIGHT - 1, kind="empty"))
                continue
            value = cells[row, column]
            fill = colour(value, limits, signed)
            parts.append(element("rect", x=x, y=y, width=CELL_WIDTH - 1, height=CELL_HEIGHT - 1, fill=_rgb(fill)))
            shown = f"{value:+z.1f}".replace("-", "−") if signed else f"{value:z.1f}"
            middle = x + CELL_WIDTH / 2 - 0.5
            parts.append(element("text", shown, x=middle, y=y + 13.5, text_anchor="middle", fill=ink_on(*fill)))
    return drawing(width, height, parts, title)


def colour(value: float, limits: tuple[float, float], signed: bool) -> tuple[int, int, int]:
    """A value's colour between two limits; for differences, zero is white.

    >>> colour(0.0, (0, 100), False), colour(0.0, (20, -20), True)
    ((247, 251, 255), (247, 247, 247))
    """
    low, high = limits
    stops = _DIFFERENCES if signed else _ERRORS
    place = min(1.0, max(0.0, (value - low) / ((high - low) or 1.0))) * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    part = place - index
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(stops[index], stops[index + 1], strict=True))
    return red, green, blue


def _rgb(fill: tuple[int, int, int]) -> str:
    return "rgb({},{},{})".format(*fill)


def ink_on(red: int, green: int, blue: int) -> str:
    """White or near-black, whichever has more contrast with the colour (by WCAG's relative luminance).

    >>> ink_on(247, 247, 247), ink_on(90, 150, 197), ink_on(33, 102, 172)
    ('#111', '#111', '#fff')
    """

    def linear(value: int) -> float:
        share = value / 255
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    light = 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue) + 0.05
    return "#fff" if 1.05 / light > light / (linear(0x11) + 0.05) else "#111"


def grid_map(title: str, shares: Sequence[Sequence[float]]) -> str:
    """Shares of images by patch, (rows, columns), drawn like the image; darker is more."""
    rows, columns, top = len(shares), max(map(len, shares)), max(max(row) for row in shares)
    side = min(18.0, 250.0 / max(rows, columns))
    parts = [text(8, 14, short(title, 50), kind="ink strong")]
    for i, row in enumerate(shares):
        for j, value in enumerate(row):
            fill = _rgb(colour(value, (0.0, top or 1.0), False))
            hint = element("title", f"row {i}, column {j}: {100 * value:.3g} %")
            parts.append(element("rect", hint, x=8 + side * j, y=24 + side * i, width=side, height=side, fill=fill))
    parts.append(text(8, 40 + side * rows, f"darkest: {100 * top:.3g} % of the images", kind="quiet"))
    return drawing(max(16 + side * columns, 300.0), 46 + side * rows, parts, title)
