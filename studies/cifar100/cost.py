"""What a training step costs with each arm, beside the plain model's: in one quiet process, by turns and medians.

The step is the one that training takes: its own engine, data on the device, augmentation, compiled and, on a GPU,
recorded and replayed. A ratio is the median over rounds of neighbouring times, as in benchmarks/step_cost.py.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import torch
from arms import ARMS, Run
from one_run import recipe_of, selected
from setting import Setting

from vitfocus.core.environment import default_device, device_name, versions
from vitfocus.core.files import write_text
from vitfocus.recipes import Recipe
from vitfocus.train.cuda_graph import WARM_UP
from vitfocus.train.run import assemble_run
from vitfocus.treatments.cost import seconds_per_call

GROUPS = ("vit-ti", "vit-s")


class Step:
    """One arm's training step, ready to be repeated."""

    def __init__(self, recipe: Recipe, folder: str) -> None:
        cuda = default_device().type == "cuda"
        self.trainer = assemble_run(recipe, folder)
        self.batches = self.trainer.start(1 << 30)
        seconds_per_call(self, default_device(), WARM_UP + 3 if cuda else 1)
        # Once recorded a step is replayed and never compiled again: the next arm begins with an empty compiler.
        torch._dynamo.reset()

    def __call__(self) -> None:
        self.trainer.train_step(self.batches)


def run_cost(setting: Setting, seconds_left: Callable[[], float], say: Callable[[str], None] = print) -> str:
    """Measure the arms that cost.json lacks, and write it; plain is measured beside them every time."""
    path = setting.results / "cost.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for group in GROUPS:
        rows: dict[str, Any] = content.setdefault(group, {})
        missing = [name for name in ARMS[group] if name not in rows]
        if missing and seconds_left() > 20:
            found = measure_arms(group, dict.fromkeys(["plain", *missing]), setting, seconds_left, say)
            content[group] = {name: (rows | found)[name] for name in ARMS[group] if name in rows | found}
    content |= {
        "device": device_name(default_device()),
        "versions": versions("accelerate", "python"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_text(path, json.dumps(content, indent=1) + "\n")
    return ", ".join(f"{group}: {len(content[group])} of {len(ARMS[group])} arms" for group in GROUPS)


def is_complete(setting: Setting) -> bool:
    """Whether every arm's cost is known."""
    path = setting.results / "cost.json"
    content = json.loads(path.read_text()) if path.is_file() else {}
    return all(set(ARMS[group]) <= set(content.get(group, {})) for group in GROUPS)


def compile_ahead(group: str, name: str, setting: Setting) -> str:
    """Take an arm's first steps in a process of its own, which leaves them in the compiler's cache."""
    with tempfile.TemporaryDirectory() as folder:
        Step(recipe_of(Run(ARMS[group][name], 0), setting, selected(setting)), folder)
    return ""


def measure_arms(
    group: str, names: Iterable[str], setting: Setting, seconds_left: Callable[[], float], say: Callable[[str], None]
) -> dict[str, Any]:
    """Milliseconds and ratio of some arms, plain first; those that time does not reach are left out."""
    chosen = selected(setting)
    recipes = {name: recipe_of(Run(ARMS[group][name], 0), setting, chosen) for name in names}
    return measure_steps(group, recipes, setting.scale.cost_seconds, setting.scale.cost_rounds, seconds_left, say)


def measure_steps(
    group: str,
    recipes: Mapping[str, Recipe],
    seconds: float,
    rounds: int,
    seconds_left: Callable[[], float] = lambda: float("inf"),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Milliseconds of each recipe's training step, and its ratio to that of the recipe `plain`.

    Recipes take turns, each for about so many seconds per round. Those for which no time is left are not measured.
    """
    slowest = 0.0
    steps: dict[str, Step] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in recipes.items():
            if seconds_left() < 1.5 * slowest + 15:
                say(f"no time is left for {group}/{name}")
                continue
            began = time.monotonic()
            steps[name] = Step(recipe, f"{folder}/{name}")
            slowest = max(slowest, time.monotonic() - began)
            say(f"{group}/{name} is ready after {time.monotonic() - began:.0f} s")
        repeats = max(1, round(seconds / seconds_per_call(steps["plain"], default_device(), 5)))
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                times[name].append(seconds_per_call(step, default_device(), repeats))
    return {
        name: {
            "ms": 1e3 * statistics.median(times[name]),
            "ratio": statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True)),
        }
        for name in steps
    }
