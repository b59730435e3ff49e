"""timm's optimiser with timm's groups: no decay on vectors, layer-wise decay where asked for."""

from __future__ import annotations

from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn
from torch.optim import Optimizer

from vitfocus.errors import VitfocusError, nearest
from vitfocus.train.sections import Optimiser


def create_optimiser(model: nn.Module, section: Optimiser, device: torch.device) -> Optimizer:
    """Build it for the parameters that are trained."""
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
    except TypeError as error:
        raise VitfocusError(f"The optimiser {section.name} cannot be built: {error}.") from None
    return optimiser
