"""Child processes for tests, forked from a server that has imported torch and vitfocus, so that they start quickly."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

#: What the server imports once.
PRELOADED = ["vitfocus.train.run", "vitfocus.robustness.evaluation", "vitfocus.cli.evaluate"]


@dataclass
class Started:
    """A process, and the files to which its output goes."""

    process: Any
    output: Path

    def wait(self, seconds: float = 120) -> int:
        """The exit code; an error if the process does not end in time."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"still running after {seconds} s: {self.error}")
        return int(self.process.exitcode)

    @property
    def error(self) -> str:
        return self.output.with_suffix(".err").read_text()

    def results(self) -> dict[str, Any]:
        """The JSON that it printed, provided that it succeeded."""
        assert self.wait() == 0, self.error
        text = self.output.with_suffix(".out").read_text()
        return json.loads(text) if text.strip() else {}


def start(target: Callable[..., Any], *arguments: Any, **environment: str) -> Started:
    """Call a function in a new process, whose exit code is what the function returns."""
    output = Path(tempfile.mkdtemp()) / "child"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_child, args=(output, target, arguments, environment))
    process.start()
    return Started(process, output)


def _child(output: Path, target: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(output.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method("fork", force=True)  # for data loaders, as in a separate program
    torch.set_num_threads(1)
    sys.exit(target(*arguments))


def command(*words: str) -> int:
    """`vitfocus WORDS`, to be called in a child process."""
    from vitfocus.cli import main

    return main(words)


def what_each_is_told() -> list[dict[str, str]]:
    """The environment variables of two processes that find each other, on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]


def _run_script(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


def run_in_two_processes(script: Path) -> None:
    """Run a script in two processes joined by gloo, as `torchrun` would; neither may fail."""
    started = [start(_run_script, str(script), **told) for told in what_each_is_told()]
    ends = [(one.wait(), one.error) for one in started]
    assert [code for code, _ in ends] == [0, 0], ends
