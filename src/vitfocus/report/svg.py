"""SVG elements as text, and the scales and ticks of axes.

Colours are classes of `static/page.css` (`c0` … `c6` for models, `ink`, `quiet`, `grid`), so that figures follow the
page's light or dark theme. Saving a figure writes the light colours into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

#: Number of marker shapes, which distinguish models without colour.
MARKERS = 6


def element(tag: str, content: str = "", **attributes: Any) -> str:
    """One element; underscores in names become hyphens, `kind` becomes class, numbers are shortened.

    >>> element("line", x1=1.0, y2=2.3456, kind="grid", stroke_width=2)
    '<line x1="1" y2="2.35" class="grid" stroke-width="2"/>'
    """
    written = "".join(
        f' {"class" if name == "kind" else name.replace("_", "-")}="{escape(_short(value), quote=True)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "ink", **more: Any) -> str:
    """A line of text, escaped."""
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, kind=kind, **more)


def drawing(width: float, height: float, parts: Sequence[str], title: str) -> str:
    """The whole figure; screen readers announce the title."""
    head = element("title", escape(title))
    return element(
        "svg",
        head + "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_short(width)} {_short(height)}",
        role="img",
        kind="chart",
        style=f"max-width:{_short(width * 1.35)}px",
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


def path(points: Sequence[tuple[float, float]], closed: bool = False) -> str:
    """The `d` of a polyline."""
    steps = " ".join(f"{'M' if i == 0 else 'L'}{_short(x)},{_short(y)}" for i, (x, y) in enumerate(points))
    return steps + ("Z" if closed else "")


def scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
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
