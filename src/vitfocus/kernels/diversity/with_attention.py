"""Attention and the diversification loss of its maps as one operation, whose gradients are computed at once.

Attention's backward pass computes the same tiles of the maps as the loss's does: together they are computed once, and
the gradients of queries and keys are not added in memory. docs/kernels.md has the derivation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitfocus.kernels.attention import attention_with_normalisers, keeps_normalisers
from vitfocus.kernels.backends import (
    chosen,
    compile_together,
    differentiable_gradients,
    interpreting,
    on_device_of_first,
    wants_second_derivative,
)
from vitfocus.kernels.diversity import with_attention_chunked as in_chunks
from vitfocus.kernels.diversity.chunked import LossOptions, on_whole_maps
from vitfocus.kernels.diversity.op import _Launch, launch_forward
from vitfocus.kernels.diversity.reference import Heads, Variant
from vitfocus.kernels.inputs import packed
from vitfocus.kernels.shared_memory import LARGE, padded
from vitfocus.kernels.short_attention import op as short

#: The most keys.
KEYS = 256
#: Beyond `short.MOST_TOKENS`, heads of fewer channels are computed apart: products of 16 columns were wrong on a GPU.
LEAST_CHANNELS = 32
#: Rows of a tile, warps and stages.
ROWS, WARPS, STAGES = 32, 8, 3


def attention_with_diversity(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    first: int = 0,
    variant: Variant = "official",
    heads: Heads = "mean",
    threshold: float = 2.0,
    whole: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """softmax(scale · q kᵀ) v, (B, H, N, D), and `diversity` of the maps; None where they are computed apart.

    For tensors that the Triton kernels take, and on a CPU for few tokens. If queries, keys and values are views of a
    tensor `whole` (3, B, H, N, D), it gets the gradient, without a copy.

    >>> output, loss = attention_with_diversity(*torch.zeros(3, 1, 1, 4, 8), scale=1.0, threshold=0.5)
    >>> output.shape, loss.item()
    (torch.Size([1, 1, 4, 8]), 1.0)
    """
    options = LossOptions(scale, first, heads == "mean", variant == "paper", threshold)
    backend = chosen(query, key, value)
    fits = {"triton": _fits_kernel, "chunked": _fits_chunks}.get(backend)
    if fits is None or not fits(query, key, value, options):
        return None
    if backend == "triton" and not torch.compiler.is_compiling() and type(query) is Tensor:
        like = ("with attention", query.shape, query.dtype, query.stride(), options)
        compile_together(query.device, like, partial(_launch_all, query, key, value, options))
    tokens: tuple[Tensor | None, ...]
    if whole is not None:
        tokens = (whole.resolve_neg(), None, None, None)
    else:
        tokens = (None, query.resolve_neg(), key.resolve_neg(), value.resolve_neg())
    made: tuple[Tensor, Tensor] = _Attention.apply(*tokens, backend == "triton", *options)
    return made


def _fits_chunks(query: Tensor, key: Tensor, value: Tensor, options: LossOptions) -> bool:
    """Whether both come from the same maps on a CPU; compiled code computes attention and loss apart."""
    return not torch.compiler.is_compiling() and in_chunks.fits(query, key, value, options)


def _fits_kernel(query: Tensor, key: Tensor, value: Tensor, options: LossOptions) -> bool:
    """Whether the kernels take these tensors: one map per image, and heads enough to fill half the GPU."""
    if query.ndim != 4 or not query.shape == key.shape == value.shape or not 0 < query.shape[2] <= KEYS:
        return False
    if value.dtype != query.dtype or not options.average_heads or options.first >= query.shape[2]:
        return False
    launch = _Launch(query, key, None, None, options)
    if launch.alone or not launch.joint or launch.space < LARGE:
        return False
    if launch.whole:
        return short.fits(query, key, value)
    if query.shape[3] % 16 or query.shape[3] < LEAST_CHANNELS or query.shape[2] <= short.MOST_TOKENS:
        return False
    return keeps_normalisers(query, key, value, options.scale) or (interpreting() and query.device.type == "cpu")


class _Attention(torch.autograd.Function):
    """Attention by torch or, for few tokens, by our kernel; the loss by kernels or in plain torch; gradients at once.

    Of either `whole` (3, B, H, N, D), or queries, keys and values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor | None,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        by_kernel: bool,
        scale: float,
        first: int,
        average_heads: bool,
        paper: bool,
        threshold: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.by_kernel, ctx.options = by_kernel, (scale, first, average_heads, paper, threshold)
        parts = _parts(whole, query, key, value)  # saved, as their strides are known to torch.compile
        queries, keys, values = parts
        if not by_kernel:
            wants = any(ctx.needs_input_grad)
            out, loss, *saved = in_chunks.forward(queries, keys, values, LossOptions(*ctx.options), wants)
            ctx.save_for_backward(whole, *parts, *saved)
            return out, loss
        if queries.shape[2] <= short.MOST_TOKENS:
            out, lse = short.launch_forward(queries, keys, values, scale)
        elif queries.device.type == "cuda":
            out, lse = attention_with_normalisers(queries, keys, values, scale=scale)
            lse = lse.contiguous()
        else:  # in the interpreter
            out, lse = _plain_attention(queries, keys, values, scale)
        loss, *saved = launch_forward(queries, keys, None, None, lse, LossOptions(*ctx.options))
        ctx.save_for_backward(whole, *parts, lse, *saved)
        return out, loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, weight: Tensor) -> tuple[Any, ...]:
        whole, query, key, value, *saved = ctx.saved_tensors
        options = LossOptions(*ctx.options)
        if wants_second_derivative():
            tokens = (None, query, key, value) if whole is None else (whole, None, None, None)
            plain = partial(_plain, options=options)
            return *differentiable_gradients(plain, tokens, (gradient, weight)), *(None,) * 6
        if ctx.by_kernel:
            gradient = packed(gradient.transpose(1, 2))
            made = launch_gradients(gradient, weight, query, key, value, saved[0], options, tuple(saved[1:]))
        else:
            made = in_chunks.gradients(gradient, weight, query, key, value, options, *saved)
        return *((None, *made.unbind()) if whole is None else (made, None, None, None)), *(None,) * 6


def _parts(whole: Tensor | None, *tokens: Tensor | None) -> tuple[Tensor, ...]:
    """Queries, keys and values."""
    return whole.unbind() if whole is not None else tuple(one for one in tokens if one is not None)


def _plain(
    whole: Tensor | None, query: Tensor | None, key: Tensor | None, value: Tensor | None, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Output and loss from whole maps, which can be differentiated twice."""
    queries, keys, values = _parts(whole, query, key, value)
    out, _ = _plain_attention(queries, keys, values, options.scale)
    return out, on_whole_maps(queries, keys, None, None, options)


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and log Σ exp (B, H, N), computed in float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) * scale @ key.to(wide).mT
    return (scores.softmax(dim=-1) @ value.to(wide)).to(query.dtype), scores.logsumexp(dim=-1)


def _launch_all(query: Tensor, key: Tensor, value: Tensor, options: LossOptions) -> None:
    """Run both passes, to collect the kernels that they launch."""
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if query.shape[2] <= short.MOST_TOKENS:
        short.launch_forward(query, key, value, options.scale)
    loss, *saved = launch_forward(query, key, None, None, lse, options)
    if query.requires_grad or key.requires_grad or value.requires_grad:
        gradient = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        launch_gradients(gradient, loss, query, key, value, lse, options, tuple(saved))


@on_device_of_first
def launch_gradients(
    gradient: Tensor,
    weight: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    options: LossOptions,
    saved: tuple[Tensor, ...],
) -> Tensor:
    """Gradients of queries, keys and values, (3, B, H, N, D); in memory (B, N, 3, H, D).

    From those of the output, `gradient` (B, N, H, D), contiguous, and of the loss, `weight`. The strides of what is
    made here, or comes from the gradient, must not be asked for: torch.compile would first copy the gradient.
    """
    from vitfocus.kernels.diversity.gradients import attention_gradient

    launch = _Launch(query, key, None, None, options)
    batch, heads, count, width = query.shape
    share = launch.keys / (launch.maps * launch.count * launch.group)
    if launch.whole:
        _, bounds, slope = saved
        if slope.shape[0] == 0:
            _, _, bounds, slope = launch.whole_pass(lse, True)
        given = short.Slope(slope, bounds, weight, share, options.first)
        return short.launch_backward(gradient, query, key, value, lse, options.scale, given)
    norms, average, slopes, lengths, _, _, bounds, squares, mean_map = saved
    vectors = (average, lengths, slopes, squares, bounds)
    slope = launch.gradient_pass(launch.inputs(norms), mean_map, *vectors, 0, launch.count)
    made = query.new_empty(batch, count, 3, heads, width)
    strides = (stride for tensor in (query, key, value) for stride in tensor.stride()[:3])
    row = heads * width
    attention_gradient[(batch * heads,)](
        query, key, value, gradient, lse, slope, bounds, weight, made, options.scale, share, heads, count,
        options.first, *slope.shape[1:], *strides, count * row, width, row, row, 3 * count * row, width, 3 * row,
        D=width, DP=padded(width), BM=ROWS, BN=KEYS, AHEAD=STAGES, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    return made.permute(2, 0, 3, 1, 4)
