"""Classification data sets: Shapes, torchvision's small ones, arrays, class folders, shards and timm's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitfocus.core.errors import VitfocusError, nearest, reason
from vitfocus.core.files import DAMAGED, open_file
from vitfocus.data.classification.shards import ShardImages, find_shards
from vitfocus.data.image_files import (
    digest_of,
    evaluation_preprocessing,
    find_split,
    list_classes,
    open_image,
    to_image,
    to_rgb,
)
from vitfocus.data.loader import BatchReader, Broken, SampleDataset, read_or_broken
from vitfocus.data.shapes.dataset import CLASSES, shapes_batch
from vitfocus.recipes import Data

SHAPES_LENGTH = {"train": 20_000, "val": 2_000}
_TORCHVISION = {
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
    "fashion-mnist": ("FashionMNIST", "FashionMNIST/raw"),
}
_MOST_CLASSES = 1_000_000
SOURCES = ("shapes", *_TORCHVISION, "arrays", "folder", "shards", "timm:NAME")


class ClassificationDataset(SampleDataset[tuple[Image.Image, int]], Protocol):
    """RGB images and their labels, read by index."""

    classes: Sequence[str]


@dataclass
class ArrayImages:
    """Images in memory: uint8 (N, 3, H, W), and their labels (N,)."""

    pixels: Tensor
    labels: Tensor
    classes: Sequence[str]
    title: str = "image"

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return to_image(self.pixels[index]), int(self.labels[index])

    def name(self, index: int) -> str:
        return f"{self.title} {index}"

    def digest(self) -> str:
        digest = hashlib.sha256(self.pixels.contiguous().numpy().data)
        digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()


class FolderImages:
    """A folder with one folder per class, as torchvision's ImageFolder reads it, without hidden files and folders."""

    def __init__(self, folder: Path, classes: Sequence[str] | None = None) -> None:
        self.folder = folder
        listed = list_classes(folder, complete=False)
        self.classes: Sequence[str] = listed.classes
        numbers = {name: label for label, name in enumerate(listed.classes)}
        self.samples = [(entry.name, numbers[entry.folder], entry.size) for entry in listed.entries]
        if classes is not None and list(classes) != list(listed.classes):
            differing = sorted(set(listed.classes) ^ set(classes))[:3]
            raise VitfocusError(f"{folder} has other classes than the training images: {', '.join(differing)}.")

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, int]:
        name, label, _ = self.samples[index]
        return open_image(self.folder / name), label

    def name(self, index: int) -> str:
        return str(self.folder / self.samples[index][0])

    def digest(self) -> str:
        """SHA-256 of the files' names and sizes; their contents are not read."""
        return digest_of((f"{name} {size} {label}" for name, label, size in self.samples), length=64)


class TimmImages:
    """A data set that timm reads by name, such as "hfds/cifar100", "torch/stl10" or "imagefolder"."""

    def __init__(self, name: str, root: str, split: str, download: bool) -> None:
        from timm.data import create_dataset

        try:
            self.inner: Any = create_dataset(name, root=root or None, split=split, download=download)
            self.length = len(self.inner)
        except (TypeError, NotImplementedError):
            raise VitfocusError(
                f"timm:{name} has no length, so its images cannot be read by index: use a folder or shards."
            ) from None
        except Exception as error:
            raise VitfocusError(f"timm cannot open {name!r} ({split}) in {root!r}: {error}") from None
        self.title = f"timm:{name}/{split}"
        classes = getattr(self.inner, "classes", None) or getattr(
            getattr(self.inner, "reader", None), "class_to_idx", None
        )
        self.classes: Sequence[str] = list(classes) if classes else []

    def __len__(self) -> int:
        return self.length

    def read(self, index: int) -> tuple[Image.Image, int]:
        image, label = self.inner[index]
        return to_rgb(image), int(label)

    def name(self, index: int) -> str:
        try:
            return str(self.inner.filename(index, absolute=True))
        except Exception:
            return f"{self.title} {index}"

    def digest(self) -> str:
        return hashlib.sha256(f"{self.title} {self.length}".encode()).hexdigest()


class SubsetImages:
    """Some images of a data set, by their indices in it."""

    def __init__(self, inner: ClassificationDataset, indices: Sequence[int]) -> None:
        self.inner, self.indices, self.classes = inner, indices, inner.classes

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return self.inner.read(self.indices[index])

    def name(self, index: int) -> str:
        return self.inner.name(self.indices[index])

    def digest(self) -> str:
        return hashlib.sha256(f"{self.inner.digest()} {list(self.indices)}".encode()).hexdigest()


def open_images(data: Data, split: str, classes: Sequence[str] | None = None) -> ClassificationDataset:
    """Open a split of the data set that `data.source` names.

    Args:
        data: The [data] section of a recipe. With `data.holdout`, both splits are parts of the training set.
        split: "train" or "val".
        classes: The training set's classes, with which those of a folder are compared.

    Returns:
        The images, or the first `train_length` or `val_length` of them.

    Raises:
        VitfocusError: The source is unknown, or its files are missing or wrong.
    """
    opened = "train" if data.holdout else split
    length = data.train_length if opened == "train" else data.val_length
    images = _open(data, opened, classes, length)
    if not len(images):
        raise VitfocusError(f"The {opened} split of {data.source} has no images.")
    if length and length < len(images):
        images = subset(images, range(length))
    if not data.holdout:
        return images
    if data.holdout >= len(images):
        raise VitfocusError(f"data.holdout={data.holdout} of {len(images)} training images leaves none to train on.")
    order = np.random.default_rng(0).permutation(len(images))
    part = order[: data.holdout] if split == "val" else order[data.holdout :]
    part = np.sort(part)[: data.val_length or None] if split == "val" else np.sort(part)
    return subset(images, part.tolist())


def subset(images: ClassificationDataset, indices: Sequence[int]) -> ClassificationDataset:
    """The images at these indices, in this order."""
    if isinstance(images, ArrayImages):
        index = torch.as_tensor(list(indices))
        return ArrayImages(images.pixels[index], images.labels[index], images.classes, images.title)
    return SubsetImages(images, indices)


def load_all(images: ClassificationDataset, data: Data, reader: BatchReader) -> tuple[Tensor, Tensor]:
    """Read a data set into memory at `data.size`: pixels uint8 (N, 3, size, size) and labels (N,)."""
    if isinstance(images, ArrayImages) and images.pixels.shape[-2:] == (data.size, data.size):
        return images.pixels, images.labels
    preprocessing = evaluation_preprocessing((data.size, data.size), data.interpolation, 1.0, keep=False)
    pixels = torch.empty(len(images), 3, data.size, data.size, dtype=torch.uint8)
    labels: list[int] = []
    for index in range(len(images)):
        item = read_or_broken(images, index)
        if isinstance(item, Broken):
            reader.report([item])
            continue
        pixels[len(labels)] = preprocessing.apply(item[0])
        labels.append(item[1])
    if not labels:
        raise VitfocusError("None of the images can be read.")
    return pixels[: len(labels)], torch.tensor(labels)


def array_images(path: Path, size: int) -> ArrayImages:
    """Read an .npz file: `images` uint8 (N, H, W) or (N, H, W, 3), `labels` (N,), and optionally `classes` (names).

    Smaller images than `size` are padded with zeros. Nothing in the file is unpickled.
    """
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as stored:
            images, labels = np.asarray(stored["images"]), np.asarray(stored["labels"])
            classes = [str(name) for name in stored["classes"]] if "classes" in stored.files else []
    except DAMAGED as error:
        raise VitfocusError(
            f"{path} cannot be read as arrays of images and labels ({reason(error)}): expected numpy.savez(path, "
            "images=..., labels=...)."
        ) from None
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise VitfocusError(
            f"{path} has images of shape {images.shape} and type {images.dtype}; expected uint8 (N, H, W, 3)."
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise VitfocusError(
            f"{path} has labels of shape {labels.shape} and type {labels.dtype}; expected one class number per image."
        )
    if len(wrong := labels[(labels < 0) | (labels >= _MOST_CLASSES)]):
        raise VitfocusError(f"{path} has the label {wrong[0]}; expected class numbers from 0 to {_MOST_CLASSES - 1:,}.")
    if len(labels) and classes and labels.max() >= len(classes):
        raise VitfocusError(f"{path} has the label {labels.max()} and only {len(classes)} classes.")
    pixels = torch.from_numpy(images)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    names = classes or [str(number) for number in range(int(labels.max(initial=-1)) + 1)]
    return ArrayImages(as_rgb(pixels, size), torch.from_numpy(labels.astype(np.int64)), names, path.stem)


def as_rgb(pixels: Tensor, size: int) -> Tensor:
    """Greyscale (N, 1, H, W) or colour images as three channels, padded with zeros up to `size`.

    >>> as_rgb(torch.ones(2, 1, 28, 28, dtype=torch.uint8), 32).shape
    torch.Size([2, 3, 32, 32])
    """
    if pixels.shape[1] == 1:
        pixels = pixels.expand(-1, 3, -1, -1)
    down, across = size - pixels.shape[2], size - pixels.shape[3]
    if down > 0 or across > 0:
        padding = (across // 2, across - across // 2, down // 2, down - down // 2)
        pixels = torch.nn.functional.pad(pixels, [max(0, side) for side in padding])
    return pixels.contiguous()


def _open(data: Data, split: str, classes: Sequence[str] | None, length: int) -> ClassificationDataset:
    source, root = data.source, Path(data.root)
    given = data.train_split if split == "train" else data.val_split
    if source == "shapes":
        pixels, labels = shapes_batch(range(length or SHAPES_LENGTH[split]), split, data.size)
        return ArrayImages(pixels, labels, CLASSES, f"shapes/{split}")
    if source.startswith("timm:"):
        return TimmImages(
            source.removeprefix("timm:"), data.root, given or {"val": "validation"}.get(split, split), data.download
        )
    if source == "shards":
        return ShardImages(find_shards(data.root, split, given))
    if source == "arrays":
        return array_images(find_split(root, split, given, ".npz"), data.size)
    if source not in ("folder", *_TORCHVISION):
        raise VitfocusError(f"There is no data source {source!r}: {nearest(source, SOURCES)}")
    if source == "folder" or (
        not data.download and not (root / _TORCHVISION[source][1]).is_dir() and (root / "train").is_dir()
    ):
        return FolderImages(find_split(root, split, given), classes)
    return _torchvision_images(source, data.root, split, data.download, data.size)


def _torchvision_images(source: str, root: str, split: str, download: bool, size: int) -> ArrayImages:
    """CIFAR-10, CIFAR-100 or Fashion-MNIST in torchvision's layout; downloaded only if `download` is set."""
    from torchvision import datasets

    name, folder = _TORCHVISION[source]
    try:
        data: Any = getattr(datasets, name)(root, train=split == "train", download=download)
    except Exception as error:  # torchvision raises many types for files that are not as published
        if (Path(root) / folder).is_dir():
            raise VitfocusError(
                f"{folder} in {root!r} does not hold the published files of {name}, whose checksums torchvision "
                "verifies: fetch them again, or store your own images as train/CLASS/*.png and test/CLASS/*.png "
                "(data.source=folder)."
            ) from None
        raise VitfocusError(
            f"{name} is not in {root!r} (expected {folder} there, {str(error).splitlines()[0].rstrip('.')}): set "
            "data.root, or data.download=true to fetch it."
        ) from None
    pixels = torch.as_tensor(data.data)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    return ArrayImages(as_rgb(pixels, size), torch.as_tensor(data.targets), data.classes, f"{name}/{split}")
