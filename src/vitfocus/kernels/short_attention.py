"""Attention among at most 128 tokens with its gradient, in one kernel launch each, for compiled training.

torch's own attention is the reference. For 65 tokens it works on tiles of 128, needs several kernels backward, and
leaves three gradients that must be copied into one for the projection of queries, keys and values. `takes` decides when
the kernels are used; within `ShortAttention` they replace torch's attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

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
from vitfocus.kernels.shared_memory import padded

#: The most tokens for which the kernels are used, up to 128; 0 turns them off.
MOST_TOKENS = 0
#: Warps of a program by the side of its tile, forward and backward; smaller tiles as 64.
WARPS = {64: (4, 4), 128: (8, 8)}


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these queries, keys and values (B, H, N, D) instead of torch's attention.

    They are for compiled code on a GPU and half precision: launched one by one from Python they would gain nothing.

    >>> takes(*torch.zeros(3, 1, 1, 4, 16))  # not on a CPU
    False
    """
    if query.ndim != 4 or not 0 < query.shape[2] <= MOST_TOKENS or exporting():
        return False
    if not (torch.compiler.is_compiling() or interpreting()) or chosen(query, key, value) != "triton":
        return False
    batch, heads, count, width = query.shape
    alike = all(
        one.shape == query.shape and one.dtype == query.dtype and one.stride(3) == 1 and count * one.stride(2) < 2**31
        for one in (query, key, value)
    )
    if not alike or batch * heads == 0 or width % 16 or width > 128:
        return False
    return interpreting() or (query.dtype != torch.float32 and _measured(query.device))


@torch.compiler.assume_constant_result
def _measured(device: torch.device) -> bool:
    """Whether this is a GPU of compute capability 9.0, where the kernels were compared with torch's."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def tile(count: int) -> tuple[int, bool]:
    """The side of the tile for this many tokens, a power of two, and whether one token is kept apart.

    >>> [tile(count) for count in (1, 50, 64, 65, 81, 128)]
    [(16, False), (64, False), (64, False), (64, True), (128, False), (128, False)]
    """
    plus = count > 16 and padded(count - 1) == count - 1
    return padded(count - plus), plus


def short_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ) v, (B, H, N, D), and log Σ exp, (B, H, N), which has no gradient.

    All three are (B, H, N, D), as `takes` says.
    """
    mixed, lse = _Apart.apply(query, key, value, scale)
    return mixed.transpose(1, 2), lse.detach()


def packed_attention(packed: Tensor, *, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v, (B, H, N, D), from queries, keys and values as one tensor (3, B, H, N, D).

    Their gradient has the same layout, so that no copy is needed if one projection computed all three.
    """
    mixed: Tensor = _Packed.apply(packed, scale)
    return mixed.transpose(1, 2)


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.scale = scale
        mixed, lse = launch_forward(query, key, value, scale)
        ctx.save_for_backward(query, key, value, lse)
        return mixed, lse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, lse = ctx.saved_tensors
        if wants_second_derivative():
            return *differentiable_gradients(partial(_plain, scale=ctx.scale), (query, key, value), gradient), None
        batch, heads, count, width = query.shape
        made = torch.empty(batch, count, 3, heads, width, dtype=query.dtype, device=query.device)
        made = made.permute(2, 0, 3, 1, 4)
        launch_backward(query, key, value, gradient, lse, made, ctx.scale)
        return *made.unbind(), None


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        mixed, lse = launch_forward(packed[0], packed[1], packed[2], scale)
        ctx.save_for_backward(packed, lse)
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        packed, lse = ctx.saved_tensors
        if wants_second_derivative():
            return differentiable_gradients(partial(_plain_packed, scale=ctx.scale), (packed,), gradient)[0], None
        made = torch.empty_like(packed)
        launch_backward(packed[0], packed[1], packed[2], gradient, lse, made, ctx.scale)
        return made, None


def _plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The same in plain torch, (B, N, H, D)."""
    return ((query @ key.mT * scale).softmax(dim=-1) @ value).transpose(1, 2)


def _plain_packed(packed: Tensor, scale: float) -> Tensor:
    return _plain(packed[0], packed[1], packed[2], scale)


@on_device_of_first
def launch_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output (B, N, H, D) and log Σ exp (B, H, N)."""
    from vitfocus.kernels import short_attention_triton as kernels

    batch, heads, count, width = query.shape
    out = torch.empty(batch, count, heads, width, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, heads, count, dtype=torch.float32, device=query.device)
    kernels.attend_forward[(batch * heads,)](
        query, key, value, out, lse, scale, heads, *_strides(query, key, value), **_sizes(count, width, 0)
    )
    return out, lse


@on_device_of_first
def launch_backward(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, lse: Tensor, out: Tensor, scale: float
) -> None:
    """Write the gradients of queries, keys and values to `out` (3, B, H, N, D), from the output's (B, N, H, D)."""
    from vitfocus.kernels import short_attention_triton as kernels

    batch, heads, count, width = query.shape
    gradient = (gradient if gradient.stride(3) == 1 else gradient.contiguous()).transpose(1, 2)
    kernels.attend_backward[(batch * heads,)](
        query, key, value, gradient, lse, out, scale, heads, *_strides(query, key, value, gradient),
        *out.stride()[:4], **_sizes(count, width, 1),
    )  # fmt: skip


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _sizes(count: int, width: int, direction: int) -> dict[str, int | bool]:
    side, plus = tile(count)
    warps = WARPS[max(64, side)][direction]
    return {"N": count, "D": width, "DP": padded(width), "T": side, "PLUS": plus, "num_warps": warps}


class ShortAttention(TorchFunctionMode):
    """Within the context, the kernels replace torch's `scaled_dot_product_attention` wherever they can.

    Queries, keys and values that were unbound from one tensor, and reach attention unchanged, are used as that tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed: Tensor | None = None
        self.parts: Sequence[Tensor] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            made = self._attend(*args, **kwargs)
            return func(*args, **kwargs) if made is None else made
        made = func(*args, **kwargs)
        if func in (Tensor.unbind, torch.unbind) and len(made) == 3 and made[0].ndim == 4:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            self.packed, self.parts = (args[0], made) if dim == 0 and args else (None, ())
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
        if attn_mask is not None or dropout_p or is_causal or enable_gqa or query.ndim != 4:
            return None
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if query.dtype != value.dtype and torch.is_autocast_enabled(value.device.type):
            query, key = query.to(value.dtype), key.to(value.dtype)  # as torch's attention does: norms return float32
        if not takes(query, key, value):
            return None
        same = len(self.parts) == 3 and query is self.parts[0] and key is self.parts[1] and value is self.parts[2]
        if same and self.packed is not None:
            return packed_attention(self.packed, scale=scale)
        return short_attention(query, key, value, scale=scale)[0]
