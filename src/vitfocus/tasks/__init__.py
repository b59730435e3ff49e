"""Tasks: data, model, losses and scores of a training run, behind one interface (`base.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitfocus.core.registry import COMPOSED_MODELS, LazyRegistry

if TYPE_CHECKING:
    from vitfocus.tasks.base import Task

#: The class of each task, imported when a recipe or a saved model needs it.
TASKS = LazyRegistry()

for _name, _task in {
    "classify": "classification:ClassificationTask",
    "segment": "segmentation.task:SegmentationTask",
    "detect": "detection.task:DetectionTask",
    "answer": "vqa.task:AnswerTask",
}.items():
    TASKS.register(_name, f"vitfocus.tasks.{_task}")

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
    found: type[Task] = TASKS[name]
    return found


def items_of(name: str) -> str:
    """What a task counts in messages; "images" if there is no such task.

    >>> items_of("answer"), items_of("detect")
    ('questions', 'images')
    """
    return find_task(name).items if name in TASKS else "images"
