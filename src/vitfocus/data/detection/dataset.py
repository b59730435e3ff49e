"""Detection data sets: COCO's layout on disk, and Shapes.

A target has the form that torchvision's detectors take: `boxes` (n, 4) as x0, y0, x1, y1, `labels` (n,) counted from 1
in the order of `classes`, `masks` (n, height, width) uint8. As in COCO, crowds are not targets, but they are part of
`truth`, so that COCO's evaluation ignores detections inside them.

Masks are polygons for single objects, run lengths for crowds and detections. Polygons written here follow pixel edges,
so their area is exactly the number of pixels. COCO's polygons cannot have holes: a mask with a hole is cut in two
through it, and both parts are listed.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.records import FINITE, MAX_ANNOTATION_BYTES, read_json
from vitfocus.data.image_files import read_rgb, to_tensor
from vitfocus.data.loader import SampleDataset
from vitfocus.data.shapes.dataset import CLASSES, VERSION, detection_target, draw_all
from vitfocus.recipes import Data

Target = dict[str, Tensor]
SOURCES = ("shapes", "coco")
_SHAPES_LENGTHS = {"train": 20_000, "val": 2_000}


class DetectionDataset(SampleDataset[tuple[Tensor, Target]], Protocol):
    """Images, uint8 (3, H, W), and their targets. `category_ids` are COCO's ids of the labels 1, 2, ..."""

    classes: list[str]
    category_ids: list[int]

    def image(self, index: int) -> Tensor:
        """The image alone."""

    def image_id(self, index: int) -> int:
        """The image's id in `truth`."""

    def truth(self) -> dict[str, Any]:
        """The ground truth in the form of COCO's JSON, against which detections are scored."""


def open_detections(
    data: Data, split: str, keep_empty: bool = True, classes: Sequence[str] | None = None
) -> DetectionDataset:
    """Open a split of the data set that `data.source` names, and check that its files are complete.

    Args:
        data: The [data] section of a recipe.
        split: "train" or "val".
        keep_empty: Whether to keep images without an object to learn from.
        classes: The training set's classes, with which those of the split are compared.

    Raises:
        VitfocusError: The source is unknown, or its files are missing or wrong.
    """
    given, length = (data.train_split, data.train_length) if split == "train" else (data.val_split, data.val_length)
    if data.source not in SOURCES:
        raise VitfocusError(f"Detection has no data source {data.source!r}: {nearest(data.source, SOURCES)}")
    if data.source == "shapes":
        return ShapesDetections(split, length or _SHAPES_LENGTHS[split], data.size)
    found = CocoDetections(data.root, split, given, keep_empty, length)
    if classes is not None and list(classes) != found.classes:
        differing = sorted(set(found.classes) ^ set(classes))[:3] or ["the same names in another order"]
        raise VitfocusError(f"{found.file} has other classes than the training set: {', '.join(differing)}.")
    return found


class CocoImage(msgspec.Struct):
    """An image in COCO's JSON."""

    id: int
    file_name: str
    height: int
    width: int


class CocoCategory(msgspec.Struct):
    """A category in COCO's JSON."""

    id: int
    name: str


class RunLengths(TypedDict):
    """A mask as COCO's run lengths, compressed or not."""

    size: list[int]
    counts: list[int] | str


_Number = Annotated[float, msgspec.Meta(ge=-FINITE, le=FINITE)]
_Polygon = Annotated[list[_Number], msgspec.Meta(min_length=6)]  # x, y, x, y, ...: three points at least


class CocoAnnotation(msgspec.Struct):
    """An object in COCO's JSON: its outline is a list of polygons, or the run lengths of a crowd."""

    id: int
    image_id: int
    category_id: int
    bbox: Annotated[list[_Number], msgspec.Meta(min_length=4, max_length=4)]
    area: _Number
    segmentation: Annotated[list[_Polygon], msgspec.Meta(min_length=1)] | RunLengths
    iscrowd: int = 0

    @property
    def is_target(self) -> bool:
        """Whether a detector is trained on it: a single object with a box of at least one pixel."""
        return not self.iscrowd and min(self.bbox[2:]) >= 1


class CocoInstances(msgspec.Struct):
    """annotations/instances_NAME.json."""

    images: list[CocoImage]
    annotations: list[CocoAnnotation]
    categories: list[CocoCategory]


class CocoDetections:
    """COCO's layout: `annotations/instances_NAME.json`, and the images in a folder NAME or images/NAME."""

    def __init__(self, root: str | Path, split: str, given: str = "", keep_empty: bool = True, length: int = 0) -> None:
        self.file, self.folder = find_coco(Path(root), split, given)
        content = read_json(self.file, CocoInstances, writer="COCO", max_bytes=MAX_ANNOTATION_BYTES)
        self._categories = sorted(content.categories, key=lambda category: category.id)
        self.classes = [category.name for category in self._categories]
        self.category_ids = [category.id for category in self._categories]
        self._labels = {number: label for label, number in enumerate(self.category_ids, start=1)}
        of_image: dict[int, list[CocoAnnotation]] = {image.id: [] for image in content.images}
        listed: dict[str, list[Any]] = {"image": content.images, "category": content.categories}
        for what, records in listed.items():
            if twice := [number for number, count in Counter(one.id for one in records).items() if count > 1]:
                raise VitfocusError(f"{self.file} lists the {what} {twice[0]} twice.")
        for one in content.annotations:
            for what, number, known in (("image", one.image_id, of_image), ("category", one.category_id, self._labels)):
                if number not in known:
                    unlisted = f"the {what} {number}, which is not in its list"
                    raise VitfocusError(f"Annotation {one.id} in {self.file} refers to {unlisted}.")
            of_image[one.image_id].append(one)
        images = [one for one in content.images if keep_empty or any(each.is_target for each in of_image[one.id])]
        self.images = images[:length] if length else images
        self.annotations = {image.id: of_image[image.id] for image in self.images}
        if not self.images:
            raise VitfocusError(f"{self.file} lists no image{'' if keep_empty else ' with an object'}.")
        present = {entry.name for entry in os.scandir(self.folder)}
        missing = [image.file_name for image in self.images if image.file_name not in present]
        missing = [name for name in missing if "/" not in name or not (self.folder / name).is_file()]
        if missing:
            raise VitfocusError(
                f"{len(missing)} of the {len(self.images)} images that {self.file} lists are missing from "
                f"{self.folder}; the first is {missing[0]}."
            )

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Tensor:
        image = self.images[index]
        pixels = to_tensor(read_rgb(self.folder / image.file_name))
        height, width = pixels.shape[1:]
        if (height, width) != (image.height, image.width):
            listed = f"{image.width} x {image.height} in {self.file.name}"
            raise VitfocusError(f"{image.file_name} is {width} x {height} pixels, and {listed}")
        return pixels

    def read(self, index: int) -> tuple[Tensor, Target]:
        pixels = self.image(index)
        height, width = pixels.shape[1:]
        objects = [one for one in self.annotations[self.images[index].id] if one.is_target]
        boxes = torch.tensor([one.bbox for one in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2].clamp_(0, width)
        boxes[:, 1::2].clamp_(0, height)
        kept = ((boxes[:, 2:] - boxes[:, :2]) >= 1).all(dim=1)
        objects = [one for one, keep in zip(objects, kept.tolist(), strict=True) if keep]
        masks = np.zeros((len(objects), height, width), np.uint8)
        for place, one in enumerate(objects):
            masks[place] = decode_mask(one.segmentation, height, width)
        labels = torch.tensor([self._labels[one.category_id] for one in objects], dtype=torch.int64)
        return pixels, {"boxes": boxes[kept], "labels": labels, "masks": torch.from_numpy(masks)}

    def image_id(self, index: int) -> int:
        return self.images[index].id

    def name(self, index: int) -> str:
        return str(self.folder / self.images[index].file_name)

    def digest(self) -> str:
        listing = hashlib.sha256(msgspec.json.encode(self.truth()))
        for image in self.images:
            listing.update(f"{image.file_name} {(self.folder / image.file_name).stat().st_size}\n".encode())
        return listing.hexdigest()

    def truth(self) -> dict[str, Any]:
        annotations = [one for image in self.images for one in self.annotations[image.id]]
        content = {"info": {}, "images": self.images, "annotations": annotations, "categories": self._categories}
        return msgspec.to_builtins(content)


class ShapesDetections:
    """Shapes, drawn once and kept in memory; it has no crowds."""

    def __init__(self, split: str, length: int, size: int) -> None:
        self.split = split
        self.images, self.shape_class, self.owner = draw_all(range(length), split, size)
        self.classes = list(CLASSES)
        self.category_ids = list(range(1, len(CLASSES) + 1))

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Tensor:
        return torch.from_numpy(self.images[index])

    def read(self, index: int) -> tuple[Tensor, Target]:
        return self.image(index), detection_target(self.shape_class[index], self.owner[index])

    def image_id(self, index: int) -> int:
        return index + 1

    def name(self, index: int) -> str:
        return f"Shapes {self.split} {index}"

    def digest(self) -> str:
        facts = f"shapes {VERSION} detect {self.split} {len(self)} {self.owner.shape[1:]} 0"
        return hashlib.sha256(facts.encode()).hexdigest()

    def truth(self) -> dict[str, Any]:
        height, width = self.owner.shape[1:]
        annotations: list[dict[str, Any]] = []
        for index in range(len(self)):
            target = self.read(index)[1]
            rows = zip(target["boxes"].tolist(), target["labels"].tolist(), target["masks"].numpy(), strict=True)
            for (x0, y0, x1, y1), label, mask in rows:
                ids = {"id": len(annotations) + 1, "image_id": index + 1, "category_id": label, "iscrowd": 0}
                box = {"bbox": [x0, y0, x1 - x0, y1 - y0], "area": int(mask.sum())}
                annotations.append({**ids, **box, "segmentation": encode_masks(mask[None])[0]})
        images = [{"id": index + 1, "height": height, "width": width} for index in range(len(self))]
        categories = [{"id": number, "name": name} for number, name in enumerate(self.classes, start=1)]
        return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def find_coco(root: Path, split: str, given: str = "") -> tuple[Path, Path]:
    """The annotations and the image folder of a split: the given name, or the latest year that exists."""
    if not root.is_dir():
        raise VitfocusError(f"There is no data folder {str(root)!r}: set data.root to COCO's.")
    annotations = root / "annotations"
    files = [] if given else sorted(annotations.glob(f"instances_{split}*.json"))
    file = files[-1] if files else annotations / f"instances_{given or f'{split}2017'}.json"
    name = file.stem.removeprefix("instances_")
    folders = [folder for folder in (root / name, root / "images" / name) if folder.is_dir()]
    missing = [f"the annotations {file}"] * (not file.is_file()) + [f"the images {root / name}"] * (not folders)
    if missing:
        raise VitfocusError(
            f"{root} is not a COCO folder with a split for {split}: {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing (data.{split}_split names the split)."
        )
    return file, folders[0]


Mask = npt.NDArray[np.bool_]
Loop = list[tuple[int, int]]


def decode_mask(stored: Any, height: int, width: int) -> np.ndarray:
    """Decode COCO's polygons or run lengths, compressed or not, to a mask uint8 (height, width)."""
    coco = mask_tools()
    if isinstance(stored, list):
        lists = [polygon for polygon in stored if len(polygon) >= 6]  # COCO's tools would read four numbers as a box
        if not lists:
            return np.zeros((height, width), np.uint8)
        stored = coco.merge(coco.frPyObjects(lists, height, width))
    elif list(stored["size"]) != [height, width]:
        tall, wide = [*stored["size"], "?", "?"][:2]
        raise VitfocusError(f"a mask in run lengths is {wide} x {tall} pixels, and its image {width} x {height}")
    elif isinstance(stored["counts"], list):
        stored = coco.frPyObjects(stored, height, width)
    mask: np.ndarray = coco.decode(stored)
    return mask


def encode_masks(masks: Any) -> list[dict[str, Any]]:
    """Encode masks (n, height, width) as COCO's compressed run lengths, with counts as text for JSON."""
    stacked = np.asfortranarray(np.asarray(masks, np.uint8).transpose(1, 2, 0))
    encoded = mask_tools().encode(stacked) if stacked.shape[2] else []
    return [{"size": list(one["size"]), "counts": bytes(one["counts"]).decode("ascii")} for one in encoded]


def mask_tools() -> Any:
    """The module that encodes and decodes masks, or an error that says how to install it."""
    try:
        from faster_coco_eval import mask
    except ImportError:
        raise VitfocusError("Detection needs the extra vitfocus[det].") from None
    return mask


def run_lengths(mask: Mask) -> dict[str, Any]:
    """Encode a mask as COCO's uncompressed run lengths: column by column, the first run outside the mask.

    >>> run_lengths(np.array([[0, 1], [0, 1], [1, 0]], bool))
    {'counts': [2, 3, 1], 'size': [3, 2]}
    """
    flat = np.concatenate([[False], mask.T.ravel(), [not mask[-1, -1]]])
    ends = np.flatnonzero(flat[1:] != flat[:-1])
    return {"counts": np.diff(ends, prepend=0).tolist(), "size": list(mask.shape)}


def polygons(mask: Mask) -> list[list[int]]:
    """Encode a mask as COCO's polygons [x0, y0, x1, y1, ...], which cover it exactly.

    >>> polygons(np.array([[0, 1, 1], [0, 1, 1]], bool))
    [[1, 0, 3, 0, 3, 2, 1, 2]]
    """
    loops = _loops(mask)
    for loop in loops:
        if sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(loop, loop[1:] + loop[:1], strict=True)) < 0:
            middle = (min(x for x, _ in loop) + max(x for x, _ in loop)) // 2
            left, right = mask.copy(), mask.copy()
            left[:, middle:], right[:, :middle] = False, False
            return polygons(left) + polygons(right)
    return [[value for corner in loop for value in corner] for loop in loops]


def _loops(mask: Mask) -> list[Loop]:
    """Follow every outline with the mask on the right: outer ones clockwise, holes counter-clockwise."""
    next_corners = _steps(mask)
    loops = []
    while next_corners:
        start = min(next_corners, key=lambda corner: (corner[1], corner[0]))
        loop: Loop = []
        corner, heading = start, (1, 0)
        while True:
            choices = next_corners[corner]
            # Where two pixels touch at a corner, turning right keeps them apart.
            right = (corner[0] - heading[1], corner[1] + heading[0])
            step = right if len(choices) > 1 and right in choices else choices[0]
            choices.remove(step)
            if not choices:
                del next_corners[corner]
            turned = (step[0] - corner[0], step[1] - corner[1])
            if turned != heading or not loop:
                loop.append(corner)
            corner, heading = step, turned
            if corner == start:
                break
        loops.append(loop)
    return loops


def _steps(mask: Mask) -> dict[tuple[int, int], Loop]:
    """For each corner (x, y) on an outline, the corners one pixel edge further."""
    padded = np.pad(mask, 1)
    sides = {  # which neighbour is outside: where the pixel's edge towards it starts and ends, clockwise
        (-1, 0): ((0, 0), (1, 0)),
        (0, 1): ((1, 0), (1, 1)),
        (1, 0): ((1, 1), (0, 1)),
        (0, -1): ((0, 1), (0, 0)),
    }
    steps: dict[tuple[int, int], Loop] = {}
    for (down, across), (start, end) in sides.items():
        outside = ~np.roll(padded, (-down, -across), (0, 1))[1:-1, 1:-1]
        for y, x in np.argwhere(mask & outside).tolist():
            steps.setdefault((x + start[0], y + start[1]), []).append((x + end[0], y + end[1]))
    return steps
