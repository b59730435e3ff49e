"""RVT: Robust Vision Transformer (Mao et al., *Towards Robust Vision Transformer*, CVPR 2022).

https://arxiv.org/abs/2105.07926. Written from the paper and the published tensor names; the authors' code has no
licence and was neither copied nor read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import calculate_drop_path_rates
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError
from vitfocus.models.base import (
    Backbone,
    Grid,
    Size,
    TokenMlp,
    TransformerBlock,
    head_width,
    register_variants,
    resize_pair_map,
    to_map,
    to_tokens,
    tokens_and_grid,
)

__all__ = ["RVT"]

_PLAIN_MLP_WIDTH = 768


class RvtConvStem(nn.Module):
    """7×7 stride 2, BatchNorm, 3×3 max-pool stride 2, 4×4 stride 4: B, C, H, W → (B, N, D), grid at stride 16."""

    def __init__(self, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.Conv2d(in_chans, 32, 7, stride=2, padding=2),
            nn.BatchNorm2d(32),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Conv2d(32, embed_dim, 4, stride=4),
        )

    def dynamic_feat_size(self, img_size: Grid) -> Grid:
        """Return the token grid of an image of `img_size` (height, width)."""
        height, width = (((side - 3) // 2 + 2) // 2 // 4 if side >= 3 else 0 for side in img_size)
        return height, width

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        return tokens_and_grid(self.proj(x))


class PositionAwareAttention(nn.Module):
    """Self-attention whose logits are multiplied by sigmoid(W_p) where a `mask_grid` is given (PAAS).

    softmax(QKᵀ/√d ⊙ sigmoid(W_p)) V, where W_p (`att_mask`) has one value per head, query and key. The product is not
    an additive mask, so `scaled_dot_product_attention` cannot compute it: masked blocks compute the B, H, N, N logits,
    and only the others use the fused kernel. On another grid, W_p is interpolated.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        mask_grid: Grid | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_width(dim, num_heads)
        self.scale = self.head_dim**-0.5
        self.mask_grid = mask_grid
        if mask_grid is not None:
            tokens = mask_grid[0] * mask_grid[1]
            self.att_mask = nn.Parameter(torch.zeros(num_heads, tokens, tokens))
            nn.init.trunc_normal_(self.att_mask, std=0.02, a=-0.02, b=0.02)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Attend, B, N, C → B, N, C."""
        heads = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        q, k, v = (part.reshape(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if self.mask_grid is None:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            mask = self.att_mask if grid == self.mask_grid else resize_pair_map(self.att_mask, self.mask_grid, grid)
            attn = ((q * self.scale) @ k.transpose(-2, -1)) * mask.sigmoid()
            attn = self.attn_drop(attn.softmax(dim=-1))
            x = attn.to(v.dtype) @ v
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class RvtConvMlp(nn.Module):
    """1×1 conv, depthwise 3×3, 1×1 conv, each with BatchNorm, GELU after the first two; tokens in, tokens out."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(dim, hidden, 1)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.act = nn.GELU()
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.fc2 = nn.Conv2d(hidden, dim, 1)
        self.bn3 = nn.BatchNorm2d(dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Process tokens, B, N, C → B, N, C."""
        x = self.act(self.bn1(self.fc1(to_map(x, grid))))
        x = self.drop(self.act(self.bn2(self.dwconv(x))))
        return to_tokens(self.drop(self.bn3(self.fc2(x))))


class Stage(nn.Module):
    """The blocks of one resolution."""

    def __init__(self, blocks: list[TransformerBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


class Pool(nn.Module):
    """From one stage to the next: a grouped 3×3 convolution of stride 2 that widens each channel separately."""

    def __init__(self, dim: int, dim_out: int) -> None:
        super().__init__()
        if dim_out % dim:
            raise VitfocusError(
                f"An RVT stage of width {dim_out} cannot follow one of {dim}: it must be a multiple of it."
            )
        self.conv = nn.Conv2d(dim, dim_out, 3, stride=2, padding=1, groups=dim)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """Halve the grid, B, N, C → (B, N/4, D), grid."""
        return tokens_and_grid(self.conv(to_map(x, grid)))


class RVT(Backbone):
    """Robust Vision Transformer, https://arxiv.org/abs/2105.07926; `masked_blocks` > 0 gives the "plus" (*) variants.

    Images B, C, H, W → tokens B, N, C at stride 16 → stages of blocks, stage s of width `base_dims[s] * heads[s]`, the
    grid halved between stages → global average → LayerNorm → logits B, num_classes. No class token and no position
    embedding. `forward_features` returns the last map, B, C, H, W, not yet normalised.

    As in the published code: the MLP is convolutional except at width 768 (RVT-B), where it is the plain one; the first
    `masked_blocks` blocks of stage 0 scale their logits by sigmoid(W_p). `conv_mlp` chooses the MLP explicitly (the
    TAP & ADL release uses the convolutional one at every width). Unlike the published code: W_p has the size of
    `img_size` (there 14×14 tokens only) and is interpolated at other sizes, with a warning; it starts from a truncated
    normal as in TAP & ADL (there from uninitialised memory); grids need not be square. The published definition of
    RVT-B* masks 5 blocks and has 88.529 M parameters; the 91.8 M in the papers are those of 12 masked blocks.

    Licence: the authors' repository has none. This code was written without it and is under the licence of vitfocus.

    >>> model = RVT(img_size=32, base_dims=(8, 8), depths=(1, 1), heads=(1, 2), num_classes=5, masked_blocks=1).eval()
    >>> model(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 5])
    """

    pool_types = ("avg", "")

    def __init__(
        self,
        img_size: Size = 224,
        base_dims: Sequence[int] = (32, 32),
        depths: Sequence[int] = (10, 2),
        heads: Sequence[int] = (6, 12),
        num_classes: int = 1000,
        masked_blocks: int = 0,
        in_chans: int = 3,
        global_pool: str = "avg",
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        conv_mlp: bool | None = None,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        if not len(base_dims) == len(depths) == len(heads) > 0:
            raise VitfocusError(
                f"RVT needs one base_dim, depth and head count per stage; given were {tuple(base_dims)}, "
                f"{tuple(depths)} and {tuple(heads)}."
            )
        widths = [base * count for base, count in zip(base_dims, heads, strict=True)]
        super().__init__(img_size, num_classes, in_chans, global_pool, widths[-1], drop_rate, pos_drop_rate)
        self.depths = tuple(depths)
        self.masked_blocks = masked_blocks
        self.patch_embed = RvtConvStem(in_chans, widths[0])
        self.grid_size = self.patch_embed.dynamic_feat_size(self.img_size)
        if not 0 <= masked_blocks <= depths[0] or (masked_blocks and min(self.grid_size) < 1):
            raise VitfocusError(
                f"masked_blocks must lie between 0 and the first stage's depth {depths[0]}, and the image must hold a "
                f"token; given were {masked_blocks} and {self.img_size} pixels."
            )
        rates: Iterator[Any] = iter(calculate_drop_path_rates(drop_path_rate, sum(depths)))
        attention_options = (qkv_bias, attn_drop_rate, proj_drop_rate)
        self.transformers: Any = nn.ModuleList()
        for stage, width in enumerate(widths):
            mlp = RvtConvMlp if (width != _PLAIN_MLP_WIDTH if conv_mlp is None else conv_mlp) else TokenMlp
            masks = [self.grid_size if stage == 0 and i < masked_blocks else None for i in range(depths[stage])]
            blocks = [
                TransformerBlock(
                    width,
                    PositionAwareAttention(width, heads[stage], *attention_options, mask),
                    mlp(width, int(width * mlp_ratio), drop=proj_drop_rate),
                    next(rates),
                )
                for mask in masks
            ]
            self.transformers.append(Stage(blocks))
        self.pools = nn.ModuleList(Pool(before, after) for before, after in pairwise(widths))
        self._add_classifier()
        self.feature_info = [
            {"num_chs": width, "reduction": 16 * 2**stage, "module": f"transformers.{stage}.blocks.{i}"}
            for stage, width in enumerate(widths)
            for i in range(depths[stage])
        ]
        self._warned = False

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: none besides biases and norms."""
        return set()

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks, pools = (r"", 0) if coarse else (r"\.blocks\.(\d+)", 99998)
        groups = [(rf"^transformers\.(\d+){blocks}", None), (r"^pools\.(\d+)", (pools,)), (r"^norm", (99999,))]
        return {"stem": r"^patch_embed", "blocks": groups}

    def resample_published(self, state: dict[str, Any]) -> dict[str, Any]:
        tokens = self.grid_size[0] * self.grid_size[1]
        for name, value in state.items():
            if name.endswith(".attn.att_mask") and isinstance(value, Tensor) and value.ndim == 3:
                side = math.isqrt(value.shape[-1])
                if value.shape[-1] != tokens and value.shape[1:] == (side * side, side * side):
                    state[name] = resize_pair_map(value, (side, side), self.grid_size)
        return state

    def _run_blocks(
        self, x: Tensor, take: Collection[int], norm: bool, last: int | None
    ) -> tuple[Tensor, list[Tensor]]:
        x, grid = self.patch_embed(x)
        if self.masked_blocks and not torch.compiler.is_compiling() and not self._warned and grid != self.grid_size:
            self._warned = True
            warnings.warn(
                f"The position masks of this RVT are for {self.grid_size[0]}×{self.grid_size[1]} tokens and are inter"
                f"polated to {grid[0]}×{grid[1]}: build it with the img_size that you use, or expect to fine-tune.",
                stacklevel=2,
            )
        x = self.pos_drop(x)
        maps: list[Tensor] = []
        index = 0
        for stage, transformer in enumerate(self.transformers):
            if stage > 0:
                x, grid = self.pools[stage - 1](x, grid)
            for block in transformer.blocks:
                if last is not None and index > last:
                    break
                x = self._call(block, x, grid)
                if index in take:
                    final = stage + 1 == len(self.depths)
                    maps.append(to_map(self.norm(x) if norm and final else x, grid))
                index += 1
        return to_map(x, grid), maps

    def _finalize(self, x: Tensor) -> Tensor:
        return x

    def _prune(self, last: int, prune_head: bool) -> None:
        ends = list(accumulate(self.depths))
        kept = next(stage for stage, end in enumerate(ends) if last < end)
        self.transformers = self.transformers[: kept + 1]
        self.pools = self.pools[:kept]
        stage = self.transformers[kept]
        stage.blocks = stage.blocks[: last + 1 - (ends[kept] - self.depths[kept])]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Average the map of `forward_features`, normalise and classify; without pooling, classify each token."""
        x = self.head_drop(self.norm(x.mean(dim=(2, 3)) if self.global_pool else to_tokens(x)))
        return x if pre_logits else self.head(x)


def _feature_indices(arguments: Mapping[str, Any]) -> int | tuple[int, ...]:
    """One feature per stage; with a single stage, timm's last three blocks."""
    depths = arguments["depths"]
    return tuple(end - 1 for end in accumulate(depths)) if len(depths) > 1 else min(3, depths[0])


_TINY: dict[str, Any] = {"base_dims": (32, 32), "depths": (10, 2), "heads": (6, 12)}
_SMALL: dict[str, Any] = {"base_dims": (64,), "depths": (12,), "heads": (6,)}
_BASE: dict[str, Any] = {"base_dims": (64,), "depths": (12,), "heads": (12,)}
register_variants(
    RVT,
    {
        "rvt_tiny": _TINY,
        "rvt_tiny_plus": _TINY | {"masked_blocks": 10},
        "rvt_small": _SMALL,
        "rvt_small_plus": _SMALL | {"masked_blocks": 5},
        "rvt_base": _BASE,
        "rvt_base_plus": _BASE | {"masked_blocks": 5},  # as in the published definition
    },
    _feature_indices,
    first_conv="patch_embed.proj.0",
    paper_ids="arXiv:2105.07926",
    paper_name="Towards Robust Vision Transformer",
    origin_url="https://github.com/vtddggg/Robust-Vision-Transformer",
)
