"""Compiling a model block by block: blocks that are alike are compiled once, however many there are.

A compiler that sees a transformer of twelve blocks as a whole translates the same block twelve times over. Here every
block is a program of its own; the second finds what the first left behind. What is lost is fusion across blocks.
"""

from __future__ import annotations

from torch import nn

from vitfocus.anatomy import anatomy

#: Programs that one block may need over a run: training, evaluation, each with a last batch of another size.
_FORMS = 4


def compile_blocks(model: nn.Module) -> int:
    """Have each block compiled when it is first called, in place, names and weights as they were; how many there are.

    Treated blocks differ from each other in what the compiler checks, though not in what it makes of them, and so do
    blocks with rates of stochastic depth of their own: its limit on versions of one function is raised to the number of
    blocks, because beyond that limit it would silently compile no more.
    """
    import torch._dynamo

    body = anatomy(model)
    blocks = [body.root.get_submodule(block.name) for block in body]
    for block in blocks:
        block.compile(dynamic=False)
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _FORMS * len(blocks))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 2 * _FORMS * len(blocks))
    return len(blocks)
