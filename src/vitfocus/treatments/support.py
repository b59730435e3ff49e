"""Which family can take which treatment: not a list, but the outcome of trying each on a model without memory."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import nn

from vitfocus.anatomy import Family, anatomy
from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.surgery import treat_, untreat_

#: The specs that the table tries, one a column.
TRIED = ("cb", "cbs", "cb(variant=gate)", "cb(site=attention)", "tap", "adl", "se", "uniform", "extra")


def support(family: Family) -> dict[str, Any]:
    """One row of the table: library, family, kinds of attention, and for each spec whether it can be applied.

    A family whose library is not installed has None everywhere.
    """
    row: dict[str, Any] = {"library": family.library, "family": family.name, "attention": []}
    model = build_example(family)
    if model is None:
        return row | {"treatments": dict.fromkeys(TRIED)}
    row["attention"] = sorted({block.attention_kind for block in anatomy(model)})
    return row | {"treatments": {spec: _takes(model, spec) for spec in TRIED}}


def model_names(library: str, family: str) -> list[str]:
    """The names under which a library builds models of a family; empty where it has no such list."""
    if library == "transformers":
        return []
    if library == "torchvision":
        from torchvision import models

        prefix = {"vision_transformer": "vit", "swin_transformer": "swin", "maxvit": "maxvit"}[family]
        return models.list_models(include=f"{prefix}_*")
    import timm

    import vitfocus.models  # noqa: F401  registers the project's own

    return timm.list_models(module=family) + (timm.list_models(module="deit") if family == "vision_transformer" else [])


def build_example(family: Family) -> nn.Module | None:
    """A small model of the family without memory, or None where its library is not installed."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        if family.library in ("timm", "vitfocus"):
            import timm

            import vitfocus.models  # noqa: F401  registers the project's own

            return timm.create_model(family.example, **family.options)
        try:
            return importlib.import_module(f"vitfocus.anatomy.{family.library}").build_example(family)
        except (ImportError, AttributeError):
            return None


def _takes(model: nn.Module, spec: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            untreat_(treat_(model, spec))
        except VitfocusError:
            return False
    return True
