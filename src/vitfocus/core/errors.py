"""Errors and warnings for users: one sentence with what was given, what was expected, and the nearest valid choice."""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable

_LONGEST = 2000  # characters of a message
#: Control characters but tab and newline, marks that reverse the direction of text, and halves of characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Text in which control characters are escaped: names in files may hold commands to the terminal.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class VitfocusError(ValueError):
    """An error that the user can fix, such as an invalid argument; the message is one sentence that says how.

    Example:
        >>> raise VitfocusError("No such corruption.")
        Traceback (most recent call last):
        vitfocus.core.errors.VitfocusError: No such corruption.
    """

    def __init__(self, message: str) -> None:
        line = printable(message.strip().replace("\n", " "))  # quoted values may be long and contain anything
        super().__init__(line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 4 :]}")


class VitfocusWarning(UserWarning):
    """A warning in one sentence that says what to do about it.

    Example:
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", VitfocusWarning)  # treat them as errors, in your own tests for example
    """


def warn(sentence: str) -> None:
    """Issue a VitfocusWarning that points to the caller's line outside vitfocus."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "vitfocus":
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(sentence), VitfocusWarning, stacklevel=level)


def nearest(given: str, choices: Iterable[str], prefix: str = "") -> str:
    """End a sentence with the closest valid choice, or with all of them if none is close.

    A `prefix` that all choices share does not count towards closeness.

    >>> nearest("gausian_noise", ["gaussian_noise", "shot_noise"])
    "did you mean 'gaussian_noise'?"
    >>> nearest("zebra", ["cb", "tap"])
    'expected one of: cb, tap.'
    >>> nearest("--bogus", ["--out"], prefix="--")
    'expected one of: --out.'
    """
    known = sorted(choices)
    bare = [name.removeprefix(prefix) for name in known]
    close = difflib.get_close_matches(given.removeprefix(prefix), bare, n=1, cutoff=0.55)
    if close:
        return f"did you mean {prefix + close[0]!r}?"
    return f"expected one of: {', '.join(known)}." if len(known) <= 40 else f"none of the {len(known)} names is close."


def reason(error: Exception) -> str:
    """The message of a library's error on one line, with the error's type if the message is a single word.

    >>> reason(ZeroDivisionError("integer division by zero")), reason(KeyError(101))
    ('integer division by zero', 'KeyError, 101')
    """
    said = str(error).strip().partition("\n")[0].rstrip(".")
    return said if " " in said else ", ".join(filter(None, (type(error).__name__, said)))
