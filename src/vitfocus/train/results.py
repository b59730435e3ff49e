"""What results.json says of a run: how good, how long, on what, with which versions."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import timm
import torch

import vitfocus
from vitfocus.core.tables import counted

if TYPE_CHECKING:
    from vitfocus.train.engine import Engine

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


def describe(engine: Engine) -> dict[str, Any]:
    """The outcome and its circumstances, as JSON has them."""
    record, accelerator = engine.record, engine.accelerator
    return {
        "recipe": engine.recipe.name,
        "spec": engine.recipe.model.spec,
        "steps": engine.step,
        "epochs": engine.plan.epoch(engine.step),
        "seconds": round(record.seconds, 3),
        "images_per_second": round(engine.step * engine.recipe.data.batch / max(record.seconds, 1e-9), 1),
        "headline": engine.task.headline(record.last) if record.last else "",
        "last": record.last,
        "best": record.best,
        "parameters": sum(p.numel() for p in engine.raw.parameters()),
        "processes": accelerator.num_processes,
        "precision": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "device": device_name(accelerator.device),
        "versions": versions(),
    }


def device_name(device: torch.device) -> str:
    """What a person would call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"


def versions() -> dict[str, str]:
    """Of everything that could change a number."""
    import accelerate
    import numpy
    import PIL
    import torchvision

    return {
        "vitfocus": vitfocus.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "accelerate": accelerate.__version__,
        "pillow": PIL.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
