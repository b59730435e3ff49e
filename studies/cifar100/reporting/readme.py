"""The README's generated part: how far the study went, the arms and the claims, as Markdown between two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from reporting.claims import judge
from reporting.gathered import Study
from reporting.labels import MODELS, label
from reporting.outcomes import ACCURACY, CORRUPTION, KEPT, at
from reporting.sections.claimed import HEADINGS, RULE, compared, marked, multiplicity, numbers
from reporting.sections.limits import limits
from reporting.sections.progress import how_far, verdicts
from reporting.words import INTERVALS, written
from vitfocus.core.files import write_text
from vitfocus.report.page import minus

BEGIN = "<!-- results: written by `study.py report`; changes between these marks are lost -->"
END = "<!-- end of results -->"

COLUMNS = (ACCURACY, CORRUPTION, KEPT)


#: A file beside the results, and what it shows.
Picture = tuple[str, str]


def update_readme(
    path: Path, study: Study, plan: Mapping[str, Sequence[str]], seeds: int, pictures: Sequence[Picture] = ()
) -> bool:
    """Replace what stands between the marks; a file without them, or none, is left alone. Says whether it did."""
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return False
    write_text(path, f"{before}{BEGIN}\n\n{generated(study, plan, seeds, pictures)}\n\n{END}{after}")
    return True


def generated(study: Study, plan: Mapping[str, Sequence[str]], seeds: int, pictures: Sequence[Picture] = ()) -> str:
    """The Markdown."""
    judged = judge(study)
    shown = [f"![{title}](results/{name})" for name, title in pictures]
    if not any(study.runs.values()):
        return "\n\n".join([how_far(study, plan, seeds), *shown])
    parts = [f"{how_far(study, plan, seeds)} {verdicts(judged)}"]
    if said := limits(study):
        parts += ["### Before you use these numbers", "\n".join(f"- {_escaped(one)}" for one in said)]
    parts += [*shown, INTERVALS]
    for group in ("vit-ti", "vit-s", "fine-tune"):
        if study.arms(group):
            parts += [f"### {MODELS[group]}", arms_table(study, group)]
    claims = [
        [
            one.claim.statement,
            marked(one),
            compared(one),
            numbers(one),
            written(one.found.difference, one.claim.outcome, signed=True) if one.found else "",
            minus(one.claim.paper),
        ]
        for one in judged
    ]
    parts += ["### The papers' claims", table(HEADINGS, claims), RULE, multiplicity(judged).replace("*", "\\*")]
    return "\n\n".join(parts)


def arms_table(study: Study, group: str) -> str:
    """Accuracy, corruption error and accuracy kept by arm, differences to plain, and the cost of a step if known."""
    headings = ["arm", "seeds"]
    for one in COLUMNS:
        headings += [f"{one.title} ({one.unit})", "less plain's"]
    cost = {arm: ratio for arm in study.arms(group) if (ratio := at(group, arm, "ratio")(study.cost)) is not None}
    rows = []
    for arm in study.arms(group):
        row = [label(arm), str(len(study.runs[group][arm]))]
        for one in COLUMNS:
            apart = study.against_plain(group, arm, one) if arm != "plain" else None
            row += [written(study.estimate(group, arm, one), one), written(apart, one, signed=True)]
        rows.append([*row, f"{cost[arm]:.2f}" if arm in cost else ""])
    if cost:
        return table([*headings, "step, × plain"], rows)
    return table(headings, [row[:-1] for row in rows])


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars and angle brackets of names stay text.

    >>> print(table(["a", "b"], [["x|y", "<1>"]]))
    | a | b |
    |---|---|
    | x\\|y | &lt;1&gt; |
    """
    lines = [headings, ["---"] * len(headings), *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines)


_SPECIAL = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "_": "\\_", "*": "\\*", "\n": " "}


def _escaped(text: str) -> str:
    for sign, instead in _SPECIAL.items():
        text = text.replace(sign, instead)
    return text
