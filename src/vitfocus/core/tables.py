"""Tables that look good in a terminal and stay plain when piped."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vitfocus.anatomy import insertion_sentence

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from vitfocus.attention.diagnosis import Diagnosis

#: So many columns a line may have: a table is as wide as its cells, since a cut number is no number.
_WIDTH = 2000
#: A caption is wrapped at so many columns, or at the table's width where that is more.
_PROSE = 88

#: Column heading and format of each key, in the order of the table.
COLUMNS = {
    "layer": ("layer", "d"),
    "attention_kind": ("kind", "s"),
    "entropy": ("entropy", ".2f"),
    "entropy_bound": ("of max.", ".2f"),
    "entropy_p15": ("p15", ".2f"),
    "entropy_p85": ("p85", ".2f"),
    "entropy_cls": ("class", ".2f"),
    "distance": ("dist.", ".3f"),
    "gradient": ("grad.", ".3f"),
    "overfocus": ("overfocus", ".1%"),
    "effective_tokens": ("eff. tokens", ".1f"),
    "head_similarity": ("heads alike", ".2f"),
    "diversity_official": ("rows alike", ".2f"),
    "stability": ("stability", ".2f"),
    "scaling_mean": ("λ mean", "z.3f"),
    "scaling_ratio": ("λ ratio", ".2f"),
}


@dataclass(frozen=True)
class Table:
    """Cells of text under headings. `print` shows it in colour on a terminal and plain elsewhere; rich renders it too.

    Lines are as long as they need to be, however narrow the terminal.

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
            title=self.title or None,
            caption=self.caption or None,
            box=box.SIMPLE_HEAD,
            title_justify="left",
            caption_justify="left",
        )
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def __str__(self) -> str:
        return self.text(styled=sys.stdout.isatty())

    def text(self, *, styled: bool = False) -> str:
        """The table as lines, `styled` with a terminal's escapes or plain, as files want it.

        Title and caption are not squeezed to the width of a narrow table.
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
        cells = replace(self, title="", caption="").__rich__()
        width = max(console.measure(cells).maximum, _PROSE)
        if self.title:
            console.print(Text(self.title, style="table.title"))
        console.print(cells)
        for line in textwrap.wrap(self.caption, width, break_long_words=False):
            console.print(Text(line, style="table.caption"))
        lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
        return "\n".join(line for line in lines if line)


def counted(number: float, what: str, form: str = ",") -> str:
    """A number of things in words, one of them without the s.

    >>> counted(1, "image"), counted(1200, "image"), counted(0.5, "epoch", ".4g")
    ('1 image', '1,200 images', '0.5 epochs')
    """
    return f"{number:{form}} {what}{'' if number == 1 else 's'}"


def cell(row: dict[str, Any], key: str) -> str:
    """One value of a row as text, or a dash where it has no meaning.

    >>> cell({"overfocus": 0.4231}, "overfocus"), cell({}, "distance")
    ('42.3%', '–')
    """
    return format(row[key], COLUMNS[key][1]) if row.get(key) is not None else "–"


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """A diagnosis as a table: the columns for which any layer has a number."""
    keys = [key for key in COLUMNS if any(key in row for row in diagnosis.rows)]
    height, width = diagnosis.size
    title = f"{diagnosis.model}: {counted(diagnosis.images, 'image')} of {height}x{width}"
    if diagnosis.against:
        title += f", against {diagnosis.against}"
    rows = [[cell(row, key) for key in keys] for row in diagnosis.rows]
    units = "Entropy in nats; distance in sides of the image, or of the window." if "entropy" in keys else ""
    return Table(
        title,
        [COLUMNS[key][0] for key in keys],
        rows,
        " ".join(filter(None, (units, insertion_sentence(diagnosis.inserted)))),
    )
