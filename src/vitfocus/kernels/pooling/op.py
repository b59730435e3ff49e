"""Token-aware Average Pooling on tokens (B, N, C), without a copy into an image.

`pool_tokens` is the whole operation as Triton kernels, including a batch norm that normalises by the batch. If the norm
is another module, `predict_hidden` and `mix_dilated` are the parts before and after it. torch.compile traces into all
three. `predict_by_product` and `mix_by_matrix` are the two parts in plain torch, for small grids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.kernels.backends import compile_together, differentiable_gradients, wants_second_derivative
from vitfocus.kernels.inputs import outside_autocast, packed
from vitfocus.kernels.pooling.reference import dilated_mean, mix_poolings

#: Up to this many patches, one product with an N×N matrix is faster on a CPU than pooling per branch.
MOST_PATCHES = 256


def pool_tokens(
    tokens: Tensor, first: Tensor, norm: tuple[Tensor, Tensor, float], second: Tensor, grid: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Pool tokens (B, N, C) with the predictor conv(first) → batch norm → conv(second).

    `norm` has the batch norm's weight, bias and eps. The patches are the last H·W tokens; others pass through. The
    second result are the mean and the biased variance of the values that were normalised, (2, K).
    """
    tokens, first = packed(tokens), packed(first)
    _prepare(tokens, first, grid, _launch_whole)
    weight, bias = map(packed, norm[:2])
    made: tuple[Tensor, Tensor] = _Pool.apply(tokens, first, weight, bias, packed(second), norm[2], *grid)
    return made


def track(buffers: tuple[Tensor, Tensor, Tensor | None], statistics: Tensor, momentum: float, count: int) -> None:
    """Update a batch norm's running mean, variance and number of batches, in place, as the norm itself would.

    `statistics` (2, K) are the mean and the biased variance of `count` values.
    """
    from vitfocus.kernels.pooling import predictor

    predictor.track(buffers, statistics, momentum, count)
    if not torch.compiler.is_compiling():  # torch does not see what a kernel writes to
        torch.autograd.graph.increment_version([one for one in buffers if one is not None])


def predict_hidden(tokens: Tensor, first: Tensor, grid: tuple[int, int]) -> Tensor:
    """The predictor's first convolution, `first` (K, C, 3, 3), on the last H·W of the tokens (B, N, C): (B, K, H, W).

    One product with a (C, 9·K) matrix; each position then sums nine of the results from its neighbours. Tokens are read
    once, without a copy. cuDNN's convolution would need them as an image and pad the output to eight channels.
    """
    tokens, first = packed(tokens), packed(first)
    _prepare(tokens, first, grid, _launch_parts)
    hidden: Tensor = _Predict.apply(tokens, first, *grid)
    return hidden.unflatten(1, grid).permute(0, 3, 1, 2)


def mix_dilated(tokens: Tensor, hidden: Tensor, second: Tensor) -> Tensor:
    """Σ_k softmax(conv(hidden))_k · dilated_mean(x, k): (B, N, C) and (B, K, H, W) to (B, N, C).

    `second` (K, K, 3, 3) are the convolution's weights. The patches are the last H·W tokens; others pass through.
    """
    flat = packed(hidden.permute(0, 2, 3, 1).flatten(1, 2))
    mixed: Tensor = _Mix.apply(packed(tokens), flat, packed(second), *hidden.shape[2:])
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


def _prepare(
    tokens: Tensor, first: Tensor, grid: tuple[int, int], launch: Callable[[Tensor, Tensor, tuple[int, int]], None]
) -> None:
    """Before the first eager launch with these sizes, start to compile all kernels, also those of a backward pass."""
    if not torch.compiler.is_compiling() and type(tokens) is Tensor:
        first = first if torch.is_grad_enabled() else first.detach()
        key = (tokens.shape, tokens.dtype, first.shape, first.dtype, grid, first.requires_grad, launch)
        compile_together(tokens.device, key, partial(launch, tokens, first, grid))


def _launch_whole(tokens: Tensor, first: Tensor, grid: tuple[int, int]) -> None:
    """Run `_Pool` forward and backward and `track`, to collect the kernels that they launch."""
    vector, second = first.new_empty(first.shape[0]), first.new_empty(first.shape[0], first.shape[0], 3, 3)
    mixed, *kept = _forward(tokens, first, (vector, vector, 1e-5), second, grid)
    batches = torch.empty((), dtype=torch.int64, device=first.device)
    track((vector.float(), vector.float(), batches), kept[0], 0.1, tokens.shape[0] * grid[0] * grid[1])
    if first.requires_grad:
        _backward(mixed, tokens, kept, first, (vector, vector, 1e-5), second, grid)


def _launch_parts(tokens: Tensor, first: Tensor, grid: tuple[int, int]) -> None:
    """Run `_Predict` and `_Mix` forward and backward, to collect the kernels that they launch."""
    from vitfocus.kernels.pooling import mixing, predictor

    branches, matrix = first.shape[0], predictor.first_matrix(first, tokens.dtype)
    rows = matrix.shape[0]
    second = first.new_empty(branches, branches, 3, 3)
    hidden, _ = predictor.gather(tokens.new_empty(*tokens.shape[:2], rows), grid, branches)
    weights, _ = predictor.weigh(hidden, second, grid)
    mixing.mix_tokens(tokens, weights, grid)
    if first.requires_grad:
        scores = mixing.score_gradients(tokens, tokens, weights, grid)
        predictor.unweigh(scores, hidden, second, grid)
        mixing.unmix_gradient(tokens, weights, grid)
        slope, _ = predictor.scatter(hidden, hidden, None, grid, tokens.shape[1], rows, tokens.dtype)
        predictor.first_gradient(slope, tokens, first)


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


def _pool_plainly(
    tokens: Tensor, first: Tensor, gamma: Tensor, beta: Tensor, second: Tensor, eps: float, grid: tuple[int, int]
) -> Tensor:
    """What `_Pool` computes, in plain torch."""
    hidden = F.conv2d(_image(tokens, grid).to(torch.float32), first.to(torch.float32), padding=1)
    hidden = F.batch_norm(hidden, None, None, gamma, beta, True, 0.0, eps)
    return _mix_by_pooling(tokens, hidden.flatten(2).mT, second, grid)


def _second_gradient(totals: Tensor, second: Tensor) -> Tensor:
    """The gradient of `second` from the totals of the kernels."""
    return totals[: second.numel()].view(second.shape).to(second.dtype)


def _forward(
    tokens: Tensor, first: Tensor, norm: tuple[Tensor, Tensor, float], second: Tensor, grid: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Mixed tokens, then what the backward pass needs: statistics, matrix, hidden values and weights."""
    from vitfocus.kernels.pooling import mixing, predictor

    matrix = predictor.first_matrix(first, tokens.dtype)
    hidden, parts = predictor.gather(tokens @ matrix.mT, grid, first.shape[0], True)
    weights, statistics = predictor.weigh(hidden, second, grid, (parts, *norm))
    return mixing.mix_tokens(tokens, weights, grid), statistics, matrix, hidden, weights


def _backward(
    gradient: Tensor, tokens: Tensor, kept: list[Tensor], first: Tensor, norm: tuple[Tensor, Tensor, float],
    second: Tensor, grid: tuple[int, int],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of tokens, of `first`, of the norm's weight and bias, and of `second`."""
    from vitfocus.kernels.pooling import mixing, predictor

    statistics, matrix, hidden, weights = kept
    rows, branches = matrix.shape[0], first.shape[0]
    scores = mixing.score_gradients(gradient, tokens, weights, grid)
    normed, sums = predictor.unweigh(scores, hidden, second, grid, (statistics, *norm))
    through = (statistics, norm[0], norm[2])
    slope, totals = predictor.scatter(normed, hidden, sums, grid, tokens.shape[1], rows, tokens.dtype, through)
    made = mixing.unmix_gradient(gradient, weights, grid, slope, matrix)
    shift, scale = totals[9 * branches**2 :].chunk(2)
    return made, predictor.first_gradient(slope, tokens, first), scale, shift, _second_gradient(totals, second)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, first: Tensor, gamma: Tensor, beta: Tensor, second: Tensor, eps: float, height: int,
        width: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        mixed, *kept = _forward(tokens, first, (gamma, beta, eps), second, (height, width))
        ctx.eps, ctx.grid = eps, (height, width)
        ctx.save_for_backward(tokens, first, gamma, beta, second, *kept)
        ctx.mark_non_differentiable(kept[0])
        return mixed, kept[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        tokens, first, gamma, beta, second, *kept = ctx.saved_tensors
        if wants_second_derivative():
            plain = partial(_pool_plainly, eps=ctx.eps, grid=ctx.grid)
            made = differentiable_gradients(plain, (tokens, first, gamma, beta, second), gradient)
        else:
            norm = (gamma, beta, ctx.eps)
            made = _backward(packed(gradient), tokens, kept, first, norm, second, ctx.grid)
        return *made, None, None, None


class _Predict(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, first: Tensor, height: int, width: int) -> Tensor:
        from vitfocus.kernels.pooling import predictor

        matrix = predictor.first_matrix(first, tokens.dtype)
        ctx.grid = (height, width)
        ctx.save_for_backward(tokens, matrix, first)
        return predictor.gather(tokens @ matrix.mT, (height, width), first.shape[0])[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        from vitfocus.kernels.pooling import predictor

        tokens, matrix, first = ctx.saved_tensors
        if wants_second_derivative():
            plain = partial(_predict_by_convolution, grid=ctx.grid)
            return *differentiable_gradients(plain, (tokens, first), gradient), None, None
        gradient = packed(gradient)
        slope, _ = predictor.scatter(gradient, gradient, None, ctx.grid, tokens.shape[1], matrix.shape[0], tokens.dtype)
        return slope @ matrix, predictor.first_gradient(slope, tokens, first), None, None


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, hidden: Tensor, second: Tensor, height: int, width: int) -> Tensor:
        from vitfocus.kernels.pooling import mixing, predictor

        weights, _ = predictor.weigh(hidden, second, (height, width))
        ctx.grid = (height, width)
        ctx.save_for_backward(tokens, hidden, second, weights)
        return mixing.mix_tokens(tokens, weights, ctx.grid)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        from vitfocus.kernels.pooling import mixing, predictor

        tokens, hidden, second, weights = ctx.saved_tensors
        if wants_second_derivative():
            plain = partial(_mix_by_pooling, grid=ctx.grid)
            return *differentiable_gradients(plain, (tokens, hidden, second), gradient), None, None
        gradient = packed(gradient)
        scores = mixing.score_gradients(gradient, tokens, weights, ctx.grid)
        made, sums = predictor.unweigh(scores, hidden, second, ctx.grid)
        back = mixing.unmix_gradient(gradient, weights, ctx.grid)
        return back, made.to(hidden.dtype), _second_gradient(sums.sum(dim=0), second), None, None
