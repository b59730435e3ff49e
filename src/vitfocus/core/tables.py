"""Tables and lists for terminals, which are plain text when piped."""

from __future__ import annotations

import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

from vitfocus.core.errors import printable

if TYPE_CHECKING:
    from rich.table import Table as RichTable

#: The maximum line length: tables are as wide as their cells, so that numbers are never cut.
_WIDTH = 2000
#: Captions are wrapped at this many columns, or at the table's width if that is larger.
_PROSE = 88


@dataclass(frozen=True)
class Table:
    """A table of text. `print` shows it in colour on a terminal and plain elsewhere; rich renders it too.

    If the terminal is too narrow, the columns continue below, with the first column repeated. Piped output is not
    wrapped.

    >>> print(Table("Two layers", ["layer", "entropy"], [["0", "4.51"], ["1", "4.32"]]))
    Two layers
      layer   entropy
     ─────────────────
      0          4.51
      1          4.32
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __rich__(self) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(
            title=printable(self.title) or None,
            caption=printable(self.caption) or None,
            box=box.SIMPLE_HEAD,
            title_justify="left",
            caption_justify="left",
        )
        for index, column in enumerate(self.columns):
            table.add_column(printable(column), justify="left" if index == 0 else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*map(printable, row))
        return table

    def __str__(self) -> str:
        return self.text(styled=sys.stdout.isatty(), width=terminal_width())

    def _repr_html_(self) -> str:
        """Displayed by notebooks."""
        sides = ["left", *["right"] * (len(self.columns) - 1)]

        def line(tag: str, cells: Sequence[str]) -> str:
            pairs = zip(sides, cells, strict=True)
            return "".join(f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>' for side, cell in pairs)

        body = "".join(f"<tr>{line('td', row)}</tr>" for row in self.rows)
        title = f"<caption><b>{escape(self.title)}</b></caption>" if self.title else ""
        note = f"<p><small>{escape(self.caption)}</small></p>" if self.caption else ""
        table = f"<table>{title}<thead><tr>{line('th', self.columns)}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div style="overflow-x:auto">{table}{note}</div>'

    def text(self, *, styled: bool = False, width: int | None = None) -> str:
        """The table as text, `styled` with terminal escapes or plain; at most `width` columns if given.

        Title and caption may be wider than the table.
        """
        from rich.console import Console
        from rich.text import Text

        buffer = io.StringIO()
        console = Console(
            file=buffer,
            force_terminal=styled,
            force_jupyter=False,  # in a notebook rich would show the table at once and leave the text empty
            width=_WIDTH,
            height=25,  # without it rich takes every dumb terminal to have 80 columns
            legacy_windows=False,
            markup=False,
            highlight=False,
        )
        parts = [replace(self, title="", caption="")]
        while width and len(parts[-1].columns) > 2 and console.measure(parts[-1].__rich__()).maximum > width:
            parts[-1:] = parts[-1]._split_columns(lambda table: console.measure(table.__rich__()).maximum <= width)
        prose = max(_PROSE, *(console.measure(part.__rich__()).maximum for part in parts))
        prose = min(prose, width or prose)
        for line in textwrap.wrap(printable(self.title), width or _WIDTH, break_long_words=False):
            console.print(Text(line, style="table.title"))
        for part in parts:
            console.print(part.__rich__())
        for line in textwrap.wrap(printable(self.caption), prose, break_long_words=False):
            console.print(Text(line, style="table.caption"))
        lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
        return "\n".join(line for line in lines if line)

    def _split_columns(self, fits: Callable[[Table], bool]) -> list[Table]:
        """The first columns, as many as fit, and the rest under the first column; at least two columns each."""

        def only(keep: Sequence[int]) -> Table:
            rows = [[row[index] for index in keep] for row in self.rows]
            return replace(self, columns=[self.columns[index] for index in keep], rows=rows)

        count = len(self.columns) - 1
        while count > 2 and not fits(only(range(count))):
            count -= 1
        return [only(range(count)), only([0, *range(count, len(self.columns))])]


def terminal_width() -> int | None:
    """The number of columns of the terminal, or None if the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def bullet(text: str, width: int | None = None) -> str:
    """A paragraph as a list item, wrapped to `width` columns (default: the terminal's) unless it is piped.

    >>> print(bullet("One sentence. Another sentence.", 20))
    - One sentence.
      Another sentence.
    """
    columns, text = width or terminal_width(), printable(text)
    if columns is None:
        return f"- {text}"
    wrapped = textwrap.wrap(text, max(columns, 20), initial_indent="- ", subsequent_indent="  ", break_long_words=False)
    return "\n".join(wrapped)


def html_list(sentences: Iterable[str | tuple[str, str]]) -> str:
    """An HTML list of sentences, escaped, with backticks as code; the first of a pair is bold.

    >>> html_list(["run `a <b>`", ("Look:", "here")])
    '<ul><li>run <code>a &lt;b&gt;</code></li><li><b>Look:</b> here</li></ul>'
    """
    pairs = [("", one) if isinstance(one, str) else one for one in sentences]
    texts = [(f"<b>{escape(lead)}</b> " if lead else "") + escape(rest) for lead, rest in pairs]
    items = [re.sub(r"`([^`]+)`", r"<code>\1</code>", words) for words in texts]
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>" if items else ""


def listing(items: Mapping[str, str], indent: str = "", width: int | None = None) -> str:
    """Names and descriptions in two columns, wrapped to `width` columns (default: the terminal's) unless piped.

    >>> print(listing({"clean": "accuracy on clean images", "fgsm": "one gradient step"}, width=24))
    clean  accuracy on clean
           images
    fgsm   one gradient step
    """
    columns, left = width or terminal_width(), max(map(len, items)) + 2
    lines = []
    for name, text in items.items():
        start = f"{indent}{name:<{left}}"
        wrapped = textwrap.wrap(text, max((columns or _WIDTH) - len(start), 20), break_long_words=False) or [""]
        lines += [start + wrapped[0], *(" " * len(start) + line for line in wrapped[1:])]
    return "\n".join(line.rstrip() for line in lines)


def counted(number: float, what: str, form: str = ",") -> str:
    """A number and a noun, with a plural s unless the number is 1.

    >>> counted(1, "image"), counted(1200, "image"), counted(0.5, "epoch", ".4g")
    ('1 image', '1,200 images', '0.5 epochs')
    """
    return f"{number:{form}} {what}{'' if number == 1 else 's'}"


def unique_label(label: str, taken: Iterable[str]) -> str:
    """The label, or with a number if it is already taken.

    >>> unique_label("vit", []), unique_label("vit", ["vit", "vit #2", "vit-s"])
    ('vit', 'vit #3')
    """
    number = sum(one == label or one.startswith(f"{label} #") for one in taken)
    return f"{label} #{number + 1}" if number else label


def ranges(numbers: Iterable[int]) -> list[str]:
    """Sorted numbers, with consecutive ones written as ranges.

    >>> ranges([0, 1, 2, 5, 7, 8])
    ['0–2', '5', '7–8']
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
