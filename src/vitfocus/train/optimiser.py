"""timm's optimiser with timm's groups: no decay on vectors, layer-wise decay and a head's own rate where asked for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn
from torch.optim import Optimizer

from vitfocus.errors import VitfocusError, nearest
from vitfocus.train.sections import Optimiser


def create_optimiser(
    model: nn.Module, section: Optimiser, device: torch.device, heads: Collection[str] = ()
) -> Optimizer:
    """Build it for the parameters that are trained; those named in `heads` have `section.head_lr` times the rate."""
    known = [str(name) for name in list_optimizers()]
    if section.name not in known:
        raise VitfocusError(f"timm has no optimiser {section.name!r}: {nearest(section.name, known)}")
    more: dict[str, Any] = {}
    if section.name in ("adam", "adamw"):
        more["fused"] = device.type == "cuda"
    if section.name not in ("sgd", "momentum"):
        more |= {"betas": section.betas, "eps": section.eps}
    try:
        optimiser: Optimizer = create_optimizer_v2(
            model,
            opt=section.name,
            lr=section.lr,
            weight_decay=section.weight_decay,
            layer_decay=section.layer_decay or None,
            **more,
        )
    except (TypeError, ValueError) as error:
        raise VitfocusError(f"The optimiser {section.name} cannot be built: {error}.") from None
    if section.head_lr != 1.0:
        _split_groups(optimiser, {id(p) for name, p in model.named_parameters() if name in heads}, section.head_lr)
    return optimiser


def _split_groups(optimiser: Optimizer, heads: set[int], factor: float) -> None:
    """Divide every group in two, the heads' part with its rate multiplied; `set_rate` reads `lr_scale`."""
    groups = []
    for group in optimiser.param_groups:
        for is_head in (False, True):
            some = [parameter for parameter in group["params"] if (id(parameter) in heads) == is_head]
            scale = group.get("lr_scale", 1.0) * (factor if is_head else 1.0)
            groups += [{**group, "params": some, "lr_scale": scale}] if some else []
    optimiser.param_groups[:] = groups
