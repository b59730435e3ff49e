"""Builds the model of a recipe: constructor arguments and initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vitfocus.anatomy import anatomy, inserted
from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.arguments import file_arguments
from vitfocus.treatments.origin import split_library
from vitfocus.treatments.save_load import create_model, load
from vitfocus.treatments.spec import is_record, recorded_treatments, split_spec
from vitfocus.treatments.surgery import added_names, applied
from vitfocus.treatments.weights import load_weights, note_treatments, read_weights

if TYPE_CHECKING:
    from vitfocus.recipes.settings import Recipe

#: Names of a model's classifier in the libraries.
HEADS = ("head", "head_dist", "fc", "classifier", "heads", "cls_classifier", "distillation_classifier")


def over_several_gpus(recipe: Recipe) -> bool:
    """Whether several processes train on GPUs, the only case in which SyncBatchNorm works."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    on_gpus = recipe.engine.device != "cpu" and torch.cuda.is_available()
    return on_gpus and distributed and torch.distributed.get_world_size() > 1


def build_model(recipe: Recipe, classes: int) -> nn.Module:
    """The model of a recipe with a number of classes."""
    return build_with(recipe, model_arguments(recipe, classes))


def build_with(recipe: Recipe, arguments: dict[str, Any]) -> nn.Module:
    """The model of a recipe with these arguments, initialised from the seed, and from `model.weights` if given."""
    model = create_seeded(recipe, arguments)
    if recipe.model.weights:
        start_from(model, recipe.model.weights)
    return model


def create_seeded(recipe: Recipe, arguments: dict[str, Any]) -> nn.Module:
    """The model of a recipe before `model.weights` are loaded; the recipe's own arguments must be on the allow-list."""
    if recipe.model.spec.strip():
        base = split_library(split_spec(recipe.model.spec)[0])
        file_arguments(*base, recipe.model.arguments, "model.arguments")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.engine.seed)
        return create_model(recipe.model.spec, recipe.model.pretrained, **arguments)


def model_arguments(recipe: Recipe, classes: int) -> dict[str, Any]:
    """Arguments of the model's constructor: the number of classes, and the image size if it is not the default.

    Composed models, such as segmenters, accept images of any size and get no image size.
    """
    library, name = split_library(split_spec(recipe.model.spec)[0])
    given = dict(recipe.model.arguments)
    if library == "transformers":
        return {"num_labels": classes, **given}
    arguments: dict[str, Any] = {"num_classes": classes}
    if library != "torchvision":
        import timm

        import vitfocus.models  # noqa: F401  registers FAN, RVT, PVT and LocalViT

        usual = timm.get_pretrained_cfg(name) if timm.is_model(name.partition(".")[0]) else None
        side = recipe.data.enlarge or recipe.data.size
        unusual = library == "timm" and usual is not None and usual.input_size[-1] != side
        if unusual and _takes_image_size(name, usual):
            arguments["img_size"] = side
        if recipe.model.drop_path:
            arguments["drop_path_rate"] = recipe.model.drop_path
    return {**arguments, **given}


def _takes_image_size(name: str, usual: Any) -> bool:
    """Whether the constructor of a timm model takes an image size; models for any size, such as PVTv2, do not."""
    import timm

    ours = timm.model_entrypoint(name).__module__.startswith("vitfocus.")
    return bool(usual.fixed_input_size) or ours


def start_from(model: nn.Module, source: str) -> None:
    """Load weights from a file or a saved folder; a classifier with another number of classes is not loaded.

    A model with a vision transformer inside, such as a segmenter, also accepts the weights of that transformer: its
    classifier is left out, and its position embedding is resized as its library does.
    """
    known: list[str] = []
    if not Path(source).exists():
        place = Path(source).parts
        first = f"train it first (vitfocus train {place[1]}), or " if place[::2] == ("runs", "model") else ""
        raise VitfocusError(f"There is no {source} to start from: {first}name other weights with model.weights=PATH.")
    if Path(source).is_dir():
        saved = load(source)
        tensors = saved.state_dict()
        known = [str(treatment) for treatment in applied(saved) if str(treatment) not in inserted(saved)]
    else:
        tensors = read_weights(Path(source))
    for key in ("state_dict_ema", "state_dict", "model_ema", "model"):
        if isinstance(tensors.get(key), dict):
            tensors = tensors[key]
    if not Path(source).is_dir():
        known = [str(treatment) for treatment in recorded_treatments(tensors, source)]
    tensors = {name: tensor for name, tensor in tensors.items() if not is_record(name)}
    own = model.state_dict()
    root = _transformer_inside(model) if not set(tensors) & set(own) else None
    if root is not None:
        _start_backbone(model, root, tensors, source, known)
        return
    heads = {name for name in own if name.split(".")[0] in HEADS}
    other = {name for name in heads if name in tensors and tensors[name].shape != own[name].shape}
    kept = {name: value for name, value in tensors.items() if name not in other}
    report = load_weights(model, kept, strict=not other, trained_with=known)
    wrong = [name for name in (*report.missing, *report.unexpected) if name not in other]
    if wrong:
        raise VitfocusError(f"{source} does not fit {type(model).__name__}: {', '.join(wrong[:4])}.")


def _transformer_inside(model: nn.Module) -> nn.Module | None:
    try:
        root = anatomy(model).root
    except VitfocusError:
        return None
    return root if root is not model else None


def _start_backbone(model: nn.Module, root: nn.Module, tensors: dict[str, Any], source: str, known: list[str]) -> None:
    """Load the weights of the transformer inside; those of removed parts, such as a classifier, are ignored."""
    prefix = next(name for name, module in model.named_modules() if module is root)
    added = {name.removeprefix(f"{prefix}.") for name in added_names(model)}
    report = load_weights(root, tensors, strict=False)
    parts = {name.split(".")[0] for name in root.state_dict()}
    leftover = [name for name in report.unexpected if name.split(".")[0] in parts]
    missing = [name for name in report.missing if name not in added]
    if missing or leftover or not report.loaded:
        raise VitfocusError(
            f"{source} does not fit the {type(root).__name__} inside {type(model).__name__}: "
            f"{', '.join([*missing, *leftover][:4]) or 'no name agrees'}."
        )
    note_treatments(model, [f"{prefix}.{name}" for name in report.loaded], known)
