"""Files of class folders: checking that they are readable, reading them, and the class number of each folder."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from vitfocus.core.errors import VitfocusError
from vitfocus.core.records import Count, read_json
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.image_files import UNREADABLE, ClassFolders, Entry, read_rgb

_HEADERS_AT_MOST = 100_000


def check_readable(root: Path, entries: Sequence[Entry]) -> dict[str, tuple[int, int]]:
    """Heights and widths by the headers of all images, of up to 100,000; the first that is no image is refused."""

    def look(entry: Entry) -> tuple[int, int] | str:
        try:
            with Image.open(root / entry.name) as picture:
                return picture.height, picture.width
        except UNREADABLE as error:
            return unreadable(root / entry.name, error)

    picked = [entries[index] for index in evenly_spaced(len(entries), _HEADERS_AT_MOST)]
    sizes: dict[str, tuple[int, int]] = {}
    with ThreadPoolExecutor(8) as pool:
        for entry, found in zip(picked, pool.map(look, picked), strict=True):
            if isinstance(found, str):
                raise VitfocusError(found)
            sizes[entry.name] = found
    return sizes


def one_size(sizes: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """The size that all images share; the first of another is named."""
    expected = next(iter(sizes.values()))
    for name, found in sizes.items():
        if found != expected:
            raise VitfocusError(other_size(name, found, expected))
    return expected


def unreadable(path: Path, error: Exception) -> str:
    """The sentence about an image that cannot be read."""
    return f"{path} cannot be read as an image ({type(error).__name__}): fetch it again or remove it."


class ImageFiles:
    """Files as (picture, label), read when asked for."""

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[Any]) -> None:
        self.root, self.names, self.labels = str(root), names, labels

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        path = Path(self.root, self.names[index])
        try:
            return read_rgb(path), self.labels[index]
        except UNREADABLE as error:
            raise VitfocusError(unreadable(path, error)) from None


@functools.cache
def wordnet_ids(name: str = "imagenet") -> tuple[str, ...]:
    """The WordNet ids of ImageNet's 1,000 classes in order, or of -A's and -R's 200, from timm's own lists."""
    text = importlib.resources.files("timm.data._info").joinpath(f"{name}_synsets.txt").read_text("utf-8")
    return tuple(text.split())


def folder_indices(folders: ClassFolders, index: str | os.PathLike[str] | None = None) -> dict[str, int]:
    """The class of every folder: by any name that an index file maps, or without one by WordNet id, as ImageNet's."""
    known = read_index(index) if index is not None else {wnid: place for place, wnid in enumerate(wordnet_ids())}
    strange = [name for name in folders.classes if name not in known]
    if strange:
        listed = ", ".join(strange[:3]) + ("..." if len(strange) > 3 else "")
        whose = "ImageNet" if index is None else "the index file"
        raise VitfocusError(
            f"{folders.root} holds folders that {whose} does not know: {listed} "
            f"({len(strange)} of {len(folders.classes)}); expected names such as {next(iter(known), 'none')}."
        )
    return {name: known[name] for name in folders.classes}


def read_index(path: str | os.PathLike[str]) -> dict[str, int]:
    """A json of {"0": ["n01440764", "tench"], ...}, {"n01440764": 0, ...} or ["n01440764", ...] as folder -> class."""
    content: Any = read_json(Path(path), list[str] | dict[str, str | Count | list[str]])  # type: ignore[arg-type]
    if isinstance(content, list):
        return {name: place for place, name in enumerate(content)}
    if all(isinstance(value, int) for value in content.values()):
        return content
    try:
        return {str(v[0] if isinstance(v, list) else v): int(place) for place, v in content.items()}
    except (ValueError, IndexError):
        raise VitfocusError(
            f"The index file {path} maps neither folders to numbers nor numbers to folders: expected entries such "
            'as "n01440764": 0 or "0": ["n01440764", "tench"].'
        ) from None


def other_size(name: str, found: Sequence[int], expected: Sequence[int]) -> str:
    """The sentence about images that cannot share a batch: padding them would change them."""
    measures, others = (f"{height}x{width}" for height, width in (found, expected))
    return f"The images differ in size: {name} measures {measures}, others {others}; bring them to one size first."


def digest_of(lines: Iterable[str]) -> str:
    """A SHA-256 of some lines of text, shortened."""
    state = hashlib.sha256()
    for line in lines:
        state.update(line.encode(errors="surrogateescape") + b"\n")
    return state.hexdigest()[:32]
