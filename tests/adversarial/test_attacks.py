"""A fast part of the attacks, with a fixed seed; `make test-adversarial` runs the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from adversarial.attacks import ATTACKS, attack, report_attack, share
from helpers.processes import start

pytest.importorskip("transformers", reason="the hf extra is not installed")


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "two processes"])  # tests/train has that one
def test_every_attempt_holds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if ATTACKS[name].__module__ == "adversarial.runs":  # which forks: autograd does not work in forks of any process
        told = start(report_attack, name, share(name, 250), tmp_path).results()
    else:
        told = attack(name, share(name, 250), tmp_path)
    assert told["tried"] and not told["failed"], told["failed"][:3]
