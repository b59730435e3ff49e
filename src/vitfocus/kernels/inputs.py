"""Tensors in the form that the kernels take, or a sentence about why they do not fit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

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


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast is off on this device, so that operations keep the dtypes they are given.

    >>> with torch.autocast("cpu"), outside_autocast(torch.device("cpu")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        # The meta device has no autocast; elsewhere, entering a context takes as long as several launches.
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
