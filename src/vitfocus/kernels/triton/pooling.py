"""Token-aware Average Pooling's mixing in one kernel forward and one backward, on tokens as they lie: (B, N, C).

Prefix tokens pass through. A token reads its neighbours where they are, so nothing is permuted, padded or copied; what
neighbouring programs read in common comes out of the caches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _softmax(scores, place, ok, K: tl.constexpr):
    """The K weights of some tokens, a tuple of vectors."""
    most = tl.load(scores + place * K, mask=ok, other=0.0).to(tl.float32)
    values = (most,)
    for k in tl.static_range(1, K):
        value = tl.load(scores + place * K + k, mask=ok, other=0.0).to(tl.float32)
        most = tl.maximum(most, value)
        values = values + (value,)
    total = tl.zeros_like(most)
    powers = ()
    for k in tl.static_range(K):
        power = tl.exp(values[k] - most)
        total += power
        powers = powers + (power,)
    weights = ()
    for k in tl.static_range(K):
        weights = weights + (powers[k] / total,)
    return weights


@triton.jit
def mix_forward(tokens, scores, out, weights_out, count, height, width, prefix, C,
                K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """out = Σ_k softmax(scores)_k · pool_k(tokens); the weights are kept for the backward pass."""
    block, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = block * BT + tl.arange(0, BT)
    ok = token < count
    patch = token - prefix
    is_patch = ok & (patch >= 0)
    row, column = patch // width, patch % width
    place = batch * (count - prefix) + patch
    weights = _softmax(scores, place, is_patch, K)
    if part == 0:
        for k in tl.static_range(K):
            tl.store(weights_out + place * K + k, weights[k], mask=is_patch)
    channels = part * BC + tl.arange(0, BC)
    channel_ok = channels < C
    image = tokens + batch * count * C
    own_place = token[:, None] * C + channels[None, :]
    mask = ok[:, None] & channel_ok[None, :]
    own = tl.load(image + own_place, mask=mask, other=0.0).to(tl.float32)
    mixed = weights[0][:, None] * own
    for k in tl.static_range(1, K):
        ring = own
        for tap in tl.static_range(9):
            if tap != 4:
                down, across = (tap // 3 - 1) * k, (tap % 3 - 1) * k
                inside = is_patch & (row + down >= 0) & (row + down < height)
                inside = inside & (column + across >= 0) & (column + across < width)
                near = image + own_place + (down * width + across) * C
                ring += tl.load(near, mask=inside[:, None] & channel_ok[None, :], other=0.0).to(tl.float32)
        mixed += (weights[k] / 9)[:, None] * ring
    mixed = tl.where(is_patch[:, None], mixed, own)
    tl.store(out + batch * count * C + own_place, mixed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def mix_backward(tokens, weights, gradient, token_gradient, score_gradient, count, height, width, prefix, C,
                 K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """The gradients of tokens and scores. The pooling is its own transpose: a token gathers from whom it gave to."""
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = block * BT + tl.arange(0, BT)
    ok = token < count
    patch = token - prefix
    is_patch = ok & (patch >= 0)
    row, column = patch // width, patch % width
    first = batch * (count - prefix)
    image, image_gradient = tokens + batch * count * C, gradient + batch * count * C
    own_weights = ()
    slopes = ()
    for k in tl.static_range(K):
        own_weights = own_weights + (tl.load(weights + (first + patch) * K + k, mask=is_patch, other=0.0),)
        slopes = slopes + (tl.zeros([BT], tl.float32),)
    for start in range(0, C, BC):
        channels = start + tl.arange(0, BC)
        channel_ok = channels < C
        mask = ok[:, None] & channel_ok[None, :]
        own_place = token[:, None] * C + channels[None, :]
        own = tl.load(image + own_place, mask=mask, other=0.0).to(tl.float32)
        slope = tl.load(image_gradient + own_place, mask=mask, other=0.0).to(tl.float32)
        passed = tl.where(is_patch[:, None], slope, 0.0)
        gathered = slope - passed + own_weights[0][:, None] * passed
        longer = (slopes[0] + tl.sum(slope * own, 1),)
        for k in tl.static_range(1, K):
            pooled = own
            gathered += (own_weights[k] / 9)[:, None] * passed
            for tap in tl.static_range(9):
                if tap != 4:
                    down, across = (tap // 3 - 1) * k, (tap % 3 - 1) * k
                    inside = is_patch & (row + down >= 0) & (row + down < height)
                    inside = inside & (column + across >= 0) & (column + across < width)
                    away = down * width + across
                    theirs = tl.load(weights + (first + patch + away) * K + k, mask=inside, other=0.0)
                    where = own_place + away * C
                    seen = inside[:, None] & channel_ok[None, :]
                    pooled += tl.load(image + where, mask=seen, other=0.0).to(tl.float32)
                    other = tl.load(image_gradient + where, mask=seen, other=0.0).to(tl.float32)
                    gathered += (theirs / 9)[:, None] * other
            longer = longer + (slopes[k] + tl.sum(slope * pooled, 1) / 9,)
        slopes = longer
        place = token_gradient + batch * count * C + own_place
        tl.store(place, gathered.to(token_gradient.dtype.element_ty), mask=mask)
    inner = tl.zeros([BT], tl.float32)
    for k in tl.static_range(K):
        inner += own_weights[k] * slopes[k]
    for k in tl.static_range(K):
        value = own_weights[k] * (slopes[k] - inner)
        place = score_gradient + (first + patch) * K + k
        tl.store(place, value.to(score_gradient.dtype.element_ty), mask=is_patch)


def forward(tokens: Tensor, scores: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, Tensor]:
    """Mixed tokens (B, N, C) and the weights (B, H·W, K) in float32."""
    tokens, scores = tokens.contiguous(), scores.contiguous()
    batch, count, width = tokens.shape
    out = torch.empty_like(tokens)
    weights = torch.empty(scores.shape, dtype=torch.float32, device=tokens.device)
    rows, channels = block_sizes(width)
    blocks = (triton.cdiv(count, rows), triton.cdiv(width, channels), batch)
    mix_forward[blocks](
        tokens, scores, out, weights, count, *grid, prefix, width, K=scores.shape[-1], BT=rows, BC=channels,
        num_warps=4,
    )  # fmt: skip
    return out, weights


def backward(
    gradient: Tensor, tokens: Tensor, weights: Tensor, grid: tuple[int, int], prefix: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of tokens and scores, the latter in their dtype."""
    tokens, gradient = tokens.contiguous(), gradient.contiguous()
    batch, count, width = tokens.shape
    token_gradient, score_gradient = torch.empty_like(tokens), torch.empty_like(weights, dtype=dtype)
    rows, channels = block_sizes(width)
    mix_backward[triton.cdiv(count, rows), batch](
        tokens, weights, gradient, token_gradient, score_gradient, count, *grid, prefix, width, K=weights.shape[-1],
        BT=rows, BC=channels, num_warps=4,
    )  # fmt: skip
    return token_gradient, score_gradient


def block_sizes(width: int) -> tuple[int, int]:
    """Tokens and channels of a program: eight numbers a thread, as measured on an H200."""
    return (8, 128) if width >= 128 else (16, max(16, min(64, triton.next_power_of_2(width))))
