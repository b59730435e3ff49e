"""Reading JSON that anyone may have written, as typed records (msgspec structs).

Files are edited by hand, cut off, or come from strangers: whatever is wrong with one becomes a `VitfocusError` that
names the file and the field. A record is declared beside the code that writes it.
"""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text

#: A whole number that counts something.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

T = TypeVar("T")

_MOST_BYTES = 256 * 2**20
_MOST_DIGITS = 20  # of an integer: those of an unsigned one of 64 bits
_MOST_LEVELS = 64
_MOST_KEYS = 1000  # of an object in which the wrong key is searched for
_NAMES = {
    "str": "text",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "an object",
    "array": "a list",
    "null": "null",
}


def read_json(
    path: str | Path,
    kind: type[T],
    *,
    writer: str = "vitfocus",
    hint: str = "",
    missing: str = "",
    most_bytes: int = _MOST_BYTES,
) -> T:
    """Read a JSON file as a record.

    Args:
        path: The file.
        kind: A struct, or any type that msgspec converts to, such as `dict[str, Any]`.
        writer: The command that writes such files, for the error message.
        hint: What to do about a wrong file, which ends the error message.
        missing: What is said where there is no such file.
        most_bytes: The largest file that is read.

    Raises:
        VitfocusError: The file is missing, unreadable, not JSON, too large, too deeply nested, or not of that type.
    """
    path = Path(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise VitfocusError(f"{path} is not a file.")
        if found.st_size > most_bytes:
            raise VitfocusError(f"{path} has {found.st_size:,} bytes; expected at most {most_bytes:,}.")
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise VitfocusError(f"There is no {path}{missing and f': {missing}'}.") from None
    except UnicodeDecodeError:
        raise VitfocusError(f"{path} cannot be read: it is not UTF-8 text{hint and f'; {hint}'}.") from None
    except OSError as error:
        raise VitfocusError(f"{path} cannot be read: {error.strerror or error}.") from None
    return convert(parse_json(text, path, hint=hint), kind, path, writer=writer, hint=hint)


def parse_json(text: str, source: str | Path, *, hint: str = "") -> Any:
    """Parse JSON as plain data, within limits on nesting and the length of integers.

    Args:
        text: The JSON.
        source: What it was read from, for the error message.
        hint: What to do about it, which ends the error message.

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
        for _ in range(_MOST_LEVELS + 1):
            inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
            level = [one for some in inner for one in some if isinstance(one, dict | list)]
            if not level:
                return content
        raise RecursionError
    except RecursionError:
        said = f"it is nested more than {_MOST_LEVELS} levels deep"
    except ValueError as error:
        said = str(error).rstrip(".")
    raise VitfocusError(f"{source} cannot be read: {said}{hint and f'; {hint}'}.")


def convert(content: Any, kind: type[T], source: str | Path, *, writer: str = "vitfocus", hint: str = "") -> T:
    """Plain data as a record; data of another type is refused with the field that is wrong.

    Example:
        >>> class Row(msgspec.Struct):
        ...     step: Count
        ...     loss: float = 0.0
        >>> convert({"step": 3, "loss": 2, "more": []}, Row, "rows.json")
        Row(step=3, loss=2.0)
        >>> convert([{"step": 1}, {"step": "two"}], list[Row], "rows.json", writer="vitfocus train")
        Traceback (most recent call last):
        vitfocus.core.errors.VitfocusError: rows.json was not written by vitfocus train, or was changed since: \
"[1].step" should be a whole number, but is "two".
    """
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        said = _fault(content, kind, str(error))
    raise VitfocusError(f"{source} was not written by {writer}, or was changed since: {said}{hint and f'; {hint}'}.")


def write_json(path: str | Path, content: Any, *, indent: int | None = 2) -> None:
    """Write a record or plain data as JSON, atomically."""
    write_text(path, json.dumps(msgspec.to_builtins(content), indent=indent) + "\n")


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _MOST_DIGITS:
        raise ValueError(f"a whole number has {len(digits):,} digits")
    return int(digits)


def _fault(content: Any, kind: Any, said: str) -> str:
    """What is wrong, from msgspec's message: "Expected `int`, got `str` - at `$.rows[...].step`"."""
    what, _, where = said.partition(" - at ")
    path = re.search(r"\$([^`]*)", where)
    keys = _located(content, kind, re.findall(r"\.([^.\[\]]+)|\[(\d+)\]|\[(\.\.\.)\]", path[1]) if path else [])
    place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")
    named = f'"{place}"' if place else "it"
    if lacking := re.search(r"missing required field `(.*)`", what):
        return f'{named} lacks "{lacking[1]}"'
    if sized := re.search(r"of length (\d+), got (\d+)", what):
        return f"{named} should have {sized[1]} entries, but has {sized[2]}"
    for key in keys:
        content = None if key == "..." else content[key]
    expected = re.search(r"Expected `([^`]*)`(?: >= (\d+))?", what)
    if where.startswith("`key`"):
        return f"{named} has a key that should be {_NAMES.get(expected[1] if expected else '', 'another')}"
    if expected is None:
        return f"{named}: {what[:1].lower()}{what[1:]}"
    wanted = " or ".join(_NAMES.get(one, one) for one in expected[1].split(" | "))
    least = f" of at least {expected[2]}" if expected[2] else ""
    return f"{named} should be {wanted}{least}, but is {_shown(content)}"


def _located(content: Any, kind: Any, steps: list[tuple[str, str, str]]) -> list[Any]:
    """The keys that lead to the fault; msgspec leaves out those of mappings ("[...]"), which are found by trying."""
    keys: list[Any] = []
    at = content
    for key, index, any_key in steps:
        step: Any = int(index) if index else key
        if any_key:
            step = next((one for one in list(at)[:_MOST_KEYS] if _wrong(content, kind, [*keys, one])), "...")
        keys.append(step)
        if step == "...":
            break
        at = at[step]
    return keys


def _wrong(content: Any, kind: Any, keys: list[Any]) -> bool:
    """Whether the content is still wrong if the mapping on the way keeps this key alone."""
    try:
        msgspec.convert(_narrowed(content, keys), kind, str_keys=True)
    except msgspec.ValidationError:
        return True
    return False


def _narrowed(content: Any, keys: list[Any]) -> Any:
    key, *rest = keys
    if not rest:
        return {key: content[key]}
    if isinstance(content, list):
        return [_narrowed(one, rest) if place == key else one for place, one in enumerate(content)]
    return {**content, key: _narrowed(content[key], rest)}


def _shown(value: Any) -> str:
    """A value in a few words.

    >>> _shown({"a": 1}), _shown([]), _shown(None), _shown("x" * 50)
    ('an object', 'a list', 'null', '"xxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."')
    """
    if isinstance(value, dict | list):
        return _NAMES["object" if isinstance(value, dict) else "array"]
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = str(value)
    text = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    text = text if len(text) <= 32 else f"{text[:29]}..."
    return f'"{text}"' if isinstance(value, str) else text
