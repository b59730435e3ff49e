"""Decoders of segmentation-models-pytorch on any timm model that returns features: "smp:unet:pvt_v2_b1".

That library's encoders take timm models apart, so their transformer blocks would not be found. Here the backbone stays
whole inside a pyramid of four maps, to which the decoders are attached.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.modules import eval_mode
from vitfocus.tasks.feature_pyramid import PyramidFeatures
from vitfocus.tasks.segmentation.model import enlarged, pad_to, take, undecayed

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
    head = take(arguments, indices=None)
    own = set(inspect.signature(known[decoder]).parameters) & set(arguments)
    options = {key: arguments.pop(key) for key in sorted(own)}
    features = PyramidFeatures(backbone, pretrained, head["indices"], **arguments)
    if features.strides != _STRIDES:
        given = ", ".join(map(str, features.strides))
        raise VitfocusError(
            f"{decoder} needs maps at strides 4, 8, 16 and 32, but {backbone} has {given}; UperNet and SegFormer "
            "(upernet:, segformer:) accept those."
        )
    return LibrarySegmenter(features, decoder, head["num_classes"], options)


class LibrarySegmenter(nn.Module):
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
        place = next(self.parameters()).device
        with eval_mode(self):
            reached, left = set(), [self(torch.zeros(1, 3, 64, 64, device=place)).grad_fn]
        seen = set(left)
        while left:
            step: Any = left.pop()
            if hasattr(step, "variable"):
                reached.add(step.variable)
            further = {before for before, _ in step.next_functions if before is not None} - seen
            seen |= further
            left += further
        for parameter in set(self.parameters()) - reached:
            parameter.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes, H, W) for images (B, 3, H, W)."""
        padded = pad_to(images, _STRIDES[-1])
        return enlarged(self.network(padded), images, padded)

    def no_weight_decay(self) -> set[str]:
        """Parameters of the backbone without weight decay."""
        return undecayed(self)


class PyramidEncoder(nn.Module):
    """A pyramid with the interface of that library's encoders: the image, an empty map at stride 2, then the maps."""

    output_stride = _STRIDES[-1]

    def __init__(self, features: PyramidFeatures, depth: int) -> None:
        super().__init__()
        features.keep_finest(depth - 1)
        self.features = features
        self.out_channels = [3, 0, *features.widths]

    def set_in_channels(self, channels: int, pretrained: bool = True) -> None:
        """Images have three channels."""
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
