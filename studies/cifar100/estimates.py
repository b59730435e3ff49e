"""How long a run will take: as long as its like took with the machine shared by as many, or a guess at first."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

from arms import ARMS
from setting import Setting

#: Seconds of a plain model's run of the full study on an H200 that four share, before anything is known.
GUESSES = {"selection": 130.0, "vit-ti": 130.0, "vit-s": 300.0, "heads": 130.0, "fine-tune": 100.0}
SHARED_BY = 4
#: What a treatment may make of a run's time, before its arm is known; generous.
WEIGHTS = {"tap": 1.5, "adl": 1.4, "se": 1.2, "cb": 1.1}
#: What a run may take more than its like did.
MARGIN = 1.1


def expected_seconds(place: str, setting: Setting) -> float:
    """The most that finished runs of the arm took; for a new arm, its group's by the treatments' weight."""
    group, name = place.split("/")[:2]
    folder = setting.results / group
    same = [_seconds(path, setting) for path in (folder / name).glob("*.json")]
    if same:
        return MARGIN * max(same)
    others = [_seconds(path, setting) / weight(group, path.parent.name) for path in folder.rglob("*.json")]
    guess = GUESSES[group] * setting.workers / SHARED_BY if setting.scale.name == "full" else 5.0
    return MARGIN * weight(group, name) * (max(others) if others else guess)


def weight(group: str, arm: str) -> float:
    """How much longer than the plain model's an arm's run may be.

    >>> round(weight("vit-ti", "cb-tap-adl"), 2), weight("selection", "fast")
    (2.31, 1.0)
    """
    treatments = ARMS[group][arm].treatments if group in ARMS else ""
    return math.prod((factor for name, factor in WEIGHTS.items() if name in treatments), start=1.0)


def _seconds(path: Path, setting: Setting) -> float:
    seconds, workers = _read(path, path.stat().st_mtime_ns)
    return seconds * max(1.0, setting.workers / workers)


@functools.lru_cache(maxsize=1024)
def _read(path: Path, _: int) -> tuple[float, int]:
    content = json.loads(path.read_text())
    return float(content["wall_seconds"]), int(content["workers"])
