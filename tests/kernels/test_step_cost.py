"""benchmarks/step_cost.py at toy size: what the results file lacks is measured and merged, within a time limit."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
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
