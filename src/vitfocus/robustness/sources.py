"""Where batches come from. Every image has a position, so that processes and resumed runs can each take their share.

A source hands out the positions that are not done yet, batch by batch, to the processes in turn: whatever the batch
size and the number of processes, no image is lost and none counts twice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions.draws import as_ids
from vitfocus.data.preprocessing import Preprocessing


@dataclass(frozen=True)
class Share:
    """Which images to take: those not among the positions `done`, every `world`-th batch from batch `rank` on."""

    done: frozenset[int] = frozenset()
    rank: int = 0
    world: int = 1


@dataclass(frozen=True, eq=False)
class Batch:
    """`images` uint8 or floats in [0, 1], (B, 3, H, W), or (B, frames, 3, H, W) for videos.

    `labels` is (B,), or (B, K) with -1 as filling where an image has several right answers; `ids` (B,) names each image
    to the corruptions; `positions` (B,) counts images from 0; `sizes` (B, 2) holds heights and widths where the images
    were padded to a common size.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    positions: Tensor
    sizes: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, places: Sequence[int]) -> Batch:
        """Only the images at these places of the batch."""
        index = torch.tensor(places, dtype=torch.int64)
        return replace(self, **{name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor)})

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        moved = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


class Source(Protocol):
    """Images by position. `count` and `digest` (what identifies the data) may be unknown before they are read."""

    count: int | None
    digest: str | None

    def batches(self, batch_size: int, share: Share) -> Iterator[Batch]:
        """Yield the batches of a share."""
        ...


class Items(Protocol):
    """Things with a length that give (picture or tensor, label) for an index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Unreadable:
    """What a worker process hands back in place of an image it could not read."""

    sentence: str


class ItemSource:
    """Images by index: files, arrays, videos, or a user's data set. `pick` lists the indices that are evaluated.

    All images have one size, `size` where it is given; with `pad` they may differ, and travel padded with black.
    """

    def __init__(
        self,
        items: Items,
        *,
        ids: Sequence[int | str] | None = None,
        names: Sequence[str] | None = None,
        pick: Sequence[int] | None = None,
        digest: str | None = None,
        preprocessing: Preprocessing | None = None,
        size: tuple[int, int] | None = None,
        pad: bool = False,
        workers: int = 0,
        pin: bool = False,
    ) -> None:
        self.pick: Sequence[int] = range(len(items)) if pick is None else pick
        self.count: int | None = len(self.pick)
        self.digest = digest
        self._items = _Prepared(items, preprocessing, names)
        chosen = self.pick if ids is None else [ids[index] for index in self.pick]
        self._ids = as_ids(chosen, len(chosen), torch.device("cpu"))
        self._size, self._pad, self._workers, self._pin = size, pad, workers, pin

    def batches(self, batch_size: int, share: Share) -> Iterator[Batch]:
        """Yield the share's batches; workers read ahead across them."""
        todo = [position for position in range(len(self.pick)) if position not in share.done]
        spans = [todo[start : start + batch_size] for start in range(0, len(todo), batch_size)][
            share.rank :: share.world
        ]
        loader: Iterable[Any] = DataLoader(
            self._items,
            batch_sampler=[[self.pick[position] for position in span] for span in spans],
            collate_fn=partial(collate, pad=self._pad),
            num_workers=min(self._workers, len(spans)),
            pin_memory=self._pin,
        )
        expected = self._size
        for span, (images, labels, sizes) in zip(spans, loader, strict=True):
            if isinstance(images, Unreadable):
                raise VitfocusError(images.sentence)
            expected = expected or (images.shape[-2], images.shape[-1])
            if not self._pad and expected != tuple(images.shape[-2:]):
                raise VitfocusError(other_size(self._items.name(self.pick[span[0]]), images.shape[-2:], expected))
            positions = torch.tensor(span)
            yield Batch(images, labels, self._ids[positions], positions, sizes)


class _Prepared(Dataset[Any]):
    """Items as tensors, prepared in the worker that read them."""

    def __init__(self, items: Items, preprocessing: Preprocessing | None, names: Sequence[str] | None) -> None:
        self.items, self.preprocessing, self.names = items, preprocessing, names

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        """What to call an item in a sentence: its file, or its index."""
        return f"item {index}" if self.names is None else self.names[index]

    def __getitem__(self, index: int) -> Any:
        try:
            image, label = picture_and_label(self.items[index], f"Item {index} of the data")
            if isinstance(image, Image.Image):
                image = (self.preprocessing or Preprocessing(None, None)).apply(image)
        except VitfocusError as error:  # an exception would arrive wrapped in a worker's traceback
            return Unreadable(str(error)), 0, ""
        if not isinstance(image, Tensor) or image.ndim < 3:
            kind = f"tensor of shape {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            return Unreadable(f"Item {index} of the data is a {kind}; expected a picture or a tensor (3, H, W)."), 0, ""
        try:
            return image, class_numbers(torch.as_tensor(label), f"Item {index} of the data"), self.name(index)
        except VitfocusError as error:
            return Unreadable(str(error)), 0, ""
        except (TypeError, ValueError, RuntimeError):
            return Unreadable(f"Item {index} of the data has the label {label!r}; expected a class number."), 0, ""


def collate(
    items: Sequence[tuple[Any, Any, str]], pad: bool = False
) -> tuple[Tensor | Unreadable, Tensor, Tensor | None]:
    """Stack images and labels; images of several sizes are refused, or padded with black at the right and below."""
    for image, _, _ in items:
        if isinstance(image, Unreadable):
            return image, torch.zeros(0), None
    images = [image for image, _, _ in items]
    if len({label.shape for _, label, _ in items}) > 1:
        return Unreadable("Labels of one batch differ in shape; expected one class number an image."), images[0], None
    labels = torch.stack([label for _, label, _ in items])
    if len({image.shape for image in images}) == 1:
        return torch.stack(images), labels, None
    if len({(image.ndim, *image.shape[:-2]) for image in images}) > 1:
        found = ", ".join(sorted({str(tuple(image.shape)) for image in images}))
        return Unreadable(f"Images of one batch have the shapes {found}; expected one shape."), labels, None
    if not pad:
        image, _, name = next(item for item in items if item[0].shape != images[0].shape)
        return Unreadable(other_size(name, image.shape[-2:], images[0].shape[-2:])), labels, None
    sizes = torch.tensor([image.shape[-2:] for image in images])
    height, width = sizes.amax(0).tolist()
    padded = [torch.nn.functional.pad(i, (0, width - i.shape[-1], 0, height - i.shape[-2])) for i in images]
    return torch.stack(padded), labels, sizes


_PICTURES, _LABELS = ("image", "images", "pixel_values", "img"), ("label", "labels")
_PAIR = "expected (picture, label), or a dict with image and label"


def other_size(name: str, found: Sequence[int], expected: Sequence[int]) -> str:
    """The sentence about images that cannot share a batch: padding them would change them."""
    measures, others = (f"{height}x{width}" for height, width in (found, expected))
    return f"The images differ in size: {name} measures {measures}, others {others}; bring them to one size first."


def picture_and_label(item: Any, what: str, expected: str = _PAIR) -> tuple[Any, Any]:
    """The first two of a tuple, or those entries of a dict that are named so."""
    if isinstance(item, Mapping):
        pair = [next((item[key] for key in keys if key in item), None) for keys in (_PICTURES, _LABELS)]
        if not any(part is None for part in pair):
            return pair[0], pair[1]
        found = f"a dict of {', '.join(map(str, item)) or 'nothing'}"
    elif isinstance(item, list | tuple) and len(item) >= 2:
        return item[0], item[1]
    else:
        found = f"a {type(item).__name__}"
    raise VitfocusError(f"{what} is {found}; {expected}.")


class StreamSource:
    """Batches as a DataLoader or another iterable yields them: (images, labels), or a dict with those."""

    def __init__(self, batches: Iterable[Any], limit: int | None = None) -> None:
        self._stream, self._limit = batches, limit
        dataset: Any = getattr(batches, "dataset", None)
        sized = hasattr(dataset, "__len__") and not getattr(batches, "drop_last", False)
        self.count: int | None = len(dataset) if sized else None
        if limit is not None and self.count is not None:
            self.count = min(limit, self.count)
        self.digest: str | None = None

    def batches(self, batch_size: int, share: Share) -> Iterator[Batch]:
        """Yield the share's batches as they come; their size is the stream's own affair."""
        seen = 0
        for number, item in enumerate(self._stream):
            images, labels = _pair(item)
            if self._limit is not None:
                images, labels = images[: self._limit - seen], labels[: self._limit - seen]
            if not len(images):
                break
            span = range(seen, seen + len(images))
            seen += len(images)
            keep = [place for place, position in enumerate(span) if position not in share.done]
            if keep and number % share.world == share.rank:
                if len(keep) < len(span):
                    images, labels = images[keep], labels[keep]
                positions = torch.tensor(span)[keep]
                yield Batch(images, labels, positions, positions)
        self.count = seen


_EXPECTED = "expected batches of (images, labels), images uint8 or floats in [0, 1], (B, 3, H, W)"


def _pair(item: Any) -> tuple[Tensor, Tensor]:
    images, labels = picture_and_label(item, "A batch of the data", _EXPECTED)
    if not isinstance(images, Tensor) or images.ndim != 4 or not isinstance(labels, Tensor | list | tuple):
        raise VitfocusError(f"A batch holds no images or no labels that can be used; {_EXPECTED}.")
    try:
        labels = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise VitfocusError(f"A batch has labels that are no class numbers; {_EXPECTED}.") from None
    if len(images) != len(labels):
        raise VitfocusError(f"A batch holds {len(images)} images but {len(labels)} labels.")
    if labels.numel() != len(labels):
        raise VitfocusError(f"A batch has labels of shape {tuple(labels.shape)}; {_ONE_NUMBER}.")
    return images, class_numbers(labels, "A batch").reshape(-1)


_ONE_NUMBER = "expected one class number an image (of one-hot rows: labels.argmax(1))"


def one_number(label: Any, what: str) -> None:
    """Refuse a row of numbers, such as a one-hot label, which would pass for several right answers."""
    size = tuple(getattr(label, "shape", ())) or ((len(label),) if isinstance(label, list | tuple) else ())
    if math.prod(size) != 1:
        raise VitfocusError(f"{what} has a label of shape {size}; {_ONE_NUMBER}.")


def class_numbers(labels: Tensor, what: str) -> Tensor:
    """Labels as whole numbers, where they are whole.

    >>> class_numbers(torch.tensor([1.0, 3.0]), "A batch")
    tensor([1, 3])
    """
    whole = labels.long()
    if labels.is_floating_point() and not bool((labels == whole).all()):
        raise VitfocusError(f"{what} has the label {float(labels[labels != whole].flatten()[0]):g}; {_ONE_NUMBER}.")
    return whole


def digest_of(lines: Iterable[str]) -> str:
    """A SHA-256 of some lines of text, shortened."""
    state = hashlib.sha256()
    for line in lines:
        state.update(line.encode(errors="surrogateescape") + b"\n")
    return state.hexdigest()[:32]
