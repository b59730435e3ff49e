"""The registered families, how a model is matched to one, and what it expects of its images.

A family's record has the mean and standard deviation of its published checkpoints. A model trained with others has them
stored on it (`remember_normalising`) or in the image processor that Hugging Face saves beside a checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vitfocus.anatomy.block import Anatomy, Size, pair
from vitfocus.anatomy.inputs import example_inputs
from vitfocus.anatomy.structure import dissect_structure
from vitfocus.core.arguments import checked
from vitfocus.core.errors import VitfocusError
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
_LIBRARIES = ("timm", "transformers", "torchvision")
_FAMILIES: dict[str, Family] = {}


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
    """Register a model family; its record replaces the analysis by a traced forward pass.

    Args:
        family: The record. Its classes may come from any package; a class that is already registered is replaced.

    Example:
        >>> class Tower(nn.Module): ...
        >>> register(Family("tower", "mine", (Tower,), lambda model: Anatomy("tower", model, model, (), (8, 8))))
        >>> family_of(Tower()).name
        'tower'
    """
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
        library = "timm" if library == "vitfocus" else library
        if library in _LIBRARIES:
            importlib.import_module(f"vitfocus.anatomy.{library}")
        if family := _FAMILIES.get(_full_name(cls)):
            return family
    return None


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@checked
def anatomy(model: nn.Module, example: Any = None) -> Anatomy:
    """Find the blocks of a vision transformer and describe their parts.

    A registered family is described by its record. Any other model is run once on a small input, and its blocks are
    inferred from the traced forward pass (`found_by="structure"`, with a `confidence`).

    Args:
        model: A model with attention, or a module that contains exactly one of a registered family (a segmenter, a
            detector, a Hugging Face task model).
        example: An input for the traced forward pass, a tensor or a dict of named inputs, if it cannot be guessed from
            the signature of the model. The result is cached on the model.

    Returns:
        The blocks in order of depth, with their names relative to `model`, stages, token grids and prefix tokens.

    Raises:
        VitfocusError: If no attention was found in the model, or more than one transformer of a registered family.

    Example:
        >>> import timm
        >>> blocks = anatomy(timm.create_model("pit_ti_distilled_224"))
        >>> blocks[0].name, blocks[0].prefix_tokens, blocks[-1].stage, blocks[-1].grid((224, 320))
        ('transformers.0.blocks.0', 2, 2, (7, 10))
        >>> found = anatomy(timm.create_model("levit_128s"))
        >>> found.found_by, found[0].name, found[0].grid()
        ('structure', 'stages.0.blocks.0', (14, 14))
    """
    model = unwrap(model)
    found = list(_outermost(model, ""))
    if len(found) > 1:
        names = ", ".join(f"{name} ({type(module).__name__})" for name, module, *_ in found)
        raise VitfocusError(
            f"{type(model).__name__} contains {len(found)} vision transformers: {names}; pass the one you mean."
        )
    if found:
        prefix, module, family, feeding = found[0]
        result = replace(family.dissect(module), family=family.name)
        if not result.blocks:
            raise VitfocusError(f"{type(module).__name__} looks like {family.name}, but no block was found in it.")
        mean, std = stated_normalising(model, module) or (result.mean, result.std)
    else:
        prefix, result = _by_structure(model, example)
        module, feeding = result.root, ()
        mean, std = stated_normalising(model, module) or _configured(model)[:2]
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


def _by_structure(model: nn.Module, example: Any) -> tuple[str, Anatomy]:
    """What a forward pass shows of the model, or of the image tower inside it, with the tower's name."""
    if example is not None:
        given = example if isinstance(example, Mapping | tuple) else (example,)
        return "", dissect_structure(model, lambda _: [given], again=True)
    parts = (
        [] if has_forward(model) else [(n, c) for n, c in model.named_children() if any(True for _ in c.parameters())]
    )
    if parts:
        return _inside(model, parts)
    reason = None
    for name, module in _runnable(model):
        try:
            return _taking_the_image(name, dissect_structure(module, example_inputs))
        except VitfocusError as error:
            reason = reason or str(error)
    raise VitfocusError(
        f"{type(model).__name__} is of no family that vitfocus has a record of, and its structure was not found: "
        f"{reason}; describe it with vitfocus.register (docs/adding-a-family.md), or pass an input to "
        "vitfocus.anatomy(model, example=...)."
    )


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: a LightningModule whose steps call its network often cannot."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return owner is not nn.Module and owner.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")


def _inside(model: nn.Module, parts: Sequence[tuple[str, nn.Module]]) -> tuple[str, Anatomy]:
    """What `_by_structure` finds in the one part of a module without a forward pass that has attention."""
    found: list[tuple[str, Anatomy]] = []
    refusal: VitfocusError | None = None
    for name, part in parts:
        try:
            prefix, body = _by_structure(part, None)
            found.append((f"{name}.{prefix}" if prefix else name, body))
        except VitfocusError as error:
            refusal = error
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise VitfocusError(f"{type(model).__name__} contains {len(found)} transformers: {names}; pass one of them.")
    if refusal is not None and not found:
        raise refusal
    return found[0]


def _taking_the_image(name: str, outer: Anatomy) -> tuple[str, Anatomy]:
    """The anatomy of the model inside a wrapper such as a segmenter: it is given the image and has all the blocks."""
    inner = next((child for child, module in outer.root.named_modules() if module is outer.stem), "")
    kept = isinstance(outer.stem, nn.Sequential) or hasattr(getattr(outer.root, "config", None), "model_type")
    if kept or not inner or not all(block.name.startswith(f"{inner}.") for block in outer.blocks):
        return name, outer
    try:
        result = dissect_structure(outer.stem, example_inputs)
    except VitfocusError:  # only the wrapper says which inputs it takes
        return name, outer
    if [f"{inner}.{block.name}" for block in result.blocks] != [block.name for block in outer.blocks]:
        return name, outer
    return _taking_the_image(f"{name}.{inner}" if name else inner, result)


def _runnable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model, and the towers in it that take images; these come first if the model also reads text."""
    towers: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if not name or config is None or not hasattr(module, "get_submodule"):
            continue
        named = f"{type(module).__name__} {type(config).__name__} {name.rpartition('.')[2]}".lower()
        takes = getattr(module, "main_input_name", "") in ("pixel_values", "pixel_values_videos")
        if (takes or "vision" in named or "visual" in named) and not any(name.startswith(f"{t}.") for t, _ in towers):
            towers.append((name, module))
    whole = getattr(model, "config", None)
    reads_text = hasattr(whole, "vision_config") or hasattr(whole, "text_config")
    yield from [*towers[:3], ("", model)] if reads_text else [("", model), *towers[:3]]


def input_spec(model: nn.Module) -> InputSpec:
    """The normalisation and image size that a model expects, whether or not it is a vision transformer.

    It is what the anatomy says, else what is stored on the model or on a timm model inside it, else ImageNet's values.

    Example:
        >>> import timm
        >>> input_spec(timm.create_model("resnet18")).size, input_spec(nn.Linear(2, 2)).std
        ((224, 224), (0.229, 0.224, 0.225))
    """
    if next(_outermost(unwrap(model), ""), None) is not None:
        with contextlib.suppress(VitfocusError):  # more than one inside
            body = anatomy(model)
            return InputSpec(tuple(body.mean), tuple(body.std), body.build_size)
    mean, std, size = _configured(unwrap(model))
    return InputSpec(*(stated_normalising(unwrap(model)) or (mean, std)), size)


def _configured(model: nn.Module) -> InputSpec:
    """What the `pretrained_cfg` of a timm model in the model says, or a config of transformers; else ImageNet's."""
    timm: Any = next((c for m in model.modules() if (c := getattr(m, "pretrained_cfg", None))), {})
    size = (timm.get("input_size") or (3, 224, 224))[1:]
    config = getattr(model, "config", None)
    stated = getattr(getattr(config, "vision_config", None) or config, "image_size", None)
    if not timm and stated is not None:
        stated = (stated.get("height"), stated.get("width")) if isinstance(stated, dict) else stated
        with contextlib.suppress(TypeError, ValueError, IndexError):
            size = pair(stated)
    mean, std = (tuple(timm.get(key) or usual) for key, usual in zip(("mean", "std"), _IMAGENET, strict=True))
    return InputSpec(mean, std, (int(size[0]), int(size[1])))


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
