"""Where the treatments of a model sit, and which treatments a family of models takes.

Neither is a list: the places come from what surgery did, and the support of a family from trying each treatment on a
model that occupies no memory.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from vitfocus.anatomy import Block, Family, anatomy, build_example, unwrap
from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.base import Treatment, all_treatments
from vitfocus.treatments.operations import AddHook, AddModule, Operation, Override, Surgeon, SwapModule
from vitfocus.treatments.surgery import surgeons, treat_, untreat_


@dataclass(frozen=True)
class Placement:
    """One treatment at one place of one block.

    `place` is a port's name ("mlp.end"), "attention.map" (it reads the attention), "attention" or "mlp" (it replaces
    that part), or "block.end".
    """

    treatment: Treatment
    block: str
    place: str


def placements(model: nn.Module) -> list[Placement]:
    """Every place at which a treatment acts, in order of the treatments and then of depth.

    >>> import timm, vitfocus as vf
    >>> model = vf.treat_(timm.create_model("vit_tiny_patch16_224", depth=2), "cb(layers=[1])+adl(layers=[0])")
    >>> [(p.treatment.name, p.block, p.place) for p in placements(model)]
    [('cb', 'blocks.1', 'mlp.end'), ('adl', 'blocks.0', 'attention.map')]
    """
    records = surgeons(model)
    blocks = list(anatomy(unwrap(model))) if records else []
    return [place for surgeon in records for place in _of_surgeon(surgeon, blocks)]


def columns() -> dict[str, str]:
    """The columns of the support table: heading and the spec that is tried."""
    return {heading: spec for kind in all_treatments() for heading, spec in kind.columns.items()}


def support(family: Family) -> dict[str, Any]:
    """One row of the support table: library, family, kinds of attention, and for each spec whether it can be applied.

    A family whose library is not installed has None everywhere.
    """
    row: dict[str, Any] = {"library": family.library, "family": family.name, "attention": []}
    specs = columns().values()
    model = build_example(family)
    if model is None:
        return row | {"treatments": dict.fromkeys(specs)}
    row["attention"] = sorted({block.attention_kind for block in anatomy(model)})
    return row | {"treatments": {spec: _takes(model, spec) for spec in specs}}


def _takes(model: nn.Module, spec: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            untreat_(treat_(model, spec))
        except VitfocusError:
            return False
    return True


def _of_surgeon(surgeon: Surgeon, blocks: list[Block]) -> list[Placement]:
    found = []
    for operation in surgeon.operations:
        places = ((block, _place(operation, surgeon.operations, block)) for block in blocks)
        found += [Placement(surgeon.treatment, block.name, place) for block, place in places if place is not None][:1]
    return found


def _place(operation: Operation, all_of_them: list[Operation], block: Block) -> str | None:
    """Where in this block an operation puts a module, or None if it is not about this block."""
    if isinstance(operation, SwapModule):
        if not any(module is operation.module for module in block.host.modules()):
            return None
        parts = {"attention": block.attention, "mlp": block.mlp}
        return next((name for name, part in parts.items() if part is operation.module), "block.end")
    if not isinstance(operation, AddModule) or operation.host is not block.host:
        return None
    if block.suffix and not operation.name.endswith(block.suffix):
        return None
    for other in all_of_them:
        gate = other.hook if isinstance(other, AddHook) else other.replacement if isinstance(other, Override) else None
        if getattr(gate, "treat", None) is not operation.module:
            continue
        side = other.side if isinstance(other, AddHook) else getattr(other, "name", "")
        target = getattr(other, "module", None)
        ports = [name for name, port in block.ports.items() if port.module is target and port.side == side]
        return ports[0] if ports else "block.end"
    reads = any(isinstance(other, Override) and other.module is block.attention for other in all_of_them)
    return "attention.map" if reads else "block.end"
