"""An item as independent commands: printed with their dependencies (`--plan`), or submitted to a cluster (`--submit`).

A job trains one run or measures one row; the last job prints the whole table. Commands can be repeated: finished work
is reused, and two processes that need the same run do not train it twice.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitfocus.core.errors import VitfocusError, reason
from vitfocus.core.tables import ranges

CLUSTERS = ("slurm", "local")
#: How often a killed command is restarted within the same job.
_RESTARTS = 3


@dataclass(frozen=True)
class Job:
    """One command. It runs after the jobs named in `after`; if `done`, it has been run before."""

    name: str
    arguments: tuple[str, ...]
    after: tuple[str, ...] = ()
    done: bool = False

    @property
    def command(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(["vitfocus", *self.arguments])

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"name": self.name, "command": self.command, "after": list(self.after), "done": self.done}


def plan_jobs(name: str, scale: str, arguments: Sequence[str], **options: Any) -> list[Job]:
    """The jobs of an item, each after those that it depends on.

    Args:
        name: The item.
        scale: The scale.
        arguments: The command line of every job after the item's name: the scale, data, folder and changed values.
        **options: What `reproduce` takes: data, out, overrides, rows, weights, pretrained.
    """
    from vitfocus.reproduce.plan import plan_item  # imports torch, which a job does not need

    shared = ("reproduce", name, *arguments)
    planned = plan_item(name, scale, **options)
    jobs: dict[str, Job] = {}
    for run in [run for one in planned for run in one.trained]:
        done = (run.folder / "results.json").is_file() and (run.folder / "model" / "config.json").is_file()
        after = tuple(first.folder.name for first in run.prerequisites)
        jobs[run.folder.name] = Job(run.folder.name, (*shared, "--train", run.folder.name), after, done)
    rows = []
    for one in planned:
        for number, row in enumerate(one.item.rows, 1):
            measured = one.runs.get(row.label)
            if row not in one.rows or measured is None or measured.recipe is None or one.folders is None:
                continue
            part = shared if one.item.name == name else (shared[0], one.item.name, *shared[2:])
            after = (measured.folder.name,) if measured.folder.name in jobs else ()
            rows.append(Job(f"{one.item.name} row {number}", (*part, "--rows", str(number)), after))
    picked = options.get("rows") or ()
    last = (*shared, "--rows", ",".join(map(str, picked))) if picked else shared
    return [*jobs.values(), *rows, Job(f"{name} table", last, tuple(job.name for job in rows))]


def job_script(jobs: Sequence[Job]) -> str:
    """The jobs as a shell script, numbered, with the numbers of the jobs that each waits for.

    >>> print(job_script([Job("a", ("train", "x")), Job("b", ("report", "runs/x"), after=("a",))]))
    # 1: a
    vitfocus train x
    # 2: b, after 1
    vitfocus report runs/x
    """
    numbers = {job.name: number for number, job in enumerate(jobs, 1)}
    lines = []
    for job in jobs:
        after = f", after {', '.join(ranges(numbers[name] for name in job.after))}" if job.after else ""
        lines += [f"# {numbers[job.name]}: {job.name}{after}{', done' if job.done else ''}", job.command]
    return "\n".join(lines)


class Command:
    """The work of a job: a command in a separate process, which writes a checkpoint when it receives SIGTERM.

    When the job is pre-empted or its time is up, submitit calls `checkpoint` and queues the job again. A command that
    was killed is started again, and resumes.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.pid = 0

    def __call__(self) -> None:
        """Run to the end."""
        code = self._run()
        for _ in range(_RESTARTS):
            if code >= 0:
                break
            print(f"{shlex.join(self.command)} was killed by signal {-code}; restarting it.", file=sys.stderr)
            code = self._run()
        if code:
            raise VitfocusError(f"{shlex.join(self.command)} ended with {code}.")

    def _run(self) -> int:
        process = subprocess.Popen(self.command, start_new_session=True)  # the job's signals are for the job alone
        self.pid = process.pid
        while (code := process.poll()) is None:
            time.sleep(0.2)
        return code

    def checkpoint(self) -> Any:
        """Stop the command, which saves its state; returns how the job is resumed."""
        from submitit.helpers import DelayedSubmission

        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGTERM)
            os.waitpid(self.pid, 0)
        return DelayedSubmission(Command(self.command))


def submit(jobs: Sequence[Job], folder: Path, cluster: str = "slurm", options: Mapping[str, Any] | None = None) -> Any:
    """Submit the jobs that are not done to a cluster.

    Args:
        jobs: Each after the jobs that it waits for.
        folder: A new folder for submitit's files and the jobs' output is created in here.
        cluster: "slurm", or "local" to run the jobs one after the other on this machine.
        options: submitit's parameters, such as {"gpus_per_node": 8, "timeout_min": 1440, "slurm_partition": "gpu"}.

    Returns:
        The jobs of submitit, by name.

    Raises:
        VitfocusError: If submitit is not installed, or the jobs cannot be submitted.
    """
    try:
        import submitit
    except ImportError:
        raise VitfocusError("--submit needs submitit: pip install 'vitfocus[slurm]'.") from None
    given = dict(options or {})
    gpus = int(given.get("gpus_per_node", 0))
    if int(given.get("nodes", 1)) > 1:
        raise VitfocusError("--submit uses one node per job: start larger ones from --plan, with srun and torchrun.")
    folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="submitted-", dir=folder))  # a new one: submitit unpickles what is there
    submitted: dict[str, Any] = {}
    try:
        executor = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=1000)
        if cluster == "local":
            given = {"timeout_min": 7 * 24 * 60, **given}
        for job in jobs:
            if job.done:
                continue
            ids = [submitted[name].job_id for name in job.after if name in submitted]
            more = dict(given.get("slurm_additional_parameters", {})) | {"requeue": True}
            more |= {"dependency": "afterok:" + ":".join(ids)} if ids else {}
            executor.update_parameters(**{**given, "name": "vitfocus", "slurm_additional_parameters": more})
            table = job is jobs[-1]
            submitted[job.name] = executor.submit(Command(launched(job.arguments, 1 if table else gpus)))
            print(f"{job.name}: job {submitted[job.name].job_id}", file=sys.stderr, flush=True)
            if cluster == "local":
                submitted[job.name].result()
    except (RuntimeError, NameError, ValueError, TypeError) as error:
        raise VitfocusError(f"The jobs cannot be submitted: {reason(error)}.") from None
    return submitted


def launched(arguments: Sequence[str], gpus: int) -> list[str]:
    """The command with this Python, started by torchrun on several GPUs."""
    if gpus < 2:
        return [sys.executable, "-m", "vitfocus", *arguments]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    return [sys.executable, *torchrun, "-m", "vitfocus", *arguments]
