"""LocalViT: bringing locality to vision transformers (Li et al., 2021), https://arxiv.org/abs/2104.05707.

The authors' code is MIT; this is a new implementation with its tensor names.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from timm.layers import DropPath, calculate_drop_path_rates, resample_abs_pos_embed, trunc_normal_
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError
from vitfocus.models.base import (
    Backbone,
    Grid,
    PatchEmbed,
    Size,
    fit_position,
    head_width,
    register_variants,
    to_map,
    to_tokens,
)

__all__ = ["LocalViT"]


class SqueezeExcite(nn.Module):
    """Scale the channels of a B, C, H, W map by gates that two linear layers compute from their means."""

    def __init__(self, dim: int, reduction: int) -> None:
        super().__init__()
        if not 1 <= reduction <= dim:
            raise VitfocusError(f"se_reduction must lie between 1 and the hidden width {dim}, but is {reduction}.")
        squeezed = dim // reduction
        self.fc = nn.Sequential(nn.Linear(dim, squeezed), nn.ReLU(), nn.Linear(squeezed, dim), nn.Hardsigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(x.mean(dim=(2, 3)))[:, :, None, None]


class LocalFeedForward(nn.Module):
    """x + conv(x) on a B, C, H, W map: 1×1, depthwise 3×3 and 1×1 convolutions with BatchNorm instead of an MLP.

    The shortcut is part of it, as published: what an MLP would return is the output of `self.conv`.
    """

    def __init__(self, dim: int, hidden: int, se_reduction: int | None, act_layer: type[nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(dim, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            act_layer(),
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            act_layer(),
            *([SqueezeExcite(hidden, se_reduction)] if se_reduction else []),
            nn.Conv2d(hidden, dim, 1, bias=False),
            nn.BatchNorm2d(dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


class LocalViTBlock(nn.Module):
    """Pre-norm attention on all tokens, then convolutions on the patch tokens; the class token bypasses these."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        se_reduction: int | None,
        qkv_bias: bool,
        proj_drop: float,
        attn_drop: float,
        drop_path: float,
        act_layer: type[nn.Module],
    ) -> None:
        super().__init__()
        head_width(dim, num_heads)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads, qkv_bias=qkv_bias, attn_drop=attn_drop, proj_drop=proj_drop)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.conv = LocalFeedForward(dim, int(dim * mlp_ratio), se_reduction, act_layer)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Process tokens, B, 1 + N, C → B, 1 + N, C."""
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return torch.cat((x[:, :1], to_tokens(self.conv(to_map(x[:, 1:], grid)))), dim=1)


class LocalViT(Backbone):
    """LocalViT on DeiT, https://arxiv.org/abs/2104.05707.

    Images B, C, H, W → patch tokens with a class token in front, B, 1 + N, C, + learned position embedding → `depth`
    blocks → LayerNorm → logits B, num_classes from the class token. `se_reduction` None or 0 leaves the
    squeeze-and-excitation out.

    As in the published code, there is no norm2 and no drop path around the convolutions, which have their own shortcut;
    the tiny model has 4 heads and the small one 8 (DeiT: 3 and 6). The class token never sees the convolutions of the
    last block, so they get no gradient from a classifier on it. Unlike the published code, position embeddings are
    resampled for any image size, rectangles included. The authors state 5.7 M parameters for the tiny model, 9.4 M with
    `se_reduction` 4, and 22.4 M for the small one; the published shapes have 5.909, 9.376 and 22.433 M.

    >>> model = LocalViT(32, 16, embed_dim=16, depth=1, num_heads=2, mlp_ratio=2, se_reduction=8, num_classes=5).eval()
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
        mlp_ratio: float = 4.0,
        se_reduction: int | None = 192,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "token",
        qkv_bias: bool = True,
        act_layer: type[nn.Module] = nn.Hardswish,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(img_size, num_classes, in_chans, global_pool, embed_dim, drop_rate, pos_drop_rate)
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.grid_size = self.patch_embed.grid_size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid_size[0] * self.grid_size[1], embed_dim))
        rates: Any = calculate_drop_path_rates(drop_path_rate, depth)
        self.blocks = nn.ModuleList(
            LocalViTBlock(
                embed_dim, num_heads, mlp_ratio, se_reduction, qkv_bias, proj_drop_rate, attn_drop_rate, rate, act_layer
            )
            for rate in rates
        )
        self._add_classifier()
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"blocks.{i}"} for i in range(depth)
        ]
        trunc_normal_(self.pos_embed, std=0.02)
        trunc_normal_(self.cls_token, std=0.02)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {
            "stem": r"^cls_token|^pos_embed|^patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def resample_published(self, state: dict[str, Any]) -> dict[str, Any]:
        if "pos_embed" in state:
            state["pos_embed"] = fit_position(state["pos_embed"], self.grid_size, prefix_tokens=1)
        return state

    def _run_blocks(
        self, x: Tensor, take: Collection[int], norm: bool, last: int | None
    ) -> tuple[Tensor, list[Tensor]]:
        x, grid = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.pos_drop(x + resample_abs_pos_embed(self.pos_embed, list(grid), list(self.grid_size), 1))
        return self._run_stack(x, grid, take, norm, last, prefix=1)


_TINY: dict[str, Any] = {"embed_dim": 192, "num_heads": 4, "se_reduction": 192}
_SMALL: dict[str, Any] = {"embed_dim": 384, "num_heads": 8, "se_reduction": 384}
register_variants(
    LocalViT,
    {
        "localvit_tiny": _TINY,
        "localvit_small": _SMALL,
        "localvit_tiny_mlp6_act1": _TINY | {"mlp_ratio": 6.0, "se_reduction": None, "act_layer": nn.ReLU6},
        "localvit_tiny_mlp4_act3_r4": _TINY | {"se_reduction": 4},
        "localvit_tiny_mlp4_act3_r192": _TINY,  # the published name of localvit_tiny
        "localvit_small_mlp4_act3_r384": _SMALL,  # the published name of localvit_small
    },
    out_indices=lambda arguments: 3,
    first_conv="patch_embed.proj",
    paper_ids="arXiv:2104.05707",
    paper_name="LocalViT: Bringing Locality to Vision Transformers",
    origin_url="https://github.com/ofsoundof/LocalViT",
)
