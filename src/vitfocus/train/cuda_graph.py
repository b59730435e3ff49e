"""A training step captured as one CUDA graph and replayed: augmentation, forward, backward, clipping, optimiser.

A small model's step is thousands of short kernels, and launching them one by one takes the host longer than the GPU
needs to run them. The first steps run eagerly, so that everything is compiled and allocated; the next is captured, and
from then on a step is a few small copies and one launch. What differs from step to step is in tensors: indices and
random draws, mixing weights, the learning rate. Random numbers in the graph follow torch's generator, which is seeded
at every step, so a captured run draws the same numbers as an eager one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitfocus.tasks.base import RecordableBatches
from vitfocus.treatments.attention_diversification import forget_losses

if TYPE_CHECKING:
    from vitfocus.train.trainer import Trainer

#: Eager steps before one is captured.
WARM_UP = 3


class CapturedStep:
    """The inner part of `Trainer.train_step`; returns the loss terms."""

    def __init__(self, trainer: Trainer, batches: RecordableBatches) -> None:
        self.trainer, self.batches = trainer, batches
        self.taken = 0
        self.inputs: tuple[Tensor, ...] = ()
        self.terms = torch.empty(0)
        self.graph: torch.cuda.CUDAGraph | None = None
        for group in trainer.optimiser.optimizer.param_groups:
            group["capturable"] = True
            for state in (trainer.optimiser.optimizer.state.get(parameter, {}) for parameter in group["params"]):
                if isinstance(state.get("step"), Tensor):  # a checkpoint puts the count on the CPU for most optimisers
                    state["step"] = state["step"].to(trainer.accelerator.device, torch.float32)
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=trainer.accelerator.device)

    @staticmethod
    def of(trainer: Trainer) -> CapturedStep | None:
        """A captured step where possible: one process, one part, one device, nothing that waits for the host."""
        recipe, accelerator = trainer.recipe, trainer.accelerator
        batches = trainer.task.recordable()
        groups: list[dict[str, Any]] = trainer.optimiser.optimizer.param_groups
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
        return CapturedStep(trainer, batches)

    def __call__(self, step: int) -> Tensor:
        """Take one step; the learning rate and the generators are set already."""
        given = self.batches.inputs(step)
        if self.graph is not None:
            for place, value in zip(self.inputs, given, strict=True):
                place.copy_(value)
            self.graph.replay()
            return self.terms
        epoch = self.trainer.schedule.epoch(step)
        settled = epoch >= self.trainer.recipe.loss.adl_warmup_epochs  # a rising weight is a number on the host
        if self.taken < WARM_UP or not settled:
            self.taken += 1
            return self._body(given, epoch)
        self.inputs = tuple(value.clone() for value in given)
        forget_losses(self.trainer.unwrapped)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.terms = self._body(self.inputs, epoch)
        self.graph = graph
        graph.replay()
        return self.terms

    def _body(self, inputs: tuple[Tensor, ...], epoch: float) -> Tensor:
        trainer, clip = self.trainer, self.trainer.recipe.optimiser.clip
        optimiser = trainer.optimiser.optimizer
        terms = torch.stack(trainer.task.terms(trainer.model, self.batches.make(*inputs), epoch))
        terms.sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(trainer.unwrapped.parameters(), clip)
        optimiser.step()
        optimiser.zero_grad()
        return terms.detach()
