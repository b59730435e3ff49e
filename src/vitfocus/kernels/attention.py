"""Attention that also tells its normalisers, where torch's own kernel has them; and queries and keys that match.

A fused attention kernel keeps log Σ exp of every row's logits for its backward pass. Whoever reads the map a second
time needs exactly these, and finding them again is a pass over all logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend


def matched(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (B, H, Q, D) and keys (B, H, K, D) of one dtype, and each with all images and heads that the other has.

    Under autocast a model may hand over two dtypes, and heads may share their keys: attention takes both.

    >>> query, key = matched(torch.zeros(2, 3, 5, 8), torch.zeros(2, 1, 7, 8, dtype=torch.bfloat16))
    >>> key.shape, key.dtype
    (torch.Size([2, 3, 7, 8]), torch.float32)
    """
    if query.dtype != key.dtype:
        dtype = torch.promote_types(query.dtype, key.dtype)
        query, key = query.to(dtype), key.to(dtype)
    if query.shape[:2] != key.shape[:2]:
        both = torch.broadcast_shapes(query.shape[:2], key.shape[:2])
        query, key = (tensor.expand(*both, -1, -1) for tensor in (query, key))
    return query, key


def attention_with_normalisers(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float
) -> tuple[Tensor, Tensor] | None:
    """softmax(scale · q kᵀ) v and log Σ exp (B, H, Q), by the kernel that torch would choose; None where it has none.

    >>> attention_with_normalisers(*torch.zeros(3, 1, 1, 4, 8), scale=1.0) is None  # not on a CPU
    True
    """
    tensors = (query, key, value)
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    widths = {tensor.shape[-1] for tensor in tensors}
    alike = all(
        tensor.shape[:-2] == query.shape[:2] and tensor.dtype == query.dtype and tensor.stride(-1) == 1
        for tensor in tensors
    )
    if not alike or len(widths) > 1 or widths.pop() not in range(8, 129, 8) or min(query.shape[2], key.shape[2]) < 2:
        return None
    tracing = torch.compiler.is_compiling()
    if not (_is_cudnn_first(query.device) if tracing else _is_cudnn_chosen(query, key, value, scale)):
        return None
    made = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, False, False, scale=scale
    )
    return made[0], made[1].detach().reshape(query.shape[:3])


def _is_cudnn_chosen(query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    """Whether torch chooses cuDNN's kernel for these tensors."""
    choice = torch._fused_sdp_choice(query, key, value, None, 0.0, False, scale=scale)
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


@torch.compiler.assume_constant_result
def _is_cudnn_first(device: torch.device) -> bool:
    """Whether torch prefers cuDNN's attention: from compute capability 9.0 on, unless told otherwise.

    For compiled code, where there are no tensors yet to ask torch about.
    """
    if not torch.backends.cuda.cudnn_sdp_enabled() or torch.are_deterministic_algorithms_enabled():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0) and (torch.backends.cudnn.version() or 0) >= 90100
