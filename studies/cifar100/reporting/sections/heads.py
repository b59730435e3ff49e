"""Do fewer heads profit more from CB? Accuracy by the number of heads, with and without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reporting.gathered import Study
from reporting.labels import HEADS
from reporting.outcomes import ACCURACY
from reporting.words import cell
from vitfocus.report.charts import dot_chart
from vitfocus.report.comparison import Estimate
from vitfocus.report.page import Page

PLAIN, TREATED = "plain", "CB, upper half"


def add_heads(page: Page, study: Study) -> None:
    """A chart and a table, once a number of heads other than the usual has runs."""
    if not study.arms("heads"):
        return
    page.section("Number of heads")
    page.text(
        "ViT-Ti with its width kept and cut into other numbers of heads; the runs with 3 heads are those of the arms "
        "above. The gain is CB's accuracy less plain's, within each seed."
    )
    rows: list[tuple[str, Mapping[str, Estimate]]] = []
    lines: list[list[Any]] = []
    for heads, (group, plain, treated) in HEADS.items():
        found = {PLAIN: study.estimate(group, plain, ACCURACY), TREATED: study.estimate(group, treated, ACCURACY)}
        compared = study.compare([(1, group, treated), (-1, group, plain)], ACCURACY)
        if any(found.values()):
            values = {name: Estimate(one.mean, one.interval) for name, one in found.items() if one is not None}
            rows.append((f"{heads} {'head' if heads == 1 else 'heads'}", values))
            gain = cell(compared.difference, ACCURACY, signed=True) if compared else None
            lines.append([heads, *(cell(one, ACCURACY) for one in found.values()), gain])
    chart = dot_chart("Accuracy by number of heads", rows, {PLAIN: 6, TREATED: 0}, "accuracy (%), right is better")
    page.figures(("accuracy by number of heads", chart, ""), size="single")
    page.table("accuracy by number of heads", ["heads", "plain (%)", "CB, upper half (%)", "gain (points)"], lines)
