"""Do the papers' claims hold at this scale? One row per comparison, with the rule for the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reporting.claims import NOT_SUPPORTED, SUPPORTED, UNDECIDED, Judged
from reporting.sections.limits import KEPT_IMAGES
from reporting.words import cell
from vitfocus.core.tables import counted
from vitfocus.report.page import Page, minus

RULE = (
    "Each row subtracts one arm's number from another's within every seed that both have; the interval is the 95 % "
    "interval of the mean difference by Student's t, and ↑ or ↓ is the way that the paper claims. Supported: the whole "
    "interval lies on the side that the paper claims. Not supported: the whole interval lies on the other side. "
    "Undecided: it holds zero, or there is only one seed. The list of comparisons was fixed before the runs; the "
    "papers' numbers, mostly from ImageNet and from longer training, stand beside ours for orientation."
)
PAPERS = (
    "CB: Hyeon-Woo, Kim, Heo, Han, Oh and Oh, Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023 "
    "(S: its supplement).",
    "TAP & ADL: Guo, Stutz and Schiele, Robustifying Token Attention for Vision Transformers, ICCV 2023.",
)
DEFINED = (
    "Corruption error: the mean error over the 15 corruptions of CIFAR-100-C (generated) and their severities; the "
    "papers' mCE divides errors by AlexNet's first. It also falls when accuracy on clean images rises.",
    "Accuracy kept under corruption: 100 less the corruption error, as a share of the accuracy on clean images. "
    f"{KEPT_IMAGES}",
    "Entropy in deep layers: the mean over all rows and heads of the upper half of the layers; the paper draws the "
    "class token's row.",
    "Diagonal share: the attention that tokens pay to themselves. Stability: the cosine between clean and noisy maps. "
    "Overfocus: the share of attention that the most attended 5 % of tokens receive. All are means over the layers.",
)


def add_claims(page: Page, judged: Sequence[Judged]) -> None:
    """The table, the rule, and what many comparisons at once mean."""
    page.section("Do the papers' claims hold here?")
    page.text(RULE)
    page.table("claims", HEADINGS, [row(one) for one in judged], saved=_saved(judged))
    page.text(multiplicity(judged))
    page.points([*DEFINED, *PAPERS])


HEADINGS = ["claim", "verdict", "comparison", "numbers", "difference", "the paper's"]


def row(one: Judged) -> list[Any]:
    """The cells of one comparison."""
    difference = cell(one.found.difference, one.claim.outcome, signed=True) if one.found else None
    return [one.claim.statement, marked(one), compared(one), numbers(one), difference, minus(one.claim.paper)]


def marked(one: Judged) -> str:
    """The verdict with a sign that is seen at a glance, and a star where it lasts among many comparisons."""
    return f"{_SIGNS[one.verdict]} {one.verdict}{' *' if one.lasting else ''}".replace(" ", NO_BREAK)


_SIGNS = {SUPPORTED: "✓", NOT_SUPPORTED: "✗", UNDECIDED: "○"}
NO_BREAK = "\u00a0"


def compared(one: Judged) -> str:
    """Which arms, and in how many seeds."""
    seeds = counted(one.found.difference.count, "seed") if one.found else "not run"
    return f"{one.claim.comparison} ({seeds})"


def numbers(one: Judged) -> str:
    """The number, the way it is claimed to go, and its means: `accuracy (%) ↑ 74.10 − 73.50`, or two gains."""
    outcome = one.claim.outcome
    title = f"{outcome.title} ({outcome.unit}) {'↑' if one.claim.sign > 0 else '↓'}"
    if one.found is None:
        return title
    means = [outcome.write(side.mean) for side in one.found.sides]
    pairs = [f"{means[i]} − {means[i + 1]}".replace(" ", NO_BREAK) for i in range(0, len(means), 2)]
    return f"{title} {pairs[0] if len(pairs) == 1 else ' − '.join(f'({pair})' for pair in pairs)}"


def multiplicity(judged: Sequence[Judged]) -> str:
    """What is to be expected of so many comparisons by chance, and what is left when all are to hold together."""
    tested = [one for one in judged if one.found is not None and one.found.difference.count > 1]
    decided = [one for one in tested if one.verdict != UNDECIDED]
    if not tested:
        return "No comparison has two seeds yet, so none is decided."
    lasting = sum(one.lasting for one in decided)
    left = "none of them is" if not lasting else f"{lasting} of them {'is' if lasting == 1 else 'are'}"
    return (
        f"Many comparisons at once: {len(tested)} have at least two seeds, and if no treatment did anything, about "
        f"{0.05 * len(tested):.1f} of them would still be decided one way or the other by chance. "
        f"{counted(len(decided), 'comparison')} {'is' if len(decided) == 1 else 'are'} decided here; {left} still "
        "decided when all are to hold together at 95 % (Holm's correction), marked *. With three seeds an interval "
        "reaches 2.5 standard deviations of the differences to either side: small effects stay undecided, which does "
        "not show that they are absent."
    )


def _saved(judged: Sequence[Judged]) -> list[list[Any]]:
    lines: list[list[Any]] = [
        [
            "claim",
            "comparison",
            "number",
            "claimed",
            "verdict",
            "difference",
            "low",
            "high",
            "seeds",
            "p",
            "Holm",
            "paper",
        ]
    ]
    for one in judged:
        found = one.found.difference if one.found else None
        numbers = [found.mean, *(found.interval or (None, None)), found.count, found.p_value] if found else [None] * 5
        claimed = "more" if one.claim.sign > 0 else "less"
        head = [one.claim.statement, one.claim.comparison, one.claim.outcome.title, claimed, one.verdict]
        lines.append([*head, *numbers, one.lasting, one.claim.paper])
    return lines
