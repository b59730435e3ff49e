"""Writes Shapes to disk in the layouts of public data sets, so that the readers of those can be used and tested.

The layouts are `imagefolder`, `ade20k`, `cityscapes`, `coco` and `vqav2`. Files are written atomically, a second call
with the same arguments only writes missing files, and a folder with other content is refused.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.files import write_bytes
from vitfocus.data.detection.dataset import polygons, run_lengths
from vitfocus.data.segmentation.dataset import CITYSCAPES_IDS, IGNORE
from vitfocus.data.shapes.dataset import (
    CLASSES,
    VERSION,
    ShapesQuestion,
    Size,
    ask,
    drawn_scenes,
    image_size,
    instances,
    semantic_mask,
)
from vitfocus.data.shapes.scene import MAIN, SPLITS, SceneObject

Files = Iterator[tuple[str, bytes]]  # path below the root, content

CITYSCAPES_BORDER = 2  # the id of "rectification border", which is ignored
QUESTIONS_PER_IMAGE = 3
CROWD, CROWD_EVERY = 3, 4  # every 4th image with at least 3 small objects of one shape annotates them as a crowd
MANIFEST = "shapes.json"


@dataclass(frozen=True)
class DrawnScene:
    """One scene with its image and annotations; masks are (height, width)."""

    item: int
    image: npt.NDArray[np.uint8]  # (height, width, 3)
    label: int
    objects: list[SceneObject]
    mask: npt.NDArray[np.uint8]
    shape_class: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int8]
    questions: list[ShapesQuestion]


def write_layout(
    root: str | Path, layout: str, count: int, *, val_count: int | None = None, size: Size = 64, seed: int = 0
) -> Path:
    """Write Shapes to a folder in the layout of a public data set.

    Args:
        root: The folder, which must be new, empty, or written by the same call before.
        layout: "imagefolder", "ade20k", "cityscapes", "coco" or "vqav2".
        count: Number of training scenes.
        val_count: Number of validation scenes; by default a quarter of `count`.
        size: Height and width in pixels, or one number for both.
        seed: Seed of the data set.

    Returns:
        The folder.

    Raises:
        VitfocusError: An argument is not valid, or the folder has other content.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     root = write_layout(folder, "ade20k", 2, size=32)
        ...     print(*sorted(path.name for path in root.rglob("*.png")))
        ADE_train_00000001.png ADE_train_00000002.png ADE_val_00000001.png
    """
    if layout not in LAYOUTS:
        raise VitfocusError(f"Shapes cannot be written as {layout!r}: {nearest(layout, LAYOUTS)}")
    counts = {"train": count, "val": max(1, count // 4) if val_count is None else val_count}
    if min(counts.values()) < 0:
        raise VitfocusError(
            f"Shapes cannot write count={count} and val_count={val_count} images; both must be 0 or more."
        )
    root = Path(root)
    manifest = {"layout": layout, **counts, "size": image_size(size), "seed": seed, "version": VERSION}
    _claim(root, json.dumps(manifest).encode())
    for split in SPLITS:
        for path, content in LAYOUTS[layout](split, _draw(split, counts[split], size, seed)):
            _write(root / path, content)
    return root


def _claim(root: Path, manifest: bytes) -> None:
    """Refuse a folder with other content, and write the manifest."""
    file = root / MANIFEST
    if file.is_file():
        if file.read_bytes() != manifest:
            raise VitfocusError(f"{root} holds other Shapes ({file.read_text()}): choose another folder, or remove it.")
    elif root.exists() and (not root.is_dir() or any(not path.name.startswith(".") for path in root.iterdir())):
        raise VitfocusError(f"{root} holds something other than Shapes: choose a new or empty folder.")
    _write(file, manifest)


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, unless it exists with this content."""
    if not path.is_file() or path.read_bytes() != content:
        write_bytes(path, content, sync=False)  # many small files, which can be drawn again


def _draw(split: str, count: int, size: Size, seed: int) -> Iterator[DrawnScene]:
    item = 0
    for scenes, images, owner in drawn_scenes(range(count), split, size, seed):
        masks = semantic_mask(scenes.shape_class, owner)
        for scene in range(len(scenes)):
            objects = scenes.objects(scene)
            yield DrawnScene(
                item=item,
                image=images[scene].transpose(1, 2, 0),
                label=int(scenes.label[scene]),
                objects=objects,
                mask=masks[scene],
                shape_class=scenes.shape_class[scene],
                owner=owner[scene],
                questions=ask(objects, seed, split, item),
            )
            item += 1


def _image_folder(split: str, scenes: Iterator[DrawnScene]) -> Files:
    for scene in scenes:
        yield f"{split}/{CLASSES[scene.label]}/{scene.item:06d}.png", _png(scene.image)


def _ade20k(split: str, scenes: Iterator[DrawnScene]) -> Files:
    """Classes are counted from 1, and 0 is the unlabelled border."""
    folder = {"train": "training", "val": "validation"}[split]
    for scene in scenes:
        name = f"ADE_{split}_{scene.item + 1:08d}"
        yield f"images/{folder}/{name}.jpg", _jpeg(scene.image)
        yield f"annotations/{folder}/{name}.png", _png(_with_border(scene.mask + 1, 0))


def _cityscapes(split: str, scenes: Iterator[DrawnScene]) -> Files:
    """Masks with both kinds of ids: Cityscapes' labelIds, and labelTrainIds with 255 for ignored pixels."""
    for scene in scenes:
        name = f"{split}/shapes/shapes_{scene.item:06d}_000019"
        ids = np.array(CITYSCAPES_IDS, np.uint8)[scene.mask]
        yield f"leftImg8bit/{name}_leftImg8bit.png", _png(scene.image)
        yield f"gtFine/{name}_gtFine_labelIds.png", _png(_with_border(ids, CITYSCAPES_BORDER))
        yield f"gtFine/{name}_gtFine_labelTrainIds.png", _png(_with_border(scene.mask, IGNORE))


def _coco(split: str, scenes: Iterator[DrawnScene]) -> Files:
    """Boxes and masks of the visible part of each object; as in COCO, the category ids have a gap."""
    categories = [{"supercategory": "shape", "id": _category(k), "name": name} for k, name in enumerate(CLASSES)]
    images, annotations = [], []
    for scene in scenes:
        number = _image_id(split, scene)
        name = f"{number:012d}.jpg"
        yield f"{split}2017/{name}", _jpeg(scene.image)
        height, width = scene.owner.shape
        images.append({"id": number, "file_name": name, "height": height, "width": width, "license": 1})
        annotations += [
            {**annotation, "id": number * 100 + place, "image_id": number}
            for place, annotation in enumerate(_coco_annotations(scene))
        ]
    content = {**_head(), "images": images, "annotations": annotations, "categories": categories}
    yield f"annotations/instances_{split}2017.json", _json(content)


def _coco_annotations(scene: DrawnScene) -> Iterator[dict[str, Any]]:
    classes, masks, boxes = instances(scene.shape_class, scene.owner)
    small = Counter(one.shape for one in scene.objects if one.slot != MAIN)
    crowd_shape, size = small.most_common(1)[0] if small else ("", 0)
    crowd = scene.item % CROWD_EVERY == 0 and size >= CROWD
    in_crowd = (classes - 1 == CLASSES.index(crowd_shape)) & crowd if crowd_shape else np.zeros(len(classes), bool)
    rows = zip(classes - 1, masks, boxes, in_crowd, strict=True)
    annotated: list[Any] = [(shape, mask, box, polygons(mask), 0) for shape, mask, box, hidden in rows if not hidden]
    if in_crowd.any():
        mask = masks[in_crowd].any(axis=0)
        box = np.concatenate([boxes[in_crowd, :2].min(axis=0), boxes[in_crowd, 2:].max(axis=0)])
        annotated.append((CLASSES.index(crowd_shape), mask, box, run_lengths(mask), 1))
    for shape, mask, box, outline, is_crowd in annotated:
        x0, y0, x1, y1 = box.tolist()
        yield {
            "category_id": _category(int(shape)),
            "segmentation": outline,
            "area": int(mask.sum()),
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "iscrowd": is_crowd,
        }


def _vqav2(split: str, scenes: Iterator[DrawnScene]) -> Files:
    """A few questions per image, each with ten answers."""
    year = f"{split}2014"
    questions, annotations = [], []
    for scene in scenes:
        number = _image_id(split, scene)
        yield f"{year}/COCO_{year}_{number:012d}.jpg", _jpeg(scene.image)
        for place, question in enumerate(scene.questions[:QUESTIONS_PER_IMAGE]):
            ids = {"image_id": number, "question_id": number * 1000 + place}
            questions.append({**ids, "question": question.text})
            annotations.append({**ids, **_vqa_annotation(question)})
    kind = {"data_type": "mscoco", "data_subtype": year}
    head = {"info": _head()["info"], "license": _head()["licenses"][0]}
    asked = {**head, "task_type": "Open-Ended", **kind, "questions": questions}
    yield f"v2_OpenEnded_mscoco_{year}_questions.json", _json(asked)
    yield f"v2_mscoco_{year}_annotations.json", _json({**head, **kind, "annotations": annotations})


def _vqa_annotation(question: ShapesQuestion) -> dict[str, Any]:
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


LAYOUTS: dict[str, Callable[[str, Iterator[DrawnScene]], Files]] = {
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


def _category(shape_class: int) -> int:
    """The COCO category of a shape: 1-5, 7-11."""
    return shape_class + 1 if shape_class < 5 else shape_class + 2


def _image_id(split: str, scene: DrawnScene) -> int:
    """An id that no image of the other split has."""
    return scene.item + 1 + 500_000 * SPLITS.index(split)


def _with_border(mask: npt.NDArray[np.uint8], value: int) -> npt.NDArray[np.uint8]:
    """Set the outermost pixels, which real annotations often leave out."""
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
