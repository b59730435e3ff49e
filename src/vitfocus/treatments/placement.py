"""Where the treatments of a model sit: block by block and place by place, as surgery recorded it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from vitfocus.anatomy import Block, anatomy, unwrap
from vitfocus.treatments.base import Treatment
from vitfocus.treatments.operations import AddHook, AddModule, Operation, Override, SwapModule
from vitfocus.treatments.surgery import Surgeon, surgeons


@dataclass(frozen=True)
class Placement:
    """One treatment at one place of one block: a port's name, "attention.map", "attention" or "block.end"."""

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


def _of_surgeon(surgeon: Surgeon, blocks: list[Block]) -> list[Placement]:
    found = []
    for operation in surgeon.operations:
        for block in blocks:
            place = _place(operation, surgeon.operations, block)
            if place is not None:
                found.append(Placement(surgeon.treatment, block.name, place))
                break
    return found


def _place(operation: Operation, all_of_them: list[Operation], block: Block) -> str | None:
    """Where in this block an operation puts a module, or None if it is not about this block."""
    if isinstance(operation, SwapModule):
        return "attention" if any(module is operation.host for module in block.host.modules()) else None
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
    return "attention.map"
