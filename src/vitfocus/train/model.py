"""From a recipe to the model that is trained, and which of its parameters are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitfocus.anatomy import anatomy
from vitfocus.errors import VitfocusError
from vitfocus.train.recipe import Recipe
from vitfocus.treatments.origin import split_library
from vitfocus.treatments.spec import split_spec
from vitfocus.treatments.store import create_model, load, load_weights
from vitfocus.treatments.surgery import added_names


def build_model(recipe: Recipe, classes: int) -> nn.Module:
    """The model of a recipe, its random weights drawn from the recipe's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.engine.seed)
        model = create_model(recipe.model.spec, recipe.model.pretrained, **model_arguments(recipe, classes))
    if recipe.model.weights:
        start_from(model, recipe.model.weights)
    return model


def model_arguments(recipe: Recipe, classes: int) -> dict[str, Any]:
    """What the model's constructor is given: the number of classes, the image size where it is not the usual one."""
    library, name = split_library(split_spec(recipe.model.spec)[0])
    given = dict(recipe.model.arguments)
    if library == "transformers":
        return {"num_labels": classes, **given}
    arguments: dict[str, Any] = {"num_classes": classes}
    if library == "timm":
        import timm

        import vitfocus.models  # noqa: F401  registers FAN, RVT, PVT and LocalViT

        usual = timm.get_pretrained_cfg(name) if timm.is_model(name.partition(".")[0]) else None
        if usual is not None and usual.input_size[-1] != recipe.data.size:
            arguments["img_size"] = recipe.data.size
        if recipe.model.drop_path:
            arguments["drop_path_rate"] = recipe.model.drop_path
    return {**arguments, **given}


def start_from(model: nn.Module, source: str) -> None:
    """Load weights from a file or a saved folder; a classifier of another number of classes is left as it is."""
    tensors = load(source).state_dict() if Path(source).is_dir() else _read(Path(source))
    own = model.state_dict()
    heads = {name for name in own if name.split(".")[0] in ("head", "head_dist", "fc", "classifier", "heads")}
    other = {name for name in heads if name in tensors and tensors[name].shape != own[name].shape}
    kept = {name: value for name, value in tensors.items() if name not in other}
    report = load_weights(model, kept, strict=not other)
    wrong = [name for name in (*report.missing, *report.unexpected) if name not in other]
    if wrong:
        raise VitfocusError(f"{source} does not fit {type(model).__name__}: {', '.join(wrong[:4])}.")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise VitfocusError(f"There is no weights file {path}.")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    content: Any = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict_ema", "state_dict", "model_ema", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    return dict(content)


def choose_trained(model: nn.Module, what: str) -> list[nn.Module]:
    """Freeze what is not trained, and return the normalisations whose running statistics must rest with it."""
    if what == "all":
        return []
    trained = added_names(model)
    if what == "head":
        trained |= _head_names(model)
    names = [name for name, _ in model.named_parameters()]
    if not any(name in trained for name in names):
        raise VitfocusError(f"optimiser.train={what} leaves nothing to train: the treatments add no parameter.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not any(p.requires_grad for p in module.parameters())
    ]


def _head_names(model: nn.Module) -> set[str]:
    found: Any = anatomy(model).root
    heads = found.get_classifier() if hasattr(found, "get_classifier") else None
    parts = {id(p) for head in (heads if isinstance(heads, tuple) else (heads,)) if head for p in head.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in parts}
