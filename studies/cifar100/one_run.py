"""One run from its recipe to its JSON: trained, measured, written in one stroke. A finished run is never repeated."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arms import ARMS, CANDIDATES, SHARED, Run
from msgspec import to_builtins
from setting import Setting, test_images
from slots import Slot

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.train import Recipe, load_recipe

#: Keys of a recipe that may differ between runs that are compared.
_ANY = {"root", "weights", "device", "workers", "source"}


class Stopped(Exception):
    """The run was asked to end early; its checkpoint is kept."""


#: The model that the recipe is chosen with.
PLAIN = Run(ARMS["vit-ti"]["plain"], 0)


def recipe_of(run: Run, setting: Setting, chosen: Sequence[str], holdout: int = 0) -> Recipe:
    """The shipped `cifar100` recipe with the study's keys; `chosen` are the selected candidate's."""
    scale = setting.scale
    keys = [
        *SHARED,
        *chosen,
        f"spec={run.arm.spec}",
        f"seed={run.seed}",
        f"epochs={scale.epochs}",
        f"warmup_epochs={scale.warmup_epochs}",
        f"holdout={holdout}",
        "evaluate_every=0",  # at the end alone: no choice is made by a look at the test set
        "checkpoint_minutes=2",
        *setting.data_keys(),
        *(f"model.arguments.{argument}" for argument in run.arm.arguments),
        *scale.recipe,
    ]
    return load_recipe("cifar100", keys)


def run_candidate(name: str, setting: Setting) -> str:
    """Train the plain ViT-Ti with a candidate's keys on part of the training set, and score it on the rest of it."""
    began = time.monotonic()
    run, place, recipe = PLAIN, f"selection/{name}", candidate_recipe(name, setting)
    with Slot(setting.work, setting.slots) as slot:
        results = trained(recipe, setting.work / place, slot)
    content = {
        "candidate": name,
        "overrides": dict(key.split("=", 1) for key in CANDIDATES[name]),
        "validation_accuracy": 100 * results["last"]["top1"],
        "validation_images": results["val_images"],
        "training_images": results["train_images"],
        "spec": run.arm.spec,
        "epochs": setting.scale.epochs,
        "seed": run.seed,
        "recipe": recipe_record(recipe),
    }
    write_result(setting, place, content, results, began)
    clear(setting.work / place)
    return f"validation accuracy {content['validation_accuracy']:.2f} %"


def candidate_recipe(name: str, setting: Setting) -> Recipe:
    """The plain model's recipe with a candidate's keys, some training images held out."""
    return recipe_of(PLAIN, setting, CANDIDATES[name], setting.scale.holdout)


def selected(setting: Setting) -> tuple[str, ...]:
    """The keys of the candidate with the best validation accuracy."""
    found = [json.loads(path.read_text()) for path in sorted((setting.results / "selection").glob("*.json"))]
    if not found:
        raise VitfocusError(
            f"No recipe is selected yet ({setting.results / 'selection'} holds no result): run `study.py select` first."
        )
    best = max(found, key=lambda one: one["validation_accuracy"])
    return tuple(f"{key}={value}" for key, value in best["overrides"].items())


def run_from_scratch(run: Run, setting: Setting) -> str:
    """Train an arm on all training images and measure it on the test images, once."""
    from measure import measure

    import vitfocus as vf

    began = time.monotonic()
    recipe = recipe_of(run, setting, selected(setting))
    images, labels = test_images(setting)
    scale = setting.scale
    with Slot(setting.work, setting.slots) as slot:
        results = trained(recipe, setting.work / run.place, slot)
        slot.take()
        measured = measure(
            vf.load(setting.work / run.place / "model"),
            images,
            labels,
            corruptions=scale.corruptions,
            severities=scale.severities,
            frost=setting.frost,
            corrupted_images=scale.corrupted_images,
            reading_images=scale.reading_images,
        )
    content = {**described(run, scale.epochs, recipe, results, setting), **measured}
    write_result(setting, run.place, content, results, began)
    keep_model(run, setting)
    return in_short(content)


def in_short(content: dict[str, Any]) -> str:
    """A run's two main numbers, for a log."""
    accuracy, error = content["clean"]["accuracy"], content["corruption"]["mean_error"]
    return f"accuracy {accuracy:.2f} %, corruption error {error:.2f} %"


def described(run: Run, epochs: float, recipe: Recipe, results: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """What a run's JSON says before any measurement."""
    rows = (setting.work / run.place / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, rows) if row["kind"] == "train"]
    return {
        "group": run.arm.group,
        "arm": run.arm.name,
        "spec": run.arm.spec,
        "seed": run.seed,
        "epochs": epochs,
        "parameters": results["parameters"],
        "recipe": recipe_record(recipe),
        "train": {
            "seconds": results["seconds"],
            "images_per_second": results["images_per_second"],
            "final_loss": losses[-1],
            "precision": results["precision"],
            "compiled": results["compiled"],
        },
    }


def recipe_record(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe, without other tasks' sections and without the place of files on this machine."""
    record: dict[str, Any] = to_builtins(recipe)
    for section in ("segment", "detect", "answer", "distill"):
        record.pop(section, None)
    record["data"]["root"] = Path(record["data"]["root"]).name
    record["model"]["weights"] = Path(record["model"]["weights"]).name
    return record


def trained(recipe: Recipe, folder: Path, slot: Slot) -> dict[str, Any]:
    """Train, or go on where the folder's checkpoint stands; a GPU's memory is released after it, and the slot kept."""
    import torch

    from vitfocus.train import train

    try:
        results: dict[str, Any] = train(recipe, folder, resume="auto", before_step=slot.before_step)
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if not results["finished"]:
        raise Stopped(f"stopped at step {results['steps']}; its checkpoint is kept in {folder}")
    return results


def write_result(setting: Setting, place: str, content: dict[str, Any], results: dict[str, Any], began: float) -> None:
    """Add the circumstances and write the run's JSON."""
    content |= {
        "wall_seconds": round(time.monotonic() - began, 1),
        "workers": setting.workers,
        "device": results["device"],
        "versions": results["versions"],
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_text(setting.result(place), json.dumps(content, indent=1) + "\n")


def keep_model(run: Run, setting: Setting) -> None:
    """Move the trained model to models/GROUP-ARM-seedK, and clear the rest of the run's work."""
    kept = model_folder(run, setting)
    shutil.rmtree(kept, ignore_errors=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    (setting.work / run.place / "model").rename(kept)
    clear(setting.work / run.place)


def model_folder(run: Run, setting: Setting) -> Path:
    """Where a finished run's model lies, as `vitfocus.load` reads it."""
    return setting.work / "models" / f"{run.arm.group}-{run.arm.name}-seed{run.seed}"


def clear(folder: Path) -> None:
    """Remove what is large of a finished run; its metrics and its recipe stay."""
    for name in ("checkpoints", "best", "model", "results.json"):
        path = folder / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def is_finished(place: str, recipe: Recipe, setting: Setting) -> bool:
    """Whether a run has its result. One that another recipe left behind is refused: it would not compare."""
    path = setting.result(place)
    if not path.is_file():
        return False
    then, now = (json.loads(text) for text in (path.read_text(), json.dumps({"recipe": recipe_record(recipe)})))
    for section, keys in now["recipe"].items():
        before = then["recipe"].get(section)
        if isinstance(keys, dict) and isinstance(before, dict):
            changed = [key for key in keys if key in before and before[key] != keys[key] and key not in _ANY]
            if changed:
                key = changed[0]
                raise VitfocusError(
                    f"{path} was made with {section}.{key}={before[key]} and the study now has {keys[key]}: "
                    "move it away, or undo the change."
                )
    return True
