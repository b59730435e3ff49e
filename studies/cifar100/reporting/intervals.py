"""Means over seeds with 95 % intervals by Student's t, p-values, a pooled model of several arms, and statistical power.

Degrees of freedom are whole numbers here, for which the distribution is a finite sum: no library is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, stdev

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """Values of several seeds, as their mean; the interval needs at least two of them.

    >>> estimate([1.0, 2.0, 3.0])
    Estimate(values=(1.0, 2.0, 3.0), mean=2.0, interval=(-0.484..., 4.484...))
    >>> estimate([1.0]).interval is None
    True
    """

    values: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None

    @property
    def count(self) -> int:
        """How many seeds."""
        return len(self.values)

    @property
    def p_value(self) -> float | None:
        """Two-sided, of the hypothesis that the true mean is zero; None from a single seed."""
        if self.count < 2:
            return None
        spread = stdev(self.values) / math.sqrt(self.count)
        if spread == 0.0:
            return 0.0 if self.mean else 1.0
        return 1.0 - within(abs(self.mean) / spread, self.count - 1)


def estimate(values: Iterable[float]) -> Estimate:
    """The mean and its interval: mean ± t · s / √n."""
    kept = tuple(values)
    if not kept:
        raise ValueError("an estimate needs at least one value")
    mean = fmean(kept)
    if len(kept) == 1:
        return Estimate(kept, mean, None)
    half = quantile(len(kept) - 1) * stdev(kept) / math.sqrt(len(kept))
    return Estimate(kept, mean, (mean - half, mean + half))


def within(t: float, freedom: int) -> float:
    """The probability that |T| < t, by the finite sums for whole degrees of freedom.

    >>> round(within(4.302653, 2), 6), round(within(1.0, 1), 6)
    (0.95, 0.5)
    """
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    if freedom % 2:
        term, total = math.cos(angle), 0.0
        for i in range(1, freedom - 1, 2):
            total += term
            term *= square * (i + 1) / (i + 2)
        return 2 / math.pi * (angle + math.sin(angle) * total)
    term, total = 1.0, 0.0
    for i in range(0, freedom, 2):
        total += term
        term *= square * (i + 1) / (i + 2)
    return math.sin(angle) * total


@cache
def quantile(freedom: int, level: float = LEVEL) -> float:
    """The t within which that share of the distribution lies, by bisection.

    >>> round(quantile(2), 6), round(quantile(4), 6)
    (4.302653, 2.776445)
    """
    low, high = 0.0, 1.0
    while within(high, freedom) < level:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def holm(p_values: Sequence[float], level: float = 1 - LEVEL) -> list[bool]:
    """Which hypotheses are still rejected when all of them are to hold together at that level (Holm, 1979).

    >>> holm([0.04, 0.01, 0.03])
    [False, True, False]
    """
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def additive(arms: Mapping[str, Sequence[float]], base: str) -> tuple[dict[str, float], float, int]:
    """The additive model arm + seed: each arm's difference to `base`, their standard error, the degrees of freedom.

    Every arm has the same seeds in the same order, at least two. With a arms and n seeds there are (a - 1)(n - 1)
    degrees of freedom, against n - 1 for one pair of arms; all arms share the residual variance.

    >>> effects, error, freedom = additive({"plain": [1.0, 2.0, 3.0], "cb": [2.0, 3.1, 3.9]}, "plain")
    >>> round(effects["cb"], 6), round(error, 4), freedom
    (1.0, 0.0577, 2)
    """
    columns = [list(values) for values in arms.values()]
    count = len(columns[0])
    if count < 2 or len(columns) < 2 or any(len(column) != count for column in columns):
        raise ValueError("the additive model needs at least two arms with the same two or more seeds")
    means = {arm: fmean(values) for arm, values in arms.items()}
    seeds = [fmean(column[i] for column in columns) for i in range(count)]
    whole = fmean(seeds)
    residuals = [v - means[arm] - seeds[i] + whole for arm, values in arms.items() for i, v in enumerate(values)]
    freedom = (len(columns) - 1) * (count - 1)
    error = math.sqrt(2 / count * sum(r * r for r in residuals) / freedom)
    return {arm: mean - means[base] for arm, mean in means.items() if arm != base}, error, freedom


def pooled(arms: Mapping[str, Sequence[float]], base: str) -> dict[str, Estimate]:
    """Each arm's difference to `base` with its interval in the `additive` model. The estimates carry no values.

    >>> pooled({"plain": [1.0, 2.0, 3.0], "cb": [2.0, 3.0, 4.0], "tap": [0.9, 2.1, 3.0]}, "plain")["cb"]
    Estimate(values=(), mean=1.0, interval=(0.869..., 1.130...))
    """
    effects, error, freedom = additive(arms, base)
    half = quantile(freedom) * error
    return {arm: Estimate((), mean, (mean - half, mean + half)) for arm, mean in effects.items()}


def power(effect: float, spread: float, count: int) -> float:
    """The probability that a paired t test at 95 % decides a true effect, either way.

    `spread` is the standard deviation of the differences and `count` the number of seeds. The noncentral t distribution
    is integrated over the sample's standard deviation by the midpoint rule.

    >>> round(power(0.7, 0.7, 3), 2), round(power(0.0, 0.7, 3), 2)
    (0.18, 0.05)
    """
    freedom, normal, steps, top = count - 1, NormalDist(), 4000, 8.0
    shift, bound = effect / (spread / math.sqrt(count)), quantile(count - 1)
    scale = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    undecided = 0.0
    for i in range(steps):
        s = (i + 0.5) * top / steps
        density = math.exp(scale + (freedom - 1) * math.log(s) - freedom * s * s / 2)
        undecided += density * (normal.cdf(bound * s - shift) - normal.cdf(-bound * s - shift)) * top / steps
    return 1 - undecided
