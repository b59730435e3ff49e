"""Tasks: what is learnt and how it is scored. A run asks its task for data, model, losses and scores (`base.py`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vitfocus.core.registry import COMPOSED_MODELS

if TYPE_CHECKING:
    from vitfocus.tasks.base import Task

#: Where each task lives; it is imported when a recipe or a saved model asks for it.
TASKS = {
    "classify": "vitfocus.tasks.classification.task:Classify",
    "segment": "vitfocus.tasks.segmentation.task:Segment",
    "detect": "vitfocus.tasks.detection.task:Detect",
    "answer": "vitfocus.tasks.vqa.task:Answer",
}

for _prefix, _module in {
    "upernet": "segmentation.upernet",
    "segformer": "segmentation.segformer",
    "smp": "segmentation.smp",
    "maskrcnn": "detection.model",
}.items():
    COMPOSED_MODELS.register(_prefix, f"vitfocus.tasks.{_module}:build")


def find_task(name: str) -> type[Task]:
    """The class of a task by its name in a recipe.

    >>> find_task("classify").__name__
    'Classify'
    """
    from vitfocus.core.errors import VitfocusError, nearest

    if name not in TASKS:
        raise VitfocusError(f"There is no task {name!r}: {nearest(name, TASKS)}")
    module, _, cls = TASKS[name].partition(":")
    found: type[Task] = getattr(importlib.import_module(module), cls)
    return found
