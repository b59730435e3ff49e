"""Keys of a recipe that matter only beside another choice, and the refusal of those set where they would do nothing.

A recipe may well carry such a key: the choice may be made later, by an override. Who sets the key by an override means
it, and is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from vitfocus.core.errors import VitfocusError
from vitfocus.tasks import find_task

if TYPE_CHECKING:
    from vitfocus.train.recipe import Recipe

_NO_TEACHER = "is about a teacher, and there is none: name distill.teacher"
_OTHER_OPTIMISER = "is for another optimiser: set optimiser.name=adamw"
_DRAWN = "is for files, and Shapes are drawn: name another data.source"


def _from_files(recipe: Recipe) -> bool:
    return recipe.data.source != "shapes"


def _has_splits(recipe: Recipe) -> bool:
    return recipe.data.source not in ("shapes", "cifar-mosaic")


def _resident(recipe: Recipe) -> bool:
    """Whether images are kept on the device for sure; of some sources it depends on what lies in the folder."""
    data = recipe.data
    return data.resident == "yes" or (data.resident == "auto" and data.source in ("shapes", "cifar-mosaic"))


def _fetched(recipe: Recipe) -> bool:
    source = recipe.data.source
    return source.startswith("timm:") or source in ("cifar10", "cifar100", "fashion-mnist")


def _jitters(recipe: Recipe) -> bool:
    return not recipe.augment.randaugment or "3a" in recipe.augment.randaugment  # as timm has it


def _acts(recipe: Recipe, share: float, other: float) -> bool:
    """Whether one of mixup and cutmix is ever chosen, with its share of the steps, beside the other."""
    return bool(recipe.augment.mix_probability and (share or not other))


def _has_drop_path(recipe: Recipe) -> bool:
    library = _library(recipe)
    return library not in ("torchvision", "transformers") and "drop_path_rate" not in recipe.model.arguments


def _library(recipe: Recipe) -> str:
    from vitfocus.treatments.origin import split_library
    from vitfocus.treatments.spec import split_spec

    return split_library(split_spec(recipe.model.spec)[0])[0]


def _diversifies(recipe: Recipe) -> bool:
    from vitfocus.treatments.spec import split_spec

    return any(treatment.name == "adl" for treatment in split_spec(recipe.model.spec)[1])


def _auxiliary_head(recipe: Recipe) -> bool:
    return _library(recipe) == "upernet" and bool(recipe.model.arguments.get("auxiliary_channels", True))


def _optimiser_has(recipe: Recipe, what: str) -> bool:
    from timm.optim import get_optimizer_info, list_optimizers

    name = recipe.optimiser.name  # one that timm does not know is refused with the nearest that it does
    if name not in list_optimizers():
        return True
    info = get_optimizer_info(name)
    return bool(getattr(info, f"has_{what}")) and (what != "betas" or info.num_betas == 2)


def _warms_up(recipe: Recipe) -> bool:
    schedule = recipe.schedule
    return bool(schedule.warmup_steps or (schedule.warmup_epochs and not schedule.steps))


#: Each key with the condition under which it does something, and what to say where it does not.
_USED: dict[str, tuple[Callable[[Recipe], bool], str]] = {
    "model.drop_path": (_has_drop_path, "is not what this model is told: say it in model.arguments"),
    "data.root": (_from_files, _DRAWN),
    "data.train_split": (_has_splits, "is for splits that have a name: name another data.source"),
    "data.val_split": (
        lambda recipe: _has_splits(recipe) and not recipe.data.holdout,
        "is for a validation set of its own that has a name: name such a data.source, without data.holdout",
    ),
    "data.download": (_fetched, "is for torchvision's sets and timm's: name one as data.source"),
    "data.crop": (
        lambda recipe: not _resident(recipe),
        "is for images that are read one by one, and these are kept on the device: set data.resident=no",
    ),
    "data.interpolation": (
        lambda recipe: _from_files(recipe) or not _resident(recipe),
        "is for images that are resized, and Shapes are drawn at data.size: name another data.source",
    ),
    "augment.scale": (
        lambda recipe: recipe.augment.crop == "resized",
        "is for another crop: set augment.crop=resized",
    ),
    "augment.padding": (lambda recipe: recipe.augment.crop == "pad", "is for another crop: set augment.crop=pad"),
    "augment.colour_jitter": (_jitters, "is left out beside RandAugment, as in timm: set augment.randaugment="),
    "augment.mixup": (
        lambda recipe: _acts(recipe, 1 - recipe.augment.cutmix_share, recipe.augment.cutmix),
        "is never chosen here: set augment.mix_probability above 0 and augment.cutmix_share below 1",
    ),
    "augment.cutmix": (
        lambda recipe: _acts(recipe, recipe.augment.cutmix_share, recipe.augment.mixup),
        "is never chosen here: set augment.mix_probability and augment.cutmix_share above 0",
    ),
    "augment.mix_probability": (
        lambda recipe: bool(recipe.augment.mixup or recipe.augment.cutmix),
        "is for mixup and cutmix, and both are off: set augment.mixup or augment.cutmix",
    ),
    "augment.cutmix_share": (
        lambda recipe: bool(recipe.augment.mixup and recipe.augment.cutmix and recipe.augment.mix_probability),
        "chooses between mixup and cutmix, and not both are on: set augment.mixup and augment.cutmix",
    ),
    "loss.adl_warmup_epochs": (_diversifies, "is about adl, and model.spec has none: add +adl to it"),
    "optimiser.betas": (lambda recipe: _optimiser_has(recipe, "betas"), _OTHER_OPTIMISER),
    "optimiser.eps": (lambda recipe: _optimiser_has(recipe, "eps"), _OTHER_OPTIMISER),
    "optimiser.head_lr": (
        lambda recipe: recipe.optimiser.train != "added",
        "is about a head that is trained: set optimiser.train=head or optimiser.train=all",
    ),
    "schedule.warmup_lr": (_warms_up, "is for a warm-up, and there is none: set its length"),
    "schedule.power": (
        lambda recipe: recipe.schedule.decay == "polynomial",
        "is for another decay: set schedule.decay=polynomial",
    ),
    "schedule.drops": (
        lambda recipe: recipe.schedule.decay == "drops",
        "is for another decay: set schedule.decay=drops",
    ),
    "distill.kind": (lambda recipe: bool(recipe.distill.teacher), _NO_TEACHER),
    "distill.weight": (lambda recipe: bool(recipe.distill.teacher), _NO_TEACHER),
    "distill.weights": (lambda recipe: bool(recipe.distill.teacher), _NO_TEACHER),
    "distill.pretrained": (
        lambda recipe: bool(recipe.distill.teacher) and not Path(recipe.distill.teacher).is_dir(),
        "is about a teacher by name, and this is none: name distill.teacher by its library's name",
    ),
    "distill.temperature": (
        lambda recipe: bool(recipe.distill.teacher) and recipe.distill.kind == "soft",
        "is about a teacher whose whole output counts: name distill.teacher and set distill.kind=soft",
    ),
    "segment.auxiliary": (
        _auxiliary_head,
        "is about an auxiliary head, and this model has none: use upernet with auxiliary_channels above 0",
    ),
    "detect.keep_empty": (_from_files, "is for files, and Shapes always show an object: name another data.source"),
}
#: A key that is 0, false or empty is off, which it is anyway where it is not used; but for these.
_ZERO_MATTERS = ("augment.cutmix_share", "schedule.power")


def why_unused(recipe: Recipe, path: str) -> str:
    """Why a key, by its full name, does nothing in this recipe; empty where it does something, or is off anyway.

    >>> from vitfocus.train import load_recipe
    >>> why_unused(load_recipe("shapes"), "schedule.power")
    'schedule.power is for another decay: set schedule.decay=polynomial, or leave it out.'
    >>> why_unused(load_recipe("shapes", ["decay=polynomial"]), "schedule.power")
    ''
    """
    section, key = path.split(".")[:2]
    if not getattr(getattr(recipe, section), key) and path not in _ZERO_MATTERS:
        return ""
    if not find_task(recipe.task).uses(section, key):
        return f"task={recipe.task} does not use {path}: leave it out of the recipe."
    used, otherwise = _USED.get(path, (None, ""))
    return "" if used is None or used(recipe) else f"{path} {otherwise}, or leave it out."


def refuse_unused(recipe: Recipe, given: Iterable[str]) -> None:
    """Refuse the first of the given keys that would do nothing."""
    for path in sorted(given):
        if why := why_unused(recipe, path):
            raise VitfocusError(why)
