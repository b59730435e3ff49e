"""Load weights (safetensors, or torch files without code) into a model, which is unchanged if they do not fit."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.serialization import safe_globals

from vitfocus.anatomy import Block, anatomy, unwrap
from vitfocus.core.arguments import checked, require_values
from vitfocus.core.errors import VitfocusError, reason, warn
from vitfocus.core.files import digest
from vitfocus.core.modules import is_trained, mark_inserted, unnest_checkpoint
from vitfocus.treatments.base import Treatment, choose_blocks
from vitfocus.treatments.spec import is_record, parse_treatments, recorded_treatments
from vitfocus.treatments.surgery import added_names, applied, insert_all, mark_insertion, surgeons, untreat_


class LoadReport(NamedTuple):
    """What became of each name. Those in `new` belong to treatments and are not in the checkpoint."""

    loaded: list[str]
    new: list[str]
    missing: list[str]
    unexpected: list[str]


@checked
def load_weights(
    model: nn.Module,
    source: str | Path | Mapping[str, Any],
    *,
    strict: bool = True,
    trained_with: Sequence[str] = (),
    treat: bool = False,
) -> LoadReport:
    """Load a checkpoint into a model and report what became of each name.

    A plain checkpoint loads into a treated model: the parameters of the treatments keep their values. If such a
    treatment changes what the weights compute, a `VitfocusWarning` says so. If the checkpoint does not fit, the model
    is left unchanged.

    Args:
        model: The model, treated or not.
        source: A file (safetensors, or a torch file without code) or a state dict.
        strict: Whether names that are missing or unexpected are an error; those of treatments may be missing.
        trained_with: Specs of treatments that the weights were trained with. Needed only for checkpoints without a
            record of their treatments, if a treatment has no parameters.
        treat: Whether a model without treatments receives those that the checkpoint records.

    Returns:
        The names that were `loaded`, those of treatments that are `new`, and those `missing` and `unexpected`.

    Raises:
        VitfocusError: The file cannot be read, or the checkpoint does not fit the model.

    Example:
        >>> import timm, vitfocus as vf
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> treated = vf.treat_(timm.create_model("vit_tiny_patch16_224", depth=1), "cbs")
        >>> load_weights(treated, model.state_dict()).new
        ['vitfocus_treatments', 'blocks.0.context_mlp.context_scale']
        >>> _ = load_weights(model, treated.state_dict(), treat=True)
        >>> [str(treatment) for treatment in vf.applied(model)]
        ['cbs']
    """
    model = unwrap(model)
    label = "the state dict" if isinstance(source, Mapping) else str(source)
    content = source if isinstance(source, Mapping) else read_weights(Path(source))
    tensors = unnest_checkpoint(content, model.state_dict().keys())
    recorded = recorded_treatments(tensors, label)
    trained_with = [*trained_with, *map(str, recorded)]
    if recorded and not applied(model):
        if treat:
            insert_all(model, recorded)
            try:
                return load_weights(model, tensors, strict=strict, trained_with=trained_with)
            except VitfocusError as error:
                untreat_(model)
                raise VitfocusError(str(error).replace("the state dict", label)) from None
        if strict:
            raise VitfocusError(
                f"{label} was saved with {'+'.join(map(str, recorded))}, and the model has no treatment: add "
                f"+{'+'.join(map(str, recorded))} to its spec (in Python: treat=True); nothing was loaded."
            )
    names, added = model.state_dict().keys(), added_names(model)
    if tensors.keys() not in (names, names - added):
        tensors = _library_names(model, tensors)
    found = [name for name in names if name in tensors]
    new = [name for name in names if name not in tensors and name in added]
    missing = [name for name in names if name not in tensors and name not in added]
    unexpected = [name for name in tensors if name not in names]
    if strict:
        require_names(label, missing, unexpected)
    copy_into(model, {name: tensors[name] for name in found}, label)
    mark_untrained_treatments(model, found, trained_with)
    return LoadReport(found, new, missing, unexpected)


def mark_untrained_treatments(model: nn.Module, loaded: Collection[str], trained_with: Sequence[str] = ()) -> None:
    """Mark the treatments that the weights just loaded, given by their names, were not trained with.

    A treatment without parameters counts as trained if the parameters of another one were loaded. Treatments of another
    kind or in other places than those in `trained_with` are named in a warning.
    """
    mark_inserted(model, ())
    if trained_with:
        differences = treatment_differences(model, trained_with)
        if differences and is_trained(anatomy(model).root):
            mark_inserted(model, [spec for spec in map(str, applied(model)) if spec not in trained_with])
            warn(f"These weights were trained with other treatments: {'; '.join(differences)}. Train on, or use those.")
        return
    names = [(surgeon.treatment, added_names(model, surgeon)) for surgeon in surgeons(model)]
    learned = set[str]().union(*(added for _, added in names)).intersection(loaded)
    mark_insertion(model, [treatment for treatment, added in names if not (added or learned) & learned])


def treatment_differences(model: nn.Module, trained_with: Sequence[str]) -> list[str]:
    """How a model's treatments differ, in kind or place, from those that its weights were trained with.

    >>> import timm, vitfocus as vf
    >>> model = vf.treat_(timm.create_model("vit_tiny_patch16_224", depth=4), "cb(layers=[1,2])")
    >>> treatment_differences(model, ["cb(layers=upper)"]), treatment_differences(model, ["cb(layers=[1,2])"])
    (['cb was in blocks 2, 3, and here it is in blocks 1, 2'], [])
    """
    trained = [treatment for spec in trained_with for treatment in parse_treatments(spec)]
    trunk = anatomy(model).trunk
    before, now = ({_kind(one): _depths(one, trunk) for one in found} for found in (trained, applied(model)))
    return [
        f"{kind} was in {before.get(kind, 'no block')}, and here it is in {now.get(kind, 'no block')}"
        for kind in dict.fromkeys([*before, *now])
        if before.get(kind) != now.get(kind)
    ]


def _kind(treatment: Treatment) -> str:
    """A treatment's spec, reduced to the options that are choices: the kind, and the place within a block."""
    numbers = {f.name: f.default for f in fields(treatment) if not f.metadata.get("choices")}
    try:
        return str(replace(treatment, **numbers))
    except VitfocusError:  # an option has no valid default
        return str(treatment)


def _depths(treatment: Treatment, trunk: Sequence[Block]) -> str:
    layers = getattr(treatment, "layers", "all")
    try:
        return "blocks " + ", ".join(str(block.depth) for block in choose_blocks(layers, trunk))
    except VitfocusError:  # such as "inner" in a model without a pyramid
        return f"layers={layers}"


def read_weights(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """The content of a weights file, checked against its digest if one is given."""
    if not path.is_file():
        raise VitfocusError(f"There is no weights file {path}.")
    try:
        if sha256 is not None and digest(path) != sha256:
            raise VitfocusError(
                f"{path} is not the file that was saved (its SHA-256 differs): it is truncated or was changed."
            )
        if path.suffix == ".safetensors":
            return load_file(path)
        with safe_globals([argparse.Namespace]):  # training scripts save their arguments beside the weights
            content = torch.load(path, map_location="cpu", weights_only=True)
    except VitfocusError:
        raise
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise VitfocusError(f"{path} cannot be read as weights: {reason(error)}.") from None
    except Exception:  # the errors of the unpickler advise to run the code in the file
        raise VitfocusError(
            f"{path} is not a file of weights or holds more than tensors and plain values; nothing was loaded."
        ) from None
    if not isinstance(content, Mapping):
        raise VitfocusError(f"{path} holds a {type(content).__name__}, not a state dict.")
    return dict(content)


def _library_names(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names translated by the model's library from those of published checkpoints."""
    if hasattr(model, "from_pretrained") and hasattr(model, "config"):
        return _transformers_names(model, tensors)
    translate = getattr(sys.modules.get(type(model).__module__), "checkpoint_filter_fn", None)
    if translate is None:
        return tensors
    try:
        translated = translate(dict(tensors), model)
    except Exception:
        return tensors
    return dict(translated) if isinstance(translated, Mapping) else tensors


def _transformers_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of a transformers model in memory; its loader translates those in files."""
    try:
        loaded, report = type(model).from_pretrained(
            None, config=copy.deepcopy(model.config), state_dict=dict(tensors), output_loading_info=True
        )
    except Exception:  # names or shapes do not fit
        return tensors
    unexpected = {name: tensors[name] for name in report["unexpected_keys"] if name in tensors}
    return {key: value for key, value in loaded.state_dict().items() if key not in report["missing_keys"]} | unexpected


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model, with the whole of every tensor that FSDP has sharded; every process takes part.

    Raises:
        VitfocusError: A tensor is not one of plain numbers, such as a quantised one.
    """
    state: dict[str, Any] = model.state_dict()
    for name, tensor in state.items():
        if hasattr(tensor, "full_tensor"):
            state[name] = tensor = tensor.full_tensor().cpu()
        if type(tensor) not in (Tensor, nn.Parameter):
            raise VitfocusError(
                f"{name} has the type {type(tensor).__name__}, and only plain tensors can be saved: save the model "
                "before it is quantised, and quantise it again after loading."
            )
    return state


def require_names(label: str, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Refuse a checkpoint that lacks names or has unexpected ones."""
    if missing or unexpected:
        parts = [
            f"{word} {', '.join(sorted(names)[:3])}{' and more' if len(names) > 3 else ''} ({len(names)})"
            for word, names in (("lacks", missing), ("has unexpected", unexpected))
            if names
        ]
        raise VitfocusError(f"{label} does not fit the model: it {' and '.join(parts)}; nothing was loaded.")


def copy_into(model: nn.Module, tensors: Mapping[str, Tensor], label: str) -> None:
    """Copy tensors into a model by name, after checking every shape and that weights are real numbers."""
    current = model.state_dict()
    for name, tensor in tensors.items():
        require_values(name, tensor)
        if current[name].shape != tensor.shape and not is_record(name):
            raise VitfocusError(
                f"{label} does not fit the model: {name} is {tuple(tensor.shape)} there and "
                f"{tuple(current[name].shape)} in the model; nothing was loaded."
            )
        if current[name].is_floating_point() and not tensor.is_floating_point():
            raise VitfocusError(
                f"{label} does not fit the model: {name} is {str(tensor.dtype).removeprefix('torch.')} there, and the "
                "model takes floating-point weights; nothing was loaded."
            )
    model.load_state_dict(dict(tensors), strict=False)
