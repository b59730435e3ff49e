"""Batches for a model from any form of images: a folder, paths, PIL images, arrays, tensors, data sets, loaders.

Pictures are resized and cropped as for an evaluation. uint8 and floats in [0, 1] are pixels, and are normalised as the
model expects; floats are taken as normalised with `normalised=True`, or if they are clearly outside [0, 1]. A
vision-language model gets a text with each image; its batches are split so that they contain no padding, and ViLT's
patches stay in order.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchvision.transforms.functional import rgb_to_grayscale

from vitfocus.anatomy import Anatomy, unwrap
from vitfocus.anatomy.inputs import PLACES
from vitfocus.core.arguments import require_values
from vitfocus.core.errors import VitfocusError, VitfocusWarning
from vitfocus.data.image_files import (
    array_to_tensor,
    as_images,
    evaluation_preprocessing,
    is_image,
    model_interpolation,
    open_image,
    out_of_range,
)
from vitfocus.data.shapes.dataset import Shapes, shapes_named
from vitfocus.data.vqa.dataset import tokenizer_of

Images = Any  # see `diagnose`

#: So many batches on a GPU are read before their values are checked.
_UNCHECKED = 32

#: The input names of models that take videos, patches or text.
_OTHERS = ("pixel_values_videos", "hidden_states", "input_ids")

#: Pictures and data sets are read in batches of this many; scenes of "shapes" without a number.
BATCH, SHAPES = 16, 64


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images, (B, 3, H, W) in uint8 or normalised floats, and the model's other inputs (a text, a mask).

    `questions` are texts that are not tokenized yet, one per image. For models with other inputs, `pixels` contains
    videos (B, T, C, H, W) or token ids (B, N), and `name` is the name of the model's argument.
    """

    pixels: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    questions: list[str] | None = None
    name: str = "pixel_values"


@dataclass
class Batches:
    """Batches of images for a model.

    Attributes:
        images: The images, as `diagnose` takes them.
        body: The model's anatomy.
        batch_size: The number of images from a tensor, pictures or a data set.
        normalised: Whether floats are normalised; None decides by the range of the first batch.
        taken_as: How the images were understood: "pixels", "normalised" or "normalised (assumed)"; "" before the first.

    Example:
        >>> import timm
        >>> from vitfocus.anatomy import anatomy
        >>> body = anatomy(timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32))
        >>> found = Batches(torch.rand(5, 3, 32, 32), body, batch_size=2)
        >>> [len(batch.pixels) for batch in found], found.taken_as
        ([2, 2, 1], 'pixels')
        >>> [batch.pixels.shape for batch in Batches(np.zeros((40, 50, 3)), body)]  # resized and cropped
        [torch.Size([1, 3, 32, 32])]
    """

    images: Images
    body: Anatomy
    batch_size: int | None = None
    normalised: bool | None = None
    taken_as: str = ""

    def __iter__(self) -> Iterator[ImageBatch]:
        if self.batch_size is not None and self.batch_size < 1:
            raise VitfocusError(f"batch_size must be at least 1, not {self.batch_size}.")
        later: list[Any] = []
        for batch in _batches(self.images, self.batch_size, self.body):
            pixels = batch.pixels
            require_values("A batch", pixels, pixels=True)
            if _is_prepared(batch):
                self.taken_as = "as given"
                yield batch
                continue
            if pixels.ndim != 4 or not (pixels.is_floating_point() or pixels.dtype == torch.uint8):
                raise VitfocusError(f"A batch is {_described(pixels)}: {_EXPECTED}")
            if pixels.shape[1] > 4 and pixels.shape[-1] <= 4:
                advice = "channels come second; try images.permute(0, 3, 1, 2)"
                raise VitfocusError(f"A batch is {_described(pixels)}: {advice}.")
            if pixels.dtype == torch.uint8:
                if self.normalised:
                    raise VitfocusError("normalised=True is for float tensors, not for pictures or uint8.")
                self.taken_as = self.taken_as or "pixels"
                yield batch
                continue
            bounds = pixels.aminmax() if pixels.numel() else pixels.new_zeros(2).unbind()
            if self.taken_as and pixels.is_cuda:
                # Looking at the values now would wait for the model's work on the batches before.
                later.append(bounds)
                if len(later) == _UNCHECKED:
                    self._check_all(later)
            else:
                self._check(*bounds)
            yield batch if self.taken_as != "pixels" else _scaled(batch, self.body)
        self._check_all(later)

    def _check_all(self, later: list[Any]) -> None:
        while later:
            self._check(*later.pop(0))

    def _check(self, lowest: Tensor, highest: Tensor) -> None:
        """Refuse NaN and values out of range; the first batch decides what the images are taken as."""
        low, high = float(lowest), float(highest)
        in_range = low >= -1e-3 and high <= 1 + 1e-3
        if math.isnan(low):
            raise VitfocusError("The images contain values that are not a number (NaN).")
        if self.normalised:
            self.taken_as = "normalised"
            self._suspect(low, high, in_range)
        elif self.normalised is None and not self.taken_as and not in_range and not (low >= 0 and high > 16):
            self.taken_as = "normalised (assumed)"
        self.taken_as = self.taken_as or "pixels"
        if self.taken_as == "pixels" and not in_range:
            raise VitfocusError(out_of_range(low, high, "say normalised=True if they are normalised"))

    def _suspect(self, low: float, high: float, in_range: bool) -> None:
        """Warn about normalised images with the range of pixels, unless normalising does not change it."""
        if in_range and low < high and any((*self.body.mean, *(1 - value for value in self.body.std))):
            warnings.warn(
                f"normalised=True, but the images lie in [{low:.3g}, {high:.3g}], as pixels do: leave it out if they "
                "have not been normalised.",
                VitfocusWarning,
            )


def _scaled(batch: ImageBatch, body: Anatomy) -> ImageBatch:
    return replace(batch, pixels=scaled(batch.pixels.float(), body).to(batch.pixels.dtype))


def _is_prepared(batch: ImageBatch) -> bool:
    """Whether a batch is passed to the model unchanged: videos, pre-cut patches, or text."""
    cut = any(name in batch.extras for name in PLACES)
    return batch.name != "pixel_values" or (batch.pixels.is_floating_point() and (cut or batch.pixels.ndim == 5))


_EXPECTED = (
    "expected a folder, paths, PIL images, arrays (H, W, 3), a tensor (B, 3, H, W) of uint8 or floats, a list of such "
    "tensors, or a DataLoader that yields them alone, first in a tuple, or as 'pixel_values' in a dict."
)


def _batches(images: Images, size: int | None, body: Anatomy) -> Iterator[ImageBatch]:
    if isinstance(images, str) and (count := shapes_named(images, SHAPES)) is not None:
        images = Shapes("val", length=count, size=body.build_size)
    if isinstance(images, np.ndarray) and as_images(images) is None:
        images = array_to_tensor(images)
    if isinstance(images, Tensor) and images.ndim in (3, 4, 5):
        require_values("images", images, pixels=True)
        whole = images if images.ndim > 3 else images[None]
        for piece in whole.split(min(size or len(whole), max(len(whole), 1))):
            yield ImageBatch(piece)
        return
    if isinstance(images, Mapping) or _is_pair(images):
        yield _batch(images, body)
        return
    if isinstance(images, list | tuple) and images and _are_alike(images):
        yield from _batches(torch.stack(list(images)), size, body)
        return
    if isinstance(images, str | PathLike | Image.Image | np.ndarray | list | tuple):
        pictures = as_images(images)
        if pictures is not None:
            step = size or BATCH
            for start in range(0, len(pictures), step):
                yield _batch((pictures[start : start + step],), body)
            return
    if isinstance(images, Dataset) and not isinstance(images, IterableDataset):
        images = DataLoader(images, batch_size=size or BATCH, collate_fn=_Collate(body))
    if isinstance(images, bytes | Tensor) or not isinstance(images, Iterable):
        raise VitfocusError(f"{_described(images)} is not a set of images: {_EXPECTED}")
    for item in images:
        yield _batch(item, body)


class _Collate:
    """Items of a data set as a batch: pictures are prepared, and the rest is collated as torch does."""

    def __init__(self, body: Anatomy) -> None:
        self.body = body

    def __call__(self, items: list[Any]) -> Any:
        first = items[0][0] if isinstance(items[0], tuple | list) and items[0] else items[0]
        if not is_image(first):
            return torch.utils.data.default_collate(items)
        pictures = [item[0] if isinstance(item, tuple | list) else item for item in items]
        return (prepared(pictures, self.body),)


def prepared(pictures: Iterable[Any], body: Anatomy) -> Tensor:
    """Pictures as a uint8 tensor (B, 3, H, W), resized and cropped as for an evaluation of the model."""
    config: Any = getattr(body.root, "pretrained_cfg", None) or {}
    preprocessing = evaluation_preprocessing(body.build_size, model_interpolation(config))
    return torch.stack([preprocessing.apply(open_image(picture)) for picture in pictures])


def _batch(item: Any, body: Anatomy) -> ImageBatch:
    if isinstance(item, Mapping):
        main = next((key for key in ("pixel_values", *_OTHERS) if isinstance(item.get(key), Tensor)), None)
        if main is None:
            raise VitfocusError(f"A batch with the keys {', '.join(map(str, item))} holds no images: {_EXPECTED}")
        extras = {k: v for k, v in item.items() if isinstance(v, Tensor) and k not in (main, "labels")}
        return ImageBatch(item[main], extras, _questions(item), main)
    asked = None
    if isinstance(item, list | tuple) and item and as_images(item) is None:
        asked = next((_questions(other) for other in item[1:] if isinstance(other, Mapping)), None)
        item = item[0]
    if not isinstance(item, Tensor) and (pictures := as_images(item)) is not None:
        item = prepared(pictures, body)
    if not isinstance(item, Tensor):
        raise VitfocusError(f"A batch is {_described(item)}: {_EXPECTED}")
    return ImageBatch(item if item.ndim == 4 else item[None], questions=asked)


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


def _described(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"a {str(thing.dtype).removeprefix('torch.')} tensor of shape {tuple(thing.shape)}"
    return f"{thing!r}" if isinstance(thing, str) else f"a {type(thing).__name__}"


def normalised(pixels: Tensor, body: Anatomy) -> Tensor:
    """uint8 normalised as the model expects; floats, which are normalised, as they are."""
    if pixels.dtype != torch.uint8:
        return pixels
    return scaled(pixels.float() / 255, body)


def scaled(pixels: Tensor, body: Anatomy) -> Tensor:
    """Floats in [0, 1], normalised; colour as grey for a model of one channel."""
    if len(body.mean) == 1 and pixels.shape[1] == 3:
        pixels = rgb_to_grayscale(pixels)
    mean, std = _statistics(body, pixels)
    return (pixels - mean) / std


def corrupted(pixels: Tensor, body: Anatomy, corruption: str, seed: int, first: int) -> Tensor:
    """The same images under "name/severity", normalised; the first of them is number `first` of its set."""
    from vitfocus.corruptions import corrupt, parse

    name, severity = parse(corruption)
    ids = range(first, first + len(pixels))

    def changed(plain: Tensor) -> Tensor:
        """Corrupt images; those with one channel are converted to grey RGB images and back."""
        if plain.shape[1] != 1:
            return corrupt(plain, name, severity, seed=seed, ids=ids)
        return rgb_to_grayscale(corrupt(plain.expand(-1, 3, -1, -1), name, severity, seed=seed, ids=ids))

    if pixels.dtype == torch.uint8:
        return normalised(changed(pixels), body)
    mean, std = _statistics(body, pixels)
    plain = (pixels.float() * std + mean).clamp(0, 1)
    return ((changed(plain) - mean) / std).to(pixels.dtype)


def paired(images: Iterable[ImageBatch], against: Batches | str, body: Anatomy, seed: int) -> Iterator[ImageBatch]:
    """Every batch twice as long: the images, normalised, then the same corrupted, or those of the second set."""
    others = None if isinstance(against, str) else iter(against)
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
        # No variable refers to either half: it would keep them in memory while the model runs.
        yield ImageBatch(_joined(normalised(batch.pixels, body), partners(batch.pixels)), extras)
        done += len(batch.pixels)
    if others is not None and next(others, None) is not None:
        raise VitfocusError(f"`against` holds more images than `images`, which ended after {done}.")


def _joined(clean: Tensor, other: Tensor) -> Tensor:
    return torch.cat([clean, other.to(clean.device, clean.dtype)])


def _statistics(body: Anatomy, like: Tensor) -> tuple[Tensor, Tensor]:
    if like.shape[1] != len(body.mean):
        channels = f"{like.shape[1]} channel{'s' * (like.shape[1] != 1)}"
        raise VitfocusError(f"The images have {channels}, but the model takes {len(body.mean)}.")
    mean, std = torch.tensor([body.mean, body.std], dtype=torch.float32, device=like.device)[..., None, None]
    return mean, std


#: The names of a model's text input.
TEXT = ("input_ids", "attention_mask", "token_type_ids", "inputs_embeds")


def with_text(batch: ImageBatch, model: nn.Module, body: Anatomy) -> ImageBatch:
    """The batch with its questions tokenized, for a model that reads text; an empty question if there is none."""
    if body.text is None or "input_ids" in batch.extras or "inputs_embeds" in batch.extras:
        return batch
    tokenizer = tokenizer_of(unwrap(model))
    if tokenizer is None:
        raise VitfocusError(
            f"{type(unwrap(model)).__name__} reads a text with every image: pass dicts with 'pixel_values' and "
            "'input_ids', as its Hugging Face processor makes them, or load it from a folder with its tokenizer.json, "
            "and pass 'pixel_values' and 'question'."
        )
    questions = batch.questions or [""] * len(batch.pixels)
    if len(questions) != len(batch.pixels):
        raise VitfocusError(f"A batch has {len(batch.pixels)} images and {len(questions)} questions: one for each.")
    return replace(batch, extras=batch.extras | tokenizer(questions))


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
        index = torch.tensor([row + half * part for part in range(pairs) for row in rows], device="cpu")
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
        if name in TEXT:
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
