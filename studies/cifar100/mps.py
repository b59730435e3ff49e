"""NVIDIA's Multi-Process Service for the time of a command, so that small runs really share a GPU and not its time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CONTROL = "nvidia-cuda-mps-control"
_NAMES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
#: A process of its own that takes a context on the first GPU by the driver's library alone, which is quick.
_TRIAL = """
import ctypes, sys
driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
sys.exit(driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""


@contextmanager
def shared_gpu(wanted: bool, say: Callable[[str], None] = print) -> Iterator[None]:
    """Processes started inside share the GPU through the service; where it does not work, they take turns as usual."""
    if not wanted:
        yield
        return
    if shutil.which(CONTROL) is None:
        say(f"{CONTROL} is not here: the processes take turns on the GPU.")
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        os.environ.update(dict.fromkeys(_NAMES, folder))
        if problem := _start():
            say(f"The Multi-Process Service does not work ({problem}): the processes take turns on the GPU.")
            _end()
        try:
            yield
        finally:
            _end()


def _start() -> str:
    """Start the service and try it; what is wrong, if anything: a service that refuses would fail every run."""
    try:
        started = subprocess.run([CONTROL, "-d"], check=False, capture_output=True, text=True, timeout=20)
        if started.returncode:
            return started.stderr.strip() or started.stdout.strip() or f"code {started.returncode}"
        tried = subprocess.run([sys.executable, "-c", _TRIAL], check=False, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"a process gets no GPU by it, code {tried.returncode}" if tried.returncode else ""


def _end() -> None:
    """Stop the service, where it is this command's, and let later processes use the GPU without it."""
    if _NAMES[0] not in os.environ:
        return
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([CONTROL], input="quit\n", check=False, capture_output=True, text=True, timeout=10)
    for name in _NAMES:
        os.environ.pop(name, None)
