"""What attention does in every arm: entropy by depth, and the other readings as means and by depth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reporting import outcomes
from reporting.charts import depth_charts, difference_chart
from reporting.gathered import Study
from reporting.labels import MODELS
from reporting.outcomes import names_at, stability
from reporting.sections.robust import SCRATCH
from reporting.words import arm_table, folded
from vitfocus.report.charts import Reference
from vitfocus.report.page import Page


@dataclass(frozen=True)
class Depth:
    """A reading by depth: where it lies in a run, its title and axis, and what it means."""

    path: tuple[str, ...]
    title: str
    axis: str
    meaning: str


ENTROPY = Depth(
    ("reading", "entropy"),
    "Entropy",
    "entropy of a row of attention (nats)",
    "Entropy says how widely a token listens: exp(entropy) is about the number of tokens it listens to. Bands are 95 % "
    "intervals over seeds; all panels have one scale, and the plain model is in each.",
)
OTHERS = (
    Depth(("reading", "overfocus"), "Overfocus", "share received by the top 5 % of tokens", ""),
    Depth(("stability", "gaussian_noise", "by_layer"), "Stability under noise", "cosine of clean and noisy maps", ""),
    Depth(("reading", "head_similarity"), "Head similarity", "mean cosine between the heads' maps", ""),
    Depth(("reading", "diagonal"), "Diagonal share", "share of the mean map on its diagonal", ""),
    Depth(("reading", "distance"), "Distance", "mean distance to attended tokens (sides)", ""),
)
MEANS = (
    outcomes.ENTROPY,
    outcomes.DEEP_ENTROPY,
    outcomes.OVERFOCUS,
    outcomes.STABILITY,
    outcomes.HEADS_ALIKE,
    outcomes.DIAGONAL,
)


def add_attention(page: Page, study: Study) -> None:
    """Panels of entropy, differences to plain, and a table a model."""
    groups = [group for group in SCRATCH if names_at(study.all_runs(group), "reading")]
    if not groups:
        return
    page.section("What attention does")
    page.text(ENTROPY.meaning)
    for group in groups:
        drawn = depth_charts(study, group, ENTROPY.path, ENTROPY.title, ENTROPY.axis, _bound(study, group))
        if drawn:
            page.figures(*drawn)
    charts = [(one, difference_chart(study, one, groups)) for one in MEANS if one is not outcomes.ENTROPY]
    drawn = [(f"{one.title} against plain", chart, "") for one, chart in charts if chart]
    if drawn:
        page.heading("Differences to plain, means over the layers")
        page.figures(*drawn)
    for group in groups:
        _tables(page, study, group)
        _folded_panels(page, study, group)


def _bound(study: Study, group: str) -> list[Reference]:
    """The entropy of uniform attention over the patches and the class token, whose number the recipe tells."""
    run = next(study.all_runs(group))
    size = outcomes.at("recipe", "data", "size")(run)
    patch = outcomes.at("recipe", "model", "arguments", "patch_size")(run)
    if not size or not patch:
        return []
    tokens = int(size // patch) ** 2 + 1
    return [Reference(f"bound: all {tokens} tokens alike", level=math.log(tokens))]


def _tables(page: Page, study: Study, group: str) -> None:
    page.heading(f"{MODELS[group]}: readings, means over the layers")
    under = [stability(name) for name in names_at(study.all_runs(group), "stability") if name != "gaussian_noise"]
    every = [*MEANS, *under]
    headings, rows, saved = arm_table(study, group, every)
    page.table(f"{MODELS[group]} readings", headings, rows, saved=saved)
    headings, rows, saved = arm_table(study, group, every, differences=True)
    if rows:
        page.table(f"{MODELS[group]}: differences of readings to plain", headings, rows, folded=True, saved=saved)


def _folded_panels(page: Page, study: Study, group: str) -> None:
    """The other readings by depth, one fold each."""
    for reading in OTHERS:
        drawn = depth_charts(study, group, reading.path, reading.title, reading.axis)
        if drawn:
            with folded(page, f"{MODELS[group]}: {reading.title.lower()} by depth"):
                page.figures(*drawn)
