"""The columns of a diagnosis, and a diagnosis as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitfocus.anatomy import insertion_sentence
from vitfocus.core.tables import Table, counted

if TYPE_CHECKING:
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
    "scaling_mean": ("λ mean", "z.3f"),
    "scaling_ratio": ("λ ratio", ".2f"),
}


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
