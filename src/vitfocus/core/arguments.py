"""Checking arguments: values from Python, NumPy or torch become plain values, or are refused in one sentence."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from vitfocus.core.errors import VitfocusError


def whole(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """A whole number of any library as a Python int, from `low` to `high`.

    >>> import numpy as np
    >>> whole("limit", np.int64(3), low=1)
    3
    >>> whole("limit", 2.5, low=1)
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: limit is 2.5; expected a whole number of at least 1.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor that holds no single whole number
        number = None
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        bounds = f" from {low} to {high}" if high is not None else "" if low is None else f" of at least {low}"
        raise VitfocusError(f"{name} is {value!r}; expected a whole number{bounds}.")
    return number


def real(name: str, value: Any, expected: str) -> float:
    """A finite number that is not negative, as a float.

    >>> real("eps", "a", "distances in 1/255, such as 4")
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: eps is 'a'; expected distances in 1/255, such as 4.
    """
    try:
        number = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise VitfocusError(f"{name} is {value!r}; expected {expected}.")
    return number


def several(name: str, value: Any, empty: bool = False) -> list[Any]:
    """One value or several as a list without duplicates; an empty one is refused unless `empty` is set.

    >>> import numpy as np
    >>> several("corruptions", "fog"), several("severities", np.array([1, 3, 3]))
    (['fog'], [1, 3])
    """
    if hasattr(value, "tolist"):  # of NumPy and torch
        value = value.tolist()
    values = list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [value]
    values = [item for place, item in enumerate(values) if item not in values[:place]]
    if not values and not empty:
        raise VitfocusError(f"{name} is empty; name at least one, or leave it out.")
    return values
