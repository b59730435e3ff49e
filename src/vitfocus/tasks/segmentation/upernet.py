"""UperNet (arXiv:1807.10221) on any timm model that gives features: a plain ViT, Swin, PVT, FAN.

Of a plain ViT four depths make the pyramid. With 512 channels, an auxiliary head of 256 and ADE20K's 150 classes the
whole has 34.06, 53.55 and 127.02 million parameters on ViT-Ti, S and B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.tasks.feature_pyramid import PyramidFeatures
from vitfocus.tasks.segmentation.model import ConvNorm, PlainHead, Segmenter, take

_POOLS = (1, 2, 3, 6)


def build(name: str, pretrained: bool, arguments: dict[str, Any]) -> Segmenter:
    """UperNet on the timm model `name`.

    `num_classes`, `channels`, `auxiliary_channels` (0: no auxiliary head), `dropout` and `indices` (which four of the
    backbone's features) are the head's; the other arguments go to timm.

    >>> import vitfocus as vf
    >>> arguments = {"img_size": 64, "depth": 4, "embed_dim": 48, "num_heads": 3, "channels": 32}
    >>> model = vf.create_model("upernet:vit_tiny_patch16_224+cb(layers=upper)", num_classes=11, **arguments)
    >>> model.eval()(torch.zeros(1, 3, 50, 75)).shape
    torch.Size([1, 11, 50, 75])
    """
    head = take(arguments, channels=512, auxiliary_channels=256, dropout=0.1, indices=None)
    classes, auxiliary = head["num_classes"], None
    features = PyramidFeatures(name, pretrained, head["indices"], **arguments)
    if head["auxiliary_channels"]:
        auxiliary = PlainHead(features.widths[-2], head["auxiliary_channels"], classes, head["dropout"])
    decoder = UperDecoder(features.widths, head["channels"], classes, head["dropout"])
    return Segmenter(features, decoder, classes, auxiliary)


class UperDecoder(nn.Module):
    """Pyramid pooling on the coarsest map, a top-down path over the others, all fused at the finest."""

    def __init__(self, widths: Sequence[int], channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.pooled = nn.ModuleList(ConvNorm(widths[-1], channels) for _ in _POOLS)
        self.bottleneck = ConvNorm(widths[-1] + len(_POOLS) * channels, channels, 3)
        self.lateral = nn.ModuleList(ConvNorm(width, channels) for width in widths[:-1])
        self.smooth = nn.ModuleList(ConvNorm(channels, channels, 3) for _ in widths[:-1])
        self.fuse = ConvNorm(len(widths) * channels, channels, 3)
        self.classify = nn.Sequential(nn.Dropout2d(dropout), nn.Conv2d(channels, classes, 1))

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Four maps, fine to coarse, to logits at the finest."""
        last = maps[-1]
        pools = [_to(layer(F.adaptive_avg_pool2d(last, n)), last) for n, layer in zip(_POOLS, self.pooled, strict=True)]
        levels = [layer(one) for layer, one in zip(self.lateral, maps[:-1], strict=True)]
        levels.append(self.bottleneck(torch.cat([last, *pools], 1)))
        for place in range(len(levels) - 1, 0, -1):
            levels[place - 1] = levels[place - 1] + _to(levels[place], levels[place - 1])
        smooth = [layer(one) for layer, one in zip(self.smooth, levels[:-1], strict=True)]
        joined = [_to(one, smooth[0]) for one in (*smooth, levels[-1])]
        logits: Tensor = self.classify(self.fuse(torch.cat(joined, 1)))
        return logits


def _to(x: Tensor, other: Tensor) -> Tensor:
    return F.interpolate(x, size=other.shape[-2:], mode="bilinear", align_corners=False)
