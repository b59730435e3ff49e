"""Images in files: a folder of class folders, and whatever timm.data.create_dataset reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import PICTURES, files_below
from vitfocus.data.image_files import rgb_picture

SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "test")}


def find_split(root: Path, split: str, given: str = "") -> Path:
    """The folder of a split under a root: the one named, or the first of the usual names that exists."""
    if not root.is_dir():
        raise VitfocusError(f"There is no data folder {str(root)!r}: set data.root to where the images are.")
    names = (given,) if given else SPLITS[split]
    for name in names:
        if (root / name).is_dir():
            return root / name
    raise VitfocusError(f"{root} has no folder {' or '.join(names)} for {split}: set data.{split}_split to its name.")


class FolderImages:
    """A folder of class folders, as torchvision's ImageFolder reads it, hidden files and folders left out."""

    def __init__(self, folder: Path, classes: Sequence[str] | None = None) -> None:
        self.folder = folder
        found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        if not found:
            raise VitfocusError(
                f"{folder} holds no class folders; expected {folder}/CLASS/IMAGE, one folder per class."
            )
        inside = [sorted(map(str, files_below(folder / name))) for name in found]
        self.samples = [(file, label) for label, files in enumerate(inside) for file in files]
        self.classes: Sequence[str] = found
        if empty := [name for name, files in zip(found, inside, strict=True) if not files]:
            kinds = ", ".join(sorted(suffix.lstrip(".") for suffix in PICTURES))
            raise VitfocusError(f"{folder / empty[0]} holds no image ({kinds}); every class needs one.")
        if classes is not None and list(classes) != found:
            odd = sorted(set(found) ^ set(classes))[:3]
            raise VitfocusError(f"{folder} has other classes than the training images: {', '.join(odd)}.")

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Open and decode one file."""
        path, label = self.samples[index]
        with Image.open(path) as image:
            return rgb_picture(image), label

    def name(self, index: int) -> str:
        """The file's path."""
        return str(self.samples[index][0])

    def digest(self) -> str:
        """Of the files' names and sizes; their bytes are not read."""
        listing = hashlib.sha256()
        for path, label in self.samples:
            file = Path(path)
            line = f"{file.relative_to(self.folder)} {file.stat().st_size} {label}\n"
            listing.update(line.encode(errors="surrogateescape"))
        return listing.hexdigest()


class TimmImages:
    """A data set that timm reads by name, such as "hfds/cifar100", "torch/stl10" or "imagefolder"."""

    def __init__(self, name: str, root: str, split: str, download: bool) -> None:
        from timm.data import create_dataset

        try:
            self.inner: Any = create_dataset(name, root=root or None, split=split, download=download)
            self.length = len(self.inner)
        except (TypeError, NotImplementedError):
            raise VitfocusError(f"timm:{name} is a stream without numbered images; use a folder or shards.") from None
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
        """Ask timm for it."""
        image, label = self.inner[index]
        return image, int(label)

    def name(self, index: int) -> str:
        """The file's name where timm knows one."""
        try:
            return str(self.inner.filename(index, absolute=True))
        except Exception:
            return f"{self.title} {index}"

    def digest(self) -> str:
        """Of the name and the number of images."""
        return hashlib.sha256(f"{self.title} {self.length}".encode()).hexdigest()


class ChosenImages:
    """Some images of a set, by their numbers in it."""

    def __init__(self, inner: Any, chosen: Sequence[int]) -> None:
        self.inner, self.chosen, self.classes = inner, chosen, inner.classes

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """As the set has it."""
        image: tuple[Image.Image, int] = self.inner.read(self.chosen[index])
        return image

    def name(self, index: int) -> str:
        """As the set has it."""
        return str(self.inner.name(self.chosen[index]))

    def digest(self) -> str:
        """Of the set and the numbers."""
        return hashlib.sha256(f"{self.inner.digest()} {list(self.chosen)}".encode()).hexdigest()
