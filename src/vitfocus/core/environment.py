"""Where code runs: the device, what to call it, and the versions of the libraries."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from pathlib import Path

import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.core.tables import counted

#: The libraries that pixels and logits pass through.
_LIBRARIES = ("vitfocus", "torch", "torchvision", "timm", "numpy", "pillow")


def default_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usable_device(name: str | torch.device | None = None) -> torch.device:
    """The named device, or `default_device()` for None.

    Raises:
        VitfocusError: The device does not exist on this machine.

    Example:
        >>> usable_device("cpu")
        device(type='cpu')
        >>> usable_device("gpu")
        Traceback (most recent call last):
        vitfocus.core.errors.VitfocusError: There is no device 'gpu' here: expected ...
    """
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise VitfocusError(f"There is no device {str(name)!r} here: expected {_present()}.") from None
    if device.type == "meta":
        raise VitfocusError(f"The device 'meta' holds no numbers: expected {_present()}.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        # Only torch's first sentence says why; the rest is advice for torch developers.
        reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        raise VitfocusError(f"There is no device {str(name)!r} here ({reason}): expected {_present()}.") from None
    return device


def float64_capable(values: Tensor) -> Tensor:
    """The values on a device that has double precision: unchanged on the CPU and CUDA, else (MPS) copied to the CPU."""
    return values if values.device.type in ("cpu", "cuda") else values.cpu()


def device_name(device: torch.device, *, threads: bool = True) -> str:
    """The model name of a GPU or processor, the latter followed by torch's number of `threads`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = _processor() or platform.processor() or platform.machine() or device.type
    return f"{name}, {counted(torch.get_num_threads(), 'thread')}" if threads else name


def versions(*more: str) -> dict[str, str]:
    """The versions of the libraries that results depend on, and of `more` distributions ("python" is one of them).

    Example:
        >>> sorted(versions("python"))
        ['numpy', 'pillow', 'python', 'timm', 'torch', 'torchvision', 'vitfocus']
    """
    return {
        name: platform.python_version() if name == "python" else importlib.metadata.version(name)
        for name in (*_LIBRARIES, *more)
    }


def _present() -> str:
    """The devices of this machine, as a phrase."""
    found = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        found += [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
    return " or ".join(filter(None, [", ".join(found[:-1]), found[-1]]))


@functools.lru_cache(maxsize=1)
def _processor() -> str:
    """The processor's model name as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
