"""Context Broadcasting with its gradient.

`share_mean` covers the mean and the scaled form; the operation is its own transpose. On a GPU it is one kernel launch
forward and one backward. Compiled code computes the forward pass in plain torch, so that it fuses with the residual
addition that follows, and traces into the kernel of the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.kernels.backends import wants_second_derivative


def share_mean(tokens: Tensor, scale: Tensor | None = None) -> Tensor:
    """CB of (B, N, C), or with `scale` (C,) CB_S, by the kernel, with its gradient.

    Under autocast, compiled code returns float32, which is free where it fuses with the residual addition.
    """
    mixed: Tensor = _ShareMean.apply(tokens, scale)
    return mixed


class _ShareMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, scale: Tensor | None) -> Tensor:
        from vitfocus.kernels.context import triton as fused

        kept = 0.5 if scale is None else 1.0
        if torch.compiler.is_compiling():
            wide = tokens.float()
            mean = wide.mean(dim=1)
            share = mean * 0.5 if scale is None else mean * scale.float()
            mixed = kept * wide + share.unsqueeze(1)
            # Cast only if the dtype changes: torch 2.11 compiles a wrong gradient for a no-op cast.
            if tokens.dtype != torch.float32 and not torch.is_autocast_enabled("cuda"):
                mixed = mixed.to(tokens.dtype)
        else:
            mixed, mean = fused.share_mean(tokens, scale, kept, tokens.dtype)
        ctx.dtype, ctx.kept, ctx.count = tokens.dtype, kept, tokens.shape[1]
        ctx.save_for_backward(*((mean, scale) if scale is not None else ()))
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        from vitfocus.kernels.context import triton as fused

        if wants_second_derivative():
            if ctx.saved_tensors:  # a second derivative needs the tokens, which are not saved
                raise VitfocusError("The kernel of CB_S has no second derivative: use backend('chunked').")
            return share_mean(gradient).to(ctx.dtype), None
        if not ctx.saved_tensors:
            return fused.share_mean(gradient, None, ctx.kept, ctx.dtype)[0], None
        mean, scale = ctx.saved_tensors
        back, means = fused.share_mean(gradient, scale, ctx.kept, ctx.dtype)
        return back, (means * mean).sum(dim=0).mul(ctx.count).to(scale.dtype)
