"""Means over seeds with 95 % intervals by Student's t, and how sure a difference from zero is.

Degrees of freedom are whole numbers here, for which the distribution is a finite sum: no library is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

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
