"""What every suite is given, and the ways from a user's data to images with labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset

from vitfocus.core.errors import VitfocusError
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.preprocessing import Preprocessing, standard_preprocessing
from vitfocus.robustness.folders import (
    ClassFolders,
    Entry,
    ImageFiles,
    check_readable,
    folder_indices,
    list_classes,
    one_size,
    wordnet_ids,
)
from vitfocus.robustness.pixels import PixelModel
from vitfocus.robustness.sources import (
    ItemSource,
    Source,
    StreamSource,
    digest_of,
    one_number,
    picture_and_label,
)

Labeller = Callable[[ClassFolders], dict[str, int]]


@dataclass
class Context:
    """One call of `evaluate`: the models, the data, the options; suites add to `notes` and `protocol`.

    `small` images stay small, whatever the models' `size`, which enlarge them after the corruption.
    """

    suite: str
    data: Any
    models: Sequence[PixelModel]
    classes: int
    size: tuple[int, int]
    device: torch.device
    small: bool = False
    seed: int = 0
    limit: int | None = None
    workers: int = 0
    show: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        """The data's folder, where it is one."""
        return Path(self.data).expanduser() if isinstance(self.data, str | os.PathLike) else None

    def need_folder(self, layout: str) -> Path:
        """The data's folder, or a sentence on what was expected."""
        if self.folder is None:
            raise VitfocusError(f"The suite {self.suite} reads a folder: {layout}.")
        if not self.folder.is_dir():
            raise VitfocusError(f"There is no folder {self.folder}; the suite {self.suite} reads {layout}.")
        return self.folder

    def need_imagenet(self) -> None:
        """Refuse models that do not tell ImageNet's 1,000 classes apart."""
        if self.classes != 1000:
            raise VitfocusError(
                f"The suite {self.suite} is for models of ImageNet's 1,000 classes, and this one has {self.classes}."
            )

    def refuse_resizing(self, data: str) -> None:
        """Options on how pictures are resized are not silently passed over where nothing is."""
        for name in ("crop_pct", "interpolation", "resize"):
            if self.options.get(name) is not None and self.options[name] is not False:
                raise VitfocusError(f"{name} is about resizing pictures, but the data is {data}: leave it out.")

    def prepare(
        self, root: Path, entries: Sequence[Entry], interpolation: str | None = None, whole: bool = False
    ) -> Preprocessing:
        """Look at the files that will be read, and lay out what is done to each; the notes and the protocol say so."""
        sizes = check_readable(root, [entries[index] for index in evenly_spaced(len(entries), self.limit)])
        preprocessing = self.standard(interpolation, whole)
        if preprocessing.resize is None and not whole:
            one_size(sizes)
        kept = sum(size == preprocessing.keep for size in sizes.values())
        if kept:
            amount = "The images" if kept == len(sizes) else f"{kept:,} of {len(sizes):,} images"
            self.notes.append(f"{amount} already measure {self.size[0]}x{self.size[1]} and were taken as they are.")
        self.protocol |= {"preprocessing": preprocessing.to_dict(), "decoder": codec_name()}
        return preprocessing

    def standard(self, interpolation: str | None, whole: bool) -> Preprocessing:
        """Resize and centre crop, by the suite's interpolation or the models' own, what does not fit already.

        With resize=True every picture is resized, with resize=False none.
        """
        resize = self.options.get("resize")
        if self.small:
            self.refuse_resizing("small images, which the model enlarges itself")
            return Preprocessing(None, None)
        if resize is not None and not resize:
            self.notes.append("The images were taken as they are (resize=False).")
            return Preprocessing(None, None)
        chosen = self.options.get("interpolation", interpolation)
        own = {model.name: model.interpolation for model in self.models}
        if chosen is None and len(set(own.values())) > 1:
            listed = ", ".join(f"{name}: {value}" for name, value in own.items())
            raise VitfocusError(
                f"Models in one pass see the same images, but differ in interpolation ({listed}): choose one."
            )
        chosen = self.models[0].interpolation if chosen is None else chosen
        preprocessing = standard_preprocessing(self.size, self.options.get("crop_pct", 0.875), chosen)
        return replace(preprocessing, crop=None if whole else self.size, keep=None if resize else self.size)

    def files(
        self,
        folders: ClassFolders,
        labels: Sequence[Any],
        preprocessing: Preprocessing,
        entries: Sequence[Entry] | None = None,
        pad: bool = False,
    ) -> ItemSource:
        """Image files with their labels, limited evenly; draws are keyed by the path below the root."""
        entries = folders.entries if entries is None else entries
        pick = evenly_spaced(len(entries), self.limit)
        names = [entry.name for entry in entries]
        return ItemSource(
            ImageFiles(folders.root, names, labels),
            ids=names,
            names=names,
            pick=pick,
            digest=digest_of(f"{entries[i].name} {entries[i].size} {labels[i]}" for i in pick),
            preprocessing=preprocessing,
            pad=pad,
            workers=self.workers,
            pin=self.device.type == "cuda",
        )

    def images(self, interpolation: str | None = None, labeller: Labeller | None = None, whole: bool = False) -> Source:
        """Clean images from whatever the data is: a folder of class folders, a data set, or batches.

        With `whole`, pictures are resized but not cropped, for suites that move them about first.
        """
        if self.folder is not None:
            folders = list_classes(validation(self.folder))
            labels = (labeller or self.labels)(folders)
            preprocessing = self.prepare(folders.root, folders.entries, interpolation, whole)
            answers = [labels[entry.folder] for entry in folders.entries]
            return self.files(folders, answers, preprocessing, pad=whole)
        if "index" in self.options:
            raise VitfocusError("index maps class folders to classes, but the data is no folder: leave it out.")
        if isinstance(self.data, Dataset) and not isinstance(self.data, IterableDataset):
            return self._from_dataset(interpolation, whole)
        if isinstance(self.data, DataLoader) or (
            isinstance(self.data, Iterable) and not isinstance(self.data, torch.Tensor | Mapping)
        ):
            self.refuse_resizing("batches of tensors")
            self.protocol["preprocessing"] = "the loader's own"
            return StreamSource(self.data, self.limit)
        raise VitfocusError(
            f"The data is a {type(self.data).__name__}; expected a folder, a Dataset of (picture, label), or batches "
            "of (images, labels) with images in uint8 or in [0, 1]."
        )

    def _from_dataset(self, interpolation: str | None, whole: bool) -> Source:
        if not len(self.data):
            raise VitfocusError("The data set holds no images.")
        sample, label = picture_and_label(self.data[0], "Item 0 of the data")
        one_number(label, "Item 0 of the data")
        names = getattr(self.data, "classes", None)  # as Shapes and torchvision's data sets have them
        if isinstance(names, list | tuple) and len(names) != self.classes:
            self.notes.append(f"The data has {len(names):,} classes, but the model tells {self.classes:,} apart.")
        if not isinstance(sample, Image.Image):
            self.refuse_resizing("tensors")
        preprocessing = self.standard(interpolation, whole) if isinstance(sample, Image.Image) else None
        if preprocessing and preprocessing.keep:
            size = f"{self.size[0]}x{self.size[1]}"
            self.notes.append(f"Pictures that already measure {size} were taken as they are, others resized.")
        self.protocol["preprocessing"] = preprocessing.to_dict() if preprocessing else "the data set's own"
        pick = evenly_spaced(len(self.data), self.limit)
        return ItemSource(
            self.data,
            pick=pick,
            preprocessing=preprocessing,
            pad=whole,
            workers=self.workers,
            pin=self.device.type == "cuda",
        )

    def labels(self, folders: ClassFolders) -> dict[str, int]:
        """The class of every folder: ImageNet's by WordNet id or index file, any other's by sorted order."""
        index = self.options.get("index")
        if index is not None:
            labels = folder_indices(folders, index)
            strange = next((name for name, place in labels.items() if not 0 <= place < self.classes), None)
            if strange is not None:
                raise VitfocusError(
                    f"The index file {index} maps {strange} to {labels[strange]}, but the model knows the classes "
                    f"0 to {self.classes - 1}."
                )
        elif self.classes == 1000 and (len(folders.classes) != 1000 or folders.classes[0] in set(wordnet_ids())):
            labels = folder_indices(folders)
        else:
            return self._sorted_labels(folders)
        if len(labels) < self.classes:
            whose = "ImageNet's" if self.classes == 1000 else "the model's"
            self.notes.append(f"{len(labels)} of {whose} {self.classes:,} classes are present in the data.")
        return labels

    def _sorted_labels(self, folders: ClassFolders) -> dict[str, int]:
        if len(folders.classes) != self.classes:
            raise VitfocusError(
                f"{folders.root} holds {len(folders.classes)} class folders, but the model has {self.classes} classes."
            )
        if all(name.isdigit() for name in folders.classes) and self.classes > 10:
            self.notes.append(
                "Class folders are numbers, taken in the order of their text (0, 1, 10, 11...), as torchvision's "
                "ImageFolder does; name an index to say otherwise."
            )
        return {name: place for place, name in enumerate(folders.classes)}


def validation(root: Path) -> Path:
    """The folder itself, or its validation split where the data set was unpacked whole."""
    for name in ("val", "validation"):
        if (root / name).is_dir() and (root / "train").is_dir():
            return root / name
    return root


def codec_name() -> str:
    """What decodes the files, for the fingerprint."""
    from vitfocus.robustness.fingerprint import codec

    return codec()
