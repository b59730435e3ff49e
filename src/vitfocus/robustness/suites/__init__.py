"""The evaluation suites: one record per suite, with its options as typed fields.

Everything that lists suites (the command line, shell completion, the documentation) reads these records. This module
imports no torch; the function that plans a suite is imported when the suite is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.robustness.suites.options import (
    ACDCOptions,
    AttackOptions,
    CityscapesCOptions,
    ClassFolderOptions,
    CorruptionOptions,
    DetectionOptions,
    ImageNetCOptions,
    ImageOptions,
    NoOptions,
    OcclusionOptions,
    Option,
    PerturbationOptions,
    PGDOptions,
    RealOptions,
    SegmentationNoiseOptions,
    SegmentationOptions,
    VQAOptions,
    options_of,
)


@dataclass(frozen=True)
class Suite:
    """A suite: a published protocol by name.

    `plan` names the function, "module:function" in this package, that turns the arguments of a call into an
    `engine.EvaluationPlan`. `data` says what the suite reads, `results` which numbers it gives. With `small_images` the
    model scales the images to its own size after they were corrupted, as CIFAR's 32 pixels need.
    """

    name: str
    description: str
    data: str
    results: str
    plan: str
    options: type[NoOptions] = NoOptions
    task: str = "classify"
    small_images: bool = False

    @property
    def option_list(self) -> list[Option]:
        """The options in order, with their types.

        >>> [(option.name, option.type.__name__, option.several) for option in SUITES["fgsm"].option_list][-2:]
        [('eps', 'float', True), ('norm', 'str', False)]
        """
        return options_of(self.options)


_CLASS_FOLDERS = "class folders"
_MASKS = (
    "images with masks in a published layout ([tasks](tasks.md)), `shapes`, or a data set or batches of (image, mask)"
)
_MIOU = "mIoU, mAcc, aAcc, IoU per class"

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "clean",
            "accuracy on clean images",
            _CLASS_FOLDERS,
            "top-1, top-5, ECE",
            "imagenet_variants:clean",
            ClassFolderOptions,
        ),
        Suite(
            "imagenet-c",
            "15 corruptions (19 with extra) at 5 severities: mCE; published files, or generated from clean images",
            "published `<corruption>/<severity>/<wnid>/*.JPEG` (never resized), or clean class folders, from which the "
            "corruptions are generated; the notes of the result say which",
            "errors, CE, mCE, relative mCE",
            "corruptions:imagenet_c",
            ImageNetCOptions,
        ),
        Suite(
            "imagenet-p",
            "10 perturbation sequences: mFR and top-5 distance; published videos, or generated",
            "published `<perturbation>/<wnid>/*.mp4` (needs `av` or OpenCV), or clean class folders",
            "flip probability, mFR, top-5 distance",
            "perturbations:imagenet_p",
            PerturbationOptions,
        ),
        *(
            Suite(
                name,
                f"{description}, 200 classes",
                "200 class folders",
                "top-1 among these 200 classes: the other 800 logits are masked, as the result states",
                "imagenet_variants:subset_of_classes",
                ImageOptions,
            )
            for name, description in (
                ("imagenet-a", "natural adversarial photographs"),
                ("imagenet-r", "art, cartoons and other renditions"),
            )
        ),
        Suite(
            "imagenet-v2",
            "three new test sets for ImageNet",
            "the three `imagenetv2-*-format-val` folders, or one of them",
            "top-1 of each",
            "imagenet_variants:imagenet_v2",
            ImageOptions,
        ),
        Suite(
            "imagenet-real",
            "ImageNet's validation set with ReaL's labels",
            "ImageNet's validation photographs",
            "top-1 with ReaL's labels",
            "imagenet_variants:imagenet_real",
            RealOptions,
        ),
        Suite(
            "imagenet-sketch",
            "drawings of the 1,000 classes",
            "1,000 class folders",
            "top-1",
            "imagenet_variants:imagenet_sketch",
            ClassFolderOptions,
        ),
        *(
            Suite(
                f"cifar{classes}-c",
                f"15 corruptions of CIFAR-{classes}",
                "published `.npy` files, or clean 32-px images",
                "errors and their mean, not normalised by AlexNet",
                "corruptions:cifar_c",
                CorruptionOptions,
                small_images=True,
            )
            for classes in (10, 100)
        ),
        Suite(
            "occlusion",
            "accuracy with the centre or random patches hidden",
            _CLASS_FOLDERS,
            "top-1 with the centre or random cells hidden",
            "occlusion_and_attacks:occlusion",
            OcclusionOptions,
        ),
        Suite(
            "fgsm",
            "FGSM attack: one gradient step, epsilon in units of 1/255",
            _CLASS_FOLDERS,
            "top-1 under attack",
            "occlusion_and_attacks:attack",
            AttackOptions,
        ),
        Suite(
            "pgd",
            "PGD attack: several projected gradient steps, epsilon in units of 1/255",
            _CLASS_FOLDERS,
            "top-1 under attack",
            "occlusion_and_attacks:attack",
            PGDOptions,
        ),
        Suite(
            "autoattack",
            "AutoAttack, the ensemble of its own package",
            _CLASS_FOLDERS,
            "top-1 under the ensemble of [its own package](https://github.com/fra31/auto-attack)",
            "occlusion_and_attacks:attack",
            AttackOptions,
        ),
        Suite(
            "segmentation",
            "mIoU, mAcc and aAcc on images with masks",
            _MASKS,
            _MIOU,
            "segmentation:clean",
            SegmentationOptions,
            task="segment",
        ),
        Suite(
            "segmentation-noise",
            "mIoU under shot noise, Gaussian noise and blur, five repeats",
            "like `segmentation`",
            "mIoU on clean images, with shot noise, with Gaussian noise of 5 and 10 levels (mean and 95 % interval "
            "over the repeats) and with blur of 1 and 2 pixels",
            "segmentation:noise",
            SegmentationNoiseOptions,
            task="segment",
        ),
        Suite(
            "cityscapes-c",
            "mIoU under the paper's 16 corruptions, or 19, on images of any size; generated, or stored files",
            "Cityscapes, or any images with masks",
            "mIoU on clean images, per corruption (mean over its severities), and the mean over corruptions",
            "segmentation:corruptions",
            CityscapesCOptions,
            task="segment",
        ),
        Suite(
            "acdc",
            "mIoU in fog, at night, in rain, in snow, and overall",
            "ACDC",
            "mIoU in fog, at night, in rain, in snow, and overall",
            "segmentation:acdc",
            ACDCOptions,
            task="segment",
        ),
        Suite(
            "detection",
            "COCO's average precision of boxes and masks",
            "COCO: `annotations/instances_NAME.json` and the folder NAME; or `shapes`",
            "COCO's box and mask AP, AP50, AP75 and AP by size, crowds ignored; `--out` also writes `detections.json`",
            "detection:detection",
            DetectionOptions,
            task="detect",
        ),
        Suite(
            "answers",
            "official VQAv2 accuracy of answers to questions about images",
            "VQAv2's layout, or `shapes` ([tasks](tasks.md))",
            "VQAv2 accuracy; `--out` also writes `answers.json`",
            "vqa:answers",
            VQAOptions,
            task="answer",
        ),
    )
}

#: The suite that evaluates a saved model on its own task, by the task's name.
TASK_SUITES = {"classify": "clean", "segment": "segmentation", "detect": "detection", "answer": "answers"}


def switches() -> dict[str, tuple[Option, list[str]]]:
    """The options that a command line can give, by name, each with the suites that take it.

    >>> option, suites = switches()["repeats"]
    >>> option.type, option.default, suites
    (<class 'int'>, 5, ['segmentation-noise'])
    """
    found: dict[str, tuple[Option, list[str]]] = {}
    for suite in SUITES.values():
        for option in suite.option_list:
            if option.type in (bool, int, float, str):
                found.setdefault(option.name, (option, []))[1].append(suite.name)
    return found


def find_suite(name: str, options: Mapping[str, Any]) -> tuple[Suite, NoOptions]:
    """A suite by name, and its options as a record; those that are None take their defaults.

    >>> find_suite("imagnet-a", {})
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: There is no suite 'imagnet-a': did you mean 'imagenet-a'?
    """
    if not isinstance(name, str) or name not in SUITES:
        raise VitfocusError(f"There is no suite {name!r}: {nearest(str(name), SUITES)}")
    suite = SUITES[name]
    known = [one.name for one in fields(suite.options)]
    for option in options:
        if option not in known:
            raise VitfocusError(f"The suite {name} has no option {option!r}: {nearest(option, known)}")
    return suite, suite.options(**{option: value for option, value in options.items() if value is not None})
