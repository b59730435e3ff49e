"""Parameters and FLOPs of a row's model, from its recipe alone: built on the meta device, nothing is computed."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vitfocus.core.errors import VitfocusError
from vitfocus.reproduce.planning import Run
from vitfocus.tasks.building import model_arguments
from vitfocus.treatments.cost import count_cost, count_parameters
from vitfocus.treatments.save_load import create_model

#: Classes of each data source, where the recipe does not say.
CLASSES = {"shapes": 10, "folder": 1000, "cifar100": 100, "ade20k": 150, "cityscapes": 19, "coco": 80, "vqav2": 3129}
_SHAPES_WITH_GROUND = 11


@functools.cache
def _parameters(spec: str, arguments: tuple[tuple[str, Any], ...]) -> int:
    return count_parameters(_build(spec, arguments))


@functools.cache
def _flops(spec: str, arguments: tuple[tuple[str, Any], ...], size: int) -> int:
    return count_cost(_build(spec, arguments), size).flops


@functools.lru_cache(maxsize=4)  # its parameters and its FLOPs are asked for one after the other
def _build(spec: str, arguments: tuple[tuple[str, Any], ...]) -> Any:
    with torch.device("meta"):
        return create_model(spec, **{key: _thawed(value) for key, value in arguments})


def parameters(run: Run) -> int:
    """The parameters of a run's model."""
    return _parameters(run.spec, _arguments(run))


def flops(run: Run) -> int:
    """The multiply-adds of one image at the size the run uses."""
    return _flops(run.spec, _arguments(run), image_size(run))


def image_size(run: Run) -> int:
    """The side of the images that a run's model is counted on."""
    return run.recipe.data.size if run.recipe is not None else 224


def _arguments(run: Run) -> tuple[tuple[str, Any], ...]:
    if run.recipe is None:
        return ()
    source, task = run.recipe.data.source, run.recipe.task
    if source not in CLASSES:
        raise VitfocusError(f"How many classes {source} has is not known here.")
    classes = _SHAPES_WITH_GROUND if source == "shapes" and task == "segment" else CLASSES[source]
    given = model_arguments(run.recipe, classes)
    return tuple((key, _frozen(value)) for key, value in sorted(given.items()))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _thawed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
