"""Batches of questions and pictures as ViLT takes them: resized, padded, masked, the words as numbers.

A picture's shorter side becomes `size` and its longer one at most 1333/800 of that; both are multiples of the patch.
Pictures of a batch are padded to the largest, questions to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from vitfocus.core.errors import VitfocusError
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.classification.dataset import Broken, BrokenLog
from vitfocus.data.classification.loader import Share, mend_posterize, seeded
from vitfocus.data.sample_loader import Key, read_ahead
from vitfocus.data.sample_order import SAMPLE, seed_for
from vitfocus.data.vqa.dataset import QuestionSet
from vitfocus.data.vqa.tokenizer import Words

LONGEST_SIDE = 1333 / 800  # as a multiple of the shorter side, in ViLT and what it was compared with


@dataclass(frozen=True)
class Look:
    """How pictures are prepared: the shorter side, the patch that both sides are multiples of, the normalisation."""

    size: int
    patch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def fitted(self, picture: Image.Image | Tensor) -> Tensor:
        """A picture at its size, uint8 (3, H, W)."""
        if isinstance(picture, Tensor):
            height, width = int(picture.shape[-2]), int(picture.shape[-1])
            if (height, width) == fitted_size(height, width, self.size, self.patch):
                return picture
            picture = _as_image(picture)
        height, width = fitted_size(picture.height, picture.width, self.size, self.patch)
        resized = picture.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)

    def normalised(self, inputs: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
        """A batch's inputs on the device, pixels as floats; where there is no picture they are 0."""
        moved = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
        mean, std = (torch.tensor(values, device=device)[:, None, None] * 255 for values in (self.mean, self.std))
        moved["pixel_values"] = (moved["pixel_values"].float() - mean) / std * moved["pixel_mask"][:, None]
        return moved


def fitted_size(height: int, width: int, size: int, patch: int) -> tuple[int, int]:
    """The size a picture is given: its shorter side `size`, unless the longer one were over 1333/800 of that.

    >>> fitted_size(480, 640, 384, 32), fitted_size(1000, 200, 384, 32)
    ((384, 512), (608, 128))
    """
    scale = size / min(height, width)
    scale = min(scale, int(LONGEST_SIDE * size) / max(height, width))
    tall, wide = (max(patch, int(side * scale + 0.5) // patch * patch) for side in (height, width))
    return tall, wide


@dataclass
class QuestionBatch:
    """`inputs` are the model's arguments; `places` (B,) name the questions; `counted` (B,) says which rows count.

    `targets` (B, answers) holds the soft scores, where they are wanted.
    """

    inputs: dict[str, Tensor]
    places: Tensor
    counted: Tensor
    targets: Tensor | None = None


class QuestionSamples(Dataset[Any]):
    """A question by its place and its position in the run, which names the draws of its augmentation.

    A position below 0 marks a row that only fills a batch up.
    """

    def __init__(self, asked: QuestionSet, words: Words, look: Look, randaugment: str = "", seed: int = 0) -> None:
        self.asked, self.words, self.look, self.seed = asked, words, look, seed
        self.augment = _randaugment(randaugment) if randaugment else None

    def __getitem__(self, key: Key) -> tuple[Tensor, str, int, bool] | Broken:
        place, position = key
        question = self.asked.questions[place]
        try:
            picture = self.asked.pictures.read(question.picture)
            if self.augment is not None:
                picture = _as_image(picture) if isinstance(picture, Tensor) else picture
                with seeded(seed_for(self.seed, SAMPLE, position)):
                    picture = self.augment(picture)
            return self.look.fitted(picture), question.text, place, position >= 0
        except Exception as error:  # decoders raise what they like
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return Broken(self.asked.pictures.name(question.picture), reason)

    def collate(self, items: list[Any]) -> QuestionBatch:
        """Items as padded tensors."""
        pictures, texts, places, counted = zip(*items, strict=True)
        inputs = self.words(texts) | stacked(pictures)
        return QuestionBatch(inputs, torch.tensor(places), torch.tensor(counted))


def stacked(pictures: Sequence[Tensor]) -> dict[str, Tensor]:
    """Pictures uint8 (3, h, w) as `pixel_values` (B, 3, H, W), zero where there is none, and `pixel_mask` (B, H, W)."""
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (1, 2))
    pixels = torch.zeros(len(pictures), 3, height, width, dtype=torch.uint8)
    mask = torch.zeros(len(pictures), height, width, dtype=torch.int64)
    for place, picture in enumerate(pictures):
        pixels[place, :, : picture.shape[1], : picture.shape[2]] = picture
        mask[place, : picture.shape[1], : picture.shape[2]] = 1
    return {"pixel_values": pixels, "pixel_mask": mask}


def every_question(
    samples: QuestionSamples,
    share: Share,
    workers: int,
    device: torch.device,
    log: BrokenLog,
    say: Callable[[str], None],
    places: Sequence[int] | None = None,
) -> Generator[QuestionBatch, None, None]:
    """Every question once over all processes (or those at `places`), on the device.

    Each process has as many batches as every other, so the last ones are filled up with rows that do not count.
    """
    places = range(len(samples.asked)) if places is None else places
    mine = -(-len(places) // share.processes)
    begin, end = share.rank * mine, min((share.rank + 1) * mine, len(places))
    keys = [
        [(places[p], 0) if p < end else (places[-1], -1) for p in range(start, start + share.size)]
        for start in range(begin, begin + mine, share.size)
    ]
    for batch, broken in read_ahead(samples, keys, samples.collate, workers, device):
        for one in log.add(broken):
            say(f"Left out of the evaluation, unreadable: {one}")
        if batch is not None:
            batch.inputs = samples.look.normalised(batch.inputs, device)
            yield batch


def reading_batches(asked: QuestionSet, look: Look, limit: int, batch_size: int) -> Iterator[dict[str, Any]]:
    """At most `limit` questions, evenly picked, as `vitfocus.diagnose` takes them: uint8 pixels, texts as they are."""
    places = evenly_spaced(len(asked), limit)
    for start in range(0, len(places), batch_size):
        some = [asked.questions[place] for place in places[start : start + batch_size]]
        pictures = [look.fitted(asked.pictures.read(question.picture)) for question in some]
        yield {**stacked(pictures), "question": [question.text for question in some]}


def _as_image(picture: Tensor) -> Image.Image:
    return Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())


def _randaugment(policy: str) -> Callable[[Any], Any]:
    """timm's RandAugment without the inversion of colours, which questions ask about."""
    from timm.data.auto_augment import rand_augment_transform
    from torchvision.transforms import Compose

    try:
        transform = rand_augment_transform(policy, {})
    except (AssertionError, ValueError) as error:
        raise VitfocusError(f"timm does not know the policy augment.randaugment={policy!r}: {error}") from None
    transform.ops = [operation for operation in transform.ops if operation.name != "Invert"]
    mended: Callable[[Any], Any] = mend_posterize(Compose([transform]))
    return mended
