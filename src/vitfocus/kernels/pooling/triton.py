"""Token-aware Average Pooling directly on tokens (B, N, C): the predictor's convolutions, and the mixing.

Mixing is a product with a matrix M that has a row for each patch: M[i, j] is the weight of patch j in patch i, nonzero
only where j lies on one of the rings of eight around i, one ring per dilation. A program computes a tile of M from
the weights, in registers, and multiplies it with the tokens it needs, so that a token is read only a few times;
gathering would read it once per position on a ring. A program owns a square of patches and reads only the patches
around it. Prefix tokens pass through. The second convolution and the softmax are a separate small kernel: in the
mixing kernel, every program would start with them and wait for memory before its first product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.backends import on_device_of_first
from vitfocus.kernels.shared_memory import power_of_two

#: Side of the square of patches that a program owns.
SIDE = 8
#: Elements per program of a copying kernel, and the number of programs that keep a large GPU busy.
_BLOCK, _BUSY = 1024, 264


@triton.jit
def _program(height, width, groups, SIDE: tl.constexpr):
    """The square, the group of channels and the image of this program, all on the first grid axis, the longest."""
    squares, program = tl.cdiv(height, SIDE) * tl.cdiv(width, SIDE), tl.program_id(0)
    return program % squares, (program // squares) % groups, (program // (squares * groups)).to(tl.int64)


@triton.jit
def gather_taps(spread, hidden, count, height, width, prefix, P, K: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the first convolution's nine partial results at each position: (B, N, P) to (B, H·W, K).

    `spread` holds K values for each of the nine positions that a token contributes to, padded to P.
    """
    length = height * width * K
    blocks = tl.cdiv(length, BLOCK)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    places = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    ok, patch, k = places < length, places // K, places % K
    row, column = patch // width, patch % width
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(9):
        near_row, near_column = row + tap // 3 - 1, column + tap % 3 - 1
        inside = ok & (near_row >= 0) & (near_row < height) & (near_column >= 0) & (near_column < width)
        place = (prefix + near_row * width + near_column) * P + tap * K + k
        total += tl.load(spread + batch * count * P + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(hidden + batch * length + places, total, mask=ok)


@triton.jit
def scatter_taps(gradient, spread, count, height, width, prefix, P, K: tl.constexpr, BLOCK: tl.constexpr):
    """The opposite of `gather_taps`: the gradient of `spread`, 0 for prefix tokens and for the padding."""
    length = count * P
    blocks = tl.cdiv(length, BLOCK)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    places = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    ok, patch, tap, k = places < length, places // P - prefix, (places % P) // K, places % P % K
    row, column = patch // width - (tap // 3 - 1), patch % width - (tap % 3 - 1)
    inside = ok & (patch >= 0) & (tap < 9) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    place = batch * (height * width * K) + (row * width + column) * K + k
    value = tl.load(gradient + place, mask=inside, other=0.0)
    tl.store(spread + batch * length + places, value.to(spread.dtype.element_ty), mask=ok)


@triton.jit
def _around_patches(values, patch, shift, k, ok, height, width, K: tl.constexpr):
    """(T, S): channel k of the patch at offset `shift` from each patch; `shift` and `k` (S,); 0 outside the grid."""
    row = (patch // width)[:, None] + (shift // 3 - 1)[None, :]
    column = (patch % width)[:, None] + (shift % 3 - 1)[None, :]
    inside = ok & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return tl.load(values + (row * width + column) * K + k[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def score_backward(score_gradient, hidden, second, hidden_gradient, weight_gradient, height, width, parts,
                   K: tl.constexpr, KP: tl.constexpr, TAPS: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """The second convolution's gradients: of its input (B, H·W, K), and of its weights, (B · parts, K, 9 · K) in parts.

    Each is one product for a block of patches. A program covers a part of an image's patches. TAPS is 9 · K, padded.
    """
    part, batch = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    start = batch * (height * width * K)
    k, taps = tl.arange(0, KP), tl.arange(0, TAPS)
    tap, other, exists = taps // K, taps % K, taps < 9 * K
    matrix = tl.load(second + (other[:, None] * K + k[None, :]) * 9 + tap[:, None],
                     mask=exists[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)  # fmt: skip
    length = tl.cdiv(tl.cdiv(height * width, BT), parts) * BT
    stop = tl.minimum((part + 1) * length, height * width)
    sums = tl.zeros([KP, TAPS], tl.float32)
    for begin in range(part * length, stop, BT):
        patch = begin + tl.arange(0, BT)
        ok = (patch < stop)[:, None] & exists[None, :]
        place, inside = start + patch[:, None] * K + k[None, :], (patch < stop)[:, None] & (k < K)[None, :]
        mine = tl.load(score_gradient + place, mask=inside, other=0.0)
        near = _around_patches(hidden + start, patch, tap, other, ok, height, width, K)
        sums = tl.dot(tl.trans(mine), near, sums, input_precision="tf32x3")
        slopes = _around_patches(score_gradient + start, patch, 8 - tap, other, ok, height, width, K)
        made = tl.dot(slopes, matrix, input_precision="tf32x3")
        tl.store(hidden_gradient + place, made, mask=inside)
    place = ((batch * parts + part) * K + k[:, None]) * (9 * K) + taps[None, :]
    tl.store(weight_gradient + place, sums, mask=(k < K)[:, None] & exists[None, :])


@triton.jit
def _weights(hidden, second, row, column, ok, height, width, K: tl.constexpr):
    """The second convolution and the softmax: the K weights of some patches, a tuple of vectors."""
    scores = ()
    for _ in tl.static_range(K):
        scores = scores + (tl.zeros(row.shape, tl.float32),)
    for tap in tl.static_range(9):
        near_row, near_column = row + tap // 3 - 1, column + tap % 3 - 1
        inside = ok & (near_row >= 0) & (near_row < height) & (near_column >= 0) & (near_column < width)
        for j in tl.static_range(K):
            place = (near_row * width + near_column) * K + j
            value = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
            more = ()
            for k in tl.static_range(K):
                more = more + (scores[k] + value * tl.load(second + (k * K + j) * 9 + tap).to(tl.float32),)
            scores = more
    most = scores[0]
    for k in tl.static_range(1, K):
        most = tl.maximum(most, scores[k], propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros_like(most)
    powers = ()
    for k in tl.static_range(K):
        power = tl.exp(scores[k] - most)
        total += power
        powers = powers + (power,)
    weights = ()
    for k in tl.static_range(K):
        weights = weights + (powers[k] / total,)
    return weights


@triton.jit
def mixing_weights(hidden, second, weights, height, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """softmax(conv(hidden)): (B, H·W, K) to the same."""
    patches = height * width
    blocks = tl.cdiv(patches, BLOCK)
    mine = (tl.program_id(0) // blocks).to(tl.int64) * patches * K
    patch = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    ok = patch < patches
    made = _weights(hidden + mine, second, patch // width, patch % width, ok, height, width, K)
    for k in tl.static_range(K):
        tl.store(weights + mine + patch * K + k, made[k], mask=ok)


@triton.jit
def _shares(weights, K: tl.constexpr):
    """A patch's coefficient for itself, then for each position on ring k: K vectors from its K weights."""
    own = weights[0]
    shares = ()
    for k in tl.static_range(1, K):
        share = weights[k] / 9
        own += share
        shares = shares + (share,)
    return (own,) + shares


@triton.jit
def _block(block, height, width, SIDE: tl.constexpr):
    """A square of patches: its first row and column, then each patch's row, column, index and whether it exists."""
    across = tl.cdiv(width, SIDE)
    top, left = (block // across) * SIDE, (block % across) * SIDE
    places = tl.arange(0, SIDE * SIDE)
    row, column = top + places // SIDE, left + places % SIDE
    return top, left, row, column, row * width + column, (row < height) & (column < width)


@triton.jit
def _around(step, top, left, height, width, K: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr):
    """BN of the patches within reach of a square: rows of SPAN patches, starting K − 1 above and left of it."""
    places = tl.arange(0, BN)
    row = tl.maximum(top - (K - 1), 0) + step * (BN // SPAN) + places // SPAN
    column = left - (K - 1) + places % SPAN
    return row, column, row * width + column, (row < height) & (column >= 0) & (column < width)


@triton.jit
def _steps(top, height, K: tl.constexpr, SIDE: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr):
    """The number of steps of `_around`."""
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
def mix_forward(tokens, weights, out, count, height, width, prefix, C, PRECISION: tl.constexpr,
                K: tl.constexpr, SIDE: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
                NC: tl.constexpr):  # fmt: skip
    """out = Σ_k weights_k · pool_k(tokens)."""
    block, group, batch = _program(height, width, tl.cdiv(C, NC * BC), SIDE)
    channel = group * NC * BC
    _, _, _, _, patch, ok = _block(block, height, width, SIDE)
    own = ()
    for k in tl.static_range(K):
        own = own + (tl.load(weights + (batch * (height * width) + patch) * K + k, mask=ok, other=0.0),)
    image, image_out = tokens + batch * count * C, out + batch * count * C
    if block == 0:
        _copy_prefix(image, image_out, prefix, channel, C, BC, NC)
    mixed = _mixed(image + prefix * C, _shares(own, K), weights, block, height, width, channel, C,
                   PRECISION, False, K, SIDE, SPAN, BN, BC, NC)  # fmt: skip
    _store(image_out + prefix * C, mixed, block, height, width, channel, C, SIDE, BC, NC)


@triton.jit
def _score_gradient(tokens, gradient, weights, score_gradient, block, height, width, C, PRECISION: tl.constexpr,
                    K: tl.constexpr, SIDE: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
                    NC: tl.constexpr):  # fmt: skip
    """For a square: the tile gradient · tokensᵀ is the gradient of each M[i, j], then summed over each ring."""
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
    """Most programs compute the tokens' gradient, Mᵀ · gradient; the last group computes that of the scores."""
    block, group, batch = _program(height, width, groups + 1, SIDE)
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
def gather(spread: Tensor, grid: tuple[int, int], branches: int) -> Tensor:
    """`gather_taps` in float32."""
    batch, count, padded = spread.shape
    height, width = grid
    hidden = torch.empty(batch, height * width, branches, dtype=torch.float32, device=spread.device)
    gather_taps[(_blocks(height * width * branches) * batch,)](
        spread, hidden, count, height, width, count - height * width, padded, K=branches, BLOCK=_BLOCK, num_warps=4
    )
    return hidden


@on_device_of_first
def scatter(gradient: Tensor, grid: tuple[int, int], count: int, padded: int, dtype: torch.dtype) -> Tensor:
    """`scatter_taps` in that dtype."""
    batch, patches, branches = gradient.shape
    spread = torch.empty(batch, count, padded, dtype=dtype, device=gradient.device)
    scatter_taps[(_blocks(count * padded) * batch,)](
        gradient, spread, count, *grid, count - patches, padded, K=branches, BLOCK=_BLOCK, num_warps=4
    )
    return spread


@on_device_of_first
def forward(tokens: Tensor, hidden: Tensor, second: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Mixed tokens (B, N, C) and the weights (B, H·W, K) in float32."""
    batch, count, channels = tokens.shape
    out = torch.empty_like(tokens)
    weights = torch.empty(hidden.shape, dtype=torch.float32, device=tokens.device)
    patches, branches = hidden.shape[1:]
    mixing_weights[(-(-patches // 128) * batch,)](
        hidden, second, weights, *grid, K=branches, BLOCK=128, num_warps=4
    )  # fmt: skip
    blocks, groups, settings = launch_settings("forward", tokens, grid, branches)
    mix_forward[(blocks * groups * batch,)](tokens, weights, out, count, *grid, count - patches, channels, **settings)
    return out, weights


@on_device_of_first
def backward(
    gradient: Tensor, tokens: Tensor, hidden: Tensor, second: Tensor, weights: Tensor, grid: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of tokens, of the hidden values and of the second convolution's weights, the last two in float32."""
    batch, count, channels = tokens.shape
    branches, patches = weights.shape[-1], grid[0] * grid[1]
    token_gradient, score_gradient = torch.empty_like(tokens), torch.empty_like(weights)
    blocks, groups, settings = launch_settings("backward", tokens, grid, branches)
    mix_backward[(blocks * (groups + 1) * batch,)](
        tokens, weights, gradient, token_gradient, score_gradient, count, *grid, count - patches, channels, groups,
        **settings,
    )  # fmt: skip
    parts = max(1, min(-(-_BUSY // max(batch, 1)), -(-patches // 64)))
    hidden_gradient = torch.empty_like(weights)
    sums = torch.empty(batch * parts, branches, 9 * branches, dtype=torch.float32, device=tokens.device)
    score_backward[(batch * parts,)](
        score_gradient, hidden, second, hidden_gradient, sums, *grid, parts, K=branches, KP=16,
        TAPS=max(16, power_of_two(9 * branches)), BT=64, num_warps=4, num_stages=1,
    )  # fmt: skip
    return token_gradient, hidden_gradient, sums.sum(dim=0).view(branches, 9, branches).mT.reshape(second.shape)


def _blocks(length: int) -> int:
    return -(-length // _BLOCK)


def launch_settings(
    kind: str, tokens: Tensor, grid: tuple[int, int], branches: int
) -> tuple[int, int, dict[str, object]]:
    """Squares of patches, groups of channels, and the compile-time arguments."""
    channels, chunks, warps, stages = block_sizes(kind, tokens.shape[2], tokens.dtype)
    span = max(16, power_of_two(SIDE + 2 * (branches - 1)))
    settings: dict[str, object] = {
        "PRECISION": "tf32x3",  # for float32; half precision is multiplied directly
        "K": branches,
        "SIDE": SIDE,
        "SPAN": span,
        "BN": max(32, span),
        "BC": channels,
        "NC": chunks,
        "num_warps": warps,
        "num_stages": stages,
    }
    squares = -(-grid[0] // SIDE) * -(-grid[1] // SIDE)
    return squares, -(-tokens.shape[2] // (channels * chunks)), settings


def block_sizes(kind: str, width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Channels at a time, how many such chunks a program holds, warps, stages: as measured on an H200."""
    if dtype == torch.float32:
        return min(64, max(16, power_of_two(width))), 1 if width <= 64 else 2, 4, 2
    if width <= 128:
        return max(16, power_of_two(width)), 1, 4, 3
    return (128, min(3, -(-width // 128)), 8, 3) if kind == "forward" else (64, 3, 4, 3)
