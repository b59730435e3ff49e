"""Which parameters of a model are trained."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.surgery import added_names


def choose_trained(model: nn.Module, what: str, heads: Collection[str]) -> list[nn.Module]:
    """Freeze what is not trained, and return the normalisations whose running statistics must rest with it.

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
