"""Jobs taken in order by a few processes that share one machine, within a time limit.

A process imports torch once and carries out one job after another. A job is begun only if by its estimate it ends in
time; one that is still running at the end is asked to stop (SIGTERM, on which a training run writes its checkpoint).
A job that fails leaves its traceback beside its work and does not stop the others; its process is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

#: Seconds before the limit at which running jobs are asked to stop, and that they have for it.
GRACE = 12.0


@dataclass(frozen=True)
class Job:
    """A call that a process makes: `function(*arguments)`, both picklable; what it returns is said when it is done."""

    name: str
    function: Callable[..., str]
    arguments: tuple[Any, ...]


@dataclass
class Outcome:
    """What became of the jobs, by name."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass
class Worker:
    """A process, the pipe to it, and the job it is at."""

    process: Any
    pipe: Connection
    job: Job | None = None
    since: float = 0.0


def carry_out(
    jobs: Sequence[Job],
    *,
    workers: int,
    work: Path,
    seconds_left: Callable[[], float],
    estimate: Callable[[Job], float],
    say: Callable[[str], None] = print,
) -> Outcome:
    """Take jobs in order; where the next one would not end in time, the first after it that would is taken."""
    waiting, outcome, number = list(jobs), Outcome(), 0
    busy: list[Worker] = []
    idle: list[Worker] = []
    try:
        while True:
            while waiting and len(busy) < workers:
                job = next((job for job in waiting if estimate(job) <= seconds_left() - GRACE), None)
                if job is None:
                    break
                waiting.remove(job)
                if idle:
                    worker = idle.pop()
                else:
                    worker, number = start(work / f"worker{number}.log"), number + 1
                worker.job, worker.since = job, time.monotonic()
                worker.pipe.send(job)
                busy.append(worker)
                say(f"begun: {job.name} ({estimate(job):.0f} s expected, {_left(seconds_left())})")
            if not busy:
                break
            limit = seconds_left() - GRACE
            if limit <= 0:
                stop(busy, GRACE - 4, work, outcome, say)
                break
            ready = wait([worker.pipe for worker in busy], timeout=min(limit, 3600.0))
            for worker in [worker for worker in busy if worker.pipe in ready]:
                busy.remove(worker)
                if note(worker, work, outcome, say):
                    idle.append(worker)
    except (KeyboardInterrupt, SystemExit):
        stop(busy, GRACE, work, outcome, say)
        raise
    finally:
        for worker in [*idle, *busy]:
            dismiss(worker)
    outcome.left = [job.name for job in waiting]
    return outcome


def note(worker: Worker, work: Path, outcome: Outcome, say: Callable[[str], None], ending: bool = False) -> bool:
    """Write down how a worker's job ended; whether the worker may take another. `ending`: it was asked to stop."""
    job = worker.job
    assert job is not None
    took = time.monotonic() - worker.since
    worker.job = None
    try:
        state, text = worker.pipe.recv()
    except EOFError:
        worker.process.join()
        code = worker.process.exitcode
        state, text = (
            ("stopped", "without a checkpoint") if ending else ("failed", f"its process ended with code {code}")
        )
    if state == "done":
        outcome.done.append(job.name)
        say(f"done:  {job.name} in {took:.0f} s{': ' + text if text else ''}")
        return True
    if state == "stopped":
        outcome.stopped.append(job.name)
        say(f"stopped: {job.name}: {text}")
    else:
        path = work / f"{job.name.replace('/', '-')}.error.txt"
        path.write_text(text + "\n")
        reason = text.strip().splitlines()[-1] if text.strip() else "no reason given"
        outcome.failed[job.name] = reason
        say(f"FAILED: {job.name} after {took:.0f} s: {reason} (see {path})")
    dismiss(worker)
    return False


def stop(busy: list[Worker], patience: float, work: Path, outcome: Outcome, say: Callable[[str], None]) -> None:
    """Ask every running job to stop, and wait a little for it; those that do not are ended by `dismiss`."""
    for worker in busy:
        if worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGTERM)
    until = time.monotonic() + patience
    while busy and (left := until - time.monotonic()) > 0:
        ready = wait([worker.pipe for worker in busy], timeout=left)
        for worker in [worker for worker in busy if worker.pipe in ready]:
            busy.remove(worker)
            if note(worker, work, outcome, say, ending=True):
                dismiss(worker)
    for worker in busy:
        assert worker.job is not None
        outcome.stopped.append(worker.job.name)
        say(f"stopped: {worker.job.name}: without a checkpoint")


def start(log: Path) -> Worker:
    """A new process; what it prints goes to `log`."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    log.parent.mkdir(parents=True, exist_ok=True)
    process = context.Process(target=_serve, args=(theirs, str(log)))
    process.start()
    theirs.close()
    return Worker(process, mine)


def dismiss(worker: Worker) -> None:
    """End a process that has no job, or whose job has had its time."""
    worker.pipe.close()
    worker.process.join(0.1 if worker.job else 5)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _serve(pipe: Connection, log: str) -> None:
    """Carry out jobs until the pipe closes or one ends otherwise than well."""
    with Path(log).open("a", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        while True:
            try:
                job: Job = pipe.recv()
            except EOFError:
                return
            print(f"== {job.name}", flush=True)
            try:
                text = job.function(*job.arguments)
                state = "done"
            except Exception as error:
                state = "stopped" if type(error).__name__ == "Stopped" else "failed"
                text = str(error) if state == "stopped" else traceback.format_exc()
                print(text, file=sys.stderr, flush=True)
            pipe.send((state, text or ""))
            if state != "done":
                return


def _left(seconds: float) -> str:
    return "no limit" if seconds == float("inf") else f"{seconds:.0f} s left"
