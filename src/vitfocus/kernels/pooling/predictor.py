"""The predictor of Token-aware Average Pooling on tokens (B, N, C): conv3×3 → batch norm → conv3×3 → softmax.

The first convolution is a product of the tokens with a (C, 9·K) matrix, whose nine results for each token `gather_taps`
adds up at its neighbours. The kernels between that product and the mixing move little memory; there are as few of them
as possible, because each takes microseconds to start. The batch norm is therefore part of them: `gather_taps` leaves
partial statistics, and `score_backward` partial sums of the norm's gradient, which the next kernel adds up.

Patches and tokens are numbered in 32 bits, because GPUs divide numbers of 64 bits in a subroutine of a hundred
instructions; addresses have 64 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.backends import on_device_of_first
from vitfocus.kernels.shared_memory import power_of_two
from vitfocus.kernels.tiles import single

#: Patches at a time, most programs and warps of `score_backward`, whose sums every program of `scatter_taps` reads.
SUMS = (64, 256, 4)
#: Programs of `tap_products` that keep a large GPU busy.
BUSY = 264


@triton.jit
def arrange_taps(first, matrix, size, C, K: tl.constexpr, BLOCK: tl.constexpr):
    """The weights (K, C, 3, 3) as (P, C), a row for each position and branch, and rows of 0."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, channel = place // C, place % C
    tap, k = row // K, row % K
    value = tl.load(first + (k * C + channel) * 9 + tap, mask=row < 9 * K, other=0.0)
    tl.store(matrix + place, value.to(matrix.dtype.element_ty), mask=place < size)


@triton.jit
def tap_products(slope, tokens, parts, total, C, steps, PRECISION: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr,
                 PP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """slopeᵀ · tokens, (P, total) with (total, C), in parts: one program per part and per BC channels.

    `parts` gets the first ROWS of P rows, (parts, ROWS, C).
    """
    chunks = tl.cdiv(C, BC)
    part = tl.program_id(0) // chunks
    taps, channels = tl.arange(0, PP), (tl.program_id(0) % chunks) * BC + tl.arange(0, BC)
    made = tl.zeros([PP, BC], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        first = (part * steps + step) * BT
        place, ok = tl.arange(0, BT), first + tl.arange(0, BT) < total
        slope_at, token_at = slope + first.to(tl.int64) * P, tokens + first.to(tl.int64) * C
        left = tl.load(slope_at + place[:, None] * P + taps[None, :], mask=ok[:, None] & (taps < P)[None, :], other=0.0)
        inside = ok[:, None] & (channels < C)[None, :]
        right = tl.load(token_at + place[:, None] * C + channels[None, :], mask=inside, other=0.0)
        made = tl.dot(tl.trans(left), right, made, input_precision=PRECISION)
    here = parts + part.to(tl.int64) * (ROWS * C) + taps[:, None] * C + channels[None, :]
    tl.store(here, made, mask=(taps < ROWS)[:, None] & (channels < C)[None, :])


@triton.jit
def tap_gradient(parts, out, count, C, K: tl.constexpr, BC: tl.constexpr, AT_ONCE: tl.constexpr):
    """Add up parts (count, 9 · K, C) as the gradient of the weights, (K, C, 3, 3)."""
    chunks = tl.cdiv(C, BC)
    row, channel = tl.program_id(0) // chunks, (tl.program_id(0) % chunks) * BC + tl.arange(0, BC)
    made = tl.zeros([AT_ONCE, BC], tl.float32)
    for first in range(0, count, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        place = (part.to(tl.int64) * (9 * K * C))[:, None] + (row * C + channel)[None, :]
        made += tl.load(parts + place, mask=(part < count)[:, None] & (channel < C)[None, :], other=0.0)
    place = ((row % K) * C + channel) * 9 + row // K
    tl.store(out + place, tl.sum(made, 0).to(out.dtype.element_ty), mask=channel < C)


@triton.jit
def gather_taps(spread, hidden, partial, total, count, height, width, prefix, P: tl.constexpr, K: tl.constexpr,
                KP: tl.constexpr, STATISTICS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sum the nine partial results at each position: (B, N, P) to (B, H·W, K).

    `spread` holds K values for each of the nine positions that a token contributes to, padded to P. With STATISTICS,
    `partial` (programs, 2, K) gets the mean and the sum of squared differences from it.
    """
    first, k = tl.program_id(0) * BLOCK, tl.arange(0, KP)
    places = first + tl.arange(0, BLOCK)
    ok, patch, first_image = places < total, places % (height * width), first // (height * width)
    image, row, column = places // (height * width) - first_image, patch // width, patch % width
    near_at, made_at = spread + (first_image.to(tl.int64) * count + prefix) * P, hidden + first.to(tl.int64) * K
    sums = tl.zeros([BLOCK, KP], tl.float32)
    for tap in tl.static_range(9):
        near_row, near_column = row + tap // 3 - 1, column + tap % 3 - 1
        inside = ok & (near_row >= 0) & (near_row < height) & (near_column >= 0) & (near_column < width)
        place = (image * count + near_row * width + near_column) * P + tap * K
        near = tl.load(near_at + place[:, None] + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
        sums += near.to(tl.float32)
    tl.store(made_at + tl.arange(0, BLOCK)[:, None] * K + k[None, :], sums, mask=ok[:, None] & (k < K)[None, :])
    if STATISTICS:
        values = tl.minimum(total - first, BLOCK)
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
            size = tl.maximum(tl.minimum(total - part * EACH, EACH), 0).to(tl.float32)
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
    first, places = tl.program_id(0) * BLOCK, tl.arange(0, BLOCK)
    ok, patch = first + places < total, (first + places) % (height * width)
    hidden, weights = hidden + first.to(tl.int64) * K, weights + first.to(tl.int64) * K
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
def score_backward(score_gradient, hidden, statistics, gamma, beta, second, hidden_gradient, sums, total, height, width,
                   steps, eps, NORM: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, TAPS: tl.constexpr,
                   BT: tl.constexpr):  # fmt: skip
    """Gradients of the second convolution: of its input (B, H·W, K), and of its weights, in parts.

    `sums` gets the latter, (programs, K · K · 9), and with NORM, (2·K, programs), the sums of the former and of the
    former times the normalised hidden values. Both gradients are products of one tile, the scores' gradient around BT
    patches. TAPS is 9 · K, padded, and KP more than K, padded.
    """
    taps, channel = tl.arange(0, TAPS), tl.arange(0, KP)
    tap, other, known = taps // K, taps % K, channel < K
    down, across = 1 - tap // 3, 1 - tap % 3  # from a patch to a score that it is a part of
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = program * (steps * BT)
    start = first.to(tl.int64) * K
    weight = (other[:, None] * K + channel[None, :]) * 9 + tap[:, None]
    exists = (taps < 9 * K)[:, None] & known[None, :]
    matrix = tl.load(second + weight, mask=exists, other=0.0).to(tl.float32)
    products = tl.zeros([TAPS, KP], tl.float32)
    if NORM:
        mean = tl.load(statistics + channel, mask=known, other=0.0)
        spread = tl.rsqrt(tl.load(statistics + K + channel, mask=known, other=1.0) + single(eps))
    for step in range(0, steps):
        place = step * BT + tl.arange(0, BT)
        ok, patch = first + place < total, (first + place) % (height * width)
        high, wide = (patch // width)[:, None] + down[None, :], (patch % width)[:, None] + across[None, :]
        inside = (high >= 0) & (high < height) & (wide >= 0) & (wide < width) & ok[:, None] & (taps < 9 * K)[None, :]
        near = (place[:, None] + (down * width + across)[None, :]) * K + other[None, :]
        slopes = tl.load(score_gradient + start + near, mask=inside, other=0.0)
        own, there = start + place[:, None] * K + channel[None, :], ok[:, None] & known[None, :]
        value = tl.load(hidden + own, mask=there, other=0.0)
        if NORM:
            value = (value - mean[None, :]) * spread[None, :]
            value = tl.where((channel == K)[None, :], 1.0, value)  # whose products are the sums of `slopes`
        tl.store(hidden_gradient + own, tl.dot(slopes, matrix, input_precision="tf32x3"), mask=there)
        products = tl.dot(tl.trans(slopes), value, products, input_precision="tf32x3")
    made = products
    if NORM:
        slope_sums = tl.sum(tl.where((channel == K)[None, :], products, 0.0), 1)
        scale = tl.load(gamma + channel, mask=known, other=0.0).to(tl.float32)
        shift = tl.load(beta + channel, mask=known, other=0.0).to(tl.float32)
        made = products * scale[None, :] + slope_sums[:, None] * shift[None, :]
        column = sums + programs * (9 * K * K) + program + channel * programs
        tl.store(column, tl.sum(matrix * slope_sums[:, None], 0), mask=known)
        tl.store(column + K * programs, tl.sum(matrix * products, 0), mask=known)
    tl.store(sums + program * (9 * K * K) + weight, made, mask=exists)


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
        first, taps = tl.program_id(0) * BT, tl.arange(0, PP)
        token, first_image = first + tl.arange(0, BT), first // count
        tap, k = taps // K, taps % K
        image, patch = token // count - first_image, token % count - prefix
        gradient += first_image.to(tl.int64) * (height * width) * K
        hidden += first_image.to(tl.int64) * (height * width) * K
        row = (patch // width)[:, None] - (tap // 3 - 1)[None, :]
        column = (patch % width)[:, None] - (tap % 3 - 1)[None, :]
        inside = ((token < tokens) & (patch >= 0))[:, None] & (tap < 9)[None, :]
        inside = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        place = ((image * (height * width))[:, None] + row * width + column) * K + k[None, :]
        value = tl.load(gradient + place, mask=inside, other=0.0)
        if NORM:
            number = tl.cast((tokens // count) * (height * width), tl.float32)
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
        place = tl.arange(0, BT)[:, None] * P + taps[None, :]
        inside = (token < tokens)[:, None] & (taps < P)[None, :]
        tl.store(spread + first.to(tl.int64) * P + place, value.to(spread.dtype.element_ty), mask=inside)


@triton.jit
def _moved(old, new, share, NEAR: tl.constexpr):
    """A share of the way from old to new, computed from the nearer end as torch.lerp does: a share of 1 is exact."""
    if NEAR:
        return old + share * (new - old)
    return new - (1 - share) * (new - old)


@triton.jit
def track_statistics(statistics, mean, variance, batches, share, unbiased, NEAR: tl.constexpr, COUNT: tl.constexpr,
                     K: tl.constexpr, KP: tl.constexpr):  # fmt: skip
    """Move a norm's running mean and variance a share of the way to `statistics` (2, K), and count the batch."""
    k = tl.arange(0, KP)
    share, known = single(share), k < K
    new = tl.load(statistics + k, mask=known, other=0.0)
    old = tl.load(mean + k, mask=known, other=0.0).to(tl.float32)
    tl.store(mean + k, _moved(old, new, share, NEAR), mask=known)
    new = tl.load(statistics + K + k, mask=known, other=0.0) * single(unbiased)
    old = tl.load(variance + k, mask=known, other=0.0).to(tl.float32)
    tl.store(variance + k, _moved(old, new, share, NEAR), mask=known)
    if COUNT:
        tl.store(batches, tl.load(batches) + 1)


@on_device_of_first
def track(buffers: tuple[Tensor, Tensor, Tensor | None], statistics: Tensor, momentum: float, count: int) -> None:
    """Update a norm's running mean, variance and number of batches with a batch of `count` values per channel."""
    mean, variance, batches = buffers
    branches = statistics.shape[1]
    track_statistics[(1,)](
        statistics, mean, variance, mean if batches is None else batches, float(momentum), count / (count - 1),
        NEAR=momentum < 0.5, COUNT=batches is not None, K=branches, KP=power_of_two(branches), num_warps=1,
    )  # fmt: skip


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


def matrix_rows(branches: int) -> int:
    """Values that a token passes to its neighbours, padded to a multiple of eight for fast matrix products.

    >>> matrix_rows(4)
    40
    """
    return -(-9 * branches // 8) * 8


@on_device_of_first
def first_matrix(first: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights (K, C, 3, 3) as a matrix (P, C) in this dtype."""
    branches, channels = first.shape[:2]
    matrix = torch.empty(matrix_rows(branches), channels, dtype=dtype, device=first.device)
    size, block = matrix.numel(), 256
    arrange_taps[(-(-size // block),)](first, matrix, size, channels, K=branches, BLOCK=block, num_warps=4)
    return matrix


@on_device_of_first
def first_gradient(slope: Tensor, tokens: Tensor, first: Tensor) -> Tensor:
    """The gradient of the weights `first` from that of what tokens contribute to their neighbours, (B, N, P)."""
    branches, channels = first.shape[:2]
    total, rows, padded = tokens.shape[0] * tokens.shape[1], slope.shape[2], max(16, power_of_two(slope.shape[2]))
    block, wide, stages = (32, 64, 2) if tokens.dtype == torch.float32 else (64, 128, 3)
    wide = max(16, min(wide if padded <= 64 and channels % wide == 0 else wide // 2, power_of_two(channels)))
    chunks = -(-channels // wide)
    steps = max(1, -(-total // (block * max(1, BUSY // chunks))))
    count = -(-total // (block * steps))
    parts = torch.empty(count, 9 * branches, channels, dtype=torch.float32, device=tokens.device)
    tap_products[(count * chunks,)](
        slope, tokens, parts, total, channels, steps, PRECISION="tf32x3", ROWS=9 * branches, P=rows, PP=padded,
        BT=block, BC=wide, STAGES=stages, num_warps=4,
    )  # fmt: skip
    made = torch.empty_like(first, memory_format=torch.contiguous_format)
    wide = min(128, power_of_two(channels))
    tap_gradient[(9 * branches * -(-channels // wide),)](
        parts, made, count, channels, K=branches, BC=wide, AT_ONCE=32, num_warps=4
    )
    return made
