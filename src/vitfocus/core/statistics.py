"""Small statistics that several packages share: confidence intervals of proportions and evenly spaced samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    """At most `limit` of `count` indices, evenly spaced, so that sorted classes keep their shares.

    Example:
        >>> evenly_spaced(10, 4), evenly_spaced(3, None)
        ([0, 2, 5, 7], range(0, 3))
    """
    if limit is None or limit >= count:
        return range(count)
    return [index * count // limit for index in range(limit)]
