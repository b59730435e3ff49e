"""Small sets that are read whole: CIFAR-10 and -100, Fashion-MNIST, CIFAR mosaics and the embedded Shapes."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitfocus.core.errors import VitfocusError
from vitfocus.data.classification.dataset import ArrayImages, as_rgb

_MARKS = {"CIFAR10": "cifar-10-batches-py", "CIFAR100": "cifar-100-python", "FashionMNIST": "FashionMNIST/raw"}
SHAPES_LENGTH = {"train": 20_000, "val": 2_000}


def torchvision_arrays(name: str, root: str, split: str, download: bool, size: int) -> ArrayImages:
    """CIFAR10, CIFAR100 or FashionMNIST as torchvision lays them out; fetched only where `download` says so."""
    from torchvision import datasets

    try:
        data: Any = getattr(datasets, name)(root, train=split == "train", download=download)
    except (RuntimeError, OSError) as error:
        if has_torchvision_layout(name, root):
            raise VitfocusError(
                f"{_MARKS[name]} in {root!r} does not hold the published files of {name}, whose checksums torchvision "
                "verifies: fetch them again, or lay images of your own out as train/CLASS/*.png and test/CLASS/*.png "
                "(data.source=folder)."
            ) from None
        raise VitfocusError(
            f"{name} is not in {root!r} (expected {_MARKS[name]} there, {str(error).splitlines()[0].rstrip('.')}): set "
            "data.root, or data.download=true to fetch it."
        ) from None
    pixels = torch.as_tensor(data.data)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    return ArrayImages(as_rgb(pixels, size), torch.as_tensor(data.targets), data.classes, f"{name}/{split}")


def has_torchvision_layout(name: str, root: str) -> bool:
    """Whether torchvision's own layout lies there."""
    return (Path(root) / _MARKS[name]).is_dir()


def mosaic_arrays(root: str, split: str, size: int) -> ArrayImages:
    """CIFAR as lossless mosaics (25 rows × 40 images of 32 px) with `index.json`; the pixels' SHA-256 is checked."""
    folder = Path(root)
    index = json.loads((folder / "index.json").read_text())
    entry = index["train" if split == "train" else "test"]
    images = _mosaic_pixels(folder.resolve(), tuple(entry["mosaics"]), entry["sha256"])
    return ArrayImages(as_rgb(images, size), torch.tensor(entry["labels"]), index["classes"], f"{folder.name}/{split}")


@functools.lru_cache(maxsize=2)
def _mosaic_pixels(folder: Path, names: tuple[str, ...], sha256: str) -> torch.Tensor:
    """The images (N, 3, 32, 32), decoded once for all runs of a process: that takes seconds."""
    pixels = np.concatenate([_tiles(folder / name) for name in names])
    if hashlib.sha256(pixels.data).hexdigest() != sha256:
        raise VitfocusError(f"The pixels of {folder} ({names[0]}...) are not those its index.json was made of.")
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def shapes_arrays(split: str, length: int, size: int) -> ArrayImages:
    """The embedded Shapes, drawn."""
    from vitfocus.data.shapes.dataset import CLASSES, shapes_batch

    pixels, labels = shapes_batch(range(length or SHAPES_LENGTH[split]), split, size)
    return ArrayImages(pixels, labels, CLASSES, f"shapes/{split}")


def _tiles(path: Path, side: int = 32) -> np.ndarray:
    with Image.open(path) as mosaic:
        pixels = np.asarray(mosaic.convert("RGB"))
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    tiles = pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(tiles.reshape(-1, side, side, 3))
