"""A training step recorded as one CUDA graph and replayed: augmentation, forward, backward, clipping, optimiser.

A small model's step is thousands of short kernels, and a host that launches them one by one is slower than the GPU that
runs them. The first steps are taken as usual, so that everything is compiled and allocated; the next is recorded, and
from then on a step is a few small copies and one launch. What differs from step to step lies in tensors: indices and
draws, the numbers to mix by, the learning rate. Random numbers in the graph follow torch's generator, which every step
seeds anew, so a recorded run draws what an unrecorded one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitfocus.tasks.base import RecordableBatches
from vitfocus.treatments.attention_diversification import forget_losses

if TYPE_CHECKING:
    from vitfocus.train.engine import Engine

#: Steps taken as usual before one is recorded.
WARM_UP = 3


class RecordedStep:
    """Stands for the inner part of `Engine.one_step`; returns the loss terms."""

    def __init__(self, engine: Engine, batches: RecordableBatches) -> None:
        self.engine, self.batches = engine, batches
        self.taken = 0
        self.inputs: tuple[Tensor, ...] = ()
        self.terms = torch.empty(0)
        self.graph: torch.cuda.CUDAGraph | None = None
        for group in engine.optimiser.optimizer.param_groups:
            group["capturable"] = True
            for state in (engine.optimiser.optimizer.state.get(parameter, {}) for parameter in group["params"]):
                if isinstance(state.get("step"), Tensor):  # a checkpoint puts the count on the CPU for most optimisers
                    state["step"] = state["step"].to(engine.accelerator.device, torch.float32)
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=engine.accelerator.device)

    @staticmethod
    def of(engine: Engine) -> RecordedStep | None:
        """A recorded step where one is possible: one process, one part, one device, nothing that asks the host."""
        recipe, accelerator = engine.recipe, engine.accelerator
        batches = engine.task.recordable()
        groups: list[dict[str, Any]] = engine.optimiser.optimizer.param_groups
        if (
            recipe.engine.record == "no"
            or batches is None
            or accelerator.device.type != "cuda"
            or accelerator.num_processes > 1
            or accelerator.scaler is not None
            or recipe.engine.accumulate > 1
            or not all(group.get("fused") or "capturable" in group for group in groups)
        ):
            return None
        return RecordedStep(engine, batches)

    def __call__(self, step: int) -> Tensor:
        """Take one step; the learning rate and the generators are set already."""
        given = self.batches.inputs(step)
        if self.graph is not None:
            for place, value in zip(self.inputs, given, strict=True):
                place.copy_(value)
            self.graph.replay()
            return self.terms
        epoch = self.engine.plan.epoch(step)
        settled = epoch >= self.engine.recipe.loss.adl_warmup_epochs  # a rising weight is a number on the host
        if self.taken < WARM_UP or not settled:
            self.taken += 1
            return self._body(given, epoch)
        self.inputs = tuple(value.clone() for value in given)
        forget_losses(self.engine.raw)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.terms = self._body(self.inputs, epoch)
        self.graph = graph
        graph.replay()
        return self.terms

    def _body(self, inputs: tuple[Tensor, ...], epoch: float) -> Tensor:
        engine, clip = self.engine, self.engine.recipe.optimiser.clip
        optimiser = engine.optimiser.optimizer
        terms = torch.stack(engine.task.terms(engine.model, self.batches.make(*inputs), epoch))
        terms.sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(engine.raw.parameters(), clip)
        optimiser.step()
        optimiser.zero_grad()
        return terms.detach()
