"""A fast part of the attacks, with a fixed seed; `make test-adversarial` runs the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from adversarial.attacks import ATTACKS, share
from adversarial.harness import Tally

pytest.importorskip("transformers", reason="the hf extra is not installed")


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "two processes"])  # tests/train has that one
def test_every_attempt_holds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tally = Tally(seed=0)
    ATTACKS[name](tally, share(name, 250), tmp_path)
    assert tally.tried[name] and not tally.failed[name], tally.failed[name][:3]
