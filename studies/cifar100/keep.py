"""One finished model for the repository, and the numbers that a test gets back from it on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from arms import ARMS, Run
from one_run import model_folder
from setting import Setting, test_images

import vitfocus as vf
from vitfocus.errors import VitfocusError, nearest
from vitfocus.files import write_text

IMAGES = 2_000
LIMIT = 25 * 1000 * 1000


def keep(setting: Setting, group: str, arm: str, seed: int) -> str:
    """Copy a finished run's model to results/checkpoint, with what it reaches on the first test images."""
    for name, known in ((group, ARMS), (arm, ARMS.get(group, {}))):
        if name not in known:
            raise VitfocusError(f"There is no {name!r} in the study: {nearest(name, known)}")
    run = Run(ARMS[group][arm], seed)
    source, target = model_folder(run, setting), setting.results / "checkpoint"
    if not (source / "config.json").is_file():
        raise VitfocusError(f"{source} holds no model: it is there after `study.py train` has finished {run.place}.")
    size = (source / "model.safetensors").stat().st_size
    if size >= LIMIT:
        raise VitfocusError(f"The model of {run.place} takes {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f} MB.")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    images, labels = test_images(setting)
    reported = json.loads(setting.result(run.place).read_text())["clean"]["accuracy"]
    expected = {
        "run": run.place,
        "reported_accuracy": reported,
        "images": min(IMAGES, len(images)),
        "accuracy": accuracy(target, images[:IMAGES], labels[:IMAGES]),
        "torch": torch.__version__,
    }
    write_text(target / "expected.json", json.dumps(expected, indent=1) + "\n")
    return f"kept {run.place}: {expected['accuracy']:.2f} % on the first {expected['images']} test images"


def accuracy(folder: Path, images: Any, labels: Any) -> float:
    """The saved model's accuracy on the CPU, in percent."""
    from measure import Batches

    scores = vf.evaluate(vf.load(folder), "clean", Batches(images, labels, 250), device="cpu", progress=False)
    return float(scores["top1"])
