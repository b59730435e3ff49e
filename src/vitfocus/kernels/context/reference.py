"""Context Broadcasting: give each token a share of the mean of all tokens.

"Scratching Visual Transformer's Back with Uniform Attention" (Hyeon-Woo et al., ICCV 2023), equation (1) and the
supplement's section 2.7. Uniform attention is a mean, so the densest possible interaction costs one reduction.
"""

from __future__ import annotations

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
    """CB_S: the token plus the mean, scaled by one learned value per channel."""
    return tokens + scale * mean


def broadcast_gate(tokens: Tensor, class_token: Tensor) -> Tensor:
    """CB_gate, supplement 2.7: every token times (class token + 1)."""
    return tokens * (class_token + 1)


def broadcast_hybrid(tokens: Tensor, mean: Tensor, class_token: Tensor) -> Tensor:
    """CB_hybrid, supplement 2.7: every token times the class token, plus CB."""
    return tokens * class_token + broadcast_mean(tokens, mean)
