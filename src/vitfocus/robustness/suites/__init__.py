"""The suites by name: what each is, which options it takes, and the function that lays it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vitfocus.errors import VitfocusError, nearest
from vitfocus.robustness.plan import Plan
from vitfocus.robustness.suites import corrupted, hostile, natural, perturbed
from vitfocus.robustness.suites.context import Context

_PICTURES = ("crop_pct", "interpolation", "resize", "index")
_CORRUPTED = ("corruptions", "severities", "extra", "frost")


@dataclass(frozen=True)
class Suite:
    """One suite: `resizes` lets the model enlarge images itself, as CIFAR's 32 pixels need."""

    about: str
    plan: Callable[[Context], Plan]
    options: tuple[str, ...] = ()
    resizes: bool = False


def _measured_apart(context: Context) -> Plan:
    """Maps of classes do not fit a plan of labels: `segmentation.py` measures them itself."""
    raise AssertionError(f"{context.suite} has no plan")


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
    "segmentation-noise": Suite(
        "mIoU under shot noise, Gaussian noise and blur, five repeats; data of (image, mask), from Python",
        _measured_apart,
        ("repeats", "ignore"),
    ),
    "autoattack": Suite("the AutoAttack ensemble, through its package", hostile.attack, (*_PICTURES, "eps", "norm")),
}


def find_suite(name: str, options: Mapping[str, Any]) -> Suite:
    """A suite by name, its options checked.

    >>> find_suite("imagnet-a", {})
    Traceback (most recent call last):
    vitfocus.errors.VitfocusError: There is no suite 'imagnet-a': did you mean 'imagenet-a'?
    """
    if not isinstance(name, str) or name not in SUITES:
        raise VitfocusError(f"There is no suite {name!r}: {nearest(str(name), SUITES)}")
    suite = SUITES[name]
    for option in options:
        if option not in suite.options:
            raise VitfocusError(f"The suite {name} has no option {option!r}: {nearest(option, suite.options)}")
    return suite


__all__ = ["SUITES", "Context", "Suite", "find_suite"]
