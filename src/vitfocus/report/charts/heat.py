"""A heat map of corruptions by severity, in which every cell also says its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vitfocus.report.charts.svg import drawing, element, short, text

LEFT, TOP, CELL_WIDTH, CELL_HEIGHT = 132.0, 40.0, 44.0, 19.0

#: Readable by the colour-blind: pale to dark blue for errors; blue, white and orange for differences.
_ERRORS = ((247, 251, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107))
_DIFFERENCES = ((33, 102, 172), (146, 197, 222), (247, 247, 247), (253, 184, 99), (179, 88, 6))


def heat_map(
    title: str,
    cells: Mapping[tuple[str, int], float],
    rows: Sequence[str],
    columns: Sequence[int],
    limits: tuple[float, float],
    signed: bool = False,
) -> str:
    """Cells (corruption, severity) in percent as SVG text; a cell that was not measured is left empty.

    `signed` is for differences: the colours diverge from zero, blue at the first limit, and numbers carry their sign.
    """
    width, height = max(LEFT + CELL_WIDTH * len(columns) + 8, 352.0), TOP + CELL_HEIGHT * len(rows) + 8
    parts = [text(8, 14, short(title, 50), kind="ink strong")]
    for j, column in enumerate(columns):
        parts.append(text(LEFT + CELL_WIDTH * (j + 0.5), TOP - 7, str(column), "middle", "quiet"))
    parts.append(text(LEFT - 8, TOP - 7, "severity", "end", "quiet"))
    for i, row in enumerate(rows):
        y = TOP + CELL_HEIGHT * i
        parts.append(text(LEFT - 8, y + 13.5, row.replace("_", " "), "end"))
        for j, column in enumerate(columns):
            x = LEFT + CELL_WIDTH * j
            if (row, column) not in cells:
                parts.append(element("rect", x=x, y=y, width=CELL_WIDTH - 1, height=CELL_HEIGHT - 1, kind="empty"))
                continue
            value = cells[row, column]
            fill = colour(value, limits, signed)
            parts.append(
                element(
                    "rect",
                    x=x,
                    y=y,
                    width=CELL_WIDTH - 1,
                    height=CELL_HEIGHT - 1,
                    fill="rgb({},{},{})".format(*fill),
                )
            )
            shown = f"{value:+z.1f}".replace("-", "−") if signed else f"{value:z.1f}"
            parts.append(
                element(
                    "text",
                    shown,
                    x=x + CELL_WIDTH / 2 - 0.5,
                    y=y + 13.5,
                    text_anchor="middle",
                    fill=ink_on(*fill),
                )
            )
    return drawing(width, height, parts, title)


def difference_map(
    title: str,
    cells: Mapping[tuple[str, int], float],
    rows: Sequence[str],
    columns: Sequence[int],
    reach: float,
    more_is_better: bool,
) -> str:
    """Differences between two models: blue where the second is better, orange where it is worse, signed numbers."""
    limits = (reach, -reach) if more_is_better else (-reach, reach)
    return heat_map(title, cells, rows, columns, limits, signed=True)


def colour(value: float, limits: tuple[float, float], signed: bool) -> tuple[int, int, int]:
    """A value's colour between two limits; for differences, whose limits lie around it, zero is white.

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


def ink_on(red: int, green: int, blue: int) -> str:
    """White or near-black, whichever stands out more on a cell of that colour (by WCAG's relative luminance).

    >>> ink_on(247, 247, 247), ink_on(90, 150, 197), ink_on(33, 102, 172)
    ('#111', '#111', '#fff')
    """

    def linear(value: int) -> float:
        share = value / 255
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    light = 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue) + 0.05
    return "#fff" if 1.05 / light > light / (linear(0x11) + 0.05) else "#111"
