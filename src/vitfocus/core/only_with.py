"""Options that have an effect only beside another choice: the condition stands in the option's own annotation.

    class Augment(Struct):
        crop: Literal["resized", "pad"] = "resized"
        padding: Annotated[int, only_with("crop", "pad")] = 4

Recipes, treatments, suites and commands all declare their conditions so, and refuse an option that would be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, get_type_hints

from vitfocus.core.errors import VitfocusError


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
