"""Tables that look good in a terminal and stay plain when piped."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from vitfocus.attention.diagnosis import Diagnosis

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
    "scaling_mean": ("λ mean", ".3f"),
    "scaling_ratio": ("λ ratio", ".2f"),
}


@dataclass(frozen=True)
class Table:
    """Cells of text under headings. `print` shows it in colour on a terminal and plain elsewhere; rich renders it too.

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
        from rich.console import Console

        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size((160, 24)).columns if terminal else 160
        buffer = io.StringIO()
        # In a notebook rich would show the table at once and leave the text empty.
        console = Console(file=buffer, force_terminal=terminal, force_jupyter=False, width=width, legacy_windows=False)
        console.print(self)
        lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
        return "\n".join(line for line in lines if line)


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
    title = f"{diagnosis.model}: {diagnosis.images} images of {height}x{width}"
    if diagnosis.against:
        title += f", against {diagnosis.against}"
    rows = [[cell(row, key) for key in keys] for row in diagnosis.rows]
    return Table(
        title,
        [COLUMNS[key][0] for key in keys],
        rows,
        "Entropy in nats; distance in sides of the image, or of the window.",
    )
