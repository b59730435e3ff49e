"""SegFormer's all-MLP head (arXiv:2105.15203) on any timm model that gives features; FAN-B-Hybrid for Cityscapes.

On FAN-B-Hybrid the maps have 128, 256, 448 and 448 channels at strides 4, 8, 16 and 32: the stem's two stages, a block
at two thirds of the depth, and the last block, pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.tasks.feature_pyramid import PyramidFeatures
from vitfocus.tasks.segmentation.model import ConvNorm, Segmenter, take


def build(name: str, pretrained: bool, arguments: dict[str, Any]) -> Segmenter:
    """SegFormer's head on the timm model `name`.

    `num_classes`, `embed_channels` (the width all maps are brought to), `dropout` and `indices` (which four of the
    backbone's features) are the head's; the other arguments go to timm.

    >>> import vitfocus as vf
    >>> spec = "segformer:fan_tiny_8_p4_hybrid+tap+adl"
    >>> model = vf.create_model(spec, num_classes=19, embed_channels=32, depth=3, img_size=64)
    >>> model.eval()(torch.zeros(1, 3, 64, 96)).shape
    torch.Size([1, 19, 64, 96])
    """
    head = take(arguments, embed_channels=768, dropout=0.1, indices=None)
    features = PyramidFeatures(name, pretrained, head["indices"], **arguments)
    decoder = MLPDecoder(features.widths, head["embed_channels"], head["num_classes"], head["dropout"])
    return Segmenter(features, decoder, head["num_classes"])


class MLPDecoder(nn.Module):
    """Each map through a linear layer, all at the finest map's size, fused by one more."""

    def __init__(self, widths: Sequence[int], channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in widths)
        self.fuse = ConvNorm(len(widths) * channels, channels)
        self.classify = nn.Sequential(nn.Dropout2d(dropout), nn.Conv2d(channels, classes, 1))

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Four maps, fine to coarse, to logits at the finest."""
        size = maps[0].shape[-2:]
        embedded = [layer(one) for layer, one in zip(self.embed, maps, strict=True)]
        joined = [F.interpolate(one, size=size, mode="bilinear", align_corners=False) for one in embedded]
        logits: Tensor = self.classify(self.fuse(torch.cat(joined[::-1], 1)))
        return logits
