"""FAN's two stems, each from an image to tokens and their grid: plain convolutions (ViT) or a ConvNeXt (Hybrid)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from timm.layers import LayerNorm2d, trunc_normal_
from timm.models.convnext import ConvNeXtStage
from torch import Tensor, nn

from ..core.errors import VitfocusError
from .base import Grid, to_tokens


class ConvStem(nn.Module):
    """One strided 3×3 convolution + BatchNorm per halving, GELU between: B, C, H, W → (B, N, D), grid."""

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        halvings = patch_size.bit_length() - 1
        if patch_size < 2 or patch_size != 2**halvings or embed_dim % 2 ** (halvings - 1):
            raise VitfocusError(
                f"FAN's stem halves the image and doubles the width: patch_size {patch_size} must be a power of two "
                f"and embed_dim {embed_dim} a multiple of half of it."
            )
        widths = [in_chans] + [embed_dim >> (halvings - 1 - i) for i in range(halvings)]
        layers: list[nn.Module] = []
        for i in range(halvings):
            conv = nn.Conv2d(widths[i], widths[i + 1], 3, stride=2, padding=1, bias=False)
            layers += [nn.GELU()] * (i > 0) + [nn.Sequential(conv, nn.BatchNorm2d(widths[i + 1]))]
        self.proj = nn.Sequential(*layers)
        self.halvings = halvings

    def dynamic_feat_size(self, img_size: Grid) -> Grid:
        """Return the token grid of an image of `img_size`: every halving rounds up."""
        return -(-img_size[0] // 2**self.halvings), -(-img_size[1] // 2**self.halvings)

    def forward(self, x: Tensor, maps: list[Tensor] | None = None) -> tuple[Tensor, Grid]:
        """Embed the image; this stem has no maps of its own to append."""
        x = self.proj(x)
        return to_tokens(x), (x.shape[2], x.shape[3])


class SampleLayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of B, C, H, W that divides by the *sample* variance, of C - 1 degrees of freedom.

    So do all norms of the published hybrids' stem after its first, and their weights were trained with it. With
    r = C / (C - 1): (x - μ) / √(r·v + ε) = r^(-1/2) · (x - μ) / √(v + ε/r), which is the ordinary norm, rescaled.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each position."""
        ratio = x.shape[1] / (x.shape[1] - 1)
        weight = self.weight * ratio**-0.5
        return F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, weight, self.bias, self.eps / ratio).permute(
            0, 3, 1, 2
        )


class ConvNeXtStem(nn.Module):
    """The first stages of a ConvNeXt: a 4×4 patch convolution, then stages of blocks at stride 4, 8, …"""

    def __init__(self, in_chans: int, depths: Sequence[int], dims: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_chans, dims[0], 4, 4), LayerNorm2d(dims[0], eps=1e-6))
        norm = partial(SampleLayerNorm2d, eps=1e-6)
        options: dict[str, Any] = {"ls_init_value": 1e-6, "conv_mlp": True, "norm_layer": norm}
        self.stages = nn.ModuleList(
            ConvNeXtStage(dims[max(i - 1, 0)], dims[i], stride=2 if i else 1, depth=depth, **options)
            for i, depth in enumerate(depths)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class HybridStem(nn.Module):
    """A ConvNeXt stem, then patches of its map: B, C, H, W → (B, N, D), grid."""

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int, depths: Sequence[int], dims: Sequence[int]):
        super().__init__()
        stride = 4 * 2 ** (len(depths) - 1)
        if len(depths) != len(dims) or patch_size % stride:
            raise VitfocusError(
                f"A hybrid stem needs one width per depth and a patch_size that is a multiple of its stride {stride}; "
                f"given were depths {tuple(depths)}, widths {tuple(dims)} and patch_size {patch_size}."
            )
        self.backbone = ConvNeXtStem(in_chans, depths, dims)
        self.proj = nn.Conv2d(dims[-1], embed_dim, patch_size // stride, patch_size // stride)
        self.patch_size = patch_size

    def dynamic_feat_size(self, img_size: Grid) -> Grid:
        """Return the token grid of an image of `img_size`: every step rounds down."""
        return img_size[0] // self.patch_size, img_size[1] // self.patch_size

    def forward(self, x: Tensor, maps: list[Tensor] | None = None) -> tuple[Tensor, Grid]:
        """Embed the image; the stages' maps are appended to `maps` where a list is given."""
        x = self.backbone.stem(x)
        for stage in self.backbone.stages:
            x = stage(x)
            if maps is not None:
                maps.append(x)
        x = self.proj(x)
        return to_tokens(x), (x.shape[2], x.shape[3])
