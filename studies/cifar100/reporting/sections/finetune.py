"""Fine-tuning a trained DeiT-Ti: insertion changes no answer, and what equal short budgets then reach."""

from __future__ import annotations

from collections.abc import Sequence

from reporting.charts import difference_chart
from reporting.gathered import Study
from reporting.labels import label
from reporting.outcomes import ACCURACY, CORRUPTION, at, corruption, names_at
from reporting.sections.robust import corruption_names, scores
from reporting.words import arm_table
from vitfocus.core.tables import counted
from vitfocus.report.page import Cell, Page

GROUP = "fine-tune"


def add_finetune(page: Page, study: Study) -> None:
    """The insertion table, then clean and corrupted accuracy of each arm."""
    arms = study.arms(GROUP)
    if not arms:
        return
    page.section("Fine-tuning a trained model")
    page.text(
        "DeiT-Ti as trained on ImageNet, with treatments inserted that leave its answers alone (CB_S at zero, TAP near "
        "the identity, ADL as a loss), then fine-tuned on CIFAR-100 enlarged to 224 pixels, every arm for the same "
        "short budget. Corruptions are made at 32 pixels and enlarged with the image."
    )
    page.points(_protocol(study))
    _insertion(page, study, arms)
    every = scores(study, GROUP)
    charts = [(one, difference_chart(study, one, [GROUP])) for one in (ACCURACY, CORRUPTION)]
    drawn = [(f"fine-tuned: {one.title} against plain", chart, "") for one, chart in charts if chart]
    if drawn:
        page.figures(*drawn)
    headings, rows, saved = arm_table(study, GROUP, every)
    page.table("fine-tuned accuracy and robustness", headings, rows, saved=saved)
    headings, rows, saved = arm_table(study, GROUP, every, differences=True)
    if rows:
        page.table("fine-tuned: differences to plain, in points", headings, rows, folded=True, saved=saved)
    names = corruption_names(study, GROUP)
    if names:
        headings, rows, saved = arm_table(study, GROUP, [corruption(name) for name in names])
        page.table("fine-tuned: error by corruption", headings, rows, folded=True, saved=saved)


def _protocol(study: Study) -> list[str]:
    """How much was trained and measured, as the runs state it."""
    said = []
    for run in study.all_runs(GROUP):
        protocol, epochs = run.get("protocol") or {}, at("epochs")(run)
        tested, corrupted = at("test_images")(protocol), at("corrupted_images")(protocol)
        parts = [counted(epochs, "epoch", ".4g")] if epochs else []
        parts += [f"accuracy on {tested:,.0f} test images"] if tested else []
        parts += [f"corruption error on {corrupted:,.0f} of them"] if corrupted else []
        severities = protocol.get("severities")
        parts += [f"at severities {', '.join(map(str, severities))}"] if isinstance(severities, list) else []
        said.append("; ".join(parts))
    return [f"Every arm: {words}." for words in dict.fromkeys(said) if words]


def _insertion(page: Page, study: Study, arms: Sequence[str]) -> None:
    """The worst over the seeds, before any training step."""
    if not names_at(study.all_runs(GROUP), "insertion"):
        return
    page.heading("At insertion, before any training")
    rows = [[label(arm), *(_worst(study, arm, key) for key in _INSERTION)] for arm in arms]
    page.table("insertion", ["arm", *_INSERTION.values()], rows)
    page.text(
        "With the trained head of 1,000 classes, on the same images as the untreated model; the worst over the seeds. "
        "CB_S starts at zero and ADL is a loss alone: neither may change a logit. TAP starts near the identity.",
        quiet=True,
    )


_INSERTION = {
    "largest_logit_change": "largest change of a logit",
    "tolerance": "tolerance",
    "spread_of_logits": "standard deviation of the logits",
    "decisions_changed": "decisions changed",
    "images": "images",
}


def _worst(study: Study, arm: str, key: str) -> Cell | None:
    found = [value for run in study.runs[GROUP][arm].values() if (value := at("insertion", key)(run)) is not None]
    return Cell(f"{max(found):.3g}", max(found)) if found else None
