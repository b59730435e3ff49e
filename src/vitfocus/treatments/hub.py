"""Exchange with timm and transformers: saved folders that they open, their checkpoints, and the model card.

A treated model needs this package, so its folder names `NEEDS_VITFOCUS` where timm looks for an architecture and
transformers for a model type: without `import vitfocus` both refuse it by that name, and with it (`core/registry.py`
connects them) both build the model and insert the treatments before they load weights. Files are untrusted: names and
arguments pass the checks of `safe_arguments.py`, and weights come from the folder alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

import msgspec
from torch import nn

from vitfocus.anatomy.registry import InputSpec
from vitfocus.core.errors import VitfocusError
from vitfocus.core.metrics import METRICS
from vitfocus.core.records import Count, read_json, write_json
from vitfocus.core.registry import NEEDS_VITFOCUS, TYPE_KEY, nested_configs
from vitfocus.treatments.base import Treatment
from vitfocus.treatments.safe_arguments import file_arguments, require_named
from vitfocus.treatments.spec import STATE_KEY, is_record, parse_treatments, recorded_treatments, split_spec, write_spec
from vitfocus.treatments.surgery import added_names, applied, insert_all, surgeons, treated_roots, untreat_

_HUB = re.compile(r"hf[-_]hub:(.+)", re.DOTALL)
_PIPELINES = {
    "classify": "image-classification",
    "segment": "image-segmentation",
    "detect": "object-detection",
    "answer": "visual-question-answering",
}
#: Fields of timm's `pretrained_cfg` that say where weights are.
_WEIGHT_LOCATIONS = {"url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "custom_load"}


class TaskCard(TypedDict, total=False):
    """What a model was trained for: the name of the task, and what its evaluation needs to know."""

    task: str
    classes: list[str]
    source: str
    size: Count
    test: dict[str, Any]
    category_ids: list[Count]


class PixelSettings(msgspec.Struct, omit_defaults=True):
    """How the images of a saved model are resized and normalised."""

    mean: list[float]
    std: list[float]
    size: tuple[Count, Count] | None = None
    interpolation: str | None = None
    crop_pct: float | None = None


class SavedConfig(msgspec.Struct, omit_defaults=True):
    """config.json: how to build the model again, what was inserted, and the digest of the weights beside it."""

    format: int
    library: str
    base: str
    arguments: dict[str, Any]
    treatments: list[str]
    only: Literal["all", "treatments"]
    sha256: str
    vitfocus: str = ""
    spec: str = ""
    inserted: list[str] = []
    buffers: dict[str, str] = {}
    preprocessing: PixelSettings | None = None
    task: TaskCard = {}


class ScoresLike(Protocol):
    """What `vitfocus.evaluate` returns."""

    suite: str
    images: int
    models: dict[str, Any]
    fingerprint: dict[str, Any]


def hub_name(name: str) -> str | None:
    """The repository in "hf-hub:USER/NAME" or, as timm also writes it, "hf_hub:USER/NAME"; None for other names.

    >>> hub_name("hf-hub:me/vit"), hub_name("hf_hub:me/vit"), hub_name("vit_tiny_patch16_224")
    ('me/vit', 'me/vit', None)
    """
    found = _HUB.fullmatch(name)
    return found[1] if found else None


def timm_fields(
    model: nn.Module, base: str, arguments: Mapping[str, Any], treatments: Sequence[Treatment], images: InputSpec
) -> dict[str, Any]:
    """What timm, and transformers for a timm model, read in config.json."""
    ours = any(cls.__module__.startswith("vitfocus.") for cls in type(model).__mro__)
    known: dict[str, Any] = dict(getattr(model, "pretrained_cfg", None) or {})
    absent = {*_WEIGHT_LOCATIONS, "num_classes"}
    count = getattr(model, "num_classes", known.get("num_classes", 1000))
    known |= {"input_size": [len(images.mean), *images.size], "mean": list(images.mean), "std": list(images.std)}
    needs = bool(treatments) or ours
    return {
        "architecture": NEEDS_VITFOCUS if needs else base.partition(".")[0],
        "num_classes": count,
        "num_features": getattr(model, "num_features", None),
        "model_args": {key: value for key, value in arguments.items() if key != "num_classes"}
        | ({"spec": write_spec(base, treatments)} if needs else {}),
        "pretrained_cfg": {key: value for key, value in known.items() if value is not None and key not in absent},
    }


def transformers_fields(model: Any, treatments: Sequence[Treatment]) -> dict[str, Any]:
    """What transformers reads in config.json: the fields of the model's config, and the treatments."""
    ours = {*SavedConfig.__struct_fields__, "auto_map"}
    known = {key: value for key, value in model.config.to_dict().items() if key not in ours}
    known |= {"architectures": [type(model).__name__]}
    if not treatments:
        return known
    return known | {
        "model_type": NEEDS_VITFOCUS,
        TYPE_KEY: model.config.model_type,
        STATE_KEY: "+".join(map(str, treatments)),
    }


def image_processor(spec: InputSpec) -> dict[str, Any]:
    """preprocessor_config.json of a transformers model: resize to the model's size, and normalise."""
    height, width = spec.size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }


def build_timm_folder(folder: Path, arguments: dict[str, Any]) -> nn.Module:
    """The model in a folder of timm's layout, with its weights and the treatments that they record."""
    import timm

    found, name, given = timm.models._hub.load_model_config_from_path(folder)
    return build_timm_checkpoint(found, name, given, str(folder), True, arguments)


def build_timm_checkpoint(
    found: dict[str, Any], name: str, given: Any, where: str, pretrained: bool, arguments: dict[str, Any]
) -> nn.Module:
    """Build from a config.json that timm has read; the location of the weights is timm's, not the file's."""
    import timm
    from timm.models import PretrainedCfg

    require_named("timm", str(name), where)
    safe = file_arguments("timm", str(name), given or {}, where)
    place = {key: found[key] for key in ("source", "file" if found["source"] == "local-dir" else "hf_hub_id")}
    kept = {field.name for field in fields(PretrainedCfg)} - _WEIGHT_LOCATIONS
    stated = {key: value for key, value in found.items() if key in kept}
    config = stated | place
    # Without a statement, as when transformers builds it, what timm knows of the name holds (its image size).
    options = {"pretrained_cfg": config if stated else None, **safe, **arguments}
    model = timm.create_model(name, pretrained=False, **options)
    if pretrained:
        _load_timm(model, config, where)
    return model


def _load_timm(model: Any, config: dict[str, Any], where: str) -> None:
    """Insert the treatments that the weights record, and load these as timm does, for other classes and sizes too."""
    from timm.models import _hub as hub
    from timm.models._builder import load_pretrained

    local = config["source"] == "local-dir"
    state = hub.load_state_dict_from_path(config["file"]) if local else hub.load_state_dict_from_hf(config["hf_hub_id"])
    recorded = recorded_treatments(state, where)
    if not applied(model):
        insert_all(model, recorded)
    translate = getattr(sys.modules.get(type(model).__module__), "checkpoint_filter_fn", None)
    stem = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    channels = stem.in_channels if stem is not None else 3
    load_pretrained(model, {**config, "state_dict": state}, model.num_classes, channels, translate)


def build_treated(
    pretrained: bool = False,
    *,
    spec: str = "",
    pretrained_cfg: Any = None,
    features_only: bool = False,
    **arguments: Any,
) -> nn.Module:
    """What timm calls for the architecture `NEEDS_VITFOCUS`: the model of the spec in config.json, treated."""
    from timm.models._features import FeatureGetterNet

    import vitfocus.models  # noqa: F401  registers FAN, RVT, PVT and LocalViT

    base, treatments = split_spec(str(spec))
    config = dict(pretrained_cfg if isinstance(pretrained_cfg, Mapping) else vars(pretrained_cfg or object) or {})
    where = f"{config.get('file') or config.get('hf_hub_id') or NEEDS_VITFOCUS}"
    given = {key: value for key, value in arguments.items() if key not in _TIMM_KEYS}
    config = {"source": "", "hf_hub_id": None, **config}
    out = {key: given.pop(key) for key in ("out_indices", "output_stride") if key in given}
    model = build_timm_checkpoint(config, base, given, where, False, {})
    insert_all(model, treatments)
    if pretrained:
        _load_timm(model, config, where)
    return FeatureGetterNet(model, **out) if features_only else model


#: What timm.create_model passes to every constructor in addition to the arguments of the model.
_TIMM_KEYS = ("pretrained_cfg_overlay", "pretrained_model_args", "cache_dir", "pretrained_strict")


def treat_built(model: Any) -> None:
    """What a transformers model calls when it is built: insert the treatments that its config names."""
    config = model.config
    if {"vitfocus", "sha256"} <= set(config.__dict__):  # they describe the folder and must not be saved to another
        for key in SavedConfig.__struct_fields__:
            config.__dict__.pop(key, None)
    text = next((text for one in nested_configs(config) if isinstance(text := one.__dict__.get(STATE_KEY), str)), "")
    if not text:
        return
    parts = treated_roots(model)
    untreat_(model)  # a part that was built before may be dissected in another way than the whole model
    try:
        insert_all(model, parse_treatments(text))
    except VitfocusError:
        for part in parts:
            insert_all(part, parse_treatments(text))
        if not parts and type(model).__name__ in (config.architectures or ()):
            raise  # otherwise it is a part of the model that has the transformer


def check_loaded(model: nn.Module, missing: Collection[str]) -> None:
    """Refuse a model of transformers if its checkpoint records treatments and lacks some of their parameters."""
    absent = sorted(added_names(model) & set(missing))
    if absent and not any(is_record(name) for name in absent):
        raise VitfocusError(
            f"The checkpoint records {'+'.join(map(str, applied(model)))} and lacks {absent[0]} ({len(absent)} names): "
            "it was saved under names that transformers does not read back; save the model with vitfocus.save."
        )


def inference_treatments(model: nn.Module) -> str:
    """The specs of the treatments that change what a model computes, which the diversification loss does not."""
    return "+".join(str(surgeon.treatment) for surgeon in surgeons(model) if surgeon.treatment.name != "adl")


def check_adapter(model: nn.Module, folder: str | Path) -> None:
    """Refuse a peft adapter whose base had other treatments than this model."""
    from huggingface_hub import try_to_load_from_cache

    name, file = "adapter_config.json", Path(folder) / "adapter_config.json"
    with contextlib.suppress(ValueError):  # not a name of a repository
        cached = None if file.is_file() else try_to_load_from_cache(str(folder), name)
        file = Path(cached) if isinstance(cached, str) else file
    if not file.is_file():
        return
    wanted, present = str(read_json(file, dict[str, Any]).get(STATE_KEY, "")), inference_treatments(model)
    if sorted(map(str, parse_treatments(wanted))) != sorted(map(str, parse_treatments(present))):
        raise VitfocusError(
            f"The adapter in {folder} was trained on a model with {wanted or 'no treatment'}, and this one has "
            f"{present or 'none'}: {f'use vf.treat_(base, {wanted!r}) first' if wanted else 'untreat it first'}."
        )


def check_merge(model: nn.Module) -> None:
    """Refuse to merge an adapter into a layer that computes its weight from the stored one."""
    from vitfocus.treatments.sigma_reparam import SpectralLinear

    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), SpectralLinear):
            raise VitfocusError(
                f"{name} has an adapter and rescales its weight (sigma), so the adapter cannot be merged: keep it "
                "apart (save_pretrained), or adapt other layers."
            )


def describe_adapter(model: nn.Module, folder: str | Path) -> None:
    """Add the treatments of the base to each adapter_config.json that peft wrote, at most one folder down."""
    if treatments := inference_treatments(model):
        for file in (Path(folder) / "adapter_config.json", *Path(folder).glob("*/adapter_config.json")):
            if file.is_file():
                write_json(file, {**read_json(file, dict[str, Any]), STATE_KEY: treatments})


def model_card(
    model: nn.Module,
    spec: str,
    library: str,
    task: Mapping[str, Any],
    scores: Sequence[ScoresLike] = (),
    inserted: str = "",
) -> str:
    """README.md as the Hugging Face hub reads it, from what is known of a model."""
    base, *parts = spec.split("+")
    known: Any = next((c for m in model.modules() if (c := getattr(m, "pretrained_cfg", None))), {})
    origin = getattr(getattr(model, "config", None), "_name_or_path", "")
    data = task.get("source")
    head: dict[str, Any] = {
        "library_name": "vitfocus",
        "tags": ["vision-transformer", library, *(["vitfocus-treated"] if parts else [])],
        "pipeline_tag": _PIPELINES.get(str(task.get("task")), _PIPELINES["classify"]),
    }
    if getattr(model, "num_classes", 1) == 0 and not task:
        head["pipeline_tag"] = "image-feature-extraction"
    if isinstance(licence := known.get("license"), str):
        head["license"] = licence
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(origin)) and not Path(str(origin)).exists():
        head["base_model"] = origin
    if index := [_result(one, name, numbers) for one in scores for name, numbers in one.models.items()]:
        head["model-index"] = [{"name": spec, "results": index}]
    body = [
        f"# {_plain(spec)}",
        f"{_plain(base)} of {library}, {'with ' + _plain('+'.join(parts)) if parts else 'without treatments'}. "
        f"Saved by [vitfocus](https://pypi.org/project/vitfocus/).",
        *(
            [f"{_plain(inserted)} was inserted after the weights were last trained: train on before you use the model."]
            if inserted
            else []
        ),
        *([f"Trained for the task {_plain(task['task'])}{_on(data, task)}."] if task.get("task") else []),
        f"Licence of the base weights: {_plain(head.get('license', 'not known'))}.",
        '## Load\n\n```python\nimport vitfocus as vf\n\nmodel = vf.load("hf-hub:USER/NAME")  # or a folder\n```',
        _other_ways(library, bool(parts)),
        *(["## Scores", *(_table(one) for one in scores)] if scores else []),
    ]
    front = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items())
    return f"---\n{front}\n---\n\n" + "\n\n".join(filter(None, body)) + "\n"


def _on(data: Any, task: Mapping[str, Any]) -> str:
    classes = task.get("classes") or ()
    return (f" on {_plain(data)}" if data else "") + (f", {len(classes)} classes" if classes else "")


def _other_ways(library: str, treated: bool) -> str:
    before = "After `import vitfocus`, t" if treated else "T"
    if library == "timm":
        return (
            f'{before}imm opens it with `timm.create_model("hf-hub:USER/NAME", pretrained=True)` and transformers '
            'with `pipeline("image-classification", model="USER/NAME")`.'
        )
    if library == "transformers":
        return f'{before}ransformers opens it with `AutoModelForImageClassification.from_pretrained("USER/NAME")`.'
    return ""


def _result(scores: ScoresLike, name: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    found = [
        {"type": key, "value": numbers[key], "name": METRICS[key].title}
        for key in METRICS
        if isinstance(numbers.get(key), int | float)
    ]
    digest = scores.fingerprint.get("data", {}).get("digest")
    data = {"type": scores.suite, "name": scores.suite, **({"revision": str(digest)} if digest else {})}
    return {"task": {"type": _PIPELINES["classify"]}, "dataset": data, "metrics": found}


def _table(scores: ScoresLike) -> str:
    """One suite as Markdown: numbers, their intervals, and the fingerprint of how they were measured."""
    lines = ["| model | metric | value | 95 % interval |", "|---|---|---|---|"]
    for name, numbers in scores.models.items():
        for key, metric in METRICS.items():
            if isinstance(value := numbers.get(key), int | float):
                low_high = numbers.get(f"{key}_interval")
                shown = " to ".join(f"{end:.2f}" for end in low_high) if low_high else ""
                lines.append(f"| {_plain(name)} | {metric.title} | {value:.2f} {metric.unit} | {shown} |")
    mark = fingerprint_digest(scores.fingerprint)
    return f"{_plain(scores.suite)}, {scores.images} images, fingerprint `{mark}`:\n\n" + "\n".join(lines)


def fingerprint_digest(fingerprint: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of a fingerprint."""
    text = json.dumps(fingerprint, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> str:
    """Text from a file as inline code in Markdown: one line without backticks."""
    return f"`{' '.join(str(value).replace('`', '').split())[:200]}`"
