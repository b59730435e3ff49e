"""Mask R-CNN on a vision transformer: torchvision's detector on the feature pyramid of a timm model.

The model takes a list of normalised images of any size. In training the images are already resized and come with
targets, and the model returns losses. Otherwise it resizes them (short side `min_size`, long side at most `max_size`)
and returns boxes and masks in the coordinates of the given images.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.poolers import initLevelMapper

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.tasks.feature_pyramid import LEVELS, PyramidFeatures, no_decay_names

_RATIOS = (0.5, 1.0, 2.0)
#: Options of torchvision's MaskRCNN; it ignores unknown ones silently.
_OPTIONS = tuple(
    name
    for name in inspect.signature(MaskRCNN).parameters
    if name.startswith(("rpn_", "box_")) and not name.endswith(("_generator", "_head", "_pool", "_predictor"))
)


class DetectorBackbone(nn.Module):
    """The features of a transformer and a feature pyramid network: five maps of `out_channels` channels.

    The maps are float32 even under autocast, since torchvision makes the anchors in their dtype.
    """

    def __init__(self, features: PyramidFeatures, channels: int) -> None:
        super().__init__()
        self.features = features
        self.fpn = FeaturePyramidNetwork(list(features.widths), channels, extra_blocks=LastLevelMaxPool())
        self.out_channels = channels

    def forward(self, images: Tensor) -> Mapping[str, Tensor]:
        """Maps named "0" to "3" and "pool" of images (B, 3, H, W), each half as large as the one before."""
        maps = self.features(images)
        result: Mapping[str, Tensor] = self.fpn(OrderedDict((str(level), one) for level, one in enumerate(maps)))
        return OrderedDict((level, one.float()) for level, one in result.items())


class _Proposals(RPNHead):
    """A region proposal head in float32: torchvision adds its offsets to coordinates, and bfloat16 has 8 bits."""

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, offsets = super().forward(maps)
        return [one.float() for one in logits], [one.float() for one in offsets]


class _Boxes(FastRCNNPredictor):
    """A box predictor in float32, for the same reason."""

    def forward(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        logits, offsets = super().forward(regions)
        return logits.float(), offsets.float()


class VisionMaskRCNN(MaskRCNN):
    """torchvision's Mask R-CNN on a vision transformer; see `mask_rcnn` for its arguments."""

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        """Losses in training, otherwise detections, which do not depend on the other images.

        Tokens attend to padding and its size changes the position embedding, so each size of images passes separately.
        """
        if self.training:
            return super().forward(images, targets)
        found: dict[int, Any] = {}
        for shape in dict.fromkeys(image.shape for image in images):
            rows = [row for row, image in enumerate(images) if image.shape == shape]
            found |= zip(rows, super().forward([images[row] for row in rows]), strict=True)
        return [found[row] for row in range(len(images))]

    def no_weight_decay(self) -> set[str]:
        return no_decay_names(self)


def build_mask_rcnn(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """The model of the spec "maskrcnn:NAME"."""
    return mask_rcnn(name, pretrained, **arguments)


def mask_rcnn(
    backbone: str,
    pretrained: bool = False,
    *,
    num_classes: int = 80,
    min_size: int = 800,
    max_size: int = 1333,
    indices: Sequence[int] | None = None,
    channels: int = 256,
    box_width: int = 1024,
    mask_layers: int = 4,
    anchor_scale: int = 8,
    **options: Any,
) -> VisionMaskRCNN:
    """Mask R-CNN with a feature pyramid on a timm backbone.

    Args:
        backbone: The timm model.
        pretrained: Whether the backbone starts from timm's weights.
        num_classes: Number of classes of objects, without the background, which is label 0.
        min_size: Short side of the images at test time.
        max_size: Largest long side at test time.
        indices: Features of the backbone that feed the pyramid.
        channels: Width of the pyramid and of the mask head.
        box_width: Width of the box head.
        mask_layers: Convolutions of the mask head.
        anchor_scale: Size of the anchors in strides.
        options: Options that begin with rpn_ or box_ are passed to torchvision's MaskRCNN, others to the backbone.

    Raises:
        VitfocusError: An option is unknown, or the backbone has no usable features.

    Example:
        >>> import torch
        >>> small = {"depth": 4, "embed_dim": 48, "num_heads": 3, "channels": 16, "box_width": 32, "mask_layers": 1}
        >>> model = mask_rcnn("vit_tiny_patch16_224", num_classes=3, min_size=64, **small).eval()
        >>> sorted(model([torch.zeros(3, 60, 90)])[0])
        ['boxes', 'labels', 'masks', 'scores']
    """
    if num_classes < 1:
        raise VitfocusError(f"A detector needs at least one class of objects, not num_classes={num_classes}.")
    detector = {key: options.pop(key) for key in list(options) if key.startswith(("rpn_", "box_"))}
    for key in detector:
        if key not in _OPTIONS:
            raise VitfocusError(f"torchvision's MaskRCNN has no option {key!r}: {nearest(key, _OPTIONS)}")
    features = PyramidFeatures(backbone, pretrained, indices, **options)
    strides = (*features.strides, 2 * features.strides[-1])
    boxes, masks = (_pooler(size, features.strides) for size in (7, 14))
    return VisionMaskRCNN(
        DetectorBackbone(features, channels),
        min_size=min_size,
        max_size=max_size,
        image_mean=[0.0, 0.0, 0.0],
        image_std=[1.0, 1.0, 1.0],
        size_divisible=features.strides[-1],
        _skip_resize=True,  # in training the data are resized already, each image by a random factor
        rpn_anchor_generator=AnchorGenerator(
            tuple((anchor_scale * stride,) for stride in strides), (_RATIOS,) * len(strides)
        ),
        rpn_head=_Proposals(channels, len(_RATIOS)),
        box_roi_pool=boxes,
        box_head=TwoMLPHead(channels * 49, box_width),
        box_predictor=_Boxes(box_width, num_classes + 1),
        mask_roi_pool=masks,
        mask_head=MaskRCNNHeads(channels, (channels,) * mask_layers, 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, num_classes + 1),
        **detector,
    )


def _pooler(size: int, strides: Sequence[int]) -> MultiScaleRoIAlign:
    """RoIAlign with given strides: torchvision would infer them from the first batch, wrongly if much is padding."""
    pooler = MultiScaleRoIAlign([str(level) for level in range(LEVELS)], output_size=size, sampling_ratio=2)
    pooler.scales = [1.0 / stride for stride in strides]
    exponents = [stride.bit_length() - 1 for stride in (strides[0], strides[-1])]
    pooler.map_levels = initLevelMapper(exponents[0], exponents[1])
    return pooler
