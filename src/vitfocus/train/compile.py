"""A faster training step by torch.compile, for the whole model or for each block.

Compiled as a whole, a transformer of twelve blocks has the same block compiled twelve times. Block by block, the second
block reuses the first one's compiled code, at the cost of fusion across blocks. What timm's ViTs do before and after
their blocks is compiled too, and attention among few tokens and GELU have faster forms (`kernels/short_attention`,
`kernels/gelu.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfocus.anatomy import anatomy
from vitfocus.kernels.backends import exporting, forced
from vitfocus.kernels.gelu import gelu
from vitfocus.kernels.short_attention.op import ShortAttention
from vitfocus.recipes import Recipe
from vitfocus.tasks import find_task

if TYPE_CHECKING:
    from timm.layers import DropPath

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
    use_fast_forms(model)
    compile_outside(model)
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VERSIONS * len(blocks))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 2 * _VERSIONS * len(blocks))
    return len(blocks)


def use_fast_forms(model: nn.Module) -> None:
    """Let the attention and GELU of compiled blocks use vitfocus' forms where these apply, in place.

    Attention that is observed, as for the diversification loss, does so by itself. What runs eagerly, as for a reading,
    stays as it is.
    """
    for block in anatomy(model):
        if block.attention is not None and block.reader == "call" and "forward" not in block.attention.__dict__:
            block.attention.__dict__["forward"] = MethodType(_attend, block.attention)
        for module in block.host.modules():
            if type(module) is nn.GELU and module.approximate == "none" and "forward" not in module.__dict__:
                module.__dict__["forward"] = MethodType(_gelu, module)


def _attend(module: nn.Module, *args: Any, **keywords: Any) -> Any:
    """An attention module's own forward pass, with the kernels for few tokens if it is compiled, and not observed."""
    if not torch.compiler.is_compiling() or module.__dict__["forward"].__self__ is not module:
        return type(module).forward(module, *args, **keywords)
    with ShortAttention():
        return type(module).forward(module, *args, **keywords)


def _gelu(module: nn.GELU, values: Tensor) -> Tensor:
    """GELU, in its faster form if it is compiled for a GPU, in half precision."""
    half = values.device.type == "cuda" and values.dtype in (torch.bfloat16, torch.float16)
    if half and torch.compiler.is_compiling() and not exporting() and forced() != "reference":
        return gelu(values)
    return type(module).forward(module, values)


def compile_outside(model: nn.Module) -> None:
    """Compile what timm's ViTs do in training before and after their blocks: patches, positions, last norm and head.

    In place and by instance attributes, whose removal undoes it. Evaluation runs what it ran before.
    """
    from timm.layers import PatchEmbed
    from timm.models.vision_transformer import VisionTransformer

    root = anatomy(model).root
    if not (isinstance(root, VisionTransformer) and isinstance(root.patch_embed, PatchEmbed)):
        return
    for module in root.patch_embed.modules():
        if type(module) is nn.Conv2d and "forward" not in module.__dict__ and _is_patch_product(module):
            module.__dict__["forward"] = MethodType(_embed_patches, module)
    methods = ((root.patch_embed, "forward"), (root, "_pos_embed"), (root.norm, "forward"), (root, "forward_head"))
    for owner, name in methods:
        if name not in owner.__dict__ and not isinstance(owner, nn.Identity):
            # Only the method, so that the module's hooks stay outside.
            owner.__dict__[name] = MethodType(_compiled_in_training(getattr(type(owner), name)), owner)


def _compiled_in_training(method: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(method, dynamic=False)

    @wraps(method)
    def call(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        return (compiled if module.training else method)(module, *args, **keywords)

    return call


def _is_patch_product(module: nn.Conv2d) -> bool:
    """Whether a convolution multiplies squares that do not overlap."""
    plain = module.padding == (0, 0) and module.dilation == (1, 1) and module.groups == 1
    return plain and module.kernel_size == module.stride and module.stride[0] == module.stride[1]


def _embed_patches(module: nn.Conv2d, images: Tensor) -> Tensor:
    """Such a convolution; if compiled, as one product of patches and weight, whose gradient is one product too."""
    side = module.stride[0]
    if not torch.compiler.is_compiling() or images.shape[-2] % side or images.shape[-1] % side:
        return type(module).forward(module, images)
    patches = F.pixel_unshuffle(images, side)
    embedded = F.linear(patches.flatten(2).mT, module.weight.flatten(1), module.bias)
    return embedded.mT.unflatten(2, patches.shape[2:])


def _drop_paths(module: DropPath, tokens: Tensor) -> Tensor:
    """timm's stochastic depth with the rate in a tensor."""
    if not module.training:
        return tokens
    keep: Tensor = module.__dict__["keep"]
    kept = torch.rand(tokens.shape[0], *(1,) * (tokens.ndim - 1), device=tokens.device) < keep
    return tokens * (kept / keep if module.scale_by_keep else kept).to(tokens.dtype)
