"""WebDataset shards: tar files in which the files of one sample share a stem (`0001.jpg`, `0001.cls`).

The tar headers are read once and stored as an index beside the shards, so samples can be read by their offsets. An
epoch is then a permutation as for any other data set: each sample occurs once over all processes, and a run can resume
at any step. `SampleOrder` shuffles a few shards at a time, so reading stays nearly sequential.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import reprlib
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from vitfocus.core.arguments import parse_digits
from vitfocus.core.errors import VitfocusError
from vitfocus.core.records import Count, parse_json, read_json, read_text, write_json
from vitfocus.data.image_files import FORMATS, to_rgb

_IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "bmp")
_LABELS = ("cls", "json")
_OPEN_FILES = 32
_MOST_SHARDS = 100_000
_LARGEST_LABEL = 2**31 - 1


class ShardImages:
    """The samples of some shards. A label is a number in a `.cls` file, or the key "label" of a `.json` file."""

    def __init__(self, shards: Sequence[Path]) -> None:
        self.shards = sorted(shards)
        rows = [_index(shard) for shard in self.shards]
        self.groups = [len(part) for part in rows]
        self._ends = np.cumsum(self.groups)
        # Arrays, not lists: worker processes share them without copying.
        self._keys = np.array([key for part in rows for key, *_ in part])
        self._places = np.array([[*image, *label] for part in rows for _, image, label, _ in part], np.int64)
        self._json = np.array([kind == "json" for part in rows for *_, kind in part])
        self._open: dict[int, int] = {}
        self.classes: Sequence[str] = _class_names(self.shards[0].parent)

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, index: int) -> tuple[Image.Image, int]:
        start, size, label_start, label_size = self._places[index].tolist()
        shard = self._shard(index)
        picture = Image.open(io.BytesIO(self._bytes(shard, start, size)), formats=FORMATS)
        label = self._bytes(shard, label_start, label_size)
        return to_rgb(picture), self._label(label.decode(errors="replace"), index)

    def name(self, index: int) -> str:
        return f"{self.shards[self._shard(index)]}:{self._keys[index]}"

    def digest(self) -> str:
        """SHA-256 of the shards' names and the samples' keys, offsets and sizes."""
        listing = hashlib.sha256(" ".join(shard.name for shard in self.shards).encode(errors="surrogateescape"))
        listing.update("\n".join(self._keys).encode(errors="surrogateescape"))
        listing.update(self._places.tobytes())
        return listing.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Each process opens the files itself."""
        return {**self.__dict__, "_open": {}}

    def _label(self, text: str, index: int) -> int:
        given: Any = text.strip()
        if self._json[index]:
            content = parse_json(text, self.name(index))
            given = content.get("label") if isinstance(content, dict) else None
        number = parse_digits(given) if isinstance(given, str) else given
        if type(number) is not int or not 0 <= number <= _LARGEST_LABEL:
            raise VitfocusError(
                f"{self.name(index)} has the label {reprlib.repr(given)}; expected a whole number from 0 to "
                f"{_LARGEST_LABEL}."
            )
        return number

    def _shard(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right"))

    def _bytes(self, shard: int, start: int, size: int) -> bytes:
        """Read at an offset; `pread` does not move the file position, so processes can share an open file."""
        if shard not in self._open:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[shard] = os.open(self.shards[shard], os.O_RDONLY)
        content = os.pread(self._open[shard], size, start)
        if len(content) < size:
            raise OSError("the shard ends before the sample does")
        return content


def find_shards(root: str, split: str, given: str = "") -> list[Path]:
    """Find shards by a pattern below the root: the given one, or every .tar file whose name starts with the split.

    WebDataset's braces are expanded: "train-{0000..1023}.tar".
    """
    usual = ("train",) if split == "train" else ("val", "validation", "test")
    patterns = [given] if given else [f"{name}*.tar" for name in usual] + [f"{name}/*.tar" for name in usual]
    for pattern in patterns:
        try:
            found = [path for one in expand_braces(pattern) for path in sorted(Path(root).glob(one))]
        except (NotImplementedError, OSError, RecursionError, ValueError) as error:  # of `glob`, or too many shards
            raise VitfocusError(f"data.{split}_split is {pattern!r}, which no shard can match: {error}") from None
        if found := [path for path in found if path.is_file()]:
            return found
    raise VitfocusError(f"No shard matches {' or '.join(patterns)} in {root!r}: set data.root and data.{split}_split.")


def expand_braces(pattern: str) -> list[str]:
    """Expand ranges in braces.

    >>> expand_braces("train-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    >>> expand_braces("train-{0..99999999999}.tar")
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: 'train-{0..99999999999}.tar' expands to more than 100,000 shards.
    """
    head, brace, rest = pattern.partition("{")
    span, closed, tail = rest.partition("}")
    ends = re.fullmatch(r"([0-9]{1,18})\.\.([0-9]{1,18})", span)
    if not (brace and closed and ends):
        return [pattern]
    numbers = range(int(ends[1]), int(ends[2]) + 1)
    after = expand_braces(tail)
    if len(numbers) * len(after) > _MOST_SHARDS:
        raise VitfocusError(f"{pattern!r} expands to more than {_MOST_SHARDS:,} shards.")
    return [f"{head}{number:0{len(ends[1])}d}{rest}" for number in numbers for rest in after]


class ShardIndex(msgspec.Struct):
    """SHARD.index.json: the size and time of the shard, and each sample's key, places and kind of label."""

    file: list[int]
    samples: list[tuple[str, tuple[Count, Count], tuple[Count, Count], str]]


def _index(shard: Path) -> list[tuple[str, tuple[int, int], tuple[int, int], str]]:
    """Key, offsets of image and label, and kind of label of each sample; cached beside the shard until it changes."""
    cache, state = shard.with_suffix(".index.json"), shard.stat()
    version = [state.st_size, state.st_mtime_ns]
    try:
        cached = read_json(cache, ShardIndex)
        ends = (start + size for _, *places, _ in cached.samples for start, size in places)
        if cached.file == version and max(ends, default=0) <= state.st_size:
            return cached.samples
    except VitfocusError:  # missing or damaged: it is built again
        pass
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    end = 0
    try:
        with tarfile.open(shard, "r:") as tar:  # a compressed one cannot be read at offsets
            for member in tar:
                end = member.offset_data + (member.size + 511) // 512 * 512
                folder, _, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                if end > state.st_size:
                    raise VitfocusError(f"{shard} is truncated: {member.name!r} ends after the end of the file.")
                if member.isfile() and stem:
                    parts = samples.setdefault(f"{folder}/{stem}".lstrip("/"), {})
                    parts[extension.lower()] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise VitfocusError(f"{shard} cannot be read as a shard, an uncompressed tar file: {error}.") from None
    with shard.open("rb") as file:  # tarfile does not notice a truncated file; an archive ends with a block of zeros
        file.seek(end)
        if file.read(512) != bytes(512):
            raise VitfocusError(f"{shard} is truncated: the end marker of the archive is missing.")
    rows = []
    for key, parts in samples.items():
        image = next((parts[kind] for kind in _IMAGES if kind in parts), None)
        label = next((kind for kind in _LABELS if kind in parts), None)
        if image is None or label is None:
            raise VitfocusError(f"{shard}:{key} lacks an image or a label (.cls or .json): it has {', '.join(parts)}.")
        rows.append((key, image, parts[label], label))
    with contextlib.suppress(OSError):  # read-only folder: the index is built again next time
        write_json(cache, ShardIndex(version, rows), indent=None)
    return rows


def _class_names(folder: Path) -> list[str]:
    """The names in classes.txt beside the shards, one per line, if the file exists."""
    file = folder / "classes.txt"
    hint = "expected one class name per line"
    text = read_text(file, hint=hint).replace("\r\n", "\n") if file.is_file() else ""
    return text.removesuffix("\n").split("\n") if text else []
