"""Whether what a file holds has the shape it was written in: files are edited by hand, and cut off.

A shape is a plain value. `str` and `bool` stand for themselves, `float` for any number, `int` for a count (a whole
number, not below 0), `dict` and `list` for any object and any list, `object` for anything. `(A, B)` is either, `None`
is null. `[A]` is a list of A, `[A, B]` one of exactly these. `{"key": A, "other?": B}` is an object with that key and
perhaps the other; further keys may hold anything, unless `"*_end": A` speaks of those with that end, `"*": A` of all,
or `"#": A` of all, which must be counts then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vitfocus.core.errors import VitfocusError

_NAMES: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    float: "a number",
    int: "a whole number of at least 0",
    dict: "an object",
    list: "a list",
    None: "null",
}
_KINDS: dict[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    float: lambda value: isinstance(value, float) or (_whole(value) and abs(value) < 2**63),
    int: lambda value: _whole(value) and 0 <= value < 2**63,
    dict: lambda value: isinstance(value, dict),
    list: lambda value: isinstance(value, list),
    None: lambda value: value is None,
    object: lambda value: True,
}


def check_contents(path: str | Path, content: Any, shape: Any, writer: str, hint: str = "") -> None:
    """Refuse a file whose content has another shape than `writer`, a command, gives it, saying what is wrong with it.

    The sentence ends with the `hint`.

    >>> check_contents("a.json", {"top1": 71.5, "notes": []}, {"top1": float, "notes": [str]}, "vitfocus evaluate")
    >>> check_contents("a.json", {"top1": "high"}, {"top1": float}, "vitfocus evaluate")
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: a.json was not written by vitfocus evaluate, or was changed since: "top1" \
should be a number, but is "high".
    """
    wrong = next(_faults(content, shape, ""), None)
    if wrong is not None:
        raise VitfocusError(f"{path} was not written by {writer}, or was changed since: {wrong}{hint and f'; {hint}'}.")


def _faults(value: Any, shape: Any, place: str) -> Iterator[str]:
    if isinstance(shape, tuple):
        if all(any(_faults(value, one, place)) for one in shape):
            # What is nearest to right tells best what is wrong.
            same = [one for one in shape if type(one) is type(value)]
            yield from _faults(value, same[0], place) if same else [_said(value, shape, place)]
    elif isinstance(shape, dict):
        yield from _object_faults(value, shape, place) if isinstance(value, dict) else [_said(value, dict, place)]
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield _said(value, list, place)
        elif len(shape) > 1 and len(value) != len(shape):
            yield f"{_where(place)} should have {len(shape)} entries, but has {len(value)}"
        else:
            for index, one in enumerate(value):
                yield from _faults(one, shape[index if len(shape) > 1 else 0], f"{place}[{index}]")
    elif not _KINDS[shape](value):
        yield _said(value, shape, place)


def _object_faults(value: dict[str, Any], shape: dict[str, Any], place: str) -> Iterator[str]:
    named = {key.removesuffix("?"): inner for key, inner in shape.items() if key[0] not in "*#"}
    for key in shape:
        if key in named and key not in value:
            yield f'{_where(place)} lacks "{key}"'
    for key, content in value.items():
        general = (rule for rule in shape if rule[0] in "*#" and (rule == "#" or key.endswith(rule[1:])))
        rule = key if key in named else next(general, None)
        if rule == "#" and not (key.isascii() and key.isdigit()):
            yield f"{_where(place)} should be by number, but has {_shown(key)}"
        elif rule is not None:
            yield from _faults(content, named.get(key, shape.get(rule)), f"{place}.{key}" if place else key)


def _said(value: Any, shape: Any, place: str) -> str:
    kinds = shape if isinstance(shape, tuple) else (shape,)
    wanted = " or ".join(_NAMES[type(kind) if isinstance(kind, dict | list) else kind] for kind in kinds)
    return f"{_where(place)} should be {wanted}, but is {_shown(value)}"


def _where(place: str) -> str:
    return f'"{place}"' if place else "it"


def _shown(value: Any) -> str:
    """A value in a few words.

    >>> _shown({"a": 1}), _shown([]), _shown(None), _shown("x" * 50)
    ('an object', 'a list', 'null', '"xxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."')
    """
    if isinstance(value, dict | list):
        return _NAMES[type(value)]
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value) if isinstance(value, str | float) or abs(value) < 2**63 else "a whole number beyond measure"
    text = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    text = text if len(text) <= 32 else f"{text[:29]}..."
    return f'"{text}"' if isinstance(value, str) else text


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
