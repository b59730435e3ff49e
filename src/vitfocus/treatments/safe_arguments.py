"""Constructor arguments that a file may set: plain data, under names that the classes of the library have.

`config.json` and recipes are untrusted. Their arguments must not enable remote code, downloads or reading of files, so
a name passes only if a class of that model has it and no loader does, and a value only if it is plain data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from vitfocus.core.errors import VitfocusError, nearest, reason
from vitfocus.core.files import is_file, is_folder
from vitfocus.core.records import read_json
from vitfocus.core.registry import NEEDS_VITFOCUS
from vitfocus.treatments.spec import STATE_KEY, parse_treatments, split_spec

#: The arguments of composed models' heads; all others are those of the backbone.
_HEAD_ARGUMENTS = {
    *("num_classes", "indices", "channels", "auxiliary_channels", "embed_channels", "dropout"),
    *("min_size", "max_size", "box_width", "mask_layers", "anchor_scale"),
}
#: Names that no file may set although classes have them: locations, other models, and whatever loads something.
_FORBIDDEN = {
    *("args", "kwargs", "cfg", "cfgs", "device", "dtype", "backbone", "hybrid_backbone", "stem_backbone", "auto_map"),
    *("weights", "weights_backbone", "encoder_name", "encoder_weights", "quantization_config", "transformers_weights"),
    *("use_pretrained_backbone", "use_timm_backbone", "backbone_kwargs", "trust_remote_code", "_name_or_path"),
    "name_or_path",
}
#: A flash attention that is not installed is replaced by a kernel from the hub, so no file may ask for one.
_ATTENTION = ("eager", "sdpa", "flex_attention")
_BASE_FIELDS = frozenset({"num_labels", "id2label", "label2id", "out_features", "out_indices", "output_attentions"})
_MAX_LENGTH, _MAX_VALUES = 1000, 200_000
#: The range of sizes and counts, which not every library checks.
_RANGES = {
    **dict.fromkeys(("depth", "depths", "num_layers", "num_hidden_layers"), (1, 1000)),
    **dict.fromkeys(("img_size", "image_size", "patch_size", "in_chans", "num_channels"), (1, 10**5)),
    **dict.fromkeys(("embed_dim", "hidden_size", "intermediate_size", "mlp_ratio"), (1, 10**6)),
    **dict.fromkeys(("num_classes", "num_labels"), (0, 10**7)),
    **dict.fromkeys(("num_heads", "num_attention_heads"), (1, 10**4)),
}


def file_arguments(library: str, name: str, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check constructor arguments that were read from a file; `where` names the file in errors.

    >>> file_arguments("timm", "vit_tiny_patch16_224", {"depth": 2}, "config.json")
    {'depth': 2}
    >>> file_arguments("timm", "vit_tiny_patch16_224", {"checkpoint_path": "x.pth"}, "config.json")
    Traceback (most recent call last):
    ...
    vitfocus.core.errors.VitfocusError: config.json sets checkpoint_path, which no file may set for ...: ...
    """
    _require_plain(arguments, where)
    require_sizes(arguments, where)
    if (library, name) == ("timm", NEEDS_VITFOCUS):  # a treated model, whose spec is one of the arguments
        spec, rest = str(arguments.get("spec", "")), {key: arguments[key] for key in arguments if key != "spec"}
        base = split_spec(spec)[0]
        if base == name:
            raise VitfocusError(f"{where} names {base} as the model in its own spec.")
        require_named(library, base, where)
        return {"spec": spec, **file_arguments(library, base, rest, where)}
    if library == "transformers" and set(arguments) == {"config_class", "config"}:
        return dict(arguments)  # `transformers_config` checks the fields
    known = _known_names(library, name)
    if not known and not is_elsewhere(library, name):
        return {}  # no such model: its library raises the error
    for key, value in arguments.items():
        if key == "attn_implementation" and library == "transformers":
            _require_attention(value, where)
        elif library == "maskrcnn" and key.startswith(("rpn_", "box_")):
            continue  # the detector checks these itself
        elif key not in known or key in _FORBIDDEN:
            close = nearest(key, sorted(known - _FORBIDDEN)) if known else "it is not built into its library."
            raise VitfocusError(f"{where} sets {key}, which no file may set for {name}: {close}")
    return dict(arguments)


def require_sizes(arguments: Mapping[str, Any], where: str) -> None:
    """Refuse sizes and counts that no model has.

    >>> require_sizes({"depth": 0}, "vit_tiny_patch16_224")
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: vit_tiny_patch16_224 needs depth from 1 to 1,000, not 0.
    """
    for key, (low, high) in _RANGES.items():
        given = arguments.get(key)
        each = given if isinstance(given, list | tuple) else (given,)
        if any(isinstance(one, int) and not low <= one <= high for one in each):
            raise VitfocusError(f"{where} needs {key} from {low} to {high:,}, not {given!r}.")


def require_named(library: str, name: str, where: str) -> None:
    """Refuse a base model, read from a file, that is a folder or on a hub and not a name in its library."""
    if is_elsewhere(library, name):
        raise VitfocusError(
            f"{where} names {name!r} as the model, and a file may only name a model that is built into {library}: "
            "nothing was fetched or loaded."
        )


def is_elsewhere(library: str, name: str) -> bool:
    """Whether a name is a folder or a place on a hub instead of a model in its library.

    >>> is_elsewhere("timm", "vit_tiny_patch16_224.augreg_in21k"), is_elsewhere("timm", "hf-hub:timm/resnet18.a1_in1k")
    (False, True)
    >>> is_elsewhere("transformers", "ViTForImageClassification"), is_elsewhere("transformers", "google/vit")
    (False, True)
    """
    if library == "transformers":
        return _transformers_class(name) is None
    backbone = name.partition(":")[2] if library == "smp" else name
    return re.fullmatch(r"[\w.-]+", backbone, re.ASCII) is None


def transformers_class(name: str) -> Any:
    """A model class of transformers for images, by its name; raises `VitfocusError` for any other name."""
    found = _transformers_class(name)
    if found is None:
        raise VitfocusError(f"transformers has no model class {name!r} that vitfocus builds from a file.")
    return found


def transformers_config(config_class: Any, fields: Mapping[str, Any], where: str) -> Any:
    """A config of that class. Fields it does not have, and those that would load something, are left out.

    So `auto_map`, which points at Python code in the folder, and `quantization_config` have no effect.
    """
    _require_plain(fields, where)
    config = config_class.from_dict(_fields(config_class, fields, where))
    for part in _parts(config):  # defaults too
        _refuse_timm(type(part), where)
        _require_attention(getattr(part, "_attn_implementation_internal", None), where)
        if getattr(part, "use_pretrained_backbone", False) or getattr(part, "use_timm_backbone", False):
            raise VitfocusError(f"{where} holds a {type(part).__name__} whose backbone is fetched by its name.")
    return config


def checkpoint_config(name: str) -> Any:
    """The transformers config of a checkpoint, given by its folder or its name on the hub."""
    transformers = import_transformers()
    local = is_folder(name)
    if local:
        read_json(Path(name, "config.json"), dict[str, Any], writer="transformers")  # within its limits
    try:
        if local and Path(name, "adapter_config.json").exists():  # it names another model, perhaps on the hub
            raise ValueError("it holds an adapter: merge it into its base model first, and save that")
        fields, _ = transformers.PretrainedConfig.get_config_dict(name, local_files_only=local)
        kind = fields.get("model_type")
        if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
            raise ValueError(f"its config.json names {kind!r}, which is not a model type of transformers")
        return transformers_config(transformers.CONFIG_MAPPING[kind], fields, name)
    except VitfocusError:
        raise
    except Exception as error:  # whatever the library raises for unexpected values
        raise VitfocusError(f"transformers finds no model {name!r}: {reason(error)}.") from None


class _WeightIndex(msgspec.Struct):
    """The index of weights in several files, as transformers writes it."""

    weight_map: dict[str, str]


def require_own_weights(folder: Path) -> None:
    """Refuse weights in several files if their index names anything but files of the folder: "../x", say, or a FIFO."""
    for weights in ("model.safetensors", "pytorch_model.bin"):  # in the order of transformers
        index = folder / f"{weights}.index.json"
        if (folder / weights).is_file():
            return
        if index.is_file():
            for part in set(read_json(index, _WeightIndex, writer="transformers").weight_map.values()):
                if Path(part).name != part or not is_file(folder / part):
                    raise VitfocusError(f"{index} names {part!r}; expected a file of weights in the same folder.")
            return


def import_transformers() -> Any:
    """The library; if it is not installed, an error names the extra to install."""
    try:
        import transformers
    except ImportError:
        raise VitfocusError("A transformers model needs the extra vitfocus[hf].") from None
    return transformers


def _fields(config_class: Any, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    _refuse_timm(config_class, where)
    require_sizes(given, where)
    known, kept = _config_names(config_class) | {"attn_implementation"}, dict[str, Any]()
    declared: Any = config_class.sub_configs if isinstance(config_class.sub_configs, Mapping) else {}  # or a property
    for key, value in given.items():
        if "attn_implementation" in key and not isinstance(value, bool):  # also that of a part, such as vision_config
            _require_attention(value, where)
        if key == STATE_KEY and parse_treatments(str(value)):  # which are inserted when the model is built
            kept[key] = str(value)
        if key in _FORBIDDEN - {"dtype"} or key not in known:
            continue
        if key == "dtype" and not (isinstance(value, str) and re.fullmatch(r"b?float\d+", value)):
            continue
        inner = declared.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping) and inner is None and "model_type" in value:
            inner = AutoConfig
        if inner is AutoConfig:
            kind = value.get("model_type")
            if kind not in CONFIG_MAPPING:
                raise VitfocusError(f"{where} names {kind!r} in {key}, which is not a model type of transformers.")
            kept[key] = {"model_type": kind, **_fields(CONFIG_MAPPING[kind], value, where)}
        else:
            kept[key] = _fields(inner, value, where) if inner is not None else _without_loaders(value)
    return kept


def _without_loaders(value: Any) -> Any:
    """A value without the forbidden keys; a table may become the config of a part whose class only its model knows."""
    if isinstance(value, list | tuple):
        return [_without_loaders(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    kept = {key: one for key, one in value.items() if key not in _FORBIDDEN and "implementation" not in str(key)}
    return {key: _without_loaders(one) for key, one in kept.items()}


def _parts(config: Any) -> list[Any]:
    """A config of transformers and those of the model's parts, also of parts that it does not declare."""
    inner = (one for one in vars(config).values() if hasattr(one, "model_type"))
    return [config, *(part for one in inner for part in _parts(one))]


def _refuse_timm(config_class: Any, where: str) -> None:
    if config_class.__module__.rpartition(".")[2] in ("configuration_timm_wrapper", "configuration_timm_backbone"):
        raise VitfocusError(f"{where} holds a {config_class.__name__}, which fetches what it names: open it with timm.")


def _known_names(library: str, name: str) -> set[str]:
    if library == "transformers":
        found = _transformers_class(name)
        if found is None and is_folder(name):
            return _config_names(type(checkpoint_config(name))) | {"ignore_mismatched_sizes"}
        return _config_names(found.config_class) if found is not None else set(_BASE_FIELDS)
    if library == "torchvision":
        from torchvision import models

        return _module_names(models.get_model_builder(name).__module__) if name in models.list_models() else set()
    if library == "timm":
        return _timm_names(name)
    known = _timm_names(name.rpartition(":")[2]) | _HEAD_ARGUMENTS
    if library == "smp":
        with contextlib.suppress(ImportError, AttributeError, KeyError):
            import segmentation_models_pytorch as decoders

            mapping: Any = decoders.MODEL_ARCHITECTURES_MAPPING
            known |= set(inspect.signature(mapping[name.partition(":")[0]]).parameters)
    return known


def _timm_names(name: str) -> set[str]:
    import timm

    import vitfocus.models  # noqa: F401  registers FAN, RVT, PVT and LocalViT

    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        return set()
    names = _module_names(timm.model_entrypoint(architecture).__module__)
    # MaxViT and CoAtNet take the fields of their two kinds of blocks under these prefixes.
    return names | {f"{kind}_{one}" for kind in ("transformer", "conv") for one in names if "conv_cfg" in names}


def _module_names(module: str) -> set[str]:
    """The arguments of all classes that a file of a library defines or uses."""
    libraries = ("timm", "torchvision", "vitfocus")
    classes = [
        one
        for one in vars(sys.modules[module]).values()
        if inspect.isclass(one)
        and one.__module__.partition(".")[0] in libraries
        and (issubclass(one, nn.Module) or dataclasses.is_dataclass(one))
    ]
    parents = {parent for one in classes for parent in one.__mro__ if parent.__module__.startswith(libraries)}
    return {key for one in parents for key in _parameters(one)}


def _config_names(config_class: Any) -> set[str]:
    names = {key for one in config_class.__mro__[:-1] for key in _parameters(one)} | _BASE_FIELDS
    names |= set(getattr(config_class, "attribute_map", ()))
    with contextlib.suppress(Exception):  # a config whose parts have no defaults
        names |= set(config_class().to_dict())
    return {name for name in names if name not in ("_name_or_path", "name_or_path", "self")}


def _parameters(one: type) -> Iterable[str]:
    try:
        return inspect.signature(one).parameters
    except (TypeError, ValueError):
        return ()


def _transformers_class(name: str) -> Any:
    transformers = import_transformers()
    from vitfocus.anatomy.transformers import takes_images

    found = getattr(transformers, name, None) if name.isidentifier() else None
    if not (inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel) and takes_images(found)):
        return None
    return found if found.__module__.startswith("transformers.models.") else None


def _require_attention(value: Any, where: str) -> None:
    if value is not None and value not in _ATTENTION:
        raise VitfocusError(
            f"{where} sets attn_implementation to {value!r}, which may fetch a kernel: {', '.join(_ATTENTION)} may be "
            "named in a file."
        )


def _require_plain(value: Any, where: str) -> None:
    """Refuse anything but plain data of limited size."""
    left, seen = [(value, 0)], 0
    while left:
        one, depth = left.pop()
        seen += 1
        if isinstance(one, Mapping) and all(isinstance(key, str | int) for key in one):
            left += [(inner, depth + 1) for inner in one.values()]
        elif isinstance(one, list | tuple):
            left += [(inner, depth + 1) for inner in one]
        elif not (
            one is None
            or isinstance(one, bool | int)
            or (isinstance(one, float) and math.isfinite(one))
            or (isinstance(one, str) and len(one) <= _MAX_LENGTH)
        ):
            text = repr(one)
            raise VitfocusError(
                f"{where} sets an argument to {text[:40]}{'...' if len(text) > 40 else ''}: a file may pass finite "
                "numbers, true and false, short words, and lists and tables of these."
            )
        if depth > 8 or seen > _MAX_VALUES:
            raise VitfocusError(f"{where} holds arguments nested too deeply, or too many of them.")
