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

#: With at most so many keys, torch's attention and a pass for the loss take less time.
FEW_KEYS = 128
#: Up to so many keys, one program has all of a head; with more, it has a block of queries or of keys.
KEYS = 256
#: Heads of fewer channels are computed apart, as products of 16 columns have been wrong on a GPU before, and of more.
CHANNELS = (32, 64)
#: Rows and columns of a tile, warps and stages: all keys in one program, a block of queries, and a block of keys.
TILES = {"all": (32, KEYS, 8, 2), "query": (128, 64, 8, 3), "key": (64, 128, 8, 3)}
#: With blocks: as many programs as keep half of a large GPU busy.
PROGRAMS = 132


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
    """Whether the kernels take these tensors: one map per image, and programs enough to fill half the GPU."""
    if query.ndim != 4 or not query.shape == key.shape == value.shape or query.shape[2] <= FEW_KEYS:
        return False
    if (
        value.dtype != query.dtype
        or query.element_size() != 2
        or query.shape[3] % 16
        or not CHANNELS[0] <= query.shape[3] <= CHANNELS[1]
        or not options.average_heads
        or options.first >= query.shape[2]
    ):
        return False
    launch = _Launch(query, key, None, None, options)
    if launch.alone or launch.space < LARGE:
        return False
    if launch.keys <= KEYS:
        if not launch.joint:
            return False
    elif launch.maps * launch.group * _blocks(launch.keys, TILES["query"][0]) < PROGRAMS:
        return False
    return keeps_normalisers(query, key, value, options.scale) or (interpreting() and query.device.type == "cpu")


class _Attention(torch.autograd.Function):
    """Attention by torch, the loss by the Triton kernels or in plain torch, and their gradients at once.

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
        if queries.device.type == "cuda":
            out, lse = attention_with_normalisers(queries, keys, values, scale=scale)
            lse = lse.contiguous()
        else:  # in the interpreter
            out, lse = _plain_attention(queries, keys, values, scale)
        loss, *saved = launch_forward(queries, keys, None, None, lse, LossOptions(*ctx.options))
        ctx.save_for_backward(whole, *parts, out, lse, *saved)
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
            made = launch_gradients(gradient, weight, query, key, value, saved[0], saved[1], options, tuple(saved[2:]))
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
    loss, *saved = launch_forward(query, key, None, None, lse, options)
    if query.requires_grad or key.requires_grad or value.requires_grad:
        gradient = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        output = gradient.transpose(1, 2)
        launch_gradients(gradient, loss, query, key, value, output, lse, options, tuple(saved))


@on_device_of_first
def launch_gradients(
    gradient: Tensor,
    weight: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    options: LossOptions,
    saved: tuple[Tensor, ...],
) -> Tensor:
    """Gradients of queries, keys and values, (3, B, H, N, D); in memory (B, N, 3, H, D).

    From those of the output, `gradient` (B, N, H, D), contiguous, and of the loss, `weight`. The strides of what is
    made here, or comes from the gradient, must not be asked for: torch.compile would first copy the gradient.
    """
    from vitfocus.kernels.diversity import attention_gradients as kernels

    launch = _Launch(query, key, None, None, options)
    norms, average, slopes, lengths, _, _, bounds, squares, mean_map = saved
    vectors = (average, lengths, slopes, squares, bounds)
    inputs, batch, heads, count, width = launch.inputs(norms), *query.shape
    share = launch.keys / (launch.maps * launch.count * launch.group)
    of_inputs = tuple(stride for tensor in (query, key, value) for stride in tensor.stride()[:3])
    row = heads * width
    of_gradient, of_made, part = (count * row, width, row), (3 * count * row, width, 3 * row), row
    made = query.new_empty(batch, count, 3, heads, width)
    if launch.joint:
        slope = launch.gradient_pass(inputs, mean_map, *vectors, 0, launch.count)
        kernels.attention_gradient[(batch * heads,)](
            query, key, value, gradient, lse, slope, bounds, weight, made, options.scale, share, heads, count,
            options.first, *slope.shape[1:], *of_inputs, *of_gradient, part, *of_made, **_settings("all", width),
        )  # fmt: skip
        return made.permute(2, 0, 3, 1, 4)
    chunks, (mine, theirs) = launch.chunks(), (_settings(kind, width) for kind in ("query", "key"))
    inner = torch.empty_like(lse)
    queries, keys, values = made.unbind(2)
    sums: tuple[Tensor, ...] = (keys, values)
    of_sums = of_made
    if len(chunks) > 1:
        sums = torch.empty(2, batch, count, heads, width, dtype=torch.float32, device=query.device).unbind()
        of_sums = of_gradient
    for begin, end in chunks:
        slope = launch.gradient_pass(inputs, mean_map, *vectors, begin, end)
        numbers = (options.scale, share, heads, count, options.first, launch.stride, begin, end)
        blocks = _blocks(end - begin + (options.first if begin == 0 else 0), mine["BM"])
        kernels.attention_query_gradient[(batch * heads * blocks,)](
            query, key, value, output, gradient, lse, slope, bounds, weight, queries, inner, *numbers, *of_inputs,
            *output.stride()[:3], *of_gradient, *of_made, **mine,
        )  # fmt: skip
        kernels.attention_key_gradient[(batch * heads * _blocks(count, theirs["BN"]),)](
            query, key, value, gradient, lse, slope, bounds, weight, inner, *sums, *numbers, *of_inputs, *of_gradient,
            *of_sums, **theirs,
        )  # fmt: skip
        del slope  # so that the next chunk's map reuses this memory
    if len(chunks) > 1:
        keys.copy_(sums[0])
        values.copy_(sums[1])
    return made.permute(2, 0, 3, 1, 4)


def _settings(kind: str, width: int) -> dict[str, int]:
    """The compile-time arguments of a kernel."""
    rows, columns, warps, stages = TILES[kind]
    return {"D": width, "DP": padded(width), "BM": rows, "BN": columns, "num_warps": warps, "num_stages": stages}


def _blocks(number: int, size: int) -> int:
    return -(-number // size)
