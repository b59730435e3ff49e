"""The CB_S profile: how much uniform attention each layer's learned scaling asks for (CB's Figure 8)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def scaling_profile(scale: Tensor) -> dict[str, float]:
    """The numbers of one layer's scaling weights λ, one a channel.

    `scaling_ratio` is |λ|₀.₁ / |λ|₀.₉, the 10 % quantile of the magnitudes over the 90 % one: near 1 where all channels
    are scaled alike; absent while all are zero. `scaling_mean` is their mean, `scaling_magnitude` that of |λ|.

    >>> scaling_profile(torch.tensor([0.5, 1.0, -1.0, 1.0, 1.0]))["scaling_mean"]
    0.5
    """
    scale = scale.detach().double().flatten().cpu()
    low, high = torch.quantile(scale.abs(), torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    profile = {"scaling_ratio": low / high} if high > 0 else {}
    return profile | {"scaling_mean": float(scale.mean()), "scaling_magnitude": float(scale.abs().mean())}


def context_scale(host: nn.Module) -> Tensor | None:
    """The scaling weights a block carries, or None: every parameter named `context_scale` in it, joined."""
    found = [value for name, value in host.named_parameters() if name.rpartition(".")[2] == "context_scale"]
    return torch.cat([value.detach().flatten() for value in found]) if found else None
