"""Counting values in a histogram, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vitfocus.kernels.backends import on_device_of_first
from vitfocus.kernels.tiles import single

#: Adjacent bins are this many apart in memory. Entropies of a layer are alike, and atomic additions to one cache line
#: take turns.
_APART = 512
_BLOCK = 1024


@triton.jit
def count_pass(
    values, memory, length, low, high, per_unit, BINS: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr
):
    """Add 1 to the bin of each value. Counts are integers, so their order does not matter."""
    low, high, per_unit = single(low), single(high), single(per_unit)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place, mask=place < length, other=float("nan"))
    inside = (value >= low) & (value <= high)  # NaN is not
    number = tl.minimum(tl.where(inside, (value - low) * per_unit, 0.0).to(tl.int32), BINS - 1)
    number = number % (BINS // APART) * APART + number // (BINS // APART)
    tl.atomic_add(memory + number, 1, mask=inside, sem="relaxed")


@on_device_of_first
def count(values: Tensor, memory: Tensor, low: float, high: float) -> None:
    """Add the counts of values (n,) to those in memory (bins,), whose order `gathered` undoes."""
    bins = len(memory)
    count_pass[(-(-len(values) // _BLOCK),)](
        values, memory, len(values), low, high, bins / (high - low), BINS=bins, APART=_apart(bins), BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip


def gathered(memory: Tensor) -> Tensor:
    """The counts (bins,) in the order of the bins."""
    return memory.view(-1, _apart(len(memory))).T.flatten()


def _apart(bins: int) -> int:
    return _APART if bins % _APART == 0 else 1
