"""A faster training step: torch.compile for the whole model or for each block, and CUDA graphs.

Compiled as a whole, a transformer of twelve blocks has the same block compiled twelve times. Block by block, the second
block reuses the first one's compiled code, at the cost of fusion across blocks.

A small model's step is thousands of short kernels, and launching them one by one takes the host longer than the GPU
needs to run them. The first steps run eagerly, so that everything is compiled and allocated; the next is captured as a
CUDA graph (augmentation, forward, backward, clipping, optimiser), and from then on a step is a few small copies and one
launch. What differs from step to step is in tensors. Random numbers in the graph follow torch's generator, which is
seeded at every step, so a captured run draws the same numbers as an eager one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitfocus.anatomy import anatomy
from vitfocus.recipes import Recipe
from vitfocus.tasks import find_task
from vitfocus.treatments.attention_diversification import reset_losses

if TYPE_CHECKING:
    from timm.layers import DropPath

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


#: Versions of one block that a run may need: training, evaluation, each with a smaller last batch.
_VERSIONS = 4


def compile_mode(recipe: Recipe, cuda: bool) -> str | None:
    """How the model is compiled: by a mode of torch.compile, block by block ("blocks"), or not at all (None).

    A small model's step on a GPU is limited by kernel launches. Where the images are kept on the device the whole step
    is captured as a CUDA graph; elsewhere a model on a single process is compiled with
    "reduce-overhead", which captures the model alone.
    """
    engine = recipe.engine
    if engine.compile == "no" or (engine.compile == "auto" and not (cuda and find_task(recipe.task).compiles)):
        return None
    if engine.compile == "blocks":
        return "blocks"
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    whole = engine.record == "auto" and recipe.task == "classify" and recipe.data.resident != "no"
    return "reduce-overhead" if cuda and alone and engine.accumulate == 1 and not whole else "default"


def compile_blocks(model: nn.Module) -> int:
    """Compile each block when it is first called, in place, and return the number of blocks; names stay as they are.

    Blocks with different treatments are versions of one function to the compiler. Beyond its limit on versions it would
    silently stop compiling, so the limit is raised to the number of blocks. Rates of stochastic depth, which differ
    from block to block, become tensors, so that they do not make versions.
    """
    import torch._dynamo
    from timm.layers import DropPath

    body = anatomy(model)
    blocks = [body.root.get_submodule(block.name) for block in body]
    for block in blocks:
        for module in block.modules():
            if isinstance(module, DropPath) and module.drop_prob:
                module.__dict__["keep"] = torch.tensor(1 - module.drop_prob, device=next(block.parameters()).device)
                module.__dict__["forward"] = MethodType(_drop_paths, module)
        block.compile(dynamic=False)
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VERSIONS * len(blocks))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 2 * _VERSIONS * len(blocks))
    return len(blocks)


def _drop_paths(module: DropPath, tokens: Tensor) -> Tensor:
    """timm's stochastic depth with the rate in a tensor."""
    if not module.training:
        return tokens
    keep: Tensor = module.__dict__["keep"]
    kept = torch.rand(tokens.shape[0], *(1,) * (tokens.ndim - 1), device=tokens.device) < keep
    return tokens * (kept / keep if module.scale_by_keep else kept).to(tokens.dtype)
