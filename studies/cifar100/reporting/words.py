"""How numbers are written: a mean with its interval, a signed difference, a cell of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

from reporting.gathered import Study
from reporting.intervals import Estimate
from reporting.labels import label
from reporting.outcomes import Outcome
from vitfocus.report.page import Cell, Page, minus

INTERVALS = (
    "Numbers are means over seeds with their 95 % interval by Student's t in brackets; a number without brackets is "
    "from a single seed, which has no interval."
)


def written(found: Estimate | None, outcome: Outcome, signed: bool = False) -> str:
    """`75.43 [74.90, 75.96]`; without the brackets from one seed; nothing where nothing was measured.

    >>> from reporting.intervals import estimate
    >>> from reporting.outcomes import ACCURACY
    >>> written(estimate([75.0, 76.0]), ACCURACY), written(estimate([-0.5]), ACCURACY, signed=True)
    ('75.50 [69.15, 81.85]', '−0.50')
    """
    if found is None:
        return ""
    shown = outcome.write(found.mean, signed)
    if found.interval is not None:
        shown += f" [{', '.join(outcome.write(end, signed) for end in found.interval)}]"
    return minus(shown)


def cell(found: Estimate | None, outcome: Outcome, signed: bool = False) -> Cell | None:
    """A table's cell; the exact mean goes into the CSV file."""
    return Cell(written(found, outcome, signed), found.mean) if found is not None else None


def arm_table(
    study: Study, group: str, outcomes: Sequence[Outcome], differences: bool = False
) -> tuple[list[str], list[list[Any]], list[list[Any]]]:
    """Headings, rows by arm, and the rows of the CSV file: means, or differences to plain within each seed."""
    outcomes = [one for one in outcomes if any(study.seeds(group, arm, one) for arm in study.arms(group))]
    headings = ["arm", "seeds", *(f"{one.title} ({one.unit})" for one in outcomes)]
    rows: list[list[Any]] = []
    saved: list[list[Any]] = [["arm", "number", "unit", "mean", "low", "high", "seeds", "values"]]
    for arm in study.arms(group):
        if differences and arm == "plain":
            continue
        take = study.against_plain if differences else study.estimate
        found = [take(group, arm, one) for one in outcomes]
        seeds = max((one.count for one in found if one is not None), default=0)
        rows.append(
            [
                label(arm).replace(" ", "\u00a0"),
                seeds,
                *(cell(one, of, differences) for one, of in zip(found, outcomes, strict=True)),
            ]
        )
        for one, of in zip(found, outcomes, strict=True):
            if one is not None:
                ends = one.interval or (None, None)
                values = " ".join(repr(value) for value in one.values)
                saved.append([arm, of.title, of.unit, one.mean, *ends, one.count, values])
    return headings, rows, saved


@contextmanager
def folded(page: Page, name: str) -> Iterator[None]:
    """What is added to the page in this block is hidden until its name is pressed."""
    page.parts.append(f"<details><summary>{escape(name)}</summary>")
    yield
    page.parts.append("</details>")


def flat(record: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested keys joined by dots.

    >>> flat({"data": {"size": 32, "root": "x"}, "seed": 0})
    {'data.size': 32, 'data.root': 'x', 'seed': 0}
    """
    found: dict[str, Any] = {}
    for key, value in record.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, Mapping) and value else {f"{before}{key}": value}
    return found
