"""What the numbers mean: corruption errors, flip rates, calibration, intervals and paired tests, as pure functions.

Errors, accuracies and probabilities are fractions in [0, 1] here; mCE and mFR are in percent of AlexNet's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions import CORRUPTIONS
from vitfocus.robustness.references import ALEXNET_CLEAN_ERROR, ALEXNET_ERRORS, ALEXNET_FLIPS

Array = npt.NDArray[np.float64]
BINS = 15
RESAMPLES = 1000


def corruption_error(corruption: str, errors: Sequence[float], clean_error: float | None = None) -> float:
    """CE in percent: the sum of the errors over severities 1 to 5 divided by the sum of AlexNet's.

    With `clean_error`, the relative CE: both sums less five times the clean error.

    >>> round(corruption_error("fog", [0.3, 0.4, 0.5, 0.6, 0.7]), 3)
    61.026
    """
    if corruption not in ALEXNET_ERRORS:
        raise VitfocusError(f"AlexNet's errors on {corruption!r} are not published, so it has no CE.")
    if len(errors) != 5:
        raise VitfocusError(
            f"The CE of {corruption} needs the errors at all 5 severities, but {len(errors)} were given."
        )
    above, below = sum(errors), sum(ALEXNET_ERRORS[corruption])
    if clean_error is not None:
        above, below = above - 5 * clean_error, below - 5 * ALEXNET_CLEAN_ERROR
    return 100 * (above / below)


def mean_corruption_error(errors: Mapping[str, Sequence[float]], clean_error: float | None = None) -> float:
    """mCE in percent: the mean CE of the fifteen test corruptions; with `clean_error`, the relative mCE.

    >>> mean_corruption_error(ALEXNET_ERRORS), mean_corruption_error(ALEXNET_ERRORS, ALEXNET_CLEAN_ERROR)
    (100.0, 100.0)
    """
    missing = [name for name in CORRUPTIONS if name not in errors]
    if missing:
        raise VitfocusError(f"mCE is the mean over 15 corruptions; there are no errors for {', '.join(missing)}.")
    return sum(corruption_error(name, errors[name], clean_error) for name in CORRUPTIONS) / len(CORRUPTIONS)


def mean_flip_rate(flips: Mapping[str, float]) -> float:
    """mFR in percent: the mean over the ten test perturbations of flip probability over AlexNet's.

    >>> mean_flip_rate(ALEXNET_FLIPS)
    100.0
    """
    missing = [name for name in ALEXNET_FLIPS if name not in flips]
    if missing:
        raise VitfocusError(f"mFR is the mean over 10 perturbations; there are no flips for {', '.join(missing)}.")
    return 100 * (sum(flips[name] / ALEXNET_FLIPS[name] for name in ALEXNET_FLIPS) / len(ALEXNET_FLIPS))


def calibration_error(confidence: Array, hit: npt.NDArray[np.bool_], bins: int = BINS) -> float:
    """ECE: the mean gap between confidence and accuracy over equal-width bins, weighted by the images in each.

    >>> round(calibration_error(np.array([0.9, 0.9, 0.6, 0.6]), np.array([True, True, True, False])), 6)
    0.1
    """
    count, gap = _gaps(confidence, hit, bins)
    return float(np.abs(gap).sum() / max(count.sum(), 1))


def _gaps(confidence: Array, hit: npt.NDArray[np.bool_], bins: int) -> tuple[Array, Array]:
    which = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)  # bins are (low, high]
    count = np.bincount(which, minlength=bins).astype(np.float64)
    gap = np.bincount(which, weights=confidence - hit, minlength=bins).astype(np.float64)
    return count, gap


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


def calibration_interval(
    confidence: Array, hit: npt.NDArray[np.bool_], seed: int = 0, resamples: int = 200
) -> tuple[float, float]:
    """The bootstrap 95 % interval of the ECE."""
    if not len(confidence):
        return math.nan, math.nan
    generator = np.random.default_rng(seed)
    drawn = (generator.integers(0, len(hit), len(hit)) for _ in range(resamples))
    low, high = np.quantile([calibration_error(confidence[pick], hit[pick]) for pick in drawn], [0.025, 0.975])
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


class Difference(NamedTuple):
    """Mean of second minus first, and its paired bootstrap 95 % interval."""

    mean: float
    low: float
    high: float


def paired_difference(first: npt.ArrayLike, second: npt.ArrayLike, seed: int = 0) -> Difference:
    """How much the second model's mean exceeds the first's on the same images, resampling images in pairs.

    >>> paired_difference([0.0, 0.0, 1.0], [1.0, 1.0, 1.0]).mean
    0.6666666666666666
    """
    one, two = _paired(first, second)
    difference = two - one
    return Difference(float(difference.mean()), *mean_interval(difference, seed))


def _paired(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[Array, Array]:
    one, two = np.asarray(first, np.float64).reshape(-1), np.asarray(second, np.float64).reshape(-1)
    if len(one) != len(two) or not len(one):
        raise VitfocusError(
            f"A paired comparison needs two models' results on the same images, but got {len(one)} and {len(two)}."
        )
    return one, two
