"""Jobs for the tests of the study's pool, in a module that a new process imports at once."""

from __future__ import annotations

import os
import time


def succeed(seconds: float = 0.0) -> str:
    time.sleep(seconds)
    return "well"


def fail() -> str:
    raise ValueError("as it should")


def die() -> str:
    os._exit(3)
