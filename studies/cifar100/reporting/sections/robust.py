"""Accuracy and robustness of every arm: means, differences to plain, corruption by corruption."""

from __future__ import annotations

from reporting.charts import difference_chart, difference_grid
from reporting.gathered import Study
from reporting.labels import MODELS, label
from reporting.outcomes import (
    ACCURACY,
    CORRUPTION,
    KEPT,
    OCCLUSION,
    TOP5,
    Outcome,
    corruption,
    fgsm,
    names_at,
    occlusion,
)
from reporting.words import arm_table
from vitfocus.corruptions import CORRUPTIONS
from vitfocus.report.page import Page

SCRATCH = ("vit-ti", "vit-s")


def scores(study: Study, *groups: str) -> list[Outcome]:
    """Accuracy, corruption error, accuracy kept, FGSM and occlusion, as far as these groups' runs have them."""
    runs = list(study.all_runs(*groups))
    attacks = [fgsm(name) for name in names_at(runs, "fgsm")]
    hidden = [occlusion(name) for name in names_at(runs, "occlusion")]
    return [ACCURACY, TOP5, CORRUPTION, KEPT, *attacks, OCCLUSION, *hidden]


def add_robustness(page: Page, study: Study) -> None:
    """Charts for the models trained from scratch, then the tables of each model."""
    groups = [group for group in SCRATCH if study.arms(group)]
    if not groups:
        return
    page.section("Accuracy and robustness")
    page.text(
        "Trained from scratch on CIFAR-100; corruptions with the constants of CIFAR-C, generated on the fly on the "
        "test set with fixed seeds: CIFAR-100-C (generated). Differences are made within each seed; whiskers are 95 % "
        "intervals over seeds, and a dot without them is a single seed."
    )
    shown = [ACCURACY, CORRUPTION, KEPT, *(fgsm(name) for name in names_at(study.all_runs(*groups), "fgsm")), OCCLUSION]
    charts = [(one, difference_chart(study, one, groups)) for one in shown]
    drawn = [(f"{one.title} against plain", chart, "") for one, chart in charts if chart]
    if drawn:
        page.figures(*drawn)
    for group in groups:
        page.heading(f"{MODELS[group]}: every arm")
        headings, rows, saved = arm_table(study, group, scores(study, group))
        page.table(f"{MODELS[group]} accuracy and robustness", headings, rows, saved=saved)
        headings, rows, saved = arm_table(study, group, scores(study, group), differences=True)
        if rows:
            page.table(f"{MODELS[group]}: differences to plain, in points", headings, rows, folded=True, saved=saved)
        _by_corruption(page, study, group)


def corruption_names(study: Study, *groups: str) -> list[str]:
    """The corruptions that were measured, in the usual order."""
    found = names_at(study.all_runs(*groups), "corruption", "by_corruption")
    return [name for name in CORRUPTIONS if name in found] + [name for name in found if name not in CORRUPTIONS]


def _by_corruption(page: Page, study: Study, group: str) -> None:
    names = corruption_names(study, group)
    if not names:
        return
    arms = [arm for arm in study.arms(group) if arm != "plain"]
    cells = {
        (name, label(arm)): found.mean
        for name in names
        for arm in arms
        if (found := study.against_plain(group, arm, corruption(name))) is not None
    }
    if cells:
        title = f"{MODELS.get(group, group)}: error less plain's by corruption (points)"
        columns = [label(arm) for arm in arms]
        caption = "Mean over severities and seeds. Blue: the arm errs less than plain; orange: more."
        page.figures((title, difference_grid(title, cells, names, columns), caption), size="single")
    headings, rows, saved = arm_table(study, group, [corruption(name) for name in names])
    page.table(f"{MODELS.get(group, group)}: error by corruption", headings, rows, folded=True, saved=saved)
