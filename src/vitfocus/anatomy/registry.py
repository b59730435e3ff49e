"""The registered families, how a model is matched to one, and what it expects of its images.

A family's record has the mean and standard deviation of its published checkpoints. A model trained with others has them
stored on it (`remember_normalising`) or in the image processor that Hugging Face saves beside a checkpoint.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vitfocus.anatomy.block import Anatomy, Size
from vitfocus.core.arguments import checked
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.modules import unwrap
from vitfocus.core.records import read_json

_NOTE = "_vitfocus_normalising"
_FILES = ("preprocessor_config.json", "processor_config.json")

Values = tuple[float, ...]


class InputSpec(NamedTuple):
    """Mean and standard deviation of each channel, for pixels from 0 to 1, and (height, width)."""

    mean: Values
    std: Values
    size: Size


def remember_normalising(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
    """Store on a model how its images are normalised; `anatomy` and `input_spec` return it from then on."""
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


_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_LIBRARIES = ("timm", "transformers", "torchvision", "vitfocus_models")
_FAMILIES: dict[str, Family] = {}

#: What timm's `features_only` makes of most models: their stages under new names, without the original class.
_TAKEN_APART = ("FeatureListNet", "FeatureDictNet")
#: What a class of transformers is called after its family.
_TASK = re.compile(r"(?<=.)(For[A-Z]\w*|Model|Backbone)$")


@dataclass(frozen=True)
class Family:
    """One family: the classes it is recognised by (or their full names), and the function that dissects a model of it.

    `example` names a model of the family and `options` shrink it, for the support table and the tests.
    """

    name: str
    library: str
    classes: tuple[str | type[nn.Module], ...]
    dissect: Callable[[Any], Anatomy]
    example: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def register(family: Family) -> None:
    """Register a family under each of its classes, which may come from any package."""
    for known in family.classes:
        _FAMILIES[known if isinstance(known, str) else _full_name(known)] = family


def families() -> list[Family]:
    """Every family, in the order of the libraries."""
    for library in _LIBRARIES:
        importlib.import_module(f"vitfocus.anatomy.{library}")
    return list({id(family): family for family in _FAMILIES.values()}.values())


def build_example(family: Family) -> nn.Module | None:
    """A small model of the family that occupies no memory (meta device); None if its library is not installed."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        if family.library in ("timm", "vitfocus"):
            import timm

            import vitfocus.models  # noqa: F401  registers FAN, RVT, PVT and LocalViT

            return timm.create_model(family.example, **family.options)
        try:
            return importlib.import_module(f"vitfocus.anatomy.{family.library}").build_example(family)
        except (ImportError, AttributeError):
            return None


def model_names(family: Family) -> list[str]:
    """The names under which the family's library builds its models; empty if the library has no such list."""
    if family.library == "transformers":
        return []
    if family.library == "torchvision":
        from torchvision import models

        prefix = {"vision_transformer": "vit", "swin_transformer": "swin", "maxvit": "maxvit"}[family.name]
        return models.list_models(include=f"{prefix}_*")
    import timm

    import vitfocus.models  # noqa: F401  registers FAN, RVT, PVT and LocalViT

    names = timm.list_models(module=family.name)
    return names + (timm.list_models(module="deit") if family.name == "vision_transformer" else [])


def family_of(module: nn.Module) -> Family | None:
    """The family a module itself belongs to, by its class or a class it derives from."""
    for cls in type(module).__mro__:
        library = cls.__module__.partition(".")[0]
        library = "vitfocus_models" if library == "vitfocus" else library
        if library in _LIBRARIES:
            importlib.import_module(f"vitfocus.anatomy.{library}")
        if family := _FAMILIES.get(_full_name(cls)):
            return family
    return None


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@checked
def anatomy(model: nn.Module) -> Anatomy:
    """Find the blocks of a vision transformer and describe their parts.

    Args:
        model: A vision transformer of a registered family, or a module that contains exactly one (a segmenter, a
            detector, a Hugging Face task model).

    Returns:
        The blocks in order of depth, with their names relative to `model`, stages, token grids and prefix tokens.

    Raises:
        VitfocusError: If the model contains no known vision transformer, or more than one.

    Example:
        >>> import timm
        >>> blocks = anatomy(timm.create_model("pit_ti_distilled_224"))
        >>> blocks[0].name, blocks[0].prefix_tokens, blocks[-1].stage, blocks[-1].grid((224, 320))
        ('transformers.0.blocks.0', 2, 2, (7, 10))
    """
    model = unwrap(model)
    found = list(_outermost(model, ""))
    if not found:
        raise VitfocusError(_unknown(model))
    if len(found) > 1:
        names = ", ".join(f"{name} ({type(module).__name__})" for name, module, *_ in found)
        raise VitfocusError(
            f"{type(model).__name__} contains {len(found)} vision transformers: {names}; pass the one you mean."
        )
    prefix, module, family, feeding = found[0]
    result = family.dissect(module)
    if not result.blocks:
        raise VitfocusError(f"{type(module).__name__} looks like {family.name}, but no block was found in it.")
    mean, std = stated_normalising(model, module) or (result.mean, result.std)
    mean, std = grey_normalising(result.stem, mean, std)
    result = replace(result, mean=mean, std=std)
    if prefix:
        # Of each module that feeds a pyramid, a block or a stage, the last block inside does.
        last = {part: b.name for part in feeding for b in result.blocks if f"{b.name}.".startswith(f"{part}.")}
        result = replace(
            result,
            blocks=tuple(
                replace(b, name=f"{prefix}.{b.name}", feeds_pyramid=b.name in last.values()) for b in result.blocks
            ),
        )
    return result


def input_spec(model: nn.Module) -> InputSpec:
    """The normalisation and image size that a model expects, whether or not it is a vision transformer.

    It is what the anatomy says, else what is stored on the model or on a timm model inside it, else ImageNet's values.

    Example:
        >>> import timm
        >>> input_spec(timm.create_model("resnet18")).size, input_spec(nn.Linear(2, 2)).std
        ((224, 224), (0.229, 0.224, 0.225))
    """
    try:
        body = anatomy(model)
    except VitfocusError:
        config: Any = next((c for m in unwrap(model).modules() if (c := getattr(m, "pretrained_cfg", None))), {})
        own = tuple(config.get("mean") or _IMAGENET[0]), tuple(config.get("std") or _IMAGENET[1])
        mean, std = stated_normalising(unwrap(model)) or own
        height, width = (config.get("input_size") or (3, 224, 224))[1:]
        return InputSpec(mean, std, (int(height), int(width)))
    return InputSpec(tuple(body.mean), tuple(body.std), body.build_size)


def _outermost(
    module: nn.Module, name: str, feeding: tuple[str, ...] = ()
) -> Iterator[tuple[str, nn.Module, Family, tuple[str, ...]]]:
    """The transformers in a module, each with the names of its parts that the module around it says feed a pyramid."""
    if family := family_of(module):
        yield name, module, family, feeding
        return
    feeding = getattr(module, "feeding", ())
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name, feeding)


def _unknown(model: nn.Module) -> str:
    taken_apart = next((kind for m in model.modules() if (kind := type(m).__name__) in _TAKEN_APART), None)
    if taken_apart is not None:
        return (
            f"timm has taken this model apart into a {taken_apart}, which keeps its stages but not the model: create "
            'it with features_only=True and feature_cls="getter", which keeps it whole.'
        )
    by_library: dict[str, set[str]] = {}
    for family in families():
        by_library.setdefault(family.library, set()).add(family.name)
    by_class: dict[str, list[Family]] = {}  # libraries call different classes by one name
    for name, family in _FAMILIES.items():
        by_class.setdefault(name.rpartition(".")[2], []).append(family)
    hint = nearest(type(model).__name__, by_class)
    if not hint.startswith("did you mean"):  # transformers names a model's tasks behind its family
        bare = {_TASK.sub("", name): name for name in by_class}
        hint = nearest(_TASK.sub("", type(model).__name__), bare)
        hint = re.sub(r"'(.+)'", lambda found: repr(bare[found[1]]), hint) if hint.startswith("did") else hint
    if hint.startswith("did you mean"):
        close = hint.split("'")[1]
        owners = " or ".join(f"{family.name} ({family.library}'s {close})" for family in by_class[close])
        hint = f"the nearest supported family is {owners}."
    else:
        listed = "; ".join(f"{library}: {', '.join(sorted(names))}" for library, names in by_library.items())
        hint = f"the supported families are {listed}."
    return (
        f"{type(model).__name__} is not a vision transformer that vitfocus knows: no module of a known class was found "
        f"in it; {hint}"
    )
