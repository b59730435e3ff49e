"""Token-aware Average Pooling on tokens (B, N, C), without a copy into an image.

`mix_dilated` is `mix_poolings` of dilated means, softmax included, in one kernel forward and one backward
(`vitfocus::mix_dilated`). `predict_scores` is the published predictor, its convolutions written as matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def predict_scores(
    tokens: Tensor, first: Tensor, norm: Callable[[Tensor], Tensor], second: Tensor, grid: tuple[int, int]
) -> Tensor:
    """conv3×3 → norm → conv3×3 on the patches among tokens (B, N, C), the last H·W of them: scores (B, H·W, K).

    `first` (K, C, 3, 3) and `second` (K, K, 3, 3) are the convolutions' weights. The first convolution is one product
    with a (C, 9·K) matrix, whose nine results a position then adds from its neighbours: it reads the tokens once and
    where they lie, for cuDNN's would need them as an image and be padded to eight output channels.

    >>> conv, last = torch.nn.Conv2d(8, 3, 3, padding=1, bias=False), torch.nn.Conv2d(3, 3, 3, padding=1, bias=False)
    >>> image = torch.randn(2, 8, 4, 5)
    >>> scores = predict_scores(image.flatten(2).mT, conv.weight, lambda x: x, last.weight, (4, 5))
    >>> torch.allclose(scores, last(conv(image)).flatten(2).mT, atol=1e-5)
    True
    """
    height, width = grid
    batch, count, _ = tokens.shape
    branches = first.shape[0]
    matrix = _aligned(first.permute(2, 3, 0, 1).reshape(9 * branches, -1), 0)
    spread = F.linear(tokens, matrix)[:, count - height * width :, : 9 * branches]
    spread = spread.reshape(batch, height, width, 9, branches)
    padded = F.pad(spread, (0, 0, 0, 0, 1, 1, 1, 1))
    taps = [padded[:, tap // 3 : tap // 3 + height, tap % 3 : tap % 3 + width, tap] for tap in range(9)]
    hidden = norm(sum(taps[1:], taps[0]).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    padded = F.pad(hidden, (0, 0, 1, 1, 1, 1))
    near = [padded[:, tap // 3 : tap // 3 + height, tap % 3 : tap % 3 + width] for tap in range(9)]
    matrix = _aligned(_aligned(second.permute(0, 2, 3, 1).reshape(branches, 9 * branches), 0), 1)
    scores = F.linear(_aligned(torch.cat(near, dim=-1), 3), matrix)[..., :branches]
    return scores.reshape(batch, height * width, branches)


def _aligned(tensor: Tensor, axis: int) -> Tensor:
    """Zeros added to that axis up to a multiple of eight, which the fast matrix products ask for."""
    missing = -tensor.shape[axis] % 8
    if not missing:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1 - axis) + (0, missing))


def mix_dilated(tokens: Tensor, scores: Tensor, grid: tuple[int, int]) -> Tensor:
    """Σ_k softmax(scores)_k · dilated_mean(x, k) by the kernel: (B, N, C) and (B, H·W, K) to (B, N, C).

    The patches are the last H·W tokens; those before them pass through.
    """
    mixed: Tensor = _mix_dilated(tokens, scores, *grid)[0]
    return mixed


@torch.library.custom_op("vitfocus::mix_dilated", mutates_args=())
def _mix_dilated(tokens: Tensor, scores: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    from vitfocus.kernels.pooling import triton as fused

    return fused.forward(tokens, scores, (height, width), tokens.shape[1] - height * width)


@_mix_dilated.register_fake
def _(tokens: Tensor, scores: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    weights = scores.new_empty(scores.shape, dtype=torch.float32)
    return tokens.new_empty(tokens.shape), weights


@torch.library.custom_op("vitfocus::mix_dilated_backward", mutates_args=())
def _mix_dilated_backward(
    gradient: Tensor, tokens: Tensor, weights: Tensor, height: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    from vitfocus.kernels.pooling import triton as fused

    return fused.backward(gradient, tokens, weights, (height, width), tokens.shape[1] - height * width, dtype)


@_mix_dilated_backward.register_fake
def _(
    gradient: Tensor, tokens: Tensor, weights: Tensor, height: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return tokens.new_empty(tokens.shape), weights.new_empty(weights.shape, dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tokens, scores, height, width = inputs
    ctx.rest = (height, width, scores.dtype)
    ctx.save_for_backward(tokens, output[1])


def _gradient(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    made = _mix_dilated_backward(gradient, *ctx.saved_tensors, *ctx.rest)
    return (*made, None, None)


_mix_dilated.register_autograd(_gradient, setup_context=_setup)
