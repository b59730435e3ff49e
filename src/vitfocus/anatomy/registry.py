"""The registered families, how a model is matched to one, and what it expects of its images.

A family's record has the mean and standard deviation of its published checkpoints. A model trained with others has them
stored on it (`remember_normalising`) or in the image processor that Hugging Face saves beside a checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitfocus.anatomy.block import Anatomy, Size, pair
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
_LIBRARIES = ("timm", "transformers", "torchvision", "vitfocus_models")
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
    """Describe a family of models by a record, which is used instead of what a forward pass would show.

    Args:
        family: The record. Its classes may come from any package; a class that is registered already is replaced.

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
        library = "vitfocus_models" if library == "vitfocus" else library
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
    found from what happens there (`found_by="structure"`, with a `confidence`).

    Args:
        model: A model with attention, or a module that contains exactly one of a registered family (a segmenter, a
            detector, a Hugging Face task model).
        example: An input for one forward pass, a tensor or a dict of named inputs, of a model that no record describes
            and whose inputs cannot be guessed from its signature. What is found with it is remembered.

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
    reason = None
    for name, module in _runnable(model):
        try:
            return name, dissect_structure(module, example_inputs)
        except VitfocusError as error:
            reason = reason or str(error)
    raise VitfocusError(
        f"{type(model).__name__} is of no family that vitfocus has a record of, and its structure was not found: "
        f"{reason}; describe it with vitfocus.register (docs/adding-a-family.md), or pass an input to "
        "vitfocus.anatomy(model, example=...)."
    )


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


def example_inputs(root: nn.Module) -> Iterator[dict[str, Any]]:
    """Inputs on which a module may run, likeliest first: one small image, video, set of patches or text."""
    names = [p.name for p in inspect.signature(root.forward).parameters.values() if p.kind in (1, 3, 0)]
    required = [
        p.name
        for p in inspect.signature(root.forward).parameters.values()
        if p.default is p.empty and p.kind in (0, 1, 3)
    ]
    maker = _Maker(root)
    if "grid_thw" in names or "image_grid_thw" in names:
        yield from maker.packed(names, required)
    if "spatial_shapes" in names and "pixel_values" in names:
        yield maker.patches()
    known: tuple[str, ...] = ("pixel_values", "pixel_values_videos", "images")
    first = next((one for one in known if one in names), None)
    first = first or (names[0] if names and names[0] not in _TEXT else None)
    if first is not None:
        for tensor in maker.images(first):
            yield {first: tensor} | maker.others(names, required, first, tensor)
    if "input_ids" in names or (names and names[0] in _TEXT):
        key = "input_ids" if "input_ids" in names else names[0]
        yield {key: maker.text()} | maker.others(names, required, key, None)


_TEXT = ("input_ids", "tokens", "text", "ids")


class _Maker:
    """Makes inputs of the sizes that a module states in its config, its `pretrained_cfg` or its layers."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        weight = next((p for p in root.parameters() if p.is_floating_point()), torch.empty(0))
        self.place: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        convs = (nn.Conv2d, nn.Conv3d)
        self.conv: Any = next((m for m in root.modules() if isinstance(m, convs) and m.in_channels <= 16), None)
        config = getattr(root, "config", None)
        self.config: Any = getattr(config, "vision_config", None) or config

    def number(self, *names: str, default: int) -> int:
        """The first of these numbers that the config states."""
        for name in names:
            value = getattr(self.config, name, None)
            value = value[-1] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def sizes(self) -> list[Size]:
        """The image sizes to try."""
        stated: list[Any] = []
        cfg = getattr(self.root, "pretrained_cfg", None)
        for module in self.root.modules():
            stated.append(getattr(module, "img_size", None) or getattr(module, "image_size", None))
            if stated[-1] is not None:
                break
        stated.append(getattr(self.config, "image_size", None))
        stated.append(cfg["input_size"][-2:] if cfg and cfg.get("input_size") else None)
        found = []
        for size in [*stated, *self.from_positions(), 224, 256, 64, 32, 384]:
            size = (size.get("height"), size.get("width")) if isinstance(size, dict) else size
            try:
                found.append(pair(size))
            except (TypeError, ValueError, IndexError):
                continue
        return list(dict.fromkeys(found))

    def from_positions(self) -> Iterator[int]:
        """The sizes for which position embeddings (1, N, C) are made: a square of patches, and a few tokens more."""
        step = int(self.conv.stride[-1]) if self.conv is not None else self.number("patch_size", default=16)
        for parameter in self.root.parameters():
            if parameter.ndim == 3 and len(parameter) == 1 and parameter.shape[1] > 3:
                for more in (0, 1, 2, 5):
                    side = math.isqrt(parameter.shape[1] - more) if parameter.shape[1] > more else 0
                    if side > 1 and side * side + more == parameter.shape[1]:
                        yield side * step

    def images(self, name: str) -> Iterator[Tensor]:
        """Images (1, C, H, W), or videos where the first convolution has three axes or there are frames."""
        cfg = getattr(self.root, "pretrained_cfg", None) or {}
        stated = self.conv.in_channels if self.conv is not None else 3
        channels = (cfg.get("input_size") or [self.number("num_channels", default=stated)])[0]
        frames = self.number("num_frames", "frames_per_clip", "temporal_patch_size", default=0)
        tubes = isinstance(self.conv, nn.Conv3d)
        for size in self.sizes():
            shapes: list[tuple[int, ...]] = [(1, channels, *size)]
            if tubes or frames or "video" in name:
                counts = (frames or 16, 8, 32) if tubes else (frames or 8,)
                clips = [shape for n in counts for shape in ((1, n, channels, *size), (1, channels, n, *size))]
                shapes = [*clips, *shapes] if tubes or frames else [*shapes, *clips]
            for shape in shapes:
                yield torch.full(shape, 0.5, **self.place)

    def patches(self) -> dict[str, Any]:
        """Images cut into patches beforehand, as SigLIP 2 takes them."""
        side, cut = 16, self.number("patch_size", default=16)
        channels = self.number("num_channels", default=3)
        count = self.number("num_patches", default=side * side)
        rows = next(r for r in range(int(count**0.5), 0, -1) if count % r == 0)
        device = self.place["device"]
        return {
            "pixel_values": torch.full((1, count, channels * cut * cut), 0.5, **self.place),
            "pixel_attention_mask": torch.ones(1, count, dtype=torch.long, device=device),
            "spatial_shapes": torch.tensor([[rows, count // rows]], device="cpu"),
        }

    def packed(self, names: list[str], required: list[str]) -> Iterator[dict[str, Any]]:
        """The patches of one image as rows, with its grid, as Qwen-VL's tower and its like take them."""
        cut, depth = self.number("patch_size", default=14), self.number("temporal_patch_size", default=1)
        channels = self.number("in_channels", "num_channels", "in_chans", default=3)
        grid = next(one for one in ("grid_thw", "image_grid_thw") if one in names)
        first = next(one for one in ("hidden_states", "pixel_values", names[0]) if one in names)
        thw = torch.tensor([[1, 8, 12]], device="cpu")
        for shape in ((96, channels * depth * cut * cut), (96, channels, cut, cut), (1, 96, channels, cut, cut)):
            tensor = torch.full(shape, 0.5, **self.place)
            yield {first: tensor, grid: thw} | self.others(names, required, first, tensor, skip=(grid,))

    def text(self) -> Tensor:
        """A text of a few tokens."""
        count = self.number("vocab_size", default=100)
        ids = torch.arange(3, 19, device=self.place["device"]) % max(count - 1, 1)
        return ids[None]

    def others(
        self, names: list[str], required: list[str], first: str, tensor: Tensor | None, skip: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """What the module needs beside its first input, as far as names tell."""
        made: dict[str, Any] = {}
        device = self.place["device"]
        for name in required:
            if name == first or name in skip:
                continue
            if name in _TEXT:
                made[name] = self.text()
            elif name == "bbox":
                made[name] = torch.zeros(1, 16, 4, dtype=torch.long, device=device)
            elif name in ("attention_mask", "text_mask"):
                made[name] = torch.ones(1, 16, dtype=torch.long, device=device)
            elif name in ("pixel_mask", "patch_attention_mask") and tensor is not None:
                made[name] = torch.ones(1, *tensor.shape[-2:], dtype=torch.long, device=device)
            elif "mask" in name or name in ("position_ids",):
                made[name] = None
            elif tensor is not None and ("pixel" in name or "image" in name or name in ("x2", "right", "image2")):
                made[name] = tensor
        if "input_ids" in names and first != "input_ids" and "input_ids" not in made and self._needs_text():
            made["input_ids"] = self.text()
        if "interpolate_pos_encoding" in required:
            made["interpolate_pos_encoding"] = False
        return made

    def _needs_text(self) -> bool:
        return any(isinstance(module, nn.Embedding) for module in self.root.modules())
