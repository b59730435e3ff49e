"""Statistics that several packages share: confidence intervals, paired tests and evenly spaced samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vitfocus.core.errors import VitfocusError

Array = npt.NDArray[np.float64]
RESAMPLES = 1000

#: The 97.5 % quantile of the normal distribution: two-sided 95 % intervals.
Z95 = 1.959964


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion that was measured on `count` samples.

    Args:
        share: The measured proportion, in [0, 1].
        count: The number of samples, at least 1.

    Returns:
        The lower and the upper bound, in [0, 1].

    Example:
        >>> [round(bound, 3) for bound in wilson_interval(0.5, 100)]
        [0.404, 0.596]
    """
    shrink = 1 + Z95**2 / count
    middle = (share + Z95**2 / (2 * count)) / shrink
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2)) / shrink
    return max(0.0, middle - half), min(1.0, middle + half)


def evenly_spaced(count: int, limit: int | None) -> Sequence[int]:
    """At most `limit` of `count` indices, evenly spaced, so that the shares of sorted classes are kept.

    Example:
        >>> evenly_spaced(10, 4), evenly_spaced(3, None)
        ([0, 2, 5, 7], range(0, 3))
    """
    if limit is None or limit >= count:
        return range(count)
    return [index * count // limit for index in range(limit)]


def mean_interval(values: npt.ArrayLike, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The bootstrap 95 % interval of a mean over images: percentiles of the means of resampled images.

    >>> low, high = mean_interval([0.0, 1.0] * 200)
    >>> 0.44 < low < 0.5 < high < 0.56
    True
    """
    sample = np.asarray(values, np.float64).reshape(-1)
    if not len(sample):
        return math.nan, math.nan
    generator = np.random.default_rng(seed)
    if ((sample == 0) | (sample == 1)).all():  # a resampled share is exactly a binomial draw
        means = generator.binomial(len(sample), sample.mean(), resamples) / len(sample)
    else:
        step = max(1, 4_000_000 // len(sample))
        means = np.concatenate(
            [
                sample[generator.integers(0, len(sample), (min(step, resamples - start), len(sample)))].mean(axis=1)
                for start in range(0, resamples, step)
            ]
        )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


class McNemar(NamedTuple):
    """Images that only the first model, and only the second, got right, and the exact two-sided p-value."""

    only_first: int
    only_second: int
    p_value: float


def mcnemar(first: npt.ArrayLike, second: npt.ArrayLike) -> McNemar:
    """McNemar's exact test on two models' hits on the same images.

    >>> mcnemar([1, 1, 1, 1, 0], [0, 0, 0, 0, 1])
    McNemar(only_first=4, only_second=1, p_value=0.375)
    """
    one, two = _paired(first, second)
    only_first, only_second = int(((one > 0) & (two == 0)).sum()), int(((one == 0) & (two > 0)).sum())
    total, fewer = only_first + only_second, min(only_first, only_second)
    # The binomial tail with p = 1/2, in logarithms: exact for any count.
    logs = [
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) - total * math.log(2)
        for k in range(fewer + 1)
    ]
    p_value = min(1.0, 2 * math.fsum(map(math.exp, logs))) if only_first != only_second else 1.0
    return McNemar(only_first, only_second, round(p_value, 15))


class PairedDifference(NamedTuple):
    """Mean of second minus first, and its paired bootstrap 95 % interval."""

    mean: float
    low: float
    high: float


def paired_difference(first: npt.ArrayLike, second: npt.ArrayLike, seed: int = 0) -> PairedDifference:
    """The difference of two models' means on the same images, with an interval from resampled pairs.

    >>> paired_difference([0.0, 0.0, 1.0], [1.0, 1.0, 1.0]).mean
    0.6666666666666666
    """
    one, two = _paired(first, second)
    difference = two - one
    return PairedDifference(float(difference.mean()), *mean_interval(difference, seed))


def _paired(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[Array, Array]:
    one, two = np.asarray(first, np.float64).reshape(-1), np.asarray(second, np.float64).reshape(-1)
    if len(one) != len(two) or not len(one):
        raise VitfocusError(
            f"A paired comparison needs two models' results on the same images, but got {len(one)} and {len(two)}."
        )
    return one, two


def repeat_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of repeated measurements and half of its 95 % interval, by Student's t.

    >>> mean, half = repeat_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> mean, round(half, 3)
    (3.0, 1.963)
    """
    count = len(values)
    if not 2 <= count <= len(_STUDENT) + 1:
        raise VitfocusError(f"{count} repeats give no 95 % interval here; expected 2 to {len(_STUDENT) + 1}.")
    mean = math.fsum(values) / count
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return mean, _STUDENT[count - 2] * spread / math.sqrt(count)


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
