"""UperNet, SegFormer and the decoders of segmentation-models-pytorch on any timm model that returns features.

A segmenter returns logits (B, classes, H, W) for images (B, 3, H, W) of any size: images are padded to a multiple of
the coarsest stride, and the logits are cropped. In training it returns {"out": logits}, and {"aux": logits} too if it
has an auxiliary head, as torchvision's segmenters do. segmentation-models-pytorch's encoders take timm models apart, so
their transformer blocks would not be found; here the backbone stays whole and its decoders are attached to a pyramid.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.modules import SharedBatchNorm2d, eval_mode
from vitfocus.tasks.feature_pyramid import PyramidFeatures, no_decay_names

_POOLS = (1, 2, 3, 6)


def build_upernet(name: str, pretrained: bool, arguments: dict[str, Any]) -> Segmenter:
    """UperNet (arXiv:1807.10221) on a timm model, for the spec "upernet:NAME".

    With 512 channels, an auxiliary head of 256 and ADE20K's 150 classes it has 34.06, 53.55 and 127.02 million
    parameters on ViT-Ti, S and B, as in the Context Broadcasting paper.

    Args:
        name: The timm model.
        pretrained: Whether the backbone starts from timm's weights.
        arguments: `num_classes`, `channels`, `auxiliary_channels` (0: no auxiliary head), `dropout` and `indices` (of
            the four features) are the head's; the others are passed to timm.

    Example:
        >>> import vitfocus as vf
        >>> arguments = {"img_size": 64, "depth": 4, "embed_dim": 48, "num_heads": 3, "channels": 32}
        >>> model = vf.create_model("upernet:vit_tiny_patch16_224+cb(layers=upper)", num_classes=11, **arguments)
        >>> model.eval()(torch.zeros(1, 3, 50, 75)).shape
        torch.Size([1, 11, 50, 75])
    """
    head = take_head_arguments(arguments, channels=512, auxiliary_channels=256, dropout=0.1, indices=None)
    classes, auxiliary = head["num_classes"], None
    features = PyramidFeatures(name, pretrained, head["indices"], **arguments)
    if head["auxiliary_channels"]:
        auxiliary = FCNHead(features.widths[-2], head["auxiliary_channels"], classes, head["dropout"])
    decoder = UperDecoder(features.widths, head["channels"], classes, head["dropout"])
    return Segmenter(features, decoder, classes, auxiliary)


def build_segformer(name: str, pretrained: bool, arguments: dict[str, Any]) -> Segmenter:
    """SegFormer's all-MLP head (arXiv:2105.15203) on a timm model, for the spec "segformer:NAME".

    On FAN-B-Hybrid the maps have 128, 256, 448 and 448 channels at strides 4, 8, 16 and 32: the two stages of the stem,
    a block at two thirds of the depth, and the last block, pooled.

    Args:
        name: The timm model.
        pretrained: Whether the backbone starts from timm's weights.
        arguments: `num_classes`, `embed_channels` (the common width), `dropout` and `indices` (of the four features)
            are the head's; the others are passed to timm.

    Example:
        >>> import vitfocus as vf
        >>> spec = "segformer:fan_tiny_8_p4_hybrid+tap+adl"
        >>> model = vf.create_model(spec, num_classes=19, embed_channels=32, depth=3, img_size=64)
        >>> model.eval()(torch.zeros(1, 3, 64, 96)).shape
        torch.Size([1, 19, 64, 96])
    """
    head = take_head_arguments(arguments, embed_channels=768, dropout=0.1, indices=None)
    features = PyramidFeatures(name, pretrained, head["indices"], **arguments)
    decoder = MLPDecoder(features.widths, head["embed_channels"], head["num_classes"], head["dropout"])
    return Segmenter(features, decoder, head["num_classes"])


class Segmenter(nn.Module):
    """A feature pyramid, a decoder that turns its four maps into logits, and an optional auxiliary head."""

    def __init__(
        self, features: PyramidFeatures, decoder: nn.Module, classes: int, auxiliary: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.num_classes = classes
        self.features, self.decoder, self.auxiliary = features, decoder, auxiliary

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        padded = pad_to(images, self.features.strides[-1])
        maps = self.features(padded)
        logits = resize_and_crop(self.decoder(maps), images, padded)
        if not self.training:
            return logits
        outputs = {"out": logits}
        if self.auxiliary is not None:
            outputs["aux"] = resize_and_crop(self.auxiliary(maps[-2]), images, padded)
        return outputs

    def no_weight_decay(self) -> set[str]:
        return no_decay_names(self)


class ConvNorm(nn.Sequential):
    """Convolution, batch normalisation and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False), SharedBatchNorm2d(outputs), nn.ReLU()
        )


class FCNHead(nn.Sequential):
    """One convolution and a classifier: the usual auxiliary head."""

    def __init__(self, inputs: int, channels: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__(ConvNorm(inputs, channels, 3), nn.Dropout2d(dropout), nn.Conv2d(channels, classes, 1))


class UperDecoder(nn.Module):
    """Pyramid pooling of the coarsest map, a top-down path over the others, and fusion at the finest."""

    def __init__(self, widths: Sequence[int], channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.pooled = nn.ModuleList(ConvNorm(widths[-1], channels) for _ in _POOLS)
        self.bottleneck = ConvNorm(widths[-1] + len(_POOLS) * channels, channels, 3)
        self.lateral = nn.ModuleList(ConvNorm(width, channels) for width in widths[:-1])
        self.smooth = nn.ModuleList(ConvNorm(channels, channels, 3) for _ in widths[:-1])
        self.fuse = ConvNorm(len(widths) * channels, channels, 3)
        self.classify = nn.Sequential(nn.Dropout2d(dropout), nn.Conv2d(channels, classes, 1))

    def forward(self, maps: list[Tensor]) -> Tensor:
        last = maps[-1]
        pools = [
            _resize_to(layer(F.adaptive_avg_pool2d(last, n)), last)
            for n, layer in zip(_POOLS, self.pooled, strict=True)
        ]
        levels = [layer(one) for layer, one in zip(self.lateral, maps[:-1], strict=True)]
        levels.append(self.bottleneck(torch.cat([last, *pools], 1)))
        for level in range(len(levels) - 1, 0, -1):
            levels[level - 1] = levels[level - 1] + _resize_to(levels[level], levels[level - 1])
        smooth = [layer(one) for layer, one in zip(self.smooth, levels[:-1], strict=True)]
        joined = [_resize_to(one, smooth[0]) for one in (*smooth, levels[-1])]
        logits: Tensor = self.classify(self.fuse(torch.cat(joined, 1)))
        return logits


class MLPDecoder(nn.Module):
    """A linear layer per map, resized to the finest map and fused by another linear layer."""

    def __init__(self, widths: Sequence[int], channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in widths)
        self.fuse = ConvNorm(len(widths) * channels, channels)
        self.classify = nn.Sequential(nn.Dropout2d(dropout), nn.Conv2d(channels, classes, 1))

    def forward(self, maps: list[Tensor]) -> Tensor:
        joined = [_resize_to(layer(one), maps[0]) for layer, one in zip(self.embed, maps, strict=True)]
        logits: Tensor = self.classify(self.fuse(torch.cat(joined[::-1], 1)))
        return logits


def pad_to(images: Tensor, multiple: int) -> Tensor:
    """Pad with zeros at the bottom and the right to a multiple."""
    down, across = -images.shape[-2] % multiple, -images.shape[-1] % multiple
    return F.pad(images, (0, across, 0, down)) if down or across else images


def resize_and_crop(logits: Tensor, images: Tensor, padded: Tensor) -> Tensor:
    """Resize logits to the padded images and crop the padding."""
    if logits.shape[-2:] != padded.shape[-2:]:
        logits = F.interpolate(logits, size=padded.shape[-2:], mode="bilinear", align_corners=False)
    return logits[..., : images.shape[-2], : images.shape[-1]]


def take_head_arguments(arguments: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Remove the head's arguments from those of the backbone and return them; `num_classes` is required."""
    if "num_classes" not in arguments:
        raise VitfocusError("A segmenter needs num_classes, the number of classes in its masks.")
    if not isinstance(arguments["num_classes"], int) or arguments["num_classes"] < 1:
        raise VitfocusError(f"A segmenter needs num_classes of at least 1, not {arguments['num_classes']!r}.")
    return {key: arguments.pop(key, value) for key, value in {"num_classes": 0, **defaults}.items()}


def _resize_to(x: Tensor, other: Tensor) -> Tensor:
    return F.interpolate(x, size=other.shape[-2:], mode="bilinear", align_corners=False)


_KEY = "vitfocus"
_STRIDES = (4, 8, 16, 32)


def build_smp(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """A decoder on a timm model, for the spec "smp:DECODER:NAME".

    Args:
        name: The decoder and the timm model, such as "unet:pvt_v2_b1".
        pretrained: Whether the backbone starts from timm's weights.
        arguments: `num_classes` and `indices` (of the four features) are used here, arguments that the decoder's class
            has are passed to it, all others to timm.

    Example:
        >>> import vitfocus as vf
        >>> arguments = {"depths": (1, 1, 1, 1), "decoder_pyramid_channels": 32}
        >>> model = vf.create_model("smp:fpn:pvt_v2_b0+cb", num_classes=5, **arguments)
        >>> model.eval()(torch.zeros(1, 3, 64, 96)).shape
        torch.Size([1, 5, 64, 96])
    """
    try:
        import segmentation_models_pytorch as library
    except ImportError:
        raise VitfocusError("A model of segmentation-models-pytorch needs the extra vitfocus[seg].") from None
    decoder, colon, backbone = name.partition(":")
    known: dict[str, Any] = library.MODEL_ARCHITECTURES_MAPPING
    if not colon or decoder not in known:
        raise VitfocusError(
            f"{name!r} is not DECODER:TIMM_MODEL, such as unet:pvt_v2_b1: {nearest(decoder.partition(':')[0], known)}"
        )
    head = take_head_arguments(arguments, indices=None)
    parameters = inspect.signature(known[decoder]).parameters
    options = {key: arguments.pop(key) for key in sorted(arguments) if key in parameters}
    features = PyramidFeatures(backbone, pretrained, head["indices"], **arguments)
    if features.strides != _STRIDES:
        given = ", ".join(map(str, features.strides))
        raise VitfocusError(
            f"{decoder} needs maps at strides 4, 8, 16 and 32, but {backbone} has {given}; UperNet and SegFormer "
            "(upernet:, segformer:) accept those."
        )
    return SMPSegmenter(features, decoder, head["num_classes"], options)


class SMPSegmenter(nn.Module):
    """A model of segmentation-models-pytorch for images of any size."""

    def __init__(self, features: PyramidFeatures, decoder: str, classes: int, options: dict[str, Any]) -> None:
        super().__init__()
        import segmentation_models_pytorch as library

        self.num_classes = classes
        registry: Any = library.encoders.encoders
        registry[_KEY] = {"encoder": lambda depth, **_: PyramidEncoder(features, depth), "params": {}}
        try:
            self.network = library.create_model(decoder, _KEY, encoder_weights=None, classes=classes, **options)
        except (ValueError, TypeError, KeyError, NotImplementedError) as error:
            raise VitfocusError(f"{decoder} does not fit this backbone: {error}.") from None
        finally:
            del registry[_KEY]
        self._freeze_unused_parameters()

    @torch.enable_grad()
    def _freeze_unused_parameters(self) -> None:
        """Freeze parameters without a gradient, for which DDP would wait: some decoders use only some of the maps."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        with eval_mode(self):
            output = self(torch.zeros(1, 3, 64, 64, device=trained[0].device))
        gradients = torch.autograd.grad(output.sum(), trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes, H, W) for images (B, 3, H, W)."""
        padded = pad_to(images, _STRIDES[-1])
        return resize_and_crop(self.network(padded), images, padded)

    def no_weight_decay(self) -> set[str]:
        return no_decay_names(self)


class PyramidEncoder(nn.Module):
    """A pyramid with the interface of that library's encoders: the image, an empty map at stride 2, then the maps."""

    output_stride = _STRIDES[-1]

    def __init__(self, features: PyramidFeatures, depth: int) -> None:
        super().__init__()
        features.keep_finest(depth - 1)
        self.features = features
        self.out_channels = [3, 0, *features.widths]

    def set_in_channels(self, channels: int, pretrained: bool = True) -> None:
        if channels != 3:
            raise VitfocusError(f"Images have 3 channels here, not {channels}.")

    def make_dilated(self, output_stride: int) -> None:
        """Not possible: the stride of a transformer is its patch size."""
        raise NotImplementedError(
            f"it needs a dilated backbone of stride {output_stride}, which a transformer cannot be"
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        """The image and its maps, from fine to coarse."""
        batch, _, height, width = images.shape
        nothing = images.new_empty(batch, 0, height // 2, width // 2)
        return [images, nothing, *self.features(images)]
