"""Saving and loading: a folder with `config.json` and safetensors, without pickle, written atomically.

The folder has the layout of the Hugging Face hub, so it can be pushed there unchanged.
"""

from __future__ import annotations

import reprlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from vitfocus.anatomy import input_spec, remember_normalising, unwrap
from vitfocus.core import __version__
from vitfocus.core.arguments import checked, require_values
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.files import NotWritten, atomic_paths, digest, encoded, is_file, is_folder, write_text
from vitfocus.core.modules import inserted, mark_inserted, separate_tensors
from vitfocus.core.records import convert, json_text, read_json
from vitfocus.data.vqa.dataset import FILE as TOKENIZER_FILE
from vitfocus.data.vqa.dataset import QuestionTokenizer, attach_tokenizer, tokenizer_of
from vitfocus.treatments.builder import (
    Origin,
    full_name,
    library_errors,
    origin_of,
    remember,
    require_same_shapes,
    split_library,
    warn_about_ignored_pixels,
)
from vitfocus.treatments.hub import (
    PixelSettings,
    SavedConfig,
    ScoresLike,
    TaskCard,
    build_timm_folder,
    hub_name,
    image_processor,
    model_card,
    timm_fields,
    transformers_fields,
)
from vitfocus.treatments.safe_arguments import file_arguments, is_elsewhere, require_named
from vitfocus.treatments.spec import is_record, parse_treatments, recorded_treatments, split_spec, write_spec
from vitfocus.treatments.surgery import added_names, applied, insert_all, treat_, untreat_, untreated
from vitfocus.treatments.weights import copy_into, full_state, load_weights, read_weights, require_names

_FORMAT = 1
_TASK = "_vitfocus_task"
_WEIGHTS = {"all": "model.safetensors", "treatments": "treatments.safetensors"}
_PRECISIONS = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float64)}


@checked
def create_model(spec: str, pretrained: bool = False, **arguments: Any) -> nn.Module:
    """Build a model and apply treatments, from a spec such as "deit_small_patch16_224+cb(layers=upper)+adl".

    Args:
        spec: A model name, followed by treatments. The name is timm's (including FAN, RVT, PVT and LocalViT),
            "torchvision:NAME", "transformers:FOLDER_OR_NAME", or a model built on a timm backbone: "upernet:NAME",
            "segformer:NAME", "maskrcnn:NAME".
        pretrained: Let the library download its pretrained weights.
        **arguments: Passed to the library's constructor.

    Returns:
        The treated model, in training mode.

    Raises:
        VitfocusError: If the model or a treatment does not exist, or a treatment does not fit the model.

    Example:
        >>> model = create_model("vit_tiny_patch16_224+cbs", num_classes=10, depth=2)
        >>> sum(p.numel() for name, p in model.named_parameters() if "context" in name)
        384
    """
    base, treatments = split_spec(spec)
    library, name = split_library(base)
    model = Origin(library, name, arguments).build(pretrained)
    if library == "transformers" and is_folder(name):
        _attach_tokenizer(model, Path(name))
    warn_about_ignored_pixels(model)
    return treat_(model, *treatments) if treatments else model


@checked
def save(
    model: nn.Module,
    folder: str | Path,
    *,
    only: str = "all",
    base: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    scores: Any = (),
) -> Path:
    """Save a model, treated or not, as a folder with config.json, safetensors and a model card (README.md).

    timm (`timm.create_model("local-dir:FOLDER", pretrained=True)`) and transformers (`from_pretrained`, `pipeline`)
    can open the folders of their models; those of treated models after `import vitfocus`. If FSDP has sharded the
    model, every process must call this; the first one writes.

    Args:
        model: The model to save.
        folder: The folder, created if needed; files are written atomically.
        only: "all", or "treatments" for just the parameters that the treatments added.
        base: Name of the model as for `create_model`, if it cannot be inferred from the model.
        arguments: The constructor arguments that belong to `base`.
        scores: What `evaluate` measured, one `Scores` or a list of them, for the model card.

    Returns:
        The folder.

    Raises:
        VitfocusError: If it cannot be inferred how the model was built, `base` builds another model, there is no
            treatment to save, or the files cannot be written; a model that was saved there before is kept.

    Example:
        >>> model = create_model("vit_tiny_patch16_224+cb", depth=2, img_size=32)
        >>> folder = save(model, tempfile.mkdtemp())
        >>> sorted(file.name for file in folder.iterdir())
        ['README.md', 'config.json', 'model.safetensors']
    """
    if only not in _WEIGHTS:
        raise VitfocusError(f"save has no only={only!r}: {nearest(only, _WEIGHTS)}")
    model, folder = unwrap(model), Path(folder)
    treatments = applied(model)
    added = added_names(model)
    if only == "treatments" and not treatments:
        raise VitfocusError("This model has no treatment, so there is nothing to save with only='treatments'.")
    if arguments is not None and base is None:
        raise VitfocusError("arguments are those of base: pass base=... (the model's name) as well, or neither.")
    measured: list[ScoresLike] = list(scores) if isinstance(scores, tuple | list) else [scores]
    if wrong := [one for one in measured if not hasattr(one, "models")]:
        raise VitfocusError(f"scores holds {reprlib.repr(wrong[0])}; expected what vitfocus.evaluate returns.")
    # The config of a transformers model is enough; the checkpoint it came from may be gone by the time of loading.
    if base is not None and split_library(base)[0] != "transformers":
        origin = Origin(*split_library(base), dict(arguments or {}))
        if only == "all":
            require_named(origin.library, origin.name, "base")
        if not is_elsewhere(origin.library, origin.name):
            replaced = any(treatment.structural for treatment in treatments)
            shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in added}
            require_same_shapes(origin, shapes, some=replaced)
    else:
        with untreated(model):
            origin = origin_of(model)
        if base is not None and origin.library != "transformers":
            raise VitfocusError(f"base={base!r} is a model of transformers, and this one is {full_name(origin)}.")
    tensors = {key: value for key, value in full_state(model).items() if only == "all" or key in added}
    if not _writes(model):
        return folder
    for key, value in tensors.items():
        require_values(key, value)
    if folder.exists() and not folder.is_dir():
        raise VitfocusError(f"{folder} is a file, and a model is saved as a folder.")
    tokenizer, processed = tokenizer_of(model), only == "all" and origin.library == "transformers"
    extra = ["preprocessor_config.json"] * processed + [TOKENIZER_FILE] * (tokenizer is not None)
    names = [_WEIGHTS[only], "README.md", *extra, "config.json"]
    with atomic_paths(folder / name for name in names) as paths:
        files = dict(zip(names, paths, strict=True))
        weights = files[_WEIGHTS[only]]
        try:
            save_file(separate_tensors(tensors), weights, metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise NotWritten(f"{folder / _WEIGHTS[only]} cannot be written: {error}.") from None
        config = SavedConfig(
            format=_FORMAT,
            vitfocus=__version__,
            library=origin.library,
            base=origin.name,
            arguments=origin.plain_arguments(),
            treatments=[str(treatment) for treatment in treatments],
            inserted=list(inserted(model)),
            spec=write_spec(full_name(origin), treatments),
            only="all" if only == "all" else "treatments",
            buffers=_unsaved_precisions(model) if only == "all" else {},
            preprocessing=_preprocessing(model),
            task=task_of(model),
            sha256=digest(weights),
        )
        content: dict[str, Any] = msgspec.to_builtins(config)
        if only == "all" and origin.library == "timm":
            content = {**timm_fields(model, origin.name, config.arguments, treatments, input_spec(model)), **content}
            content |= {"label_names": classes} if (classes := config.task.get("classes")) else {}
        elif processed:
            content = {**transformers_fields(model, treatments), **content}
            processor = json_text(image_processor(input_spec(model)))
            files["preprocessor_config.json"].write_bytes(encoded(processor))
        card = model_card(model, config.spec, origin.library, config.task, measured, "+".join(config.inserted))
        files["README.md"].write_bytes(encoded(card))
        if tokenizer is not None:
            files[TOKENIZER_FILE].write_bytes(encoded(tokenizer.to_json()))
        files["config.json"].write_bytes(encoded(json_text(content)))
    return folder


def _writes(model: nn.Module) -> bool:
    """Whether this process writes the model: of those that share a sharded one, the first."""
    sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    return not sharded or torch.distributed.get_rank() == 0


@checked
def load(folder: str | Path, *, onto: nn.Module | None = None, pretrained: bool = False) -> nn.Module:
    """Load a model that `save` wrote.

    A folder saved with `only="treatments"` needs its base model: either `onto` or `pretrained=True`.

    Args:
        folder: The folder, or "hf-hub:USER/NAME" to download it from the Hugging Face hub.
        onto: A base model to treat in place; unchanged if loading fails.
        pretrained: Let the library download the weights of the base model.

    Returns:
        The model in eval mode.

    Raises:
        VitfocusError: If the folder is not a saved model, is damaged, or does not fit `onto`.

    Example:
        >>> folder = save(create_model("vit_tiny_patch16_224+cb", depth=2, img_size=32), tempfile.mkdtemp())
        >>> [str(treatment) for treatment in applied(load(folder))]
        ['cb']
    """
    # A path is never a name on the hub, although a folder may be called "hf-hub:...".
    folder = _download(name) if isinstance(folder, str) and (name := hub_name(folder)) else Path(folder)
    config = _read_config(folder)
    tensors = read_weights(folder / _WEIGHTS[config.only], config.sha256)
    if config.only == "treatments" and onto is None and not pretrained:
        raise VitfocusError(
            f"{folder} contains only treatments: load it onto its base model, or with the pretrained weights of it."
        )
    library, base, where = config.library, config.base, str(folder / "config.json")
    if onto is None:
        require_named(library, base, where)
    origin = Origin(library, base, _arguments(file_arguments(library, base, config.arguments, where)))
    model = onto if onto is not None else origin.build(pretrained and config.only == "treatments")
    treatments = parse_treatments("+".join(config.treatments))
    before = applied(model)
    if before and [str(t) for t in before] != config.treatments:
        raise VitfocusError(
            f"The model carries {'+'.join(map(str, before))}, and {folder} was saved with "
            f"{'+'.join(config.treatments) or 'no treatment'}: untreat it first."
        )
    if not before:
        insert_all(model, treatments)
    try:
        wanted = added_names(model) if config.only == "treatments" else set(model.state_dict())
        missing = {name for name in wanted - set(tensors) if not is_record(name)}  # older folders have no record
        require_names(str(folder), missing, set(tensors) - wanted)
        recorded = recorded_treatments(tensors, str(folder))
        if recorded and sorted(map(str, recorded)) != sorted(map(str, treatments)):
            raise VitfocusError(
                f"{folder} was changed: its weights were saved with {'+'.join(map(str, recorded))}, and config.json "
                f"names {'+'.join(config.treatments) or 'no treatment'}."
            )
        if onto is None and config.only == "all":
            _take_dtypes(model, {name: tensor.dtype for name, tensor in tensors.items()} | _precisions(config, folder))
        copy_into(model, tensors, str(folder))
    except VitfocusError:
        if onto is not None and not before:
            untreat_(model)
        raise
    mark_inserted(model, config.inserted)
    if onto is None:
        remember(model, origin)
        _restore_preprocessing(model, config.preprocessing)
        remember_task(model, config.task)
        _attach_tokenizer(model, folder)
        warn_about_ignored_pixels(model)
    return model.eval()


def _take_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast a model's weights and buffers to the precision of those that will be loaded."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name in dtypes and value.is_floating_point() and dtypes[name].is_floating_point:
            value.data = value.data.to(dtypes[name])


def _unsaved_precisions(model: nn.Module) -> dict[str, str]:
    """The precision of buffers that are not saved (masks, biases of keys), if it is not float32."""
    saved = model.state_dict()
    unsaved = {name: str(one.dtype).removeprefix("torch.") for name, one in model.named_buffers() if name not in saved}
    return {name: precision for name, precision in unsaved.items() if precision in _PRECISIONS}


def _precisions(config: SavedConfig, folder: Path) -> dict[str, torch.dtype]:
    named = config.buffers
    if unknown := sorted(set(named.values()) - set(_PRECISIONS)):
        raise VitfocusError(
            f"{folder / 'config.json'} was changed since vitfocus.save wrote it: {unknown[0]!r} is not a precision "
            f"of a buffer; {nearest(unknown[0], _PRECISIONS)}"
        )
    return {name: _PRECISIONS[precision] for name, precision in named.items()}


def remember_task(model: nn.Module, card: Mapping[str, Any]) -> None:
    """Store on a model what it was trained for, as plain data that is saved and loaded with the model."""
    unwrap(model).__dict__[_TASK] = dict(card)


def task_of(model: nn.Module) -> TaskCard:
    """What a model was trained for; empty if that is not known."""
    card: TaskCard = unwrap(model).__dict__.get(_TASK, {})
    return card


@checked
def open_model(name: str, weights: str | Path | None = None, treat: str | None = None, **arguments: Any) -> nn.Module:
    """Open a model by name or folder, as the command line does.

    Args:
        name: A spec as for `create_model`; a folder saved by vitfocus, transformers or timm; the folder of a run; or
            "hf-hub:USER/NAME", which is downloaded.
        weights: A checkpoint to load. A model without treatments receives those that the checkpoint records.
        treat: Treatments to apply first, as a spec such as "tap+cb".
        **arguments: Passed to the library's constructor.

    Returns:
        The model in eval mode.

    Raises:
        VitfocusError: If there is no such model, or the weights or treatments do not fit it.

    Example:
        >>> model = open_model("vit_tiny_patch16_224", treat="cb", depth=2)
        >>> model.training, len(applied(model))
        (False, 1)
    """
    if treat is not None and not parse_treatments(treat):
        raise VitfocusError(f"treat={treat!r} names no treatment: write one, such as cb, or leave it out.")
    folder = _download(hub_name(name) or "") if is_pushed(name) else Path(name)
    if is_folder(folder):
        if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
            folder = folder / "model"  # a run's folder
        config = _read_json(folder / "config.json")
        if "vitfocus" in config and arguments:
            raise VitfocusError(f"{folder} is built as it was saved, so {', '.join(arguments)} cannot be changed.")
        if "vitfocus" in config:
            model = load(folder)
        elif "model_type" in config:
            model = Origin("transformers", str(folder), arguments).build(pretrained=True)
            _attach_tokenizer(model, folder)
        elif "architecture" in config:
            with library_errors(f"timm cannot build the model in {folder}"):
                model = build_timm_folder(folder, arguments)
        else:
            raise VitfocusError(f"{folder / 'config.json'} is not a configuration of vitfocus, transformers or timm.")
    else:
        base, _, rest = name.partition("+")
        if base and any(is_file(Path(base, inner, "config.json")) for inner in ("", "model")):
            raise VitfocusError(
                f"{base} is a folder, which cannot be followed by treatments: add them with --treat {rest}."
            )
        model = create_model(name, **arguments)
    if treat and weights is None:
        treat_(model, treat)
    elif treat:
        insert_all(model, parse_treatments(treat))
    if weights is not None:
        load_weights(model, weights, treat=True)
    return model.eval()


@checked
def push(model: nn.Module | str | Path, repository: str, *, scores: Any = (), **options: Any) -> str:
    """Save a model, with its card, and upload it to the Hugging Face hub.

    Args:
        model: The model to upload, or the folder of one or of a run.
        repository: "USER/NAME"; created if needed.
        scores: What `evaluate` measured, for the model card.
        **options: Passed to `huggingface_hub.HfApi.upload_folder`, such as `commit_message`.

    Returns:
        The address of the upload.

    Raises:
        VitfocusError: If it cannot be inferred how the model was built, or `repository` is no valid name.

    Example:
        >>> push(vf.create_model("deit_small_patch16_224+cb"), "me/deit-small-cb")  # doctest: +SKIP
        'https://huggingface.co/me/deit-small-cb/tree/main/'
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise VitfocusError(f"{repository!r} is not a valid repository name; expected USER/NAME.") from None
    hub = HfApi()
    with tempfile.TemporaryDirectory() as folder:
        model = model.absolute() if isinstance(model, Path) else model
        save(model if isinstance(model, nn.Module) else open_model(str(model)), folder, scores=scores)
        card = Path(folder, "README.md")
        write_text(card, card.read_text(encoding="utf-8").replace("USER/NAME", repository))
        hub.create_repo(repository, exist_ok=True)
        return str(hub.upload_folder(repo_id=repository, folder_path=folder, **options))


def _attach_tokenizer(model: nn.Module, folder: Path) -> None:
    """Attach the tokenizer in a folder to a model that reads text."""
    config: Any = getattr(model, "config", None)
    longest = getattr(config, "max_position_embeddings", None)
    if longest and (tokenizer := QuestionTokenizer.read(folder, int(longest))) is not None:
        attach_tokenizer(model, tokenizer)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name))


def is_pushed(name: str) -> bool:
    """Whether a name on the hub is a folder that `push` uploaded, according to its config.json."""
    if (repository := hub_name(name)) is None:
        return False
    from huggingface_hub import hf_hub_download

    try:
        return "vitfocus" in _read_json(Path(hf_hub_download(repository, "config.json")))
    except (OSError, ValueError):  # no network or no such file: timm raises the error
        return False


def _preprocessing(model: nn.Module) -> PixelSettings:
    wanted = input_spec(model)
    cfg: Any = next((c for module in model.modules() if (c := getattr(module, "pretrained_cfg", None))), {})
    known = {key: cfg[key] for key in ("interpolation", "crop_pct") if key in cfg}
    return PixelSettings(list(wanted.mean), list(wanted.std), wanted.size, **known)


def _restore_preprocessing(model: nn.Module, settings: PixelSettings | None) -> None:
    """Restore the preprocessing that was saved, which may differ from that of the model's name."""
    if settings is None:
        return
    remember_normalising(model, settings.mean, settings.std)
    values = {"interpolation": settings.interpolation, "crop_pct": settings.crop_pct}
    known = {key: value for key, value in values.items() if value is not None}
    parts: Any = model.modules()
    for module in parts:
        if known and getattr(module, "pretrained_cfg", None):
            module.pretrained_cfg = {**module.pretrained_cfg, **known}


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any], missing="a saved model is a folder with config.json in it")


def _read_config(folder: Path) -> SavedConfig:
    file = folder / "config.json"
    content = _read_json(file)
    if content.get("format", _FORMAT) != _FORMAT:
        raise VitfocusError(
            f"{folder} was saved in format {content['format']}, and this vitfocus reads format {_FORMAT}."
        )
    return convert(content, SavedConfig, file, writer="vitfocus.save")


def _arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
