"""Jobs taken in order by a few processes that share one machine, within a time limit.

A process imports torch once and carries out one job after another. A job is begun only if, with those that are running,
it is expected to end in time. One that is still running at the end is asked to stop (SIGTERM, on which a training run
writes its checkpoint); one that is not training then has the last seconds to finish in. A job that fails leaves its
traceback beside its work and does not stop the others; its process is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

#: Seconds before the limit at which running jobs are asked to stop, and that they have for it.
GRACE = 10.0
COMPUTING = ("computing", "")
_told: Connection | None = None  # in a worker: the pipe to the one who gave it its job


@dataclass(frozen=True)
class Job:
    """A call that a process makes: `function(*arguments)`, both picklable; what it returns is said when it is done."""

    name: str
    function: Callable[..., str]
    arguments: tuple[Any, ...]


class Expectation(NamedTuple):
    """Seconds of the machine's time that a job takes from others, and its least time from begin to end."""

    work: float
    alone: float


@dataclass
class Outcome:
    """What became of the jobs, by name."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass
class Worker:
    """A process, the pipe to it, the job it is at, and what that takes: `work` expected, `had` so far.

    A job has its share of the machine from when it says that it is `computing`; until then it prepares, or waits.
    """

    process: Any
    pipe: Connection
    job: Job | None = None
    since: float = 0.0
    work: float = 0.0
    had: float = 0.0
    computing: bool = False

    @property
    def missing(self) -> float:
        """Work that is left; a job that has had all it was expected to need is nearly done."""
        return max(self.work - self.had, 0.05 * self.work)


def carry_out(
    jobs: Sequence[Job],
    *,
    workers: int,
    work: Path,
    seconds_left: Callable[[], float],
    estimate: Callable[[Job], Expectation],
    say: Callable[[str], None] = print,
    done: Callable[[Job, float, float], None] = lambda job, work, wall: None,
) -> Outcome:
    """Take jobs in order; where the next one would not end in time, the first after it that would is taken.

    Jobs that compute at the same time share the machine: together they need the sum of their work. `done` is told the
    work and the seconds that a job took.
    """
    waiting, outcome, number = list(jobs), Outcome(), 0
    busy: list[Worker] = []
    idle: list[Worker] = []
    clock = time.monotonic()
    try:
        while True:
            while waiting and len(busy) < workers:
                left = seconds_left() - GRACE
                room = left - sum(worker.missing for worker in busy)
                fitting = ((job, estimate(job)) for job in waiting)
                found = next(((job, need) for job, need in fitting if need.work <= room and need.alone <= left), None)
                if found is None:
                    break
                job, need = found
                waiting.remove(job)
                idle = [worker for worker in idle if worker.process.is_alive()]
                if idle:
                    worker = idle.pop()
                else:
                    worker, number = start(work / f"worker{number}.log"), number + 1
                worker.job, worker.since, worker.work = job, time.monotonic(), need.work
                worker.had, worker.computing = 0.0, False
                with suppress(OSError):  # a process that is gone is noticed below, as one that ends in its job
                    worker.pipe.send(job)
                busy.append(worker)
                say(f"begun: {job.name} ({need.work:.0f} s of work expected, {_left(seconds_left())})")
            if not busy:
                break
            limit = seconds_left() - GRACE
            if limit <= 0:
                stop(busy, GRACE - 4, work, outcome, say)
                break
            ready = wait([worker.pipe for worker in busy], timeout=min(limit, 5.0))
            now, before = time.monotonic(), clock
            clock = now
            sharing = [worker for worker in busy if worker.computing]
            for worker in sharing:
                worker.had += (now - before) / len(sharing)
            for worker in [worker for worker in busy if worker.pipe in ready]:
                ended = worker.job
                assert ended is not None
                if (message := hear(worker)) == COMPUTING:
                    worker.computing = True
                    continue
                busy.remove(worker)
                if note(worker, message, work, outcome, say):
                    done(ended, worker.had or now - worker.since, now - worker.since)
                    idle.append(worker)
    except (KeyboardInterrupt, SystemExit):
        stop(busy, GRACE, work, outcome, say)
        raise
    finally:
        for worker in [*idle, *busy]:
            worker.pipe.close()  # all at once: each takes a moment to end
        for worker in [*idle, *busy]:
            dismiss(worker)
    outcome.left = [job.name for job in waiting]
    return outcome


def hear(worker: Worker) -> tuple[str, str]:
    """What a worker says: that its job computes now, or how it ended; ("gone", "") from a process that is no more."""
    try:
        message: tuple[str, str] = worker.pipe.recv()
    except (EOFError, OSError):
        return "gone", ""
    return message


def computing() -> None:
    """Said by a job, in its own process: what it prepared is ready, and it has its share of the machine from now on."""
    if _told is not None:
        _told.send(COMPUTING)


def note(
    worker: Worker,
    message: tuple[str, str],
    work: Path,
    outcome: Outcome,
    say: Callable[[str], None],
    ending: bool = False,
) -> bool:
    """Write down how a worker's job ended; whether the worker may take another. `ending`: it was asked to stop."""
    job = worker.job
    assert job is not None
    took = time.monotonic() - worker.since
    worker.job = None
    state, text = message
    if state == "gone":
        worker.process.join()
        code = worker.process.exitcode
        state, text = (
            ("stopped", "without a checkpoint") if ending else ("failed", f"its process ended with code {code}")
        )
    if state == "done":
        outcome.done.append(job.name)
        say(f"done:  {job.name} in {took:.0f} s, {worker.had:.0f} s of work{': ' + text if text else ''}")
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
            if (message := hear(worker)) == COMPUTING:
                continue
            busy.remove(worker)
            if note(worker, message, work, outcome, say, ending=True):
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
    """Carry out jobs until the pipe closes or one ends otherwise than well.

    Training answers SIGTERM itself; whatever else a job is at goes on until its process is ended.
    """
    global _told
    _told = pipe
    signal.signal(signal.SIGTERM, lambda *_: None)
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
