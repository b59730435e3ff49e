"""The papers' tables and figures as data: one TOML an item, checked key by key.

An item has a title, the paper's data, rows and what is measured of each. A row names a model (`models.toml` says what
stands for it at each scale), a treatment, and the numbers the paper prints.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from vitfocus.core.errors import VitfocusError, nearest

#: What each scale is, in words.
SCALES = {
    "smoke": "tiny models on the embedded Shapes, on a CPU, about a minute a row",
    "cifar100": "models of the papers' kind on CIFAR-100 at 32 pixels, on a GPU",
    "imagenet": "the papers' own models, recipes and data sets",
}
PAPERS = {
    "cb": "Scratching Visual Transformer's Back with Uniform Attention (Hyeon-Woo et al., ICCV 2023)",
    "tap": "Robustifying Token Attention for Vision Transformers (Guo et al., ICCV 2023)",
}

#: A number of a paper as printed: alone, with its interval, or a word.
Printed = float | int | str | tuple[float, float]


@dataclass(frozen=True)
class Row:
    """One line of a table, or one curve of a figure."""

    label: str
    model: str = ""  # a name in models.toml
    treat: str = ""  # a spec such as "cb(layers=upper)"
    start_treat: str = ""  # the treatment of the model it starts from, where that is another
    recipe: str = ""  # at ImageNet scale, in place of the model's own
    set: tuple[str, ...] = ()  # further changes to the recipe, at every scale
    at: Mapping[str, float] = field(default_factory=dict)  # where a figure draws the row: {heads = 3}
    paper: Mapping[str, Printed] = field(default_factory=dict)
    unmet: Mapping[str, str] = field(default_factory=dict)  # counts of the paper that cannot be met, and why
    quoted: str = ""  # why the row is only quoted: nothing here builds it
    computed: str = ""  # a computation without model and data


@dataclass(frozen=True)
class Item:
    """A table or a figure."""

    name: str  # "cb/table4a"
    title: str
    data: str = ""  # the paper's
    measures: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    count_on: str = ""  # the model whose FLOPs the paper counts, where it is not the row's
    parts: tuple[str, ...] = ()  # items that this one is made of
    rows: tuple[Row, ...] = ()

    @property
    def paper(self) -> str:
        """Where it stands: "CB, Table S5"."""
        paper, _, place = self.name.partition("/")
        kind, number = re.fullmatch(r"([a-z]+)(.+)", place).groups()  # type: ignore[union-attr]
        return f"{ {'cb': 'CB', 'tap': 'TAP & ADL'}[paper] }, {kind.capitalize()} {number}"

    def baseline(self, row: Row) -> Row | None:
        """The untreated row that a treated one is compared with: the nearest above of the same model and changes."""
        if not row.treat:
            return None
        above = self.rows[: self.rows.index(row)]
        return next((r for r in reversed(above) if not r.treat and (r.model, r.set) == (row.model, row.set)), None)


@dataclass(frozen=True)
class Stand:
    """What stands for a model of a paper at one scale."""

    spec: str
    recipe: str = ""  # empty: counted, not trained
    treated: str = ""  # the recipe of rows with a treatment, where it differs
    set: tuple[str, ...] = ()
    teacher: str = ""  # a model of this file, trained first and distilled from
    start: str = ""  # a model of this file, trained first, whose weights this one starts from


def item_names() -> list[str]:
    """Every item, tables and figures in the papers' order.

    >>> names = item_names()
    >>> names[0], "cb/table4a" in names, "tap/figure7" in names
    ('cb/figure3', True, True)
    """
    found = [
        f"{paper}/{file.name.removesuffix('.toml')}"
        for paper in PAPERS
        for file in (resources.files("vitfocus") / "recipes" / paper).iterdir()
        if file.name.endswith(".toml")
    ]
    return sorted(found, key=_in_order)


@functools.cache
def load_item(name: str) -> Item:
    """An item by its name.

    >>> item = load_item("cb/table4a")
    >>> item.paper, item.rows[1].label, item.rows[1].treat, item.rows[1].paper["top1"]
    ('CB, Table 4a', 'CB in MLP', 'cb', 80.5)
    """
    if name not in item_names():
        raise VitfocusError(f"There is no table or figure {name!r}: {nearest(name, item_names())}")
    tree = tomllib.loads((resources.files("vitfocus") / "recipes" / f"{name}.toml").read_text(encoding="utf-8"))
    rows = tuple(_record(Row, row, f"{name}, row {number}") for number, row in enumerate(tree.pop("rows", []), 1))
    paper = name.partition("/")[0]
    parts = tuple(f"{paper}/{part}" for part in tree.pop("parts", []))
    item = _record(Item, {**tree, "name": name, "parts": parts, "rows": rows}, name)
    _check(item)
    return item


@functools.cache
def stands() -> dict[str, dict[str, Stand]]:
    """models.toml: for each model, what stands for it at each scale."""
    text = (resources.files("vitfocus") / "reproduce" / "models.toml").read_text(encoding="utf-8")
    return {
        model: {scale: _record(Stand, stand, f"models.toml, {model}, {scale}") for scale, stand in by_scale.items()}
        for model, by_scale in tomllib.loads(text).items()
    }


def _record(kind: type[Any], tree: Mapping[str, Any], where: str) -> Any:
    known = [entry.name for entry in dataclasses.fields(kind)]
    for key in tree:
        if key not in known:
            raise VitfocusError(f"{where} has no key {key!r}: {nearest(key, known)}")
    try:
        return kind(**{key: _frozen(value) for key, value in tree.items()})
    except TypeError as error:
        raise VitfocusError(f"{where} lacks a key: {error}.") from None


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(one) for one in value)
    return {key: _frozen(one) for key, one in value.items()} if isinstance(value, dict) else value


def _check(item: Item) -> None:
    for row in item.rows:
        where = f"{item.name}, {row.label!r}"
        if sum(map(bool, (row.model, row.quoted, row.computed))) != 1:
            raise VitfocusError(f"{where} must have one of model, quoted and computed.")
        if row.model and row.model not in stands():
            raise VitfocusError(f"{where} names no model {row.model!r} of models.toml: {nearest(row.model, stands())}")
        unknown = [key for key in row.unmet if key not in row.paper]
        if unknown:
            raise VitfocusError(f"{where} says why {unknown[0]} is unmet, and the paper does not state it.")


def _in_order(name: str) -> tuple[Any, ...]:
    paper, _, place = name.partition("/")
    kind, supplement, number, part = re.fullmatch(r"([a-z]+)(S?)(\d+)([a-z]?)", place).groups()  # type: ignore[union-attr]
    return list(PAPERS).index(paper), bool(supplement), kind, int(number), part
