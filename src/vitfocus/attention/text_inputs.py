"""Inputs of a vision-language model: a text with each image, no padding, and patches in order.

Padding tokens are excluded: a batch is split into pieces in which all texts have one length and all images one size, so
that every row and column of a map is a real token. ViLT shuffles the patches of an image, which does not change its
output but hides where a token lies, and makes two maps of one image incomparable; here they stay in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitfocus.anatomy import Anatomy, unwrap
from vitfocus.attention.images import ImageBatch
from vitfocus.core.errors import VitfocusError
from vitfocus.data.vqa.tokenizer import tokenizer_of

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
