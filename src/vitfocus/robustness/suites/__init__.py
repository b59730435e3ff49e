"""The evaluation suites: one record per suite, with its options as typed fields.

Everything that lists suites (the command line, shell completion, the documentation) reads these records. This module
imports no torch; the function that plans a suite is imported when the suite is used.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple

from vitfocus.core import only_with
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.only_with import OnlyWith


def _option(text: str, default: Any = None, negate: bool = False) -> Any:
    """A field of an options record: its help text, and its default; None where the data or the model decides.

    With `negate`, the help text is about a switch that sets it to False.
    """
    return field(default=default, metadata={"help": text, "negate": negate})


@dataclass(frozen=True)
class DataForm:
    """What options depend on in the data that a suite was given."""

    resized: bool = True  # pictures, which are resized where they do not fit
    class_folders: bool = True
    published: bool = False  # the suite's own files; corruptions are generated from other data
    drawn: bool = False  # Shapes


_RESIZED = OnlyWith(
    lambda form: form.resized, "is about resizing pictures, and this data is not resized: give pictures"
)
_FOLDERS = OnlyWith(
    lambda form: form.class_folders, "maps class folders to classes, and the data has none: give such a folder"
)
_GENERATED = OnlyWith(
    lambda form: not form.published, "is for generated corruptions, and these files are published: give clean images"
)
_PUBLISHED = OnlyWith(
    lambda form: form.published, "is for published files, and these corruptions are generated: give published files"
)
_READ = OnlyWith(lambda form: not form.drawn, "is about a folder, and Shapes is drawn: give a folder")


def refuse_unused(options: NoOptions, form: DataForm) -> None:
    """Refuse options that have no effect on data of this form; "val" and "shapes" are what Shapes is anyway."""
    declared = only_with.conditions(type(options))
    values = {one.name: (getattr(options, one.name), one.default) for one in fields(options) if one.name in declared}
    given = [
        name
        for name, (value, default) in values.items()
        if value is not False and value not in (default, "val", "shapes")
    ]
    only_with.refuse_unused(given, declared, form)


@dataclass(frozen=True)
class NoOptions:
    """A suite without options."""


@dataclass(frozen=True)
class ImageOptions(NoOptions):
    """How pictures are resized and cropped."""

    crop_pct: Annotated[float | None, _RESIZED] = _option(
        "share of the resized picture that is cropped (default: 0.875)"
    )
    interpolation: Annotated[str | None, _RESIZED] = _option(
        "bilinear or bicubic (default: the suite's, or the model's)"
    )
    resize: Annotated[bool | None, _RESIZED] = _option("take images as they are, without resizing", negate=True)


@dataclass(frozen=True)
class ClassFolderOptions(ImageOptions):
    """Class folders may be mapped to classes by an index file."""

    index: Annotated[str | None, _FOLDERS] = _option("a json that maps class folders to the model's classes")


@dataclass(frozen=True)
class CorruptionOptions(ClassFolderOptions):
    """Which of the common corruptions, at which severities."""

    corruptions: tuple[str, ...] | None = _option("only these corruptions")
    severities: tuple[int, ...] | None = _option("only these severities, 1 to 5")
    extra: bool = _option("the 4 extra corruptions too", False)
    frost: Annotated[str | None, _GENERATED] = _option("the folder of the published frost overlays")


@dataclass(frozen=True)
class ImageNetCOptions(CorruptionOptions):
    """ImageNet-C, published or generated."""

    clean_data: Annotated[str | None, _PUBLISHED] = _option(
        "of published files: the clean validation set, for the relative mCE"
    )
    jpeg_quality: Annotated[int | None, _GENERATED] = _option(
        "generated: save as JPEG after corrupting; the published files are at 85"
    )


@dataclass(frozen=True)
class PerturbationOptions(ImageOptions):
    """ImageNet-P's sequences."""

    perturbations: tuple[str, ...] | None = _option("only these sequences")
    difficulty: int = _option("1, 2 or 3", 1)
    t5d_reference: Mapping[str, float] | None = _option("top-5 distances of a reference model, by perturbation")


@dataclass(frozen=True)
class RealOptions(ImageOptions):
    """Where ReaL's labels come from."""

    labels: str | None = _option("ReaL's own real.json (default: timm's copy)")


@dataclass(frozen=True)
class OcclusionOptions(ClassFolderOptions):
    """How much of the image is hidden."""

    sizes: tuple[int, ...] = _option("sides of the hidden centre, in pixels of 224", (56, 112, 168))
    drops: tuple[int, ...] = _option("how many cells of 14x14 to hide at random", (49, 98, 147))


@dataclass(frozen=True)
class AttackOptions(ClassFolderOptions):
    """The ball that adversarial images stay in."""

    eps: tuple[float, ...] = _option("epsilons in 1/255", (1.0,))
    norm: str = _option("linf or l2", "linf")


@dataclass(frozen=True)
class PGDOptions(AttackOptions):
    """Projected gradient descent."""

    steps: int = _option("number of steps", 5)
    step_size: float | None = _option("length of a step in 1/255 (default: 2.5 eps / steps)")
    random_start: bool = _option("start at the image itself", True, negate=True)


@dataclass(frozen=True)
class MaskOptions(NoOptions):
    """How pictures with masks are read and tested; what is left out, the model's own test settings decide."""

    split: Annotated[str, _READ] = _option("the split by its folder's name (default: val)", "")
    window: int | None = _option("side of the sliding window (default: the model's; 0: whole pictures)")
    stride: int | None = _option("from one window to the next (default: two thirds of the window)")
    flip: bool | None = _option("average with the mirrored pictures")
    short_side: int | None = _option("resize pictures so that this is their short side")
    ignore: int = _option("the label that does not count, of data that is not a folder (default: 255)", 255)


@dataclass(frozen=True)
class ACDCOptions(MaskOptions):
    """ACDC; predictions can be drawn."""

    pictures: str | None = _option("write pictures of the predictions into this folder")


@dataclass(frozen=True)
class LayoutOptions(MaskOptions):
    """A folder of pictures with masks in any layout."""

    source: Annotated[str, _READ] = _option("the folder's layout: ade20k, cityscapes, acdc, camvid, masks", "")


@dataclass(frozen=True)
class SegmentationOptions(LayoutOptions, ACDCOptions):
    """Segmentation of pictures as they are."""


@dataclass(frozen=True)
class SegmentationNoiseOptions(LayoutOptions):
    """Segmentation under noise."""

    repeats: int = _option("how often random noise is drawn, 2 to 10 (default: 5)", 5)


@dataclass(frozen=True)
class CityscapesCOptions(LayoutOptions):
    """Segmentation under the common corruptions."""

    corruptions: tuple[str, ...] | None = _option("only these corruptions")
    severities: tuple[int, ...] | None = _option("only these severities, 1 to 5")
    frost: str | None = _option("the folder of the published frost overlays")
    corrupted_data: str | None = _option("the folder of stored corrupted pictures")


@dataclass(frozen=True)
class VQAOptions(NoOptions):
    """Visual question answering."""

    split: Annotated[str, _READ] = _option("the split by its folder's name (default: val)", "")


@dataclass(frozen=True)
class DetectionOptions(VQAOptions):
    """Detection; what is found can be drawn."""

    pictures: str | None = _option("write pictures of the predictions into this folder")


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
    `engine.Plan`. `data` says what the suite reads, `results` which numbers it gives. With `small_images` the model
    scales the images to its own size after they were corrupted, as CIFAR's 32 pixels need.
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
            "accuracy on the images as they are",
            _CLASS_FOLDERS,
            "top-1, top-5, ECE",
            "photographs:clean",
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
        Suite(
            "imagenet-a",
            "natural adversarial photographs, 200 classes",
            "200 class folders",
            "top-1 among these 200 classes: the other 800 logits are masked, as the result states",
            "photographs:subset_of_classes",
            ImageOptions,
        ),
        Suite(
            "imagenet-r",
            "renditions, 200 classes",
            "200 class folders",
            "top-1 among these 200 classes: the other 800 logits are masked, as the result states",
            "photographs:subset_of_classes",
            ImageOptions,
        ),
        Suite(
            "imagenet-v2",
            "three newly collected test sets",
            "the three `imagenetv2-*-format-val` folders, or one of them",
            "top-1 of each",
            "photographs:imagenet_v2",
            ImageOptions,
        ),
        Suite(
            "imagenet-real",
            "ImageNet's validation set with ReaL's labels",
            "ImageNet's validation photographs",
            "top-1 with ReaL's labels",
            "photographs:imagenet_real",
            RealOptions,
        ),
        Suite(
            "imagenet-sketch",
            "drawings of the 1,000 classes",
            "1,000 class folders",
            "top-1",
            "photographs:imagenet_sketch",
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
            "the centre, or random patches, hidden",
            _CLASS_FOLDERS,
            "top-1 with the centre or random cells set to black",
            "occlusion_and_attacks:occlusion",
            OcclusionOptions,
        ),
        Suite(
            "fgsm",
            "one gradient step, eps in 1/255",
            _CLASS_FOLDERS,
            "top-1 under attack",
            "occlusion_and_attacks:attack",
            AttackOptions,
        ),
        Suite(
            "pgd",
            "several projected gradient steps, eps in 1/255",
            _CLASS_FOLDERS,
            "top-1 under attack",
            "occlusion_and_attacks:attack",
            PGDOptions,
        ),
        Suite(
            "autoattack",
            "the AutoAttack ensemble, through its package",
            _CLASS_FOLDERS,
            "top-1 under the ensemble of [its own package](https://github.com/fra31/auto-attack)",
            "occlusion_and_attacks:attack",
            AttackOptions,
        ),
        Suite(
            "segmentation",
            "mIoU, mAcc and aAcc on pictures with masks",
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
            "mIoU under 19 corruptions of any-size pictures at 5 severities; generated, or read from corrupted_data",
            "Cityscapes, or any images with masks",
            "mIoU on clean images, per corruption (mean over severities), and over all 19",
            "segmentation:corruptions",
            CityscapesCOptions,
            task="segment",
        ),
        Suite(
            "acdc",
            "mIoU in fog, at night, in rain and snow, each and together",
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
            "VQAv2's official accuracy of answers to questions about pictures",
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


def suite_table() -> str:
    """The suites as a Markdown table, as in the documentation; the resizing options that most suites take are left out.

    >>> suite_table().splitlines()[2]
    '| `clean` | class folders | | top-1, top-5, ECE |'
    """
    common = {one.name for one in fields(ClassFolderOptions)}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for suite in SUITES.values():
        options = ", ".join(_described(option) for option in suite.option_list if option.name not in common)
        rows.setdefault((suite.data, options, suite.results), []).append(f"`{suite.name}`")
    lines = ["| suite | data | options | metrics |", "|---|---|---|---|"]
    for (data, options, results), names in rows.items():
        lines.append(f"| {', '.join(names)} | {data} | {options + ' ' if options else ''}| {results} |")
    return "\n".join(lines)


def _described(option: Option) -> str:
    """The name and the default, where there is one to name."""
    if option.type not in (bool, int, float, str):
        return f"`{option.name}` (Python only)"
    default = option.default
    if isinstance(default, bool) or default in (None, ""):
        return f"`{option.name}`"
    return f"`{option.name}` ({', '.join(f'{one}' for one in default) if option.several else default})"


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
