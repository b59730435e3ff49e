"""Whether weights are trained, and whether they were trained since treatments were inserted.

Untrained weights are recognised by their norms, layer scales and biases, which are initialised to constants (biases of
linear layers: within torch's bounds) and change with the first step. A model that was treated after training is marked
with a few values of every parameter: if one of them has changed, the model was trained further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitfocus.anatomy.registry import unwrap

MARK = "_vitfocus_inserted"
_VALUES = 4  # of each parameter that a mark remembers
_PRECISIONS = (torch.float64, torch.float16, torch.bfloat16)


def is_trained(model: nn.Module) -> bool:
    """Whether a model's weights differ from an initialisation; False on the meta device, which holds no values.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> is_trained(model)
    False
    >>> _ = nn.init.normal_(model[1].weight)
    >>> is_trained(model)
    True
    """
    return any(_has_moved(module) for module in model.modules())


def mark_inserted(model: nn.Module, specs: Sequence[str]) -> None:
    """Mark a model as given these treatments after its weights were last trained; without specs, remove the mark.

    Treatments that the model is already marked with stay on the mark.
    """
    model = unwrap(model)
    known = [spec for spec in inserted(model) if spec not in specs] if specs else []
    for module in model.modules():
        module.__dict__.pop(MARK, None)
    if specs:
        model.__dict__[MARK] = _Mark((*known, *specs), _sample(model))


def inserted(model: nn.Module) -> tuple[str, ...]:
    """The treatments that were inserted after a model's weights were last trained."""
    marked = [(module, module.__dict__[MARK]) for module in unwrap(model).modules() if MARK in module.__dict__]
    return tuple(spec for module, mark in marked if mark.holds(module) for spec in mark.specs)


def insertion_sentence(specs: str, model: str = "") -> str:
    """The sentence that goes with numbers measured on such a model; empty if there are no such treatments.

    >>> insertion_sentence("cbs")
    'cbs was inserted after the weights were last trained: this measures an insertion, not a method; train on first.'
    """
    if not specs:
        return ""
    of = f" into {model}" if model else ""
    return (
        f"{specs} was inserted{of} after the weights were last trained: this measures an insertion, not a method; "
        "train on first."
    )


def insertions_sentence(sentences: Mapping[str, str]) -> str:
    """The same for several models, given by name, in one sentence.

    >>> insertions_sentence({"a": "cbs was inserted into a.", "b": "tap was inserted into b."})
    'a and b carry treatments that were inserted after their weights were last trained: this measures insertions, not \
methods; train on first.'
    """
    if len(sentences) < 2:
        return "".join(sentences.values())
    *first, last = sentences
    return (
        f"{', '.join(first)} and {last} carry treatments that were inserted after their weights were last trained: "
        "this measures insertions, not methods; train on first."
    )


@dataclass(frozen=True)
class _Mark:
    specs: tuple[str, ...]
    values: dict[str, Tensor]

    def holds(self, model: nn.Module) -> bool:
        """Whether every parameter that is still there is as it was, up to a change of precision."""
        now = _sample(model)
        common = [name for name in self.values if name in now]
        return bool(common) and all(_same(self.values[name], now[name]) for name in common)


def _has_moved(module: nn.Module) -> bool:
    own = {name: p for name, p in module.named_parameters(recurse=False) if _readable(p)}
    kept = {name: b for name, b in module.named_buffers(recurse=False) if name.startswith("running_") and _readable(b)}
    weight = own.get("weight")
    for name, value in (*own.items(), *kept.items()):
        if value.ndim != 1 or len(value) < 2 or "embed" in name or "token" in name:
            continue  # CLIP's class embedding is a vector that starts at random
        value = value.detach().float()
        moved = bool((value != value[0]).any())
        if moved and name == "bias" and weight is not None and weight.ndim > 1:
            moved = float(value.abs().max()) > 1.001 * weight[0].numel() ** -0.5
        if moved:
            return True
    return False


def _readable(value: Tensor) -> bool:
    return value.is_floating_point() and not value.is_meta and not hasattr(value, "full_tensor")


def _sample(model: nn.Module) -> dict[str, Tensor]:
    sample = {}
    for name, parameter in model.named_parameters():
        if _readable(parameter) and parameter.numel():
            flat = parameter.detach().reshape(-1)
            sample[f"{name} {tuple(parameter.shape)}"] = flat[:: -(-len(flat) // _VALUES)].to("cpu", copy=True)
    return sample


def _same(then: Tensor, now: Tensor) -> bool:
    return any(torch.equal(then.to(precision).to(now.dtype), now) for precision in _PRECISIONS)
