"""The papers' tables and figures as data: one TOML file per item, checked key by key, and what items measure.

An item has a title, the paper's data, rows and what is measured for each. A row names a model, a treatment, and the
numbers printed in the paper; `models.toml` says how the model is built at each scale. A measure without a suite at a
scale is not measured there, as the table notes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

from msgspec import Struct

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.metrics import CORRUPTIONS, METRICS
from vitfocus.core.records import convert, parse_toml

#: Descriptions of the scales.
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


class TableRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One row of a table, or one curve of a figure."""

    label: str
    model: str = ""  # a name in models.toml
    treat: str = ""  # a spec such as "cb(layers=upper)"
    start_treat: str = ""  # the treatment of the model it starts from, if different
    recipe: str = ""  # at ImageNet scale, instead of the model's own
    set: tuple[str, ...] = ()  # further changes to the recipe, at every scale
    at: dict[str, float] = {}  # the row's x in a figure: {heads = 3}
    paper: dict[str, Printed] = {}
    unmet: dict[str, str] = {}  # counts of the paper that ours do not match, and why
    quoted: str = ""  # why the row is only quoted: it cannot be built here
    computed: str = ""  # a computation without a model or data


class Item(Struct, frozen=True, forbid_unknown_fields=True):
    """A table or a figure."""

    name: str  # "cb/table4a"
    title: str
    data: str = ""  # the paper's
    measures: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()  # of its protocol at ImageNet scale, beside what protocols.toml says
    assumed: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    count_on: str = ""  # the model whose FLOPs the paper counts, if not the row's
    parts: tuple[str, ...] = ()  # the items that this one consists of
    rows: tuple[TableRow, ...] = ()

    @property
    def paper(self) -> str:
        """Where it is in the paper: "CB, Table S5"."""
        paper, _, place = self.name.partition("/")
        kind, number = re.fullmatch(r"([a-z]+)(.+)", place).groups()  # type: ignore[union-attr]
        return f"{ {'cb': 'CB', 'tap': 'TAP & ADL'}[paper] }, {kind.capitalize()} {number}"

    @property
    def facts(self) -> list[Fact]:
        """The statements of protocols.toml that apply to this item."""
        return [fact for fact in protocol_facts() if fact.holds_for(self)]

    @property
    def protocol(self) -> dict[str, list[str]]:
        """What is exactly the paper's protocol at ImageNet scale, what is assumed, and what differs.

        >>> load_item("cb/table8").protocol["assumed"][-1]
        "FGSM's ε is 1/255 of the pixels' range (--option fgsm.eps)."
        """
        return {kind: [*getattr(self, kind), *self.stated(kind)] for kind in ("exact", "assumed", "differs")}

    def stated(self, kind: str, scale: str = "imagenet", given: Collection[str] = ()) -> list[str]:
        """The shared statements of a kind, without those about training at other scales and about options `given`."""
        facts = [fact for fact in self.facts if (scale == "imagenet" or not fact.models) and fact.option not in given]
        return [
            f"{text[:-1]} (--option {fact.option})." if kind == "assumed" and fact.option else text
            for fact in facts
            if (text := getattr(fact, kind))
        ]

    def baseline(self, row: TableRow) -> TableRow | None:
        """The untreated row that a treated row is compared with: the nearest above with the same model and changes."""
        if not row.treat:
            return None
        above = self.rows[: self.rows.index(row)]
        return next((r for r in reversed(above) if not r.treat and (r.model, r.set) == (row.model, row.set)), None)


class Fact(Struct, frozen=True, forbid_unknown_fields=True):
    """A statement about the protocols of all items that match; see protocols.toml."""

    models: tuple[str, ...] = ()
    treats: str = ""  # a pattern of the rows' treatments
    measures: tuple[str, ...] = ()
    exact: str = ""
    assumed: str = ""
    differs: str = ""
    option: str = ""  # SUITE.NAME of an assumed value that an evaluation can vary
    tried: tuple[Any, ...] = ()

    def holds_for(self, item: Item) -> bool:
        """Whether the item has a matching row and a matching measure."""

        def one_of(name: str, patterns: tuple[str, ...]) -> bool:
            return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)

        built = [row for row in item.rows if row.model and model_setups()[row.model]["imagenet"].recipe]
        rows = any(one_of(row.model, self.models) and re.search(self.treats, row.treat) for row in built)
        return rows and any(one_of(measure, self.measures) for measure in item.measures)


class ModelSetup(Struct, frozen=True, forbid_unknown_fields=True):
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
    tree = _read_toml(f"recipes/{name}.toml")
    usual = {"model": tree.pop("model", "")}  # of rows that name none
    tree["rows"] = [row if {"quoted", "computed"} & set(row) else usual | row for row in tree.get("rows", [])]
    tree["parts"] = [f"{name.partition('/')[0]}/{part}" for part in tree.get("parts", [])]
    item = convert({**tree, "name": name}, Item, f"{name}.toml")
    for row in item.rows:
        where = f"{name}, {row.label!r}"
        if sum(map(bool, (row.model, row.quoted, row.computed))) != 1:
            raise VitfocusError(f"{where} must have one of model, quoted and computed.")
        if row.model and row.model not in model_setups():
            raise VitfocusError(
                f"{where} names no model {row.model!r} of models.toml: {nearest(row.model, model_setups())}"
            )
        if unknown := [key for key in row.unmet if key not in row.paper]:
            raise VitfocusError(f"{where} says why {unknown[0]} is unmet, but the paper does not state it.")
    return item


@functools.cache
def model_setups() -> dict[str, dict[str, ModelSetup]]:
    """The contents of models.toml: the setups of each model by scale."""
    return convert(_read_toml("reproduce/models.toml"), dict[str, dict[str, ModelSetup]], "models.toml")


@functools.cache
def protocol_facts() -> list[Fact]:
    """The contents of protocols.toml."""
    return convert(_read_toml("reproduce/protocols.toml")["facts"], list[Fact], "protocols.toml")


def _read_toml(path: str) -> dict[str, Any]:
    return parse_toml((resources.files("vitfocus") / path).read_text(encoding="utf-8"), path)


def _in_order(name: str) -> tuple[Any, ...]:
    paper, _, place = name.partition("/")
    kind, supplement, number, part = re.fullmatch(r"([a-z]+)(S?)(\d+)([a-z]?)", place).groups()  # type: ignore[union-attr]
    return list(PAPERS).index(paper), bool(supplement), kind, int(number), part


@dataclass(frozen=True)
class SuiteMetric:
    """A number of an evaluation: `path` leads to it in the summary of the model.

    `data` names a data set's folder; if empty, the run's validation images are used. A `generated` suite is computed
    from the validation images if its published folder is missing. `limit` bounds the images; `title`
    replaces the heading.
    """

    suite: str
    path: tuple[str, ...]  # "{eps}" is the value of this option
    data: str = ""
    generated: bool = False
    folder_option: str = ""  # the suite's option that takes the folder, if it is not the data
    limit: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True)
class Measure:
    """A column. `source` is counted, result, curve, diagnosis, suite or computed."""

    title: str
    source: str
    unit: str = "%"
    better: str = "up"  # up, down, or "" if neither is better
    digits: int = 1
    key: str = ""  # in results.json or in a diagnosis
    scale: float = 1.0  # the stored number is multiplied by this
    suites: Mapping[str, SuiteMetric] = field(default_factory=dict)  # by scale

    @property
    def heading(self) -> str:
        """Title, unit, and an arrow that points to better."""
        arrow = {"up": " ↑", "down": " ↓"}.get(self.better, "")
        return f"{self.title}{f' [{self.unit}]' if self.unit else ''}{arrow}"


def _result(key: str, title: str = "", digits: int = 1) -> Measure:
    return Measure(title or METRICS[key].short, "result", key=key, scale=100.0, digits=digits)


def _reading(title: str, key: str, unit: str = "", better: str = "", digits: int = 2) -> Measure:
    return Measure(title, "diagnosis", unit, better, digits, key)


def _corruption(name: str) -> Measure:
    title, plain = f"CE {name.replace('_', ' ')}", f"error under {name.replace('_', ' ')}"
    path = ("corruptions", name)
    return Measure(title, "suite", better="down", digits=2, suites=_corrupted((*path, "ce"), (*path, "error"), plain))


def _corrupted(published: tuple[str, ...], plain: tuple[str, ...], title: str) -> dict[str, SuiteMetric]:
    """ImageNet-C, or the same corruptions of small images, for which there are no AlexNet references."""
    return {
        "imagenet": SuiteMetric("imagenet-c", published, "imagenet-c", generated=True),
        "cifar100": SuiteMetric("cifar100-c", plain, limit=2000, title=title),
        "smoke": SuiteMetric("cifar10-c", plain, limit=100, title=title),
    }


def _published(suite: str, *path: str) -> dict[str, SuiteMetric]:
    return {"imagenet": SuiteMetric(suite, path or ("top1",), suite)}


_ALL = ("smoke", "cifar100", "imagenet")
_FLIPS = METRICS["mean_flip_probability"].title

MEASURES: dict[str, Measure] = {
    "parameters": Measure("parameters", "counted", "M", "", 1),
    "flops": Measure("FLOPs", "counted", "G", "", 1),
    "parameters_added": Measure("parameters added", "counted", "M", "", 3),
    "flops_added": Measure("FLOPs added", "counted", "M", "", 1),
    "top1": _result("top1"),
    "top5": _result("top5"),
    "eval_loss": Measure("evaluation loss", "result", "", "down", 3, "loss"),
    "train_loss": Measure("training loss", "curve", "", "down", 3, "loss"),
    "miou": _result("miou"),
    **{f"{kind}_ap{level}": _result(f"{kind}_ap{level}") for kind in ("box", "mask") for level in ("", "50", "75")},
    "vqa": _result("accuracy", "VQA accuracy on test-dev", 2),
    "entropy": _reading("mean entropy", "entropy", "nats"),
    "entropy_p15": _reading("15th percentile of entropy", "entropy_p15", "nats"),
    "entropy_p85": _reading("85th percentile of entropy (the top 15 %)", "entropy_p85", "nats"),
    "entropy_bound": _reading("bound of entropy", "entropy_bound", "nats"),
    "entropy_class": _reading("class token's entropy", "entropy_cls", "nats"),
    "entropy_last": _reading("entropy of the last layer", "entropy@last", "nats"),
    "distance": _reading("relative distance, sum over keys", "distance", digits=4),
    "distance_pairs": _reading("relative distance, mean over pairs", "distance@pairs", digits=6),
    "overfocus": Measure("attention on the top 5 % of tokens", "diagnosis", "%", "down", 1, "overfocus", 100.0),
    "stability": _reading("stability under Gaussian noise", "stability", better="up"),
    "head_similarity": _reading("similarity of heads", "head_similarity", better="down"),
    "scaling_ratio": _reading("ratio of scales", "scaling_ratio"),
    "scaling_mean": _reading("mean scale", "scaling_mean", digits=3),
    "scaling_ratio_rise": _reading("rise of the ratio with depth", "scaling_ratio@rise"),
    "scaling_mean_rise": _reading("rise of the mean with depth", "scaling_mean@rise", digits=3),
    "steepest_at": Measure("|x1 - x2| of the steepest gradient", "computed", "", "", 2),
    "gradient_uniform": Measure("gradient at uniform attention", "computed", "", "", 3),
    "mce": Measure(
        "mCE",
        "suite",
        better="down",
        suites=_corrupted(("mce",), ("mean_error",), METRICS["mean_error"].title),
    ),
    **{f"ce_{name}": _corruption(name) for name in CORRUPTIONS},
    "mfr": Measure(
        "mFR",
        "suite",
        better="down",
        suites={
            "imagenet": SuiteMetric("imagenet-p", ("mfr",), "imagenet-p", generated=True),
            "cifar100": SuiteMetric("imagenet-p", ("mean_flip_probability",), limit=200, title=_FLIPS),
            "smoke": SuiteMetric("imagenet-p", ("mean_flip_probability",), limit=20, title=_FLIPS),
        },
    ),
    "cityscapes_c": Measure(
        "mIoU under corruption",
        "suite",
        suites={
            "imagenet": SuiteMetric(
                "cityscapes-c", ("miou_corrupted",), "cityscapes-c", generated=True, folder_option="corrupted_data"
            ),
            "smoke": SuiteMetric("cityscapes-c", ("miou_corrupted",), limit=20),
        },
    ),
    "acdc": Measure(
        "mIoU on ACDC test",
        "suite",
        suites={"imagenet": SuiteMetric("acdc", ("miou",), "acdc", title="mIoU on ACDC val")},
    ),
    "imagenet_a": Measure("ImageNet-A", "suite", suites=_published("imagenet-a")),
    "imagenet_r": Measure("ImageNet-R", "suite", suites=_published("imagenet-r")),
    "imagenet_v2": Measure(
        "ImageNet-V2", "suite", suites=_published("imagenet-v2", "cells", "matched-frequency", "top1")
    ),
    "imagenet_real": Measure("ImageNet-ReaL", "suite", suites={"imagenet": SuiteMetric("imagenet-real", ("top1",))}),
    "occlusion": Measure(
        "centre occluded",
        "suite",
        suites=dict.fromkeys(
            _ALL, SuiteMetric("occlusion", ("cells", "centre/{sizes}", "top1"), options={"sizes": [112], "drops": []})
        ),
    ),
    "fgsm": Measure(
        "FGSM",
        "suite",
        suites=dict.fromkeys(_ALL, SuiteMetric("fgsm", ("cells", "fgsm/{eps}", "top1"), options={"eps": [1]})),
    ),
    **{
        f"noise_{short}": Measure(
            f"mIoU, {title}",
            "suite",
            digits=2,
            suites={
                scale: SuiteMetric("segmentation-noise", ("cells", cell, "miou"), limit=limit)
                for scale, limit in (("imagenet", None), ("smoke", 100))
            },
        )
        for short, cell, title in (
            ("clean", "clean", "clean"),
            ("shot", "shot", "shot noise"),
            ("gaussian5", "gaussian/5", "Gaussian noise of 5"),
            ("gaussian10", "gaussian/10", "Gaussian noise of 10"),
            ("blur1", "blur/1", "blur of 1 px"),
            ("blur2", "blur/2", "blur of 2 px"),
        )
    },
}
