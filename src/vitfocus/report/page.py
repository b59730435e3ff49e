"""One self-contained HTML page of text, tables and figures; every string is escaped.

It can be opened from disk and loads no other files: the style sheets and scripts in `static/` are written into it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from vitfocus.core.files import write_text
from vitfocus.core.tables import html_list

#: The browser refuses to fetch anything, except the page's own maps from a folder beside it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'{files}; img-src data: blob:"


@dataclass(frozen=True)
class Cell:
    """The text of a table cell, and the value that the CSV file has instead."""

    shown: str
    value: Any = None


@dataclass(frozen=True)
class ChartCell(Cell):
    """A cell with a figure (SVG text) above its text."""

    svg: str = ""


@dataclass(frozen=True)
class LinkCell:
    """A cell with a name, a short description, and links as (text, address)."""

    name: str
    about: str = ""
    links: tuple[tuple[str, str], ...] = ()


@cache
def static(name: str) -> str:
    """The text of a file in `static/`."""
    return resources.files("vitfocus.report").joinpath("static", name).read_text(encoding="utf-8")


class Page:
    """A page to which content is added. A section without content is left out.

    >>> page = Page("Comparison <of> two")
    >>> page.section("Numbers").table("top-1", ["", "plain", "treated"], [["top-1", 0.5, Cell("0.6", 0.59999)]])
    >>> html = page.html()
    >>> "Comparison &lt;of&gt; two" in html, 'data-label="plain">0.5<' in html, 'data-value="0.59999">0.6<' in html
    (True, True, True)
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title, self.subtitle = title, subtitle
        self.parts: list[str] = []
        self.headings: list[str] = []
        self._section = ""  # written before the next part
        self.data: Any = None  # of the explorer
        self.extra_files: dict[str, str] = {}  # files that the page loads when they are needed

    def section(self, heading: str) -> Page:
        """Start a section."""
        self._section = heading
        return self

    def _add(self, part: str) -> None:
        if self._section:
            self.headings.append(self._section)
            self.parts.append(f'<h2 id="s{len(self.headings)}">{escape(self._section)}</h2>')
            self._section = ""
        self.parts.append(part)

    def heading(self, words: str) -> None:
        """A heading within a section."""
        self._add(f"<h3>{escape(words)}</h3>")

    def text(self, words: str, quiet: bool = False, lead: bool = False) -> None:
        """A paragraph; `lead` makes it prominent, `quiet` unobtrusive."""
        kind = ' class="quiet"' if quiet else ' class="lead"' if lead else ""
        self._add(f"<p{kind}>{escape(minus(words))}</p>")

    def points(self, sentences: Sequence[str | tuple[str, str]]) -> None:
        """A list of sentences, with commands in backticks; the first of a pair is prominent."""
        pairs = [("", minus(one)) if isinstance(one, str) else (minus(one[0]), minus(one[1])) for one in sentences]
        if pairs:
            self._add(html_list(pairs))

    def table(
        self,
        name: str,
        headings: Sequence[str],
        rows: Sequence[Sequence[Any]],
        folded: bool = False,
        saved: Sequence[Sequence[Any]] | None = None,
        sortable: bool = False,
    ) -> None:
        """A table that can be saved as CSV; None is an empty cell, and columns of empty cells are left out.

        Args:
            name: Name of the table and of the CSV file.
            headings: One per column.
            rows: Numbers, text, and the cells above.
            folded: Collapse the table at first.
            saved: The lines of the CSV file, headings first, if it has more than the table shows.
            sortable: Let readers sort the rows by any column.
        """
        filled = [i for i in range(len(headings)) if not i or any(row[i] is not None for row in rows)]
        headings, rows = [headings[i] for i in filled], [[row[i] for i in filled] for row in rows]
        numeric = [any(isinstance(row[i], Cell | int | float) for row in rows) for i in range(len(headings))]
        head = "".join(
            f'<th scope="col"{_NUMBER * n}>{(_SORT if sortable else "{}").format(_breakable(heading))}</th>'
            for heading, n in zip(headings, numeric, strict=True)
        )
        order = "".join(f'<option value="{i}">{escape(heading)}</option>' for i, heading in enumerate(headings))
        sorting = f'<label class="sorting">Sort by <select>{order}</select></label>' if sortable else ""
        kinds = " stack" * (sortable or len(headings) <= _STACKED) + " sortable" * sortable
        body = "".join(
            "<tr>" + "".join(_cell(*one) for one in zip(row, numeric, headings, strict=True)) + "</tr>" for row in rows
        )
        content = f' data-csv="{escape(json.dumps(saved), quote=True)}"' if saved is not None else ""
        table = (
            f'<div class="block">{sorting}<div class="wide{kinds}" tabindex="0" role="region" '
            f'aria-label="{escape(name, quote=True)}">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
            f"{_save_button('csv', 'table', name, content)}</div>"
        )
        self._add(f"<details><summary>{escape(name)}</summary>{table}</details>" if folded else table)

    def figures(self, *drawn: tuple[str, str, str], size: str = "") -> None:
        """Figures as (name, SVG text, caption), side by side if they fit; `size` is "", "small" or "single"."""
        if drawn:
            self._add(f'<div class="{f"figures {size}".strip()}">{"".join(_figure(*one) for one in drawn)}</div>')

    def html(self) -> str:
        """The whole page."""
        links = "".join(f'<a href="#s{i + 1}">{escape(heading)}</a>' for i, heading in enumerate(self.headings))
        style, script, explorer, tabs = static("page.css"), static("page.js"), "", ""
        policy = _POLICY.format(files=" 'self' file:" if self.data and self.data.get("files") else "")
        if self.data is not None:
            live = static("live.js") if self.data.get("live") else ""
            policy += "; connect-src 'self'" if live else ""
            plain = json.dumps(self.data, separators=(",", ":")).replace("<", "\\u003c")
            explorer = (
                '<main id="explorer"><div id="stage"><noscript>The explorer needs JavaScript.</noscript></div></main>'
                f'<script type="application/json" id="explorer-data">{plain}</script>'
            )
            style, script = style + static("explorer.css"), script + live + static("explorer.js")
            if self.parts:
                tabs = '<a class="tab" href="#report">Report</a><a class="tab" href="#explorer">Attention explorer</a>'
        body = f'<main id="report">{"".join(self.parts)}</main>' if self.parts else ""
        toc = f'<nav class="toc" aria-label="Sections">{links}</nav>' if len(self.headings) > 1 else ""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            f"<title>{escape(self.title)}</title><style>{style}</style></head>"
            f"<body><header><div><h1>{escape(self.title)}</h1>"
            f"{f'<p class=quiet>{escape(self.subtitle)}</p>' if self.subtitle else ''}</div>"
            '<button type="button" id="theme">◐ <b>Colours: </b><span>auto</span></button></header>'
            f"{f'<nav class=tabs aria-label=Pages>{tabs}</nav>' if tabs else ''}{toc}{body}{explorer}"
            f"<script>{script}</script></body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Write the page, after the files that it loads, each atomically."""
        place = Path(path).parent
        for name, content in self.extra_files.items():
            write_text(place / name, content)
        write_text(path, self.html())
        remove_other_chunks(place / f"{Path(path).stem}-data", {Path(name).stem for name in self.extra_files})
        return Path(path)


def remove_other_chunks(folder: Path, kept: Collection[str]) -> None:
    """Remove chunks of an earlier explorer, which are not among those `kept`, from a folder."""
    for file in folder.glob("*.js") if folder.is_dir() and not folder.is_symlink() else ():
        if re.fullmatch("[0-9a-f]{16}", file.stem) and file.stem not in kept:
            file.unlink()


def _figure(name: str, svg: str, caption: str) -> str:
    shown = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="block"><div class="wide">{svg}</div>{shown}{_save_button("svg", "figure", name)}</figure>'


def _save_button(kind: str, what: str, name: str, content: str = "") -> str:
    """A button that saves a figure as SVG, or a table as CSV; the file is named with letters, digits and hyphens."""
    file = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split()) or "figure"
    attributes = f'class="save" data-save="{kind}" data-name="{file}"{content}'
    return f'<button type="button" {attributes}>Save {what} as {kind.upper()}</button>'


_NUMBER = ' class="n"'
_SORT = '<button type="button" class="sort">{}</button>'
#: On a phone, the cells of a row are stacked in tables of at most this many columns; wider tables scroll.
_STACKED = 8


def _cell(cell: Any, numeric: bool, heading: str) -> str:
    kind = _NUMBER * numeric + f' data-label="{escape(heading, quote=True)}"'
    if cell is None:
        return "<td></td>"
    if isinstance(cell, Cell):
        value = "" if cell.value is None else f' data-value="{escape(str(cell.value), quote=True)}"'
        return f"<td{kind}{value}>{cell.svg if isinstance(cell, ChartCell) else ''}{escape(minus(cell.shown))}</td>"
    if isinstance(cell, LinkCell):
        links = " ".join(f'<a href="{escape(where, quote=True)}">{escape(words)}</a>' for words, where in cell.links)
        return (
            f'<td{kind} data-value="{escape(cell.name, quote=True)}"><b>{_breakable(cell.name)}</b>'
            f"<small>{escape(cell.about)}</small>{links}</td>"
        )
    return f"<td{kind}>{f'{cell:g}' if isinstance(cell, float) else _breakable(str(cell))}</td>"


def _breakable(text: str) -> str:
    """Escaped text that may break after +, comma or slash, as in `name+cb(layers=upper)`."""
    return "<wbr>".join(escape(part) for part in re.split(r"(?<=[+,/])(?=\S)", text) if part)


def minus(text: str) -> str:
    """Replace hyphens before digits by minus signs, and keep percent signs with their numbers."""
    return re.sub(r"(?<=\d) (?=%)", "\u00a0", re.sub(r"(?<![\w.])-(?=\d)", "−", text))
