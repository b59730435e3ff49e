"""How the recipe was chosen: candidates on the plain ViT-Ti, by a validation split of the training set."""

from __future__ import annotations

from typing import Any

from reporting.gathered import Study
from reporting.outcomes import at
from vitfocus.report.page import Cell, Page

_VALIDATION = at("validation_accuracy")


def add_selection(page: Page, study: Study) -> None:
    """The candidates, best first."""
    if not study.selection:
        return
    page.section("How the recipe was chosen")
    ranked = sorted(study.selection, key=lambda one: -(_VALIDATION(one) or 0.0))
    split = ""
    if "training_images" in ranked[0] and "validation_images" in ranked[0]:
        split = (
            f" ({ranked[0]['training_images']:,} images to train on, {ranked[0]['validation_images']:,} to choose by)"
        )
    page.text(
        "Every candidate was trained on the plain ViT-Ti with a validation split taken from the training set"
        f"{split}, and chosen by that split alone. The best one's recipe is used by every arm and by ViT-S, trained on "
        "all training images; nothing is tuned for an arm."
    )
    keys = list(dict.fromkeys(key for one in ranked for key in one.get("overrides", {})))
    headings = ["candidate", "validation accuracy (%)", *keys, "epochs", "seed"]
    rows: list[list[Any]] = []
    for place, one in enumerate(ranked):
        value = _VALIDATION(one)
        shown = Cell(f"{value:.2f}", value) if value is not None else None
        name = f"{one.get('candidate', '?')}{' (chosen)' if place == 0 else ''}"
        rest = [one.get("epochs"), one.get("seed")]
        rows.append([name, shown, *(_text(one.get("overrides", {}).get(key)) for key in keys), *map(_text, rest)])
    page.table("candidates", headings, rows)
    if any(None in row[2:] for row in rows):
        page.text("An empty cell: as the shipped recipe cifar100 has it.", quiet=True)


def _text(value: Any) -> str | None:
    return None if value is None else f"{value:g}" if isinstance(value, float) else str(value)
