"""What each arm's training step costs, as a multiple of the plain model's in the same process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reporting.gathered import Study
from reporting.labels import MODELS, label
from reporting.outcomes import at
from vitfocus.report.page import Cell, Page


def add_cost(page: Page, study: Study) -> None:
    """A table a model."""
    groups = {name: arms for name, arms in study.cost.items() if name in MODELS and isinstance(arms, Mapping)}
    if not groups:
        return
    page.section("Cost of a training step")
    device = study.cost.get("device")
    page.text(
        "Time of a training step as a multiple of the plain model's, measured by turns in one quiet process"
        f"{f' on {device}' if device else ''}. 1.00 is free."
    )
    headings = ["arm", "ms a step", "time, × plain"]
    for group, arms in groups.items():
        rows: list[list[Any]] = []
        for arm, found in arms.items():
            if isinstance(found, Mapping):
                rows.append([label(arm), *(_cell(found, key, digits) for key, digits in _COLUMNS)])
        page.heading(MODELS[group])
        page.table(f"{MODELS[group]} step cost", headings, rows)


_COLUMNS = (("ms", 2), ("ratio", 2))


def _cell(found: Mapping[str, Any], key: str, digits: int) -> Cell | None:
    value = at(key)(found)
    return Cell(f"{value:.{digits}f}", value) if value is not None else None
