"""Segmentation suites: clean images, the noise of Table 9 of the CB paper, Cityscapes-C, and the weather of ACDC.

Every condition is scored by mIoU, mAcc and aAcc, from the numbers of correct, true and predicted pixels per class and
image. Random noise is repeated with other seeds and reported as the mean and 95 % interval of the repeats; a blur is
deterministic and runs once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from vitfocus.anatomy import unwrap
from vitfocus.anatomy.registry import family_of
from vitfocus.core.arguments import as_list, check_int, parse_digits
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.statistics import evenly_spaced, repeat_interval
from vitfocus.core.tables import counted
from vitfocus.corruptions import fingerprint
from vitfocus.corruptions.base import Draws, Setting, as_ids, to_uint8
from vitfocus.corruptions.filters import gaussian
from vitfocus.corruptions.noise_and_blur import shot_noise
from vitfocus.data.segmentation.batches import stack_by_size, whole_images
from vitfocus.data.segmentation.dataset import (
    CONDITIONS,
    LAYOUTS,
    MaskFiles,
    SegmentationDataset,
    guess_source,
    open_masks,
    stored_corruptions,
)
from vitfocus.data.segmentation.dataset import acdc as acdc_layout
from vitfocus.data.shapes.dataset import shapes_named
from vitfocus.recipes import Data
from vitfocus.robustness.batches import Collated, EvaluationBatch, ItemSource, LoaderSource, Source
from vitfocus.robustness.engine import Condition, EvaluationArguments, EvaluationPlan, Group, ModelResults, Outcome
from vitfocus.robustness.metrics import Summary
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.run_folder import Columns
from vitfocus.robustness.suites import DataForm
from vitfocus.robustness.suites.corruptions import ALL_CORRUPTIONS, chosen_corruptions, corrupted
from vitfocus.tasks.segmentation.evaluation import (
    InferenceSettings,
    class_counts,
    iou_by_class,
    predict,
    scores_of,
    write_images,
    write_submission,
)
from vitfocus.treatments.save_load import task_of

Collected = Mapping[str, Columns]  # one model's outcomes by condition


@dataclass(frozen=True)
class MaskedImages:
    """A source of images with masks, the inference settings, and what is known about the images.

    `paths` are those of the images by position, if they are files.
    """

    source: Source
    test: InferenceSettings
    layout: str = ""
    classes: tuple[str, ...] = ()
    masks: SegmentationDataset | None = None
    paths: tuple[PurePath, ...] = ()


def clean(arguments: EvaluationArguments) -> EvaluationPlan:
    """The images as they are, with the IoU of every class."""
    images = open_masked_images(arguments)
    group = Group("clean", images.source, (_condition(arguments, images, "clean", write=True),))

    def reduce(outcomes: Collected, seed: int) -> ModelResults:
        return ModelResults(_by_class(_counts(outcomes, "clean"), images.classes))

    return _plan(arguments, images, [group], reduce)


def noise(arguments: EvaluationArguments) -> EvaluationPlan:
    """Five kinds of noise, the random ones repeated."""
    repeats = arguments.options.repeats
    if not isinstance(repeats, int) or repeats < 2:
        raise VitfocusError(f"{arguments.suite.name} needs repeats of at least 2 for an interval, not {repeats!r}.")
    repeat_interval([0.0] * repeats)  # refuses a number it has no interval for
    photons = check_int("photons", arguments.options.photons, 1, 1000)
    images = open_masked_images(arguments)
    conditions = [_condition(arguments, images, "clean")]
    for repeat in range(repeats):
        for name in NOISES:
            if repeat == 0 or not name.startswith("blur"):
                change = partial(_noisy, name, arguments.seed + repeat, photons)
                conditions.append(_condition(arguments, images, _repeat(name, repeat), change))
    note = f"Random noise: mean and 95 % interval of {repeats} repeats; clean and blur are deterministic and ran once."
    group = Group("noise", images.source, tuple(conditions))
    reduce = partial(_reduce_noise, images.classes, repeats)
    return _plan(arguments, images, [group], reduce, [note], {"repeats": repeats, "photons": photons})


def corruptions(arguments: EvaluationArguments) -> EvaluationPlan:
    """Corruptions of images of any size: generated, or read from files if a folder contains them.

    By default the protocol of the TAP and ADL paper: 16 types, each the mean over severities 1 to 5, the noises 1 to 3.
    """
    options = arguments.options
    chosen = severities_by_type(options.types, options.corruptions, options.severities)
    images = open_masked_images(arguments)
    conditions = [_condition(arguments, images, "clean")]
    stored_in = options.corrupted_data
    if stored_in is None and isinstance(images.masks, MaskFiles):
        root = images.masks.root  # the corrupted copies may be in the same folder as the clean images
        stored_in = str(root) if any((root / name / str(s[0])).is_dir() for name, s in chosen.items()) else None
    if stored_in is None:
        for name, severities in chosen.items():
            for severity in severities:
                drawn = {"seed": arguments.seed, "flavour": "any", "frost": options.frost}
                change = partial(corrupted, None, name=name, severity=severity, **drawn)
                conditions.append(_condition(arguments, images, f"{name}/{severity}", change))
        groups = [Group("generated", images.source, tuple(conditions))]
        how: dict[str, Any] = {"corruptions": fingerprint("any", options.frost, list(chosen))}
        note = 'Corruptions were generated on the fly, with the flavour "any".'
    else:
        groups = [Group("clean", images.source, tuple(conditions))]
        for name, stored in _stored(stored_in, images, chosen).items():
            source = _file_source(arguments, stored, images.test).source
            groups.append(Group(name, source, (_condition(arguments, images, name),)))
        how, note = {"corruptions": "stored files"}, "Corrupted images were read from files."
    how["severities"] = {name: list(severities) for name, severities in chosen.items()}
    protocol = {_PAPER: "the paper's", _ALL: "the package imagecorruptions'"}
    whole = next((whose for types, whose in protocol.items() if chosen == severities_by_type(types)), "a selection")
    notes = [note, f"Corruptions: {whole}, {counted(len(chosen), 'type')}; each is the mean over its severities."]
    return _plan(arguments, images, groups, partial(_reduce_corruptions, images.classes, chosen), notes, how)


_PAPER, _ALL = "paper", "all"
#: The types of TAP and ADL's Cityscapes-C, in its order.
PAPER_TYPES = (
    *("gaussian_blur", "motion_blur", "glass_blur", "defocus_blur"),
    *("gaussian_noise", "shot_noise", "speckle_noise", "impulse_noise"),
    *("contrast", "jpeg_compression", "saturate", "brightness"),
    *("snow", "fog", "frost", "spatter"),
)


def severities_by_type(
    types: str = _PAPER, corruptions: Sequence[str] | None = None, severities: Sequence[int] | None = None
) -> dict[str, list[int]]:
    """The severities of each corruption: of a set of `types`, or of those named; "snow/2-4" overrides `severities`.

    >>> len(severities_by_type()), severities_by_type()["shot_noise"], len(severities_by_type("all"))
    (16, [1, 2, 3], 19)
    >>> severities_by_type(corruptions=["gaussian_noise", "snow/2-4", "fog/5"])
    {'gaussian_noise': [1, 2, 3], 'snow': [2, 3, 4], 'fog': [5]}
    """
    if types not in (_PAPER, _ALL):
        raise VitfocusError(f"There is no set of corruptions {types!r}: {nearest(str(types), (_PAPER, _ALL))}")
    wanted = (PAPER_TYPES if types == _PAPER else ALL_CORRUPTIONS) if corruptions is None else corruptions
    found: dict[str, list[int]] = {}
    for text in as_list("corruptions", wanted):
        name, slash, listed = str(text).partition("/")
        usual = range(1, 4) if types == _PAPER and name.endswith("noise") else None
        low, _, high = listed.partition("-")
        first, last = parse_digits(low), parse_digits(high or low)
        given = severities if severities is not None else usual
        if slash:
            if first is None or last is None or not first <= last <= 5:
                raise VitfocusError(f"{text!r} does not say at which severities: write {name}/3 or {name}/2-4.")
            given = range(first, last + 1)
        (found[name],) = [chosen_corruptions([name], given)[1]]
    return found


def acdc(arguments: EvaluationArguments) -> EvaluationPlan:
    """ACDC's four conditions, separately and together. The masks of its test split are not published."""
    split = arguments.options.split or "val"
    opened = {name: open_masked_images(arguments, name) for name in CONDITIONS}
    groups = [
        Group(name, images.source, (_condition(arguments, images, name, write=True),))
        for name, images in opened.items()
    ]
    first = opened[CONDITIONS[0]]
    reduce = partial(_reduce_acdc, first.classes)
    notes = ["All conditions together: from the pixel counts of all four."]
    if split == "val":
        notes.append("Split: val. The paper reports test: --split test --submission DIR writes files for the server.")
    plan = _plan(arguments, first, groups, reduce, notes, {"conditions": list(CONDITIONS), "split": split})
    return replace(plan, total=sum)


def _plan(
    arguments: EvaluationArguments,
    images: MaskedImages,
    groups: Sequence[Group],
    reduce: Any,
    notes: Iterable[str] = (),
    more: Mapping[str, Any] | None = None,
) -> EvaluationPlan:
    protocol = {"seed": arguments.seed, "ignore": arguments.options.ignore, "test": vars(images.test), **(more or {})}
    batch = 8 if images.test.short_side else 4
    return EvaluationPlan(tuple(groups), protocol, reduce, tuple(notes), batch_sizes=(batch, 8))


def _inference_settings(arguments: EvaluationArguments) -> InferenceSettings:
    """The inference settings in the options, and otherwise those that the first model was trained with."""
    for model in arguments.models:
        _refuse_other_tasks(model, arguments.suite.name)
    arguments.refuse_unused(DataForm(drawn=shapes_named(arguments.data, 1) is not None))
    options = arguments.options
    given = {name: getattr(options, name) for name in ("window", "stride", "flip", "short_side")}
    test = {**task_of(arguments.models[0].model).get("test", {}), **{k: v for k, v in given.items() if v is not None}}
    if options.window is not None and options.stride is None:
        test["stride"] = 0
    return InferenceSettings(**test)


def _refuse_other_tasks(model: PixelModel, suite: str) -> None:
    """Refuse a model that was trained for another task, and a plain transformer, which is a classifier."""
    task = task_of(model.model).get("task", "segment")
    inner = unwrap(model.model)
    # A user's class may derive from a transformer and segment.
    bare = family_of(inner) is not None and type(inner).__module__.partition(".")[0] in ("timm", "torchvision")
    if task != "segment" or bare:
        kind = f"a {type(inner).__name__}" if bare else f"a model of the task {task}"
        raise VitfocusError(f"{model.name} is {kind}, but {suite} evaluates segmenters (upernet:NAME, segformer:NAME).")


def open_masked_images(arguments: EvaluationArguments, weather: str = "") -> MaskedImages:
    """Images with masks from a folder, Shapes, a data set, or batches; `weather` is a condition of ACDC.

    The layout of a folder is `source`, or guessed from its names, or that of the model's training data, or "masks".
    """
    data, options, suite = arguments.data, arguments.options, arguments.suite.name
    card = task_of(arguments.models[0].model)
    trained_on = str(card.get("source", ""))
    test = _inference_settings(arguments)
    if (length := shapes_named(data, arguments.limit or 0)) is not None:
        drawn = Data(source="shapes", size=int(card.get("size", 0)) or 64, val_length=length)
        return _file_source(arguments, open_masks(drawn, "val"), test, "shapes")
    if arguments.folder is None:
        return MaskedImages(_given_source(arguments), test, trained_on)
    root = arguments.require_folder("images with masks")
    source = "acdc" if suite == "acdc" else options.source
    if source and source not in LAYOUTS:
        raise VitfocusError(f"There is no layout {source!r}: {nearest(source, LAYOUTS)}")
    layout = source or guess_source(root) or (trained_on if trained_on in LAYOUTS else "masks")
    if layout == "acdc":
        masks: SegmentationDataset = MaskFiles(root, acdc_layout(root, "val", options.split, weather))
    else:
        masks = open_masks(Data(source=layout, root=str(root), val_split=options.split), "val")
    for model in arguments.models:
        trained = task_of(model.model).get("classes")
        if trained and masks.classes and list(trained) != list(masks.classes):
            differing = sorted(set(trained) ^ set(masks.classes))[:3] or ["the same names in another order"]
            raise VitfocusError(f"{model.name} was trained on other classes than the data has: {', '.join(differing)}.")
    return _file_source(arguments, masks, test, layout)


def _file_source(
    arguments: EvaluationArguments, masks: SegmentationDataset, test: InferenceSettings, layout: str = ""
) -> MaskedImages:
    """The images of a data set; the id of an image, for random draws, is its path below the root, or its index."""
    pick = evenly_spaced(len(masks), arguments.limit)
    paths = [image.relative_to(masks.root) for image, _ in masks.pairs] if isinstance(masks, MaskFiles) else []
    ids = [path.as_posix() for path in paths] or range(len(masks))
    samples = whole_images(masks, test.short_side)
    source = ItemSource(samples, pick, _collate_by_size, ids=ids, digest=masks.digest(), **arguments.reading)
    picked = tuple(paths[i] for i in pick) if paths else ()
    return MaskedImages(source, test, layout, tuple(masks.classes), masks, picked)


def _given_source(arguments: EvaluationArguments) -> Source:
    """A data set of (image, mask), or batches of them."""
    data, read = arguments.data, partial(_checked_pair, arguments.suite.name)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        pick = evenly_spaced(len(data), arguments.limit)  # type: ignore[arg-type]
        return ItemSource(_DatasetItems(data, read), pick, _collate_by_size, **arguments.reading)
    if not isinstance(data, Iterable):
        raise VitfocusError(
            f"{arguments.suite.name} takes a folder of images with masks, a data set or batches of (image, mask), "
            f"not a {type(data).__name__}."
        )
    return LoaderSource(data, arguments.limit, read)


@dataclass(frozen=True)
class _DatasetItems:
    """The items of a user's data set, checked."""

    data: Any
    read: Any

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = self.data[index][:2]
        images, masks = self.read((torch.as_tensor(image)[None], torch.as_tensor(mask)[None]))
        return images[0], masks[0]


def _checked_pair(suite: str, pair: Any) -> tuple[Tensor, Tensor]:
    images, masks = pair[0], pair[1]
    if images.dtype != torch.uint8 or images.ndim != 4 or masks.shape != images.shape[:1] + images.shape[2:]:
        shapes = f"{images.dtype} {tuple(images.shape)} and {tuple(masks.shape)}"
        raise VitfocusError(f"{suite} takes uint8 images (B, 3, H, W) with masks (B, H, W), not {shapes}.")
    return images, masks


def _collate_by_size(items: list[tuple[Tensor, Tensor]]) -> list[Collated]:
    """One batch for each size of images and masks."""
    return [Collated(*part) for part in stack_by_size(items)]


def _condition(
    arguments: EvaluationArguments, images: MaskedImages, name: str, change: Any = None, write: bool = False
) -> Condition:
    """A condition; with `write`, predictions of the first model are written as images or for a server, if requested."""
    options, layout, paths = arguments.options, images.layout, images.paths
    overlays, submission = (options.pictures, options.submission) if write else (None, None)
    if submission is not None and layout not in ("cityscapes", "acdc"):
        raise VitfocusError("--submission is for Cityscapes and ACDC, whose servers take files of class numbers.")
    if submission is None and isinstance(images.masks, MaskFiles) and images.masks.withheld:
        what = "name a folder with --submission to write predictions for the server" if write else "use --split val"
        raise VitfocusError(f"The masks of this split are withheld, so nothing can be scored: {what}.")

    def write_prediction(position: int, image: Tensor, found: Tensor, mask: Tensor, classes: int) -> None:
        if overlays is not None:
            file = paths[position].with_suffix("").as_posix().replace("/", "_") if paths else f"{position:05d}"
            write_images(str(overlays), file, image, found, mask, classes, layout)
        if submission is not None:
            write_submission(str(submission), paths[position].name, found, layout)

    writers = {arguments.models[0].name: write_prediction} if overlays is not None or submission is not None else {}
    return Condition(name, partial(_segment, images.test, options.ignore, writers), change)


def _segment(
    test: InferenceSettings,
    ignore: int,
    writers: Mapping[str, Any],
    model: PixelModel,
    images: Tensor,
    batch: EvaluationBatch,
) -> Outcome:
    """The numbers of correct, true and predicted pixels per class of each image, (B, 3, classes)."""
    masks = batch.labels
    scores = predict(model, images, test, masks.shape[-2:])
    guess, classes = scores.argmax(1), scores.shape[1]
    try:
        counts = class_counts(masks, guess, classes, ignore)
    except VitfocusError as error:
        raise VitfocusError(str(error).replace("the model", model.name)) from None
    if model.name in writers:
        for position, image, found, mask in zip(batch.positions.tolist(), images, guess, masks, strict=True):
            writers[model.name](position, image, found, mask, classes)
    return {"counts": counts.int()}


def _noisy(name: str, seed: int, photons: int, batch: EvaluationBatch) -> Tensor:
    return add_noise(batch.images, name, seed=seed, ids=batch.ids, photons=photons)


def _counts(outcomes: Collected, condition: str) -> Tensor:
    """The counts of all images together, (3, classes)."""
    return torch.from_numpy(outcomes[condition]["counts"]).sum(0, dtype=torch.int64)


def _percent(counts: Tensor) -> dict[str, float]:
    return {name: 100 * value for name, value in scores_of(counts).items()}


def mean_iou(counts: Tensor) -> float:
    """mIoU in percent, over the classes that occur in truth or prediction, of counts (3, classes).

    >>> mean_iou(torch.tensor([[3, 3, 0], [4, 4, 0], [4, 4, 0]]))
    60.0
    """
    return _percent(counts)["miou"]


def _by_class(counts: Tensor, names: Sequence[str]) -> Summary:
    """mIoU, mAcc, aAcc and the IoU of every class; classes without a name are numbered. Empty without true masks."""
    if not counts[1].any():
        return {"cells": {}}
    scores = _percent(counts)
    labels = [names[k] if k < len(names) else f"class {k}" for k in range(counts.shape[1])]
    classes = {name: None if v is None else 100 * v for name, v in iou_by_class(counts, labels).items()}
    return {**scores, "classes": classes, "cells": {"clean": scores}}


def _reduce_noise(names: Sequence[str], repeats: int, outcomes: Collected, seed: int) -> ModelResults:
    each: dict[str, Summary] = {}
    for name in ("clean", *NOISES):
        repeated = [condition for repeat in range(repeats) if (condition := _repeat(name, repeat)) in outcomes]
        values = [mean_iou(_counts(outcomes, condition)) for condition in repeated]
        each[name] = {"miou": values[0]}
        if len(values) > 1:
            mean, half = repeat_interval(values)
            each[name] = {"miou": mean, "miou_interval": [mean - half, mean + half], "repeats": values}
    return ModelResults({**_by_class(_counts(outcomes, "clean"), names), "cells": each})


def _repeat(name: str, repeat: int) -> str:
    return f"{name}, repeat {repeat + 1}" if repeat else name


def _reduce_corruptions(
    classes: Sequence[str], chosen: Mapping[str, Sequence[int]], outcomes: Collected, seed: int
) -> ModelResults:
    clean_counts = _counts(outcomes, "clean")
    each: dict[str, Summary] = {"clean": _percent(clean_counts)}
    for name, severities in chosen.items():
        by_severity = {str(s): mean_iou(_counts(outcomes, f"{name}/{s}")) for s in severities}
        each[name] = {"miou": sum(by_severity.values()) / len(by_severity), "severities": by_severity}
    mean = sum(each[name]["miou"] for name in chosen) / len(chosen)
    return ModelResults({**_by_class(clean_counts, classes), "miou_corrupted": mean, "cells": each})


def _reduce_acdc(names: Sequence[str], outcomes: Collected, seed: int) -> ModelResults:
    counts = {name: _counts(outcomes, name) for name in outcomes}
    total = torch.stack(list(counts.values())).sum(0)
    each = {name: _percent(some) for name, some in (*counts.items(), ("all", total))}
    return ModelResults({**_by_class(total, names), "cells": each if total[1].any() else {}})


NOISES = ("shot", "gaussian/5", "gaussian/10", "blur/1", "blur/2")


def add_noise(
    images: Tensor,
    name: str,
    seed: int = 0,
    ids: Tensor | Sequence[int | str] | None = None,
    photons: int = 255,
) -> Tensor:
    """Noisy copies of uint8 images (B, 3, H, W), by one of `NOISES`; random draws depend on (seed, id).

    "shot" is Poisson noise where white has `photons` photons, so 255 is Poisson noise of the grey level itself.
    "gaussian/S" adds normal noise of S levels, rounded; "blur/S" is a Gaussian blur of S pixels.

    >>> images = torch.full((1, 3, 16, 16), 100, dtype=torch.uint8)
    >>> bool((add_noise(images, "blur/2") == images).all()), bool((add_noise(images, "shot") == images).all())
    (True, False)
    """
    kind, _, amount = name.partition("/")
    if kind == "blur":
        return to_uint8(gaussian(images, float(amount)) + 0.5)
    draws = Draws(seed, f"segmentation {name}", 0, as_ids(ids, len(images), images.device))
    if kind == "shot":
        return shot_noise(images, Setting(photons, "any"), draws)
    return to_uint8(draws.normal(images.shape[1:]).mul_(float(amount)).add_(images).add_(0.5))


def _stored(folder: str, images: MaskedImages, chosen: Mapping[str, Sequence[int]]) -> dict[str, MaskFiles]:
    """Stored corrupted images by condition; refuses a folder in which some are missing."""
    stored = stored_corruptions(folder, images.masks, ALL_CORRUPTIONS)
    wanted = [(name, severity) for name, severities in chosen.items() for severity in severities]
    missing = [f"{name} at severity {severity}" for name, severity in wanted if (name, severity) not in stored]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise VitfocusError(
            f"{folder} has no images of {', '.join(missing[:3])}{more}; name those it has with --corruptions and "
            "--severities."
        )
    return {f"{name}/{severity}": stored[name, severity] for name, severity in wanted}
