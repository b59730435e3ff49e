"""Muon with the Newton-Schulz iteration of all matrices of one shape in one batched product.

timm's Muon orthogonalises one matrix at a time. A ViT has a dozen matrices of each shape, each too small to fill a GPU,
so the iteration takes longer than its arithmetic. Everything but the order of the work is timm's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from timm.optim.muon import (
    _COEFFICIENTS,
    Muon,
    _is_suitable_for_muon,
    get_lr_scale,
    resolve_ns_coefficients,
    zeropower_via_newtonschulz,
)
from torch import Tensor


class BatchedMuon(Muon):
    """timm's `Muon`: same arguments, groups and state. Vectors and what cannot be batched are left to timm.

    Example:
        >>> layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        >>> optimiser = BatchedMuon(layers.parameters(), lr=1e-3)
        >>> layers(torch.ones(1, 8)).sum().backward()
        >>> optimiser.step()
        >>> sorted(optimiser.state[layers[0].weight])
        ['momentum_buffer', 'use_muon']
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated: list[tuple[Tensor, Tensor | None]] = []
        for group in self.param_groups:
            if group["algo"] == "muon" and group["conv_mode"] == "flatten":
                matrices = [p for p in group["params"] if p.grad is not None and self._is_matrix(p, group)]
                self._update(matrices, group)
                updated += [(p, p.grad) for p in matrices]
        for parameter, _ in updated:  # timm's step passes over parameters without a gradient
            parameter.grad = None
        super().step()
        for parameter, gradient in updated:
            parameter.grad = gradient
        return loss

    def _is_matrix(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Whether Muon updates the parameter, by timm's rules; AdamW updates the others."""
        state = self.state[parameter]
        if "use_muon" not in state:
            asked = not group.get("use_fallback", False) and group.get("use_muon", True)
            state["use_muon"] = bool(asked and _is_suitable_for_muon(parameter))
        return bool(state["use_muon"])

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        if not matrices:
            return
        for parameter in matrices:
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        gradients = [parameter.grad for parameter in matrices if parameter.grad is not None]
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in matrices]
        torch._foreach_lerp_(momenta, gradients, 1.0 - group["momentum"])
        directions = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, parameter in enumerate(matrices):
            by_shape[(parameter.shape[0], parameter.shape[1:].numel())].append(index)
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        for shape, indices in by_shape.items():
            orthogonal = zeropower_via_newtonschulz(
                torch.stack([directions[index].reshape(shape) for index in indices]),
                group["ns_steps"],
                resolve_ns_coefficients(group["ns_coefficients"], _COEFFICIENTS),
                eps=group["eps"],
                safety_factor=group["safety_factor"],
                scale_eps=group["scale_eps"],
            )
            scale = get_lr_scale(torch.Size(shape), group["adjust_lr_fn"]) if group["adjust_lr_fn"] else 1.0
            change = orthogonal.to(matrices[indices[0]].dtype) * (-group["lr"] * scale)
            parameters = [matrices[index] for index in indices]
            torch._foreach_add_(parameters, [part.view_as(p) for part, p in zip(change, parameters, strict=True)])
