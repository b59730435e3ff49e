"""Checking arguments: plain values from Python, NumPy or torch, and options that need another option.

An option that has an effect only beside another choice says so in its own annotation:

    class Augment(Struct):
        crop: Literal["resized", "pad"] = "resized"
        padding: Annotated[int, only_with("crop", "pad")] = 4
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, get_type_hints

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


@dataclass(frozen=True)
class OnlyWith:
    """When an option has an effect.

    Args:
        condition: called with the record that holds the option (a recipe, a treatment, parsed arguments).
        otherwise: what to say after the option's name where the condition is False, ending with what to set instead.
        zero_counts: whether 0, False and "" are refused as well; as a rule they turn an option off, which is harmless.
    """

    condition: Callable[[Any], bool]
    otherwise: str
    zero_counts: bool = False

    def refusal(self, name: str, record: Any) -> str:
        """One sentence on why the option has no effect in this record, or "" where it has one.

        >>> OnlyWith(lambda record: False, "is for images that are cropped: set crop=pad").refusal("padding", None)
        'padding is for images that are cropped: set crop=pad, or leave padding out.'
        """
        return "" if self.condition(record) else f"{name} {self.otherwise}, or leave {name} out."


def only_with(option: str, *values: Any, zero_counts: bool = False) -> OnlyWith:
    """The usual condition: another option (a dotted path from the record) has one of these values.

    >>> from types import SimpleNamespace
    >>> only_with("crop", "pad").refusal("padding", SimpleNamespace(crop="resized"))
    'padding only has an effect with crop=pad: set that, or leave padding out.'
    """
    choices = " or ".join(f"{option}={value}" for value in values)
    read = attrgetter(option)
    return OnlyWith(
        lambda record: read(record) in values, f"only has an effect with {choices}: set that", zero_counts=zero_counts
    )


def conditions(record: Any) -> dict[str, OnlyWith]:
    """The conditions in the annotations of a class or function, by name."""
    hints = get_type_hints(record, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: note for name, some in notes.items() for note in some if isinstance(note, OnlyWith)}


def refuse_unused(given: Iterable[str], declared: Mapping[str, OnlyWith], record: Any) -> None:
    """Raise `VitfocusError` for the first of the `given` options whose condition is not met."""
    for name in given:
        if name in declared and (why := declared[name].refusal(name, record)):
            raise VitfocusError(why)
