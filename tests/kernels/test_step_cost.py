"""benchmarks/step_cost.py at toy size: what the results file lacks is measured and merged, within a time limit."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_cost.py"


def test_missing_results_are_added_to_those_there(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    known = {"cb": {"ratio": 1.5}, "tap": {"ratio": 1.5, "stale": "older kernels"}}
    other = {"compiled": {"swin_t-3136": {"adl": {"ratio": 1.7}}}, "eager": {"vit_ti4-65": known}}
    out.write_text(json.dumps({"steps": other, "notes": ["kept"]}))
    options = f"--toy --parts steps --rounds 1 --missing --settings eager --models vit_ti4 --out {out}".split()
    command = [sys.executable, str(SCRIPT), *options, "--variants", "cb,tap,adl-paper"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["notes"] == ["kept"] and result["steps"]["compiled"] == other["compiled"]
    found = result["steps"]["eager"]["vit_ti4-65"]
    assert found["cb"] == known["cb"]
    assert "stale" not in found["tap"] and found["tap"]["ratio"] != 1.5
    assert found["adl-paper"]["loss"] >= 0.1 and found["adl-paper"]["share"] >= 0.2
    assert {"plain", "plain-again"} <= set(found)


def test_nothing_is_started_after_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    step_cost = importlib.import_module("step_cost")
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["step_cost.py", "--toy", "--seconds", "0", "--out", str(out)])
    step_cost.main()
    said = capsys.readouterr().out.splitlines()
    assert len(said) > 20 and all(line.endswith("left out, no time") for line in said)
    assert said[1].startswith("deit_s 197 recorded") and not out.exists()


def _count(path: Path) -> Callable[[], float]:
    """Writes the time every few milliseconds for a while, then measures nothing."""
    with path.open("w") as file:
        for _ in range(150):
            file.write(f"{time.time()}\n")
            file.flush()
            time.sleep(0.01)
    return lambda: 0.0


def _sleep() -> Callable[[], tuple[float, float]]:
    def measure() -> tuple[float, float]:
        began = time.time()
        time.sleep(0.5)
        return began, time.time()

    return measure


def _fail() -> Callable[[], None]:
    raise ValueError("not today")


def test_one_measures_while_the_others_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    turns = importlib.import_module("_turns")
    mark = f"outsider-{os.getpid()}"
    busy = f"import time, pathlib\nwith open({str(tmp_path / 'outsider')!r}, 'w') as f:\n while True: "
    busy += "print(time.time(), file=f, flush=True); time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", busy, mark], start_new_session=True) as outsider:
        jobs = {
            "sleep": turns.Job(_sleep),
            "count": turns.Job(_count, (tmp_path / "counted",)),
            "fail": turns.Job(_fail),
            "die": turns.Job(os._exit, (3,)),
        }
        found = {result.name: result for result in turns.take_turns(jobs, 4, pause=mark, settle=0.05)}
        outsider.kill()
    began, ended = found["sleep"].value
    for name in ("counted", "outsider"):
        times = [float(line) for line in (tmp_path / name).read_text().split()]
        assert not [moment for moment in times if began < moment < ended], name
        assert max(times) > ended or name == "outsider"
    assert found["count"].value == 0.0 and found["count"].ready_seconds > 1.4
    assert found["fail"].error == "ValueError: not today" and "code 3" in found["die"].error


def test_a_job_that_is_not_ready_at_the_deadline_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    turns = importlib.import_module("_turns")
    jobs = {"slow": turns.Job(time.sleep, (30,)), "later": turns.Job(_sleep)}
    began = time.time()
    found = {result.name: result.error for result in turns.take_turns(jobs, 1, deadline=time.time() + 1)}
    assert time.time() - began < 10
    assert found == {"slow": "stopped, no time left", "later": "left out, no time"}


def test_the_tables_in_the_documentation_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    report = importlib.import_module("step_cost_report")
    for path, text in report.texts(json.loads(report.RESULTS.read_text())).items():
        assert path.read_text() == report.updated(path, text), "run benchmarks/step_cost_report.py"
