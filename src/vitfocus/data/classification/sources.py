"""Classification data by name: the readers, and which of them a `data.source` means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.data.classification import arrays
from vitfocus.data.classification.dataset import ArrayImages, Broken, BrokenLog, Images, read_or_broken
from vitfocus.data.classification.folders import ChosenImages, FolderImages, TimmImages, find_split
from vitfocus.data.classification.shards import ShardImages, find_shards
from vitfocus.recipes.settings import Data

_TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "fashion-mnist": "FashionMNIST"}
SOURCES = ("shapes", *_TORCHVISION, "cifar-mosaic", "folder", "shards", "timm:NAME")


def open_images(data: Data, split: str, classes: Sequence[str] | None = None) -> Images:
    """The images of a split ("train" or "val"). `classes`, the training set's, are checked where files could differ.

    With `data.holdout`, both splits are parts of the training set, and the set's own validation images are not touched.
    """
    opened = "train" if data.holdout else split
    length = data.train_length if opened == "train" else data.val_length
    images = _open(data, opened, classes, length)
    if not len(images):
        raise VitfocusError(f"The {opened} split of {data.source} holds no image.")
    if length and length < len(images):
        images = choose(images, range(length))
    if not data.holdout:
        return images
    if data.holdout >= len(images):
        raise VitfocusError(f"data.holdout={data.holdout} of {len(images)} training images leaves none to train on.")
    order = np.random.default_rng(0).permutation(len(images))
    part = order[: data.holdout] if split == "val" else order[data.holdout :]
    part = np.sort(part)[: data.val_length or None] if split == "val" else np.sort(part)
    return choose(images, part.tolist())


def choose(images: Images, chosen: Sequence[int]) -> Images:
    """Those images of a set, in that order."""
    if isinstance(images, ArrayImages):
        index = torch.as_tensor(list(chosen))
        return ArrayImages(images.pixels[index], images.labels[index], images.classes, images.title)
    return ChosenImages(images, chosen)


def _open(data: Data, split: str, classes: Sequence[str] | None, length: int) -> Images:
    source, root = data.source, Path(data.root)
    given = data.train_split if split == "train" else data.val_split
    if source == "shapes":
        return arrays.shapes_arrays(split, length, data.size)
    if source.startswith("timm:"):
        return TimmImages(
            source.removeprefix("timm:"), data.root, given or {"val": "validation"}.get(split, split), data.download
        )
    if source == "shards":
        return ShardImages(find_shards(data.root, split, given))
    if source == "folder":
        return FolderImages(find_split(root, split, given), classes)
    if source not in (*_TORCHVISION, "cifar-mosaic"):
        raise VitfocusError(f"There is no data source {source!r}: {nearest(source, SOURCES)}")
    if source == "cifar-mosaic" or (source == "cifar100" and (root / "index.json").is_file()):
        if not (root / "index.json").is_file():
            raise VitfocusError(f"{data.root!r} holds no index.json of CIFAR mosaics: set data.root.")
        return arrays.mosaic_arrays(data.root, split, data.size)
    name = _TORCHVISION[source]
    if not data.download and not arrays.has_torchvision_layout(name, data.root) and (root / "train").is_dir():
        return FolderImages(find_split(root, split, given), classes)
    return arrays.torchvision_arrays(name, data.root, split, data.download, data.size)


def is_small(images: Images) -> bool:
    """Whether a set is in memory as it is, so that it may as well live on the device."""
    return isinstance(images, ArrayImages)


def load_all(images: Images, data: Data, log: BrokenLog) -> tuple[Tensor, Tensor, list[Broken]]:
    """Every readable image at `data.size` as one tensor uint8 (N, 3, size, size), its labels, and the broken ones."""
    if isinstance(images, ArrayImages) and images.pixels.shape[-2:] == (data.size, data.size):
        return images.pixels, images.labels, []
    from timm.data import create_transform

    transform = create_transform(
        data.size, interpolation=data.interpolation, crop_pct=1.0, use_prefetcher=True, is_training=False
    )
    pixels = torch.empty(len(images), 3, data.size, data.size, dtype=torch.uint8)
    labels: list[int] = []
    new: list[Broken] = []
    for index in range(len(images)):
        item = read_or_broken(images, index)
        if isinstance(item, Broken):
            new += log.add([item])
            continue
        pixels[len(labels)] = torch.as_tensor(transform(item[0]))
        labels.append(item[1])
    if not labels:
        raise VitfocusError("None of the images can be read.")
    return pixels[: len(labels)], torch.tensor(labels), new
