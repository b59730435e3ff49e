"""The batches of an evaluation. Every image has a position, by which processes and resumed runs divide the work.

A source divides its positions into fixed batches. Those that are not done yet are distributed over the processes, so
every image is measured once, for any batch size and any number of processes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from vitfocus.core.arguments import require_values
from vitfocus.core.errors import VitfocusError
from vitfocus.core.statistics import evenly_spaced
from vitfocus.corruptions.base import as_ids
from vitfocus.data.image_files import (
    UNREADABLE,
    Entry,
    Preprocessing,
    array_to_tensor,
    as_images,
    image_file,
    is_image,
    open_image,
    unreadable,
)
from vitfocus.data.loader import Broken


@dataclass(frozen=True)
class EvaluationBatch:
    """A batch of images with labels; every field has one entry per image.

    `images` is the input of a model, (B, ...) or any nest of lists and dicts of tensors that the suite can score;
    `labels` (B, ...) holds class numbers or masks; `ids` (B,) determine the random draws; `positions` (B,) count the
    images of the source from 0; `sizes` (B, 2) holds heights and widths if images were padded.
    """

    images: Any
    labels: Any
    ids: Tensor
    positions: Tensor
    sizes: Tensor | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def to(self, device: torch.device) -> EvaluationBatch:
        return replace(self, **{name: _moved(value, device) for name, value in vars(self).items()})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(one, device) for key, one in value.items()}
    return [_moved(one, device) for one in value] if isinstance(value, list) else value


class Source(Protocol):
    """Images by position. `count`, and `digest`, which identifies the data, may be None until the data are read."""

    count: int | None
    digest: str | None

    def batches(
        self, batch_size: int, done: frozenset[int] = frozenset(), rank: int = 0, world: int = 1
    ) -> Iterator[EvaluationBatch]:
        """Yield the batches of process `rank` of `world`, without those whose positions are all `done`."""
        ...


class Collated(NamedTuple):
    """Some items of a span as the fields of a batch; `rows` are their indices in the span."""

    rows: Sequence[int]
    images: Any
    labels: Any
    sizes: Tensor | None = None


Collate = Callable[[list[Any]], list[Collated]]


class ItemSource:
    """Images that are read by index.

    Args:
        samples: `samples[index]` is an item or `Broken`, or raises a `VitfocusError`.
        pick: The indices that are evaluated.
        collate: Makes one or several batches of the items of a span.
        ids: Names of all samples, which determine their random draws; their indices by default.
        digest: Identifies the data, if that is known without reading them.
        uniform: Refuse images of different sizes.
        size: The size that `uniform` images must have; that of the first by default.
        workers: Number of worker processes.
        pin: Read into pinned memory.
    """

    def __init__(
        self,
        samples: Any,
        pick: Sequence[int],
        collate: Collate,
        *,
        ids: Sequence[int | str] | None = None,
        digest: str | None = None,
        uniform: bool = False,
        size: tuple[int, int] | None = None,
        workers: int = 0,
        pin: bool = False,
    ) -> None:
        self.pick, self.digest, self._samples, self._collate = pick, digest, samples, collate
        self.count: int | None = len(pick)
        chosen = pick if ids is None else [ids[index] for index in pick]
        self._ids = as_ids(chosen, len(chosen), torch.device("cpu"))
        self._uniform, self._size, self._workers, self._pin = uniform, size, workers, pin

    def batches(
        self, batch_size: int, done: frozenset[int] = frozenset(), rank: int = 0, world: int = 1
    ) -> Iterator[EvaluationBatch]:
        """Yield the batches of this process; workers read ahead."""
        count = len(self.pick)
        spans = [range(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
        spans = [span for span in spans if not done.issuperset(span)][rank::world]
        reader = _SpanReader(self._samples, self._collate, [[self.pick[at] for at in span] for span in spans])
        options: dict[str, Any] = {"num_workers": min(self._workers, len(spans)), "pin_memory": self._pin}
        generator = torch.Generator()  # so that the global one is not advanced
        loader: Iterable[Any] = DataLoader(reader, batch_size=None, generator=generator, **options)
        expected = self._size
        for span, parts in zip(spans, loader, strict=True):
            if isinstance(parts, str):
                raise VitfocusError(parts)
            for rows, images, labels, sizes in parts:
                positions = torch.tensor([span[row] for row in rows])
                if self._uniform:
                    expected = expected or tuple(images.shape[-2:])
                    if expected != tuple(images.shape[-2:]):
                        name = getattr(self._samples, "name", "item {}".format)(self.pick[span[0]])
                        raise VitfocusError(other_size(name, images.shape[-2:], expected))
                yield EvaluationBatch(images, labels, self._ids[positions], positions, sizes)


@dataclass(frozen=True)
class _SpanReader(Dataset[Any]):
    """Reads spans of samples as batches; an error is returned as text, since DataLoader wraps exceptions of workers."""

    samples: Any
    collate: Collate
    spans: list[list[int]]

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, number: int) -> list[Collated] | str:
        items = []
        try:
            for index in self.spans[number]:
                items.append(self.samples[index])
                if isinstance(items[-1], Broken):
                    return f"An image cannot be read: {items[-1]}."
            return self.collate(items)
        except VitfocusError as error:
            return str(error)


def labelled_images(data: Any) -> Dataset[Any] | None:
    """A data set from (images, labels) or from a list of (image, label); None for anything else.

    Images are a tensor or array (B, 3, H, W), or single images in any form that `as_images` takes.
    """
    if not isinstance(data, list | tuple) or not len(data):
        return None
    if len(data) == 2 and not isinstance(data[0], tuple | Mapping) and not isinstance(data[1], str):
        images, labels = data
        if isinstance(images, np.ndarray) and as_images(images) is None:
            images = array_to_tensor(images)
        for name, given in (("images", images), ("labels", labels)):
            if isinstance(given, Tensor):
                require_values(name, given)
        if isinstance(images, Tensor) and images.ndim == 3:
            images = images[None]
        singles = images if isinstance(images, Tensor) and images.ndim == 4 else as_images(images)
        listed = isinstance(labels, list | tuple) or getattr(labels, "ndim", 0) > 0
        if singles is not None and listed:
            if len(singles) != len(labels):
                raise VitfocusError(f"The data has {len(singles)} images but {len(labels)} labels.")
            if not len(singles):
                raise VitfocusError("The data has no images, so there is nothing to measure.")
            data = list(zip(singles, labels, strict=True))
    first = data[0]
    pair = isinstance(first, tuple | list) and len(first) == 2
    single = pair and (is_image(first[0]) or (isinstance(first[0], Tensor) and first[0].ndim == 3))
    return Subset(data, range(len(data))) if single else None


class ImageSamples:
    """Items (image, label) as (tensor, class numbers, name), preprocessed in the worker that reads them."""

    def __init__(
        self, items: Any, preprocessing: Preprocessing | None = None, names: Sequence[str] | None = None
    ) -> None:
        self.items, self.preprocessing, self.names = items, preprocessing, names

    def name(self, index: int) -> str:
        """The name of an item in messages: its file, or its index."""
        return f"item {index}" if self.names is None else self.names[index]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, str]:
        what = f"Item {index} of the data"
        image, label = image_and_label(self.items[index], what)
        if is_image(image):
            image = (self.preprocessing or Preprocessing(None, None)).apply(open_image(image))
        if not isinstance(image, Tensor) or image.ndim < 3:
            kind = f"tensor of shape {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise VitfocusError(f"{what} is a {kind}; expected an image or a tensor (3, H, W).")
        return image, class_numbers(label, what), self.name(index)


def collate_images(items: list[tuple[Tensor, Tensor, str]], pad: bool = False) -> list[Collated]:
    """Stack images and labels; images of several sizes are refused, or padded with black on the right and bottom."""
    images = [image for image, _, _ in items]
    if len({label.shape for _, label, _ in items}) > 1:
        raise VitfocusError("Labels of one batch differ in shape; expected one class number per image.")
    labels = torch.stack([label for _, label, _ in items])
    rows = range(len(items))
    if len({image.shape for image in images}) == 1:
        return [Collated(rows, torch.stack(images), labels)]
    if len({(image.ndim, *image.shape[:-2]) for image in images}) > 1:
        found = ", ".join(sorted({str(tuple(image.shape)) for image in images}))
        raise VitfocusError(f"Images of one batch have the shapes {found}; expected one shape.")
    if not pad:
        image, _, name = next(item for item in items if item[0].shape != images[0].shape)
        raise VitfocusError(other_size(name, image.shape[-2:], images[0].shape[-2:]))
    sizes = torch.tensor([image.shape[-2:] for image in images])
    height, width = sizes.amax(0).tolist()
    padded = [torch.nn.functional.pad(i, (0, width - i.shape[-1], 0, height - i.shape[-2])) for i in images]
    return [Collated(rows, torch.stack(padded), labels, sizes)]


_IMAGES, _LABELS = ("image", "images", "pixel_values", "img"), ("label", "labels")
_PAIR = "expected (image, label), or a dict with image and label"


def image_and_label(item: Any, what: str, expected: str = _PAIR) -> tuple[Any, Any]:
    """The first two entries of a tuple, or the entries of a dict with one of the usual names."""
    if isinstance(item, Mapping):
        pair = [next((item[key] for key in keys if key in item), None) for keys in (_IMAGES, _LABELS)]
        if not any(part is None for part in pair):
            return pair[0], pair[1]
        found = f"a dict of {', '.join(map(str, item)) or 'nothing'}"
    elif isinstance(item, list | tuple) and len(item) >= 2:
        return item[0], item[1]
    else:
        found = f"a {type(item).__name__}"
    raise VitfocusError(f"{what} is {found}; {expected}.")


_EXPECTED = "expected batches of (images, labels), images uint8 or floats in [0, 1], (B, 3, H, W)"


def images_and_labels(item: Any) -> tuple[Tensor, Tensor]:
    """A batch of a loader as tensors: images (B, 3, H, W) and class numbers (B,)."""
    images, labels = image_and_label(item, "A batch of the data", _EXPECTED)
    if not isinstance(images, Tensor) or images.ndim != 4 or not isinstance(labels, Tensor | list | tuple):
        raise VitfocusError(f"A batch holds no usable images or labels; {_EXPECTED}.")
    numbers = class_numbers(labels, "A batch")
    if len(images) != len(numbers):
        raise VitfocusError(f"A batch holds {len(images)} images but {len(numbers)} labels.")
    if numbers.numel() != len(numbers):
        raise VitfocusError(f"A batch has labels of shape {tuple(numbers.shape)}; {_ONE_NUMBER}.")
    return images, numbers.reshape(-1)


class LoaderSource:
    """Batches of a DataLoader or another iterable; `read` turns one into images and labels."""

    def __init__(
        self,
        batches: Iterable[Any],
        limit: int | None = None,
        read: Callable[[Any], tuple[Tensor, Tensor]] = images_and_labels,
    ) -> None:
        self._loader, self._limit, self._read = batches, limit, read
        dataset: Any = getattr(batches, "dataset", None)
        sized = hasattr(dataset, "__len__") and not getattr(batches, "drop_last", False)
        self.count: int | None = len(dataset) if sized else None
        if limit is not None and self.count is not None:
            self.count = min(limit, self.count)
        self.digest: str | None = None

    def batches(
        self, batch_size: int, done: frozenset[int] = frozenset(), rank: int = 0, world: int = 1
    ) -> Iterator[EvaluationBatch]:
        """Yield the batches of this process, of the size that the iterable gives them."""
        seen = 0
        if getattr(self._loader, "ndim", 1) == 0:  # a NumPy array without axes cannot be iterated over
            raise VitfocusError(f"data is {self._loader!r}; expected batches of images and labels.")
        for number, item in enumerate(self._loader):
            images, labels = self._read(item)
            if self._limit is not None:
                images, labels = images[: self._limit - seen], labels[: self._limit - seen]
            if not len(images):
                break
            span = range(seen, seen + len(images))
            seen += len(images)
            if number % world == rank and not done.issuperset(span):
                positions = torch.tensor(span)
                yield EvaluationBatch(images, labels, positions, positions)
        self.count = seen


_HEADERS_AT_MOST = 100_000
_ONE_NUMBER = "expected one class number per image (of one-hot rows: labels.argmax(1))"


def require_one_number(label: Any, what: str) -> None:
    """Refuse a row of numbers, such as a one-hot label, which would look like several correct labels."""
    size = tuple(getattr(label, "shape", ())) or ((len(label),) if isinstance(label, list | tuple) else ())
    if math.prod(size) != 1:
        raise VitfocusError(f"{what} has a label of shape {size}; {_ONE_NUMBER}.")


def class_numbers(labels: Any, what: str) -> Tensor:
    """Labels as a tensor of whole numbers.

    >>> class_numbers([1.0, 3.0], "A batch")
    tensor([1, 3])
    """
    try:
        numbers = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise VitfocusError(f"{what} has the label {labels!r}; {_ONE_NUMBER}.") from None
    whole = numbers.long()
    if numbers.is_floating_point() and not bool((numbers == whole).all()):
        raise VitfocusError(f"{what} has the label {float(numbers[numbers != whole].flatten()[0]):g}; {_ONE_NUMBER}.")
    return whole


def checksums(batch: EvaluationBatch) -> Tensor:
    """Eight bytes of BLAKE2 per image and its label, int64; floats that are 8-bit values count as those."""
    images, labels = batch.images.detach().cpu(), batch.labels.cpu()
    sizes = [images.shape[-2:]] * len(batch) if batch.sizes is None else batch.sizes.tolist()
    sums = []
    for padded, label, (height, width) in zip(images, labels, sizes, strict=True):
        image = padded[..., :height, :width]
        if image.is_floating_point():
            levels = image.float() * 255
            whole = levels.round()
            exact = bool(levels.sub_(whole).abs_().amax() < 1e-2)
            image = whole.to(torch.uint8) if exact else image.float()
        named = label.long().reshape(-1).tolist() if label.ndim < 2 else f"mask {tuple(label.shape)} {label.dtype}"
        state = hashlib.blake2b(f"{tuple(image.shape)} {named}".encode(), digest_size=8)
        state.update(image.contiguous().view(torch.uint8).numpy().data)
        if label.ndim >= 2:
            state.update(label.contiguous().view(torch.uint8).numpy().data)
        sums.append(int.from_bytes(state.digest(), "big", signed=True))
    return torch.tensor(sums, dtype=torch.int64)


def check_readable(root: Path, entries: Sequence[Entry]) -> dict[str, tuple[int, int]]:
    """Heights and widths from the headers of up to 100,000 images; the first file that is not an image is refused."""

    def look(entry: Entry) -> tuple[int, int] | str:
        try:
            with image_file(root / entry.name) as image:
                return image.height, image.width
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
    """The size that all images share; the error names the first image of another size."""
    expected = next(iter(sizes.values()))
    for name, found in sizes.items():
        if found != expected:
            raise VitfocusError(other_size(name, found, expected))
    return expected


@dataclass(frozen=True)
class ImageFiles:
    """Paths with labels."""

    root: Path
    names: Sequence[str]
    labels: Sequence[Any]

    def __getitem__(self, index: int) -> tuple[Path, Any]:
        return self.root / self.names[index], self.labels[index]


def other_size(name: str, found: Sequence[int], expected: Sequence[int]) -> str:
    """The error message for images of different sizes, which cannot share a batch."""
    size, others = (f"{height}x{width}" for height, width in (found, expected))
    return f"The images differ in size: {name} has {size} pixels, others {others}; resize them to one size first."
