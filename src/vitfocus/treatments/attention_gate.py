"""Attention gates: a sigmoid gate on the output of attention before its projection, computed from attention's input.

"Gated Attention for Large Language Models" (Qiu et al., NeurIPS 2025). With the normalised input x of attention and the
joined heads y = softmax(q kᵀ / √d) v, the projection receives y ⊙ σ(x W + b): one gate per head, or one per channel. A
closed gate lets a head contribute nothing; without it, the head would have to attend to a token without content (an
attention sink).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy, Block
from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.base import Layers, Treatment, choose_blocks, layers_option, option
from vitfocus.treatments.operations import StatefulModule, Surgeon, TokenSlot
from vitfocus.treatments.surgery import handles

#: Attention whose output has a row for each of its input's tokens.
_KINDS = ("global", "window", "grid", "reduced")

#: The bias of gates that start open: they suppress 1 - σ(10) = 5e-5 of the output.
_OPEN = 10.0


@dataclass(frozen=True)
class AttentionGate(Treatment):
    """A gate on attention's output (`gate`).

    Args:
        per: One gate per "head" or one per "channel".
        init: "open" starts with every gate open, which keeps the output of trained weights; by default gates start half
            open and their weights small and random.
        layers: The blocks, chosen as for `ContextBroadcasting`.

    Example:
        >>> str(AttentionGate(per="channel", init="open"))
        'gate(per=channel,init=open)'
    """

    name: ClassVar[str] = "gate"
    label: ClassVar[str] = "gate"
    about: ClassVar[str] = "A gate computed from attention's input scales each head's output before the projection"

    per: str = option("head", "head", "channel")
    init: str = option("default", "default", "open")
    layers: Layers = layers_option("upper")

    def preserving(self) -> AttentionGate:
        """The form whose gates start open."""
        return replace(self, init="open")

    @property
    def operations_per_element(self) -> int:
        """The product with the gate."""
        return 1


class OutputGating(StatefulModule):
    """The inserted module: multiplies attention's joined heads by the gates of attention's input.

    >>> gate = OutputGating(width=8, mixed=8, heads=2, config=AttentionGate(init="open"))
    >>> tokens, mixed = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    >>> bool(torch.allclose(gate(mixed, gate.store(tokens)), mixed, atol=1e-3))
    True
    """

    def __init__(self, width: int, mixed: int, heads: int, config: AttentionGate) -> None:
        super().__init__()
        self.gates = nn.Linear(width, heads if config.per == "head" else mixed)
        self.width = mixed
        self.source = TokenSlot()
        if config.init == "open":
            nn.init.zeros_(self.gates.weight)
            nn.init.constant_(self.gates.bias, _OPEN)
        else:
            nn.init.trunc_normal_(self.gates.weight, std=0.02)
            nn.init.zeros_(self.gates.bias)

    def store(self, tokens: Tensor) -> Tensor:
        """Store the input of attention (..., C), and return it."""
        if isinstance(tokens, torch.fx.Proxy):
            raise VitfocusError("torch.fx cannot trace attention gates, which store a tensor: use torch.export.")
        self.source.tokens = tokens
        return tokens

    def forward(self, mixed: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The heads' outputs (..., heads * width) times their gates; `tokens` is by default those of `store`."""
        tokens, self.source.tokens = self.source.tokens if tokens is None else tokens, None
        assert tokens is not None
        gates, count = self.gates(tokens).sigmoid(), self.gates.out_features
        if count == self.width:
            return mixed * gates
        return (mixed.unflatten(-1, (count, -1)) * gates[..., None]).flatten(-2)

    def reset(self) -> None:
        """Drop the tokens of the last forward pass."""
        self.source.tokens = None


@handles(AttentionGate)
def insert_gates(config: AttentionGate, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """In every chosen block, compute gates from attention's input and apply them to the input of its projection."""
    able = [block for block in surgeon.ports(anatomy.trunk, "attention.front", "attention.mid") if _fits(block)]
    if not able:
        raise VitfocusError(
            f"{config} gates the attention of each token by the token itself, and {type(anatomy.root).__name__} has "
            "them in different layouts."
        )
    for block in choose_blocks(config.layers, able):
        front, mid = block.ports["attention.front"], block.ports["attention.mid"]
        heads = block.heads
        if config.per == "head" and (not heads or mid.width % heads):
            raise VitfocusError(f"{config} does not know the heads of {block.name}: use per=channel.")
        gating = OutputGating(front.width, mid.width, heads or 1, config)
        surgeon.add(block, "attention.front", "attention_gate", gating)
        surgeon.route(front, gating.store)
        surgeon.route(mid, gating)


def _fits(block: Block) -> bool:
    """Whether the same tokens, channels last, are at the input of attention and of its projection."""
    layouts = {block.ports[place].layout for place in ("attention.front", "attention.mid")}
    return len(layouts) == 1 and "BCHW" not in layouts and block.attention_kind in _KINDS
