"""What a treatment is: a frozen record without logic, and a function that carries it out.

`Treatment` gives every record its short spec, its checks and its equality; `handles` ties a record's class to the
function that inserts it; `layers` options are resolved here, for all treatments alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vitfocus.anatomy import Anatomy, Block
from vitfocus.core.errors import VitfocusError, nearest

if TYPE_CHECKING:
    from vitfocus.treatments.surgery import Surgeon

TREATMENTS: dict[str, type[Treatment]] = {}
_HANDLERS: dict[type[Treatment], Callable[[Any, Anatomy, Surgeon], None]] = {}

Layers = str | Sequence[int]


def option(default: Any, *choices: Any, only: Mapping[str, Sequence[Any]] | None = None) -> Any:
    """A dataclass field whose value must be one of the choices, where there are some.

    `only` names other options and the values of theirs beside which this one means something.
    """
    metadata: dict[str, Any] = {"choices": choices} if choices else {}
    return dataclasses.field(default=default, metadata=metadata | ({"only": only} if only else {}))


def layers_option(*names: str) -> Any:
    """A dataclass field that selects blocks: "all", "inner", one of the names ("upper:K" for "upper"), or indices."""
    return dataclasses.field(default="all", metadata={"layers": ("all", "inner", *names)})


@dataclasses.dataclass(frozen=True)
class Treatment:
    """The base of every treatment's record. `str()` gives the short spec that recipes and the command line read."""

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        TREATMENTS[cls.name] = cls

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            choices = field.metadata.get("choices")
            if choices and value not in choices:
                hint = nearest(str(value), map(str, choices))
                raise VitfocusError(f"{self.name} has no {field.name}={value}: {hint}")
            if "layers" in field.metadata:
                object.__setattr__(self, field.name, _check_layers(self.name, value, field.metadata["layers"]))
        self.check()

    def check(self) -> None:
        """Further conditions on the options; raises `VitfocusError`."""

    def preserving(self) -> Treatment | None:
        """The form of this treatment that trained weights can take without computing anything else, if there is one.

        That is the treatment itself where inserting it changes nothing.
        """
        return None

    @property
    def preserves_function(self) -> bool:
        """Whether a model computes the same with the treatment just inserted as without."""
        return self.preserving() == self

    def __str__(self) -> str:
        shown = [
            f"{field.name}={_show(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.name}({','.join(shown)})" if shown else self.name


def handles(config: type[Treatment]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the function `(config, anatomy, surgeon)` that inserts a treatment."""

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        _HANDLERS[config] = function
        return function

    return declare


def insert(config: Treatment, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Carry out a treatment."""
    refuse_unused(config)
    _HANDLERS[type(config)](config, anatomy, surgeon)


def refuse_unused(config: Treatment) -> None:
    """Refuse an option that means nothing beside the others; its default is not told from its absence."""
    for field in dataclasses.fields(config):
        if getattr(config, field.name) == field.default:
            continue
        for other, values in field.metadata.get("only", {}).items():
            if (given := getattr(config, other)) not in values:
                instead = " or ".join(f"{other}={value}" for value in values)
                raise VitfocusError(
                    f"{config} says {field.name}, which {other}={given} does not use: leave {field.name} out, or take "
                    f"{instead}."
                )


def choose_blocks(layers: Layers, blocks: Sequence[Block]) -> list[Block]:
    """The blocks that a `layers` option means, out of those that can be treated, counted through all stages.

    "upper" is the upper half of the depth and "upper:K" the last K; "shallow" the first 30 %, "deep" the rest. "inner"
    leaves out the blocks that feed a pyramid, as Context Broadcasting's authors do in a detector.
    """
    count = len(blocks)
    if layers == "inner":
        inner = [block for block in blocks if not block.feeds_pyramid]
        if len(inner) in (0, count):
            which = "every block that can be treated feeds" if not inner else "no block feeds"
            raise VitfocusError(
                f"layers=inner leaves out the blocks that feed a pyramid, and here {which} one: use all or a list."
            )
        return inner
    if not isinstance(layers, str):
        by_depth = {block.depth: block for block in blocks}
        total = blocks[-1].depth + 1
        wanted = [index + total if index < 0 else index for index in layers]
        if missing := [index for index in wanted if index not in by_depth]:
            raise VitfocusError(
                f"There is no treatable block {missing[0]}: this model has {sorted(by_depth)[0]} to {total - 1}."
            )
        return [by_depth[index] for index in sorted(set(wanted))]
    head, _, number = layers.partition(":")
    shallow = max(1, round(0.3 * count))
    start, stop = {
        "all": (0, count),
        "upper": (count - int(number) if number else count // 2, count),
        "shallow": (0, shallow),
        "deep": (shallow, count),
    }[head]
    if start < 0:
        raise VitfocusError(f"layers={layers} asks for more blocks than the {count} that can be treated here.")
    return list(blocks[start:stop])


def _check_layers(treatment: str, value: Any, names: tuple[str, ...]) -> str | tuple[int, ...]:
    if isinstance(value, str):
        head, colon, number = value.partition(":")
        if head in names and (
            not colon or (head == "upper" and number.isascii() and number.isdigit() and int(number) > 0)
        ):
            return value
        hint = nearest(value, names)
        raise VitfocusError(
            f"{treatment} has no layers={value}: {hint} A list of block numbers such as [0,5] also works."
        )
    if isinstance(value, Sequence) and value and all(isinstance(index, int) for index in value):
        return tuple(value)
    raise VitfocusError(
        f"{treatment} takes layers as one of {', '.join(names)} or a list of block numbers, not {value!r}."
    )


def _show(value: Any) -> str:
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)
