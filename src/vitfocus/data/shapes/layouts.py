"""Shapes on disk, in the layouts of the data sets that people have, so that the real loaders are what is tested.

`write_layout` knows `imagefolder`, `ade20k`, `cityscapes`, `coco` and `vqav2`. A file appears whole or not at all, a
second call with the same arguments changes nothing (and mends what is missing), and a folder that holds anything else
is refused.
"""

from __future__ import annotations

import io
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.data.segmentation.layouts import CITYSCAPES_IDS, IGNORE
from vitfocus.data.shapes.dataset import CLASSES, VERSION, Size, drawn_scenes, instances, picture_size, semantic_mask
from vitfocus.data.shapes.outlines import polygons, run_lengths
from vitfocus.data.shapes.questions import Question, ask
from vitfocus.data.shapes.scene import MAIN, SPLITS, Thing

Files = Iterator[tuple[str, bytes]]  # path below the root, content

CITYSCAPES_RIM = 2  # "rectification border", which is not trained on
QUESTIONS_A_PICTURE = 3
CROWDS_EVERY = (
    4  # of the pictures that have a flock of at least CROWD small objects, one in so many shows it as a crowd
)
CROWD = 3
MANIFEST = "shapes.json"


@dataclass(frozen=True)
class Picture:
    """One scene with all that is known about it; masks are (height, width)."""

    item: int
    image: npt.NDArray[np.uint8]  # (height, width, 3)
    label: int
    things: list[Thing]
    mask: npt.NDArray[np.uint8]
    figure: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int8]
    questions: list[Question]


def write_layout(
    root: str | Path, layout: str, count: int, *, val_count: int | None = None, size: Size = 64, seed: int = 0
) -> Path:
    """Write `count` training and `val_count` validation scenes (a quarter as many unless told) below `root`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     root = write_layout(folder, "ade20k", 2, size=32)
    ...     print(sorted(str(path.relative_to(root)) for path in root.rglob("*.png")))
    ['annotations/training/ADE_train_00000001.png', 'annotations/training/ADE_train_00000002.png', \
'annotations/validation/ADE_val_00000001.png']
    """
    if layout not in LAYOUTS:
        raise VitfocusError(f"Shapes cannot be written as {layout!r}: {nearest(layout, LAYOUTS)}")
    counts = {"train": count, "val": max(1, count // 4) if val_count is None else val_count}
    if min(counts.values()) < 0:
        raise VitfocusError(f"Shapes cannot write fewer than 0 pictures, but count={count}, val_count={val_count}.")
    root = Path(root)
    manifest = {"layout": layout, **counts, "size": picture_size(size), "seed": seed, "version": VERSION}
    _claim(root, json.dumps(manifest).encode())
    for split in SPLITS:
        for path, content in LAYOUTS[layout](split, _pictures(split, counts[split], size, seed)):
            _write(root / path, content)
    return root


def _claim(root: Path, manifest: bytes) -> None:
    """Refuse a folder that holds something else, and note in it what it is about to hold."""
    noted = root / MANIFEST
    if noted.is_file():
        if noted.read_bytes() != manifest:
            raise VitfocusError(
                f"{root} holds other Shapes ({noted.read_text()}): choose another folder, or remove it."
            )
    elif root.exists() and (not root.is_dir() or any(not path.name.startswith(".") for path in root.iterdir())):
        raise VitfocusError(f"{root} holds something other than Shapes: choose a new or empty folder.")
    _write(noted, manifest)


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, unless it is there already."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _pictures(split: str, count: int, size: Size, seed: int) -> Iterator[Picture]:
    item = 0
    for scenes, images, owner in drawn_scenes(range(count), split, size, seed):
        masks = semantic_mask(scenes, owner)
        for scene in range(len(scenes)):
            things = scenes.things(scene)
            yield Picture(
                item=item,
                image=images[scene].transpose(1, 2, 0),
                label=int(scenes.label[scene]),
                things=things,
                mask=masks[scene],
                figure=scenes.figure[scene],
                owner=owner[scene],
                questions=ask(things, seed, split, item),
            )
            item += 1


def _image_folder(split: str, pictures: Iterator[Picture]) -> Files:
    for picture in pictures:
        yield f"{split}/{CLASSES[picture.label]}/{picture.item:06d}.png", _png(picture.image)


def _ade20k(split: str, pictures: Iterator[Picture]) -> Files:
    """Write classes counted from 1, with 0 for the unlabelled rim."""
    folder = {"train": "training", "val": "validation"}[split]
    for picture in pictures:
        name = f"ADE_{split}_{picture.item + 1:08d}"
        yield f"images/{folder}/{name}.jpg", _jpeg(picture.image)
        yield f"annotations/{folder}/{name}.png", _png(_with_rim(picture.mask + 1, 0))


def _cityscapes(split: str, pictures: Iterator[Picture]) -> Files:
    """Write both notations of the classes: Cityscapes' own ids, and the ids trained on, 255 where ignored."""
    for picture in pictures:
        name = f"{split}/shapes/shapes_{picture.item:06d}_000019"
        own = np.array(CITYSCAPES_IDS, np.uint8)[picture.mask]
        yield f"leftImg8bit/{name}_leftImg8bit.png", _png(picture.image)
        yield f"gtFine/{name}_gtFine_labelIds.png", _png(_with_rim(own, CITYSCAPES_RIM))
        yield f"gtFine/{name}_gtFine_labelTrainIds.png", _png(_with_rim(picture.mask, IGNORE))


def _coco(split: str, pictures: Iterator[Picture]) -> Files:
    """Write boxes and masks of what is seen of each object; as in COCO, the category ids have a gap."""
    categories = [{"supercategory": "shape", "id": _category(k), "name": name} for k, name in enumerate(CLASSES)]
    images, annotations = [], []
    for picture in pictures:
        number = _image_id(split, picture)
        name = f"{number:012d}.jpg"
        yield f"{split}2017/{name}", _jpeg(picture.image)
        height, width = picture.owner.shape
        images.append({"id": number, "file_name": name, "height": height, "width": width, "license": 1})
        annotations += [
            {**annotation, "id": number * 100 + place, "image_id": number}
            for place, annotation in enumerate(_coco_annotations(picture))
        ]
    content = {**_head(), "images": images, "annotations": annotations, "categories": categories}
    yield f"annotations/instances_{split}2017.json", _json(content)


def _coco_annotations(picture: Picture) -> Iterator[dict[str, Any]]:
    classes, masks, boxes = instances(picture.figure, picture.owner)
    small = Counter(thing.figure for thing in picture.things if thing.slot != MAIN)
    flock, size = small.most_common(1)[0] if small else ("", 0)
    crowd = picture.item % CROWDS_EVERY == 0 and size >= CROWD
    in_crowd = (classes - 1 == CLASSES.index(flock)) & crowd if flock else np.zeros(len(classes), bool)
    for number, mask, box, hidden in zip(classes, masks, boxes, in_crowd, strict=True):
        if not hidden:
            yield _coco_annotation(int(number) - 1, mask, box, polygons(mask), 0)
    if in_crowd.any():
        mask = masks[in_crowd].any(axis=0)
        box = np.concatenate([boxes[in_crowd, :2].min(axis=0), boxes[in_crowd, 2:].max(axis=0)])
        yield _coco_annotation(CLASSES.index(flock), mask, box, run_lengths(mask), 1)


def _coco_annotation(
    figure: int, mask: npt.NDArray[np.bool_], box: npt.NDArray[np.int64], outline: Any, crowd: int
) -> dict[str, Any]:
    x0, y0, x1, y1 = box.tolist()
    return {
        "category_id": _category(figure),
        "segmentation": outline,
        "area": int(mask.sum()),
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "iscrowd": crowd,
    }


def _vqav2(split: str, pictures: Iterator[Picture]) -> Files:
    """Write a few questions for each picture, each with its ten annotators' answers."""
    year = f"{split}2014"
    questions, annotations = [], []
    for picture in pictures:
        number = _image_id(split, picture)
        yield f"{year}/COCO_{year}_{number:012d}.jpg", _jpeg(picture.image)
        for place, question in enumerate(picture.questions[:QUESTIONS_A_PICTURE]):
            ids = {"image_id": number, "question_id": number * 1000 + place}
            questions.append({**ids, "question": question.text})
            annotations.append({**ids, **_vqa_annotation(question)})
    kind = {"data_type": "mscoco", "data_subtype": year}
    head = {"info": _head()["info"], "license": _head()["licenses"][0]}
    asked = {**head, "task_type": "Open-Ended", **kind, "questions": questions}
    yield f"v2_OpenEnded_mscoco_{year}_questions.json", _json(asked)
    yield f"v2_mscoco_{year}_annotations.json", _json({**head, **kind, "annotations": annotations})


def _vqa_annotation(question: Question) -> dict[str, Any]:
    answers = [
        {"answer": answer, "answer_confidence": "yes" if answer == question.answer else "maybe", "answer_id": place}
        for place, answer in enumerate(question.answers, start=1)
    ]
    return {
        "question_type": question.kind,
        "answer_type": question.answer_type,
        "multiple_choice_answer": question.answer,
        "answers": answers,
    }


LAYOUTS: dict[str, Callable[[str, Iterator[Picture]], Files]] = {
    "imagefolder": _image_folder,
    "ade20k": _ade20k,
    "cityscapes": _cityscapes,
    "coco": _coco,
    "vqav2": _vqav2,
}


def _head() -> dict[str, Any]:
    return {
        "info": {"description": "Shapes, drawn by vitfocus", "version": str(VERSION), "year": 2025},
        "licenses": [{"id": 1, "name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"}],
    }


def _category(figure: int) -> int:
    """Return the COCO category of a figure: 1-5, 7-11."""
    return figure + 1 if figure < 5 else figure + 2


def _image_id(split: str, picture: Picture) -> int:
    """Return an id that no picture of the other split has."""
    return picture.item + 1 + 500_000 * SPLITS.index(split)


def _with_rim(mask: npt.NDArray[np.uint8], value: int) -> npt.NDArray[np.uint8]:
    """Mark the outermost pixels, which real annotations often leave out."""
    return np.pad(mask[1:-1, 1:-1], 1, constant_values=value)


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    return _encoded(pixels, format="PNG")


def _jpeg(pixels: npt.NDArray[np.uint8]) -> bytes:
    return _encoded(pixels, format="JPEG", quality=95, subsampling=0)


def _encoded(pixels: npt.NDArray[np.uint8], **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, **options)
    return buffer.getvalue()


def _json(content: Any) -> bytes:
    return json.dumps(content).encode()
