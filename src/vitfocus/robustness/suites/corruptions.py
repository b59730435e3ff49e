"""ImageNet-C and CIFAR-10/100-C: from their published files, or generated on the fly from clean images."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitfocus.core.arguments import as_list, check_int
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.files import DAMAGED
from vitfocus.core.progress import Progress
from vitfocus.core.statistics import evenly_spaced
from vitfocus.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt, fingerprint
from vitfocus.corruptions.base import Draws, Setting
from vitfocus.corruptions.digital import jpeg_compression
from vitfocus.data.image_files import Preprocessing, digest_of, list_classes
from vitfocus.robustness.batches import (
    EvaluationBatch,
    ImageFiles,
    ImageSamples,
    check_readable,
    one_size,
)
from vitfocus.robustness.classification import (
    CLEAN,
    classification_plan,
    classify,
    folder_labels,
    image_decoder,
    image_source,
    num_classes,
    open_labelled_images,
)
from vitfocus.robustness.engine import Condition, EvaluationArguments, EvaluationPlan, Group
from vitfocus.robustness.metrics import corruption_summary
from vitfocus.robustness.suites import DataForm

ALL_CORRUPTIONS = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
SEVERITIES = (1, 2, 3, 4, 5)
_TARS = ("noise", "blur", "weather", "digital", "extra")
_INCOMPLETE = "Not all 15 corruptions at all 5 severities were measured, so there is no mCE."


def chosen_corruptions(given: Sequence[str] | None, severities: Sequence[int] | None) -> tuple[list[str], list[int]]:
    """The requested corruptions and severities, checked."""
    names = as_list("corruptions", CORRUPTIONS if given is None else given)
    for name in names:
        if name not in ALL_CORRUPTIONS:
            raise VitfocusError(f"There is no corruption {name!r}: {nearest(str(name), ALL_CORRUPTIONS)}")
    listed = as_list("severities", SEVERITIES if severities is None else severities)
    return names, sorted(check_int("A severity", severity, 1, 5) for severity in listed)


def _chosen(arguments: EvaluationArguments) -> tuple[list[str], list[int], list[str]]:
    """The corruptions and severities of the options, and a note if they are not the whole suite."""
    options = arguments.options
    names, severities = chosen_corruptions(options.corruptions, options.severities)
    if options.extra:
        names += [name for name in EXTRA_CORRUPTIONS if name not in names]
    whole_suite = set(CORRUPTIONS) <= set(names) and severities == list(SEVERITIES)
    return names, severities, [] if whole_suite else [_INCOMPLETE]


def imagenet_c(arguments: EvaluationArguments) -> EvaluationPlan:
    """ImageNet-C, from published files or generated from clean images."""
    published = _published_folders(arguments.folder) if arguments.folder is not None else {}
    classes = num_classes(arguments, *([1000] if published else []))
    if published:
        # Published files are never resized, but the clean ones beside them are.
        arguments.refuse_unused(DataForm(published=True, resized=bool(arguments.options.clean_data)))
        return _published(arguments, classes, published)
    arguments.refuse_unused(DataForm())
    notes = []
    if classes != 1000:
        notes.append("AlexNet's errors are on ImageNet: on other data, CE and mCE only serve to compare models.")
    return _generated(arguments, classes, "imagenet", "bilinear", notes)


def cifar_c(arguments: EvaluationArguments) -> EvaluationPlan:
    """CIFAR-10-C and CIFAR-100-C, published or generated; the mean error is not normalised by AlexNet's."""
    expected = 100 if arguments.suite.name.startswith("cifar100") else 10
    classes = num_classes(arguments, expected)
    notes = ["The mean error over the 15 corruptions is not divided by AlexNet's, as is usual for CIFAR."]
    protocol = {}
    height, width = arguments.models[0].size
    if (height, width) != (32, 32):
        notes.append(f"Corrupted at 32x32, then enlarged to the model's {height}x{width} (bicubic).")
        protocol = {"enlarged_to": [height, width]}
    if arguments.folder is not None and any(arguments.folder.glob("*.npy")):
        arguments.refuse_unused(DataForm(published=True, resized=False, class_folders=False))
        plan = _arrays(arguments, classes, arguments.folder, notes)
    else:
        plan = _generated(arguments, classes, "cifar", None, notes)
    return replace(plan, protocol={**plan.protocol, **protocol})


def _generated(
    arguments: EvaluationArguments, classes: int, flavour: str, interpolation: str | None, notes: list[str]
) -> EvaluationPlan:
    names, severities, incomplete = _chosen(arguments)
    seed, frost = arguments.seed, arguments.options.frost
    quality = getattr(arguments.options, "jpeg_quality", None)
    if quality is not None:
        quality = check_int("jpeg_quality", quality, 1, 100)
    conditions = [CLEAN]
    for name in names:
        for severity in severities:
            how = {"name": name, "severity": severity, "seed": seed, "flavour": flavour, "frost": frost}
            change = partial(corrupted, quality, **how)
            conditions.append(Condition(f"{name}/{severity}", classify, change))
    images = open_labelled_images(arguments, classes, interpolation)
    made = fingerprint(flavour, frost, names if quality is None else [*names, "jpeg_compression"])
    protocol = {**images.protocol, "mode": "generated", "seed": seed, "corruptions": made}
    first = "Corruptions were generated on the fly from clean images, with the implementation of vitfocus."
    notes = [first, *notes, *incomplete, *images.notes]
    if quality is not None:
        protocol["jpeg_quality"] = quality
        notes.append(f"Corrupted images were compressed as JPEG with quality {quality} (the published files: 85).")
    if "frost" in names and not made["comparable"]:
        notes.append(
            "Frost overlays were drawn, since the published ones are missing: frost and mCE are not comparable."
        )
    group = Group("generated", images.source, tuple(conditions))
    summarise = partial(corruption_summary, alexnet=flavour == "imagenet")
    return classification_plan(arguments, [group], classes, protocol, summarise, notes)


def corrupted(quality: int | None, batch: EvaluationBatch, **corruption: Any) -> Tensor:
    """The images of a batch corrupted with `corrupt`, then compressed as JPEG if a quality is given."""
    images = corrupt(batch.images, ids=batch.ids, **corruption)
    if quality is None:
        return images
    pixels = images if images.dtype == torch.uint8 else images.mul(255).round().to(torch.uint8)
    return jpeg_compression(pixels, Setting(quality), Draws(0, "", 0, batch.ids))


def _published_folders(root: Path) -> dict[str, Path]:
    """The folders of the published corruptions by name, directly below the root or below the folder of an archive."""
    places = [root, *(root / name for name in _TARS)]
    return {name: place / name for place in places for name in ALL_CORRUPTIONS if (place / name).is_dir()}


def _published(arguments: EvaluationArguments, classes: int, folders: dict[str, Path]) -> EvaluationPlan:
    names, severities, incomplete = _chosen(arguments)
    missing = [f"{n}/{s}" for n in names for s in severities if n not in folders or not (folders[n] / str(s)).is_dir()]
    if missing:
        raise VitfocusError(
            f"{arguments.folder} looks like ImageNet-C but lacks {', '.join(missing[:4])} ({len(missing)} in all): "
            "it is only half extracted (name the ones you have with the option corruptions)."
        )
    groups: list[Group] = []
    counts: dict[str, int] = {}
    labels: dict[str, int] = {}
    notes = ["ImageNet-C's published files were read, without any resizing.", *incomplete]
    lists: dict[tuple[str, ...], list[int]] = {}  # so that 75 folders with the same files share one list of names
    with Progress("Listing the files", len(names) * len(severities), show=arguments.progress) as progress:
        for name in names:
            for severity in severities:
                condition = f"{name}/{severity}"
                listed = list_classes(folders[name] / str(severity))
                if set(listed.classes) - set(labels):
                    found, more = folder_labels(arguments, listed, classes)
                    labels |= found
                    notes += more
                files = tuple(entry.name for entry in listed.entries)
                targets = lists.setdefault(files, [labels[entry.folder] for entry in listed.entries])
                files = next(known for known in lists if known == files)
                if not groups:
                    size = one_size(check_readable(listed.root, listed.entries))
                counts[condition] = len(files)
                samples = ImageSamples(ImageFiles(listed.root, files, targets), None, files)
                source = image_source(arguments, samples, len(files), digest=listed.digest(), size=size)
                groups.append(Group(condition, source, (Condition(condition, classify),)))
                progress.advance(note=condition)
    most = max(counts.values())
    if short := [f"{name} holds {count:,}" for name, count in counts.items() if count != most]:
        listed_some = ", ".join(short[:3]) + ("..." if len(short) > 3 else "")
        raise VitfocusError(
            f"{arguments.folder} is only half extracted: most folders hold {most:,} images, but {listed_some}."
        )
    protocol: dict[str, Any] = {"mode": "published", "decoder": image_decoder()}
    protocol["preprocessing"] = Preprocessing(None, size).to_dict()
    if size != (model_size := arguments.models[0].size):
        notes.append(f"The files have {size[0]}x{size[1]} pixels; they are scaled to the size of the model (bicubic).")
        protocol["scaled_to"] = list(model_size)
    if clean_data := arguments.options.clean_data:
        notes.append(f"The clean error, for the relative mCE, is measured on {clean_data}.")
        # Preprocessed as for the published files, for any size of model: 256 pixels, bilinear, cropped to 224.
        clean = open_labelled_images(replace(arguments, data=clean_data), classes, "bilinear", size=size)
        protocol["clean"] = clean.protocol
        notes += clean.notes
        if clean.source.count != groups[0].source.count:
            notes.append(
                f"There are {clean.source.count:,} clean images for {groups[0].source.count:,} of each corruption: the "
                "interval of the relative mCE takes the clean error as exact."
            )
        groups.insert(0, Group("clean", clean.source, (CLEAN,)))
    else:
        notes.append("The published files have no clean images, so there is no relative mCE: name them as clean_data.")
    resize = size != model_size
    return classification_plan(arguments, groups, classes, protocol, corruption_summary, notes, resize)


@dataclass(frozen=True)
class SeverityImages:
    """Images of one severity in a published array, (N, 32, 32, 3) uint8, with their labels."""

    path: Path
    start: int
    labels: Sequence[int]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.array(_open_array(self.path)[self.start + index])
        return torch.from_numpy(pixels).permute(2, 0, 1), self.labels[index]


@functools.lru_cache(maxsize=len(ALL_CORRUPTIONS))
def _open_array(path: Path) -> Any:
    """A published array, opened once in each worker that reads it."""
    return np.load(path, mmap_mode="r")


def _arrays(arguments: EvaluationArguments, classes: int, root: Path, notes: list[str]) -> EvaluationPlan:
    names, severities, incomplete = _chosen(arguments)
    missing = [name for name in names if not (root / f"{name}.npy").is_file()]
    if missing:
        raise VitfocusError(
            f"{root} lacks {', '.join(f'{name}.npy' for name in missing[:4])}: it is only half extracted."
        )
    labels = _load(root / "labels.npy")
    if not np.issubdtype(labels.dtype, np.integer) or labels.size != len(labels):
        found = f"{labels.dtype} {labels.shape}"
        raise VitfocusError(f"{root / 'labels.npy'} is {found}; expected one whole number per image.")
    labels = labels.reshape(-1).astype(np.int64)
    groups = []
    for name in names:
        array = _load(root / f"{name}.npy")
        if array.ndim != 4 or array.shape[1:] != (32, 32, 3) or array.dtype != np.uint8 or len(array) % 5:
            raise VitfocusError(f"{root / name}.npy is {array.dtype} {array.shape}; expected uint8 (50000, 32, 32, 3).")
        if len(labels) != len(array):
            found = f"labels.npy holds {len(labels)} labels, but {name}.npy {len(array)} images"
            raise VitfocusError(f"In {root}, {found}.")
        each = len(array) // 5
        for severity in severities:
            start = (severity - 1) * each
            targets = labels[start : start + each]
            digest = digest_of([f"{name} {severity} {len(array)}", str(targets.tolist()), _sums(array, start, each)])
            samples = ImageSamples(SeverityImages(root / f"{name}.npy", start, targets.tolist()))
            in_process = replace(arguments, workers=0)  # the array is mapped into memory
            source = image_source(in_process, samples, each, digest=digest)
            condition = Condition(f"{name}/{severity}", classify)
            groups.append(Group(condition.name, source, (condition,)))
    notes = [f"{arguments.suite.name}'s published arrays were read.", *notes, *incomplete]
    protocol = {"mode": "published", "preprocessing": "none"}
    summarise = partial(corruption_summary, alexnet=False)
    return classification_plan(arguments, groups, classes, protocol, summarise, notes)


def _sums(array: Any, start: int, count: int) -> str:
    """The sums of the pixels of a hundred images, as a quick digest."""
    return str([int(array[start + index].astype(np.int64).sum()) for index in evenly_spaced(count, 100)])


def _load(path: Path) -> Any:
    try:
        array = np.load(path, mmap_mode="r")
    except DAMAGED as error:
        raise VitfocusError(f"{path} cannot be read as an array: {error}.") from None
    if not isinstance(array, np.ndarray) or not array.ndim:
        raise VitfocusError(f"{path} holds no list of images or labels.")
    return array
