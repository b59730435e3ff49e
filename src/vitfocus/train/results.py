"""What results.json says of a run: how good, how long, on what, with which versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from vitfocus.core.environment import device_name, versions
from vitfocus.core.records import Count, OpenDict

if TYPE_CHECKING:
    from vitfocus.train.trainer import Trainer


class _RowFields(msgspec.Struct):
    kind: str = ""


class EvaluationRow(OpenDict):
    """One evaluation: step, epoch and scores."""

    fields, numbers = _RowFields, True


class _ResultFields(msgspec.Struct):
    recipe: str = ""
    spec: str = ""
    headline: str = ""
    device: str = ""
    precision: str = ""
    task: str = ""
    steps: Count = 0
    parameters: Count = 0
    processes: Count = 0
    train_images: Count = 0
    val_images: Count = 0
    epochs: float = 0.0
    seconds: float = 0.0
    images_per_second: float = 0.0
    peak_memory_bytes: float = 0.0
    finished: bool = False
    last: EvaluationRow = msgspec.field(default_factory=EvaluationRow)
    best: EvaluationRow = msgspec.field(default_factory=EvaluationRow)
    versions: dict[str, str] = {}
    data_sha256: dict[str, str] = {}


class TrainingResults(OpenDict):
    """results.json of a training run."""

    fields = _ResultFields


def describe(trainer: Trainer) -> dict[str, Any]:
    """The outcome and its circumstances, as JSON has them."""
    record, accelerator = trainer.record, trainer.accelerator
    return {
        "recipe": trainer.recipe.name,
        "spec": trainer.recipe.model.spec,
        "steps": trainer.step,
        "epochs": trainer.schedule.epoch(trainer.step),
        "seconds": round(record.seconds, 3),
        "images_per_second": round(trainer.step * trainer.recipe.data.batch / max(record.seconds, 1e-9), 1),
        "headline": trainer.task.headline(record.last) if record.last else "",
        "last": record.last,
        "best": record.best,
        "parameters": sum(p.numel() for p in trainer.unwrapped.parameters()),
        "processes": accelerator.num_processes,
        "precision": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "device": device_name(accelerator.device),
        "versions": versions("accelerate", "python"),
    }
