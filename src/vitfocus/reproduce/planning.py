"""From a row and a scale to a run: the resolved recipe, and a folder named by its digest.

Two rows with the same recipe are the same run, whichever tables they stand in: it is trained once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.tables import counted
from vitfocus.recipes.settings import SECTIONS, Recipe, changed, is_harmless
from vitfocus.reproduce.items import SCALES, Item, Row, Stand, stands
from vitfocus.reproduce.measures import MEASURES
from vitfocus.train.recipe import apply_overrides, load_recipe

#: Data sets by the source that a recipe names: what people call them, and the folder's name below --data.
DATA_SETS = {
    "shapes": ("Shapes", ""),
    "folder": ("ImageNet-1k", "imagenet"),
    "cifar100": ("CIFAR-100", "cifar100"),
    "ade20k": ("ADE20K", "ade20k"),
    "cityscapes": ("Cityscapes", "cityscapes"),
    "coco": ("COCO", "coco"),
    "vqav2": ("VQAv2", "vqav2"),
}
#: Every data set that --data can name: those trained on, and those that only evaluations read.
DATA_NAMES = {name for _, name in DATA_SETS.values() if name} | {
    suite.data for measure in MEASURES.values() for suite in measure.suites.values() if suite.data
}


@dataclass(frozen=True)
class Places:
    """Where data sets lie: `named` ones, and a `root` that holds them by name, or is the one needed itself."""

    root: Path | None = None
    named: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Sequence[str | Path]) -> Places:
        """From the command line: "DIR" or "NAME=DIR", any number of times.

        >>> Places.read(["/", "imagenet-c=/tmp"]).named
        {'imagenet-c': PosixPath('/tmp')}
        """
        root, named = None, {}
        for one in map(str, given):
            name, equals, folder = one.partition("=")
            if equals and name not in DATA_NAMES:
                raise VitfocusError(f"--data {one} names no data set {name!r}: {nearest(name, DATA_NAMES)}")
            path = Path(folder if equals else one).expanduser()
            if not path.is_dir():
                raise VitfocusError(f"There is no folder {path}: --data wants a folder, or NAME=FOLDER.")
            if equals:
                named[name] = path
            elif root is not None:
                raise VitfocusError(
                    f"--data names two folders, {root} and {path}: say which data set each is, NAME=DIR."
                )
            else:
                root = path
        return cls(root, named)

    def find(self, name: str, own: bool = False) -> Path | None:
        """A data set's folder, or None; with `own`, the root itself may be it."""
        if name in self.named:
            return self.named[name]
        if self.root is None:
            return None
        if (self.root / name).is_dir():
            return self.root / name
        collection = any((self.root / folder).is_dir() for _, folder in DATA_SETS.values() if folder)
        return self.root if own and not collection else None


@dataclass(frozen=True)
class Run:
    """A row at a scale, ready to be trained: `recipe` is None where a model is only counted."""

    row: Row
    scale: str
    stand: Stand
    recipe: Recipe | None
    folder: Path
    digest: str
    before: tuple[Run, ...] = ()  # trained first: a teacher, or the model whose weights it starts from

    @property
    def spec(self) -> str:
        """The model with its treatment."""
        return with_treatment(self.stand.spec, self.row.treat)


def with_treatment(spec: str, treat: str) -> str:
    """The spec of a model, with what is done to it."""
    return f"{spec}+{treat}" if treat else spec


def stand_of(item: Item, model: str, scale: str) -> Stand:
    """What stands for a model at a scale, or a sentence on the scales there are."""
    if scale not in SCALES:
        raise VitfocusError(f"There is no scale {scale!r}: {nearest(scale, SCALES)}")
    known = stands()[model]
    if scale not in known:
        others = " or ".join(f"--scale {name}" for name in SCALES if name in known)
        raise VitfocusError(f"{item.name} has nothing at the scale {scale} for {model} ({item.data}): take {others}.")
    return known[scale]


def plan_row(
    item: Item, row: Row, scale: str, places: Places | None, out: Path, overrides: Sequence[str] = ()
) -> Run | None:
    """The run of a row; None where the scale has none, as for models that are counted at ImageNet scale alone.

    With no `places` the run needs no data: its model will be counted, and not trained.
    """
    if not row.model or (scale not in stands()[row.model] and not _trains_anywhere(row.model)):
        return None
    stand = stand_of(item, row.model, scale)
    return _plan(item, row, stand, scale, places, out, overrides)


def _trains_anywhere(model: str) -> bool:
    return any(stand.recipe for stand in stands()[model].values())


def _plan(
    item: Item, row: Row, stand: Stand, scale: str, places: Places | None, out: Path, overrides: Sequence[str]
) -> Run:
    if not stand.recipe:
        return Run(row, scale, stand, None, out, "")
    base = (row.recipe if scale == "imagenet" else "") or (stand.treated if row.treat else "") or stand.recipe
    changes = [*stand.set, *row.set, f"model.spec={with_treatment(stand.spec, row.treat)}"]
    before: dict[str, Run] = {}
    if stand.teacher:
        before["teacher"] = _plan_before(item, Row(row.label, stand.teacher), scale, places, out, overrides)
        changes.append("distill.kind=hard")
    if stand.start:
        first = Row(row.label, stand.start, row.start_treat or row.treat)
        before["start"] = _plan_before(item, first, scale, places, out, ())
    source = load_recipe(base).data.source
    title, name = DATA_SETS.get(source, (source, source))
    if name and places is not None:
        folder = places.find(name, own=True)
        if folder is None:
            raise VitfocusError(
                f"{item.name} at the scale {scale} trains on {title}: give its folder with --data {name}=DIR, "
                "or a folder that holds all data sets by name with --data DIR."
            )
        changes.append(f"data.root={folder.resolve()}")
    recipe, _ = apply_overrides(base, [*changes, *overrides])
    if "start" in before:
        recipe = replace(recipe, model=replace(recipe.model, weights="", pretrained=False))
    digest = recipe_digest(recipe, *(f"{role} {run.digest}" for role, run in before.items()))
    if "teacher" in before:
        distill = replace(recipe.distill, teacher=str(before["teacher"].folder / "model"))
        recipe = replace(recipe, distill=distill)
    if "start" in before:
        model = replace(recipe.model, weights=str(before["start"].folder / "model"))
        recipe = replace(recipe, model=model)
    slug = re.sub(r"[^a-z0-9]+", "-", with_treatment(row.model, row.treat).lower()).strip("-")
    run_name = f"{slug}-{digest[:10]}"
    about = f"{with_treatment(row.model, row.treat)} at {scale} scale, as in {item.paper}."
    recipe = replace(recipe, name=run_name, about=about)
    return Run(row, scale, stand, recipe, out / run_name, digest, tuple(before.values()))


def _plan_before(item: Item, row: Row, scale: str, places: Places | None, out: Path, overrides: Sequence[str]) -> Run:
    return _plan(item, row, stand_of(item, row.model, scale), scale, places, out, overrides)


def recipe_digest(recipe: Recipe, *before: str) -> str:
    """What a run is known by: all that changes its outcome and differs from the defaults, whatever it is called.

    >>> recipe = load_recipe("shapes")
    >>> renamed = replace(recipe, name="other", about="")
    >>> recipe_digest(recipe) == recipe_digest(renamed), recipe_digest(recipe) == recipe_digest(recipe, "a teacher")
    (True, False)
    """
    sections = {
        section: {
            name: value
            for name, value in changed(getattr(recipe, section)).items()
            if not is_harmless(f"{section}.{name}")
        }
        for section in SECTIONS
    }
    described = json.dumps([recipe.task, sections, before], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()


def describe_data(run: Run, images: tuple[int, int] | None = None) -> str:
    """Scale and data in a few words, for every line: "smoke: Shapes, 32 px, 12,000 + 2,000 images, 4 epochs"."""
    assert run.recipe is not None
    data, schedule = run.recipe.data, run.recipe.schedule
    parts = [DATA_SETS.get(data.source, (data.source,))[0], f"{data.size} px"]
    if images:
        parts.append(f"{images[0]:,} + {images[1]:,} images")
    steps = getattr(schedule, "steps", 0)
    parts.append(f"{steps:,} steps" if steps else counted(schedule.epochs, "epoch", "g"))
    return f"{run.scale}: {', '.join(parts)}"
