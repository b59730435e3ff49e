"""Two diagnoses side by side: before and after a treatment, or one model and another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitfocus.anatomy import insertion_sentence
from vitfocus.attention.readings import READINGS, cell, columns
from vitfocus.core.errors import VitfocusError
from vitfocus.core.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitfocus.attention.diagnosis import Diagnosis


def _compared() -> dict[str, str]:
    """What is compared, and what a sentence calls it."""
    return {key: reading.label for key, reading in READINGS.items() if reading.label}


@dataclass(frozen=True)
class Comparison:
    """Two diagnoses, layer by layer. `rows` holds the second minus the first for every number both have."""

    first: Diagnosis
    second: Diagnosis
    labels: tuple[str, str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The differences, second minus first, of every layer."""
        pairs = zip(self.first.rows, self.second.rows, strict=True)
        return [
            {"layer": a["layer"], "name": b["name"]}
            | {key: b[key] - a[key] for key in _compared() if key in a and key in b}
            for a, b in pairs
        ]

    @property
    def findings(self) -> list[str]:
        """How the mean over the layers changes, one sentence per number."""
        sentences = []
        for key, what in _compared().items():
            means = [_mean(diagnosis, key) for diagnosis in (self.first, self.second)]
            before, after = means
            if before is None or after is None:
                continue
            low, high = (format(value, READINGS[key].format) for value in (before, after))
            verb = "stays at" if low == high else "rises" if after > before else "falls"
            change = f"{verb} {low}" if low == high else f"{verb} from {low} to {high}"
            sentences.append(f"From {self.labels[0]} to {self.labels[1]}, {what} {change}, averaged over the layers.")
        return sentences

    def table(self) -> Table:
        """Both values of every number, first → second."""
        keys = [key for key in _compared() if any(key in row for row in self.rows)]
        rows = [
            [str(a["layer"]), *(f"{cell(a, key)} → {cell(b, key)}" for key in keys)]
            for a, b in zip(self.first.rows, self.second.rows, strict=True)
        ]
        title, headings = f"{self.labels[0]} → {self.labels[1]}", columns()
        pairs = zip((self.first, self.second), self.labels, strict=True)
        caption = " ".join(insertion_sentence(one.inserted, label) for one, label in pairs if one.inserted)
        return Table(title, ["layer", *(headings[key][0] for key in keys)], rows, caption)

    def to_dict(self) -> dict[str, Any]:
        """Both diagnoses and the differences, as plain data."""
        first, second = self.first.to_dict(), self.second.to_dict()
        return {"labels": list(self.labels), "differences": self.rows, "first": first, "second": second}

    def plot(self, kind: str = "entropy") -> Figure:
        """The figure `Diagnosis.plot` draws, with both."""
        from vitfocus.report.plots import plot

        return plot(dict(zip(self.labels, (self.first, self.second), strict=True)), kind)

    def __str__(self) -> str:
        return "\n".join([str(self.table()), *(f"- {sentence}" for sentence in self.findings)])


def compare(first: Diagnosis, second: Diagnosis, labels: Sequence[str] | None = None) -> Comparison:
    """Two diagnoses of models with as many layers; `labels` name them in tables and figures."""
    if len(first.rows) != len(second.rows):
        raise VitfocusError(
            f"{first.model} was read in {len(first.rows)} layers and {second.model} in {len(second.rows)}: compare "
            f"models of the same depth, or pick layers with diagnose(layers=...)."
        )
    names = tuple(labels) if labels is not None else (first.model, second.model)
    if len(names) != 2:
        raise VitfocusError(f"Two labels are needed, but {len(names)} were given.")
    if names[0] == names[1]:
        names = (f"{names[0]} (1)", f"{names[1]} (2)")
    return Comparison(first, second, (names[0], names[1]))


def _mean(diagnosis: Diagnosis, key: str) -> float | None:
    values = [row[key] for row in diagnosis.rows if key in row]
    return sum(values) / len(values) if values else None
