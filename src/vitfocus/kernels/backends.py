"""Which implementation runs: the reference, plain torch in chunks, or the Triton kernels.

By default the tensors decide: Triton kernels run on GPUs that Triton supports, chunks everywhere else. `backend` forces
one, for comparison or debugging:

>>> import torch
>>> with backend("reference"):
...     chosen(torch.zeros(1))
'reference'
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError, nearest

#: reference: as in the equations, on whole maps; chunked: plain torch, memory linear in N; triton: the kernels.
BACKENDS = ("auto", "reference", "chunked", "triton")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_HAS_TRITON = importlib.util.find_spec("triton") is not None

#: The backend that `backend` forces. A plain global, because torch.compile traces code that reads it.
_forced = "auto"

#: The keys that `compile_together` has seen, and a lock for `launches_of`, which patches Triton while it runs.
_compiled: set[Hashable] = set()
_patch_lock = threading.Lock()
_compiling = threading.local()  # `here` is set in threads that compile


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Within the context, every operation uses this backend; "auto" chooses by the tensors.

    Raises:
        VitfocusError: if the backend does not exist, or cannot run here.
    """
    if name not in BACKENDS:
        raise VitfocusError(f"There is no backend {name!r}: {nearest(name, BACKENDS)}")
    if name == "triton" and not has_triton():
        raise VitfocusError("Triton is not installed, so its kernels cannot run: use backend('chunked').")
    global _forced
    before, _forced = _forced, name
    torch._dynamo.reset()  # discard what was compiled for another backend
    try:
        yield
    finally:
        _forced = before
        torch._dynamo.reset()


def chosen(first: Tensor, *others: Tensor | None) -> str:
    """The backend for these tensors; for torch.fx, torch.func and forward-mode derivatives, the reference."""
    if isinstance(first, torch.fx.Proxy) or _transforming():
        return "reference"
    name, fits, on_gpu = forced(), True, True
    for tensor in (first, *others):
        if tensor is not None:
            fits = fits and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
            on_gpu = on_gpu and tensor.device.type == "cuda"
    if name == "triton":
        if not fits:
            raise VitfocusError("The Triton kernels take float32, bfloat16 and float16; use backend('chunked').")
        if not on_gpu and not interpreting():
            raise VitfocusError("The Triton kernels need tensors on a CUDA device; use backend('chunked').")
    if name != "auto":
        return name
    return "triton" if on_gpu and fits and has_triton() and _compiles_for(first.device) else "chunked"


def _transforming() -> bool:
    """Whether a transform of `torch.func` is active, or forward-mode automatic differentiation."""
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )


@torch.compiler.assume_constant_result
def _compiles_for(device: torch.device) -> bool:
    """Whether this is an NVIDIA GPU of compute capability 8.0 or later, which Triton supports."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


def forced() -> str:
    """The backend that `backend` forces, or "auto"."""
    return _forced


def has_triton() -> bool:
    """Whether Triton can be imported."""
    return _HAS_TRITON


def interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return _INTERPRETING


def exporting() -> bool:
    """Whether the model is being exported: an exported model must not depend on our kernels."""
    # The flag, because in torch 2.11 `torch.compiler.is_exporting()` is true in all compiled code.
    return bool(torch.compiler._is_exporting_flag)


def differentiable_gradients(
    function: Callable[..., Any], given: Sequence[Tensor | None], gradient: Tensor | tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Differentiable gradients of a function made of plain torch operations, for double backward through a kernel.

    The function is called with `given`; an entry that is None or needs no gradient gets None. With several results,
    `gradient` is a tuple, and results that depend on nothing wanted are left out.
    """
    # Views: if one input was computed from another, the latter's gradient would include the path through it.
    views = [None if one is None else one.view_as(one) for one in given]
    wanted = [one for one in views if one is not None and one.requires_grad]
    results = function(*views)
    both = zip(results, gradient, strict=True) if isinstance(gradient, tuple) else [(results, gradient)]
    outputs, slopes = zip(*((result, slope) for result, slope in both if result.requires_grad), strict=True)
    made = iter(torch.autograd.grad(outputs, wanted, slopes, create_graph=True))
    return tuple(next(made) if one is not None and one.requires_grad else None for one in views)


def wants_second_derivative() -> bool:
    """Whether a backward pass is itself differentiated (`create_graph=True`), which kernels do not support."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def on_device_of_first(launch: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run the function with its first tensor's GPU as the current device, on which Triton launches.

    It is the first argument or begins the first one. On a CPU nothing changes; compiled code does this by itself.
    """

    @wraps(launch)
    def launch_there(*args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return launch(*args, **keywords)
        first: Any = args[0][0] if isinstance(args[0], tuple) else args[0]
        with torch.cuda.device_of(first):
            return launch(*args, **keywords)

    return launch_there


def compile_together(device: torch.device, key: Hashable, launch: Callable[[], Any]) -> None:
    """Compile the kernels that `launch` would launch in parallel threads, before the first launch with this key.

    A kernel takes about a second: Triton compiles it and a C compiler its launcher, both mostly without holding the
    GIL. A launch waits for its own kernel only, so that those of the backward pass compile during the forward pass.
    Does nothing on a CPU, where kernels are interpreted, or while a CUDA graph is captured.
    """
    if (device, key) in _compiled or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    _compiled.add((device, key))
    calls = launches_of(launch)
    if len(calls) > 1:
        threads = ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1))
        for call in calls.values():
            _launch_after(call[0], threads.submit(_compile, device, *call))
        threads.shutdown(wait=False)


def _launch_after(kernel: Any, compiled: Future[None]) -> None:
    """Let launches of the kernel wait for a thread that compiles it; two would compile it twice."""

    def wait(*_: Any, **__: Any) -> None:
        if not getattr(_compiling, "here", False):
            compiled.result()
            kernel.pre_run_hooks = [one for one in kernel.pre_run_hooks if one is not wait]

    kernel.add_pre_run_hook(wait)


def launches_of(launch: Callable[[], Any]) -> dict[Hashable, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches that a function would make, without making them: kernels, arguments and keywords."""
    from triton.runtime.jit import JITFunction

    mine = threading.get_ident()
    calls: dict[Hashable, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def record(self: Any, *args: Any, **keywords: Any) -> Any:
        if threading.get_ident() != mine:  # other threads launch as usual
            return original_run(self, *args, **keywords)
        alike = tuple(getattr(one, "dtype", one) for one in args)
        kind = (self, alike, *((name, one) for name, one in keywords.items() if name != "grid"))
        calls[kind] = (self, tuple(map(_without_memory, args)), keywords)

    with _patch_lock, torch.no_grad():
        original_run, JITFunction.run = JITFunction.run, record
        try:
            launch()
        finally:
            JITFunction.run = original_run
    return calls


def _without_memory(one: Any) -> Any:
    """For the compiler an empty tensor is as good; the memory of all launches is not kept until they are compiled."""
    return one.new_empty(0) if isinstance(one, Tensor) and one.data_ptr() % 16 == 0 else one


def _compile(device: torch.device, kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Compile a kernel and its launcher; if that fails, the launch itself will say so."""
    _compiling.here = True
    with suppress(Exception), torch.cuda.device(device):
        _ = kernel.run(*args, **keywords | {"warmup": True}).run
