"""Everything that the study's folder of results holds, read once, and the numbers of runs seed by seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reporting.intervals import Estimate, estimate, pooled
from reporting.outcomes import Outcome
from vitfocus.core.errors import VitfocusError

Run = dict[str, Any]

#: A sign and the arm whose number it stands before: (+1, "vit-ti", "cb-upper"), (-1, "vit-ti", "plain").
Term = tuple[int, str, str]


@dataclass(frozen=True)
class Comparison:
    """The numbers of each term, and their sum with signs, over the seeds that all of them have."""

    sides: tuple[Estimate, ...]
    difference: Estimate


@dataclass
class Study:
    """Runs by group, arm and seed, and what was measured once: selection, cost, diagnosis."""

    runs: dict[str, dict[str, dict[int, Run]]] = field(default_factory=dict)
    selection: list[dict[str, Any]] = field(default_factory=list)
    cost: dict[str, Any] = field(default_factory=dict)
    diagnosis: dict[str, Any] = field(default_factory=dict)

    def all_runs(self, *groups: str) -> Iterator[Run]:
        """The runs of these groups, or of all."""
        for group, arms in self.runs.items():
            if not groups or group in groups:
                for seeds in arms.values():
                    yield from seeds.values()

    def arms(self, group: str) -> list[str]:
        """The arms of a group that have a finished run, plain first."""
        return list(self.runs.get(group, {}))

    def seeds(self, group: str, arm: str, outcome: Outcome) -> dict[int, float]:
        """An arm's number by seed, of the runs that have it."""
        runs = self.runs.get(group, {}).get(arm, {})
        return {seed: value for seed, run in runs.items() if (value := outcome.take(run)) is not None}

    def estimate(self, group: str, arm: str, outcome: Outcome) -> Estimate | None:
        """An arm's number over its seeds."""
        values = self.seeds(group, arm, outcome)
        return estimate(values.values()) if values else None

    def compare(self, terms: Sequence[Term], outcome: Outcome) -> Comparison | None:
        """The weighted sum of several arms' numbers, made within each seed that all of them have."""
        columns = [self.seeds(group, arm, outcome) for _, group, arm in terms]
        common = sorted(set.intersection(*(set(column) for column in columns)))
        if not common:
            return None
        sides = tuple(estimate(column[seed] for seed in common) for column in columns)
        signs = [sign for sign, _, _ in terms]
        sums = [sum(s * column[seed] for s, column in zip(signs, columns, strict=True)) for seed in common]
        return Comparison(sides, estimate(sums))

    def against_plain(self, group: str, arm: str, outcome: Outcome) -> Estimate | None:
        """An arm's number less the plain model's, seed by seed."""
        found = self.compare([(1, group, arm), (-1, group, "plain")], outcome)
        return found.difference if found else None

    def pooled_against_plain(self, group: str, outcome: Outcome) -> dict[str, Estimate]:
        """Every arm less plain by the pooled model, over the seeds that all arms have; empty where they are too few."""
        arms = {arm: values for arm in self.arms(group) if (values := self.seeds(group, arm, outcome))}
        common = sorted(set.intersection(*(set(values) for values in arms.values()))) if arms else []
        if "plain" not in arms or len(arms) < 2 or len(common) < 2:
            return {}
        return pooled({arm: [values[seed] for seed in common] for arm, values in arms.items()}, "plain")


def gather(folder: Path, order: Mapping[str, Sequence[str]]) -> Study:
    """Read the results; `order` gives the groups and their arms in the order of the plan, others follow by name."""
    study = Study()
    for path in sorted(folder.glob("*/*/seed*.json")):
        run = _read(path)
        try:
            group, arm, seed = str(run["group"]), str(run["arm"]), int(run["seed"])
        except (KeyError, TypeError, ValueError):
            raise VitfocusError(f"{path} is no finished run: it names no group, arm and seed.") from None
        seeds = study.runs.setdefault(group, {}).setdefault(arm, {})
        if seed in seeds:
            raise VitfocusError(f"{path} repeats seed {seed} of {group}, {arm}: each run belongs in the folder once.")
        seeds[seed] = run
    study.runs = {
        group: {
            arm: dict(sorted(study.runs[group][arm].items())) for arm in _ordered(study.runs[group], order.get(group))
        }
        for group in _ordered(study.runs, list(order))
    }
    study.selection = [_read(path) for path in sorted((folder / "selection").glob("*.json"))]
    study.cost = _read(folder / "cost.json") if (folder / "cost.json").is_file() else {}
    study.diagnosis = _read(folder / "diagnosis.json") if (folder / "diagnosis.json").is_file() else {}
    if not (study.runs or study.selection or study.cost or study.diagnosis):
        raise VitfocusError(
            f"There are no results in {folder}: expected files such as vit-ti/plain/seed0.json, "
            "which `python studies/cifar100/study.py` writes."
        )
    return study


def _ordered(found: Mapping[str, Any], order: Sequence[str] | None) -> list[str]:
    known = [name for name in order or () if name in found]
    return known + [name for name in found if name not in known]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise VitfocusError(f"{path} is not JSON ({error}): remove it and run the study again.") from None
    if not isinstance(content, dict):
        raise VitfocusError(f"{path} holds no record: remove it and run the study again.")
    return content
