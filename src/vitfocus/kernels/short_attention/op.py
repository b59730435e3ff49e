"""Attention among at most 128 tokens with its gradient, in one kernel launch each, for compiled training.

torch's own attention pads 65 tokens to 128, needs three kernels backward, and leaves three gradients that must be
copied into one for the projection of queries, keys and values. `ShortAttention` puts these kernels in its place within
a context; the diversification loss launches them with its own gradient (kernels/diversity/with_attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitfocus.kernels.backends import (
    chosen,
    differentiable_gradients,
    exporting,
    interpreting,
    on_device_of_first,
    wants_second_derivative,
)
from vitfocus.kernels.inputs import packed
from vitfocus.kernels.shared_memory import LARGE, available, padded

#: The most tokens, and the most channels of a head.
MOST_TOKENS, MOST_CHANNELS = 128, 64
#: The smallest side of a tile, and the fewest channels: products of 16 columns were wrong on a GPU.
LEAST = 32
#: The largest tile beside which a further token is a vector.
MOST_BESIDE = 64
#: Warps of a program with up to 64 tokens in a tile and beyond, forward and backward.
WARPS = {"forward": (4, 8), "backward": (4, 8)}


class Slope(NamedTuple):
    """The diversification loss's slope with respect to the maps, as its kernels leave it, and its factors.

    `values` (B, keys, rows from `first` on), padded, keys first, times `bounds` (B,), `share` and the gradient of the
    loss, `weight`.
    """

    values: Tensor
    bounds: Tensor
    weight: Tensor
    share: float
    first: int


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels can take these queries, keys and values: (B, H, N, D), alike, in half precision on a GPU.

    >>> fits(*torch.zeros(3, 1, 1, 4, 16))
    False
    """
    if query.ndim != 4 or not 0 < query.shape[2] <= MOST_TOKENS or chosen(query, key, value) != "triton":
        return False
    batch, heads, count, width = query.shape
    for one in (query, key, value):
        if one.shape != query.shape or one.dtype != query.dtype or one.stride(3) != 1 or count * one.stride(2) >= 2**31:
            return False
    if batch * heads == 0 or width % 8 or width > MOST_CHANNELS:
        return False
    on_gpu = width >= LEAST and query.dtype != torch.float32 and available(query.device) >= LARGE
    return on_gpu or interpreting()


def tile(count: int) -> tuple[int, bool]:
    """The tokens of a tile, and whether there is one more beside it.

    >>> [tile(count) for count in (1, 50, 64, 65, 66, 128)]
    [(32, False), (64, False), (64, False), (64, True), (128, False), (128, False)]
    """
    size = max(LEAST, padded(count))
    return (size // 2, True) if count == size // 2 + 1 and LEAST < size <= 2 * MOST_BESIDE else (size, False)


def short_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float, whole: Tensor | None = None) -> Tensor:
    """softmax(scale · q kᵀ) v, (B, H, N, D), of queries, keys and values (B, H, N, D) that `fits` takes.

    If they are views of a tensor `whole` (3, B, H, N, D), it gets the gradient, without a copy.
    """
    tokens = (None, query, key, value) if whole is None else (whole, None, None, None)
    mixed: Tensor = _ShortAttention.apply(*tokens, scale)
    return mixed


class _ShortAttention(torch.autograd.Function):
    """Of either `whole` (3, B, H, N, D), or queries, keys and values."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor | None, query: Tensor | None, key: Tensor | None, value: Tensor | None, scale: float
    ) -> Tensor:
        ctx.scale, ctx.is_whole = scale, whole is not None
        queries, keys, values = parts_of(whole, query, key, value)
        mixed, lse = launch_forward(queries, keys, values, scale)
        ctx.save_for_backward(whole, queries, keys, values, lse)
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole, query, key, value, lse = ctx.saved_tensors
        if wants_second_derivative():
            tokens = (whole, None, None, None) if ctx.is_whole else (None, query, key, value)
            return *differentiable_gradients(partial(_plain, scale=ctx.scale), tokens, gradient), None
        made = launch_backward(packed(gradient.transpose(1, 2)), query, key, value, lse, ctx.scale)
        return *((made, None, None, None) if ctx.is_whole else (None, *made.unbind())), None


def parts_of(whole: Tensor | None, *tokens: Tensor | None) -> tuple[Tensor, ...]:
    """Queries, keys and values."""
    return whole.unbind() if whole is not None else tuple(one for one in tokens if one is not None)


def _plain(
    whole: Tensor | None, query: Tensor | None, key: Tensor | None, value: Tensor | None, scale: float
) -> Tensor:
    """The same in plain torch, which can be differentiated twice."""
    queries, keys, values = parts_of(whole, query, key, value)
    return (queries @ keys.mT * scale).softmax(dim=-1) @ values


@on_device_of_first
def launch_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output, (B, H, N, D), in memory (B, N, H, D), and log Σ exp, (B, H, N)."""
    from vitfocus.kernels.short_attention.triton import attend_forward

    batch, heads, count, width = query.shape
    out = torch.empty(batch, count, heads, width, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, heads, count, dtype=torch.float32, device=query.device)
    attend_forward[(batch * heads,)](
        query, key, value, out, lse, scale, heads, *_strides(query, key, value), **_sizes("forward", count, width)
    )
    return out.transpose(1, 2), lse


@on_device_of_first
def launch_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, scale: float, slope: Slope | None = None
) -> Tensor:
    """Gradients of queries, keys and values, (3, B, H, N, D), in memory (B, N, 3, H, D).

    From that of the output, `gradient` (B, N, H, D), contiguous, and with `slope` also from that of the loss.
    """
    from vitfocus.kernels.short_attention.triton import attend_backward

    batch, heads, count, width = query.shape
    made = query.new_empty(batch, count, 3, heads, width)
    given = slope or Slope(lse, lse, lse, 0.0, 0)
    row = heads * width
    attend_backward[(batch * heads,)](
        gradient, query, key, value, lse, given.values, given.bounds, given.weight, made, scale, given.share, heads,
        given.first, *given.values.shape[1:], count * row, width, row, *_strides(query, key, value), row,
        3 * count * row, width, 3 * row, **_sizes("backward", count, width), HAS_SLOPE=slope is not None,
    )  # fmt: skip
    return made.permute(2, 0, 3, 1, 4)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _sizes(which: str, count: int, width: int) -> dict[str, int]:
    size, extra = tile(count)
    return {
        "N": count,
        "D": width,
        "DP": padded(width),
        "T": size,
        "EXTRA": extra,
        "num_warps": WARPS[which][int(size > MOST_BESIDE)],
    }


class ShortAttention(TorchFunctionMode):
    """Within the context, the kernels replace torch's `scaled_dot_product_attention` in compiled code if they can.

    Launched one by one from Python they would gain little. Queries, keys and values that were unbound from one tensor,
    and reach attention unchanged, are used as that tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.whole: Tensor | None = None
        self.parts: Sequence[Tensor] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            made = self._attend(*args, **kwargs)
            return func(*args, **kwargs) if made is None else made
        if func is Tensor.unflatten:  # calls super(), which torch 2.11 does not compile within a mode
            return torch.unflatten(*args, **kwargs)
        made = func(*args, **kwargs)
        if func in (Tensor.unbind, torch.unbind) and len(made) == 3 and made[0].ndim == 4:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            self.whole, self.parts = (args[0], made) if dim == 0 and args else (None, ())
        return made

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        compiled = torch.compiler.is_compiling() or interpreting()
        if not compiled or exporting() or attn_mask is not None or dropout_p or is_causal or enable_gqa:
            return None
        if query.ndim == 4 and query.dtype != value.dtype and torch.is_autocast_enabled(value.device.type):
            query, key = query.to(value.dtype), key.to(value.dtype)  # as torch's attention does: norms leave float32
        if not fits(query, key, value):
            return None
        same = len(self.parts) == 3 and query is self.parts[0] and key is self.parts[1] and value is self.parts[2]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return short_attention(query, key, value, scale=scale, whole=self.whole if same else None)
