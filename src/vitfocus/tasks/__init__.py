"""Tasks: data, model, losses and scores of a training run, behind one interface (`base.py`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vitfocus.core.registry import COMPOSED_MODELS

if TYPE_CHECKING:
    from vitfocus.tasks.base import Task

#: The class of each task, imported when a recipe or a saved model needs it.
TASKS = {
    "classify": "vitfocus.tasks.classification.task:ClassificationTask",
    "segment": "vitfocus.tasks.segmentation.task:SegmentationTask",
    "detect": "vitfocus.tasks.detection.task:DetectionTask",
    "answer": "vitfocus.tasks.vqa.task:AnswerTask",
}

for _prefix, _builder in {
    "upernet": "segmentation.model:build_upernet",
    "segformer": "segmentation.model:build_segformer",
    "smp": "segmentation.model:build_smp",
    "maskrcnn": "detection.model:build_mask_rcnn",
}.items():
    COMPOSED_MODELS.register(_prefix, f"vitfocus.tasks.{_builder}")


def find_task(name: str) -> type[Task]:
    """The class of a task by its name in a recipe.

    >>> find_task("classify").__name__
    'ClassificationTask'
    """
    from vitfocus.core.errors import VitfocusError, nearest

    if name not in TASKS:
        raise VitfocusError(f"There is no task {name!r}: {nearest(name, TASKS)}")
    module, _, cls = TASKS[name].partition(":")
    found: type[Task] = getattr(importlib.import_module(module), cls)
    return found
