"""One finished model for the repository, whose reported accuracy a test gets back on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from arms import ARMS, Run
from one_run import model_folder
from setting import Setting, test_images

import vitfocus as vf
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.files import write_text

LIMIT = 25 * 1000 * 1000
#: Percent that another processor may make of the accuracy: some images lie on an edge.
NEAR = 0.05


def keep(setting: Setting, group: str, arm: str, seed: int) -> str:
    """Copy a finished run's model to results/checkpoint, if it reaches there what was reported of it."""
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
    images, labels = test_images(setting)
    found = accuracy(source, images, labels)
    reported = json.loads(setting.result(run.place).read_text())["clean"]["accuracy"]
    if abs(found - reported) > NEAR:
        raise VitfocusError(f"{source} reaches {found:.2f} % on the CPU, and {run.place} reports {reported:.2f} %.")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    write_text(target / "run.json", json.dumps({"run": run.place}) + "\n")
    return f"kept {run.place}: {found:.2f} % on {len(images):,} test images"


def accuracy(folder: Path, images: Any, labels: Any) -> float:
    """The saved model's accuracy on the CPU, in percent."""
    from measure import Batches

    scores = vf.evaluate(vf.load(folder), "clean", Batches(images, labels, 250), device="cpu", progress=False)
    return float(scores["top1"])
