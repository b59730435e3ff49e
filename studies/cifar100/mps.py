"""NVIDIA's Multi-Process Service for the time of a command, so that small runs really share a GPU and not its time."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def shared_gpu(wanted: bool, say: Callable[[str], None] = print) -> Iterator[None]:
    """Processes started inside share the GPU through the service; where there is none, they take turns as usual."""
    if not wanted:
        yield
        return
    if shutil.which(CONTROL) is None:
        say(f"{CONTROL} is not here: the processes take turns on the GPU.")
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        os.environ.update(dict.fromkeys(names, folder))
        started = subprocess.run([CONTROL, "-d"], check=False, capture_output=True, text=True)
        if started.returncode:
            say(f"The Multi-Process Service does not start ({started.stderr.strip() or started.stdout.strip()}).")
            for name in names:
                os.environ.pop(name)
            yield
            return
        try:
            yield
        finally:
            subprocess.run([CONTROL], input="quit\n", check=False, capture_output=True, text=True)
            for name in names:
                os.environ.pop(name, None)
