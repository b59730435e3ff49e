"""PVT v1: Pyramid Vision Transformer (Wang et al., ICCV 2021), https://arxiv.org/abs/2102.12122.

timm has version 2 only. The authors' code is Apache-2.0; this is a new implementation with its tensor names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates, resample_abs_pos_embed, trunc_normal_
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError
from vitfocus.models.base import (
    Backbone,
    PatchEmbed,
    ReducedAttention,
    Size,
    TokenMlp,
    TransformerBlock,
    fit_position,
    register_variants,
    to_map,
)

__all__ = ["PVT"]


class PVT(Backbone):
    """Pyramid Vision Transformer v1, https://arxiv.org/abs/2102.12122.

    Images B, C, H, W → stages of blocks on tokens B, N, C: the first has stride `patch_size`, each further one halves
    the grid, and each has a learned position embedding. The last stage has a class token in front, from whose
    normalised value the logits B, num_classes are computed. `feature_info` has one entry per stage.

    Unlike the published code: position embeddings are resampled (bilinearly, as there) for any image size, rectangles
    included; attention runs in `scaled_dot_product_attention`; any number of stages is possible. With 224 pixels the
    models have the 13.2 / 24.5 / 44.2 / 61.4 M parameters that the authors state.

    Licence: the published code is Apache-2.0; this implementation is new and under the licence of vitfocus.

    >>> sizes = dict(embed_dims=(8, 16), num_heads=(1, 2), mlp_ratios=(4, 4), depths=(1, 1), sr_ratios=(2, 1))
    >>> model = PVT(img_size=32, patch_size=4, num_classes=5, **sizes).eval()
    >>> model(torch.zeros(1, 3, 32, 48)).shape
    torch.Size([1, 5])
    """

    def __init__(
        self,
        img_size: Size = 224,
        patch_size: int = 4,
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        num_heads: Sequence[int] = (1, 2, 5, 8),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        depths: Sequence[int] = (2, 2, 2, 2),
        sr_ratios: Sequence[int] = (8, 4, 2, 1),
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "token",
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        if not len(embed_dims) == len(num_heads) == len(mlp_ratios) == len(depths) == len(sr_ratios) > 0:
            raise VitfocusError("PVT needs embed_dims, num_heads, mlp_ratios, depths and sr_ratios of one length.")
        if sr_ratios[-1] != 1:
            raise VitfocusError(
                f"The last stage has the class token, so its sr_ratio must be 1, but {sr_ratios[-1]} was given."
            )
        super().__init__(img_size, num_classes, in_chans, global_pool, embed_dims[-1], drop_rate, pos_drop_rate)
        self.depths = tuple(depths)
        self.num_stages = len(self.depths)
        self.feature_info = []
        rates: Iterator[Any] = iter(calculate_drop_path_rates(drop_path_rate, sum(depths)))
        size, chans = self.img_size, in_chans
        for i, dim in enumerate(embed_dims):
            embed = PatchEmbed(size, patch_size if i == 0 else 2, chans, dim, norm=True)
            size, chans = embed.grid_size, dim
            prefix_tokens = int(i + 1 == self.num_stages)
            position = nn.Parameter(torch.zeros(1, prefix_tokens + size[0] * size[1], dim))
            trunc_normal_(position, std=0.02)
            blocks = [
                TransformerBlock(
                    dim,
                    ReducedAttention(dim, num_heads[i], qkv_bias, attn_drop_rate, proj_drop_rate, sr_ratios[i]),
                    TokenMlp(dim, int(dim * mlp_ratios[i]), drop=proj_drop_rate),
                    next(rates),
                )
                for _ in range(depths[i])
            ]
            self.add_module(f"patch_embed{i + 1}", embed)
            self.register_parameter(f"pos_embed{i + 1}", position)
            self.add_module(f"block{i + 1}", nn.ModuleList(blocks))
            self.feature_info.append({"num_chs": dim, "reduction": patch_size * 2**i, "module": f"block{i + 1}"})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dims[-1]))
        self._add_classifier()
        trunc_normal_(self.cls_token, std=0.02)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay; position embeddings have it, as published."""
        return {"cls_token"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks = r"^block(\d+)" if coarse else r"^block(\d+)\.(\d+)"
        return {
            "stem": r"^patch_embed1|^pos_embed1",
            "blocks": [(blocks, None), (r"^(?:patch_embed|pos_embed)(\d+)", (-1,)), (r"^cls_token|^norm", (99999,))],
        }

    def resample_published(self, state: dict[str, Any]) -> dict[str, Any]:
        for i in range(1, self.num_stages + 1):
            name = f"pos_embed{i}"
            if name in state:
                grid = getattr(self, f"patch_embed{i}").grid_size
                state[name] = fit_position(state[name], grid, int(i == self.num_stages), "bilinear")
        return state

    def _run_blocks(
        self, x: Tensor, take: Collection[int], norm: bool, last: int | None
    ) -> tuple[Tensor, list[Tensor]]:
        maps: list[Tensor] = []
        grid = (0, 0)
        for i in range(self.num_stages):
            if not hasattr(self, f"block{i + 1}") or (last is not None and i > last):
                break
            final = i + 1 == self.num_stages
            embed = getattr(self, f"patch_embed{i + 1}")
            x, grid = embed(x if i == 0 else to_map(x, grid))
            if final:
                x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
            position, grids = getattr(self, f"pos_embed{i + 1}"), (list(grid), list(embed.grid_size))
            x = self.pos_drop(x + resample_abs_pos_embed(position, *grids, int(final), "bilinear", antialias=False))
            for block in getattr(self, f"block{i + 1}"):
                x = self._call(block, x, grid)
            if i in take:
                feature = self.norm(x) if norm and final else x
                maps.append(to_map(feature[:, 1:] if final else feature, grid))
        return x, maps

    def _prune(self, last: int, prune_head: bool) -> None:
        for i in range(last + 2, self.num_stages + 1):
            for name in (f"patch_embed{i}", f"pos_embed{i}", f"block{i}"):
                delattr(self, name)
        if last + 1 < self.num_stages:
            self.register_parameter("cls_token", None)


register_variants(
    PVT,
    {
        "pvt_tiny": {"depths": (2, 2, 2, 2)},
        "pvt_small": {"depths": (3, 4, 6, 3)},
        "pvt_medium": {"depths": (3, 4, 18, 3)},
        "pvt_large": {"depths": (3, 8, 27, 3)},
    },
    out_indices=lambda arguments: tuple(range(len(arguments["depths"]))),
    first_conv="patch_embed1.proj",
    paper_ids="arXiv:2102.12122",
    paper_name="Pyramid Vision Transformer",
    origin_url="https://github.com/whai362/PVT",
)
