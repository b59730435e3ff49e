"""Turns on a device that several processes share: while a few compute on it, the others prepare their runs.

Processes that begin together would otherwise compile together, compute together and leave the device idle together. A
slot is a locked file, which the system frees when its holder ends, however that happens.
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

from pool import computing

#: Steps after which everything that a run compiles is compiled, and its step recorded.
PREPARED = 6


class Slot:
    """One of so many slots of a folder, taken once a run is prepared and given back at the end of the context."""

    def __init__(self, folder: Path, count: int) -> None:
        self.files = [folder / f"slot{number}.lock" for number in range(count)]
        self.held: IO[str] | None = None
        self.steps = 0

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *error: object) -> None:
        if self.held is not None:
            self.held.close()
            self.held = None

    def before_step(self, step: int) -> None:
        """Wait for a slot when the first steps have been taken."""
        self.steps += 1
        if self.steps > PREPARED:
            self.take()

    def take(self) -> None:
        """Wait until one is free."""
        while self.held is None:
            for file in self.files:
                file.parent.mkdir(parents=True, exist_ok=True)
                handle = file.open("a")
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    handle.close()
                    continue
                self.held = handle
                computing()
                return
            time.sleep(0.05)
