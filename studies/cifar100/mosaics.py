"""CIFAR-100 stored as lossless mosaics (25 × 40 images each, and index.json), converted to arrays that vitfocus reads.

python studies/cifar100/mosaics.py MOSAICS ARRAYS writes ARRAYS/train.npz and ARRAYS/test.npz (`data.source=arrays`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import atomic_path

SIDE = 32


def data_keys(folder: Path, work: Path) -> list[str]:
    """The recipe's keys that name CIFAR-100 in a folder; mosaics are converted to arrays in the work folder once."""
    if (folder / "index.json").is_file():
        return ["source=arrays", f"root={write_arrays(folder, work / 'cifar100-arrays')}"]
    if (folder / "cifar-100-python").is_dir():
        return ["source=cifar100", f"root={folder}"]
    raise VitfocusError(
        f"{folder} holds no CIFAR-100: expected torchvision's cifar-100-python, or mosaics and index.json."
    )


def write_arrays(mosaics: Path, folder: Path) -> Path:
    """Write train.npz and test.npz with images, labels and classes, unless they exist; returns their folder."""
    index = json.loads((mosaics / "index.json").read_text())
    for split in ("train", "test"):
        target, entry = folder / f"{split}.npz", index[split]
        if target.is_file():
            continue
        pixels = np.concatenate([_tiles(mosaics / name) for name in entry["mosaics"]])
        if hashlib.sha256(pixels.data).hexdigest() != entry["sha256"]:
            raise VitfocusError(f"The pixels of the {split} mosaics in {mosaics} differ from the hash in index.json.")
        with atomic_path(target) as path:
            labels = np.array(entry["labels"], np.int64)
            np.savez(path, images=pixels, labels=labels, classes=np.array(index["classes"]))
    return folder


def _tiles(path: Path) -> np.ndarray:
    """The images of one mosaic, row by row, uint8 (N, 32, 32, 3)."""
    with Image.open(path) as mosaic:
        pixels = np.asarray(mosaic.convert("RGB"))
    rows, columns = pixels.shape[0] // SIDE, pixels.shape[1] // SIDE
    tiles = pixels.reshape(rows, SIDE, columns, SIDE, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(tiles.reshape(-1, SIDE, SIDE, 3))


if __name__ == "__main__":
    print(write_arrays(Path(sys.argv[1]), Path(sys.argv[2])))
