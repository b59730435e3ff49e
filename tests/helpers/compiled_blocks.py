"""What torch.compile does with blocks, counted in a new process, because the compiler's state outlives a test."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import vitfocus as vf
from helpers.train_tools import tiny


def _only_the_front_half() -> None:
    """Keep the part of the compiler that decides what is compiled and how often; code generation takes minutes."""
    torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]


def _print_counts(**more: Any) -> None:
    from torch._dynamo.utils import counters

    print(json.dumps({"frames": counters["frames"], "graph_breaks": len(counters["graph_break"]), **more}))


def count_compilations(spec: str, depth: int, drop_path: float) -> None:
    """Print how many frames one training step of a model compiles."""
    from vitfocus.train.compile import compile_blocks

    _only_the_front_half()
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": depth, "num_heads": 2}
    model = vf.create_model(spec, **size, drop_path_rate=drop_path)
    names = list(model.state_dict())
    blocks = compile_blocks(model)
    model.train()(torch.randn(2, 3, 16, 16)).sum().backward()
    _print_counts(blocks=blocks, renamed=names != list(model.state_dict()))


def train_tiny(overrides: Sequence[str], folder: Path) -> None:
    """Train a tiny recipe, and print how many frames were compiled."""
    from vitfocus.train.run import train

    _only_the_front_half()
    _print_counts(compiled=train(tiny(*overrides), folder)["compiled"])


def _pretend_there_is_a_gpu(*modules: Any) -> None:
    """Let the compiler, and these modules of vitfocus, take Triton's kernels; what launches them must be replaced."""

    import triton
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    names = ("has_triton", "has_triton_tensor_descriptor_host_tma", "has_triton_experimental_host_tma")
    for name in names:
        setattr(_triton, name, lambda *_, _known=name == "has_triton", **__: _known)
    triton.runtime.driver._active = Driver()
    for module in modules:
        module.chosen = lambda *_: "triton"


def compile_for_several_batches(spec: str, size: int) -> None:
    """Print which kernels a compiled model launches in training steps with batches of 4, 5 and 6 images.

    No kernel runs. Attention by torch is replaced by something with its shapes.
    """
    from triton.runtime.jit import JITFunction

    from vitfocus.attention import capture
    from vitfocus.kernels.diversity import op, with_attention
    from vitfocus.kernels.short_attention import op as short

    launched: set[str] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launched.add(self.fn.__name__)

    vf.treat_(vf.create_model("deit_tiny_patch16_224", depth=1), spec.partition("+")[2])  # imports the treatments
    loaded = [one for name, one in sys.modules.items() if name.startswith("vitfocus.")]
    _pretend_there_is_a_gpu(*(one for one in loaded if hasattr(one, "chosen")))
    JITFunction.run = run
    op.BUSY, short.LEAST, with_attention.LEAST_CHANNELS = 1, 16, 16
    for module in (capture, with_attention):
        module.keeps_normalisers = lambda *_, **__: True  # type: ignore[attr-defined]
        module.attention_with_normalisers = lambda q, *_, **__: (q * 1.0, q[..., 0].float() * 1.0)  # type: ignore
    options = {"img_size": size, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3}
    model = vf.create_model(spec, **options).train().bfloat16()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for batch in (4, 5, 6):
        out = compiled(torch.randn(batch, 3, size, size).bfloat16())
        (out.float().square().sum() + vf.auxiliary_loss(model)).backward()
    _print_counts(launched=sorted(launched))


def compile_with_short_attention(spec: str, most_tokens: int, late: str = "") -> None:
    """Print what a training step compiled for a GPU, which need not be there, makes of attention, and how right it is.

    The compiler's graphs run on the CPU. In place of the kernels, plain torch computes what they would. `late` is a
    treatment that comes after `compile_blocks`.
    """
    from triton.runtime.jit import JITFunction

    from vitfocus.kernels.short_attention import op
    from vitfocus.train.compile import compile_blocks

    _pretend_there_is_a_gpu(op)
    launched: list[str] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | keywords
        parts = [given[name].detach().double().requires_grad_() for name in "qkv"]
        with torch.enable_grad():
            logits = parts[0] @ parts[1].mT * float(given["scale"])
            mixed = logits.softmax(-1) @ parts[2]
        launched.append(self.fn.__name__)
        if launched[-1] == "attend_forward":
            given["out"].copy_(mixed.detach().transpose(1, 2))
            given["lse"].copy_(logits.detach().logsumexp(-1))
        else:
            made = torch.stack(torch.autograd.grad(mixed, parts, given["gradient"].transpose(1, 2).double()))
            given["out"].copy_(made.permute(1, 3, 0, 2, 4))

    JITFunction.run = run
    op.MOST_TOKENS, op.LEAST = most_tokens, 16
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        from functorch.compile import make_boxed_func

        graphs.append(graph)
        return make_boxed_func(graph.forward)

    from torch._dynamo.backends.common import aot_autograd

    compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    size = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3}
    images, results = torch.randn(2, 3, 32, 32), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = vf.create_model(spec, **size).train()
        if compiled:
            torch.compile = partial(torch.compile, backend=compiler)  # type: ignore[assignment]
            compile_blocks(model)
        if late:
            vf.treat_(model, late)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(images)
        (out.square().sum() + vf.auxiliary_loss(model)).backward()
        results.append(torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None]))
    calls = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    copies = [call for call in calls if call in ("aten.stack.default", "aten.cat.default")]
    _print_counts(
        launched=launched,
        copies=len(copies),
        error=float((results[1] - results[0]).norm() / results[0].norm()),
    )
