"""Pictures with masks, read by the layouts of ADE20K, Cityscapes, ACDC, CamVid, plain folders, or drawn by Shapes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.data.classification.dataset import Broken
from vitfocus.data.image_files import rgb_picture
from vitfocus.data.segmentation.classes import IGNORE
from vitfocus.data.segmentation.layouts import LAYOUTS, Layout
from vitfocus.recipes.settings import Data

SOURCES = ("shapes", *LAYOUTS)
SHAPES_LENGTH = {"train": 4_000, "val": 500}
Mask = npt.NDArray[np.uint8]


class Masks(Protocol):
    """A numbered set of pictures with masks; in a mask 255 does not count."""

    classes: tuple[str, ...]

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, Mask]:
        """The picture, RGB, and its mask (height, width); any exception means that one of them is broken."""

    def name(self, index: int) -> str:
        """What to call it in a message."""

    def digest(self) -> str:
        """A SHA-256 that changes when the set does."""


def open_masks(data: Data, split: str) -> Masks:
    """The pictures and masks of a split ("train" or "val"); a folder that is not laid out so is told what it lacks."""
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
    """Which layout a folder has, where its names tell."""
    if (root / "leftImg8bit").is_dir() or any(root.glob("*_leftImg8bit.png")):
        return "cityscapes"
    if (root / "rgb_anon").is_dir():
        return "acdc"
    if (root / "trainannot").is_dir() or (root / "valannot").is_dir():
        return "camvid"
    return "ade20k" if next(root.glob("images/**/ADE_*.jpg"), None) else None


class MaskFiles:
    """Files on disk."""

    def __init__(self, root: Path, layout: Layout) -> None:
        self.root, self.pairs, self.classes, self.table = root, layout.pairs, layout.classes, layout.table

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, index: int) -> tuple[Image.Image, Mask]:
        """Open and decode both."""
        picture, mask = self.pairs[index]
        with Image.open(picture) as image, Image.open(mask) as stored:
            if stored.mode not in ("L", "P", "1"):
                raise VitfocusError(f"{mask} is a {stored.mode} picture; a mask has one 8-bit number a pixel")
            values = np.asarray(stored, np.uint8)
            if values.shape != (image.height, image.width):
                size = f"{values.shape[1]}x{values.shape[0]}"
                raise VitfocusError(f"{mask} measures {size}, and its picture {image.width}x{image.height}")
            return rgb_picture(image), self.table[values]

    def name(self, index: int) -> str:
        """The picture's path."""
        return str(self.pairs[index][0])

    def digest(self) -> str:
        """Of the files' names and sizes; their bytes are not read."""
        listing = hashlib.sha256(self.table.tobytes())
        for pair in self.pairs:
            for file in pair:
                line = f"{file.relative_to(self.root)} {file.stat().st_size}\n"
                listing.update(line.encode(errors="surrogateescape"))
        return listing.hexdigest()


@dataclass
class ShapesMasks:
    """The embedded data set, drawn once and kept."""

    split: str
    length: int
    size: int

    def __post_init__(self) -> None:
        from vitfocus.data.shapes.dataset import MASK_CLASSES, Shapes

        self.classes = tuple(MASK_CLASSES)
        shapes = Shapes(self.split, length=self.length, size=self.size, task="segment")
        drawn = shapes.__getitems__(list(range(self.length)))
        self.pixels = torch.stack([torch.as_tensor(image) for image, _ in drawn]).numpy()
        self.masks = torch.stack([torch.as_tensor(mask) for _, mask in drawn]).to(torch.uint8).numpy()

    def __len__(self) -> int:
        return self.length

    def read(self, index: int) -> tuple[Image.Image, Mask]:
        """One scene."""
        return Image.fromarray(np.ascontiguousarray(self.pixels[index].transpose(1, 2, 0))), self.masks[index]

    def name(self, index: int) -> str:
        """Its number."""
        return f"shapes/{self.split} {index}"

    def digest(self) -> str:
        """Of pixels and masks."""
        digest = hashlib.sha256(np.ascontiguousarray(self.pixels).data)
        digest.update(np.ascontiguousarray(self.masks).data)
        return digest.hexdigest()


def read_pair(masks: Masks, index: int) -> tuple[Image.Image, Mask] | Broken:
    """One picture and its mask, or what is wrong with them."""
    try:
        return masks.read(index)
    except Exception as error:  # decoders raise what they like
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Broken(masks.name(index), reason)


class WholePictures(Dataset[tuple[Tensor, Tensor] | Broken]):
    """For evaluation: pictures uint8 (3, h, w), resized so that their short side is as asked, and masks as they are."""

    def __init__(self, masks: Masks, short_side: int = 0) -> None:
        self.masks, self.short_side = masks, short_side

    def __len__(self) -> int:
        return len(self.masks)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | Broken:
        item = read_pair(self.masks, index)
        if isinstance(item, Broken):
            return item
        image, mask = item
        image = image.resize(scaled_size(image.size, self.short_side), Image.Resampling.BILINEAR)
        return to_tensor(image), torch.from_numpy(np.ascontiguousarray(mask))


def scaled_size(size: tuple[int, int], short_side: int, factor: float = 1.0) -> tuple[int, int]:
    """A size whose short side is `short_side` (0: the size itself), times a factor.

    >>> scaled_size((683, 512), 256), scaled_size((100, 50), 0, 0.5)
    ((342, 256), (50, 25))
    """
    factor *= short_side / min(size) if short_side else 1.0
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def to_tensor(image: Image.Image) -> Tensor:
    """A picture as uint8 (3, height, width)."""
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).contiguous()


def largest_label(masks: Tensor) -> int:
    """The largest class in masks, -1 where all pixels are ignored."""
    return int(masks.to(torch.int16).masked_fill(masks == IGNORE, -1).max()) if masks.numel() else -1
