"""The papers' claims (claims.toml) as comparisons between arms, and the verdict on each.

The rule: a claim is about the sign of a difference. The difference is made within each seed; its 95 % interval is
Student's t over the seeds. The whole interval on the claimed side: supported. The whole interval on the other side:
not supported. Anything else, and any single seed: undecided.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from reporting import outcomes
from reporting.gathered import Comparison, Study, Term
from reporting.intervals import Estimate, holm
from reporting.labels import HEADS, MODELS, label
from reporting.outcomes import Outcome

SUPPORTED, NOT_SUPPORTED, UNDECIDED = "supported", "not supported", "undecided"
VERDICTS = (SUPPORTED, NOT_SUPPORTED, UNDECIDED)

#: What claims.toml calls the numbers.
OUTCOMES = {
    "accuracy": outcomes.ACCURACY,
    "FGSM 1/255": outcomes.fgsm("1/255"),
    "corruption error": outcomes.CORRUPTION,
    "deep entropy": outcomes.DEEP_ENTROPY,
    "overfocus": outcomes.OVERFOCUS,
    "head similarity": outcomes.HEADS_ALIKE,
    "diagonal share": outcomes.DIAGONAL,
    "stability under noise": outcomes.STABILITY,
}


@dataclass(frozen=True)
class Claim:
    """A statement, the comparison that tests it, the sign it predicts, and the paper's own number with its source."""

    statement: str
    comparison: str
    terms: tuple[Term, ...]
    outcome: Outcome
    sign: int
    paper: str


@dataclass(frozen=True)
class Judged:
    """A claim with our numbers; `lasting`: decided even if all comparisons are to hold together (Holm)."""

    claim: Claim
    found: Comparison | None
    lasting: bool = False

    @property
    def verdict(self) -> str:
        """By the rule above."""
        return verdict(self.found.difference if self.found else None, self.claim.sign)


def verdict(difference: Estimate | None, sign: int) -> str:
    """Supported, not supported or undecided.

    >>> from reporting.intervals import estimate
    >>> verdict(estimate([1.0, 1.1, 0.9]), 1), verdict(estimate([1.0, 1.1, 0.9]), -1), verdict(estimate([1.0]), 1)
    ('supported', 'not supported', 'undecided')
    """
    if difference is None or difference.interval is None:
        return UNDECIDED
    low, high = difference.interval if sign > 0 else (-difference.interval[1], -difference.interval[0])
    return SUPPORTED if low > 0 else NOT_SUPPORTED if high < 0 else UNDECIDED


def judge(study: Study) -> list[Judged]:
    """Every claim with its numbers."""
    judged = [Judged(claim, study.compare(claim.terms, claim.outcome)) for claim in claims()]
    p_values = {i: p for i, one in enumerate(judged) if one.found and (p := one.found.difference.p_value) is not None}
    lasting = {i for i, keep in zip(p_values, holm(list(p_values.values())), strict=True) if keep}
    return [replace(one, lasting=i in lasting) for i, one in enumerate(judged)]


@cache
def claims() -> tuple[Claim, ...]:
    """The list in claims.toml, one entry a comparison."""
    written = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))
    return tuple(_claim(one, test) for one in written["claims"] for test in one["tests"])


def _claim(one: dict[str, Any], test: dict[str, Any]) -> Claim:
    terms, comparison = _gains(test["few"], test["many"]) if "few" in test else _arms(**test)
    sign = 1 if one["rises"] else -1
    return Claim(one["statement"], comparison, terms, OUTCOMES[one["outcome"]], sign, test["paper"])


def _arms(group: str, arm: str, than: str, paper: str) -> tuple[tuple[Term, ...], str]:
    """One arm less another of the same model."""
    return ((1, group, arm), (-1, group, than)), f"{MODELS[group]}: {label(arm)} − {label(than)}"


def _gains(few: int, many: int) -> tuple[tuple[Term, ...], str]:
    """What CB adds with few heads, less what it adds with many."""
    terms: list[Term] = []
    for sign, heads in ((1, few), (-1, many)):
        group, plain, treated = HEADS[heads]
        terms += [(sign, group, treated), (-sign, group, plain)]
    heads_few = "1 head" if few == 1 else f"{few} heads"
    return tuple(terms), f"ViT-Ti: gain by CB with {heads_few} − with {many} heads"
