"""The papers' tables and figures as data: one TOML file per item, checked key by key.

An item has a title, the paper's data, rows and what is measured for each. A row names a model, a treatment, and the
numbers printed in the paper; `models.toml` says how the model is built at each scale.
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

#: What each scale means.
SCALES = {
    "smoke": "tiny models on the embedded Shapes, on a CPU, about a minute per row",
    "cifar100": "the papers' architectures on CIFAR-100 at 32 pixels, on a GPU",
    "imagenet": "the papers' own models, recipes and data sets",
}
PAPERS = {
    "cb": "Scratching Visual Transformer's Back with Uniform Attention (Hyeon-Woo et al., ICCV 2023)",
    "tap": "Robustifying Token Attention for Vision Transformers (Guo et al., ICCV 2023)",
}

#: A number as printed in the paper, alone or with its interval, or a word.
Printed = float | int | str | tuple[float, float]


@dataclass(frozen=True)
class Row:
    """One line of a table, or one curve of a figure."""

    label: str
    model: str = ""  # a name in models.toml
    treat: str = ""  # a spec such as "cb(layers=upper)"
    start_treat: str = ""  # the treatment of the model it starts from, if different
    recipe: str = ""  # at ImageNet scale, instead of the model's own
    set: tuple[str, ...] = ()  # further changes to the recipe, at every scale
    at: Mapping[str, float] = field(default_factory=dict)  # the row's x in a figure: {heads = 3}
    paper: Mapping[str, Printed] = field(default_factory=dict)
    unmet: Mapping[str, str] = field(default_factory=dict)  # counts of the paper that ours do not match, and why
    quoted: str = ""  # why the row is only quoted: it cannot be built here
    computed: str = ""  # a computation without a model or data


@dataclass(frozen=True)
class Item:
    """A table or a figure."""

    name: str  # "cb/table4a"
    title: str
    data: str = ""  # the paper's
    measures: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    count_on: str = ""  # the model whose FLOPs the paper counts, if not the row's
    parts: tuple[str, ...] = ()  # the items that this one consists of
    rows: tuple[Row, ...] = ()

    @property
    def paper(self) -> str:
        """Where it is in the paper: "CB, Table S5"."""
        paper, _, place = self.name.partition("/")
        kind, number = re.fullmatch(r"([a-z]+)(.+)", place).groups()  # type: ignore[union-attr]
        return f"{ {'cb': 'CB', 'tap': 'TAP & ADL'}[paper] }, {kind.capitalize()} {number}"

    def baseline(self, row: Row) -> Row | None:
        """The untreated row that a treated row is compared with: the nearest above with the same model and changes."""
        if not row.treat:
            return None
        above = self.rows[: self.rows.index(row)]
        return next((r for r in reversed(above) if not r.treat and (r.model, r.set) == (row.model, row.set)), None)


@dataclass(frozen=True)
class ModelSetup:
    """How a model of a paper is built and trained at one scale."""

    spec: str
    recipe: str = ""  # empty: only counted, not trained
    treated: str = ""  # the recipe of rows with a treatment, if different
    set: tuple[str, ...] = ()
    teacher: str = ""  # a model of models.toml, trained first and used as teacher
    start: str = ""  # a model of models.toml, trained first, whose weights this one starts from


def item_names() -> list[str]:
    """Every item, in the order of the papers.

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
def model_setups() -> dict[str, dict[str, ModelSetup]]:
    """The contents of models.toml: the setups of each model by scale."""
    text = (resources.files("vitfocus") / "reproduce" / "models.toml").read_text(encoding="utf-8")
    return {
        model: {scale: _record(ModelSetup, one, f"models.toml, {model}, {scale}") for scale, one in by_scale.items()}
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
        if row.model and row.model not in model_setups():
            raise VitfocusError(
                f"{where} names no model {row.model!r} of models.toml: {nearest(row.model, model_setups())}"
            )
        unknown = [key for key in row.unmet if key not in row.paper]
        if unknown:
            raise VitfocusError(f"{where} says why {unknown[0]} is unmet, but the paper does not state it.")


def _in_order(name: str) -> tuple[Any, ...]:
    paper, _, place = name.partition("/")
    kind, supplement, number, part = re.fullmatch(r"([a-z]+)(S?)(\d+)([a-z]?)", place).groups()  # type: ignore[union-attr]
    return list(PAPERS).index(paper), bool(supplement), kind, int(number), part
