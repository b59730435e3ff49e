"""A training step recorded as a CUDA graph.

A small model's step is thousands of short kernels, and launching them one by one takes the host longer than the GPU
needs to run them. The first steps run eagerly, so that everything is compiled and allocated; the next is captured as a
CUDA graph (augmentation, forward, backward, clipping, optimiser), and from then on a step is a few small copies and one
launch. What differs from step to step is in tensors. Random numbers in the graph follow torch's generator, which is
seeded at every step, so a captured run draws the same numbers as an eager one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitfocus.treatments.attention_diversification import reset_losses

#: Eager steps before one is captured.
WARM_UP = 3


def can_capture(optimiser: Optimizer) -> bool:
    """Whether an optimiser's step runs without synchronising with the host."""
    return all(group.get("fused") or "capturable" in group for group in optimiser.param_groups)


class CapturedStep:
    """A step of `model`: `body(inputs, epoch)` is forward, backward and update, and returns the loss terms."""

    def __init__(
        self,
        body: Callable[[tuple[Tensor, ...], float], Tensor],
        model: nn.Module,
        optimiser: Optimizer,
        device: torch.device,
    ) -> None:
        self.body, self.model = body, model
        self.taken = 0
        self.inputs: tuple[Tensor, ...] = ()
        self.terms = torch.empty(0)
        self.graph: torch.cuda.CUDAGraph | None = None
        for group in optimiser.param_groups:
            group["capturable"] = True
            for state in (optimiser.state.get(parameter, {}) for parameter in group["params"]):
                if isinstance(state.get("step"), Tensor):  # most optimisers restore the count on the CPU
                    state["step"] = state["step"].to(device, torch.float32)
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)

    def __call__(self, inputs: tuple[Tensor, ...], epoch: float, settled: bool) -> Tensor:
        """Take one step; nothing is captured until the loss is `settled`, when its weights no longer change.

        The learning rate must be set and the generators seeded beforehand.
        """
        if self.graph is not None:
            for place, value in zip(self.inputs, inputs, strict=True):
                place.copy_(value)
            self.graph.replay()
            return self.terms
        if self.taken < WARM_UP or not settled:
            self.taken += 1
            return self.body(inputs, epoch)
        self.inputs = tuple(value.clone() for value in inputs)
        reset_losses(self.model)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.terms = self.body(self.inputs, epoch)
        self.graph = graph
        graph.replay()
        return self.terms
