"""What a model expects of its images: mean, standard deviation and size.

A family's record has the values of its published checkpoints. A model trained with others has them stored on it
(`remember_normalising`) or in the image processor that Hugging Face saves beside a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from vitfocus.anatomy.block import Size
from vitfocus.core.errors import VitfocusError
from vitfocus.core.records import read_json

_NOTE = "_vitfocus_normalising"
_FILES = ("preprocessor_config.json", "processor_config.json")

Values = tuple[float, ...]


class Pixels(NamedTuple):
    """Mean and standard deviation of each channel, for pixels from 0 to 1, and (height, width)."""

    mean: Values
    std: Values
    size: Size


def remember_normalising(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
    """Store on a model how its images are normalised; `anatomy` and `pixels_of` return it from then on."""
    model.__dict__[_NOTE] = (tuple(map(float, mean)), tuple(map(float, std)))


def stated_normalising(*modules: nn.Module) -> tuple[Values, Values] | None:
    """Mean and std of the first module that has stored values or an image processor; None if none has."""
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
    """The settings of image processors beside the checkpoint of a transformers model; nothing is downloaded."""
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
    """A file of a checkpoint's folder or of its copy in the hub's cache."""
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
    """The average over channels for a model with one input channel; otherwise the values as they are."""
    first = next((module for module in stem.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None or first.in_channels != 1 or len(mean) == 1:
        return mean, std
    return (sum(mean) / len(mean),), (sum(std) / len(std),)
