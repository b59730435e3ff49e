"""What a reproduction found: every number of the paper beside ours, as a table to print and as plain data."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitfocus.core.files import write_text
from vitfocus.core.tables import Table, counted
from vitfocus.reproduce import counting
from vitfocus.reproduce.items import Item, Printed, Row
from vitfocus.reproduce.measures import MEASURES
from vitfocus.reproduce.measuring import Value
from vitfocus.reproduce.planning import Run, describe_data


@dataclass
class RowOutcome:
    """One row: what was run for it, on what, and what was measured."""

    row: Row
    scale: str
    run: Run | None = None
    images: tuple[int, int] | None = None  # trained on, validated on; None: nothing was trained
    values: dict[str, Value] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)  # of data, model, libraries and device
    trained: bool = False

    @property
    def where(self) -> str:
        """Scale and data, in a few words."""
        if self.run is None:
            return f"{self.scale}: {'computed, no data' if self.row.computed else 'not run, quoted alone'}"
        if not self.trained:
            return f"{self.scale}: counted only, {counting.image_size(self.run)} px"
        return describe_data(self.run, self.images)

    def where_measured(self, name: str) -> str:
        """`where`, and how many images a number comes from where it is not all that the run was validated on."""
        value = self.values.get(name)
        every = self.images[1] if self.images else None
        if value is None or value.images is None or value.images == every:
            return self.where
        return f"{self.where}, measured on {counted(value.images, 'image')}"


@dataclass
class Outcome:
    """An item at a scale. `absent` says why a number was not measured; `figures` are files."""

    item: Item
    scale: str
    rows: list[RowOutcome] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    changed: tuple[str, ...] = ()
    limit: int | None = None  # of the images that trained models were evaluated and diagnosed on

    def table(self) -> Table:
        """One line a number: the paper's, ours, and how each differs from its untreated row."""
        lines = []
        for outcome in self.rows:
            names = [*self.item.measures, *(name for name in outcome.values if name not in self.item.measures)]
            for name in names:
                value, printed = outcome.values.get(name), outcome.row.paper.get(name)
                if value is None and printed is None:
                    continue
                lines.append(
                    [
                        outcome.row.label,
                        _heading(name, value),
                        printed_text(printed),
                        value_text(name, value),
                        *self._changes(outcome, name),
                        outcome.where_measured(name),
                    ]
                )
        columns = ["row", "measure", "paper", "ours", "Δ paper", "Δ ours", "scale: data of ours"]
        return Table("", columns, lines)

    def __str__(self) -> str:
        return self.text(styled=sys.stdout.isatty())

    def text(self, *, styled: bool = False) -> str:
        """The table as wide as it is, so that no line loses its scale, and the remarks below it."""
        title = f"{self.item.name} ({self.item.paper}): {self.item.title}. The paper's numbers: {self.item.data}."
        table = self.table().text(styled=styled)
        return "\n".join([title, table, *(f"- {remark}" for remark in self.remarks())])

    def remarks(self) -> list[str]:
        """What a reader of the table should know."""
        changed = [f"The recipes were changed: {' '.join(self.changed)}."] if self.changed else []
        if self.limit is not None:
            changed.append(f"Evaluations and diagnoses of trained models saw at most {counted(self.limit, 'image')}.")
        return [*self.item.notes, *changed, *dict.fromkeys(self.absent)]

    def _changes(self, outcome: RowOutcome, name: str) -> tuple[str, str]:
        plain = self.item.baseline(outcome.row)
        base = next((one for one in self.rows if one.row is plain), None) if plain is not None else None
        if base is None or MEASURES[name].source == "counted":
            return "", ""
        digits = MEASURES[name].digits
        before, after = (_number(one.row.paper.get(name)) for one in (base, outcome))
        ours = outcome.values.get(name), base.values.get(name)
        return (
            f"{after - before:+.{digits}f}" if before is not None and after is not None else "",
            f"{ours[0].number - ours[1].number:+.{digits}f}" if ours[0] is not None and ours[1] is not None else "",
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "item": self.item.name,
            "title": self.item.title,
            "paper": self.item.paper,
            "paper_data": self.item.data,
            "scale": self.scale,
            "changed": list(self.changed),
            "rows": [self._row(outcome) for outcome in self.rows],
            "figures": [str(path) for path in self.figures],
            "notes": self.remarks(),
        }

    def _row(self, outcome: RowOutcome) -> dict[str, Any]:
        run = outcome.run
        return {
            "label": outcome.row.label,
            "scale": self.scale,
            "data": outcome.where,
            "spec": run.spec if run else None,
            "run": str(run.folder) if run and outcome.trained else None,
            "recipe_sha256": run.digest if run and run.recipe else None,
            "fingerprint": outcome.fingerprint,
            "measures": {
                name: {
                    "title": _heading(name, outcome.values.get(name)),
                    "paper": outcome.row.paper.get(name),
                    "ours": outcome.values[name].number if name in outcome.values else None,
                    "interval": outcome.values[name].interval if name in outcome.values else None,
                    "images": outcome.values[name].images if name in outcome.values else None,
                }
                for name in dict.fromkeys((*self.item.measures, *outcome.values, *outcome.row.paper))
                if name in outcome.values or name in outcome.row.paper
            },
        }

    def save(self, folder: Path) -> None:
        """Write outcome.json and the table as text."""
        write_text(folder / "outcome.json", json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")
        write_text(folder / "table.txt", self.text() + "\n")


def _heading(name: str, value: Value | None) -> str:
    """The measure's heading; where ours is another at this scale, both."""
    measure = MEASURES[name]
    return f"{measure.heading}, ours: {value.title}" if value is not None and value.title else measure.heading


def _number(printed: Printed | None) -> float | None:
    if isinstance(printed, tuple):
        return printed[0]
    return None if printed is None or isinstance(printed, str) else float(printed)


def printed_text(printed: Printed | None) -> str:
    """A paper's number as it prints it.

    >>> printed_text(80.5), printed_text((40.22, 0.15)), printed_text("Yes"), printed_text(None)
    ('80.5', '40.22 ± 0.15', 'Yes', '–')
    """
    if printed is None:
        return "–"
    return " ± ".join(map(str, printed)) if isinstance(printed, tuple) else str(printed)


def value_text(name: str, value: Value | None) -> str:
    """Our number with its interval, or a dash where it was not measured."""
    if value is None:
        return "–"
    digits = MEASURES[name].digits
    small = MEASURES[name].source == "counted" and 0 < abs(value.number) < 1
    text = f"{value.number:.2g}" if small else f"{value.number:.{digits}f}"
    return text if value.interval is None else f"{text} ± {value.interval:.{digits}f}"
