"""Segmentation suites: as it is, under the noise of Context Broadcasting's Table 9, Cityscapes-C, and ACDC's weather.

Every condition is scored by mIoU, mAcc and aAcc, from each picture's counts of right, true and predicted pixels per
class. Random noise is drawn anew for each repeat, and its mean is given with the 95 % interval of the repeats; a blur
draws nothing and runs once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from vitfocus.anatomy import unwrap
from vitfocus.anatomy.registry import family_of
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.statistics import evenly_spaced, repeat_interval
from vitfocus.corruptions import corrupt, fingerprint
from vitfocus.corruptions.constants import Setting
from vitfocus.corruptions.draws import Draws, as_ids
from vitfocus.corruptions.filters import gaussian, to_uint8
from vitfocus.corruptions.noise_and_blur import shot_noise
from vitfocus.data.segmentation.batches import WholeImages
from vitfocus.data.segmentation.dataset import (
    CONDITIONS,
    LAYOUTS,
    Layout,
    MaskFiles,
    Pair,
    SegmentationDataset,
    guess_source,
    open_masks,
)
from vitfocus.data.segmentation.dataset import acdc as acdc_layout
from vitfocus.data.shapes.dataset import shapes_named
from vitfocus.recipes.settings import Data
from vitfocus.robustness.engine import Condition, EvaluationArguments, Group, Outcome, Plan, Reduced
from vitfocus.robustness.metrics import Summary
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.run_folder import Columns
from vitfocus.robustness.sources import Collated, EvaluationBatch, ItemSource, Source, StreamSource
from vitfocus.robustness.suites.corruptions import ALL_CORRUPTIONS, chosen_corruptions
from vitfocus.robustness.suites.options import DataForm, refuse_unused
from vitfocus.tasks.segmentation.evaluation import (
    InferenceSettings,
    class_counts,
    iou_by_class,
    predict,
    scores_of,
    write_pictures,
)
from vitfocus.treatments.save_load import task_of

Collected = Mapping[str, Columns]  # one model's outcomes by condition


@dataclass(frozen=True)
class MaskedPictures:
    """A source of pictures with masks: class names, the layout, pictures' names by position, the set itself."""

    source: Source
    classes: tuple[str, ...] = ()
    layout: str = ""
    names: tuple[str, ...] = ()
    masks: SegmentationDataset | None = None


@dataclass(frozen=True)
class _Drawing:
    """Where to write pictures of one model's predictions, and what to call them."""

    folder: str
    model: str
    pictures: MaskedPictures


def clean(arguments: EvaluationArguments) -> Plan:
    """The pictures as they are, with every class's IoU."""
    test, pictures = _test_protocol(arguments), open_pictures(arguments)
    groups = [Group("clean", pictures.source, (_condition(arguments, test, pictures, "clean", draw=True),))]
    return _plan(arguments, test, groups, partial(_reduce_clean, pictures.classes))


def noise(arguments: EvaluationArguments) -> Plan:
    """Five kinds of noise, the random ones repeated."""
    repeats = arguments.options.repeats
    if not isinstance(repeats, int) or repeats < 2:
        raise VitfocusError(f"{arguments.suite.name} needs repeats of at least 2 for an interval, not {repeats!r}.")
    repeat_interval([0.0] * repeats)  # refuses a number it has no interval for
    test, pictures = _test_protocol(arguments), open_pictures(arguments)
    conditions = [_condition(arguments, test, pictures, "clean")]
    for repeat in range(repeats):
        for name in NOISES:
            if repeat == 0 or not name.startswith("blur"):
                change = partial(_noisy, name, arguments.seed + repeat)
                conditions.append(_condition(arguments, test, pictures, _repeat(name, repeat), change))
    note = f"Random noises: mean and 95 % interval of {repeats} repeats; clean and blur draw nothing and ran once."
    group = Group("noise", pictures.source, tuple(conditions))
    return _plan(
        arguments, test, [group], partial(_reduce_noise, pictures.classes, repeats), [note], {"repeats": repeats}
    )


def corruptions(arguments: EvaluationArguments) -> Plan:
    """Corruptions of any-size pictures at five severities: generated, or read where a folder holds them."""
    options = arguments.options
    names, severities = chosen_corruptions(options.corruptions, options.severities, ALL_CORRUPTIONS)
    test, pictures = _test_protocol(arguments), open_pictures(arguments)
    conditions = [_condition(arguments, test, pictures, "clean")]
    if options.corrupted_data is None:
        for name in names:
            for severity in severities:
                change = partial(_corrupted, name, severity, arguments.seed, options.frost)
                conditions.append(_condition(arguments, test, pictures, f"{name}/{severity}", change))
        groups = [Group("generated", pictures.source, tuple(conditions))]
        how: dict[str, Any] = {"corruptions": fingerprint("any", options.frost, names)}
        note = "Corruptions were generated here, by the any-size flavour."
    else:
        groups = [Group("clean", pictures.source, tuple(conditions))]
        for name, stored in _stored(options.corrupted_data, pictures, names, severities).items():
            source = _file_source(arguments, stored, test.short_side).source
            groups.append(Group(name, source, (_condition(arguments, test, pictures, name),)))
        how, note = {"corruptions": "stored files"}, "Corrupted pictures were read from files."
    reduce = partial(_reduce_corruptions, pictures.classes, names, severities)
    return _plan(arguments, test, groups, reduce, [note], how)


def acdc(arguments: EvaluationArguments) -> Plan:
    """ACDC's four conditions, each and together."""
    test = _test_protocol(arguments)
    opened = {name: open_pictures(arguments, name) for name in CONDITIONS}
    groups = [
        Group(name, pictures.source, (_condition(arguments, test, pictures, name, draw=True),))
        for name, pictures in opened.items()
    ]
    reduce = partial(_reduce_acdc, opened[CONDITIONS[0]].classes)
    note = "Together: one set of counts over all four conditions."
    plan = _plan(arguments, test, groups, reduce, [note], {"conditions": list(CONDITIONS)})
    return replace(plan, total=sum)


def _plan(
    arguments: EvaluationArguments,
    test: InferenceSettings,
    groups: Sequence[Group],
    reduce: Any,
    notes: Iterable[str] = (),
    more: Mapping[str, Any] | None = None,
) -> Plan:
    protocol = {"seed": arguments.seed, "ignore": arguments.options.ignore, "test": vars(test), **(more or {})}
    batch = 8 if test.short_side else 4
    return Plan(tuple(groups), protocol, reduce, tuple(notes), batch_sizes=(batch, 8))


def _test_protocol(arguments: EvaluationArguments) -> InferenceSettings:
    """How pictures are tested: the options, and what they leave open as the first model was trained to be tested."""
    for model in arguments.models:
        _refuse_other_tasks(model, arguments.suite.name)
    refuse_unused(arguments.options, DataForm(drawn=shapes_named(arguments.data, 1) is not None))
    options = arguments.options
    given = {name: getattr(options, name) for name in ("window", "stride", "flip", "short_side")}
    test = {**task_of(arguments.models[0].model).get("test", {}), **{k: v for k, v in given.items() if v is not None}}
    if options.window is not None and options.stride is None:
        test["stride"] = 0
    return InferenceSettings(**test)


def _refuse_other_tasks(model: PixelModel, suite: str) -> None:
    """Refuse what is not a segmenter: a model trained for another task, or a bare transformer, which classifies."""
    task = task_of(model.model).get("task", "segment")
    inner = unwrap(model.model)
    # A user's class may derive from a transformer and segment.
    bare = family_of(inner) is not None and type(inner).__module__.partition(".")[0] in ("timm", "torchvision")
    if task != "segment" or bare:
        kind = f"a {type(inner).__name__}" if bare else f"a model of the task {task}"
        raise VitfocusError(f"{model.name} is {kind}, and {suite} measures segmenters (upernet:NAME, segformer:NAME).")


def open_pictures(arguments: EvaluationArguments, weather: str = "") -> MaskedPictures:
    """Pictures with masks from whatever the data is: a folder, Shapes, a data set, or batches; `weather` is ACDC's.

    A folder's layout is `source`, or told by its names, or that of what the model was trained on, or plain masks.
    """
    data, options, suite = arguments.data, arguments.options, arguments.suite.name
    card = task_of(arguments.models[0].model)
    trained_on = str(card.get("source", ""))
    short_side = _test_protocol(arguments).short_side
    if (length := shapes_named(data, arguments.limit or 0)) is not None:
        drawn = Data(source="shapes", size=int(card.get("size", 0)) or 64, val_length=length)
        return _file_source(arguments, open_masks(drawn, "val"), short_side, "shapes")
    if arguments.folder is None:
        return MaskedPictures(_given_source(arguments), layout=trained_on)
    root = arguments.require_folder("pictures with masks")
    source = "acdc" if suite == "acdc" else options.source
    if source and source not in LAYOUTS:
        raise VitfocusError(f"There is no layout {source!r}: {nearest(source, LAYOUTS)}")
    layout = source or guess_source(root) or (trained_on if trained_on in LAYOUTS else "masks")
    if layout == "acdc":
        masks: SegmentationDataset = MaskFiles(root, acdc_layout(root, "val", options.split, weather))
    else:
        masks = open_masks(Data(source=layout, root=str(root), val_split=options.split), "val")
    return _file_source(arguments, masks, short_side, layout)


def _file_source(
    arguments: EvaluationArguments, masks: SegmentationDataset, short_side: int, layout: str = ""
) -> MaskedPictures:
    """A numbered set; draws belong to a file's path below the root, or to its number."""
    pick = evenly_spaced(len(masks), arguments.limit)
    ids: list[Any] = list(range(len(masks)))
    if isinstance(masks, MaskFiles):
        ids = [picture.relative_to(masks.root).as_posix() for picture, _ in masks.pairs]
    samples = WholeImages(masks, short_side)
    source = ItemSource(samples, pick, _collate_by_size, ids=ids, digest=masks.digest(), **arguments.reading)
    names = tuple(ids[i].rpartition(".")[0].replace("/", "_") for i in pick) if isinstance(masks, MaskFiles) else ()
    return MaskedPictures(source, tuple(masks.classes), layout, names, masks)


def _given_source(arguments: EvaluationArguments) -> Source:
    """A data set of (image, mask), or batches of them."""
    data, read = arguments.data, partial(_checked_pair, arguments.suite.name)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        pick = evenly_spaced(len(data), arguments.limit)  # type: ignore[arg-type]
        return ItemSource(_DatasetItems(data, read), pick, _collate_by_size, **arguments.reading)
    if not isinstance(data, Iterable | DataLoader):
        raise VitfocusError(
            f"{arguments.suite.name} takes a folder of pictures with masks, a data set or batches of (image, mask), "
            f"not a {type(data).__name__}."
        )
    return StreamSource(data, arguments.limit, read)


@dataclass(frozen=True)
class _DatasetItems:
    """A user's data set, item by item."""

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
    """One batch for each size of pictures and masks."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, (image, mask) in enumerate(items):
        groups.setdefault((image.shape, mask.shape), []).append(row)
    return [
        Collated(rows, torch.stack([items[row][0] for row in rows]), torch.stack([items[row][1] for row in rows]))
        for rows in groups.values()
    ]


def _condition(
    arguments: EvaluationArguments,
    test: InferenceSettings,
    pictures: MaskedPictures,
    name: str,
    change: Any = None,
    draw: bool = False,
) -> Condition:
    folder = arguments.options.pictures if draw else None
    drawing = None if folder is None else _Drawing(str(folder), arguments.models[0].name, pictures)
    return Condition(name, partial(_segment, test, arguments.options.ignore, drawing), change)


def _segment(
    test: InferenceSettings,
    ignore: int,
    drawing: _Drawing | None,
    model: PixelModel,
    images: Tensor,
    batch: EvaluationBatch,
) -> Outcome:
    """Each picture's pixels per class: right, true and predicted, (B, 3, classes)."""
    masks = batch.labels
    scores = predict(model, images, test, masks.shape[-2:])
    guess, classes = scores.argmax(1), scores.shape[1]
    try:
        counts = class_counts(masks, guess, classes, ignore)
    except VitfocusError as error:
        raise VitfocusError(str(error).replace("the model", model.name)) from None
    if drawing is not None and drawing.model == model.name:
        known = drawing.pictures.names
        for position, image, found, mask in zip(batch.positions.tolist(), images, guess, masks, strict=True):
            name = known[position] if known else f"{position:05d}"
            write_pictures(drawing.folder, name, image, found, mask, classes, drawing.pictures.layout)
    return {"counts": counts.int()}


def _noisy(name: str, seed: int, batch: EvaluationBatch) -> Tensor:
    return add_noise(batch.images, name, seed=seed, ids=batch.ids)


def _corrupted(name: str, severity: int, seed: int, frost: str | None, batch: EvaluationBatch) -> Tensor:
    return corrupt(batch.images, name, severity, seed=seed, ids=batch.ids, flavour="any", frost=frost)


def _counts(outcomes: Collected, condition: str) -> Tensor:
    """The counts of all pictures together, (3, classes)."""
    return torch.from_numpy(outcomes[condition]["counts"]).sum(0, dtype=torch.int64)


def _percent(counts: Tensor) -> dict[str, float]:
    return {name: 100 * value for name, value in scores_of(counts).items()}


def mean_iou(counts: Tensor) -> float:
    """mIoU in percent, over the classes that occur in truth or prediction, of counts (3, classes).

    >>> mean_iou(torch.tensor([[3, 3, 0], [4, 4, 0], [4, 4, 0]]))
    60.0
    """
    return 100 * scores_of(counts)["miou"]


def _by_class(counts: Tensor, names: Sequence[str]) -> Summary:
    """mIoU, mAcc and aAcc with every class's IoU; classes without a name are numbered."""
    scores = _percent(counts)
    labels = [names[k] if k < len(names) else f"class {k}" for k in range(counts.shape[1])]
    classes = {name: None if v is None else 100 * v for name, v in iou_by_class(counts, labels).items()}
    return {**scores, "classes": classes, "cells": {"clean": scores}}


def _reduce_clean(names: Sequence[str], outcomes: Collected, seed: int) -> Reduced:
    return Reduced(_by_class(_counts(outcomes, "clean"), names))


def _reduce_noise(names: Sequence[str], repeats: int, outcomes: Collected, seed: int) -> Reduced:
    cells: dict[str, Summary] = {}
    for name in ("clean", *NOISES):
        listed = [one for repeat in range(repeats) if (one := _repeat(name, repeat)) in outcomes]
        values = [mean_iou(_counts(outcomes, one)) for one in listed]
        cells[name] = {"miou": values[0]}
        if len(values) > 1:
            mean, half = repeat_interval(values)
            cells[name] = {"miou": mean, "miou_interval": [mean - half, mean + half], "repeats": values}
    return Reduced({**_by_class(_counts(outcomes, "clean"), names), "cells": cells})


def _repeat(name: str, repeat: int) -> str:
    return f"{name}, repeat {repeat + 1}" if repeat else name


def _reduce_corruptions(
    classes: Sequence[str], names: Sequence[str], severities: Sequence[int], outcomes: Collected, seed: int
) -> Reduced:
    clean_counts = _counts(outcomes, "clean")
    cells: dict[str, Summary] = {"clean": _percent(clean_counts)}
    for name in names:
        by_severity = {str(s): mean_iou(_counts(outcomes, f"{name}/{s}")) for s in severities}
        cells[name] = {"miou": sum(by_severity.values()) / len(by_severity), "severities": by_severity}
    mean = sum(cells[name]["miou"] for name in names) / len(names)
    return Reduced({**_by_class(clean_counts, classes), "miou_corrupted": mean, "cells": cells})


def _reduce_acdc(names: Sequence[str], outcomes: Collected, seed: int) -> Reduced:
    each = {name: _counts(outcomes, name) for name in outcomes}
    total = torch.stack(list(each.values())).sum(0)
    cells = {name: _percent(counts) for name, counts in (*each.items(), ("all", total))}
    return Reduced({**_by_class(total, names), "cells": cells})


NOISES = ("shot", "gaussian/5", "gaussian/10", "blur/1", "blur/2")
REPEATS = 5


def add_noise(images: Tensor, name: str, seed: int = 0, ids: Tensor | Sequence[int | str] | None = None) -> Tensor:
    """Noisy copies of uint8 images (B, 3, H, W): one of `NOISES`; draws belong to (seed, id).

    "shot" draws every value from the Poisson law of its own grey level; "gaussian/S" adds normal noise of S levels,
    rounded; "blur/S" is a Gaussian blur of S pixels.

    >>> images = torch.full((1, 3, 16, 16), 100, dtype=torch.uint8)
    >>> bool((add_noise(images, "blur/2") == images).all()), bool((add_noise(images, "shot") == images).all())
    (True, False)
    """
    if name not in NOISES:
        raise VitfocusError(f"There is no noise {name!r}: {nearest(name, NOISES)}")
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise VitfocusError(f"Images are {images.dtype} of shape {tuple(images.shape)}; expected uint8, (B, 3, H, W).")
    kind, _, amount = name.partition("/")
    if kind == "blur":
        return to_uint8(gaussian(images, float(amount)) + 0.5)
    draws = Draws(seed, f"segmentation {name}", 0, as_ids(ids, len(images), images.device))
    if kind == "shot":
        return shot_noise(images, Setting(255, "any"), draws)  # 255 photons at white: the grey level is the mean count
    return to_uint8(draws.normal(images.shape[1:]).mul_(float(amount)).add_(images).add_(0.5))


def _stored(
    folder: str, clean_pictures: MaskedPictures, names: Sequence[str], severities: Sequence[int]
) -> dict[str, MaskFiles]:
    """Stored corrupted pictures by condition; those that are missing are named."""
    stored = stored_corruptions(folder, clean_pictures.masks)
    missing = [f"{name} at severity {s}" for name in names for s in severities if (name, s) not in stored]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise VitfocusError(
            f"{folder} holds no pictures of {', '.join(missing[:3])}{more}; name those it has with --corruptions and "
            "--severities."
        )
    return {f"{name}/{severity}": stored[name, severity] for name in names for severity in severities}


def stored_corruptions(folder: str | Path, clean: SegmentationDataset | None) -> dict[tuple[str, int], MaskFiles]:
    """Sets of pictures by (corruption, severity), each with the masks of the clean pictures of the same names.

    Both "gaussian_noise/3/..." and "gaussian_noise_3/..." are understood, wherever they stand in a path.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise VitfocusError(f"There is no folder {root} of corrupted pictures.")
    if not isinstance(clean, MaskFiles):
        raise VitfocusError("Stored corruptions need the folder of the clean pictures, whose masks they share.")
    masks = {picture.stem: mask for picture, mask in clean.pairs}
    found: dict[tuple[str, int], list[Pair]] = {}
    for picture in sorted(root.rglob("*")):
        if picture.stem in masks and (found_in := _corruption_in(picture.relative_to(root).parts[:-1])):
            found.setdefault(found_in, []).append((picture, masks[picture.stem]))
    if not found:
        raise VitfocusError(
            f"{root} holds no corrupted copies of the clean pictures: expected paths such as "
            f"gaussian_noise/3/.../{clean.pairs[0][0].name}."
        )
    for (name, severity), pairs in found.items():
        if len(pairs) != len(masks):
            raise VitfocusError(f"{root} has {len(pairs)} pictures of {name} at severity {severity}, not {len(masks)}.")
    return {
        key: MaskFiles(Path(root.anchor), Layout(_in_order(clean, pairs), clean.classes, clean.table))
        for key, pairs in found.items()
    }


def _in_order(clean: MaskFiles, pairs: list[Pair]) -> list[Pair]:
    by_stem = {picture.stem: (picture, mask) for picture, mask in pairs}
    return [by_stem[picture.stem] for picture, _ in clean.pairs]


def _corruption_in(parts: tuple[str, ...]) -> tuple[str, int] | None:
    for place, part in enumerate(parts):
        for name in ALL_CORRUPTIONS:
            if not part.startswith(name):
                continue
            rest = part.removeprefix(name).lstrip("_-")
            around = [rest] if rest else [*parts[place + 1 :], *parts[:place]]
            numbers = [text.removeprefix("severity").lstrip("_-") for text in around]
            if found := [int(number) for number in numbers if number in ("1", "2", "3", "4", "5")]:
                return name, found[0]
    return None
