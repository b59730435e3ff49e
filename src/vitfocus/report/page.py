"""One self-contained HTML page: text, tables and figures, everything inside, every string escaped.

It opens from disk, loads nothing, follows the reader's light or dark setting, fits a phone and prints.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from vitfocus.files import write_text

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1f24; --paper: #ffffff; --line: #d5dae1; --soft: #f4f6f8; --quiet: #5a6572; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7eaee; --paper: #14181d; --line: #343c46; --soft: #1d232a; --quiet: #9aa6b3; }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 62rem; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.25rem; margin-top: 2.4rem; }
p.quiet, figcaption { color: var(--quiet); font-size: 0.92rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.93rem; }
th, td { padding: 0.32rem 0.75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom-width: 2px; }
tbody tr:hover { background: var(--soft); }
figure { margin: 1.4rem 0; } figure img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
@media print { body { max-width: none; } h2 { break-after: avoid; } figure, table { break-inside: avoid; } }
"""


class Page:
    """A page under construction.

    >>> page = Page("Comparison <of> two")
    >>> page.section("Numbers").table(["", "plain", "treated"], [["top-1", 0.5, 0.6]])
    >>> "Comparison &lt;of&gt; two" in page.html() and "<td>0.600</td>" in page.html()
    True
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = []

    def section(self, heading: str) -> Page:
        """Begin a section."""
        self.parts.append(f"<h2>{escape(heading)}</h2>")
        return self

    def text(self, words: str, quiet: bool = False) -> None:
        """A paragraph."""
        opening = '<p class="quiet">' if quiet else "<p>"
        self.parts.append(f"{opening}{escape(words)}</p>")

    def points(self, sentences: Sequence[str]) -> None:
        """A list of sentences."""
        self.parts.append("<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>")

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table; numbers are shown to three places, None as an empty cell."""
        head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
        body = "".join("<tr>" + "".join(f"<td>{escape(_shown(cell))}</td>" for cell in row) + "</tr>" for row in rows)
        self.parts.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')

    def figure(self, figure: Any, caption: str) -> None:
        """A matplotlib figure, as SVG."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", bbox_inches="tight")
        picture = base64.b64encode(buffer.getvalue()).decode()
        self.parts.append(
            f'<figure><img alt="{escape(caption, quote=True)}" src="data:image/svg+xml;base64,{picture}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )

    def html(self) -> str:
        """The whole page."""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>"
            f"<body><h1>{escape(self.title)}</h1>{''.join(self.parts)}</body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Write the page; the old one stays until the new one is whole."""
        write_text(path, self.html())
        return Path(path)


def _shown(cell: Any) -> str:
    if cell is None:
        return ""
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)
