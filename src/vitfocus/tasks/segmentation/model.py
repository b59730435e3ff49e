"""What every segmenter here shares: a pyramid of features, logits at the picture's own size, parts named for training.

A segmenter gives logits (B, classes, H, W) for pictures (B, 3, H, W) of any size: what is not a multiple of the
coarsest stride is padded, and cut off again. While training it gives {"out": logits} and, where it has an auxiliary
head, {"aux": logits} too, as torchvision's segmenters do.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError
from vitfocus.tasks.feature_pyramid import PyramidFeatures


class Segmenter(nn.Module):
    """A pyramid, a decoder that makes logits of its four maps, and an auxiliary head on one of them."""

    def __init__(
        self, features: PyramidFeatures, decoder: nn.Module, classes: int, auxiliary: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.num_classes = classes
        self.features, self.decoder, self.auxiliary = features, decoder, auxiliary

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        """Logits for every pixel."""
        padded = pad_to(images, self.features.strides[-1])
        maps = self.features(padded)
        logits = enlarged(self.decoder(maps), images, padded)
        if not self.training:
            return logits
        outputs = {"out": logits}
        if self.auxiliary is not None:
            outputs["aux"] = enlarged(self.auxiliary(maps[-2]), images, padded)
        return outputs

    def no_weight_decay(self) -> set[str]:
        """The backbone's parameters that are not to be decayed."""
        return undecayed(self)


class ConvNorm(nn.Sequential):
    """Convolution, normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False), LoneNorm(outputs), nn.ReLU()
        )


class LoneNorm(nn.BatchNorm2d):
    """Batch normalisation that falls back on its running statistics where a channel has one value, at batch size 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, (B, C, H, W)."""
        if self.training and x.numel() == x.shape[1]:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return super().forward(x)


class PlainHead(nn.Sequential):
    """One convolution and a classifier, the auxiliary head of the field."""

    def __init__(self, inputs: int, channels: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__(ConvNorm(inputs, channels, 3), nn.Dropout2d(dropout), nn.Conv2d(channels, classes, 1))


def pad_to(images: Tensor, multiple: int) -> Tensor:
    """Zeros below and to the right, until both sides are multiples."""
    down, across = -images.shape[-2] % multiple, -images.shape[-1] % multiple
    return F.pad(images, (0, across, 0, down)) if down or across else images


def enlarged(logits: Tensor, images: Tensor, padded: Tensor) -> Tensor:
    """Logits at the size of the pictures, without what was padded."""
    if logits.shape[-2:] != padded.shape[-2:]:
        logits = F.interpolate(logits, size=padded.shape[-2:], mode="bilinear", align_corners=False)
    return logits[..., : images.shape[-2], : images.shape[-1]]


def undecayed(model: nn.Module) -> set[str]:
    """The names of parameters that the modules inside ask not to decay."""
    return {
        f"{place}.{name}"
        for place, module in model.named_modules()
        if place and callable(getattr(module, "no_weight_decay", None))
        for name in module.no_weight_decay()
    }


def take(arguments: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The head's own arguments, taken out of those that go to the backbone; `num_classes` is required."""
    if "num_classes" not in arguments:
        raise VitfocusError("A segmenter needs num_classes, the number of classes that its masks tell apart.")
    if not isinstance(arguments["num_classes"], int) or arguments["num_classes"] < 1:
        raise VitfocusError(f"A segmenter needs num_classes of at least 1, not {arguments['num_classes']!r}.")
    return {key: arguments.pop(key, value) for key, value in {"num_classes": 0, **defaults}.items()}
