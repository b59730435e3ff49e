"""Measuring several things on one machine: some processes get ready at a time, and one alone measures.

While a process measures, the others are stopped (SIGSTOP), and so are the processes whose command line contains
`pause`, for example a training run that uses the GPU in between.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

#: Gets ready, and returns a function that measures.
Prepare = Callable[..., Callable[[], Any]]
#: Seconds until what other processes have queued on the GPU has run, and seconds for which they are stopped at most.
SETTLE, LONGEST = 0.7, 90.0


class Job(NamedTuple):
    """`prepare(*arguments)` in a process of its own."""

    prepare: Prepare
    arguments: tuple[Any, ...] = ()


class Result(NamedTuple):
    """What a job measured and how long it took to get ready; or what went wrong."""

    name: str
    value: Any = None
    ready_seconds: float = math.nan
    error: str = ""


class _Running(NamedTuple):
    name: str
    process: Any
    pipe: Connection


def take_turns(
    jobs: Mapping[str, Job], at_once: int = 1, deadline: float = math.inf, pause: str = "", settle: float = 0.0
) -> Iterator[Result]:
    """The results of jobs, which are started in order, `at_once` at a time; none is waited for after the deadline."""
    waiting, running = list(jobs.items()), []
    fork = multiprocessing.get_context("fork")  # saves importing everything again; this process never uses the GPU
    try:
        while waiting or running:
            while waiting and len(running) < at_once and time.time() < deadline:
                name, job = waiting.pop(0)
                mine, theirs = fork.Pipe()
                process = fork.Process(target=_serve, args=(job, theirs))
                process.start()
                theirs.close()
                running.append(_Running(name, process, mine))
            if time.time() >= deadline:
                yield from (Result(name, error="left out, no time") for name, _ in waiting)
                yield from (Result(one.name, error="stopped, no time left") for one in running)
                return
            for pipe in wait([one.pipe for one in running], None if deadline == math.inf else 1.0):
                one = next(one for one in running if one.pipe is pipe)
                others = [other.process.pid for other in running if other is not one]
                running.remove(one)
                yield _measured(one, others, pause, settle, deadline)
    finally:
        for one in running:
            _signal_group(one.process.pid, signal.SIGKILL)


def _measured(one: _Running, others: list[int], pause: str, settle: float, deadline: float) -> Result:
    """Let one job measure alone, once it is ready."""
    try:
        ready, said = one.pipe.recv()
        if not ready:
            return Result(one.name, error=said)
        with _alone(others, pause, settle):
            one.pipe.send("go")
            done = one.pipe.poll(min(LONGEST, max(0.0, deadline - time.time())))
        if not done and not one.pipe.poll(max(0.0, min(LONGEST, deadline - time.time()))):
            return Result(one.name, error="stopped, it took too long")
        succeeded, value = one.pipe.recv()
        return Result(one.name, value, said) if succeeded else Result(one.name, error=value)
    except EOFError:
        one.process.join()
        return Result(one.name, error=f"its process ended with code {one.process.exitcode}")
    finally:
        _signal_group(one.process.pid, signal.SIGKILL)
        one.process.join()


@contextmanager
def _alone(others: list[int], pause: str, settle: float) -> Iterator[None]:
    """Stop other processes for a moment."""
    found = subprocess.run(["pgrep", "-fa", pause], capture_output=True, text=True, check=False) if pause else None
    # This process and its children have the pattern in their own command line.
    lines = [line for line in found.stdout.splitlines() if "--pause" not in line] if found else []
    paused = [int(line.split()[0]) for line in lines]
    try:
        for pid in paused:
            with suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        for pid in others:
            _signal_group(pid, signal.SIGSTOP)
        time.sleep(settle)
        yield
    finally:
        for pid in others:
            _signal_group(pid, signal.SIGCONT)
        for pid in paused:
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)


def _signal_group(pid: int, number: int) -> None:
    with suppress(OSError):
        os.killpg(pid, number)


def _serve(job: Job, pipe: Connection) -> None:
    os.setsid()  # its compiler's processes are stopped with it
    began = time.time()
    try:
        measure = job.prepare(*job.arguments)
        pipe.send((True, time.time() - began))
        pipe.recv()
        pipe.send((True, measure()))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {str(error)[:2000]}"))


@cache
def gpu_name() -> str:
    """The GPU's name or nothing, by a process of its own: one that has looked cannot fork others that use it."""
    look = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    return subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True).stdout.strip()
