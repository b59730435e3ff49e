"""Tensors in the form that the kernels take, or a sentence about why they do not fit."""

from __future__ import annotations

import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError


def readable(tokens: Tensor) -> Tensor:
    """Queries or keys as the kernels read them: the channels of a token side by side, and no lazy negation."""
    tokens = tokens.resolve_neg()
    return tokens if tokens.stride(3) == 1 else tokens.contiguous()


def packed(tensor: Tensor) -> Tensor:
    """The tensor as kernels read it that take no strides: contiguous, and no lazy negation."""
    return tensor.resolve_neg().contiguous()


def with_four_axes(bias: Tensor | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    """An additive bias with leading axes of length one, so that it has the axes of maps (B, H, Q, K).

    >>> with_four_axes(torch.zeros(5, 7), (2, 3, 5, 7)).shape
    torch.Size([1, 1, 5, 7])
    """
    if bias is None:
        return None
    if bias.ndim > 4 or any(one not in (1, other) for one, other in zip(bias.shape[::-1], shape[::-1], strict=False)):
        raise VitfocusError(f"A bias of shape {tuple(bias.shape)} does not fit attention of shape {tuple(shape)}.")
    if bias.dtype == torch.bool:
        raise VitfocusError("The bias is added to the logits, so a mask must be given as 0 and -inf, not as booleans.")
    return bias[(None,) * (4 - bias.ndim)]
