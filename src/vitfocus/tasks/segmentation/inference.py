"""From pictures to classes: whole or by a sliding window, with or without the mirror image, and pictures of it."""

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

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import atomic_path
from vitfocus.core.modules import eval_mode, logits_of
from vitfocus.data.segmentation.classes import palette


@dataclass(frozen=True)
class Protocol:
    """How a picture is tested. `window` 0: the whole picture at once; `stride` 0: two thirds of the window."""

    window: int = 0
    stride: int = 0
    flip: bool = False
    short_side: int = 0

    def __post_init__(self) -> None:
        for name in ("window", "stride", "short_side"):
            if getattr(self, name) < 0:
                raise VitfocusError(f"{name} is a number of pixels, 0 or more, not {getattr(self, name)}.")
        if self.stride and not self.window:
            raise VitfocusError(
                f"A stride of {self.stride} leads from window to window, and there is no window: name it."
            )
        if self.stride > self.window:
            raise VitfocusError(
                f"A stride of {self.stride} leaves gaps between windows of {self.window}: it must not be larger."
            )

    @property
    def step(self) -> int:
        """From one window to the next."""
        return self.stride or max(1, self.window * 2 // 3)


def predict(model: Any, images: Tensor, protocol: Protocol, size: Sequence[int] | None = None) -> Tensor:
    """A score for each class, (B, classes, *size), for pictures (B, 3, H, W); `size` (default: theirs) is the masks'.

    `model` takes the pictures as they are given and returns logits (B, classes, h, w), at any size.
    """
    scores = _probabilities(model, images, protocol)
    if protocol.flip:
        scores = scores + _probabilities(model, images.flip(3), protocol).flip(3)
    if size is not None and tuple(scores.shape[-2:]) != tuple(size):
        scores = F.interpolate(scores, size=tuple(size), mode="bilinear", align_corners=False)
    return scores


def slide(model: Any, images: Tensor, window: int, stride: int) -> Tensor:
    """Logits (B, classes, H, W), averaged where windows overlap; the last ones end at the picture's edges."""
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


def _probabilities(model: Any, images: Tensor, protocol: Protocol) -> Tensor:
    logits = slide(model, images, protocol.window, protocol.step) if protocol.window else _at_size(model, images)
    return logits.softmax(1) if protocol.flip else logits


def _starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin along an axis.

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
def segment(model: nn.Module, images: Tensor, protocol: Protocol | None = None) -> Tensor:
    """Classes (B, H, W) for uint8 pictures (B, 3, H, W), normalised as the model's backbone expects.

    >>> import vitfocus as vf
    >>> arguments = {"depth": 4, "embed_dim": 48, "num_heads": 3, "channels": 16}
    >>> model = vf.create_model("upernet:vit_tiny_patch16_224", num_classes=11, **arguments)
    >>> segment(model, torch.zeros(1, 3, 32, 48, dtype=torch.uint8)).shape
    torch.Size([1, 32, 48])
    """
    from vitfocus.anatomy import pixels_of

    seen = pixels_of(model)
    device = next(model.parameters()).device
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (seen.mean, seen.std))
    with eval_mode(model):
        return predict(model, (images.to(device).float() / 255 - mean) / std, protocol or Protocol()).argmax(1)


def coloured(classes: Tensor, count: int, source: str = "") -> Image.Image:
    """A map of classes (H, W) as a picture, in the data set's colours where it has some."""
    return Image.fromarray(palette(count, source)[classes.cpu().numpy().astype(np.uint8)])


def overlay(image: Tensor, classes: Tensor, count: int, source: str = "", strength: float = 0.55) -> Image.Image:
    """The classes' colours laid over the picture, uint8 (3, H, W)."""
    picture = Image.fromarray(image.cpu().permute(1, 2, 0).contiguous().numpy())
    colours = coloured(classes, count, source).resize(picture.size, Image.Resampling.NEAREST)
    return Image.blend(picture, colours, strength)


def write_pictures(
    folder: str | Path, name: str, image: Tensor, guess: Tensor, truth: Tensor | None, count: int, source: str = ""
) -> Path:
    """Write NAME.png (the coloured prediction) and NAME_overlay.png: picture, truth where known, prediction."""
    folder = Path(folder)
    with atomic_path(folder / f"{name}.png") as path:
        coloured(guess, count, source).save(path, "PNG")
    shown = [overlay(image, one, count, source) for one in (truth, guess) if one is not None]
    panels = [Image.fromarray(image.cpu().permute(1, 2, 0).contiguous().numpy()), *shown]
    strip = Image.new("RGB", (sum(panel.width for panel in panels) + 4 * (len(panels) - 1), panels[0].height), "white")
    left = 0
    for panel in panels:
        strip.paste(panel, (left, 0))
        left += panel.width + 4
    with atomic_path(folder / f"{name}_overlay.png") as path:
        strip.save(path, "PNG")
    return folder / f"{name}_overlay.png"
