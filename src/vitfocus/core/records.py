"""Typed records from what a file holds: msgspec checks the types and bounds, and a misfit becomes one sentence."""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from vitfocus.core.errors import VitfocusError, nearest

Record = TypeVar("Record")

#: The bound that refuses infinity.
FINITE = sys.float_info.max


def convert(content: Any, kind: type[Record]) -> Record:
    """Turn plain values, as TOML or JSON hold them, into a record.

    Args:
        content: dicts, lists, strings and numbers.
        kind: the type of the record, as a rule an `msgspec.Struct`.

    Returns:
        The record.

    Raises:
        VitfocusError: naming the key, its value and what was expected, where something does not fit.

    Example:
        >>> class Data(msgspec.Struct, forbid_unknown_fields=True):
        ...     batch: int = 1
        >>> convert({"batch": 2}, Data)
        Data(batch=2)
        >>> convert({"batch": "many"}, Data)
        Traceback (most recent call last):
        vitfocus.core.errors.VitfocusError: batch is 'many'; expected a whole number.
        >>> convert({"bach": 2}, Data)
        Traceback (most recent call last):
        vitfocus.core.errors.VitfocusError: There is no key 'bach': did you mean 'batch'?
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise VitfocusError(_sentence(str(error), content, inspect.type_info(kind))) from None


def _sentence(message: str, content: Any, kind: inspect.Type) -> str:
    """What msgspec said, for a person: "Expected `int` >= 1 - at `$.data.batch`"."""
    said, _, where = message.partition(" - at `$")
    steps = re.findall(r"^[^`\[]*", where)[0].strip(".").split(".") if where else []
    value, expected = _follow(content, kind, steps)
    path = ".".join(steps)
    if found := re.match("Object contains unknown field `(.*)`", said):
        known = [field.encode_name for field in getattr(expected, "fields", ())]
        there = f"[{path}] has" if path else "There is"
        return f"{there} no key {found[1]!r}: {nearest(found[1], known)}"
    if found := re.match("Object missing required field `(.*)`", said):
        return f"{path or 'It'} lacks the key {found[1]!r}."
    if not said.startswith(("Expected", "Invalid")):  # a record's own check
        return said
    if isinstance(expected, inspect.LiteralType) and isinstance(value, str):
        return f"{path} has no value {reprlib.repr(value)}: {nearest(value, map(str, expected.values))}"
    return f"{path or 'It'} is {reprlib.repr(value)}; expected {describe(expected)}."


def _follow(value: Any, kind: inspect.Type, steps: Sequence[str]) -> tuple[Any, inspect.Type]:
    """The value at a path and the type that it should have."""
    for step in filter(None, steps):
        fields = getattr(kind, "fields", ())
        kind = next((field.type for field in fields if field.encode_name == step), inspect.AnyType())
        value = value.get(step) if isinstance(value, dict) else value
    return value, kind


def describe(kind: inspect.Type) -> str:
    """A type in words.

    >>> describe(inspect.type_info(tuple[float, float])), describe(inspect.IntType(ge=1))
    ('2 values, each a number', 'a whole number of at least 1')
    """
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        name = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        low, high = kind.ge, None if kind.le == FINITE else kind.le
        if low is not None and high is not None:
            return f"{name} from {low:g} to {high:g}"
        return f"{name} of at least {low:g}" if low is not None else name
    if isinstance(kind, inspect.TupleType):
        return f"{len(kind.item_types)} values, each {describe(kind.item_types[0])}"
    if isinstance(kind, inspect.UnionType):
        return " or ".join(map(describe, kind.types))
    if isinstance(kind, inspect.LiteralType):
        return f"one of: {', '.join(map(str, kind.values))}"
    names: dict[type, str] = {
        inspect.BoolType: "true or false",
        inspect.StrType: "text",
        inspect.NoneType: "null",
        inspect.ListType: "a list",
    }
    return names.get(type(kind), "a table of keys and values")
