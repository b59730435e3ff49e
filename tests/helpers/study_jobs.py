"""Jobs for the tests of the study's pool, in a module that a new process imports quickly."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path


def succeed(seconds: float = 0.0) -> str:
    time.sleep(seconds)
    return "well"


def fail() -> str:
    raise ValueError("as it should")


def die() -> str:
    os._exit(3)


def share(device: str, prepare: float, work: float) -> str:
    """Prepare for some seconds, then work on a device that is shared in short time slices, as a GPU is."""
    time.sleep(prepare)
    sys.modules["pool"].computing()
    with Path(device).open("a") as lock:
        until = 0.0
        while until < work:
            fcntl.flock(lock, fcntl.LOCK_EX)
            began = time.monotonic()
            time.sleep(0.004)
            until += time.monotonic() - began
            fcntl.flock(lock, fcntl.LOCK_UN)
    return ""
