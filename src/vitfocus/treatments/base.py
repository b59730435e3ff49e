"""The base class of treatments: frozen dataclasses without logic that say what to insert and where.

`Treatment` gives every record its spec, its checks and its place in the registry. What other packages show of a
treatment (its keywords, the columns of `vitfocus models`, its badge in reports, the operations it adds) are attributes
of the class. The function that inserts it is declared with `surgery.handles`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vitfocus.anatomy import Block
from vitfocus.core.errors import VitfocusError, nearest

#: Every treatment by its keyword. A class registers itself when it is defined.
TREATMENTS: dict[str, type[Treatment]] = {}

Layers = str | Sequence[int]


def option(default: Any, *choices: Any) -> Any:
    """A dataclass field whose value must be one of the choices, if there are any.

    An option that has an effect only with some values of another one is annotated with `core.only_with`.
    """
    return dataclasses.field(default=default, metadata={"choices": choices} if choices else {})


def number_option(default: Any, least: int | float, most: float = math.inf) -> Any:
    """A dataclass field for a number from `least` to `most`, an integer if `least` is; None if that is the default."""
    return dataclasses.field(default=default, metadata={"least": least, "most": most})


def layers_option(*names: str) -> Any:
    """A dataclass field that selects blocks: "all", "inner", one of the names, or what `choose_blocks` also takes."""
    return dataclasses.field(default="all", metadata={"layers": ("all", "inner", *names)})


@dataclasses.dataclass(frozen=True)
class Treatment:
    """Base class of treatments. `str()` returns the spec that recipes and the command line read.

    Attributes:
        name: Keyword in specs. A class without one is a base class for others and is not registered.
        aliases: Further keywords, each with the options it stands for: `{"cbs": {"variant": "scaled"}}`.
        label: Short name on the badge in reports; by default the keyword.
        colour: Number of the badge's colour in reports, 0 to 6; by default 6, grey.
        about: What the treatment does, in one phrase for reports; by default the docstring's first sentence.
        columns: Columns of `vitfocus models`, each a heading and the spec to try; by default the keyword.
        structural: Whether it replaces parts of blocks, so that it must be inserted before all others.
        training_free: Whether it is meant for trained weights without further training, so that no warning is needed.
    """

    name: ClassVar[str]
    aliases: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    label: ClassVar[str]
    colour: ClassVar[int] = 6
    about: ClassVar[str]
    columns: ClassVar[Mapping[str, str]]
    structural: ClassVar[bool] = False
    training_free: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        attributes = vars(cls)
        if "name" not in attributes:
            return
        known = TREATMENTS.get(cls.name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise VitfocusError(f"There is a treatment {cls.name!r} already, {known.__qualname__}: use another name.")
        cls.label = attributes.get("label", cls.name)
        summary = (cls.__doc__ or cls.name).strip().splitlines()[0].partition(". ")[0].rstrip(".")
        cls.about = attributes.get("about", summary)
        cls.columns = attributes.get("columns", {cls.name: cls.name})
        TREATMENTS[cls.name] = cls

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            choices = field.metadata.get("choices")
            if choices and not (isinstance(value, str) and value in choices):
                hint = nearest(str(value), map(str, choices))
                raise VitfocusError(f"{self.name} has no {field.name}={value}: {hint}")
            least = field.metadata.get("least")
            if least is not None and not (value is field.default is None or _is_number(value, least)):
                raise VitfocusError(f"{self.name} needs {field.name} of at least {least:g}, not {value!r}.")
            if (most := field.metadata.get("most", math.inf)) < math.inf and value > most:
                raise VitfocusError(f"{self.name} needs {field.name} of at most {most:,}, not {value!r}.")
            if "layers" in field.metadata:
                object.__setattr__(self, field.name, _check_layers(self.name, value, field.metadata["layers"]))
        self.check()

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def check(self) -> None:
        """Further conditions on the options; raises `VitfocusError`."""

    def preserving(self) -> Treatment | None:
        """The form of this treatment that leaves the outputs of trained weights unchanged; None if there is none.

        It is the treatment itself if inserting it changes nothing.
        """
        return None

    @property
    def preserves_function(self) -> bool:
        """Whether inserting the treatment leaves the outputs of a model unchanged."""
        return self.preserving() == self

    @property
    def operations_per_element(self) -> int:
        """Elementwise operations per output element of an inserted module; `count_cost` adds them to the FLOPs.

        Matrix products and convolutions are counted automatically.
        """
        return 0

    def __str__(self) -> str:
        keyword, given = self.name, self.given
        for alias, preset in self.aliases.items():
            if preset.items() <= given.items():
                keyword, given = alias, {key: value for key, value in given.items() if key not in preset}
                break
        shown = ",".join(f"{key}={_show(value)}" for key, value in given.items())
        return f"{keyword}({shown})" if shown else keyword


def all_treatments() -> list[type[Treatment]]:
    """The classes of all treatments, in the order in which tables and reports show them."""
    return sorted(TREATMENTS.values(), key=lambda kind: (kind.colour, kind.name))


def keywords() -> dict[str, tuple[type[Treatment], Mapping[str, Any]]]:
    """Every keyword and alias of a treatment in specs, with its class and the options that the alias stands for."""
    names: dict[str, tuple[type[Treatment], Mapping[str, Any]]] = {kind.name: (kind, {}) for kind in all_treatments()}
    return names | {alias: (kind, preset) for kind in all_treatments() for alias, preset in kind.aliases.items()}


def choose_blocks(layers: Layers, blocks: Sequence[Block]) -> list[Block]:
    """The blocks that a `layers` option selects out of those that can be treated, counted through all stages.

    "upper" is the upper half of the depth and "upper:K" the last K; "shallow" is the first 30 % and "deep" the rest.
    "inner" leaves out the blocks that feed a pyramid, as Context Broadcasting's authors do in a detector. A list has
    block numbers. Sets joined by "&" select the blocks that are in all of them.
    """
    if not isinstance(layers, str):
        return _listed(layers, blocks)
    sets = [_listed(_indices(part), blocks) if part[0] == "[" else _named(part, blocks) for part in layers.split("&")]
    chosen = [block for block in blocks if all(block in one for one in sets)]
    if not chosen:
        raise VitfocusError(f"layers={layers} selects none of the {len(blocks)} blocks that can be treated here.")
    return chosen


def _named(name: str, blocks: Sequence[Block]) -> list[Block]:
    count = len(blocks)
    if name == "inner":
        inner = [block for block in blocks if not block.feeds_pyramid]
        if len(inner) in (0, count):
            which = "every block that can be treated feeds" if not inner else "no block feeds"
            raise VitfocusError(
                f"layers=inner leaves out the blocks that feed a pyramid, and here {which} one: use all or a list."
            )
        return inner
    head, _, number = name.partition(":")
    shallow = max(1, round(0.3 * count))
    start, stop = {
        "all": (0, count),
        "upper": (count - int(number) if number else count // 2, count),
        "shallow": (0, shallow),
        "deep": (shallow, count),
    }[head]
    if start < 0:
        raise VitfocusError(f"layers={name} asks for more blocks than the {count} that can be treated here.")
    return list(blocks[start:stop])


def _listed(indices: Sequence[int], blocks: Sequence[Block]) -> list[Block]:
    by_depth = {block.depth: block for block in blocks}
    total = blocks[-1].depth + 1
    wanted = [index + total if index < 0 else index for index in indices]
    if missing := [index for index in wanted if index not in by_depth]:
        raise VitfocusError(
            f"There is no treatable block {missing[0]}: this model has {sorted(by_depth)[0]} to {total - 1}."
        )
    if twice := [index for index in wanted if wanted.count(index) > 1]:
        raise VitfocusError(f"layers={_show(tuple(indices))} lists block {twice[0]} twice: list each block once.")
    return [by_depth[index] for index in sorted(wanted)]


_SET = re.compile(r"(?P<name>[a-z_]+)(:(?P<number>(?=0*[1-9])\d{1,9}))?|(?P<list>\[-?\d{1,9}(,-?\d{1,9})*\])", re.ASCII)


def _check_layers(treatment: str, value: Any, names: tuple[str, ...]) -> str | tuple[int, ...]:
    if isinstance(value, str):
        sets = value.replace(" ", "").split("&")
        for one in sets:
            found = _SET.fullmatch(one)
            allowed = ("upper",) if found is not None and found["number"] else names
            if found is None or not (found["list"] or found["name"] in allowed):
                hint = nearest(one, names)
                raise VitfocusError(
                    f"{treatment} has no layers={one}: {hint} A list of block numbers such as [0,5] also works, and so "
                    "do several of these joined by &."
                )
        return _indices(sets[0]) if len(sets) == 1 and sets[0][0] == "[" else "&".join(sets)
    if isinstance(value, Sequence) and value and all(isinstance(index, int) for index in value):
        return tuple(value)
    raise VitfocusError(
        f"{treatment} takes layers as one of {', '.join(names)} or a list of block numbers, not {value!r}."
    )


def _indices(text: str) -> tuple[int, ...]:
    return tuple(map(int, text[1:-1].split(",")))


def _is_number(value: Any, least: int | float) -> bool:
    kinds = (int,) if isinstance(least, int) else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and least <= value < math.inf


def _show(value: Any) -> str:
    return "[" + ",".join(map(_show, value)) + "]" if isinstance(value, tuple) else str(value)
