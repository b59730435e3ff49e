"""A program run by two processes that know of each other, as `torchrun` would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def what_each_is_told() -> list[dict[str, str]]:
    """The variables by which either finds the other, on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]


def run_in_two_processes(script: Path) -> None:
    """Run it to its end on both, joined by gloo; neither may fail."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **told, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for told in what_each_is_told()
    ]
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert [code for _, code in ends] == [0, 0], ends
