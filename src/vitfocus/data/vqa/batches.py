"""Batches of questions and images for ViLT: images resized, padded and masked, questions tokenized.

The short side of an image becomes `size` and the long side at most 1333/800 of that; both are multiples of the patch
size. The images of a batch are padded to the largest, the questions to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.classification.augmentation import fix_posterize
from vitfocus.data.image_files import Normalise, to_image, to_tensor
from vitfocus.data.loader import Samples, seeded
from vitfocus.data.vqa.dataset import Question, QuestionTokenizer, VqaDataset

LONGEST_SIDE = 1333 / 800  # as a multiple of the short side, as in ViLT


@dataclass(frozen=True)
class VqaPreprocessing:
    """How images are prepared: the short side, the patch size that both sides are multiples of, the normalisation."""

    size: int
    patch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def resize(self, image: Image.Image | Tensor) -> Tensor:
        """An image at the model's size, uint8 (3, H, W)."""
        if isinstance(image, Tensor):
            height, width = int(image.shape[-2]), int(image.shape[-1])
            if (height, width) == fitted_size(height, width, self.size, self.patch):
                return image
            image = to_image(image)
        height, width = fitted_size(image.height, image.width, self.size, self.patch)
        return to_tensor(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))

    def normalise(self, inputs: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
        """A batch's inputs on the device, pixels normalised; padding is 0."""
        moved = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
        pixels = Normalise(self.mean, self.std, device)(moved["pixel_values"])
        return {**moved, "pixel_values": pixels * moved["pixel_mask"][:, None]}


def fitted_size(height: int, width: int, size: int, patch: int) -> tuple[int, int]:
    """The size of a resized image: its short side is `size`, unless the long side would exceed 1333/800 of that.

    >>> fitted_size(480, 640, 384, 32), fitted_size(1000, 200, 384, 32)
    ((384, 512), (608, 128))
    """
    scale = size / min(height, width)
    scale = min(scale, int(LONGEST_SIDE * size) / max(height, width))
    tall, wide = (max(patch, int(side * scale + 0.5) // patch * patch) for side in (height, width))
    return tall, wide


@dataclass
class QuestionBatch:
    """The model's arguments, the questions, and in training the soft scores of the answers (B, answers)."""

    inputs: dict[str, Tensor]
    questions: list[Question]
    targets: Tensor | None = None


class QuestionSamples(Samples):
    """Prepared images with their questions, by (index, position); the position seeds the augmentation."""

    def __init__(
        self,
        questions: VqaDataset,
        tokenizer: QuestionTokenizer,
        preprocessing: VqaPreprocessing,
        randaugment: str = "",
        seed: int = 0,
    ) -> None:
        super().__init__(questions, self._prepare, seed)
        self.tokenizer, self.preprocessing = tokenizer, preprocessing
        self.augment = _randaugment(randaugment) if randaugment else None

    def _prepare(self, sample: tuple[Image.Image | Tensor, Question], seed: int) -> tuple[Tensor, Question]:
        image, question = sample
        if self.augment is not None:
            with seeded(seed):
                image = self.augment(to_image(image) if isinstance(image, Tensor) else image)
        return self.preprocessing.resize(image), question

    def collate(self, items: list[tuple[Tensor, Question]]) -> QuestionBatch:
        """A batch of some samples, padded."""
        questions = [question for _, question in items]
        texts, images = [question.text for question in questions], [image for image, _ in items]
        return QuestionBatch(self.tokenizer(texts) | pad_images(images), questions)


def pad_images(images: Sequence[Tensor]) -> dict[str, Tensor]:
    """Images uint8 (3, h, w) as `pixel_values` (B, 3, H, W), padded with zeros, and `pixel_mask` (B, H, W)."""
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    pixels = torch.zeros(len(images), 3, height, width, dtype=torch.uint8)
    mask = torch.zeros(len(images), height, width, dtype=torch.int64)
    for row, image in enumerate(images):
        pixels[row, :, : image.shape[1], : image.shape[2]] = image
        mask[row, : image.shape[1], : image.shape[2]] = 1
    return {"pixel_values": pixels, "pixel_mask": mask}


def diagnosis_batches(
    questions: VqaDataset, preprocessing: VqaPreprocessing, limit: int, batch_size: int
) -> Iterator[dict[str, Any]]:
    """At most `limit` questions, evenly spaced, as inputs of `vitfocus.diagnose`: uint8 pixels, questions as text."""
    indices = evenly_spaced(len(questions), limit)
    for start in range(0, len(indices), batch_size):
        read = [questions.read(index) for index in indices[start : start + batch_size]]
        images = pad_images([preprocessing.resize(image) for image, _ in read])
        yield {**images, "question": [question.text for _, question in read]}


def _randaugment(policy: str) -> Callable[[Any], Any]:
    """timm's RandAugment without inversion, since questions ask about colours."""
    from timm.data.auto_augment import rand_augment_transform
    from torchvision.transforms import Compose

    try:
        transform = rand_augment_transform(policy, {})
    except (AssertionError, ValueError) as error:
        raise VitfocusError(f"timm does not know the policy augment.randaugment={policy!r}: {error}") from None
    transform.ops = [operation for operation in transform.ops if operation.name != "Invert"]
    fixed: Callable[[Any], Any] = fix_posterize(Compose([transform]))
    return fixed
