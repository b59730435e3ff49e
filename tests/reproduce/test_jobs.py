"""An item as jobs: in order, submitted with their dependencies, requeued when pre-empted, resumed when killed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import lock_folder
from vitfocus.reproduce.jobs import Command, Job, launched, plan_jobs, submit

submitit = pytest.importorskip("submitit")
TINY = ["epochs=0.05", "warmup_epochs=0", "train_length=40", "val_length=12", "batch=20"]

#: Counts its starts, waits to be told to stop on the first, and is killed on the second.
WORK = """
import os, signal, sys, time
from pathlib import Path
log = Path(sys.argv[1])
starts = log.read_text().count("start") if log.exists() else 0
def stop(*_):
    with log.open("a") as file: file.write("checkpoint ")
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
with log.open("a") as file: file.write("start ")
if starts == 0: time.sleep(60)
if starts == 1: os.kill(os.getpid(), signal.SIGKILL)
with log.open("a") as file: file.write("finished")
"""


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def preempt(job: Any) -> None:
    """The signal that Slurm sends before it takes a job's node away, or when its time is nearly up."""
    psutil.Process(int(job.job_id)).children()[0].send_signal(signal.SIGUSR2)


def test_the_plan_lists_every_run_once_and_after_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "cb/tableS1", *TINY, "--rows", "1,4", "--images", "2", "--plan", "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)
    names = [job["name"] for job in jobs]
    assert len(set(names)) == len(names) == 6
    for place, job in enumerate(jobs):
        assert all(name in names[:place] for name in job["after"]), "each comes after what it waits for"
        assert shlex.split(job["command"])[:3] == ["vitfocus", "reproduce", "cb/tableS1"] and not job["done"]
    teacher, first, second = jobs[:3]
    assert teacher["after"] == [] and first["after"] == second["after"] == [teacher["name"]]
    assert [job["after"] for job in jobs[3:]] == [[first["name"]], [second["name"]], names[3:5]]
    assert jobs[3]["command"].endswith("--images 2 --rows 1") and jobs[5]["command"].endswith("--images 2 --rows 1,4")
    assert main(["reproduce", "cb/tableS1", *TINY, "--rows", "1", "--plan"]) == 0
    assert f"--train {teacher['name']}" in capsys.readouterr().out


def test_one_run_of_the_plan_can_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["reproduce", "cb/table4a", *TINY, "--rows", "1", "--out", str(tmp_path)]
    assert main([*given, "--plan", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)[0]["name"]
    assert main([*given, "--train", run]) == 0
    assert (tmp_path / "smoke" / run / "results.json").is_file() and not (tmp_path / "smoke" / "items").exists()
    assert main([*given, "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["done"]
    assert main([*given, "--train", run[:-1]]) == 2 and "did you mean" in capsys.readouterr().err


def test_a_preempted_job_is_requeued_and_a_killed_command_started_again(tmp_path: Path) -> None:
    """submitit's local executor: a signal as Slurm sends it, then SIGKILL; the third start finishes."""
    log = tmp_path / "log"
    (tmp_path / "work.py").write_text(WORK)
    executor = submitit.AutoExecutor(tmp_path / "jobs", cluster="local")
    executor.update_parameters(timeout_min=5)
    job = executor.submit(Command([sys.executable, str(tmp_path / "work.py"), str(log)]))
    wait_for(lambda: log.exists() and "start" in log.read_text())
    preempt(job)
    job.result()
    assert log.read_text() == "start checkpoint start start finished"
    assert "was killed by signal 9; restarting it" in job.stderr()
    with pytest.raises(submitit.core.utils.FailedJobError, match=r"ended with 3"):
        executor.submit(Command([sys.executable, "-c", "raise SystemExit(3)"])).result()


def test_slurm_gets_the_dependencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake sbatch that keeps the scripts it is given."""
    tools = tmp_path / "tools"
    tools.mkdir()
    scripts = {"srun": "", "sbatch": f'n=$(ls {tmp_path}/*.sent 2>/dev/null | wc -l); cp "$1" {tmp_path}/$n.sent; '}
    for name, body in scripts.items():
        (tools / name).write_text(f'#!/bin/sh\n{body}echo "Submitted batch job $((100 + n))"\n')
        (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    jobs = plan_jobs("cb/tableS1", "smoke", ["--scale", "smoke"], rows=[1])
    done = [Job(job.name, job.arguments, job.after, number == 0) for number, job in enumerate(jobs)]
    options = {"gpus_per_node": 4, "timeout_min": 60, "slurm_partition": "gpu"}
    submitted = submit(done, tmp_path / "jobs", "slurm", options)
    assert [submitted[job.name].job_id for job in jobs[1:]] == ["100", "101", "102"]
    sent = [(tmp_path / f"{number}.sent").read_text() for number in range(3)]
    assert "dependency" not in sent[0], "what it would wait for is done"
    assert "--dependency=afterok:100" in sent[1] and "--dependency=afterok:101" in sent[2]
    for text in sent:
        assert "--partition=gpu" in text and "--requeue" in text and "--signal=USR2@" in text
    assert launched(["x"], 4)[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    with pytest.raises(VitfocusError, match="one node per job"):
        submit(jobs, tmp_path / "jobs", "slurm", {"nodes": 2})
    with pytest.raises(VitfocusError, match="cannot be submitted"):
        submit(jobs, tmp_path / "jobs", "slurm", {"gpus": 2})


@pytest.mark.slow
def test_a_table_is_run_by_the_local_executor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real commands: a run that is killed while it trains is resumed from its checkpoint, and not trained twice."""
    item = ["cb/table4a", "epochs=3", "warmup_epochs=0", "train_length=2000", "val_length=20", "batch=20"]
    given = ["reproduce", *item, "log_every=1", "checkpoint_steps=5", "--rows", "1", "--images", "4"]
    given += ["--out", str(tmp_path)]
    assert main([*given, "--plan", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    executor = submitit.AutoExecutor(tmp_path / "jobs", cluster="local")
    executor.update_parameters(timeout_min=10)
    words = launched(shlex.split(first["command"])[1:], 1)
    jobs = [executor.submit(Command(words)) for _ in range(2)]  # two want the same run
    checkpoints = tmp_path / "smoke" / first["name"] / "checkpoints"
    wait_for(lambda: checkpoints.is_dir() and any(checkpoints.iterdir()), 180)
    for job in jobs:
        preempt(job)
    for job in jobs:
        job.result()
    lines = (tmp_path / "smoke" / first["name"] / "metrics.jsonl").read_text().splitlines()
    steps = [row["step"] for row in map(json.loads, lines) if row["kind"] == "train"]
    assert steps == sorted(set(steps)) and steps[-1] == 300, "each step once"
    assert main([*given, "--submit", "local", "--json"]) == 0
    found = {job["name"]: job["id"] for job in json.loads(capsys.readouterr().out)}
    assert found[first["name"]] is None and sum(value is not None for value in found.values()) == 2
    assert (tmp_path / "smoke" / "items" / "cb-table4a" / "outcome.json").is_file()


def test_process_waits_for_another_with_the_same_run_measurement_or_item(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one table are jobs of their own, which may run at the same time, also on the same run."""
    sleep = time.sleep
    monkeypatch.setattr("vitfocus.core.environment.time.sleep", lambda seconds: sleep(0.02))  # asks again soon
    given = ["reproduce", "cb/table8", *TINY, "--rows", "1", "--images", "4", "--out", str(tmp_path)]
    assert main([*given, "--plan", "--json"]) == 0
    run = tmp_path / "smoke" / json.loads(capsys.readouterr().out)[0]["name"]
    held = [run, run / "evaluations", tmp_path / "smoke" / "items" / "cb-table8"]
    for folder in held:
        ready, done = threading.Event(), threading.Event()

        def hold(folder: Path = folder, ready: threading.Event = ready, done: threading.Event = done) -> None:
            with lock_folder(folder):
                ready.set()
                done.wait(0.3)

        other = threading.Thread(target=hold)
        other.start()
        ready.wait()
        assert main(given) == 0
        other.join()
        said = capsys.readouterr().err
        assert f"{folder} is in use by process {os.getpid()} on" in said and "; waiting for it." in said
    assert (held[2] / "outcome.json").is_file()


def test_signals_reach_the_job_alone(tmp_path: Path) -> None:
    """Slurm signals a job's whole process group, which would end a command without a checkpoint."""
    file = tmp_path / "group"
    code = f"import os; open({str(file)!r}, 'w').write(str(os.getpgid(0)))"
    Command([sys.executable, "-c", code])()
    assert int(file.read_text()) != os.getpgid(0) and signal.getsignal(signal.SIGTERM) is not None
