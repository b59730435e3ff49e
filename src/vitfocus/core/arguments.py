"""Checking arguments: plain values from Python, NumPy or torch, and options that require another option.

An option that only has an effect with another setting declares it in its annotation:

    class Augment(Struct):
        crop: Literal["resized", "pad"] = "resized"
        padding: Annotated[int, only_with("crop", "pad")] = 4
"""

from __future__ import annotations

import errno
import functools
import inspect
import math
import operator
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from vitfocus.core.errors import VitfocusError

Function = TypeVar("Function", bound=Callable[..., Any])
_TYPE_NAMES: dict[Any, str] = {
    str: "text",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    type(None): "None",
    Path: "a path",
}


def checked(function: Function) -> Function:
    """Raise a `VitfocusError` for arguments whose type differs from the annotation, and for impossible paths.

    >>> @checked
    ... def repeat(text: str, times: int = 2) -> str:
    ...     return text * times
    >>> repeat("a", times=None)
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: repeat: times is None; expected a whole number.
    """
    signature = inspect.signature(function)
    kinds: dict[str, list[Any] | None] = {}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kinds:
            kinds.update(
                {name: _declared_types(function, one.annotation) for name, one in signature.parameters.items()}
            )
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for one in value if several else (value,):
                _check_type(f"{function.__name__}: {name}", one, kinds[name])
        try:
            return function(*args, **kwargs)
        except OSError as error:
            if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
                raise
            name = reprlib.repr(error.filename)
            raise VitfocusError(f"{name} cannot be the name of a file or folder: {error.strerror}.") from None

    return typing.cast(Function, call)


def _check_type(name: str, value: Any, kinds: list[Any] | None) -> None:
    if kinds is None:
        return
    path = Path in kinds and isinstance(value, str | os.PathLike)
    if (path and not _is_path(value)) or not any(_is_a(value, kind) for kind in kinds):
        expected = " or ".join(dict.fromkeys(map(_type_name, kinds)))
        raise VitfocusError(f"{name} is {_format_value(value)}; expected {expected}.")


def _is_path(value: str | os.PathLike[str]) -> bool:
    """Whether a path can name a file: not empty, no NUL, and only characters that can be encoded."""
    try:
        return b"\0" not in (name := os.fsencode(value)) and bool(name)
    except (UnicodeEncodeError, TypeError):
        return False


def _declared_types(function: Callable[..., Any], annotation: Any) -> list[Any] | None:
    """The types in an annotation; None for `Any`, and for names that are imported for type checkers only."""
    try:
        kind = eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation
    except NameError:
        return None
    kinds = _members(kind.__bound__ if isinstance(kind, TypeVar) else kind)
    open_ended = (Any, object, inspect.Parameter.empty)
    known = all(isinstance(typing.get_origin(one) or one, type) and one not in open_ended for one in kinds)
    return kinds if known else None


def _members(kind: Any) -> list[Any]:
    """The members of a union, or the type itself."""
    if not isinstance(kind, types.UnionType) and typing.get_origin(kind) is not typing.Union:
        return [kind]
    return [type(None) if one is None else one for one in typing.get_args(kind)]


def _is_a(value: Any, kind: Any) -> bool:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Sequence, list, Iterable):
        if isinstance(value, str | bytes | Mapping):
            return False
        if hasattr(value, "tolist") and hasattr(value, "ndim"):  # of NumPy and torch
            return value.ndim == 1 and str(getattr(value, "layout", "torch.strided")) == "torch.strided"
        if not isinstance(value, Sequence):
            return origin is Iterable and isinstance(value, Iterable)
        return all(any(_is_a(one, member) for member in _members(inner[0])) for one in value)
    if origin is not None:
        return isinstance(value, origin)
    if kind is Any:
        return True
    if kind is int:
        return not isinstance(value, bool) and hasattr(value, "__index__") and _is_number(operator.index, value)
    if kind is float:
        return not isinstance(value, bool | str | bytes) and _is_number(float, value)
    return isinstance(value, os.PathLike) if issubclass(kind, os.PathLike) else isinstance(value, kind)


def _is_number(read: Callable[[Any], Any], value: Any) -> bool:
    try:
        read(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several numbers
        return False
    return True


def _type_name(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Sequence, list, Iterable):
        return f"a list of {' or '.join(map(_type_name, _members(inner[0])))}"
    if origin is not None:
        return "a mapping" if issubclass(origin, Mapping) else f"a {origin.__qualname__}"
    return _TYPE_NAMES.get(kind) or f"a {kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def _format_value(value: Any) -> str:
    """A value in a message; tensors and arrays by their type."""
    if value is None or isinstance(value, str | bytes | bool | int | float | list | tuple | dict):
        return reprlib.repr(value)
    return f"of type {type(value).__name__}"


def check_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Convert an integer of any library to int, and check that it is between `low` and `high`.

    >>> import numpy as np
    >>> check_int("limit", np.int64(3), low=1)
    3
    >>> check_int("limit", 2.5, low=1)
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


def parse_digits(text: str) -> int | None:
    """Parse at most 18 plain digits; None for anything else, such as "²", "-1" and "1_0".

    >>> parse_digits("0042"), parse_digits("²"), parse_digits("9" * 5000)
    (42, None, None)
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def check_number(name: str, value: Any, expected: str) -> float:
    """Convert a finite, non-negative number to float; `expected` ends the error message.

    >>> check_number("eps", "a", "distances in 1/255, such as 4")
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


def require_values(name: str, tensor: Any, pixels: bool = False) -> None:
    """Refuse a tensor without readable values: on the meta device, sparse, nested or quantised.

    Eight-bit floats are refused too, because torch cannot compute with them.

    >>> import torch
    >>> require_values("images", torch.zeros(2, device="meta"))
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: images is a meta tensor; expected a dense tensor with values.
    """
    kind = str(tensor.layout).removeprefix("torch.").lstrip("_")
    found = "meta" if tensor.is_meta else "quantised" if tensor.is_quantized else "" if kind == "strided" else kind
    found = "nested" if tensor.is_nested else found
    if pixels and tensor.is_floating_point() and tensor.element_size() == 1:
        found = str(tensor.dtype).removeprefix("torch.")
    if found:
        raise VitfocusError(f"{name} is a {found} tensor; expected a dense tensor with values.")


def as_list(name: str, value: Any, empty: bool = False) -> list[Any]:
    """Convert one value or several to a list without duplicates; an empty list is an error unless `empty` is set.

    >>> import numpy as np
    >>> as_list("corruptions", "fog"), as_list("severities", np.array([1, 3, 3]))
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
        condition: Called with the record that has the option (a recipe, a treatment, parsed arguments).
        otherwise: The message after the option's name if the condition is False; it ends with what to set instead.
        zero_counts: Whether 0, False and "" are refused as well; usually they just turn the option off.
    """

    condition: Callable[[Any], bool]
    otherwise: str
    zero_counts: bool = False

    def refusal(self, name: str, record: Any) -> str:
        """Why the option has no effect in this record, in one sentence; "" if it has an effect.

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
    return OnlyWith(lambda record: read(record) in values, f"only has an effect with {choices}: set that", zero_counts)


def conditions(record: Any) -> dict[str, OnlyWith]:
    """The conditions in the annotations of a class or function, by name."""
    hints = get_type_hints(record, include_extras=True)
    found = ((name, extra) for name, hint in hints.items() for extra in getattr(hint, "__metadata__", ()))
    return {name: extra for name, extra in found if isinstance(extra, OnlyWith)}


def refuse_unused(given: Iterable[str], declared: Mapping[str, OnlyWith], record: Any) -> None:
    """Raise `VitfocusError` for the first of the `given` options whose condition is not met."""
    for name in given:
        if name in declared and (why := declared[name].refusal(name, record)):
            raise VitfocusError(why)
