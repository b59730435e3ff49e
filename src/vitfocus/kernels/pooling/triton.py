"""Token-aware Average Pooling's mixing in one kernel forward and one backward, on tokens as they lie: (B, N, C).

Mixing is a product with a matrix M that has a row for each patch: M[i, j] is what patch j gives to patch i, and is not
zero only where j lies on one of the rings of eight around i, one ring per dilation. A program computes a tile of M from
the weights, in registers, and multiplies it with the tokens it needs, so that a token is read a few times, where
gathering would read it once for every place on a ring. A program owns a square of patches and reads only the patches
around it.
Prefix tokens pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.backends import on_device_of_first

#: A program owns a square of so many patches a side.
SIDE = 8


@triton.jit
def _own(height, width, groups, SIDE: tl.constexpr):
    """The square, the group of channels and the image of this program; all on one axis, for others are short."""
    squares = tl.cdiv(height, SIDE) * tl.cdiv(width, SIDE)
    mine = tl.program_id(0)
    return mine % squares, (mine // squares) % groups, (mine // (squares * groups)).to(tl.int64)


@triton.jit
def _softmax(scores, place, ok, K: tl.constexpr):
    """The K weights of some patches, a tuple of vectors."""
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
def _shares(weights, K: tl.constexpr):
    """What a patch gives to itself, then to each place on each ring: K vectors from its K weights."""
    own = weights[0]
    shares = ()
    for k in tl.static_range(1, K):
        share = weights[k] / 9
        own += share
        shares = shares + (share,)
    return (own,) + shares


@triton.jit
def _block(block, height, width, SIDE: tl.constexpr):
    """A square of patches: its first row and column, then row, column, number and existence of each."""
    across = tl.cdiv(width, SIDE)
    top, left = (block // across) * SIDE, (block % across) * SIDE
    places = tl.arange(0, SIDE * SIDE)
    row, column = top + places // SIDE, left + places % SIDE
    return top, left, row, column, row * width + column, (row < height) & (column < width)


@triton.jit
def _around(step, top, left, height, width, K: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr):
    """BN of the patches that can meet a square: some rows of SPAN patches, beginning K − 1 above and left of it."""
    places = tl.arange(0, BN)
    row = tl.maximum(top - (K - 1), 0) + step * (BN // SPAN) + places // SPAN
    column = left - (K - 1) + places % SPAN
    return row, column, row * width + column, (row < height) & (column >= 0) & (column < width)


@triton.jit
def _steps(top, height, K: tl.constexpr, SIDE: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr):
    """How many such steps there are."""
    rows = tl.minimum(top + SIDE + K - 1, height) - tl.maximum(top - (K - 1), 0)
    return tl.cdiv(rows, BN // SPAN)


@triton.jit
def _rings(row, column, their_row, their_column):
    """Which ring around patch i patch j is on, for a tile of pairs: 0 itself, k the k-th, -1 none of them."""
    down = tl.abs(row[:, None] - their_row[None, :])
    across = tl.abs(column[:, None] - their_column[None, :])
    far, near = tl.maximum(down, across), tl.minimum(down, across)
    return tl.where((near == 0) | (near == far), far, -1)


@triton.jit
def _mixed(tokens, given, weights, block, height, width, channel, C, PRECISION: tl.constexpr, TRANSPOSE: tl.constexpr,
           K: tl.constexpr, SIDE: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
           NC: tl.constexpr):  # fmt: skip
    """M · tokens, or Mᵀ · tokens, for a square of patches and NC times BC channels: a tuple of NC tiles.

    `given` are the shares of the square's patches, for M; `weights` those of the whole image in memory, for Mᵀ.
    """
    top, left, row, column, _, _ = _block(block, height, width, SIDE)
    sums = ()
    for _ in tl.static_range(NC):
        sums = sums + (tl.zeros([SIDE * SIDE, BC], tl.float32),)
    for step in range(0, _steps(top, height, K, SIDE, SPAN, BN)):
        their_row, their_column, theirs, ok = _around(step, top, left, height, width, K, SPAN, BN)
        ring = _rings(row, column, their_row, their_column)
        if TRANSPOSE:
            loaded = ()
            for k in tl.static_range(K):
                loaded = loaded + (tl.load(weights + theirs * K + k, mask=ok, other=0.0),)
            shares = _shares(loaded, K)
            matrix = tl.where(ring == 0, shares[0][None, :], 0.0)
            for k in tl.static_range(1, K):
                matrix = tl.where(ring == k, shares[k][None, :], matrix)
        else:
            matrix = tl.where(ring == 0, given[0][:, None], 0.0)
            for k in tl.static_range(1, K):
                matrix = tl.where(ring == k, given[k][:, None], matrix)
        matrix = matrix.to(tokens.dtype.element_ty)
        more = ()
        for c in tl.static_range(NC):
            channels = channel + c * BC + tl.arange(0, BC)
            mask = ok[:, None] & (channels < C)[None, :]
            tile = tl.load(tokens + theirs[:, None] * C + channels[None, :], mask=mask, other=0.0)
            more = more + (tl.dot(matrix, tile, sums[c], input_precision=PRECISION),)
        sums = more
    return sums


@triton.jit
def _store(out, sums, block, height, width, channel, C, SIDE: tl.constexpr, BC: tl.constexpr, NC: tl.constexpr):
    _, _, _, _, patch, ok = _block(block, height, width, SIDE)
    for c in tl.static_range(NC):
        channels = channel + c * BC + tl.arange(0, BC)
        mask = ok[:, None] & (channels < C)[None, :]
        tl.store(out + patch[:, None] * C + channels[None, :], sums[c].to(out.dtype.element_ty), mask=mask)


@triton.jit
def _copy_prefix(source, out, prefix, channel, C, BC: tl.constexpr, NC: tl.constexpr):
    for token in range(prefix):
        for c in tl.static_range(NC):
            channels = channel + c * BC + tl.arange(0, BC)
            place, ok = token * C + channels, channels < C
            tl.store(out + place, tl.load(source + place, mask=ok), mask=ok)


@triton.jit
def mix_forward(tokens, scores, out, weights_out, count, height, width, prefix, C, PRECISION: tl.constexpr,
                K: tl.constexpr, SIDE: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
                NC: tl.constexpr):  # fmt: skip
    """out = Σ_k softmax(scores)_k · pool_k(tokens); the weights are kept for the backward pass."""
    block, group, batch = _own(height, width, tl.cdiv(C, NC * BC), SIDE)
    channel = group * NC * BC
    _, _, _, _, patch, ok = _block(block, height, width, SIDE)
    mine = batch * (height * width) * K
    weights = _softmax(scores + mine, patch, ok, K)
    if group == 0:
        for k in tl.static_range(K):
            tl.store(weights_out + mine + patch * K + k, weights[k], mask=ok)
    image, image_out = tokens + batch * count * C, out + batch * count * C
    if block == 0:
        _copy_prefix(image, image_out, prefix, channel, C, BC, NC)
    mixed = _mixed(image + prefix * C, _shares(weights, K), weights_out, block, height, width, channel, C,
                   PRECISION, False, K, SIDE, SPAN, BN, BC, NC)  # fmt: skip
    _store(image_out + prefix * C, mixed, block, height, width, channel, C, SIDE, BC, NC)


@triton.jit
def _score_gradient(tokens, gradient, weights, score_gradient, block, height, width, C, PRECISION: tl.constexpr,
                    K: tl.constexpr, SIDE: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
                    NC: tl.constexpr):  # fmt: skip
    """Of a square: the tile gradient · tokensᵀ holds what every M[i, j] is worth; a ring's places are summed."""
    top, left, row, column, patch, row_ok = _block(block, height, width, SIDE)
    slopes = ()
    for _ in tl.static_range(K):
        slopes = slopes + (tl.zeros([SIDE * SIDE], tl.float32),)
    for channel in range(0, C, NC * BC):
        mine = ()
        for c in tl.static_range(NC):
            channels = channel + c * BC + tl.arange(0, BC)
            own_mask = row_ok[:, None] & (channels < C)[None, :]
            mine = mine + (tl.load(gradient + patch[:, None] * C + channels[None, :], mask=own_mask, other=0.0),)
        for step in range(0, _steps(top, height, K, SIDE, SPAN, BN)):
            their_row, their_column, other, ok = _around(step, top, left, height, width, K, SPAN, BN)
            worth = tl.zeros([SIDE * SIDE, BN], tl.float32)
            for c in tl.static_range(NC):
                channels = channel + c * BC + tl.arange(0, BC)
                mask = ok[:, None] & (channels < C)[None, :]
                theirs = tl.load(tokens + other[:, None] * C + channels[None, :], mask=mask, other=0.0)
                worth = tl.dot(mine[c], tl.trans(theirs), worth, input_precision=PRECISION)
            ring = _rings(row, column, their_row, their_column)
            longer = ()
            for k in tl.static_range(K):
                longer = longer + (slopes[k] + tl.sum(tl.where(ring == k, worth, 0.0), 1),)
            slopes = longer
    own = ()
    worths = (slopes[0],)
    inner = tl.zeros([SIDE * SIDE], tl.float32)
    for k in tl.static_range(K):
        own = own + (tl.load(weights + patch * K + k, mask=row_ok, other=0.0),)
    for k in tl.static_range(1, K):
        worths = worths + ((slopes[k] + slopes[0]) / 9,)
    for k in tl.static_range(K):
        inner += own[k] * worths[k]
    for k in tl.static_range(K):
        value = (own[k] * (worths[k] - inner)).to(score_gradient.dtype.element_ty)
        tl.store(score_gradient + patch * K + k, value, mask=row_ok)


@triton.jit
def mix_backward(tokens, weights, gradient, token_gradient, score_gradient, count, height, width, prefix, C, groups,
                 PRECISION: tl.constexpr, K: tl.constexpr, SIDE: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr,
                 BC: tl.constexpr, NC: tl.constexpr):  # fmt: skip
    """Some programs make the tokens' gradient, Mᵀ · gradient; the last group makes that of the scores."""
    block, group, batch = _own(height, width, groups + 1, SIDE)
    channel, mine = group * NC * BC, batch * (height * width) * K
    image, slope, out = tokens + batch * count * C, gradient + batch * count * C, token_gradient + batch * count * C
    if group < groups:
        if block == 0:
            _copy_prefix(slope, out, prefix, channel, C, BC, NC)
        mixed = _mixed(slope + prefix * C, (), weights + mine, block, height, width, channel, C,
                       PRECISION, True, K, SIDE, SPAN, BN, BC, NC)  # fmt: skip
        _store(out + prefix * C, mixed, block, height, width, channel, C, SIDE, BC, NC)
    else:
        _score_gradient(image + prefix * C, slope + prefix * C, weights + mine, score_gradient + mine, block, height,
                        width, C, PRECISION, K, SIDE, SPAN, BN, BC, NC)  # fmt: skip


@on_device_of_first
def forward(tokens: Tensor, scores: Tensor, grid: tuple[int, int], prefix: int) -> tuple[Tensor, Tensor]:
    """Mixed tokens (B, N, C) and the weights (B, H·W, K) in float32."""
    tokens, scores = tokens.contiguous(), scores.contiguous()
    batch, count, channels = tokens.shape
    out = torch.empty_like(tokens)
    weights = torch.empty(scores.shape, dtype=torch.float32, device=tokens.device)
    blocks, groups, settings = launch_settings("forward", tokens, grid, scores.shape[-1])
    mix_forward[blocks * groups * batch,](tokens, scores, out, weights, count, *grid, prefix, channels, **settings)
    return out, weights


@on_device_of_first
def backward(
    gradient: Tensor, tokens: Tensor, weights: Tensor, grid: tuple[int, int], prefix: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of tokens and scores, the latter in their dtype."""
    tokens, gradient = tokens.contiguous(), gradient.contiguous()
    batch, count, channels = tokens.shape
    token_gradient, score_gradient = torch.empty_like(tokens), torch.empty_like(weights, dtype=dtype)
    blocks, groups, settings = launch_settings("backward", tokens, grid, weights.shape[-1])
    mix_backward[blocks * (groups + 1) * batch,](
        tokens, weights, gradient, token_gradient, score_gradient, count, *grid, prefix, channels, groups, **settings
    )
    return token_gradient, score_gradient


def launch_settings(
    kind: str, tokens: Tensor, grid: tuple[int, int], branches: int
) -> tuple[int, int, dict[str, object]]:
    """Squares of patches, groups of channels, and what a program is compiled for."""
    channels, chunks, warps, stages = block_sizes(kind, tokens.shape[2], tokens.dtype)
    span = max(16, triton.next_power_of_2(SIDE + 2 * (branches - 1)))
    settings: dict[str, object] = {
        "PRECISION": "tf32x3",  # of float32; others are multiplied as they are
        "K": branches,
        "SIDE": SIDE,
        "SPAN": span,
        "BN": max(32, span),
        "BC": channels,
        "NC": chunks,
        "num_warps": warps,
        "num_stages": stages,
    }
    squares = triton.cdiv(grid[0], SIDE) * triton.cdiv(grid[1], SIDE)
    return squares, triton.cdiv(tokens.shape[2], channels * chunks), settings


def block_sizes(kind: str, width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Channels at a time, how many such chunks a program holds, warps, stages: as measured on an H200."""
    if dtype == torch.float32:
        return min(64, max(16, triton.next_power_of_2(width))), 1 if width <= 64 else 2, 4, 2
    if width <= 128:
        return max(16, triton.next_power_of_2(width)), 1, 4, 3
    return (128, min(3, triton.cdiv(width, 128)), 8, 3) if kind == "forward" else (64, 3, 4, 3)
