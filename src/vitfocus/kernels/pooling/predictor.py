"""The predictor of Token-aware Average Pooling on tokens (B, N, C): conv3×3 → batch norm → conv3×3 → softmax.

The first convolution is a product of the tokens with a (C, 9·K) matrix, whose nine results for each token `gather_taps`
adds up at its neighbours. The kernels between that product and the mixing move little memory; there are as few of them
as possible, because each takes microseconds to start. The batch norm is therefore part of them: `gather_taps` leaves
partial statistics, and `score_backward` partial sums of the norm's gradient, which the next kernel adds up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.backends import on_device_of_first
from vitfocus.kernels.shared_memory import power_of_two
from vitfocus.kernels.tiles import single

#: Patches at a time, most programs and warps of `score_backward`.
SUMS = (64, 1024, 4)


@triton.jit
def gather_taps(spread, hidden, partial, total, count, height, width, prefix, P: tl.constexpr, K: tl.constexpr,
                KP: tl.constexpr, STATISTICS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sum the nine partial results at each position: (B, N, P) to (B, H·W, K).

    `spread` holds K values for each of the nine positions that a token contributes to, padded to P. With STATISTICS,
    `partial` (programs, 2, K) gets the mean and the sum of squared differences from it.
    """
    places, k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, KP)
    ok, image, patch = places < total, places // (height * width), (places % (height * width)).to(tl.int32)
    row, column = patch // width, patch % width
    sums = tl.zeros([BLOCK, KP], tl.float32)
    for tap in tl.static_range(9):
        near_row, near_column = row + tap // 3 - 1, column + tap % 3 - 1
        inside = ok & (near_row >= 0) & (near_row < height) & (near_column >= 0) & (near_column < width)
        place = (image * count + prefix + near_row * width + near_column) * P + tap * K
        near = tl.load(spread + place[:, None] + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
        sums += near.to(tl.float32)
    tl.store(hidden + places[:, None] * K + k[None, :], sums, mask=ok[:, None] & (k < K)[None, :])
    if STATISTICS:
        values = tl.minimum(total - tl.program_id(0).to(tl.int64) * BLOCK, BLOCK)
        mean = tl.sum(sums, 0) / values
        off = tl.where(ok[:, None], sums - mean[None, :], 0.0)
        here = partial + tl.program_id(0) * 2 * K + k
        tl.store(here, mean, mask=k < K)
        tl.store(here + K, tl.sum(off * off, 0), mask=k < K)


@triton.jit
def _convolved(hidden, second, scale, shift, places, row, column, ok, height, width, K: tl.constexpr):
    """The second convolution of scale · hidden + shift, at some patches: a tuple of K vectors."""
    scores = ()
    for _ in tl.static_range(K):
        scores = scores + (tl.zeros(row.shape, tl.float32),)
    for down in range(3):  # a loop: all nine positions unrolled take a second to compile
        near_row = row + down - 1
        there = ok & (near_row >= 0) & (near_row < height)
        for across in tl.static_range(3):
            near_column = column + across - 1
            inside = there & (near_column >= 0) & (near_column < width)
            place = (places + (down - 1) * width + across - 1) * K
            for j in tl.static_range(K):
                value = tl.load(hidden + place + j, mask=inside, other=0.0) * scale[j]
                value = tl.where(inside, value + shift[j], 0.0)
                more = ()
                for k in tl.static_range(K):
                    weight = tl.load(second + (k * K + j) * 9 + 3 * down + across).to(tl.float32)
                    more = more + (scores[k] + value * weight,)
                scores = more
    return scores


@triton.jit
def mixing_weights(hidden, partial, gamma, beta, second, weights, statistics, total, height, width, parts, eps,
                   NORM: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """softmax(conv(norm(hidden))): (B, H·W, K) to the same; with NORM, the statistics come from `partial`.

    `statistics` (2, K) gets each channel's mean and variance.
    """
    scale, shift = (), ()
    for k in tl.static_range(K):
        if NORM:
            part = tl.arange(0, PARTS)
            size = tl.maximum(tl.minimum(total - part.to(tl.int64) * EACH, EACH), 0).to(tl.float32)
            means = tl.load(partial + part * 2 * K + k, mask=part < parts, other=0.0)
            squares = tl.load(partial + part * 2 * K + K + k, mask=part < parts, other=0.0)
            mean = tl.sum(means * size, 0) / total
            variance = tl.sum(squares + size * (means - mean) * (means - mean), 0) / total
            if tl.program_id(0) == 0:
                tl.store(statistics + k, mean)
                tl.store(statistics + K + k, variance)
            factor = tl.load(gamma + k).to(tl.float32) * tl.rsqrt(variance + single(eps))
            scale, shift = scale + (factor,), shift + (tl.load(beta + k).to(tl.float32) - mean * factor,)
        else:
            scale, shift = scale + (1.0,), shift + (0.0,)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok, patch = places < total, (places % (height * width)).to(tl.int32)
    scores = _convolved(hidden, second, scale, shift, places, patch // width, patch % width, ok, height, width, K)
    most = scores[0]
    for k in tl.static_range(1, K):
        most = tl.maximum(most, scores[k], propagate_nan=tl.PropagateNan.ALL)
    whole = tl.zeros_like(most)
    powers = ()
    for k in tl.static_range(K):
        power = tl.exp(scores[k] - most)
        whole += power
        powers = powers + (power,)
    for k in tl.static_range(K):
        tl.store(weights + places * K + k, powers[k] / whole, mask=ok)


@triton.jit
def _around_patches(values, places, patch, shift, k, ok, height, width, K: tl.constexpr):
    """(T, S): channel k of the patch at offset `shift` from each patch, `shift` and `k` (S,), and whether it exists."""
    row = (patch // width)[:, None] + (shift // 3 - 1)[None, :]
    column = (patch % width)[:, None] + (shift % 3 - 1)[None, :]
    inside = ok & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    near = places[:, None] + ((shift // 3 - 1) * width + shift % 3 - 1)[None, :]
    return tl.load(values + near * K + k[None, :], mask=inside, other=0.0), inside


@triton.jit
def score_backward(score_gradient, hidden, statistics, gamma, beta, second, hidden_gradient, sums, total, height, width,
                   steps, eps, NORM: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, TAPS: tl.constexpr,
                   BT: tl.constexpr):  # fmt: skip
    """Gradients of the second convolution: of its input (B, H·W, K), and of its weights, in parts.

    `sums` gets the latter, (programs, K · 9·K), and with NORM, (2·K, programs), the sums of the former and of the
    former times the normalised hidden values. Each gradient is one product for BT patches. TAPS is 9 · K, padded.
    """
    k, taps = tl.arange(0, KP), tl.arange(0, TAPS)
    tap, other, exists = taps // K, taps % K, taps < 9 * K
    matrix = tl.load(second + (other[:, None] * K + k[None, :]) * 9 + tap[:, None],
                     mask=exists[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)  # fmt: skip
    if NORM:
        mean = tl.load(statistics + k, mask=k < K, other=0.0)
        spread = tl.rsqrt(tl.load(statistics + K + k, mask=k < K, other=1.0) + single(eps))
        scale = tl.load(gamma + other).to(tl.float32) * tl.rsqrt(tl.load(statistics + K + other) + single(eps))
        shift = tl.load(beta + other).to(tl.float32) - tl.load(statistics + other) * scale
    weight_sums = tl.zeros([KP, TAPS], tl.float32)
    plain, scaled = tl.zeros([BT, KP], tl.float32), tl.zeros([BT, KP], tl.float32)
    first = tl.program_id(0).to(tl.int64) * (steps * BT)
    for step in range(0, steps):
        places = first + step * BT + tl.arange(0, BT)
        ok, patch = places < total, (places % (height * width)).to(tl.int32)
        both = ok[:, None] & exists[None, :]
        place, inside = places[:, None] * K + k[None, :], ok[:, None] & (k < K)[None, :]
        mine = tl.load(score_gradient + place, mask=inside, other=0.0)
        near, there = _around_patches(hidden, places, patch, tap, other, both, height, width, K)
        if NORM:
            near = tl.where(there, near * scale[None, :] + shift[None, :], 0.0)
        weight_sums = tl.dot(tl.trans(mine), near, weight_sums, input_precision="tf32x3")
        slopes, _ = _around_patches(score_gradient, places, patch, 8 - tap, other, both, height, width, K)
        made = tl.dot(slopes, matrix, input_precision="tf32x3")
        tl.store(hidden_gradient + place, made, mask=inside)
        if NORM:
            own = tl.load(hidden + place, mask=inside, other=0.0)
            made = tl.where(inside, made, 0.0)
            plain += made
            scaled += made * (own - mean[None, :]) * spread[None, :]
    program, programs = tl.program_id(0), tl.num_programs(0)
    place = program * (9 * K * K) + k[:, None] * (9 * K) + taps[None, :]
    tl.store(sums + place, weight_sums, mask=(k < K)[:, None] & exists[None, :])
    if NORM:
        sums += programs * (9 * K * K) + program
        tl.store(sums + k * programs, tl.sum(plain, 0), mask=k < K)
        tl.store(sums + (K + k) * programs, tl.sum(scaled, 0), mask=k < K)


@triton.jit
def _add_up(sums, totals, block, parts, size, PARTS: tl.constexpr):
    """Add up 16 columns of (parts, size)."""
    part, place = tl.arange(0, PARTS), block * 16 + tl.arange(0, 16)
    inside = (part < parts)[:, None] & (place < size)[None, :]
    tile = tl.load(sums + part[:, None] * size + place[None, :], mask=inside, other=0.0)
    tl.store(totals + place, tl.sum(tile, 0), mask=place < size)


@triton.jit
def scatter_taps(gradient, hidden, statistics, gamma, sums, spread, totals, tokens, count, height, width, prefix, parts,
                 blocks, eps, NORM: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
                 PARTS: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """The gradient of `gather_taps`' input (B, N, P), 0 for prefix tokens and for the padding, through the norm.

    `totals` gets the sums of `sums`; programs after the first `blocks` add up 16 columns of its first part each.
    """
    if tl.program_id(0) >= blocks:
        _add_up(sums, totals, tl.program_id(0) - blocks, parts, 9 * K * K, PARTS)
    else:
        token, taps = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, PP)
        tap, k = taps // K, taps % K
        image, patch = token // count, (token % count).to(tl.int32) - prefix
        row = (patch // width)[:, None] - (tap // 3 - 1)[None, :]
        column = (patch % width)[:, None] - (tap % 3 - 1)[None, :]
        inside = ((token < tokens) & (patch >= 0))[:, None] & (tap < 9)[None, :]
        inside = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        place = ((image * (height * width))[:, None] + row * width + column) * K + k[None, :]
        value = tl.load(gradient + place, mask=inside, other=0.0)
        if NORM:
            number = (tokens // count) * (height * width)
            part, ks = tl.arange(0, PARTS), tl.arange(0, KP)
            inner = (ks < K)[:, None] & (part < parts)[None, :]
            start = sums + parts * (9 * K * K) + ks[:, None] * parts + part[None, :]
            plain = tl.sum(tl.load(start, mask=inner, other=0.0), 1)
            scaled = tl.sum(tl.load(start + K * parts, mask=inner, other=0.0), 1)
            if tl.program_id(0) == 0:
                tl.store(totals + 9 * K * K + ks, plain, mask=ks < K)
                tl.store(totals + 9 * K * K + K + ks, scaled, mask=ks < K)
            plain, scaled = plain / number, scaled / number
            own = (ks[:, None] == k[None, :]) & (tap < 9)[None, :]
            plain = tl.sum(tl.where(own, plain[:, None], 0.0), 0)
            scaled = tl.sum(tl.where(own, scaled[:, None], 0.0), 0)
            mean, variance = tl.load(statistics + k), tl.load(statistics + K + k)
            factor = tl.rsqrt(variance + single(eps))
            normal = (tl.load(hidden + place, mask=inside, other=0.0) - mean[None, :]) * factor[None, :]
            factor *= tl.load(gamma + k).to(tl.float32)
            value = (value - plain[None, :] - normal * scaled[None, :]) * factor[None, :]
            value = tl.where(inside, value, 0.0)
        place = token[:, None] * P + taps[None, :]
        inside = (token < tokens)[:, None] & (taps < P)[None, :]
        tl.store(spread + place, value.to(spread.dtype.element_ty), mask=inside)


@on_device_of_first
def gather(spread: Tensor, grid: tuple[int, int], branches: int, statistics: bool = False) -> tuple[Tensor, Tensor]:
    """Hidden values (B, H·W, K) in float32, and partial statistics."""
    batch, count, padded = spread.shape
    height, width = grid
    total = batch * height * width
    hidden = torch.empty(batch, height * width, branches, dtype=torch.float32, device=spread.device)
    block = gather_block(total)
    blocks = -(-total // block)
    partial = torch.empty(blocks, 2, branches, dtype=torch.float32, device=spread.device) if statistics else hidden
    gather_taps[(blocks,)](
        spread, hidden, partial, total, count, height, width, count - height * width, P=padded, K=branches,
        KP=power_of_two(branches), STATISTICS=statistics, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return hidden, partial


def gather_block(total: int) -> int:
    """Patches per program of `gather_taps`: at most 1024 programs, or 2048 patches."""
    return min(2048, max(128, power_of_two(-(-total // 1024))))


@on_device_of_first
def weigh(
    hidden: Tensor, second: Tensor, grid: tuple[int, int],
    norm: tuple[Tensor, Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights (B, H·W, K), and the mean and variance (2, K); `norm` are partial statistics, gamma, beta and eps."""
    batch, patches, branches = hidden.shape
    total = batch * patches
    weights = torch.empty_like(hidden)
    partial, gamma, beta, eps = norm if norm is not None else (hidden, hidden, hidden, 0.0)
    statistics = torch.empty(2, branches, dtype=torch.float32, device=hidden.device) if norm is not None else hidden
    parts = partial.shape[0] if norm is not None else 1
    mixing_weights[(-(-total // 128),)](
        hidden, partial, gamma, beta, second, weights, statistics, total, *grid, parts, eps, NORM=norm is not None,
        EACH=gather_block(total), PARTS=power_of_two(parts), K=branches, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return weights, statistics


@on_device_of_first
def unweigh(
    score_gradient: Tensor, hidden: Tensor, second: Tensor, grid: tuple[int, int],
    norm: tuple[Tensor, Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the second convolution's input (B, H·W, K), and the sums that `score_backward` describes."""
    batch, patches, branches = hidden.shape
    total = batch * patches
    statistics, gamma, beta, eps = norm if norm is not None else (hidden, hidden, hidden, 0.0)
    rows, most, warps = SUMS
    steps = max(1, -(-total // (rows * most)))
    parts = -(-total // (rows * steps))
    gradient = torch.empty_like(hidden)
    sums = hidden.new_empty(parts, 9 * branches**2 + (2 * branches if norm else 0))
    score_backward[(parts,)](
        score_gradient, hidden, statistics, gamma, beta, second, gradient, sums, total, *grid, steps, eps,
        NORM=norm is not None, K=branches, KP=16, TAPS=max(16, power_of_two(9 * branches)), BT=rows, num_warps=warps,
        num_stages=1,
    )  # fmt: skip
    return gradient, sums


@on_device_of_first
def scatter(
    gradient: Tensor, hidden: Tensor, sums: Tensor | None, grid: tuple[int, int], count: int, padded: int,
    dtype: torch.dtype, norm: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of what tokens contribute (B, N, P), and the totals of `sums`."""
    batch, patches, branches = gradient.shape
    statistics, gamma, eps = norm if norm is not None else (hidden, hidden, 0.0)
    spread = torch.empty(batch, count, padded, dtype=dtype, device=gradient.device)
    parts, size = (0, 0) if sums is None else (sums.shape[0], 9 * branches**2)
    totals = torch.empty(size + (2 * branches if norm else 0), dtype=torch.float32, device=gradient.device)
    rows = 32
    blocks = -(-batch * count // rows)
    scatter_taps[(blocks + -(-size // 16),)](
        gradient, hidden, statistics, gamma, hidden if sums is None else sums, spread, totals, batch * count, count,
        *grid, count - patches, parts, blocks, eps, NORM=norm is not None, P=padded, PP=power_of_two(padded),
        K=branches, KP=power_of_two(branches), PARTS=power_of_two(max(1, parts)), BT=rows, num_warps=4,
    )  # fmt: skip
    return spread, totals
