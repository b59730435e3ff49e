"""How long a run will take: as long as its like took, or a guess at first.

`work` is the time that a run takes of a device that it shares: a minute in which two compute side by side is half a
minute's work of each, and what they prepare before counts nothing. timings.json, beside the results, holds what
finished runs took.
"""

from __future__ import annotations

import json
import math

from arms import ARMS
from pool import Expectation
from setting import Setting

from vitfocus.core.files import write_text

#: Seconds of a plain model's epoch of 50,000 images on an H200, and of all that is not training, before any is known.
GUESSES = {"selection": (1.0, 12.0), "vit-ti": (1.0, 22.0), "vit-s": (2.0, 35.0), "heads": (1.1, 22.0)}
FINETUNE_GUESS = (6.0, 20.0)
#: What a treatment may make of a run's time, before its arm is known.
WEIGHTS = {"tap": 1.25, "adl": 1.3, "se": 1.1, "cb": 1.05}
#: What a run may take more than its like did, and more than is guessed.
MARGIN, MARGIN_NEW = 1.05, 1.15
#: Seconds in which a run prepares itself and writes its files, while the device is free for others; more for an arm
#: that may have to be compiled.
APART, APART_NEW = 20.0, 60.0


def expected(place: str, setting: Setting) -> Expectation:
    """By the most that finished runs of the arm took; for a new arm, by its group's and the treatments' weight."""
    if setting.scale.name == "smoke":
        return Expectation(5.0, 5.0)
    group, name = place.split("/")[:2]
    known = {path: entry["work"] for path, entry in timings(setting).items() if path.startswith(f"{group}/")}
    same = [work for path, work in known.items() if path.split("/")[1] == name]
    others = [work / weight(group, path.split("/")[1]) for path, work in known.items()]
    if same:
        work = max(same)
    elif others:
        work = weight(group, name) * max(others)
    else:
        epochs = setting.scale.finetune_epochs if group == "fine-tune" else setting.scale.epochs
        each, rest = GUESSES.get(group, FINETUNE_GUESS)
        work = weight(group, name) * each * epochs + rest
    work *= MARGIN if same else MARGIN_NEW
    return Expectation(work, work + (APART if same else APART_NEW))


def weight(group: str, arm: str) -> float:
    """How much longer than the plain model's an arm's run may be.

    >>> round(weight("vit-ti", "cb-tap-adl"), 2), weight("selection", "fast")
    (1.71, 1.0)
    """
    treatments = ARMS[group][arm].treatments if group in ARMS else ""
    return math.prod((factor for name, factor in WEIGHTS.items() if name in treatments), start=1.0)


def timings(setting: Setting) -> dict[str, dict[str, float]]:
    """What finished runs took, in seconds, by place."""
    path = setting.results / "timings.json"
    content: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.is_file() else {}
    return content


def remember(setting: Setting, place: str, work: float, wall: float) -> None:
    """Add a finished run."""
    content = timings(setting) | {place: {"work": round(work, 1), "wall": round(wall, 1)}}
    write_text(setting.results / "timings.json", json.dumps(content, indent=1) + "\n")
