"""The categories of attacks, and how many of all tries each gets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adversarial import files, folders, places, runs, words
from adversarial.harness import Tally

ATTACKS: dict[str, Callable[[Tally, int, Path], None]] = {
    "specs": words.specs,
    "command lines": words.command_lines,
    "overrides": words.overrides,
    "calls": words.calls,
    "JSON and TOML": files.records,
    "archives": files.archives,
    "images": files.images,
    "shards": files.shards,
    "special files": places.places,
    "requests": places.requests,
    "hostile folders": folders.folders,
    "flipped bits": runs.flips,
    "kills in checkpoints": runs.checkpoint_kills,
    "kills in evaluations": runs.evaluation_kills,
    "kills in training": runs.training_kills,
    "concurrent runs": runs.concurrent,
    "two processes": runs.processes,
}
#: Tries of each category in 20,000; an attempt takes between a millisecond and a minute.
_SHARES = {
    **{"specs": 5000, "command lines": 400, "overrides": 2000, "calls": 2800, "JSON and TOML": 2500, "archives": 800},
    **{"images": 1400, "shards": 1200, "special files": 400, "requests": 600, "hostile folders": 300},
    **{"flipped bits": 1800, "kills in checkpoints": 600, "kills in evaluations": 200, "kills in training": 40},
    **{"concurrent runs": 16, "two processes": 4},
}


def share(name: str, tries: int) -> int:
    """The number of tries of a category, at least one.

    >>> sum(share(name, 20_000) for name in ATTACKS) >= 20_000
    True
    """
    return max(1, round(_SHARES[name] * tries / 20_000))


def attack(name: str, tries: int, folder: Path) -> dict[str, Any]:
    """How many attempts of a category were made, and what failed."""
    tally = Tally(seed=0)
    ATTACKS[name](tally, tries, folder)
    return {"tried": tally.tried[name], "failed": tally.failed[name]}


def report_attack(name: str, tries: int, folder: Path) -> None:
    """`attack` in a process of its own, which prints the result."""
    os.chdir(folder)
    print(json.dumps(attack(name, tries, folder), default=str))
