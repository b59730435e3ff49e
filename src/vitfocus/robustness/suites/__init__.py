"""The evaluation suites: one record per suite, with its options as typed fields.

The command line, shell completion and `evaluate` read these records. This module imports no torch; the function that
plans a suite is imported when the suite is used.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple

from vitfocus.core.arguments import OnlyWith
from vitfocus.core.errors import VitfocusError, nearest


def _option(text: str, default: Any = None, negate: bool = False) -> Any:
    """A field of an options record: its help text, and its default; None where the data or the model decides.

    With `negate`, the help text is about a switch that sets it to False.
    """
    return field(default=default, metadata={"help": text, "negate": negate})


@dataclass(frozen=True)
class DataForm:
    """The properties of the data that options depend on."""

    resized: bool = True  # image files or PIL images, which are resized to the size of the model
    class_folders: bool = True
    published: bool = False  # the published files of the suite; from other data, corruptions are generated
    drawn: bool = False  # the built-in data set Shapes


_RESIZED = OnlyWith(
    lambda form: form.resized, "is about resizing images, and this data is not resized: pass image files or PIL images"
)
_FOLDERS = OnlyWith(
    lambda form: form.class_folders, "maps class folders to classes, and the data has none: pass such a folder"
)
_GENERATED = OnlyWith(
    lambda form: not form.published, "is for generated corruptions, and these files are published: pass clean images"
)
_PUBLISHED = OnlyWith(
    lambda form: form.published, "is for published files, and these corruptions are generated: pass published files"
)
_READ = OnlyWith(lambda form: not form.drawn, "is about a folder, and Shapes is generated: pass a folder")


@dataclass(frozen=True)
class SuiteOptions:
    """A suite without options."""


@dataclass(frozen=True)
class ImageOptions(SuiteOptions):
    """How images are resized and cropped."""

    crop_pct: Annotated[float | None, _RESIZED] = _option(
        "share of the resized image that the crop keeps (default: 0.875)"
    )
    interpolation: Annotated[str | None, _RESIZED] = _option(
        "bilinear or bicubic (default: that of the suite or the model)"
    )
    resize: Annotated[bool | None, _RESIZED] = _option("do not resize images", negate=True)


@dataclass(frozen=True)
class ClassFolderOptions(ImageOptions):
    """Class folders may be mapped to classes by an index file."""

    index: Annotated[str | None, _FOLDERS] = _option("JSON file that maps class folders to the classes of the model")


@dataclass(frozen=True)
class CorruptionOptions(ClassFolderOptions):
    """Which of the common corruptions, at which severities."""

    corruptions: tuple[str, ...] | None = _option("only these corruptions")
    severities: tuple[int, ...] | None = _option("only these severities (1 to 5)")
    extra: bool = _option("add the 4 extra corruptions", False)
    frost: Annotated[str | None, _GENERATED] = _option("folder of the published frost overlays")


@dataclass(frozen=True)
class ImageNetCOptions(CorruptionOptions):
    """ImageNet-C, published or generated."""

    clean_data: Annotated[str | None, _PUBLISHED] = _option(
        "clean validation set for the relative mCE, with published files"
    )
    jpeg_quality: Annotated[int | None, _GENERATED] = _option(
        "compress generated images as JPEG with this quality; the published files have 85"
    )


@dataclass(frozen=True)
class PerturbationOptions(ImageOptions):
    """ImageNet-P's sequences."""

    perturbations: tuple[str, ...] | None = _option("only these sequences")
    difficulty: int = _option("difficulty 1, 2 or 3 (default: 1)", 1)
    t5d_reference: Mapping[str, float] | None = _option("top-5 distances of a reference model, by perturbation")


@dataclass(frozen=True)
class RealOptions(ImageOptions):
    """Where ReaL's labels come from."""

    labels: str | None = _option("file with ReaL's labels, real.json (default: timm's copy)")


@dataclass(frozen=True)
class OcclusionOptions(ClassFolderOptions):
    """How much of the image is hidden."""

    sizes: tuple[int, ...] = _option("side lengths of the hidden centre, in pixels at 224", (56, 112, 168))
    drops: tuple[int, ...] = _option("numbers of cells of a 14x14 grid to hide at random", (49, 98, 147))
    fill: str = _option(
        "fill of the hidden area: black (default), or mean: the model's mean, 0 once normalised", "black"
    )


@dataclass(frozen=True)
class AttackOptions(ClassFolderOptions):
    """The ball that adversarial images stay in."""

    eps: tuple[float, ...] = _option("epsilons in units of 1/255 (default: 1)", (1.0,))
    norm: str = _option("linf or l2 (default: linf)", "linf")


@dataclass(frozen=True)
class PGDOptions(AttackOptions):
    """Projected gradient descent."""

    steps: int = _option("number of steps (default: 5)", 5)
    step_size: float | None = _option("step size in units of 1/255 (default: 2.5 eps / steps)")
    random_start: bool = _option("start at the image instead of a random point", True, negate=True)


@dataclass(frozen=True)
class MaskOptions(SuiteOptions):
    """How images with masks are read and tested; the defaults are the test settings of the model."""

    split: Annotated[str, _READ] = _option("name of the split (default: val)", "")
    window: int | None = _option("side of the sliding window (default: the model's; 0: whole images)")
    stride: int | None = _option("stride of the sliding window (default: two thirds of the window)")
    flip: bool | None = _option("average with the predictions for the flipped images")
    short_side: int | None = _option("resize images to this shorter side")
    ignore: int = _option("label to ignore in data that is not a folder (default: 255)", 255)


@dataclass(frozen=True)
class ACDCOptions(MaskOptions):
    """ACDC; predictions can be drawn, or written as the benchmark's server takes them."""

    pictures: str | None = _option("folder for images of the predictions")
    submission: str | None = _option(
        "folder for predictions in the format of Cityscapes' and ACDC's evaluation servers"
    )


@dataclass(frozen=True)
class LayoutOptions(MaskOptions):
    """A folder of images with masks in any layout."""

    source: Annotated[str, _READ] = _option("layout of the folder: ade20k, cityscapes, acdc, camvid or masks", "")


@dataclass(frozen=True)
class SegmentationOptions(LayoutOptions, ACDCOptions):
    """Segmentation of clean images."""


@dataclass(frozen=True)
class SegmentationNoiseOptions(LayoutOptions):
    """Segmentation under noise."""

    repeats: int = _option("number of draws of random noise, 2 to 10 (default: 5)", 5)
    photons: int = _option("photons of a white pixel in shot noise (default: 255)", 255)


@dataclass(frozen=True)
class CityscapesCOptions(LayoutOptions):
    """Segmentation under the common corruptions."""

    types: str = _option("paper (default): 16 types, the noises at severities 1 to 3; all: 19 at 1 to 5", "paper")
    corruptions: tuple[str, ...] | None = _option("only these corruptions; snow/2-4 also says at which severities")
    severities: tuple[int, ...] | None = _option("only these severities (1 to 5)")
    frost: str | None = _option("folder of the published frost overlays")
    corrupted_data: str | None = _option("folder of stored corrupted images (default: generated)")


@dataclass(frozen=True)
class VQAOptions(SuiteOptions):
    """Visual question answering."""

    split: Annotated[str, _READ] = _option("name of the split (default: val)", "")


@dataclass(frozen=True)
class DetectionOptions(VQAOptions):
    """Detection; predictions can be drawn."""

    pictures: str | None = _option("folder for images of the predictions")


class Option(NamedTuple):
    """One option of a suite, as a command line needs it: `several` values of `type`, or one; `negate`: --no-NAME."""

    name: str
    type: type
    several: bool
    default: Any
    help: str
    negate: bool = False


@dataclass(frozen=True)
class Suite:
    """A suite: a published protocol by name.

    `plan` names the function, "module:function" in this package, that turns the arguments of a call into an
    `engine.EvaluationPlan`. With `small_images` the model scales the images to its own size after they were corrupted,
    as is usual for CIFAR's 32 pixels.
    """

    name: str
    description: str
    plan: str
    options: type[SuiteOptions] = SuiteOptions
    task: str = "classify"
    small_images: bool = False

    @property
    def option_list(self) -> list[Option]:
        """The options in order, with their types.

        >>> [(option.name, option.type.__name__, option.several) for option in SUITES["fgsm"].option_list][-2:]
        [('eps', 'float', True), ('norm', 'str', False)]
        """
        hints = typing.get_type_hints(self.options)
        found = []
        for one in fields(self.options):
            kind = hints[one.name]
            if typing.get_origin(kind) is types.UnionType:  # "float | None"
                kind = typing.get_args(kind)[0]
            several = typing.get_origin(kind) is tuple
            plain = typing.get_args(kind)[0] if several else typing.get_origin(kind) or kind
            found.append(Option(one.name, plain, several, one.default, **one.metadata))
        return found


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("clean", "accuracy on clean images", "imagenet_variants:clean", ClassFolderOptions),
        Suite(
            "imagenet-c",
            "15 corruptions (19 with extra) at 5 severities: mCE; published files, or generated from clean images",
            "corruptions:imagenet_c",
            ImageNetCOptions,
        ),
        Suite(
            "imagenet-p",
            "10 perturbation sequences: mFR and top-5 distance; published videos, or generated",
            "perturbations:imagenet_p",
            PerturbationOptions,
        ),
        Suite(
            "imagenet-a",
            "natural adversarial photographs, 200 classes",
            "imagenet_variants:subset_of_classes",
            ImageOptions,
        ),
        Suite(
            "imagenet-r",
            "art, cartoons and other renditions, 200 classes",
            "imagenet_variants:subset_of_classes",
            ImageOptions,
        ),
        Suite("imagenet-v2", "three new test sets for ImageNet", "imagenet_variants:imagenet_v2", ImageOptions),
        Suite(
            "imagenet-real",
            "ImageNet's validation set with ReaL's labels",
            "imagenet_variants:imagenet_real",
            RealOptions,
        ),
        Suite(
            "imagenet-sketch", "drawings of the 1,000 classes", "imagenet_variants:imagenet_sketch", ClassFolderOptions
        ),
        *(
            Suite(
                f"cifar{classes}-c",
                f"15 corruptions of CIFAR-{classes}",
                "corruptions:cifar_c",
                CorruptionOptions,
                small_images=True,
            )
            for classes in (10, 100)
        ),
        Suite(
            "occlusion",
            "accuracy with the centre or random patches hidden",
            "occlusion_and_attacks:occlusion",
            OcclusionOptions,
        ),
        Suite(
            "fgsm",
            "FGSM attack: one gradient step, epsilon in units of 1/255",
            "occlusion_and_attacks:attack",
            AttackOptions,
        ),
        Suite(
            "pgd",
            "PGD attack: several projected gradient steps, epsilon in units of 1/255",
            "occlusion_and_attacks:attack",
            PGDOptions,
        ),
        Suite(
            "autoattack", "AutoAttack, the ensemble of its own package", "occlusion_and_attacks:attack", AttackOptions
        ),
        Suite(
            "segmentation",
            "mIoU, mAcc and aAcc on images with masks",
            "segmentation:clean",
            SegmentationOptions,
            "segment",
        ),
        Suite(
            "segmentation-noise",
            "mIoU under shot noise, Gaussian noise and blur, five repeats",
            "segmentation:noise",
            SegmentationNoiseOptions,
            "segment",
        ),
        Suite(
            "cityscapes-c",
            "mIoU under the paper's 16 corruptions, or 19, on images of any size; generated, or stored files",
            "segmentation:corruptions",
            CityscapesCOptions,
            "segment",
        ),
        Suite(
            "acdc", "mIoU in fog, at night, in rain, in snow, and overall", "segmentation:acdc", ACDCOptions, "segment"
        ),
        Suite(
            "detection",
            "COCO's average precision of boxes and masks",
            "detection:detection",
            DetectionOptions,
            "detect",
        ),
        Suite(
            "answers",
            "official VQAv2 accuracy of answers to questions about images",
            "vqa:answers",
            VQAOptions,
            "answer",
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


def find_suite(name: str, options: Mapping[str, Any]) -> tuple[Suite, SuiteOptions]:
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
