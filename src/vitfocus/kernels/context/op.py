"""Context Broadcasting's arithmetic: give every token a share of the mean of all tokens.

"Scratching Visual Transformer's Back with Uniform Attention" (Hyeon-Woo et al., ICCV 2023), equation (1) and the
supplement's section 2.7. Uniform attention is a mean, so the densest interaction of all costs one reduction.

`share_mean` is the mean and the scaled form as one operation that is its own transpose. On a GPU it is one kernel each
way; in compiled code the forward half stays plain, so that it melts into the residual add behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: The axes of the tokens, by layout.
TOKEN_AXES = {"BNC": (1,), "BHWC": (1, 2), "BCHW": (2, 3)}


def token_mean(tokens: Tensor, axes: tuple[int, ...], valid: Tensor | None = None) -> Tensor:
    """The mean over the token axes, kept as axes of length one; over the valid tokens alone where a mask is given.

    `tokens` (B, N, C), (B, H, W, C) or (B, C, H, W) with their token axes; `valid` (B, N) boolean, for (B, N, C) only.

    >>> import torch
    >>> tokens = torch.tensor([[[1.0], [3.0], [100.0]]])
    >>> token_mean(tokens, (1,)).item(), token_mean(tokens, (1,), torch.tensor([[True, True, False]])).item()
    (34.66666793823242, 2.0)
    """
    if valid is None:
        return tokens.mean(dim=axes, keepdim=True)
    weight = valid.to(tokens.dtype).unsqueeze(-1)
    return (tokens * weight).sum(dim=1, keepdim=True) / weight.sum(dim=1, keepdim=True).clamp(min=1)


def broadcast_mean(tokens: Tensor, mean: Tensor) -> Tensor:
    """CB, equation (1): half the token, half the mean."""
    return 0.5 * tokens + 0.5 * mean


def broadcast_scaled(tokens: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """CB_S: the token plus the mean, scaled by one learned value a channel."""
    return tokens + scale * mean


def broadcast_gate(tokens: Tensor, class_token: Tensor) -> Tensor:
    """CB_gate, supplement 2.7: every token times (class token + 1)."""
    return tokens * (class_token + 1)


def broadcast_hybrid(tokens: Tensor, mean: Tensor, class_token: Tensor) -> Tensor:
    """CB_hybrid, supplement 2.7: every token times the class token, plus CB."""
    return tokens * class_token + broadcast_mean(tokens, mean)


def share_mean(tokens: Tensor, scale: Tensor | None = None) -> Tensor:
    """CB of (B, N, C), or with `scale` (C,) CB_S, by the kernel, with its gradient.

    Under autocast compiled code gets float32, which costs nothing where it is added to the shortcut at once.
    """
    mixed: Tensor = _ShareMean.apply(tokens, scale)
    return mixed


class _ShareMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, scale: Tensor | None) -> Tensor:
        kept = 0.5 if scale is None else 1.0
        if torch.compiler.is_compiling():
            wide = tokens.float()
            mean = wide.mean(dim=1)
            share = mean * 0.5 if scale is None else mean * scale.float()
            mixed = kept * wide + share.unsqueeze(1)
            # Not where it changes nothing: torch 2.11 then compiles a wrong gradient.
            if tokens.dtype != torch.float32 and not torch.is_autocast_enabled("cuda"):
                mixed = mixed.to(tokens.dtype)
        else:
            mixed, mean = _share_mean(tokens, scale, kept, tokens.dtype)
        ctx.dtype, ctx.kept, ctx.count = tokens.dtype, kept, tokens.shape[1]
        ctx.save_for_backward(*((mean, scale) if scale is not None else ()))
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        if not ctx.saved_tensors:
            return _share_mean(gradient, None, ctx.kept, ctx.dtype)[0], None
        mean, scale = ctx.saved_tensors
        back, means = _share_mean(gradient, scale, ctx.kept, ctx.dtype)
        return back, (means * mean).sum(dim=0).mul(ctx.count).to(scale.dtype)


@torch.library.custom_op("vitfocus::share_mean", mutates_args=())
def _share_mean(tokens: Tensor, scale: Tensor | None, kept: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """kept · x + scale · mean, or (1 − kept) · mean, and the means (B, C)."""
    from vitfocus.kernels.context import triton as fused

    return fused.share_mean(tokens, scale, kept, dtype)


@_share_mean.register_fake
def _(tokens: Tensor, scale: Tensor | None, kept: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, _, channels = tokens.shape
    means = tokens.new_empty((batch, channels), dtype=torch.float32)
    return torch.empty_like(tokens, dtype=dtype).contiguous(), means
