"""What results.json says of a run: how good, how long, on what, with which versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitfocus.core.environment import device_name, versions

if TYPE_CHECKING:
    from vitfocus.train.trainer import Trainer

#: The shape of results.json, as far as anyone reads it.
SHAPE = {
    **dict.fromkeys(("recipe?", "spec?", "headline?", "device?", "precision?", "task?"), str),
    **dict.fromkeys(("steps?", "parameters?", "processes?", "train_images?", "val_images?"), int),
    **dict.fromkeys(("epochs?", "seconds?", "images_per_second?", "peak_memory_bytes?"), float),
    "finished?": bool,
    "last?": {"kind?": str, "*": float},
    "best?": {"kind?": str, "*": float},
    "versions?": {"*": str},
    "data_sha256?": {"*": str},
}


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
