"""How a model was built, so that it can be built again: library, name and arguments.

`create_model` stores it. For a model built elsewhere it is inferred from attributes that the library sets on the model,
and checked by building a copy on the meta device and comparing the two.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from vitfocus.anatomy import anatomy
from vitfocus.core.errors import VitfocusError, nearest, reason, warn
from vitfocus.core.files import is_folder
from vitfocus.core.modules import SkipInitialisation
from vitfocus.core.registry import COMPOSED_MODELS
from vitfocus.treatments.hub import build_timm_checkpoint, hub_name
from vitfocus.treatments.safe_arguments import (
    checkpoint_config,
    import_transformers,
    require_own_weights,
    require_sizes,
    transformers_class,
    transformers_config,
)

_KEY = "_vitfocus_origin"
_LIBRARIES = ("timm", "torchvision", "transformers")


@dataclass(frozen=True)
class Origin:
    """Library ("timm", "torchvision", "transformers", or a prefix of `COMPOSED_MODELS`), name and arguments."""

    library: str
    name: str
    arguments: dict[str, Any]

    def build(self, pretrained: bool = False) -> nn.Module:
        """Build the model; with `pretrained`, its library downloads its weights."""
        require_sizes(self.arguments, full_name(self))
        builders: dict[str, Callable[[str, bool, dict[str, Any]], nn.Module]] = {
            "timm": _build_timm,
            "torchvision": _build_torchvision,
            "transformers": _build_transformers,
            **COMPOSED_MODELS,
        }
        if self.library not in builders:
            raise VitfocusError(f"There is no library {self.library!r}: {nearest(self.library, builders)}")
        build = builders[self.library]
        with library_errors(f"{full_name(self)} cannot be built with {self.arguments}"):
            model = build(self.name, pretrained, dict(self.arguments))
        # The config of a transformers model is enough, and the folder it came from may be deleted later.
        remember(model, self if self.library != "transformers" else _guess_transformers(model)[0])
        return model

    def plain_arguments(self) -> dict[str, Any]:
        """The arguments as config.json holds them."""
        arguments: dict[str, Any] = msgspec.to_builtins(self.arguments, str_keys=True, enc_hook=_plain)
        return arguments


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | set):
        return list(value)
    if hasattr(value, "item"):  # a number of NumPy
        return value.item()
    raise VitfocusError(
        f"The model was created with {value!r}, which config.json cannot hold: create it with a name instead, such as "
        "act_layer='relu'."
    )


@contextlib.contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Within the context, whatever a library raises for unexpected arguments becomes one sentence on the problem."""
    try:
        yield
    except (VitfocusError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = reason(error)
        # The errors of the unpickler advise to run the code; older versions of transformers replace them.
        if "weights only" in said.lower().replace("_", " ") or "from pytorch checkpoint file" in said:
            said = "its weights hold more than tensors and plain values, and nothing was loaded"
        elif isinstance(error, OSError):
            raise
        raise VitfocusError(f"{problem}: {said}.") from None


def remember(model: nn.Module, origin: Origin) -> None:
    """Store on a model how it was built."""
    model.__dict__[_KEY] = origin


def origin_of(model: nn.Module) -> Origin:
    """How a model was built; raises `VitfocusError` if that cannot be determined."""
    if any(type(part).__module__.startswith("peft.") for part in model.modules()):
        raise VitfocusError(
            "This model carries a peft adapter: save the adapter with model.save_pretrained, or save what "
            "model.merge_and_unload() returns."
        )
    known, library = model.__dict__.get(_KEY), _library_of(model)
    composed = known is not None and known.library in COMPOSED_MODELS
    if known is not None and (composed or library != "transformers") and _builds_same_model(known, model):
        return known
    guesses = {"timm": _guess_timm, "torchvision": _guess_torchvision, "transformers": _guess_transformers}
    for origin in guesses[library](model, known) if library in guesses else ():
        if _builds_same_model(origin, model):
            remember(model, origin)
            return origin
    origin_library = type(model).__module__.partition(".")[0]
    if library not in ("timm", "torchvision"):
        how = "its save_pretrained" if hasattr(model, "save_pretrained") else "torch.save(model.state_dict(), file)"
        other = ", or create it as 'smp:DECODER:NAME'" if origin_library == "segmentation_models_pytorch" else ""
        raise VitfocusError(
            f"vitfocus does not build a {type(model).__name__} of {origin_library}: save it with {how} and restore it "
            f"with vitfocus.load_weights(model, file, treat=True){other}."
        )
    raise VitfocusError(
        f"How this {type(model).__name__} was built cannot be determined: pass base=... (its name) and "
        "arguments={...} (what it was created with), or create it with vitfocus.create_model."
    )


def require_same_shapes(origin: Origin, shapes: Mapping[str, torch.Size], *, some: bool) -> None:
    """Refuse an origin that cannot be built or has weights of other names or shapes; with `some`, it may have more."""
    with torch.random.fork_rng(devices=[]):
        # Not every model can be built on the meta device.
        built = (_build_on_meta(origin) or origin.build()).state_dict()
    names = shapes if some else {**shapes, **built}
    if wrong := [name for name in names if name not in built or shapes.get(name) != built[name].shape]:
        raise VitfocusError(
            f"base={full_name(origin)!r} with arguments={origin.arguments} builds another model: {wrong[0]} differs. "
            "Pass the name and the arguments that this model was created with."
        )


def split_library(name: str) -> tuple[str, str]:
    """The library, or the prefix of a composed model, and the name in "torchvision:vit_b_16"; timm if none is named.

    >>> split_library("torchvision:vit_b_16"), split_library("vit_tiny_patch16_224")
    (('torchvision', 'vit_b_16'), ('timm', 'vit_tiny_patch16_224'))
    >>> split_library("upernet:vit_tiny_patch16_224")
    ('upernet', 'vit_tiny_patch16_224')
    """
    library, colon, rest = name.partition(":")
    return (library, rest) if colon and library in (*_LIBRARIES, *COMPOSED_MODELS) else ("timm", name)


def full_name(origin: Origin) -> str:
    """The name as written in a spec: with its prefix if it is a composed model."""
    return f"{origin.library}:{origin.name}" if origin.library in COMPOSED_MODELS else origin.name


def _library_of(model: nn.Module) -> str:
    for cls in type(model).__mro__:
        library = cls.__module__.partition(".")[0]
        if library in _LIBRARIES:
            return library
        if library == "vitfocus":
            return "timm"
    return ""


def _build_timm(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    import timm

    import vitfocus.models  # noqa: F401  registers FAN, RVT, PVT and LocalViT

    repository, architecture = hub_name(name), name.partition(".")[0]
    if repository is None and not timm.is_model(architecture):  # which timm would look for in folders and on the hub
        if "/" in name and ":" not in name:
            raise VitfocusError(f"timm has no model {name!r}, and there is no such folder.")
        raise VitfocusError(f"timm has no model {name!r}: {nearest(architecture, timm.list_models())}")
    try:
        if repository is not None:  # files on the hub are untrusted too
            found, architecture, given = timm.models.load_model_config_from_hf(repository)
            return build_timm_checkpoint(found, architecture, given, name, pretrained, arguments)
        return timm.create_model(name, pretrained=pretrained, **arguments)
    except RuntimeError as error:
        if not pretrained or isinstance(error, torch.OutOfMemoryError):
            raise
        raise VitfocusError(f"{name} cannot start from pretrained weights: {reason(error)}.") from None


def _build_torchvision(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    from torchvision import models

    if name not in models.list_models():
        raise VitfocusError(f"torchvision has no model {name!r}: {nearest(name, models.list_models())}")
    builder: Any = models.get_model_builder(name)
    if "weights_backbone" in inspect.signature(builder).parameters:  # which would be downloaded by default
        arguments = {"weights_backbone": None, **arguments}
    model: nn.Module = builder(weights="DEFAULT" if pretrained else None, **arguments)
    return model


def _build_transformers(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """Build from the name of a class and the fields of its config, or from a checkpoint's folder or name on the hub."""
    transformers = import_transformers()
    if arguments.get("trust_remote_code"):
        raise VitfocusError("vitfocus does not run code from a checkpoint: load the model with transformers.")
    if "config" in arguments:
        model_class = transformers_class(name)
        config_class = getattr(transformers, str(arguments["config_class"]), None)
        if not (inspect.isclass(config_class) and issubclass(config_class, model_class.config_class)):
            raise VitfocusError(f"{name} takes a {model_class.config_class.__name__}, not {arguments['config_class']}.")
        return model_class(transformers_config(config_class, arguments["config"], f"the config of {name}"))
    found: Any = getattr(transformers, name, None) if name.isidentifier() and not is_folder(name) else None
    if hasattr(found, "config_class"):
        if pretrained:
            raise VitfocusError(f"{name} is a class of transformers and has no weights: name a folder or a checkpoint.")
        return found(found.config_class(**arguments))
    if name.isidentifier() and name[0].isupper() and not is_folder(name):
        classes = [one for one in dir(transformers) if "For" in one or one.endswith("Model")]
        raise VitfocusError(f"transformers has no model class {name!r}: {nearest(name, classes)}")
    config = checkpoint_config(name)
    arguments = {key: value for key, value in arguments.items() if key != "trust_remote_code"}
    config, rest = type(config).from_dict(config.to_dict(), return_unused_kwargs=True, **arguments)
    answers = config.model_type == "vilt"
    loader: Any = (
        transformers.AutoModelForVisualQuestionAnswering if answers else transformers.AutoModelForImageClassification
    )
    named = (config.architectures or [""])[0]
    # A checkpoint keeps its task, unless a new classifier is asked for.
    has_head = "For" in named and "num_labels" not in arguments
    if not answers and (has_head or type(config) not in loader._model_mapping):
        loader = transformers_class(named)
    if pretrained:
        if local := is_folder(name):
            require_own_weights(Path(name))
        return loader.from_pretrained(name, config=config, local_files_only=local, trust_remote_code=False, **rest)
    return loader.from_config(config, trust_remote_code=False) if hasattr(loader, "from_config") else loader(config)


def _guess_transformers(model: Any, known: Origin | None = None) -> list[Origin]:
    config = model.config.to_dict()
    return [
        Origin("transformers", type(model).__name__, {"config_class": type(model.config).__name__, "config": config})
    ]


def _guess_torchvision(model: Any, known: Origin | None = None) -> list[Origin]:
    from torchvision import models

    prefix = {"VisionTransformer": "vit_", "MaxVit": "maxvit_"}.get(type(model).__name__, "swin_")
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    arguments: dict[str, Any] = {"num_classes": head.out_features}
    if hasattr(model, "image_size"):
        arguments["image_size"] = model.image_size
    if prefix == "maxvit_":
        arguments["input_size"] = anatomy(model).build_size
    return [Origin("torchvision", name, arguments) for name in models.list_models(include=f"{prefix}*")]


def _guess_timm(model: Any, known: Origin | None = None) -> list[Origin]:
    name = known.name if known is not None else (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if not name:
        return []
    arguments: dict[str, Any] = dict(known.arguments) if known is not None else {}
    if hasattr(model, "num_classes"):
        arguments["num_classes"] = model.num_classes
    plain = _build_on_meta(Origin("timm", name, arguments))
    if plain is None:
        return []
    ours, theirs = _constructor_facts(model), _constructor_facts(plain)
    more = {key: value for key, value in ours.items() if key in theirs and theirs[key] != value}
    # A window is never larger than the grid, so its size may follow from the image size instead of an argument. Not
    # every class takes each of the rare arguments, and some of them follow from others.
    taken = inspect.signature(type(model)).parameters
    rare = [key for key in more if key in _RARE]
    strange = [key for key in more if key not in taken]
    left_out: tuple[list[str], ...] = (
        [*more],
        ["window_size", *rare],
        rare,
        ["window_size", *strange],
        strange,
        ["window_size"],
        [],
    )
    tried: list[dict[str, Any]] = []
    for absent in left_out:
        changed = {**arguments, **{key: value for key, value in more.items() if key not in absent}}
        tried += [] if changed in tried else [changed]
    return [Origin("timm", name, changed) for changed in tried]


#: Arguments that are rarely changed.
_RARE = ("num_heads", "embed_dims", "mlp_ratio", "init_values", "qk_norm", "strict_img_size", "dynamic_mask")


def _constructor_facts(model: Any) -> dict[str, Any]:
    """The usual constructor arguments of a timm model, as far as its attributes show them."""
    facts: dict[str, Any] = {
        key: getattr(model, key)
        for key in ("embed_dim", "global_pool", "dynamic_img_size", "masked_blocks")
        if isinstance(getattr(model, key, None), str | int | bool)
    }
    if hasattr(model, "num_prefix_tokens") and hasattr(model, "cls_token"):
        facts["class_token"] = model.cls_token is not None
        facts["reg_tokens"] = getattr(model, "num_reg_tokens", 0)
    with contextlib.suppress(VitfocusError, AttributeError):
        seen = anatomy(model)
        facts["img_size"] = seen.build_size
        facts["window_size"] = seen[0].window
        facts["dynamic_img_pad"] = getattr(seen.stem, "dynamic_img_pad", None)
        facts["strict_img_size"] = getattr(seen.stem, "strict_img_size", None)
        facts["dynamic_mask"] = getattr(seen[0].host, "dynamic_mask", None)
        facts["qk_norm"] = not isinstance(getattr(seen[0].attention, "q_norm", nn.Identity()), nn.Identity)
        conv = next((module for module in seen.stem.modules() if isinstance(module, nn.Conv2d)), None)
        facts["in_chans"] = conv.in_channels if conv is not None else getattr(model, "in_chans", 3)
        stages = [block.stage for block in seen.trunk]
        if len(set(stages)) > 1:
            facts["depths"] = _depths(model) or tuple(stages.count(stage) for stage in sorted(set(stages)))
            firsts = [seen.trunk[stages.index(stage)] for stage in sorted(set(stages))]
            facts["num_heads"] = tuple(getattr(block.attention, "num_heads", None) for block in firsts)
            facts["embed_dims"] = tuple(block.width for block in firsts)
            facts.setdefault("embed_dim", firsts[0].width)
        else:
            facts["depth"] = len(seen.trunk)
            facts["patch_size"] = conv.kernel_size[0] if conv is not None else None
            facts["num_heads"] = getattr(seen[0].attention, "num_heads", None)
            first: Any = getattr(seen[0].mlp, "fc1", None)
            facts["mlp_ratio"] = first.out_features / seen[0].width if isinstance(first, nn.Linear) else None
            facts["init_values"] = getattr(getattr(seen[0].host, "ls1", None), "init_values", None)
    return facts


def _depths(model: Any) -> tuple[int, ...]:
    """The blocks of each stage as the model counts them: one of DaVit or MaxViT may have two attentions or none."""
    stages = getattr(model, "stages", ())
    return tuple(len(stage.blocks) for stage in stages) if all(hasattr(stage, "blocks") for stage in stages) else ()


def _build_on_meta(origin: Origin) -> nn.Module | None:
    with warnings.catch_warnings(), torch.device("meta"), SkipInitialisation():
        warnings.simplefilter("ignore")
        try:
            return origin.build()
        except Exception:
            return None


def _builds_same_model(origin: Origin, model: nn.Module) -> bool:
    copy = _build_on_meta(origin)
    return copy is not None and _structure(copy) == _structure(model)


_WITHOUT_EFFECT = ("training", "p", "grad_checkpointing", "fused_attn", "inplace", "name_or_path")


def _structure(model: nn.Module) -> dict[str, Any]:
    """Everything that affects outputs in eval mode: the shapes of tensors, and plain attributes of modules.

    Dropout and stochastic depth have no effect there and are left out.
    """
    facts: dict[str, Any] = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key.startswith("_") or key in _WITHOUT_EFFECT:
                continue
            if "drop" not in f"{name}:{key}" and isinstance(value, bool | int | float | str | tuple | list):
                facts[f"{name}:{key}"] = str(_listed(value))
    return facts


def _listed(value: Any) -> Any:
    """A value as a config that was written down has it: lists where it had tuples."""
    return [_listed(one) for one in value] if isinstance(value, tuple | list) else value


def warn_about_ignored_pixels(model: nn.Module) -> None:
    """Warn if the patches of a model do not cover its image."""
    config: Any = getattr(model, "config", None)
    stem: Any = next((part for part in model.modules() if isinstance(getattr(part, "proj", None), nn.Conv2d)), model)
    image = getattr(stem, "img_size", None) or getattr(config, "image_size", None)
    patch = getattr(stem, "patch_size", None) or getattr(config, "patch_size", None)
    pads = getattr(stem, "dynamic_img_pad", False)
    if pads or not all(isinstance(size, int | tuple | list) for size in (image, patch)):
        return
    sizes: list[Any] = [(size, size) if isinstance(size, int) else size for size in (image, patch)]
    (height, width), (rows, columns) = sizes
    down, across = height % rows, width % columns
    if down or across:
        warn(
            f"Patches of {rows}×{columns} pixels do not divide an image of {height}×{width}: the model does not see "
            f"the last {down} rows and {across} columns of pixels."
        )
