"""Token-aware Average Pooling on tokens (B, N, C), without a copy into an image.

`predict_hidden` and `mix_dilated` are the parts before and after the predictor's norm, as Triton kernels;
torch.compile traces into both. `predict_by_product` and `mix_by_matrix` are the same in plain torch, for small grids.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.kernels.backends import (
    compile_together,
    differentiable_gradients,
    outside_autocast,
    wants_second_derivative,
)
from vitfocus.kernels.pooling.reference import dilated_mean, mix_poolings

#: Up to this many patches, one product with an N×N matrix is faster on a CPU than pooling per branch.
MOST_PATCHES = 256


def predict_hidden(tokens: Tensor, first: Tensor, grid: tuple[int, int]) -> Tensor:
    """The predictor's first convolution, `first` (K, C, 3, 3), on the last H·W of the tokens (B, N, C): (B, K, H, W).

    One product with a (C, 9·K) matrix; each position then sums nine of the results from its neighbours. Tokens are read
    once, without a copy. cuDNN's convolution would need them as an image and pad the output to eight channels.
    """
    tokens = tokens.contiguous()
    if not torch.compiler.is_compiling() and type(tokens) is Tensor:
        key = (tokens.shape, tokens.dtype, first.shape, first.dtype, grid, first.requires_grad)
        compile_together(tokens.device, key, partial(_launch_all, tokens, first, grid))
    hidden: Tensor = _Predict.apply(tokens, first, *grid)
    return hidden.unflatten(1, grid).permute(0, 3, 1, 2)


def mix_dilated(tokens: Tensor, hidden: Tensor, second: Tensor) -> Tensor:
    """Σ_k softmax(conv(hidden))_k · dilated_mean(x, k): (B, N, C) and (B, K, H, W) to (B, N, C).

    `second` (K, K, 3, 3) are the convolution's weights. The patches are the last H·W tokens; others pass through.
    """
    flat = hidden.permute(0, 2, 3, 1).flatten(1, 2).contiguous()
    mixed: Tensor = _Mix.apply(tokens.contiguous(), flat, second.contiguous(), *hidden.shape[2:])
    return mixed


def predict_by_product(tokens: Tensor, first: Tensor, grid: tuple[int, int]) -> Tensor:
    """`predict_hidden` in plain torch: one product, whose nine results `fold` adds up at each position.

    >>> tokens, first = torch.randn(2, 1 + 12, 5), torch.randn(3, 5, 3, 3)
    >>> image = tokens[:, 1:].mT.unflatten(2, (3, 4))
    >>> torch.allclose(predict_by_product(tokens, first, (3, 4)), F.conv2d(image, first, padding=1), atol=1e-5)
    True
    """
    matrix = first.flip(2, 3).permute(0, 2, 3, 1).flatten(0, 2)
    spread = F.linear(tokens, matrix)[:, tokens.shape[1] - grid[0] * grid[1] :]
    return F.fold(spread.mT, grid, 3, padding=1)


def mix_by_matrix(tokens: Tensor, weights: Tensor) -> Tensor:
    """Σ_k w_k · dilated_mean(x, k) in plain torch, on a CPU: tokens (B, N, C), weights (B, K, H, W) to (B, N, C).

    One product with the (H·W, H·W) matrix of mixing coefficients, which is linear in the weights.
    """
    height, width = weights.shape[2:]
    wide = torch.promote_types(weights.dtype, torch.float32)  # 1/9 is inaccurate in half precision
    size = (weights.shape[1], height, width, wide)
    # Traced code must neither use cached tensors nor cache its own.
    traced = torch.compiler.is_compiling() or type(weights) is not Tensor
    shares = (_shares if traced else _kept_shares)(*size)
    prefix = tokens.shape[1] - height * width
    with outside_autocast(tokens.device):
        matrix = torch.bmm(weights.to(wide).flatten(2).permute(2, 0, 1), shares).transpose(0, 1)
        mixed = torch.bmm(matrix.to(tokens.dtype), tokens[:, prefix:])
    return torch.cat((tokens[:, :prefix], mixed), dim=1) if prefix else mixed


def _launch_all(tokens: Tensor, first: Tensor, grid: tuple[int, int]) -> None:
    """Run both functions forward and backward, to collect the kernels that they launch."""
    from vitfocus.kernels.pooling import triton as fused

    branches = first.shape[0]
    rows = _matrix_rows(branches)
    second = first.new_empty(branches, branches, 3, 3)
    hidden = fused.gather(tokens.new_empty(*tokens.shape[:2], rows), grid, branches)
    _, weights = fused.forward(tokens, hidden, second, grid)
    if first.requires_grad:
        fused.backward(tokens, tokens, hidden, second, weights, grid)
        fused.scatter(hidden, grid, tokens.shape[1], rows, tokens.dtype)


def _matrix_rows(branches: int) -> int:
    """Values that a token passes to its neighbours, padded to a multiple of eight for fast matrix products."""
    return -(-9 * branches // 8) * 8


def _shares(branches: int, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """(H·W, K, H·W): the coefficient of patch j in patch i if branch k has weight 1."""
    row = torch.arange(height, device="cpu").repeat_interleave(width)
    column = torch.arange(width, device="cpu").repeat(height)
    down, across = (row[:, None] - row).abs(), (column[:, None] - column).abs()
    distance = torch.maximum(down, across)
    straight = (torch.minimum(down, across) == 0) | (down == across)
    taps = [((distance == 0) | ((distance == k) & straight)).to(dtype) / 9 for k in range(1, branches)]
    return torch.stack([(distance == 0).to(dtype), *taps], dim=1)


@lru_cache(maxsize=16)
def _kept_shares(*size: Any) -> Tensor:
    with torch.inference_mode(False):
        return _shares(*size)


def _image(flat: Tensor, grid: tuple[int, int]) -> Tensor:
    """The last H·W of (B, N, C) as an image, (B, C, H, W)."""
    return flat[:, flat.shape[1] - grid[0] * grid[1] :].mT.unflatten(2, grid)


def _predict_by_convolution(tokens: Tensor, first: Tensor, grid: tuple[int, int]) -> Tensor:
    """What `_Predict` computes, in plain torch."""
    hidden = F.conv2d(_image(tokens, grid).to(torch.float32), first.to(torch.float32), padding=1)
    return hidden.flatten(2).mT


def _mix_by_pooling(tokens: Tensor, hidden: Tensor, second: Tensor, grid: tuple[int, int]) -> Tensor:
    """What `_Mix` computes, in plain torch."""
    weights = F.conv2d(_image(hidden, grid).to(torch.float32), second.to(torch.float32), padding=1).softmax(dim=1)
    mixed = mix_poolings(_image(tokens, grid), weights, dilated_mean).flatten(2).mT
    return torch.cat((tokens[:, : tokens.shape[1] - grid[0] * grid[1]], mixed.to(tokens.dtype)), dim=1)


class _Predict(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, first: Tensor, height: int, width: int) -> Tensor:
        from vitfocus.kernels.pooling import triton as fused

        branches, channels = first.shape[:2]
        matrix = tokens.new_zeros(_matrix_rows(branches), channels)
        matrix[: 9 * branches].view(3, 3, branches, channels).copy_(first.permute(2, 3, 0, 1))
        ctx.grid = (height, width)
        ctx.save_for_backward(tokens, matrix, first)
        return fused.gather(tokens @ matrix.mT, (height, width), branches)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        from vitfocus.kernels.pooling import triton as fused

        tokens, matrix, first = ctx.saved_tensors
        if wants_second_derivative():
            plain = partial(_predict_by_convolution, grid=ctx.grid)
            return *differentiable_gradients(plain, (tokens, first), gradient), None, None
        branches, (rows, channels) = gradient.shape[2], matrix.shape
        slope = fused.scatter(gradient.contiguous(), ctx.grid, tokens.shape[1], rows, tokens.dtype)
        weights = (slope.flatten(0, 1).mT @ tokens.flatten(0, 1))[: 9 * branches]
        weights = weights.view(3, 3, branches, channels).permute(2, 3, 0, 1).to(first.dtype)
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
        if wants_second_derivative():
            plain = partial(_mix_by_pooling, grid=ctx.grid)
            return *differentiable_gradients(plain, (tokens, hidden, second), gradient), None, None
        made = fused.backward(gradient.contiguous(), tokens, hidden, second, weights, ctx.grid)
        return made[0], made[1].to(hidden.dtype), made[2].to(second.dtype), None, None
