"""Batches for a model from any form of images.

A tensor, a list, a DataLoader, a data set, dicts from a Hugging Face processor: each becomes a series of `ImageBatch`.
Floats are taken as already normalised; uint8 is normalised as the model expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import rgb_to_grayscale

from vitfocus.anatomy import Anatomy
from vitfocus.core.errors import VitfocusError

Images = Tensor | Iterable[Any] | Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images as given, (B, 3, H, W) in uint8 or normalised floats, and the model's other inputs (a text, a mask).

    `questions` are texts that are not tokenized yet, one for each image.
    """

    pixels: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    questions: list[str] | None = None


def batches(images: Images, batch_size: int | None = None) -> Iterator[ImageBatch]:
    """The images in batches; `batch_size` is the number of images from a tensor or a data set.

    >>> pictures = torch.zeros(5, 3, 8, 8)
    >>> [len(b.pixels) for b in batches(pictures, batch_size=2)], [len(b.pixels) for b in batches(list(pictures))]
    ([2, 2, 1], [5])
    """
    if isinstance(images, Tensor) and images.ndim in (3, 4):
        whole = images if images.ndim == 4 else images[None]
        if batch_size is not None and batch_size < 1:
            raise VitfocusError(f"batch_size is at least 1, not {batch_size}.")
        for piece in whole.split(batch_size or max(len(whole), 1)):
            yield ImageBatch(_checked(piece))
        return
    if isinstance(images, Mapping) or _is_pair(images):
        yield _batch(images)
        return
    if isinstance(images, list | tuple) and _are_alike(images):
        yield from batches(torch.stack(list(images)), batch_size)
        return
    if isinstance(images, Dataset):
        images = DataLoader(images, batch_size=batch_size or 16)
    if isinstance(images, str | bytes | Tensor) or not isinstance(images, Iterable):
        raise VitfocusError(f"{_described(images)} is not a set of images: {_EXPECTED}")
    for item in images:
        yield _batch(item)


_EXPECTED = (
    "expected a tensor (B, 3, H, W) of normalised floats or uint8, a list of such tensors, or a DataLoader that yields "
    "them alone, first in a tuple, or as 'pixel_values' in a dict."
)


def _batch(item: Any) -> ImageBatch:
    if isinstance(item, Mapping):
        if not isinstance(item.get("pixel_values"), Tensor):
            raise VitfocusError(f"A batch with the keys {', '.join(map(str, item))} holds no images: {_EXPECTED}")
        extras = {k: v for k, v in item.items() if isinstance(v, Tensor) and k not in ("pixel_values", "labels")}
        return ImageBatch(_checked(item["pixel_values"]), extras, _questions(item))
    asked = None
    if isinstance(item, list | tuple) and item:
        asked = next((_questions(other) for other in item[1:] if isinstance(other, Mapping)), None)
        item = item[0]
    if not isinstance(item, Tensor):
        raise VitfocusError(f"A batch is {_described(item)}: {_EXPECTED}")
    return ImageBatch(_checked(item if item.ndim == 4 else item[None]), questions=asked)


def _questions(item: Mapping[str, Any]) -> list[str] | None:
    """The texts of a batch, under "question" (one for each image) as a data set of questions yields them."""
    asked = item.get("question")
    if isinstance(asked, str):
        return [asked]
    return list(asked) if isinstance(asked, list | tuple) and all(isinstance(one, str) for one in asked) else None


def _are_alike(images: Sequence[Any]) -> bool:
    """Whether these are single images of one size."""
    return all(isinstance(i, Tensor) and i.ndim == 3 for i in images) and len({i.shape for i in images}) == 1


def _is_pair(images: Any) -> bool:
    """Whether this is one batch as a DataLoader yields it: images first, then labels."""
    if not isinstance(images, list | tuple) or len(images) < 2 or not isinstance(images[0], Tensor):
        return False
    return images[0].ndim == 4 and not any(isinstance(other, Tensor) and other.ndim >= 3 for other in images[1:])


def _checked(pixels: Tensor) -> Tensor:
    if pixels.ndim != 4 or not (pixels.is_floating_point() or pixels.dtype == torch.uint8):
        raise VitfocusError(f"A batch is {_described(pixels)}: {_EXPECTED}")
    if pixels.shape[1] > 4 and pixels.shape[-1] <= 4:
        raise VitfocusError(f"A batch is {_described(pixels)}: channels come second; try images.permute(0, 3, 1, 2).")
    return pixels


def _described(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"a {str(thing.dtype).removeprefix('torch.')} tensor of shape {tuple(thing.shape)}"
    return f"{thing!r}" if isinstance(thing, str) else f"a {type(thing).__name__}"


def normalised(pixels: Tensor, body: Anatomy) -> Tensor:
    """uint8 as the model's mean and std want it, colour as grey for a model of one channel; floats as they are."""
    if pixels.dtype != torch.uint8:
        return pixels
    if len(body.mean) == 1 and pixels.shape[1] == 3:
        pixels = rgb_to_grayscale(pixels)
    mean, std = _statistics(body, pixels)
    return (pixels.float() / 255 - mean) / std


def corrupted(pixels: Tensor, body: Anatomy, corruption: str, seed: int, first: int) -> Tensor:
    """The same images under "name/severity", normalised; the first of them is number `first` of its set."""
    from vitfocus.corruptions import corrupt, parse

    name, severity = parse(corruption)
    ids = range(first, first + len(pixels))

    def changed(plain: Tensor) -> Tensor:
        """The images corrupted; one channel as a grey picture, which it is again afterwards."""
        if plain.shape[1] != 1:
            return corrupt(plain, name, severity, seed=seed, ids=ids)
        return rgb_to_grayscale(corrupt(plain.expand(-1, 3, -1, -1), name, severity, seed=seed, ids=ids))

    if pixels.dtype == torch.uint8:
        return normalised(changed(pixels), body)
    mean, std = _statistics(body, pixels)
    plain = (pixels.float() * std + mean).clamp(0, 1)
    return ((changed(plain) - mean) / std).to(pixels.dtype)


def paired(
    images: Iterator[ImageBatch], against: Images | str, body: Anatomy, size: int | None, seed: int
) -> Iterator[ImageBatch]:
    """Every batch twice as long: the images, normalised, then the same corrupted, or those of the second set."""
    others = None if isinstance(against, str) else batches(against, size)
    done = 0

    def partners(pixels: Tensor) -> Tensor:
        if isinstance(against, str):
            return corrupted(pixels, body, against, seed, done)
        assert others is not None
        following = next(others, None)
        if following is None or following.pixels.shape != pixels.shape:
            shape = tuple(pixels.shape)
            got = "none" if following is None else f"one of shape {tuple(following.pixels.shape)}"
            raise VitfocusError(f"`against` must match `images` batch for batch: for one of shape {shape} came {got}.")
        return normalised(following.pixels, body)

    for batch in images:
        extras = {key: torch.cat([value, value]) for key, value in batch.extras.items()}
        # Neither half has a name here: it would keep them in memory while the model runs.
        yield ImageBatch(_joined(normalised(batch.pixels, body), partners(batch.pixels)), extras)
        done += len(batch.pixels)
    if others is not None and next(others, None) is not None:
        raise VitfocusError(f"`against` holds more images than `images`, which ended after {done}.")


def _joined(clean: Tensor, other: Tensor) -> Tensor:
    return torch.cat([clean, other.to(clean.device, clean.dtype)])


def _statistics(body: Anatomy, like: Tensor) -> tuple[Tensor, Tensor]:
    if like.shape[1] != len(body.mean):
        channels = f"{like.shape[1]} channel{'s' * (like.shape[1] != 1)}"
        raise VitfocusError(f"The images have {channels}, but the model's mean has {len(body.mean)}.")
    as_tensor: Sequence[Tensor] = [
        torch.tensor(values, dtype=torch.float32, device=like.device).view(1, -1, 1, 1)
        for values in (body.mean, body.std)
    ]
    return as_tensor[0], as_tensor[1]
