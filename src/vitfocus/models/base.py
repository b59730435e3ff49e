"""What the four families share: timm's interface around a stack of blocks, and loading published checkpoints.

A family writes its modules and `_run_blocks`; classifier, features, checkpointing and pruning are here. Modules have
the names of the published checkpoints.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import DropPath, Mlp, get_device_dtype, resample_abs_pos_embed, to_2tuple, trunc_normal_
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.modules import unnest_checkpoint

Grid = tuple[int, int]
Size = int | tuple[int, int]


def to_tokens(x: Tensor) -> Tensor:
    """B, C, H, W → B, H·W, C."""
    return x.flatten(2).transpose(1, 2)


def tokens_and_grid(x: Tensor) -> tuple[Tensor, Grid]:
    """B, C, H, W → (B, H·W, C), grid."""
    return to_tokens(x), (x.shape[2], x.shape[3])


def to_map(x: Tensor, grid: Grid) -> Tensor:
    """B, H·W, C → B, C, H, W."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], grid[0], grid[1])


def head_width(dim: int, num_heads: int) -> int:
    """The width of one head; raises an error if `num_heads` does not divide `dim`."""
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
        x, grid = tokens_and_grid(self.proj(x))
        return self.norm(x), grid


class ReducedAttention(nn.Module):
    """Self-attention with separate `q` and `kv`; with a `sr_ratio` above 1, keys and values see a strided map (PVT)."""

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
        self.head_dim = head_width(dim, num_heads)
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


class TokenMlp(Mlp):
    """timm's MLP, called with the token grid like every other part of a block."""

    def forward(self, x: Tensor, grid: Grid | None = None) -> Tensor:
        return super().forward(x)


class TransformerBlock(nn.Module):
    """A pre-norm transformer block of an attention and an MLP, both called with the token grid."""

    def __init__(self, dim: int, attn: nn.Module, mlp: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = mlp
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Process tokens, B, N, C → B, N, C."""
        x = x + self.drop_path1(self.attn(self.norm1(x), grid))
        return x + self.drop_path2(self.mlp(self.norm2(x), grid))


class Backbone(nn.Module, ABC):
    """timm's conventions around the blocks of a family.

    A family builds its blocks, calls `_add_classifier`, sets `feature_info`, and writes `_run_blocks` and `_finalize`.
    Blocks are called as `block(x, grid)` with x in B, N, C, prefix tokens first.
    """

    pool_types: tuple[str, ...] = ("token", "avg", "")
    feature_info: list[dict[str, Any]]
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module

    def __init__(
        self,
        img_size: Size,
        num_classes: int,
        in_chans: int,
        global_pool: str,
        embed_dim: int,
        drop_rate: float,
        pos_drop_rate: float,
    ) -> None:
        super().__init__()
        self.img_size: Grid = to_2tuple(img_size)
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.embed_dim = self.num_features = self.head_hidden_size = embed_dim
        self.grad_checkpointing = False
        self._set_pool(global_pool)
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.head_drop = nn.Dropout(drop_rate)

    @abstractmethod
    def _run_blocks(
        self, x: Tensor, take: Collection[int], norm: bool, last: int | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run stem and blocks, up to feature `last` if given; return the output and the taken maps, B, C, H, W."""

    def _finalize(self, x: Tensor) -> Tensor:
        """Turn the output of the last block into what `forward_features` returns."""
        return self.norm(x)

    def _call(self, block: nn.Module, *args: Any) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *args)
        return block(*args)

    def _run_stack(
        self,
        x: Tensor,
        grid: Grid,
        take: Collection[int],
        norm: bool,
        last: int | None,
        prefix: int = 0,
        first: int = 0,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run `self.blocks` on one grid, the first being feature `first`; maps leave out the `prefix` tokens."""
        maps = []
        for index, block in enumerate(self.blocks, start=first):
            if last is not None and index > last:
                break
            x = self._call(block, x, grid)
            if index in take:
                maps.append(to_map((self.norm(x) if norm else x)[:, prefix:], grid))
        return x, maps

    def _set_pool(self, global_pool: str) -> None:
        if global_pool not in self.pool_types:
            raise VitfocusError(f"No global_pool {global_pool!r}: {nearest(global_pool, map(repr, self.pool_types))}")
        self.global_pool = global_pool

    def _new_head(self) -> nn.Module:
        return nn.Linear(self.num_features, self.num_classes) if self.num_classes > 0 else nn.Identity()

    def _add_classifier(self) -> None:
        """Add the final norm and the classifier, and initialise all linear layers."""
        self.norm = nn.LayerNorm(self.num_features, eps=1e-6)
        self.head = self._new_head()
        initialise(self, nn.Linear)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block's activations in the backward pass instead of keeping them."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one (none for 0 classes), and the pooling if one is given."""
        if global_pool is not None:
            self._set_pool(global_pool)
        self.num_classes = num_classes
        self.head = self._new_head().to(**get_device_dtype(self)).train(self.training)

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
            stop_early: do not run the blocks after the last chosen feature; for `intermediates_only`.
            output_fmt: `NCHW` maps or `NLC` tokens, without prefix tokens either way.
            intermediates_only: return the list of features alone.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise VitfocusError(f"output_fmt is 'NCHW' or 'NLC', but {output_fmt!r} was given.")
        take, last = feature_take_indices(len(self.feature_info), indices)
        x, maps = self._run_blocks(x, take, norm, last if stop_early and intermediates_only else None)
        features = maps if output_fmt == "NCHW" else [to_tokens(feature) for feature in maps]
        return features if intermediates_only else (self._finalize(x), features)

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

    def _prune(self, last: int, prune_head: bool) -> None:
        """Remove the modules after feature `last`."""
        self.blocks = self.blocks[: last + 1]

    def forward_features(self, x: Tensor) -> Tensor:
        """Images, B, C, H, W → normalised tokens, B, 1 + N, C, the class token first (RVT: the map B, C, H, W)."""
        return self._finalize(self._run_blocks(x, (), False, None)[0])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the output of `forward_features` and classify it; with `pre_logits` stop before the classifier."""
        if self.global_pool:
            x = x[:, 1:].mean(dim=1) if self.global_pool == "avg" else x[:, 0]
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images, B, C, H, W → logits, B, num_classes."""
        return self.forward_head(self.forward_features(x))


def initialise(model: nn.Module, kind: type[nn.Linear] | type[nn.Conv2d]) -> None:
    """Initialise all layers of a kind: weights from a truncated normal distribution, biases with zeros."""
    for module in model.modules():
        if isinstance(module, kind):
            trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def register_variants(
    cls: type[Backbone],
    variants: Mapping[str, Mapping[str, Any]],
    out_indices: Callable[[Mapping[str, Any]], int | tuple[int, ...]],
    **cfg: Any,
) -> None:
    """Register a family's sizes with timm: constructor arguments by name; none has weights to download.

    `out_indices(arguments)` are the features that `features_only=True` gives by default, `cfg` the entries of timm's
    default configuration that they share.
    """
    module: Any = sys.modules[cls.__module__]
    image = {"num_classes": 1000, "input_size": (3, 224, 224), "crop_pct": 0.875, "interpolation": "bicubic"}
    cfg = image | {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD, "classifier": "head"} | cfg
    module.default_cfgs = getattr(module, "default_cfgs", {}) | generate_default_cfgs({n: dict(cfg) for n in variants})

    def entrypoint(name: str) -> Callable[..., Any]:
        def create(pretrained: bool = False, **kwargs: Any) -> Any:
            arguments = {**variants[name], **kwargs}
            features = {"out_indices": out_indices(arguments), "feature_cls": "getter"}
            return build_model_with_cfg(
                cls, name, pretrained, pretrained_filter_fn=checkpoint_filter_fn, feature_cfg=features, **arguments
            )

        create.__name__, create.__module__ = name, cls.__module__
        return create

    for name in variants:
        setattr(module, name, register_model(entrypoint(name)))


class Loaded(NamedTuple):
    """The names that `load_published` filled, those missing from the checkpoint, and those unknown to the model."""

    loaded: list[str]
    missing: list[str]
    unexpected: list[str]


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Turn a published checkpoint into a state dict for `model`; what depends on the token grid is resampled to it."""
    state = unnest_checkpoint(state_dict, model.state_dict().keys())
    resample = getattr(model, "resample_published", None)
    return state if resample is None else resample(state)


def load_published(model: nn.Module, state_dict: Mapping[str, Any]) -> Loaded:
    """Load a state dict in the published layout of names into `model`, treated or not.

    The dict may be nested (`state_dict`, `model`, `state_dict_ema`) and prefixed (`module.`). Nothing is loaded unless
    every shape fits.

    >>> import torch
    >>> from vitfocus.models import RVT
    >>> model = RVT(img_size=32, base_dims=(8,), depths=(1,), heads=(2,), num_classes=3)
    >>> report = load_published(model, {"model": {"module.head.bias": torch.ones(3), "module.extra": torch.ones(3)}})
    >>> report.loaded, report.unexpected, len(report.missing)
    (['head.bias'], ['extra'], 37)
    """
    state = checkpoint_filter_fn(state_dict, model)
    current = model.state_dict()
    fitting = {name: value for name, value in state.items() if name in current and isinstance(value, Tensor)}
    misfits = [name for name, value in fitting.items() if value.shape != current[name].shape]
    if misfits:
        name = misfits[0]
        others = f" (and {len(misfits) - 1} more tensors differ)" if len(misfits) > 1 else ""
        raise VitfocusError(
            f"{name} has shape {tuple(fitting[name].shape)} in the checkpoint but {tuple(current[name].shape)} in the "
            f"model{others}: build the model with the checkpoint's sizes and num_classes; nothing was loaded."
        )
    missing = model.load_state_dict(fitting, strict=False).missing_keys
    return Loaded(list(fitting), list(missing), [name for name in state if name not in fitting])


def fit_position(position: Any, grid: tuple[int, int], prefix_tokens: int = 0, interpolation: str = "bicubic") -> Any:
    """Resample a position embedding `1, prefix + N, C` made for a square grid to `grid`; anything else passes through.

    >>> import torch
    >>> fit_position(torch.zeros(1, 1 + 16, 8), (2, 6), prefix_tokens=1).shape
    torch.Size([1, 13, 8])
    """
    if not isinstance(position, Tensor) or position.ndim != 3 or position.shape[1] == grid[0] * grid[1] + prefix_tokens:
        return position
    side = math.isqrt(max(position.shape[1] - prefix_tokens, 0))
    if side < 1 or side * side + prefix_tokens != position.shape[1]:
        return position
    smooth = interpolation == "bicubic"
    return resample_abs_pos_embed(position, list(grid), [side, side], prefix_tokens, interpolation, antialias=smooth)


def resize_pair_map(pairs: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resample a map over pairs of tokens, `H, N, N`, from one token grid to another: keys first, then queries.

    >>> import torch
    >>> resize_pair_map(torch.ones(3, 4, 4), (2, 2), (3, 4)).shape
    torch.Size([3, 12, 12])
    """
    for _ in range(2):
        rows = pairs.reshape(pairs.shape[0], pairs.shape[1], old[0], old[1])
        rows = nn.functional.interpolate(rows, size=new, mode="bilinear", align_corners=False)
        pairs = rows.flatten(2).transpose(1, 2)
    return pairs
