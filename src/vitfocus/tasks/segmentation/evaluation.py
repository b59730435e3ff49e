"""Segmentation of images, whole or by a sliding window, with optional flip averaging, and its mIoU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vitfocus.anatomy import input_spec
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import atomic_path
from vitfocus.core.modules import eval_mode, logits_of
from vitfocus.data.image_files import Normalise, to_image
from vitfocus.data.segmentation.dataset import CITYSCAPES_IDS, IGNORE, palette


def class_counts(truth: Tensor, guess: Tensor, classes: int, ignore: int = IGNORE) -> Tensor:
    """Count the pixels of each image and class.

    Args:
        truth: True classes (B, ...).
        guess: Predicted classes (B, ...).
        classes: Number of classes.
        ignore: Pixels with this true class are left out.

    Returns:
        The numbers of correct, true and predicted pixels, int64 (B, 3, classes).

    Raises:
        VitfocusError: `truth` has a class outside the range.

    Example:
        >>> class_counts(torch.tensor([[0, 1, 1, 255]]), torch.tensor([[0, 0, 1, 1]]), classes=2).tolist()
        [[[1, 1], [1, 2], [2, 1]]]
    """
    truth, guess = truth.flatten(1), guess.flatten(1)
    counted = truth != ignore
    rows = torch.arange(len(truth), device=truth.device)[:, None].expand_as(truth)[counted]
    truth, guess = truth[counted].long(), guess[counted].long()
    wrong = truth[(truth < 0) | (truth >= classes)]
    if len(wrong):
        raise VitfocusError(f"A mask has the class {int(wrong[0])}, but the model has {classes} classes.")
    bins = (rows * classes + truth) * classes + guess
    confusion = torch.bincount(bins, minlength=len(counted) * classes**2).view(-1, classes, classes)
    return torch.stack([confusion.diagonal(dim1=1, dim2=2), confusion.sum(2), confusion.sum(1)], 1)


def scores_of(counts: Tensor) -> dict[str, float]:
    """Scores in [0, 1] from counts (3, classes), a sum of `class_counts` over images.

    Returns:
        `miou` over the classes that occur in truth or prediction, `macc` over those in truth, `aacc` over all pixels.

    Example:
        >>> scores_of(torch.tensor([[3, 3, 0], [4, 4, 0], [4, 4, 0]]))
        {'miou': 0.6, 'macc': 0.75, 'aacc': 0.75}
    """
    hits, truth, predicted = counts
    union = truth + predicted - hits
    hits = hits.double()
    return {
        "miou": _mean(hits[union > 0] / union[union > 0]),
        "macc": _mean(hits[truth > 0] / truth[truth > 0]),
        "aacc": float(hits.sum() / truth.sum()) if truth.sum() else 0.0,
    }


def iou_by_class(counts: Tensor, names: Any) -> dict[str, float | None]:
    """The IoU of each class; None for a class that does not occur."""
    hits, truth, predicted = counts
    union = truth + predicted - hits
    values = [float(hit / whole) if whole else None for hit, whole in zip(hits.double(), union, strict=True)]
    return dict(zip(names, values, strict=True))


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


@dataclass(frozen=True)
class InferenceSettings:
    """How an image is segmented.

    Args:
        window: Side of the sliding window; 0 takes the whole image at once.
        stride: Step of the sliding window; 0 is two thirds of the window.
        flip: Whether to average with the prediction for the flipped image.
        short_side: Images are resized to this short side; 0 keeps their size.
    """

    window: int = 0
    stride: int = 0
    flip: bool = False
    short_side: int = 0

    def __post_init__(self) -> None:
        for name in ("window", "stride", "short_side"):
            if getattr(self, name) < 0:
                raise VitfocusError(f"{name} is a number of pixels, 0 or more, not {getattr(self, name)}.")
        if self.stride and not self.window:
            raise VitfocusError(f"A stride of {self.stride} has no effect without a window: set the window too.")
        if self.stride > self.window:
            raise VitfocusError(
                f"A stride of {self.stride} leaves gaps between windows of {self.window}: make it no larger."
            )

    @property
    def step(self) -> int:
        """Pixels from one window to the next."""
        return self.stride or max(1, self.window * 2 // 3)


def predict(model: Any, images: Tensor, settings: InferenceSettings, size: Sequence[int] | None = None) -> Tensor:
    """Scores of the classes, (B, classes, *size), for normalised images (B, 3, H, W).

    Args:
        model: Returns logits (B, classes, h, w) at any size.
        images: The images, as the model takes them.
        settings: Sliding window and flip.
        size: Size of the scores; by default that of the images.
    """
    scores = _probabilities(model, images, settings)
    if settings.flip:
        scores = scores + _probabilities(model, images.flip(3), settings).flip(3)
    if size is not None and tuple(scores.shape[-2:]) != tuple(size):
        scores = F.interpolate(scores, size=tuple(size), mode="bilinear", align_corners=False)
    return scores


def slide(model: Any, images: Tensor, window: int, stride: int) -> Tensor:
    """Logits (B, classes, H, W), averaged where windows overlap; the last windows end at the image's border."""
    height, width = images.shape[-2:]
    total = count = None
    for top in _starts(height, window, stride):
        for left in _starts(width, window, stride):
            part = images[..., top : top + window, left : left + window]
            logits = _at_size(model, part)
            if total is None or count is None:
                total = logits.new_zeros(*logits.shape[:2], height, width)
                count = logits.new_zeros(height, width)
            total[..., top : top + window, left : left + window] += logits
            count[top : top + window, left : left + window] += 1
    assert total is not None and count is not None
    return total / count


def _probabilities(model: Any, images: Tensor, settings: InferenceSettings) -> Tensor:
    logits = slide(model, images, settings.window, settings.step) if settings.window else _at_size(model, images)
    return logits.softmax(1) if settings.flip else logits


def _starts(length: int, window: int, stride: int) -> list[int]:
    """Starts of the windows along an axis.

    >>> _starts(10, 4, 3), _starts(11, 4, 3), _starts(3, 4, 3)
    ([0, 3, 6], [0, 3, 6, 7], [0])
    """
    last = max(0, length - window)
    return [*range(0, last, stride), last]


def _at_size(model: Any, images: Tensor) -> Tensor:
    logits = logits_of(model(images))
    if logits.ndim != 4:
        raise VitfocusError(
            f"The model returns {tuple(logits.shape)} for images; expected one map of logits per class (B, C, H, W)."
        )
    if logits.shape[-2:] != images.shape[-2:]:
        logits = F.interpolate(logits.float(), size=images.shape[-2:], mode="bilinear", align_corners=False)
    return logits.float()


@torch.no_grad()
def segment(model: nn.Module, images: Tensor, settings: InferenceSettings | None = None) -> Tensor:
    """Segment uint8 images; they are normalised as the model's backbone expects.

    Args:
        model: A segmentation model.
        images: uint8 (B, 3, H, W).
        settings: Sliding window and flip; by default the whole image at once.

    Returns:
        The classes (B, H, W).

    Example:
        >>> import vitfocus as vf
        >>> arguments = {"depth": 4, "embed_dim": 48, "num_heads": 3, "channels": 16}
        >>> model = vf.create_model("upernet:vit_tiny_patch16_224", num_classes=11, **arguments)
        >>> segment(model, torch.zeros(1, 3, 32, 48, dtype=torch.uint8)).shape
        torch.Size([1, 32, 48])
    """
    seen = input_spec(model)
    normalise = Normalise(seen.mean, seen.std, next(model.parameters()).device)
    with eval_mode(model):
        return predict(model, normalise(images), settings or InferenceSettings()).argmax(1)


def coloured(classes: Tensor, count: int, source: str = "") -> Image.Image:
    """A class map (H, W) as an image, in the data set's colours if it has some."""
    return Image.fromarray(palette(count, source)[classes.cpu().numpy().astype(np.uint8)])


def overlay(image: Tensor, classes: Tensor, count: int, source: str = "") -> Image.Image:
    """The colours of a class map blended with the image, uint8 (3, H, W)."""
    picture = to_image(image)
    colours = coloured(classes, count, source).resize(picture.size, Image.Resampling.NEAREST)
    return Image.blend(picture, colours, 0.55)


def write_submission(folder: str | Path, file: str, guess: Tensor, source: str) -> Path:
    """Write a prediction (H, W) for a benchmark's server: an 8-bit PNG with the name of the image.

    Cityscapes takes its class ids (labelIds), ACDC those of training (labelTrainIds).
    """
    numbers = guess.cpu().numpy().astype(np.uint8)
    if source == "cityscapes":
        numbers = np.array(CITYSCAPES_IDS, np.uint8)[numbers]
    with atomic_path(Path(folder) / file) as path:
        Image.fromarray(numbers).save(path, "PNG")
    return Path(folder) / file


def write_images(
    folder: str | Path, name: str, image: Tensor, guess: Tensor, truth: Tensor | None, count: int, source: str = ""
) -> Path:
    """Write NAME.png (the coloured prediction) and NAME_overlay.png (image, ground truth if given, prediction)."""
    folder = Path(folder)
    with atomic_path(folder / f"{name}.png") as path:
        coloured(guess, count, source).save(path, "PNG")
    shown = [overlay(image, one, count, source) for one in (truth, guess) if one is not None]
    panels = [to_image(image), *shown]
    strip = Image.new("RGB", (sum(panel.width for panel in panels) + 4 * (len(panels) - 1), panels[0].height), "white")
    left = 0
    for panel in panels:
        strip.paste(panel, (left, 0))
        left += panel.width + 4
    with atomic_path(folder / f"{name}_overlay.png") as path:
        strip.save(path, "PNG")
    return folder / f"{name}_overlay.png"
