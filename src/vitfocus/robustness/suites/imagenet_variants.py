"""Images as they are: the clean set, ImageNet-A, -R, -V2 and -Sketch, and ImageNet with the labels of ReaL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from vitfocus.core.arguments import parse_digits
from vitfocus.core.errors import VitfocusError
from vitfocus.core.records import read_json
from vitfocus.data.image_files import IMAGE_SUFFIXES, ClassFolders, Entry, list_classes
from vitfocus.robustness.classification import (
    CLEAN,
    Labels,
    OpenedImages,
    classification_plan,
    classify,
    num_classes,
    open_files,
    open_labelled_images,
    timm_file,
    validation_folder,
    wordnet_ids,
)
from vitfocus.robustness.engine import Condition, EvaluationArguments, EvaluationPlan, Group
from vitfocus.robustness.metrics import condition_summary

# Each set by its usual name, and the spellings of its published folder.
V2_SETS = {
    "matched-frequency": ("matched-frequency",),
    "threshold0.7": ("threshold0.7",),
    "topimages": ("top-images", "topimages"),
}
_PUBLISHED = {"imagenet-a": 7_500, "imagenet-r": 30_000, "imagenet-sketch": 50_889, "imagenet-v2": 10_000}
_VALIDATION = 50_000


def _plan(
    arguments: EvaluationArguments,
    classes: int,
    conditions: Mapping[Condition, OpenedImages],
    notes: Iterable[str] = (),
    protocol: Mapping[str, Any] = {},
) -> EvaluationPlan:
    """One condition per set of images."""
    groups = [Group(condition.name, images.source, (condition,)) for condition, images in conditions.items()]
    for images in conditions.values():
        protocol, notes = {**images.protocol, **protocol}, (*notes, *images.notes)
    return classification_plan(arguments, groups, classes, protocol, condition_summary, notes)


def clean(arguments: EvaluationArguments) -> EvaluationPlan:
    """Accuracy on the images as they are."""
    classes = num_classes(arguments)
    return _plan(arguments, classes, {CLEAN: open_labelled_images(arguments, classes)})


def imagenet_sketch(arguments: EvaluationArguments) -> EvaluationPlan:
    """ImageNet-Sketch: 1,000 class folders of drawings."""
    classes = num_classes(arguments, 1000)
    images = open_labelled_images(arguments, classes)
    condition = Condition("imagenet-sketch", classify)
    return _plan(arguments, classes, {condition: images}, _subset_note(arguments, images))


def subset_of_classes(arguments: EvaluationArguments) -> EvaluationPlan:
    """ImageNet-A and -R: 200 class folders; only the logits of those 200 classes are used."""
    suite = arguments.suite.name
    short = suite.replace("-", "_")
    names = wordnet_ids(short)
    classes = num_classes(arguments, 200, 1000)
    chosen: tuple[int, ...] | None = None
    notes = [f"The 200 classes of the model are taken as those of {suite}, in sorted order: none is masked."]
    if classes == 1000:
        chosen = tuple(map(int, timm_file(f"{short}_indices.txt").split()))
        notes = [f"Only the logits of {suite}'s 200 classes are used; the other 800 are masked."]
    if arguments.folder is None:
        notes.append("Labels are taken as indices of the 200 classes, sorted by WordNet id.")
    images = open_labelled_images(arguments, classes, labels=partial(_subset_labels, suite, names))
    condition = Condition(suite, partial(classify, classes=chosen))
    notes += _subset_note(arguments, images)
    protocol = {"masked_to": "none" if chosen is None else 200}
    return _plan(arguments, classes, {condition: images}, notes, protocol)


def _subset_labels(suite: str, names: Sequence[str], folders: ClassFolders) -> Labels:
    """The index of each folder in the 200 classes."""
    known = {name: label for label, name in enumerate(names)}
    unknown = [name for name in folders.classes if name not in known]
    if unknown:
        raise VitfocusError(
            f"{folders.root} holds the folder {unknown[0]}, which is not one of {suite}'s 200 classes: is it another "
            "data set?"
        )
    fewer = len(folders.classes) < len(names)
    notes = (f"{len(folders.classes)} of the 200 classes are present in the data.",) if fewer else ()
    return {name: known[name] for name in folders.classes}, notes


def imagenet_v2(arguments: EvaluationArguments) -> EvaluationPlan:
    """ImageNet-V2: up to three sets, whose class folders are numbered 0 to 999."""
    classes = num_classes(arguments, 1000)
    root = arguments.require_folder("the three folders imagenetv2-*-format-val, or one of them")
    found = {
        name: folder
        for name, spellings in V2_SETS.items()
        for spelling in spellings
        for folder in sorted(root.glob(f"*{spelling}*"))
        if folder.is_dir()
    }
    notes: list[str] = []
    if not found:
        named = next((name for name, known in V2_SETS.items() if any(part in root.name for part in known)), "one set")
        found = {named: root}
    elif len(found) < len(V2_SETS):
        absent = ", ".join(name for name in V2_SETS if name not in found)
        notes.append(f"Not all three sets were found: {absent} is missing.")
    conditions: dict[Condition, OpenedImages] = {}
    for name, folder in found.items():
        folders = list_classes(folder)
        unknown = [c for c in folders.classes if (number := parse_digits(c)) is None or number > 999]
        if unknown:
            raise VitfocusError(f"{folder} holds the folder {unknown[0]}; ImageNet-V2's are numbered 0 to 999.")
        labels = [int(entry.folder) for entry in folders.entries]
        conditions[Condition(name, classify)] = open_files(arguments, folders, labels)
    notes += _subset_note(arguments, next(iter(conditions.values())))
    return _plan(arguments, classes, conditions, notes)


def imagenet_real(arguments: EvaluationArguments) -> EvaluationPlan:
    """ImageNet's validation set with ReaL's labels: any label of an image is correct; unlabelled ones are left out."""
    classes = num_classes(arguments, 1000)
    root = validation_folder(
        arguments.require_folder("ImageNet's validation photographs, ILSVRC2012_val_*.JPEG, in class folders or not")
    )
    real = read_real(arguments.options.labels)
    flat = sorted(file for file in root.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
    files: Sequence[Entry] = [Entry(file.name, "", file.stat().st_size) for file in flat] or list_classes(root).entries
    labelled = [(entry, real[_number(root, entry) - 1]) for entry in files]
    labelled = [(entry, labels) for entry, labels in labelled if labels]
    if not labelled:
        raise VitfocusError(f"None of the {len(files)} images in {root} has a ReaL label.")
    notes = [f"{len(files) - len(labelled)} of {len(files)} images have no label in ReaL and are left out."]
    most = max(len(labels) for _, labels in labelled)
    padded = [labels + [-1] * (most - len(labels)) for _, labels in labelled]
    entries = tuple(entry for entry, _ in labelled)
    images = open_files(arguments, ClassFolders(root, (), entries), padded)
    condition = Condition("imagenet-real", classify)
    return _plan(arguments, classes, {condition: images}, notes, {"labels": "ReaL"})


def read_real(path: str | Path | None) -> Sequence[list[int]]:
    """ReaL's 50,000 lists of labels: from a file (the published real.json), or as timm ships them."""
    if path is None:
        return json.loads(timm_file("imagenet_real_labels.json"))
    content = read_json(path, list[list[Annotated[int, msgspec.Meta(ge=0, le=999)]]], writer="the authors of ReaL")
    if len(content) != _VALIDATION:
        raise VitfocusError(f"The label file {path} holds {len(content)} entries; ReaL has {_VALIDATION:,}.")
    return content


def _number(root: Path, entry: Entry) -> int:
    match = re.search(r"ILSVRC2012_val_(\d{8})\.", entry.name)
    if match is None or not 1 <= int(match[1]) <= _VALIDATION:
        raise VitfocusError(
            f"{root / entry.name} is not named as a validation photograph (ILSVRC2012_val_00000001.JPEG to ..50000), "
            "by which ReaL's labels are found."
        )
    return int(match[1])


def _subset_note(arguments: EvaluationArguments, images: OpenedImages) -> list[str]:
    suite, count = arguments.suite.name, images.source.count
    whole = _PUBLISHED[suite]
    if count is None or count == whole:
        return []
    return [f"{count:,} of {suite}'s {whole:,} images: a subset, not comparable with the whole set."]
