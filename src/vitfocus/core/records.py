"""Reading untrusted JSON and TOML as typed records (msgspec structs).

Files may be edited by hand, truncated, or come from untrusted sources: anything wrong with one is a `VitfocusError`
that names the file and the field. A record is declared beside the code that writes it.
"""

from __future__ import annotations

import json
import re
import reprlib
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import msgspec
from msgspec import inspect

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.files import open_file, write_text

#: A whole number that counts something.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

#: The bound that refuses infinity.
FINITE = sys.float_info.max

Record = TypeVar("Record")

_INNER = "inside: "  # prefix of messages of an `OpenDict`, to which the location is added
_MAX_BYTES = 256 * 2**20
#: The largest annotation file of a data set.
MAX_ANNOTATION_BYTES = 4 * 2**30
_MAX_DIGITS = 20  # of an integer, as in an unsigned 64-bit one
_MAX_LEVELS = 64
_MAX_KEYS = 1000  # of an object that are tried to find the invalid one


class OpenDict(dict[str, Any]):
    """A dict in which some keys have a known type; other keys are kept unchanged.

    Subclasses set `fields`, a struct of the known keys. With `numbers`, all other values must be numbers, or a pair of
    numbers under NAME_interval, as in tables of metrics.

    Example:
        >>> class Named(msgspec.Struct):
        ...     layer: Count
        >>> class Row(OpenDict):
        ...     fields, numbers = Named, True
        >>> convert({"layer": 3, "entropy": 4.2}, Row)
        {'layer': 3, 'entropy': 4.2}
        >>> convert([{"layer": 3, "entropy": "high"}], list[Row])
        Traceback (most recent call last):
        vitfocus.core.errors.VitfocusError: [0].entropy is 'high'; expected a number.
    """

    fields: ClassVar[type[msgspec.Struct]]
    numbers: ClassVar[bool] = False

    @classmethod
    def checked(cls, value: Any) -> Self:
        """Validate a value; raises a `ValueError`, to which `convert` adds the location."""
        if not isinstance(value, dict):
            raise ValueError(f"{_INNER}It is {reprlib.repr(value)}; expected a table of keys and values.")
        known = cls.fields.__struct_encode_fields__
        parts: list[tuple[dict[str, Any], Any]] = [({key: value[key] for key in known if key in value}, cls.fields)]
        if cls.numbers:
            rest = {key: one for key, one in value.items() if key not in known}
            pairs = {key: one for key, one in rest.items() if key.endswith("_interval")}
            parts.append((pairs, dict[str, tuple[float, float]]))
            parts.append(({key: one for key, one in rest.items() if key not in pairs}, dict[str, float]))
        for part, kind in parts:
            try:
                msgspec.convert(part, kind, str_keys=True, dec_hook=_decode_custom)
            except msgspec.ValidationError as error:
                raise ValueError(f"{_INNER}{_user_message(str(error), part, kind)}") from None
        return cls(value)


def _decode_custom(kind: type[Any], value: Any) -> Any:
    """Convert to types that msgspec does not know."""
    if issubclass(kind, OpenDict):
        return kind.checked(value)
    raise NotImplementedError(f"no JSON is read as {kind.__name__}")


def read_json(
    path: str | Path,
    kind: type[Record],
    *,
    writer: str = "vitfocus",
    hint: str = "",
    missing: str = "",
    max_bytes: int = _MAX_BYTES,
) -> Record:
    """Read a JSON file as a record.

    Args:
        path: The file.
        kind: A struct, or any type that msgspec converts to, such as `dict[str, Any]`.
        writer: The command that writes such files, for the error message.
        hint: How to fix a wrong file; it ends the error message.
        missing: The message if there is no such file.
        max_bytes: The largest file that is read.

    Raises:
        VitfocusError: The file is missing, unreadable, not JSON, too large, too deeply nested, or not of that type.
    """
    text = read_text(path, hint=hint, missing=missing, max_bytes=max_bytes)
    return convert(parse_json(text, path, hint=hint), kind, path, writer=writer, hint=hint)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file as plain data; an invalid file raises a `VitfocusError`."""
    return parse_toml(read_text(path), path)


def read_text(path: str | Path, *, hint: str = "", missing: str = "", max_bytes: int = _MAX_BYTES) -> str:
    """Read a regular file as UTF-8 text; arguments and errors are those of `read_json`."""
    path = Path(path)
    try:
        with open_file(path) as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise VitfocusError(f"{path} is too large; expected at most {max_bytes:,} bytes.")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise VitfocusError(f"There is no {path}{missing and f': {missing}'}.") from None
    except UnicodeDecodeError:
        raise VitfocusError(f"{path} cannot be read: it is not UTF-8 text{hint and f'; {hint}'}.") from None
    except (OSError, ValueError) as error:  # ValueError: a path with NUL
        raise VitfocusError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def parse_json(text: str, source: str | Path, *, hint: str = "") -> Any:
    """Parse JSON as plain data, within limits on nesting and the length of integers.

    Args:
        text: The JSON.
        source: The file it was read from, for the error message.
        hint: How to fix the file; it ends the error message.

    Example:
        >>> parse_json('{"a": [1, 2.5]}', "a.json")
        {'a': [1, 2.5]}
        >>> parse_json("[" * 100_000, "a.json")
        Traceback (most recent call last):
        vitfocus.core.errors.VitfocusError: a.json cannot be read: it is nested more than 64 levels deep.
    """
    try:
        content = json.loads(text, parse_int=_integer)
        level = [content]
        for _ in range(_MAX_LEVELS + 1):
            inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
            level = [one for some in inner for one in some if isinstance(one, dict | list)]
            if not level:
                return content
        raise RecursionError
    except RecursionError:
        said = f"it is nested more than {_MAX_LEVELS} levels deep"
    except ValueError as error:
        said = str(error).rstrip(".")
    raise VitfocusError(f"{source} cannot be read: {said}{hint and f'; {hint}'}.")


def parse_toml(text: str, source: str | Path) -> dict[str, Any]:
    """Parse TOML as plain data, within limits on nesting and the length of integers.

    >>> parse_toml("a = [1, 2.5]", "a.toml")
    {'a': [1, 2.5]}
    >>> parse_toml("a = " + "[" * 10_000, "a.toml")
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: a.toml is not valid TOML: it is nested too deeply.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        said = "it is nested too deeply"
    except ValueError as error:  # of which tomllib's own is one; Python raises it for very long integers
        said = str(error).partition("; use sys.")[0]
    raise VitfocusError(f"{source} is not valid TOML: {said}.")


def convert(
    content: Any, kind: type[Record], source: str | Path = "", *, writer: str = "vitfocus", hint: str = ""
) -> Record:
    """Convert plain values, as read from TOML or JSON, to a record.

    Args:
        content: dicts, lists, strings and numbers.
        kind: The type of the record, usually an `msgspec.Struct`.
        source: The file they were read from, for the error message; "" for none.
        writer: The command that writes such files.
        hint: How to fix a wrong file.

    Raises:
        VitfocusError: Something does not fit; the message names the key, its value and what was expected.

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
        >>> convert([{"batch": 1}, {"batch": []}], list[Data], "rows.json", writer="vitfocus train")
        Traceback (most recent call last):
        vitfocus.core.errors.VitfocusError: rows.json was not written by vitfocus train, or was changed since: \
[1].batch is []; expected a whole number.
    """
    try:
        return msgspec.convert(content, kind, str_keys=True, dec_hook=_decode_custom)
    except msgspec.ValidationError as error:
        said = _user_message(str(error), content, kind)
    except UnicodeEncodeError as error:
        said = f"It has {error.object[error.start]!r}, which is not a character."
    if not source:
        raise VitfocusError(said)
    ending = f"; {hint}." if hint else "." if said[-1] not in ".?" else ""
    said = said.rstrip(".") if hint else said
    raise VitfocusError(f"{source} was not written by {writer}, or was changed since: {said}{ending}")


def write_json(path: str | Path, content: Any, *, indent: int | None = 2) -> None:
    """Write a record or plain data as JSON, atomically."""
    write_text(path, json_text(content, indent=indent))


def json_text(content: Any, *, indent: int | None = 2) -> str:
    """A record or plain data as the text of a JSON file."""
    return json.dumps(msgspec.to_builtins(content), indent=indent) + "\n"


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _MAX_DIGITS:
        raise ValueError(f"a whole number has {len(digits):,} digits")
    return int(digits)


def _user_message(message: str, content: Any, kind: Any) -> str:
    """A message of msgspec, such as "Expected `int` >= 1 - at `$.data.batch`", as a sentence for users."""
    said, _, where = message.partition(" - at ")
    path = re.search(r"\$([^`]*)", where)
    steps = re.findall(r"\.([^.\[\]]+)|\[(\d+)\]|\[(\.\.\.)\]", path[1]) if path else []
    keys = _find_keys(content, kind, steps)
    value, expected = _follow(content, inspect.type_info(kind), keys)
    place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")
    if said.startswith(_INNER):  # of an `OpenDict` at that place
        inner = said.removeprefix(_INNER)
        joint = "" if inner[0] == "[" or not place else "."
        return place + inner.removeprefix("It") if inner.startswith("It ") and place else f"{place}{joint}{inner}"
    if found := re.match("Object contains unknown field `(.*)`", said):
        known = [field.encode_name for field in getattr(expected, "fields", ())]
        return f"{f'[{place}] has' if place else 'There is'} no key {found[1]!r}: {nearest(found[1], known)}"
    if found := re.match("Object missing required field `(.*)`", said):
        return f"{place or 'It'} lacks the key {found[1]!r}."
    if not said.startswith(("Expected", "Invalid", "Number")):  # a record's own check
        return said
    if where.startswith("`key`"):
        return f"{place or 'It'} has a key that is not {describe(getattr(expected, 'key_type', expected))}."
    if isinstance(expected, inspect.LiteralType) and isinstance(value, str):
        return f"{place} has no value {reprlib.repr(value)}: {nearest(value, map(str, expected.values))}"
    return f"{place or 'It'} is {reprlib.repr(value)}; expected {describe(expected)}."


def _find_keys(content: Any, kind: Any, steps: list[tuple[str, str, str]]) -> list[Any]:
    """The keys that lead to the invalid value; msgspec omits keys of mappings ("[...]"), which are found by trying."""
    keys: list[Any] = []
    at = content
    for key, index, mapping in steps:
        step: Any = int(index) if index else key
        if mapping:
            step = next((one for one in list(at)[:_MAX_KEYS] if _is_invalid(content, kind, [*keys, one])), None)
            if step is None:
                break
        keys.append(step)
        at = at[step]
    return keys


def _is_invalid(content: Any, kind: Any, keys: list[Any]) -> bool:
    """Whether the content is still invalid if the mapping at the end of the path has only that key."""
    try:
        msgspec.convert(_keep_only(content, keys), kind, str_keys=True, dec_hook=_decode_custom)
    except msgspec.ValidationError:
        return True
    return False


def _keep_only(content: Any, keys: list[Any]) -> Any:
    key, *rest = keys
    if not rest:
        return {key: content[key]}
    if isinstance(content, list):
        return [_keep_only(one, rest) if place == key else one for place, one in enumerate(content)]
    return {**content, key: _keep_only(content[key], rest)}


def _follow(value: Any, kind: inspect.Type, keys: list[Any]) -> tuple[Any, inspect.Type]:
    """The value at a path and the type that it should have."""
    for key in keys:
        if isinstance(kind, inspect.UnionType):  # of which one takes objects, or lists
            kind = next((one for one in kind.types if _holds(one, value)), kind)
        if isinstance(kind, inspect.DictType):
            kind = kind.value_type
        elif isinstance(kind, inspect.TupleType):
            kind = kind.item_types[key]
        elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
            kind = kind.item_type
        else:
            fields = getattr(kind, "fields", ())
            kind = next((field.type for field in fields if field.encode_name == key), inspect.AnyType())
        value = value[key]
    return value, kind


def _holds(kind: inspect.Type, value: Any) -> bool:
    listed = isinstance(kind, inspect.ListType | inspect.TupleType | inspect.VarTupleType)
    return listed if isinstance(value, list) else isinstance(kind, inspect.DictType) or hasattr(kind, "fields")


def describe(kind: inspect.Type) -> str:
    """A type in words.

    >>> describe(inspect.type_info(tuple[float, float])), describe(inspect.IntType(ge=1))
    ('2 values, each a number', 'a whole number of at least 1')
    """
    if isinstance(kind, inspect.Metadata):
        return describe(kind.type)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        name = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        low, high = kind.ge, None if kind.le == FINITE else kind.le
        if low is not None and high is not None:
            low_text, high_text = (f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (low, high))
            return f"{name} from {low_text} to {high_text}"
        return f"{name} of at least {low:g}" if low is not None else name
    if isinstance(kind, inspect.ListType) and kind.min_length:
        most = "" if kind.max_length == kind.min_length else "at least "
        return f"a list of {most}{kind.min_length} value{'s' * (kind.min_length > 1)}"
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
        inspect.VarTupleType: "a list",
    }
    return names.get(type(kind), "a table of keys and values")
