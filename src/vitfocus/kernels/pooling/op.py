"""Token-aware Average Pooling on tokens (B, N, C), without a copy into an image, by Triton kernels.

`predict_hidden` and `mix_dilated` are what comes before and after the predictor's norm. torch.compile traces into both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def predict_hidden(tokens: Tensor, first: Tensor, grid: tuple[int, int]) -> Tensor:
    """The predictor's first convolution, `first` (K, C, 3, 3), on the last H·W of the tokens (B, N, C): (B, K, H, W).

    It is one product with a (C, 9·K) matrix, whose nine results each position then adds from its neighbours: the tokens
    are read once and where they lie. cuDNN's would need them as an image, and be padded to eight output channels.
    """
    hidden: Tensor = _Predict.apply(tokens.contiguous(), first, *grid)
    return hidden.unflatten(1, grid).permute(0, 3, 1, 2)


def mix_dilated(tokens: Tensor, hidden: Tensor, second: Tensor) -> Tensor:
    """Σ_k softmax(conv(hidden))_k · dilated_mean(x, k): (B, N, C) and (B, K, H, W) to (B, N, C).

    `second` (K, K, 3, 3) are the convolution's weights. The patches are the last H·W tokens; those before pass through.
    """
    flat = hidden.permute(0, 2, 3, 1).flatten(1, 2).contiguous()
    mixed: Tensor = _Mix.apply(tokens.contiguous(), flat, second.contiguous(), *hidden.shape[2:])
    return mixed


class _Predict(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, first: Tensor, height: int, width: int) -> Tensor:
        from vitfocus.kernels.pooling import triton as fused

        branches, channels = first.shape[:2]
        # Rounded up to a multiple of eight, which the fast matrix products ask for.
        matrix = tokens.new_zeros(-(-9 * branches // 8) * 8, channels)
        matrix[: 9 * branches].view(3, 3, branches, channels).copy_(first.permute(2, 3, 0, 1))
        ctx.grid, ctx.dtype = (height, width), first.dtype
        ctx.save_for_backward(tokens, matrix)
        return fused.gather(tokens @ matrix.mT, (height, width), branches)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        from vitfocus.kernels.pooling import triton as fused

        tokens, matrix = ctx.saved_tensors
        branches, (rows, channels) = gradient.shape[2], matrix.shape
        slope = fused.scatter(gradient.contiguous(), ctx.grid, tokens.shape[1], rows, tokens.dtype)
        weights = (slope.flatten(0, 1).mT @ tokens.flatten(0, 1))[: 9 * branches]
        weights = weights.view(3, 3, branches, channels).permute(2, 3, 0, 1).to(ctx.dtype)
        return slope @ matrix, weights, None, None


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, hidden: Tensor, second: Tensor, height: int, width: int) -> Tensor:
        from vitfocus.kernels.pooling import triton as fused

        mixed, weights = fused.forward(tokens, hidden, second, (height, width))
        ctx.grid = (height, width)
        ctx.save_for_backward(tokens, hidden, second, weights)
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        from vitfocus.kernels.pooling import triton as fused

        tokens, hidden, second, weights = ctx.saved_tensors
        made = fused.backward(gradient.contiguous(), tokens, hidden, second, weights, ctx.grid)
        return made[0], made[1].to(hidden.dtype), made[2].to(second.dtype), None, None
