"""How a model's images are normalised, where something nearer than its family says so.

A family's record carries the values of its published checkpoints. A model may have been trained with others: then a
note on it says so, or the image processor that Hugging Face keeps beside a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vitfocus.core.errors import VitfocusError
from vitfocus.core.records import read_json

_NOTE = "_vitfocus_normalising"
_FILES = ("preprocessor_config.json", "processor_config.json")

Values = tuple[float, ...]


def remember_normalising(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
    """Note on a model how its images are normalised; `anatomy` and `pixels_of` tell it from then on."""
    model.__dict__[_NOTE] = (tuple(map(float, mean)), tuple(map(float, std)))


def stated_normalising(*modules: nn.Module) -> tuple[Values, Values] | None:
    """Mean and std as the first of the modules says that has a note or an image processor; None where none has."""
    for module in modules:
        if _NOTE in module.__dict__:
            noted: tuple[Values, Values] = module.__dict__[_NOTE]
            return noted
    for module in modules:
        for processor in _processors(module):
            if processor.get("do_normalize") is False:
                return (0.0,) * 3, (1.0,) * 3
            mean, std = _numbers(processor.get("image_mean")), _numbers(processor.get("image_std"))
            if mean and len(mean) == len(std):
                return mean, std
    return None


def _processors(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The settings of image processors beside the checkpoint that a transformers model came from, none fetched."""
    name = getattr(getattr(module, "config", None), "_name_or_path", "")
    if not isinstance(name, str) or not name:
        return
    for file in _FILES:
        path = _beside(name, file)
        try:
            content = read_json(path, dict[str, Any]) if path is not None else None
        except VitfocusError:
            continue  # the model works without it
        if content is not None:
            inner = content.get("image_processor")
            yield inner if isinstance(inner, dict) else content


def _beside(name: str, file: str) -> Path | None:
    """A file of a checkpoint's folder, or of what the hub's cache holds of it."""
    if Path(name).is_dir():
        return path if (path := Path(name, file)).is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, file)
    except (ImportError, ValueError):  # no name of a repository
        return None
    return Path(found) if isinstance(found, str) else None


def _numbers(values: Any) -> Values:
    fit = isinstance(values, list) and all(isinstance(value, int | float) for value in values)
    return tuple(map(float, values)) if fit else ()


def grey_normalising(stem: nn.Module, mean: Values, std: Values) -> tuple[Values, Values]:
    """One value for a model of one channel that was described for three: their average; else as they are."""
    first = next((module for module in stem.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None or first.in_channels != 1 or len(mean) == 1:
        return mean, std
    return (sum(mean) / len(mean),), (sum(std) / len(std),)
