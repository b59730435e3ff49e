"""Evaluation of classifiers: images with labels from any source, and the outcome of each image.

Functions that open data have no side effects: they return `Images` with their part of the protocol and their notes.
"""

from __future__ import annotations

import functools
import importlib.resources
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import features
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from vitfocus.core.arguments import require_values
from vitfocus.core.errors import VitfocusError
from vitfocus.core.records import Count, read_json
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.image_files import (
    ClassFolders,
    Preprocessing,
    digest_of,
    evaluation_preprocessing,
    is_image,
    list_classes,
    require_pixels,
)
from vitfocus.robustness.batches import (
    EvaluationBatch,
    ImageFiles,
    ImageSamples,
    ItemSource,
    LoaderSource,
    Source,
    check_readable,
    collate_images,
    image_and_label,
    one_size,
    require_one_number,
)
from vitfocus.robustness.engine import Condition, EvaluationArguments, EvaluationPlan, Group, ModelResults, Outcome
from vitfocus.robustness.metrics import Summary
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.run_folder import Columns
from vitfocus.robustness.suites import DataForm

Labels = tuple[dict[str, int], tuple[str, ...]]  # class folder -> class, and notes
Summarise = Callable[[Mapping[str, Columns], int], Summary]


@dataclass(frozen=True)
class OpenedImages:
    """A source of images, and what it adds to the protocol and the notes."""

    source: Source
    protocol: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def num_classes(arguments: EvaluationArguments, *expected: int) -> int:
    """The number of classes, one of `expected`; all models must have the same number, and the same image size."""
    classes = _shared_value(arguments, "classes", lambda model: model.classes(arguments.device))
    _shared_value(arguments, "image sizes", lambda model: model.size)
    if expected and classes not in expected:
        listed = " or ".join(f"{number:,}" for number in expected)
        raise VitfocusError(f"The suite {arguments.suite.name} is for models of {listed} classes, not {classes}.")
    return classes


def _shared_value(
    arguments: EvaluationArguments,
    what: str,
    value_of: Callable[[PixelModel], Any],
    advice: str = "evaluate them separately",
) -> Any:
    """What a function returns for every model; an error if it differs, because all models see the same images."""
    found = {model.name: value_of(model) for model in arguments.models}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name}: {value}" for name, value in found.items())
        raise VitfocusError(f"Models in one pass see the same images, but differ in {what} ({listed}): {advice}.")
    return found[arguments.models[0].name]


def classification_plan(
    arguments: EvaluationArguments,
    groups: Sequence[Group],
    classes: int,
    protocol: Mapping[str, Any],
    summarise: Summarise,
    notes: Iterable[str],
    resize: bool = False,
) -> EvaluationPlan:
    """A plan that keeps the outcome of every image; repeated notes are kept once."""

    def reduce(outcomes: Mapping[str, Columns], seed: int) -> ModelResults:
        return ModelResults(summarise(outcomes, seed), outcomes)

    prepare = partial(prepare_batch, arguments, classes)
    return EvaluationPlan(tuple(groups), protocol, reduce, tuple(dict.fromkeys(notes)), prepare, resize)


def classify(
    model: PixelModel, images: Tensor, batch: EvaluationBatch, classes: tuple[int, ...] | None = None
) -> Outcome:
    """Top-1, top-5, confidence and prediction of each image; logits that are not of `classes` are masked.

    Labels are (B,), or (B, K) if any of K is correct (padded with -1); with `classes` they are indices into it.
    """
    logits = model(images)
    if classes is not None:
        logits = logits[:, torch.tensor(classes, device=logits.device)]
    best = top5_classes(logits)
    right = (best.unsqueeze(2) == batch.labels.view(len(batch), 1, -1)).any(2)
    return {
        "top1": right[:, 0],
        "top5": right.any(1),
        "confidence": logits.softmax(1).amax(1),
        "prediction": best[:, 0].int(),
    }


def top5_classes(logits: Tensor) -> Tensor:
    """The five classes with the largest logits, in order; fewer if there are fewer."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices


CLEAN = Condition("clean", classify)


def prepare_batch(arguments: EvaluationArguments, classes: int, batch: EvaluationBatch) -> EvaluationBatch:
    """The batch in pixels; refuses values out of range, and labels that the model does not have."""
    require_values("images", batch.images, pixels=True)
    if arguments.normalised:
        batch = replace(batch, images=_unnormalised(batch.images, arguments.models[0]))
    labels = batch.labels
    require_pixels(batch.images, "evaluate normalises them itself; set normalised=True if they already are")
    if labels.numel() and (int(labels.max()) >= classes or (labels.ndim == 1 and int(labels.min()) < 0)):
        raise VitfocusError(
            f"The data has the label {int(labels.max() if labels.max() >= classes else labels.min())}, "
            f"but the model has the classes 0 to {classes - 1}."
        )
    return batch


def _unnormalised(images: Tensor, model: PixelModel) -> Tensor:
    """Normalised images as floats in [0, 1]: the normalisation of the model is undone."""
    if not images.is_floating_point():
        raise VitfocusError(f"normalised=True is for float tensors, but the images are {images.dtype}.")
    mean, std = (torch.tensor(values, device=images.device).view(-1, 1, 1) for values in (model.mean, model.std))
    pixels = images.float() * std + mean
    low, high = (float(value) for value in pixels.aminmax())
    if not (low >= -0.02 and high <= 1.02):
        raise VitfocusError(
            f"normalised=True, but without the model's normalisation (mean {model.mean}, std {model.std}) the images "
            f"lie in [{low:.3g}, {high:.3g}] instead of [0, 1]: they were normalised differently."
        )
    return pixels.clamp(0, 1)


def open_labelled_images(
    arguments: EvaluationArguments,
    classes: int,
    interpolation: str | None = None,
    labels: Callable[[ClassFolders], Labels] | None = None,
    crop: bool = True,
    size: tuple[int, int] | None = None,
) -> OpenedImages:
    """Images from a folder of class folders, a data set, or batches.

    `labels` returns the class of every folder. Without `crop`, images are resized but not cropped, for suites that
    transform them first. `size` is the size of the images (default: that of the models).
    """
    data = arguments.data
    size = size or arguments.models[0].size
    if arguments.normalised and len({(model.mean, model.std) for model in arguments.models}) > 1:
        raise VitfocusError("The models differ in mean and std, so normalised images fit only one: pass pixels.")
    if arguments.folder is not None:
        folders = list_classes(validation_folder(arguments.folder))
        known, notes = labels(folders) if labels is not None else folder_labels(arguments, folders, classes)
        targets = [known[entry.folder] for entry in folders.entries]
        images = open_files(arguments, folders, targets, interpolation=interpolation, crop=crop, size=size)
        return replace(images, notes=notes + images.notes)
    arguments.refuse_unused(DataForm(class_folders=False))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return _open_dataset(arguments, classes, interpolation, crop, size)
    if isinstance(data, DataLoader) or (isinstance(data, Iterable) and not isinstance(data, Tensor | Mapping)):
        arguments.refuse_unused(DataForm(resized=False))
        how = "the loader's own" + ", normalised" * arguments.normalised
        return OpenedImages(LoaderSource(data, arguments.limit), {"preprocessing": how})
    raise VitfocusError(
        f"The data is a {type(data).__name__}; expected images with labels: a folder with one folder per class, "
        "(images, labels), a Dataset of (image, label), or batches of (images, labels), images in uint8 or in [0, 1]."
    )


def open_files(
    arguments: EvaluationArguments,
    folders: ClassFolders,
    labels: Sequence[Any],
    interpolation: str | None = None,
    crop: bool = True,
    size: tuple[int, int] | None = None,
) -> OpenedImages:
    """Image files with labels, whose headers are checked; random draws depend on the path below the root."""
    entries, size = folders.entries, size or arguments.models[0].size
    pick = evenly_spaced(len(entries), arguments.limit)
    sizes = check_readable(folders.root, [entries[index] for index in pick])
    preprocessing, notes = _preprocessing(arguments, interpolation, crop, size)
    if preprocessing.resize is None and crop:
        one_size(sizes)
    kept = sum(found == preprocessing.keep for found in sizes.values())
    if kept:
        amount = "The images" if kept == len(sizes) else f"{kept:,} of {len(sizes):,} images"
        notes += (f"{amount} have {size[0]}x{size[1]} pixels and were not resized.",)
    names = [entry.name for entry in entries]
    digest = digest_of(f"{entries[i].name} {entries[i].size} {labels[i]}" for i in pick)
    samples = ImageSamples(ImageFiles(folders.root, names, labels), preprocessing, names)
    source = image_source(arguments, samples, len(names), crop, ids=names, digest=digest)
    return OpenedImages(source, {"preprocessing": preprocessing.to_dict(), "decoder": image_decoder()}, notes)


def image_source(
    arguments: EvaluationArguments, samples: ImageSamples, count: int, uniform: bool = True, **options: Any
) -> ItemSource:
    """At most `limit` of `count` images, evenly spaced; unless they must be `uniform`, images are padded to one size.

    The options are those of `ItemSource`.
    """
    collate, pick = partial(collate_images, pad=not uniform), evenly_spaced(count, arguments.limit)
    return ItemSource(samples, pick, collate, uniform=uniform, **arguments.reading, **options)


def _open_dataset(
    arguments: EvaluationArguments, classes: int, interpolation: str | None, crop: bool, size: tuple[int, int]
) -> OpenedImages:
    data = arguments.data
    notes: tuple[str, ...] = ()
    if not len(data):
        raise VitfocusError("The data set has no images.")
    sample, label = image_and_label(data[0], "Item 0 of the data")
    require_one_number(label, "Item 0 of the data")
    names = getattr(data, "classes", None)  # as Shapes and torchvision's data sets have them
    if isinstance(names, list | tuple) and len(names) != classes:
        notes += (f"The data has {len(names):,} classes, but the model {classes:,}.",)
    preprocessing = None
    if is_image(sample):
        if arguments.normalised:
            raise VitfocusError("normalised=True is for tensors, and these are images: leave it out.")
        preprocessing, more = _preprocessing(arguments, interpolation, crop, size)
        notes += more
        if preprocessing.keep:
            notes += (f"Images of {size[0]}x{size[1]} pixels were not resized, others were.",)
    else:
        arguments.refuse_unused(DataForm(resized=False))
    source = image_source(arguments, ImageSamples(data, preprocessing), len(data), crop)
    how: Any = (
        preprocessing.to_dict() if preprocessing else "the data set's own" + ", normalised" * arguments.normalised
    )
    return OpenedImages(source, {"preprocessing": how}, notes)


def _preprocessing(
    arguments: EvaluationArguments, interpolation: str | None, crop: bool, size: tuple[int, int]
) -> tuple[Preprocessing, tuple[str, ...]]:
    """Resize and centre crop images of another size, with the interpolation of the suite or of the models.

    With resize=True every image is resized, with resize=False none.
    """
    options = arguments.options
    if arguments.suite.small_images:
        arguments.refuse_unused(DataForm(resized=False))
        return Preprocessing(None, None), ()
    if options.resize is not None and not options.resize:
        return Preprocessing(None, None), ("The images were not resized (resize=False).",)
    chosen = interpolation if options.interpolation is None else options.interpolation
    if chosen is None:
        chosen = _shared_value(arguments, "interpolation", lambda model: model.interpolation, "choose one")
    usual = evaluation_preprocessing(size, chosen, options.crop_pct)
    return replace(usual, crop=size if crop else None, keep=None if options.resize else size), ()


def folder_labels(arguments: EvaluationArguments, folders: ClassFolders, classes: int) -> Labels:
    """The class of every folder: by WordNet id for ImageNet, by an index file, or else by sorted order."""
    index = getattr(arguments.options, "index", None)
    if index is not None:
        labels = folder_indices(folders, index)
        unknown = next((name for name, label in labels.items() if not 0 <= label < classes), None)
        if unknown is not None:
            raise VitfocusError(
                f"The index file {index} maps {unknown} to {labels[unknown]}, but the model has the classes "
                f"0 to {classes - 1}."
            )
    elif classes == 1000 and (len(folders.classes) != 1000 or folders.classes[0] in set(wordnet_ids())):
        labels = folder_indices(folders)
    elif len(folders.classes) != classes:
        raise VitfocusError(
            f"{folders.root} holds {len(folders.classes)} class folders, but the model has {classes} classes."
        )
    else:
        note = (
            "Class folders are numbers, sorted as text (0, 1, 10, 11...), as in torchvision's ImageFolder; an index "
            "file can give another order."
        )
        numbered = all(name.isdigit() for name in folders.classes) and classes > 10
        return {name: label for label, name in enumerate(folders.classes)}, (note,) * numbered
    if len(labels) < classes:
        whose = "ImageNet's" if classes == 1000 else "the model's"
        return labels, (f"{len(labels)} of {whose} {classes:,} classes are present in the data.",)
    return labels, ()


def validation_folder(root: Path) -> Path:
    """The validation split of a folder that also has a training split, or the folder itself."""
    for name in ("val", "validation"):
        if (root / name).is_dir() and (root / "train").is_dir():
            return root / name
    return root


def image_decoder() -> str:
    """The decoder of image files, for the fingerprint."""
    turbo = features.version("libjpeg_turbo")
    library = f"libjpeg-turbo {turbo}" if turbo else f"libjpeg {features.version('jpg')}"
    return f"Pillow, {library}, EXIF orientation applied"


@functools.cache
def wordnet_ids(name: str = "imagenet") -> tuple[str, ...]:
    """The WordNet ids of ImageNet's 1,000 classes in order, or of the 200 of -A and -R, from timm's lists."""
    return tuple(timm_file(f"{name}_synsets.txt").split())


def timm_file(name: str) -> str:
    """The text of a file about ImageNet that timm contains."""
    return importlib.resources.files("timm.data._info").joinpath(name).read_text("utf-8")


def folder_indices(folders: ClassFolders, index: str | os.PathLike[str] | None = None) -> dict[str, int]:
    """The class of every folder: by an index file, or by ImageNet's WordNet ids."""
    known = read_index(index) if index is not None else {wnid: label for label, wnid in enumerate(wordnet_ids())}
    unknown = [name for name in folders.classes if name not in known]
    if unknown:
        listed = ", ".join(unknown[:3]) + ("..." if len(unknown) > 3 else "")
        what = "ImageNet" if index is None else "the index file"
        raise VitfocusError(
            f"{folders.root} holds folders that are not in {what}: {listed} "
            f"({len(unknown)} of {len(folders.classes)}); expected names such as {next(iter(known), 'none')}."
        )
    return {name: known[name] for name in folders.classes}


def read_index(path: str | os.PathLike[str]) -> dict[str, int]:
    """A json of {"0": ["n01440764", "tench"], ...}, {"n01440764": 0, ...} or ["n01440764", ...] as folder -> class."""
    content: Any = read_json(Path(path), list[str] | dict[str, str | Count | list[str]])  # type: ignore[arg-type]
    if isinstance(content, list):
        return {name: label for label, name in enumerate(content)}
    if all(isinstance(value, int) for value in content.values()):
        return content
    try:
        return {str(v[0] if isinstance(v, list) else v): int(label) for label, v in content.items()}
    except (ValueError, IndexError):
        raise VitfocusError(
            f"The index file {path} maps neither folders to numbers nor numbers to folders: expected entries such "
            'as "n01440764": 0 or "0": ["n01440764", "tench"].'
        ) from None
