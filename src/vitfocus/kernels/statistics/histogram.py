"""A histogram of a stream of values, counted where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from vitfocus.kernels.backends import chosen


class Histogram:
    """How many values lie in each of `bins` equal bins between `low` and `high`; values outside are not counted.

    >>> histogram = Histogram(0.0, 4.0, 4, torch.device("cpu"))
    >>> histogram.add(torch.tensor([0.5, 2.5])); histogram.add(torch.tensor([2.0, 4.0, 5.0]))
    >>> histogram.counts().tolist()
    [1, 0, 2, 1]
    """

    #: How many values 32 bits count, whichever bin they are in.
    MOST = (1 << 31) - 1

    def __init__(self, low: float, high: float, bins: int, device: torch.device) -> None:
        self.low, self.high, self.bins, self.total = low, high, bins, 0
        self.memory = torch.zeros(bins, dtype=torch.int32, device=device)
        #: Whether the kernel counts, which keeps the bins in an order of its own.
        self.by_kernel = chosen(torch.empty(0, dtype=torch.float32, device=device)) == "triton"

    def add(self, values: Tensor) -> None:
        """Count every value of a float32 tensor (n,)."""
        self.total += len(values)
        if self.total > self.MOST:
            self.memory = self.memory.long()
        if self.by_kernel:
            from vitfocus.kernels.statistics.triton import count

            count(values, self.memory, self.low, self.high)
        else:
            self.memory += torch.histc(values, self.bins, self.low, self.high).to(self.memory.dtype)

    def counts(self) -> Tensor:
        """The number of values in each bin, (bins,), int32 or int64."""
        if not self.by_kernel:
            return self.memory
        from vitfocus.kernels.statistics.triton import gathered

        return gathered(self.memory)
