"""Batches for a model from any form of images.

A tensor, a list, a DataLoader, a data set, dicts from a Hugging Face processor: each becomes a series of `ImageBatch`.
Floats are taken as already normalised; uint8 is normalised as the model expects. A vision-language model gets a text
with each image; its batches are split so that they contain no padding, and ViLT's patches stay in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import rgb_to_grayscale

from vitfocus.anatomy import Anatomy, unwrap
from vitfocus.core.errors import VitfocusError
from vitfocus.data.vqa.tokenizer import tokenizer_of

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
        for piece in whole.split(min(batch_size or len(whole), max(len(whole), 1))):
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


_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "inputs_embeds")


def with_text(batch: ImageBatch, model: nn.Module, body: Anatomy) -> ImageBatch:
    """The batch with its questions tokenized, for a model that reads text; an empty question if there is none."""
    if body.text is None or "input_ids" in batch.extras or "inputs_embeds" in batch.extras:
        return batch
    words = tokenizer_of(unwrap(model))
    if words is None:
        raise VitfocusError(
            f"{type(unwrap(model)).__name__} reads a text with every image: pass dicts with 'pixel_values' and "
            "'input_ids', as its Hugging Face processor makes them, or load it from a folder with its tokenizer.json, "
            "and pass 'pixel_values' and 'question'."
        )
    questions = batch.questions or [""] * len(batch.pixels)
    if len(questions) != len(batch.pixels):
        raise VitfocusError(f"A batch has {len(batch.pixels)} images and {len(questions)} questions: one for each.")
    return replace(batch, extras=batch.extras | words(questions))


def text_length(batch: ImageBatch) -> int:
    """The number of text tokens in the sequence."""
    text = batch.extras.get("input_ids", batch.extras.get("inputs_embeds"))
    return 0 if text is None else int(text.shape[1])


def without_padding(batch: ImageBatch, pairs: int = 1) -> Iterator[ImageBatch]:
    """The batch in pieces without padding; if `pairs` is 2, the second half of a piece corresponds to its first half.

    >>> ids, mask = torch.tensor([[2, 7, 3], [2, 3, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    >>> batch = ImageBatch(torch.zeros(2, 3, 8, 8), {"input_ids": ids, "attention_mask": mask})
    >>> [piece.extras["input_ids"].tolist() for piece in without_padding(batch)]
    [[[2, 7, 3]], [[2, 3]]]
    """
    shapes = _real_shapes(batch)
    # If all rows have the full size, the batch stays as it is: a piece would be a copy.
    if shapes is None or set(shapes) == {(text_length(batch), *batch.pixels.shape[-2:])}:
        yield batch
        return
    half = len(shapes) // pairs
    for shape in dict.fromkeys(shapes[:half]):
        rows = [row for row in range(half) if shapes[row] == shape]
        index = torch.tensor([row + half * part for part in range(pairs) for row in rows])
        yield _piece(batch, index, *shape)


def _real_shapes(batch: ImageBatch) -> list[tuple[int, int, int]] | None:
    """Each row's number of text tokens, height and width; None if the padding is not all at the end."""
    count, (height, width) = len(batch.pixels), batch.pixels.shape[-2:]
    mask, pixel_mask = batch.extras.get("attention_mask"), batch.extras.get("pixel_mask")
    lengths, heights, widths = [text_length(batch)] * count, [height] * count, [width] * count
    if mask is not None:
        lengths = mask.sum(dim=1).int().tolist()
        if not all(bool(row[:length].all()) for row, length in zip(mask, lengths, strict=True)):
            return None
    if pixel_mask is not None:
        heights = pixel_mask[:, :, 0].sum(dim=1).int().tolist()
        widths = pixel_mask[:, 0].sum(dim=1).int().tolist()
        pictures = zip(pixel_mask, heights, widths, strict=True)
        if not all(bool(one[:h, :w].all()) and int(one.sum()) == h * w for one, h, w in pictures):
            return None
    return list(zip(lengths, heights, widths, strict=True))


def _piece(batch: ImageBatch, index: Tensor, length: int, height: int, width: int) -> ImageBatch:
    def cut(name: str, value: Tensor) -> Tensor:
        rows = value[index.to(value.device)]
        if name in _OF_TEXT:
            return rows[:, :length]
        return rows[:, :height, :width] if name == "pixel_mask" else rows

    pixels = batch.pixels[index.to(batch.pixels.device)][..., :height, :width]
    return ImageBatch(pixels, {name: cut(name, value) for name, value in batch.extras.items()})


class PatchesInOrder(TorchFunctionMode):
    """Within the context, the random permutation that ViLT draws for its patches (`torch.multinomial`) is the identity.

    >>> with PatchesInOrder():
    ...     torch.multinomial(torch.ones(4), 4)
    tensor([0, 1, 2, 3])
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.multinomial and not kwargs and len(args) == 2 and args[0].numel() == int(args[1]):
            return torch.arange(args[0].numel(), device=args[0].device)
        return function(*args, **(kwargs or {}))
