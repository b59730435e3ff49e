"""What the four families share: timm's interface around a trunk of tokens, one patch embedding, one attention.

A family writes its modules and a `_trunk`; classifier, features, checkpointing and pruning follow from it here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import get_device_dtype, to_2tuple, trunc_normal_
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..core.errors import VitfocusError, nearest
from .published import checkpoint_filter_fn

Grid = tuple[int, int]
Size = int | tuple[int, int]


def to_tokens(x: Tensor) -> Tensor:
    """B, C, H, W → B, H·W, C."""
    return x.flatten(2).transpose(1, 2)


def to_map(x: Tensor, grid: Grid) -> Tensor:
    """B, H·W, C → B, C, H, W."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], grid[0], grid[1])


def increasing(rate: float, depth: int) -> list[float]:
    """Drop-path rates that grow linearly with depth, from 0 to `rate`."""
    return [rate * (i / max(depth - 1, 1)) for i in range(depth)]


def heads_divide(dim: int, num_heads: int) -> int:
    """Return the width of one head; an indivisible width is refused."""
    if num_heads < 1 or dim % num_heads:
        raise VitfocusError(f"A width of {dim} does not divide into {num_heads} heads.")
    return dim // num_heads


class PatchEmbed(nn.Module):
    """Non-overlapping patches, B, C, H, W → (B, N, D), grid; pixels beyond the last whole patch are ignored."""

    def __init__(self, img_size: Size, patch_size: int, in_chans: int, embed_dim: int, norm: bool = False) -> None:
        super().__init__()
        self.patch_size: Grid = to_2tuple(patch_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)
        self.norm = nn.LayerNorm(embed_dim) if norm else nn.Identity()
        self.grid_size = self.dynamic_feat_size(to_2tuple(img_size))
        if min(self.grid_size) < 1:
            raise VitfocusError(f"An image of {to_2tuple(img_size)} pixels holds no patch of {patch_size}.")

    def dynamic_feat_size(self, img_size: Grid) -> Grid:
        """Return the token grid of an image of `img_size` (height, width)."""
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Embed the patches."""
        x = self.proj(x)
        return self.norm(to_tokens(x)), (x.shape[2], x.shape[3])


class Attention(nn.Module):
    """Self-attention with separate `q` and `kv`; above a `sr_ratio` of 1 keys and values see a strided map (PVT)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        sr_ratio: int = 1,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = heads_divide(dim, num_heads)
        self.scale = self.head_dim**-0.5
        self.sr_ratio = sr_ratio
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        if sr_ratio > 1:
            self.sr = nn.Conv2d(dim, dim, sr_ratio, sr_ratio)
            self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Attend, B, N, C → B, N, C."""
        source = self.norm(to_tokens(self.sr(to_map(x, grid)))) if self.sr_ratio > 1 else x
        heads = (x.shape[0], -1, self.num_heads, self.head_dim)
        q = self.q(x).reshape(heads).transpose(1, 2)
        k, v = (part.reshape(heads).transpose(1, 2) for part in self.kv(source).chunk(2, dim=-1))
        dropout = self.attn_drop.p if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class Backbone(nn.Module, ABC):
    """timm's conventions over a family's `_trunk`.

    A family sets `embed_dim` (the classifier's width), `feature_info`, `norm`, `head_drop` and `head`, and writes
    `_trunk` and `_finish`. Blocks are called as `block(x, grid)` with x in B, N, C, prefix tokens first.
    """

    pool_types: tuple[str, ...] = ("token", "avg", "")
    feature_info: list[dict[str, Any]]
    norm: nn.Module
    head: nn.Module

    def __init__(self, num_classes: int, in_chans: int, global_pool: str, embed_dim: int, drop_rate: float) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.embed_dim = self.num_features = self.head_hidden_size = embed_dim
        self.grad_checkpointing = False
        self._set_pool(global_pool)
        self.head_drop = nn.Dropout(drop_rate)

    @abstractmethod
    def _trunk(self, x: Tensor, take: Collection[int], norm: bool, last: int | None) -> tuple[Tensor, list[Tensor]]:
        """Run the trunk, up to feature `last` where given; return its output and the taken maps, B, C, H, W."""

    @abstractmethod
    def _finish(self, x: Tensor) -> Tensor:
        """Turn the trunk's output into what `forward_features` returns."""

    def _call(self, block: nn.Module, *args: Any) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *args)
        return block(*args)

    def _set_pool(self, global_pool: str) -> None:
        if global_pool not in self.pool_types:
            raise VitfocusError(f"No global_pool {global_pool!r}: {nearest(global_pool, map(repr, self.pool_types))}")
        self.global_pool = global_pool

    def _init_linears(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block's activations in the backward pass instead of keeping them."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """Return the final linear layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a fresh one (none for 0 classes), and the pooling where one is given."""
        if global_pool is not None:
            self._set_pool(global_pool)
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()
        self.head.to(**get_device_dtype(self)).train(self.training)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the output of `forward_features` and the features chosen from `feature_info`.

        Args:
            x: images, B, C, H, W.
            indices: the last n features for an integer, all for None, else these.
            norm: apply the final norm to the features that have its width.
            stop_early: do not run what lies above the last chosen feature; for `intermediates_only`.
            output_fmt: `NCHW` maps or `NLC` tokens, without prefix tokens either way.
            intermediates_only: return the list of features alone.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise VitfocusError(f"output_fmt is 'NCHW' or 'NLC', but {output_fmt!r} was given.")
        take, last = feature_take_indices(len(self.feature_info), indices)
        x, maps = self._trunk(x, take, norm, last if stop_early and intermediates_only else None)
        features = maps if output_fmt == "NCHW" else [to_tokens(feature) for feature in maps]
        return features if intermediates_only else (self._finish(x), features)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what the chosen features do not need; return their absolute indices."""
        take, last = feature_take_indices(len(self.feature_info), indices)
        self._prune(last, prune_head)
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    @abstractmethod
    def _prune(self, last: int, prune_head: bool) -> None:
        """Drop the modules above feature `last`."""

    def forward_features(self, x: Tensor) -> Tensor:
        """Images, B, C, H, W → normalised tokens, B, 1 + N, C, the class token first (RVT: the map B, C, H, W)."""
        return self._finish(self._trunk(x, (), False, None)[0])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the output of `forward_features` and classify it; with `pre_logits` stop before the classifier."""
        if self.global_pool:
            x = x[:, 1:].mean(dim=1) if self.global_pool == "avg" else x[:, 0]
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images, B, C, H, W → logits, B, num_classes."""
        return self.forward_head(self.forward_features(x))


def imagenet_cfgs(names: Iterable[str], first_conv: str, paper: str, title: str, origin: str, crop_pct: float) -> Any:
    """Return timm's default configurations for `names`; none has weights to download."""
    cfg = {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": first_conv,
        "classifier": "head",
        "paper_ids": paper,
        "paper_name": title,
        "origin_url": origin,
    }
    return generate_default_cfgs({name: dict(cfg) for name in names})


def build(
    cls: type, variant: str, pretrained: bool, out_indices: int | tuple[int, ...], arguments: dict[str, Any]
) -> Any:
    """Build `cls` as timm does; `out_indices` are the features that `features_only=True` gives by default."""
    return build_model_with_cfg(
        cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **arguments,
    )
