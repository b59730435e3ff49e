"""Pictures with masks for the segmentation suites: a folder in a published layout, Shapes, a data set, or batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.segmentation.classes import IGNORE
from vitfocus.data.segmentation.dataset import MaskFiles, Masks, WholePictures, guess_source, open_masks
from vitfocus.data.segmentation.layouts import LAYOUTS, acdc
from vitfocus.data.shapes.dataset import shapes_named
from vitfocus.recipes.settings import Data
from vitfocus.tasks.segmentation.task import whole_batches

Batch = tuple[Tensor, Tensor, list[Any]]  # uint8 (B, 3, H, W), class maps (B, h, w), the pictures' ids


@dataclass
class Pictures:
    """Pictures that can be gone through several times; `digest` is of what the last pass has read so far."""

    suite: str
    data: Any
    limit: int | None = None
    batch_size: int = 8
    workers: int = 0
    short_side: int = 0
    ignore: int = IGNORE
    source: str = ""
    classes: tuple[str, ...] = ()
    count: int = 0
    _state: Any = field(default=None, init=False, repr=False)

    @property
    def digest(self) -> str:
        """Of the pictures and masks read since the last pass began, in their order."""
        return str(self._state.hexdigest()) if self._state is not None else ""

    def __iter__(self) -> Iterator[Batch]:
        state = self._state = hashlib.blake2b(digest_size=16)
        self.count = 0
        for images, masks, ids in self._files() if hasattr(self.data, "read") else self._given():
            state.update(images.contiguous().numpy().tobytes() + masks.contiguous().numpy().tobytes())
            self.count += len(images)
            yield images, masks, ids
        if not self.count:
            raise VitfocusError("There are no images to segment: the data was empty.")

    @property
    def total(self) -> int:
        """How many a pass will read, 0 where that is not known."""
        return len(evenly_spaced(len(self.data), self.limit)) if hasattr(self.data, "read") else 0

    def _files(self) -> Iterator[Batch]:
        masks: Masks = self.data
        whole, pick = WholePictures(masks, self.short_side), list(evenly_spaced(len(masks), self.limit))
        workers = min(self.workers, len(pick) // (4 * self.batch_size))  # few pictures are read sooner than they start
        for images, truth, indices in whole_batches(whole, pick, self.batch_size, workers, torch.device("cpu")):
            yield images, truth, [_id(masks, index) for index in indices]

    def _given(self) -> Iterator[Batch]:
        source: Any = DataLoader(self.data, self.batch_size) if isinstance(self.data, Dataset) else self.data
        if isinstance(source, Iterator):
            raise VitfocusError(
                f"{self.suite} reads its data more than once: pass a list, loader or data set, not a generator."
            )
        left, done = self.limit, 0
        for pair in source:
            images, masks = pair[0], pair[1]
            if images.dtype != torch.uint8 or images.ndim != 4 or masks.shape != images.shape[:1] + images.shape[2:]:
                shapes = f"{images.dtype} {tuple(images.shape)} and {tuple(masks.shape)}"
                raise VitfocusError(f"{self.suite} takes uint8 images (B, 3, H, W) with masks (B, H, W), not {shapes}.")
            if left is not None:
                images, masks = images[:left], masks[:left]
                left -= len(images)
            if len(images):
                yield images.cpu(), masks.cpu(), list(range(done, done + len(images)))
                done += len(images)


def open_pictures(
    suite: str,
    data: Any,
    *,
    source: str = "",
    trained_on: str = "",
    split: str = "",
    size: int = 0,
    condition: str = "",
    **more: Any,
) -> Pictures:
    """Pictures from whatever the data is.

    A folder's layout is `source`, or told by its names, or that of what the model was trained on, or plain masks.
    """
    if (length := shapes_named(data, more.get("limit") or 0)) is not None:
        drawn = Data(source="shapes", size=size or 64, val_length=length)
        masks: Any = open_masks(drawn, "val")
        return Pictures(suite, masks, source="shapes", classes=masks.classes, **more)
    if not isinstance(data, str | Path):
        return Pictures(suite, data, **more)
    root = Path(data).expanduser()
    if not root.is_dir():
        raise VitfocusError(f"There is no folder {root}; {suite} reads pictures with masks there.")
    if source and source not in LAYOUTS:
        raise VitfocusError(f"There is no layout {source!r}: {nearest(source, LAYOUTS)}")
    layout_name = source or guess_source(root) or (trained_on if trained_on in LAYOUTS else "masks")
    if layout_name == "acdc":
        masks = MaskFiles(root, acdc(root, "val", split, condition))
    else:
        masks = open_masks(Data(source=layout_name, root=str(root), val_split=split), "val")
    return Pictures(suite, masks, source=layout_name, classes=masks.classes, **more)


def _id(masks: Masks, index: int) -> Any:
    """A name for a picture's draws that does not depend on which others there are."""
    if isinstance(masks, MaskFiles):
        return masks.pairs[index][0].relative_to(masks.root).as_posix()
    return index
