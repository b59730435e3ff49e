"""The suites by name: what each is, which options it takes, and the function that lays it out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.robustness.plan import Plan
from vitfocus.robustness.request import Request
from vitfocus.robustness.results import Scores
from vitfocus.robustness.suites import corrupted, hostile, natural, perturbed
from vitfocus.robustness.suites.context import Context

_PICTURES = ("crop_pct", "interpolation", "resize", "index")
_CORRUPTED = ("corruptions", "severities", "extra", "frost")
_MASKS = ("source", "split", "window", "stride", "flip", "short_side", "ignore")
_SEGMENTATION = "vitfocus.robustness.segmentation:measure"
#: The suite of a saved model's own task, by the task's name.
OWN = {"classify": "clean", "segment": "segmentation", "detect": "detection", "answer": "answers"}


@dataclass(frozen=True)
class Suite:
    """One suite: `resizes` lets the model enlarge images itself, as CIFAR's 32 pixels need."""

    about: str
    plan: Callable[[Context], Plan] | None = None
    options: tuple[str, ...] = ()
    resizes: bool = False
    measure: str = ""  # "module:function" of a suite that is no plan of labels and measures by itself; see `measured`


SUITES: dict[str, Suite] = {
    "clean": Suite("accuracy on the images as they are", natural.clean, _PICTURES),
    "imagenet-c": Suite(
        "15 corruptions (19 with extra) at 5 severities: mCE; published files, or generated from clean images",
        corrupted.imagenet_c,
        (*_PICTURES, *_CORRUPTED, "clean_data", "jpeg_quality"),
    ),
    "imagenet-p": Suite(
        "10 perturbation sequences: mFR and top-5 distance; published videos, or generated",
        perturbed.imagenet_p,
        ("crop_pct", "interpolation", "resize", "perturbations", "difficulty", "t5d_reference"),
    ),
    "imagenet-a": Suite("natural adversarial photographs, 200 classes", natural.renditions, _PICTURES[:3]),
    "imagenet-r": Suite("renditions, 200 classes", natural.renditions, _PICTURES[:3]),
    "imagenet-v2": Suite("three newly collected test sets", natural.version2, _PICTURES[:3]),
    "imagenet-real": Suite(
        "ImageNet's validation set with ReaL's labels", natural.reassessed, (*_PICTURES[:3], "labels")
    ),
    "imagenet-sketch": Suite("drawings of the 1,000 classes", natural.sketch, _PICTURES),
    "cifar10-c": Suite("15 corruptions of CIFAR-10", corrupted.cifar_c, (*_PICTURES, *_CORRUPTED), resizes=True),
    "cifar100-c": Suite("15 corruptions of CIFAR-100", corrupted.cifar_c, (*_PICTURES, *_CORRUPTED), resizes=True),
    "occlusion": Suite("the centre, or random patches, hidden", hostile.occlusion, (*_PICTURES, "sizes", "drops")),
    "fgsm": Suite("one gradient step, eps in 1/255", hostile.attack, (*_PICTURES, "eps", "norm")),
    "pgd": Suite(
        "several projected gradient steps, eps in 1/255",
        hostile.attack,
        (*_PICTURES, "eps", "norm", "steps", "step_size", "random_start"),
    ),
    "segmentation": Suite(
        "mIoU, mAcc and aAcc on pictures with masks", options=(*_MASKS, "pictures"), measure=_SEGMENTATION
    ),
    "segmentation-noise": Suite(
        "mIoU under shot noise, Gaussian noise and blur, five repeats",
        options=(*_MASKS, "repeats"),
        measure=_SEGMENTATION,
    ),
    "cityscapes-c": Suite(
        "mIoU under 19 corruptions of any-size pictures at 5 severities; generated, or read from corrupted_data",
        options=(*_MASKS, "corruptions", "severities", "frost", "corrupted_data"),
        measure=_SEGMENTATION,
    ),
    "acdc": Suite(
        "mIoU in fog, at night, in rain and snow, each and together",
        options=(*_MASKS[1:], "pictures"),
        measure=_SEGMENTATION,
    ),
    "detection": Suite(
        "COCO's average precision of boxes and masks",
        options=("split", "pictures"),
        measure="vitfocus.robustness.detection:measure",
    ),
    "answers": Suite(
        "VQAv2's official accuracy of answers to questions about pictures",
        options=("split",),
        measure="vitfocus.robustness.answers:measure",
    ),
    "autoattack": Suite("the AutoAttack ensemble, through its package", hostile.attack, (*_PICTURES, "eps", "norm")),
}


def find_suite(name: str, options: Mapping[str, Any]) -> Suite:
    """A suite by name, its options checked.

    >>> find_suite("imagnet-a", {})
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: There is no suite 'imagnet-a': did you mean 'imagenet-a'?
    """
    if not isinstance(name, str) or name not in SUITES:
        raise VitfocusError(f"There is no suite {name!r}: {nearest(str(name), SUITES)}")
    suite = SUITES[name]
    for option in options:
        if option not in suite.options:
            raise VitfocusError(f"The suite {name} has no option {option!r}: {nearest(option, suite.options)}")
    return suite


def measured(chosen: Suite, asked: Request, options: Mapping[str, Any]) -> Scores:
    """Let a suite that measures by itself do so."""
    module, _, function = chosen.measure.partition(":")
    scores: Scores = getattr(importlib.import_module(module), function)(asked, **options)
    return scores


__all__ = ["OWN", "SUITES", "Context", "Suite", "find_suite", "measured"]
