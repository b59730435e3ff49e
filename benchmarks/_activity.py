"""An Attention Diversification Loss that is active in models with random weights, so that its real cost is measured.

The attention of random weights is nearly uniform: nothing is above the threshold, the loss is 0 and so is its gradient.
Here the biases of queries are set so that all rows attend to the same tokens, as trained models' rows may. The
threshold is 1 in place of 2: attention that differs smoothly between tokens has a third of its entries above that, but
never more than an eighth above 2, and Token-aware Average Pooling and Context Broadcasting make tokens smooth. The work
does not depend on the threshold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Block, anatomy, unwrap
from vitfocus.attention.capture import observing
from vitfocus.kernels.attention import Observation

THRESHOLD = 1.0


def patchy_images(batch: int, height: int, width: int, tile: int = 16) -> Tensor:
    """Images (B, 3, H, W) of noise in which three of ten squares are bright, so that tokens differ."""
    draw = torch.Generator().manual_seed(0)
    bright = torch.rand(batch, 1, -(-height // tile), -(-width // tile), generator=draw) < 0.3
    bright = bright.float().repeat_interleave(tile, 2).repeat_interleave(tile, 3)[..., :height, :width]
    return 2 * bright + 0.3 * torch.randn(batch, 3, height, width, generator=draw)


@torch.no_grad()
def activate_diversity(model: nn.Module, images: Tensor, gap: float = 2.0) -> None:
    """Set each query's bias so that keys on one side of their first principal component gain `gap` in their logits.

    The model stays in its mode, so that batch norms see what they will see.
    """
    hooks = []
    for block in anatomy(unwrap(model)).trunk:
        if found := _projections(block.attention):
            linear, part, bias = found
            heads = bias.view(int(getattr(block.attention, "num_heads", 1)), -1)
            hooks.append(linear.register_forward_hook(_ShiftQueries(part, heads, gap)))
    for _ in range(2):
        model(images)
    for hook in hooks:
        hook.remove()


class _ShiftQueries:
    """A hook of the projection to keys, the `part` of its output: sets the queries' bias (H, D)."""

    def __init__(self, part: slice, bias: Tensor, gap: float) -> None:
        self.part, self.bias, self.gap = part, bias, gap

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        key = output[..., self.part].float().reshape(-1, *self.bias.shape)
        key = key[:: max(1, len(key) // 8192)]
        key = key - key.mean(dim=0)
        score = key.flatten(1) @ torch.pca_lowrank(key.flatten(1), q=1, center=False)[2][:, 0]
        score = score * score.pow(3).mean().sign()  # the smaller group is above 0
        wanted = (score > score.quantile(0.7)).float() - 0.3
        square = torch.einsum("nhd,nhe->hde", key, key)
        square += 1e-3 * square.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None] * torch.eye(key.shape[2]).to(key)
        towards = torch.linalg.solve(square, torch.einsum("nhd,n->hd", key, wanted)[..., None])[..., 0]
        self.bias.copy_(towards * (self.gap * key.shape[2] ** 0.5))


def _projections(attention: nn.Module | None) -> tuple[nn.Linear, slice, Tensor] | None:
    """The projection to keys, their part of its output, and the bias of queries; None if unknown or without a bias."""
    for query, key in (("qkv", "qkv"), ("q", "kv"), ("q_proj", "k_proj"), ("query", "key")):
        first, second = getattr(attention, query, None), getattr(attention, key, None)
        if isinstance(first, nn.Linear) and isinstance(second, nn.Linear) and first.bias is not None:
            width = len(first.bias) // (3 if query == "qkv" else 1)
            return second, slice(width, 2 * width) if query == "qkv" else slice(0, width), first.bias[:width]
    return None


@torch.no_grad()
def share_above(model: nn.Module, images: Tensor, threshold: float = THRESHOLD) -> float:
    """The share of entries of the heads' mean maps above τ/N, over all layers."""
    counts = [0.0, 0.0]

    def count(block: Block, seen: Observation) -> None:
        mean = seen.attention().mean(dim=1)
        counts[0] += float((mean > threshold / mean.shape[-1]).sum())
        counts[1] += mean.numel()

    with observing([block for block in anatomy(unwrap(model)).trunk if block.attention is not None], count):
        model(images)
    return counts[0] / max(counts[1], 1)
