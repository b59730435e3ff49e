"""FAN: Fully Attentional Network (Zhou et al., *Understanding the Robustness in Vision Transformers*, ICML 2022).

https://arxiv.org/abs/2204.12451. Written from the paper's equations and the published tensor names; NVIDIA's code,
which is under a non-commercial licence, was neither copied nor read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d, trunc_normal_
from timm.models.convnext import ConvNeXtStage
from timm.models.xcit import ClassAttentionBlock, PositionalEncodingFourier
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError
from vitfocus.models.base import (
    Backbone,
    Grid,
    ReducedAttention,
    Size,
    TransformerBlock,
    head_width,
    initialise,
    register_variants,
    to_map,
    to_tokens,
    tokens_and_grid,
)

__all__ = ["FAN"]


class FanConvStem(nn.Module):
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

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        return tokens_and_grid(self.proj(x))


class SampleLayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of B, C, H, W that divides by the *sample* variance, with C - 1 degrees of freedom.

    All norms of the published hybrids' stem but the first do so, and their weights were trained with it. With
    r = C / (C - 1): (x - μ) / √(r·v + ε) = r^(-1/2) · (x - μ) / √(v + ε/r), which is the ordinary norm, rescaled.
    """

    def forward(self, x: Tensor) -> Tensor:
        ratio = x.shape[1] / (x.shape[1] - 1)
        weight = self.weight * ratio**-0.5
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, weight, self.bias, self.eps / ratio)
        return x.permute(0, 3, 1, 2)


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
        initialise(self, nn.Conv2d)


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
        """Embed the image, and append the maps of the stages to `maps`."""
        x = self.backbone.stem(x)
        for stage in self.backbone.stages:
            x = stage(x)
            if maps is not None:
                maps.append(x)
        return tokens_and_grid(self.proj(x))


class DepthwisePair(nn.Module):
    """Depthwise 3×3 → GELU → BatchNorm → depthwise 3×3 on a B, C, H, W map."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.act = nn.GELU()
        self.bn = nn.BatchNorm2d(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.bn(self.act(self.conv1(x))))


class FanConvMlp(nn.Module):
    """fc2(h + gamma · DW(h)) with h = fc1(x): the only nonlinearity is the one inside DW, as published."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = DepthwisePair(hidden)
        self.gamma = nn.Parameter(torch.ones(hidden))
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Process tokens, B, N, C → B, N, C."""
        x = self.fc1(x)
        x = x + self.gamma * to_tokens(self.dwconv(to_map(x, grid)))
        return self.drop(self.fc2(self.drop(x)))


class ChannelProcessing(nn.Module):
    """FAN's channel attention: one gate per channel, from the token-softmax of q and of x itself, over an MLP's output.

    With σ_N the softmax over tokens, and per head: gate = τ · sigmoid(σ_N(q)ᵀ mean_channels(σ_N(x))),
    output = gate ⊙ LN(MLP(x)).
    """

    def __init__(self, dim: int, num_heads: int, hidden: int, qkv_bias: bool, drop: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_width(dim, num_heads)
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.mlp_v = FanConvMlp(dim, hidden, drop)
        self.norm_v = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Gate the MLP's channels, B, N, C → B, N, C."""
        heads = (self.num_heads, self.head_dim)
        query = self.q(x).softmax(dim=1).unflatten(-1, heads).permute(0, 2, 3, 1)
        key = x.softmax(dim=1).unflatten(-1, heads).mean(dim=-1).transpose(1, 2).unsqueeze(-1)
        gate = (query @ key).sigmoid() * self.temperature
        return gate.reshape(x.shape[0], 1, -1) * self.norm_v(self.mlp_v(x, grid))


class FANBlock(TransformerBlock):
    """Token mixing, then channel processing, both pre-norm with a per-channel scale; no prefix tokens."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        qkv_bias: bool,
        proj_drop: float,
        attn_drop: float,
        drop_path: float,
        eta: float | None,
    ) -> None:
        attn = ReducedAttention(dim, num_heads, qkv_bias, attn_drop, proj_drop)
        mlp = ChannelProcessing(dim, num_heads, int(dim * mlp_ratio), qkv_bias, proj_drop)
        super().__init__(dim, attn, mlp, drop_path)
        self.gamma1: nn.Parameter | float = 1.0 if eta is None else nn.Parameter(eta * torch.ones(dim))
        self.gamma2: nn.Parameter | float = 1.0 if eta is None else nn.Parameter(eta * torch.ones(dim))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Process tokens, B, N, C → B, N, C."""
        x = x + self.drop_path1(self.gamma1 * self.attn(self.norm1(x), grid))
        return x + self.drop_path2(self.gamma2 * self.mlp(self.norm2(x), grid))


class FAN(Backbone):
    """Fully Attentional Network, https://arxiv.org/abs/2204.12451; a Hybrid where `stem_depths`, `stem_dims` are given.

    Images B, C, H, W → tokens B, N, C (stride `patch_size`) + Fourier position encoding → `depth` blocks → a class
    token and `cls_attn_layers` class-attention blocks → LayerNorm → logits B, num_classes. Any image size works.

    As in the published code: the only activation of the channel MLP is between its two depthwise convolutions; the
    drop-path rate is constant over depth and the class-attention blocks have none; a class-attention block doubles the
    patch tokens that it passes on (its LayerNorm undoes it); the norms of the hybrid's stem after its first divide by
    the sample variance. Unlike the published code: grids need not be square, attention runs in
    `scaled_dot_product_attention`, and strides other than 16 are possible.

    The authors state 7.3 / 28.0 / 54.0 / 80.5 M parameters for the ViT sizes and 7.4 / 26.3 / 50.4 / 76.8 M for the
    hybrids; the published shapes have 7.320 / 28.345 / 54.350 / 80.574 and 7.467 / 26.118 / 50.475 / 76.855 M.

    Licence: the published code is under NVIDIA's non-commercial source licence. This implementation was written without
    it and is under the licence of vitfocus; published weights that you load keep their own terms.

    >>> model = FAN(img_size=32, patch_size=16, embed_dim=16, depth=1, num_heads=2, num_classes=5).eval()
    >>> model(torch.zeros(1, 3, 32, 48)).shape
    torch.Size([1, 5])
    """

    def __init__(
        self,
        img_size: Size = 224,
        patch_size: int = 16,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 4,
        num_classes: int = 1000,
        stem_depths: Sequence[int] | None = None,
        stem_dims: Sequence[int] | None = None,
        in_chans: int = 3,
        global_pool: str = "token",
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        cls_attn_layers: int = 2,
        eta: float | None = 1.0,
        tokens_norm: bool = True,
        head_init_scale: float = 1.0,
    ) -> None:
        super().__init__(img_size, num_classes, in_chans, global_pool, embed_dim, drop_rate, pos_drop_rate)
        self.patch_embed: FanConvStem | HybridStem
        if stem_depths is None or stem_dims is None:
            if stem_depths is not None or stem_dims is not None:
                raise VitfocusError("A FAN Hybrid needs both stem_depths and stem_dims; only one of them was given.")
            self.patch_embed = FanConvStem(patch_size, in_chans, embed_dim)
            stem_dims = ()
        else:
            self.patch_embed = HybridStem(patch_size, in_chans, embed_dim, stem_depths, stem_dims)
        self.grid_size = self.patch_embed.dynamic_feat_size(self.img_size)
        self.stem_features = len(stem_dims)
        self.pos_embed = PositionalEncodingFourier(dim=embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        options: dict[str, Any] = {"proj_drop": proj_drop_rate, "attn_drop": attn_drop_rate, "eta": eta}
        self.blocks = nn.ModuleList(
            FANBlock(embed_dim, num_heads, mlp_ratio, qkv_bias, drop_path=drop_path_rate, **options)
            for _ in range(depth)
        )
        class_options: dict[str, Any] = {"tokens_norm": tokens_norm, "norm_layer": partial(nn.LayerNorm, eps=1e-6)}
        self.cls_attn_blocks = nn.ModuleList(
            ClassAttentionBlock(embed_dim, num_heads, mlp_ratio, qkv_bias, **options, **class_options)
            for _ in range(cls_attn_layers)
        )
        self._add_classifier()
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"patch_embed.backbone.stages.{i}"}
            for i, dim in enumerate(stem_dims)
        ] + [{"num_chs": embed_dim, "reduction": patch_size, "module": f"blocks.{i}"} for i in range(depth)]
        trunc_normal_(self.cls_token, std=0.02)
        if isinstance(self.head, nn.Linear):
            with torch.no_grad():
                self.head.weight.mul_(head_init_scale)
                self.head.bias.mul_(head_init_scale)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay, including the temperatures of the gates."""
        return {"cls_token"} | {f"blocks.{i}.mlp.temperature" for i in range(len(self.blocks))}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {
            "stem": r"^cls_token|^pos_embed|^patch_embed",
            "blocks": r"^blocks\.(\d+)",
            "cls_attn_blocks": [(r"^cls_attn_blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        for module in self.patch_embed.modules():
            if isinstance(module, ConvNeXtStage):
                module.grad_checkpointing = enable

    def _run_blocks(
        self, x: Tensor, take: Collection[int], norm: bool, last: int | None
    ) -> tuple[Tensor, list[Tensor]]:
        stem_maps: list[Tensor] = []
        x, grid = self.patch_embed(x, stem_maps) if self.stem_features else self.patch_embed(x)
        maps = [stem_map for i, stem_map in enumerate(stem_maps) if i in take]
        x = self.pos_drop(x + to_tokens(self.pos_embed(1, grid[0], grid[1])))
        x, more = self._run_stack(x, grid, take, norm, last, first=self.stem_features)
        return x, maps + more

    def _finalize(self, x: Tensor) -> Tensor:
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        for block in self.cls_attn_blocks:
            x = self._call(block, x)
        return self.norm(x)

    def _prune(self, last: int, prune_head: bool) -> None:
        super()._prune(max(last - self.stem_features, -1), prune_head)
        if prune_head:
            self.cls_attn_blocks = nn.ModuleList()
            self.register_parameter("cls_token", None)


def _feature_indices(arguments: Mapping[str, Any]) -> int | tuple[int, ...]:
    """One feature per stride: the stem's stages and the last block; a ViT has one stride, so timm's last three."""
    return (*range(len(arguments["stem_depths"])), -1) if arguments.get("stem_depths") else 3


_ORIGIN: dict[str, Any] = {
    "paper_ids": "arXiv:2204.12451",
    "paper_name": "Understanding The Robustness in Vision Transformers",
    "origin_url": "https://github.com/NVlabs/FAN",
    "crop_pct": 1.0,
}
_VIT: dict[str, dict[str, Any]] = {
    "fan_tiny_12_p16_224": {"embed_dim": 192, "depth": 12, "num_heads": 4},
    "fan_small_12_p16_224": {"embed_dim": 384, "depth": 12, "num_heads": 8},
    "fan_base_18_p16_224": {"embed_dim": 448, "depth": 18, "num_heads": 8},
    "fan_large_24_p16_224": {"embed_dim": 480, "depth": 24, "num_heads": 10},
}
_STEM = {"stem_depths": (3, 3), "stem_dims": (128, 256)}
_DEEPER_STEM = {"stem_depths": (3, 5), "stem_dims": (128, 256)}
# The published names of the small and the large hybrid do not give their depth.
_HYBRID: dict[str, dict[str, Any]] = {
    "fan_tiny_8_p4_hybrid": {"embed_dim": 192, "depth": 8, "num_heads": 8} | _STEM,
    "fan_small_12_p4_hybrid": {"embed_dim": 384, "depth": 10, "num_heads": 8} | _STEM,
    "fan_base_16_p4_hybrid": {"embed_dim": 448, "depth": 16, "num_heads": 8} | _STEM,
    "fan_large_16_p4_hybrid": {"embed_dim": 480, "depth": 22, "num_heads": 10, "head_init_scale": 0.001} | _DEEPER_STEM,
}
register_variants(FAN, _VIT, _feature_indices, first_conv="patch_embed.proj.0.0", **_ORIGIN)
register_variants(FAN, _HYBRID, _feature_indices, first_conv="patch_embed.backbone.stem.0", **_ORIGIN)
