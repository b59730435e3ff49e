"""How a model is compiled: not at all, as a whole, or block by block.

Compiled as a whole, a transformer of twelve blocks has the same block compiled twelve times. Block by block, the second
block finds what the first left in the cache; what is lost is fusion across blocks.
"""

from __future__ import annotations

import torch
from torch import nn

from vitfocus.anatomy import anatomy
from vitfocus.recipes.settings import Recipe
from vitfocus.tasks import find_task

#: Versions of one block that a run may need: training, evaluation, each with a smaller last batch.
_VERSIONS = 4


def compile_mode(recipe: Recipe, cuda: bool) -> str | None:
    """How the model is compiled: by a mode of torch.compile, block by block ("blocks"), or not at all (None).

    A small model's step on a GPU is limited by kernel launches. Where the images are kept on the device the whole step
    is captured as a CUDA graph (`cuda_graph.py`); elsewhere a model on a single process is compiled with
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

    Treated blocks, and blocks with different rates of stochastic depth, are versions of one function to the compiler.
    Beyond its limit on versions it would silently stop compiling, so the limit is raised to the number of blocks.
    """
    import torch._dynamo

    body = anatomy(model)
    blocks = [body.root.get_submodule(block.name) for block in body]
    for block in blocks:
        block.compile(dynamic=False)
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VERSIONS * len(blocks))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 2 * _VERSIONS * len(blocks))
    return len(blocks)
