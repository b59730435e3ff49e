"""The environment of a run: devices and their names, processes, and versions of libraries."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitfocus.core import __version__
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import FolderInUse, lock_folder
from vitfocus.core.tables import counted

#: The libraries that results depend on.
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
        raise VitfocusError(f"There is no device {str(name)!r} here: expected {_available_devices()}.") from None
    if device.type == "meta":
        raise VitfocusError(f"The device 'meta' stores no values: expected {_available_devices()}.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        # Only torch's first sentence says why; the rest is advice for torch developers.
        reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        raise VitfocusError(
            f"There is no device {str(name)!r} here ({reason}): expected {_available_devices()}."
        ) from None
    return device


def float64_capable(values: Tensor) -> Tensor:
    """The values on a device with double precision: copied to the CPU unless they are on the CPU or CUDA."""
    return values if values.device.type in ("cpu", "cuda") else values.cpu()


def device_name(device: torch.device, *, threads: bool = True) -> str:
    """The model name of a GPU or CPU; with `threads`, the CPU's is followed by the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = _processor() or platform.processor() or platform.machine() or device.type
    return f"{name}, {counted(torch.get_num_threads(), 'thread')}" if threads else name


def versions(*more: str) -> dict[str, str]:
    """The versions of the libraries that results depend on, and of `more` distributions (or "python").

    Example:
        >>> sorted(versions("python"))
        ['numpy', 'pillow', 'python', 'timm', 'torch', 'torchvision', 'vitfocus']
    """
    known = {"python": platform.python_version(), "vitfocus": __version__}
    return {name: known.get(name) or _version(name) for name in (*_LIBRARIES, *more)}


def _version(name: str) -> str:
    """The version of a distribution, or "unknown" for one imported from a folder without its metadata."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _available_devices() -> str:
    """The devices of this machine, for messages."""
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


Content = TypeVar("Content")


@dataclass(frozen=True)
class Processes:
    """The rank of this process, the number of processes, and the device it uses."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def gather(self, content: Content) -> list[Content]:
        """Every process's content, in order of rank, on every process."""
        if self.world == 1:
            return [content]
        from accelerate.utils import gather_object

        return list(gather_object([content]))

    def broadcast(self, content: Content) -> Content:
        """The first process's content, on every process."""
        if self.world == 1:
            return content
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([content])[0]

    @contextmanager
    def lock(self, folder: str | Path, wait: bool = False) -> Iterator[None]:
        """Lock a folder for this run: the first process holds the lock, and all raise if another run has it.

        With `wait`, they print a message and wait for the other run to end.
        """
        with ExitStack() as stack:
            announced = False
            while True:
                problem, busy = "", False
                if self.first:
                    try:
                        stack.enter_context(lock_folder(folder))
                    except VitfocusError as error:
                        problem, busy = str(error), isinstance(error, FolderInUse)
                problem, busy = self.broadcast((problem, busy))
                if not problem:
                    break
                if not (busy and wait):
                    raise VitfocusError(problem)
                if self.first and not announced:
                    print(f"vitfocus: {problem.rpartition(': wait')[0]}; waiting for it.", file=sys.stderr, flush=True)
                announced = True
                time.sleep(2.0)
            yield


def join_processes(device: str | torch.device | None = None) -> Processes:
    """The processes that `accelerate launch` or `torchrun` started, or this one alone."""
    wanted = usable_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes(0, 1, wanted)
    try:
        from accelerate import PartialState
    except ImportError:
        raise VitfocusError("Several processes work together through accelerate: pip install accelerate.") from None
    options: dict[str, Any] = {"cpu": True} if device is not None and wanted.type == "cpu" else {}
    state = PartialState(**options)
    return Processes(state.process_index, state.num_processes, state.device)


def is_main_process() -> bool:
    """Whether this process prints and writes files, by the launcher's environment variables."""
    return int(os.environ.get("RANK", "0")) == 0
