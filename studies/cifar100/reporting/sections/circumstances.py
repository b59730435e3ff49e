"""Where the numbers come from: hardware, versions, epochs, recipe, commands, and what was not done."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reporting.gathered import Run, Study
from reporting.labels import MODELS, label
from reporting.outcomes import at, walk
from reporting.words import flat
from vitfocus.core.tables import counted
from vitfocus.report.page import Cell, Page

_STUDY = "python studies/cifar100/study.py"
COMMANDS = (
    ("everything that is unfinished, then this page", f"{_STUDY} --data DATA"),
    (
        "a piece of it: four runs side by side on one GPU, ended in time",
        f"{_STUDY} train --data DATA --workers 4 --minutes 8.5",
    ),
    ("the same at toy scale, on a CPU in about a minute", f"{_STUDY} --smoke"),
    ("this page again from the results", f"{_STUDY} report"),
)

#: Keys of a recipe that differ between runs by design: the arm, its number of heads, the seed.
BY_DESIGN = frozenset({"model.spec", "model.arguments.num_heads", "engine.seed"})


def add_circumstances(page: Page, study: Study, missing: Sequence[str]) -> None:
    """Facts about the runs, the recipe of one of them, the commands, and the limits."""
    page.section("Circumstances")
    runs = list(study.all_runs())
    page.table("where and when", ["what", "value"], [row for row in _facts(runs) if row[1]])
    for group in study.runs:
        odd = differing_keys(study.all_runs(group))
        if odd:
            page.text(
                f"Beware: runs of {MODELS.get(group, group)} differ in more than arm and seed: {', '.join(odd)}. Their "
                "comparison is not one of treatments alone."
            )
    page.table("commands", ["what", "command"], [[what, command] for what, command in COMMANDS])
    _arms(page, study)
    _recipe(page, study)
    page.heading("What was not done")
    page.points([*_absent(missing), *LIMITS])


LIMITS = (
    "The papers train on ImageNet for 300 epochs; this study trains on CIFAR-100 for far fewer. A claim undecided or "
    "not supported here may hold there, and the other way round.",
    "One recipe, chosen on the plain model, serves every arm: none was tuned until it won, and one that needs another "
    "recipe is at a disadvantage.",
    "Intervals are over seeds of training; all models meet the same test images, so that the choice of these is not in "
    "them.",
    "CIFAR-100-C is generated here with the published constants, not downloaded: its numbers compare the arms with "
    "each other, not with tables elsewhere.",
)


def differing_keys(runs: Iterable[Run]) -> list[str]:
    """Keys of the recipes, and the epochs, that are not the same in all runs although they should be."""
    recipes = [{**flat(run.get("recipe") or {}), "epochs": run.get("epochs")} for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    return [
        key
        for key in keys
        if key not in BY_DESIGN and len({json.dumps(recipe.get(key), sort_keys=True) for recipe in recipes}) > 1
    ]


def _facts(runs: Sequence[Run]) -> list[list[Any]]:
    """Two columns: what, and the values that runs have."""
    versions: dict[str, set[str]] = {}
    for run in runs:
        for name, version in (run.get("versions") or {}).items():
            versions.setdefault(name, set()).add(str(version))
    finished = sorted(str(run["finished"]) for run in runs if run.get("finished"))
    hours = sum(at("train", "seconds")(run) or 0.0 for run in runs) / 3600
    return [
        ["device", _values(run.get("device") for run in runs)],
        ["versions", ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in versions.items())],
        ["finished", f"{finished[0]} to {finished[-1]}" if finished else ""],
        [
            "training time",
            f"{hours:.1f} hours, the sum over {counted(len(runs), 'run')}, several of which shared the device",
        ]
        if hours
        else ["training time", ""],
        ["runs side by side on the device", _values(run.get("workers") for run in runs)],
        ["test images", _values(walk(run, ("protocol", "test_images")) for run in runs)],
        ["of those, corrupted", _values(walk(run, ("protocol", "corrupted_images")) for run in runs)],
        [
            "images that attention was read on",
            _values(walk(run, ("protocol", "reading_images")) for run in runs),
        ],
        ["frost textures", _values(walk(run, ("corruption", "frost")) for run in runs)],
    ]


def _values(found: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in found if value is not None))


def _arms(page: Page, study: Study) -> None:
    rows = []
    for group, arms in study.runs.items():
        for arm, seeds in arms.items():
            run = next(iter(seeds.values()))
            count = at("parameters")(run)
            shown = Cell(f"{count:,.0f}", count) if count is not None else None
            rows.append(
                [MODELS.get(group, group), label(arm), str(run.get("spec", "")), shown, ", ".join(map(str, seeds))]
            )
    if rows:
        page.table("arms as specs", ["group", "arm", "spec", "parameters", "seeds"], rows, folded=True)


def _recipe(page: Page, study: Study) -> None:
    for group, arms in study.runs.items():
        run = next((run for seeds in arms.values() for run in seeds.values() if run.get("recipe")), None)
        if run is not None:
            rows = [[key, json.dumps(value, ensure_ascii=False)] for key, value in flat(run["recipe"]).items()]
            name = f"recipe of {MODELS.get(group, group)}, {label(str(run['arm']))}, seed {run['seed']}"
            page.table(name, ["key", "value"], rows, folded=True)


def _absent(missing: Sequence[str]) -> list[str]:
    if not missing:
        return []
    return [f"Not finished: {part}." for part in missing]


def missing_runs(study: Study, plan: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> list[str]:
    """Planned runs without a result, by the seeds that are lacking, and parts of the study without any."""
    found = []
    for group, arms in plan.items():
        if group not in study.runs:
            found.append(f"{MODELS.get(group, group)} (no run)")
            continue
        by_seeds: dict[tuple[int, ...], list[str]] = {}
        for arm in arms:
            lacking = tuple(seed for seed in seeds if seed not in study.runs[group].get(arm, {}))
            by_seeds.setdefault(lacking, []).append(label(arm))
        for lacking, labels in by_seeds.items():
            if lacking:
                which = f"{'seed' if len(lacking) == 1 else 'seeds'} {', '.join(map(str, lacking))}"
                whose = "every arm" if len(labels) == len(arms) else "; ".join(labels)
                found.append(f"{MODELS.get(group, group)}, {which} of {whose}")
    parts = {"the choice of the recipe": study.selection, "step cost": study.cost, "diagnosis": study.diagnosis}
    return found + [name for name, content in parts.items() if not content]
