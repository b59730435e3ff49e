"""Segmentation data sets: ADE20K, Cityscapes, ACDC, CamVid, any folder of images and masks, and Shapes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.data.image_files import rgb_picture
from vitfocus.data.segmentation.layouts import LAYOUTS, Layout
from vitfocus.data.shapes.dataset import MASK_CLASSES, Shapes
from vitfocus.recipes.settings import Data

SOURCES = ("shapes", *LAYOUTS)
SHAPES_LENGTH = {"train": 4_000, "val": 500}
Mask = npt.NDArray[np.uint8]


class SegmentationDataset(Protocol):
    """Images with masks that are read by index; 255 in a mask is ignored."""

    classes: tuple[str, ...]

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, Mask]:
        """The RGB image and its mask (height, width); any exception means that one of them is broken."""

    def name(self, index: int) -> str:
        """The image's name in messages."""

    def digest(self) -> str:
        """A SHA-256 that changes when the data set does."""


def open_masks(data: Data, split: str) -> SegmentationDataset:
    """Open a split ("train" or "val") of the data set that `data.source` names.

    Raises:
        VitfocusError: The source is unknown, or its folder has another layout.
    """
    length = data.train_length if split == "train" else data.val_length
    if data.source == "shapes":
        return ShapesMasks(split, length or SHAPES_LENGTH[split], data.size)
    if data.source not in LAYOUTS:
        raise VitfocusError(f"There is no segmentation data source {data.source!r}: {nearest(data.source, SOURCES)}")
    given = data.train_split if split == "train" else data.val_split
    root = Path(data.root).expanduser()
    layout = LAYOUTS[data.source](root, split, given)
    return MaskFiles(root, Layout(layout.pairs[: length or None], layout.classes, layout.table))


def guess_source(root: Path) -> str | None:
    """The layout of a folder, if its file names tell."""
    if (root / "leftImg8bit").is_dir() or any(root.glob("*_leftImg8bit.png")):
        return "cityscapes"
    if (root / "rgb_anon").is_dir():
        return "acdc"
    if (root / "trainannot").is_dir() or (root / "valannot").is_dir():
        return "camvid"
    return "ade20k" if next(root.glob("images/**/ADE_*.jpg"), None) else None


class MaskFiles:
    """Image and mask files."""

    def __init__(self, root: Path, layout: Layout) -> None:
        self.root, self.pairs, self.classes, self.table = root, layout.pairs, layout.classes, layout.table

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, index: int) -> tuple[Image.Image, Mask]:
        """Decode an image and its mask."""
        file, mask = self.pairs[index]
        with Image.open(file) as image, Image.open(mask) as stored:
            if stored.mode not in ("L", "P", "1"):
                raise VitfocusError(f"{mask} has the mode {stored.mode}; a mask has one 8-bit number per pixel")
            values = np.asarray(stored, np.uint8)
            if values.shape != (image.height, image.width):
                size = f"{values.shape[1]}x{values.shape[0]}"
                raise VitfocusError(f"{mask} is {size} pixels, but its image is {image.width}x{image.height}")
            return rgb_picture(image), self.table[values]

    def name(self, index: int) -> str:
        """The image's path."""
        return str(self.pairs[index][0])

    def digest(self) -> str:
        """SHA-256 of the files' names and sizes; their contents are not read."""
        listing = hashlib.sha256(self.table.tobytes())
        for pair in self.pairs:
            for file in pair:
                line = f"{file.relative_to(self.root)} {file.stat().st_size}\n"
                listing.update(line.encode(errors="surrogateescape"))
        return listing.hexdigest()


@dataclass
class ShapesMasks:
    """Shapes, drawn once and kept in memory."""

    split: str
    length: int
    size: int

    def __post_init__(self) -> None:
        self.classes = tuple(MASK_CLASSES)
        shapes = Shapes(self.split, length=self.length, size=self.size, task="segment")
        drawn = shapes.__getitems__(list(range(self.length)))
        self.pixels = torch.stack([torch.as_tensor(image) for image, _ in drawn]).numpy()
        self.masks = torch.stack([torch.as_tensor(mask) for _, mask in drawn]).to(torch.uint8).numpy()

    def __len__(self) -> int:
        return self.length

    def read(self, index: int) -> tuple[Image.Image, Mask]:
        """One scene and its mask."""
        return Image.fromarray(np.ascontiguousarray(self.pixels[index].transpose(1, 2, 0))), self.masks[index]

    def name(self, index: int) -> str:
        """The split and the index."""
        return f"shapes/{self.split} {index}"

    def digest(self) -> str:
        """SHA-256 of pixels and masks."""
        digest = hashlib.sha256(np.ascontiguousarray(self.pixels).data)
        digest.update(np.ascontiguousarray(self.masks).data)
        return digest.hexdigest()
