"""Photographs as they are: the clean set, ImageNet-A, -R, -V2 and -Sketch, and ImageNet with ReaL's labels."""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Sequence
from pathlib import Path

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import PICTURES
from vitfocus.robustness.cells import Classify
from vitfocus.robustness.folders import ClassFolders, Entry, list_classes, wordnet_ids
from vitfocus.robustness.plan import Group, Plan
from vitfocus.robustness.suites.context import Context, validation
from vitfocus.robustness.summaries import simple

# Each set by its usual name, and the spellings of its published folder.
V2_SETS = {
    "matched-frequency": ("matched-frequency",),
    "threshold0.7": ("threshold0.7",),
    "topimages": ("top-images", "topimages"),
}
_PUBLISHED = {"imagenet-a": 7_500, "imagenet-r": 30_000, "imagenet-sketch": 50_889, "imagenet-v2": 10_000}
_VALIDATION = 50_000


def _plan(context: Context, *groups: Group) -> Plan:
    return Plan(groups, context.protocol, simple, tuple(context.notes))


def clean(context: Context) -> Plan:
    """Accuracy on the images as they are."""
    return _plan(context, Group("clean", context.images(), (Classify("clean"),)))


def sketch(context: Context) -> Plan:
    """ImageNet-Sketch: 1,000 class folders of drawings."""
    context.need_imagenet()
    source = context.images()
    _say_if_subset(context, source.count)
    return _plan(context, Group("imagenet-sketch", source, (Classify("imagenet-sketch"),)))


def renditions(context: Context) -> Plan:
    """ImageNet-A and -R: 200 class folders; only the logits of those 200 classes take part."""
    short = context.suite.replace("-", "_")
    names = wordnet_ids(short)
    text = importlib.resources.files("timm.data._info").joinpath(f"{short}_indices.txt").read_text("utf-8")
    classes: tuple[int, ...] | None = tuple(int(line) for line in text.split())
    if context.classes == len(names):
        classes = None
        context.notes.append(
            f"The model has 200 classes, taken to be {context.suite}'s in sorted order: none is masked."
        )
    else:
        context.need_imagenet()
        context.notes.append(f"Only the logits of {context.suite}'s 200 classes take part; the other 800 are masked.")
    context.protocol["masked_to"] = 200 if classes is not None else "none"

    def labels(folders: ClassFolders) -> dict[str, int]:
        places = {name: place for place, name in enumerate(names)}
        strange = [name for name in folders.classes if name not in places]
        if strange:
            raise VitfocusError(
                f"{folders.root} holds the folder {strange[0]}, which is none of {context.suite}'s 200 classes: "
                "is it another data set?"
            )
        if len(folders.classes) < len(names):
            context.notes.append(f"{len(folders.classes)} of the 200 classes are present in the data.")
        return {name: places[name] for name in folders.classes}

    if context.folder is None:
        context.notes.append("Labels are taken as places among the 200 classes, sorted by WordNet id.")
    source = context.images(labeller=labels)
    _say_if_subset(context, source.count)
    return _plan(context, Group(context.suite, source, (Classify(context.suite, classes=classes),)))


def version2(context: Context) -> Plan:
    """ImageNet-V2: up to three sets, whose class folders are numbered 0 to 999."""
    context.need_imagenet()
    root = context.need_folder("the three folders imagenetv2-*-format-val, or one of them")
    found = {
        name: folder
        for name, spellings in V2_SETS.items()
        for spelling in spellings
        for folder in sorted(root.glob(f"*{spelling}*"))
        if folder.is_dir()
    }
    if not found:
        named = next((name for name, known in V2_SETS.items() if any(part in root.name for part in known)), "one set")
        found = {named: root}
    elif len(found) < len(V2_SETS):
        absent = ", ".join(name for name in V2_SETS if name not in found)
        context.notes.append(f"Not all three sets are there: {absent} is missing.")
    groups = []
    for name, folder in found.items():
        folders = list_classes(folder)
        strange = [c for c in folders.classes if not (c.isdigit() and int(c) < 1000)]
        if strange:
            raise VitfocusError(f"{folder} holds the folder {strange[0]}; ImageNet-V2's are numbered 0 to 999.")
        preprocessing = context.prepare(folder, folders.entries)
        source = context.files(folders, [int(entry.folder) for entry in folders.entries], preprocessing)
        groups.append(Group(name, source, (Classify(name),)))
    _say_if_subset(context, groups[0].source.count)
    context.notes[:] = dict.fromkeys(context.notes)
    return _plan(context, *groups)


def reassessed(context: Context) -> Plan:
    """ImageNet's validation set with ReaL's labels: any of an image's is right; images without one do not count."""
    context.need_imagenet()
    root = validation(
        context.need_folder("ImageNet's validation photographs, ILSVRC2012_val_*.JPEG, in class folders or not")
    )
    real = read_real(context.options.get("labels"))
    files = _validation_files(root)
    chosen: list[Entry] = []
    labels: list[list[int]] = []
    for entry in files:
        answers = real[_number(root, entry) - 1]
        if answers:
            chosen.append(entry)
            labels.append(answers)
    if not chosen:
        raise VitfocusError(f"None of the {len(files)} images in {root} has a ReaL label.")
    context.notes.append(f"ReaL gives {len(files) - len(chosen)} of {len(files)} images no label: they do not count.")
    widest = max(map(len, labels))
    filled = [answers + [-1] * (widest - len(answers)) for answers in labels]
    preprocessing = context.prepare(root, chosen)
    context.protocol["labels"] = "ReaL"
    source = context.files(ClassFolders(root, (), tuple(chosen)), filled, preprocessing, chosen)
    return _plan(context, Group("imagenet-real", source, (Classify("imagenet-real"),)))


def read_real(path: str | Path | None) -> Sequence[list[int]]:
    """ReaL's 50,000 lists of labels: from a file (the published real.json), or as timm ships them."""
    if path is None:
        return _timm_real()
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise VitfocusError(f"The label file {path} cannot be read: {error}.") from None
    if not isinstance(content, list) or len(content) != _VALIDATION:
        amount = len(content) if isinstance(content, list) else "no list of"
        raise VitfocusError(f"The label file {path} holds {amount} entries; ReaL has {_VALIDATION:,}, one per image.")
    known = range(1000)
    for place, answers in enumerate(content):
        if not isinstance(answers, list) or not all(type(label) is int and label in known for label in answers):
            raise VitfocusError(
                f"The label file {path} holds {str(answers)[:40]} for image {place + 1}; expected a list of classes "
                "from 0 to 999, as ReaL's."
            )
    return content


@functools.cache
def _timm_real() -> list[list[int]]:
    text = importlib.resources.files("timm.data._info").joinpath("imagenet_real_labels.json").read_text("utf-8")
    return json.loads(text)


def _validation_files(root: Path) -> list[Entry]:
    flat = sorted(file for file in root.iterdir() if file.suffix.lower() in PICTURES)
    if flat:
        return [Entry(file.name, "", file.stat().st_size) for file in flat]
    return list(list_classes(root).entries)


def _number(root: Path, entry: Entry) -> int:
    match = re.search(r"ILSVRC2012_val_(\d{8})\.", entry.name)
    if match is None or not 1 <= int(match[1]) <= _VALIDATION:
        raise VitfocusError(
            f"{root / entry.name} is not named as a validation photograph (ILSVRC2012_val_00000001.JPEG to ..50000), "
            "by which ReaL's labels are found."
        )
    return int(match[1])


def _say_if_subset(context: Context, count: int | None) -> None:
    whole = _PUBLISHED[context.suite]
    if count is not None and count != whole:
        context.notes.append(
            f"{count:,} of {context.suite}'s {whole:,} images: a subset, not comparable with the whole."
        )
