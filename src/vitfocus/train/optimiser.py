"""timm's optimiser with timm's groups: no decay on vectors, layer-wise decay and a head's own rate where asked for."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from msgspec import to_builtins
from msgspec.structs import replace
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.optim.muon import Muon
from torch import nn
from torch.optim import Optimizer

from vitfocus.anatomy import anatomy
from vitfocus.core.errors import VitfocusError, nearest, reason
from vitfocus.recipes.settings import Optimiser
from vitfocus.train.checkpoint import gather_tensors
from vitfocus.train.muon import BatchedMuon
from vitfocus.treatments.surgery import added_names


def create_optimiser(
    model: nn.Module, section: Optimiser, device: torch.device, heads: Collection[str] = ()
) -> Optimizer:
    """Build it for the parameters that are trained; those named in `heads` have `section.head_lr` times the rate."""
    known = [str(name) for name in list_optimizers()]
    if section.name not in known:
        raise VitfocusError(f"timm has no optimiser {section.name!r}: {nearest(section.name, known)}")
    by_timm = hasattr(model, "group_matcher")
    try:
        optimiser = _create(model, section if by_timm else replace(section, layer_decay=0.0), device)
    except (TypeError, ValueError, AssertionError, ImportError) as error:  # some want a GPU or a package
        raise VitfocusError(f"The optimiser {section.name} cannot be built: {reason(error)}.") from None
    _try(section, device)
    if section.layer_decay and not by_timm:
        _scale_groups(optimiser, _layer_scales(model, section.layer_decay))
    if section.head_lr != 1.0:
        _scale_groups(optimiser, {id(p): section.head_lr for name, p in model.named_parameters() if name in heads})
    return optimiser


def _create(model: nn.Module, section: Optimiser, device: torch.device) -> Optimizer:
    more: dict[str, Any] = {}
    if section.name in ("adam", "adamw"):
        more["fused"] = device.type == "cuda"
    if section.name not in ("sgd", "momentum"):
        more["eps"] = section.eps
        if get_optimizer_info(section.name).num_betas == 2:  # Adan has three, and its own values
            more["betas"] = section.betas
    optimiser: Optimizer = create_optimizer_v2(
        model,
        opt=section.name,
        lr=section.lr,
        weight_decay=section.weight_decay,
        layer_decay=section.layer_decay or None,
        **more,
    )
    if type(optimiser) is Muon and device.type == "cuda":  # on a CPU, one matrix after the other is as fast
        optimiser.__class__ = BatchedMuon
    return optimiser


def _try(section: Optimiser, device: torch.device) -> None:
    """Take a step of a tiny model and gather its state, so that a misfit is said before hours of training."""
    with torch.random.fork_rng(devices=[]):
        small = nn.Linear(2, 2).to(device)
    try:
        optimiser = _create(small, replace(section, layer_decay=0.0), device)
        small(torch.ones(1, 2, device=device)).sum().backward()
        optimiser.step()
        json.dumps(to_builtins(gather_tensors(small, optimiser)[1]))
    except Exception as error:  # optimisers raise what they like
        raise VitfocusError(
            f"The optimiser {section.name} cannot train here, where a step is one backward pass and a checkpoint holds "
            f"tensors and plain values: {reason(error)}."
        ) from None


def _layer_scales(model: nn.Module, decay: float) -> dict[int, float]:
    """The factor of every parameter of a model that timm knows no layers of: by the depth of its block.

    What comes before the first block is a layer of its own; what comes after the last has the whole rate.
    """
    try:
        blocks = [block.host for block in anatomy(model)]
    except VitfocusError:
        raise VitfocusError(
            f"optimiser.layer_decay needs to know the layers of {type(model).__name__}, which is no timm model and no "
            "vision transformer that vitfocus knows: leave it out."
        ) from None
    depth = {id(p): number for number, block in enumerate(blocks, start=1) for p in block.parameters()}
    order = [id(parameter) for parameter in model.parameters()]
    last = max((place for place, name in enumerate(order) if name in depth), default=-1)
    scales, layer = {}, 0
    for place, name in enumerate(order):  # what stands between two blocks goes with the one before
        layer = depth.get(name, layer) if place <= last else len(blocks) + 1
        scales[name] = decay ** (len(blocks) + 1 - layer)
    return scales


def _scale_groups(optimiser: Optimizer, scales: Mapping[int, float]) -> None:
    """Split every group by the factor of its parameters, 1 by default, which `set_learning_rate` reads."""
    groups = []
    for group in optimiser.param_groups:
        parts: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(scales.get(id(parameter), 1.0), []).append(parameter)
        for scale, some in parts.items():
            groups.append({**group, "params": some, "lr_scale": group.get("lr_scale", 1.0) * scale})
    optimiser.param_groups[:] = groups


def choose_trained(model: nn.Module, what: str, heads: Collection[str]) -> list[nn.Module]:
    """Freeze what is not trained, and return the batch normalisations that stay in eval mode because of it.

    `what` is "all", "added" (what treatments added) or "head" (that, and the parameters named in `heads`).
    """
    if what == "all":
        return []
    trained = added_names(model)
    if what == "head":
        trained |= set(heads)
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
