"""One more half-block after the last: the experiment of Figure 3 in the Context Broadcasting paper.

It asks whether one more attention or one more MLP helps a ViT more. Both cost about the same: attention has 4d²
weights, so the MLP has a hidden width of 2d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from timm.layers import Attention, Mlp
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy, Port
from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.base import Treatment, option
from vitfocus.treatments.operations import Surgeon
from vitfocus.treatments.surgery import handles


@dataclass(frozen=True)
class ExtraBlock(Treatment):
    """One more attention or MLP after the last block (`extra`), with its norm and its shortcut.

    Args:
        kind: "attention" or "mlp".

    Example:
        >>> str(ExtraBlock(kind="mlp"))
        'extra(kind=mlp)'
    """

    name: ClassVar[str] = "extra"
    label: ClassVar[str] = "+"
    colour: ClassVar[int] = 5
    about: ClassVar[str] = "One more attention or MLP follows the last block"

    kind: str = option("attention", "attention", "mlp")


class HalfBlock(nn.Module):
    """x + layer(norm(x)) on (B, N, C).

    >>> import torch
    >>> HalfBlock("mlp", width=8, heads=2)(torch.randn(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, kind: str, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.layer = Attention(width, heads, qkv_bias=True) if kind == "attention" else Mlp(width, 2 * width)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, C) to the same."""
        return tokens + self.layer(self.norm(tokens))


@handles(ExtraBlock)
def insert_extra_block(config: ExtraBlock, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Put a half-block after the last block."""
    last = anatomy.trunk[-1]
    heads = last.heads
    plain = last.layout == "BNC" and last.attention_kind == "global" and anatomy.text is None
    if not plain or not heads or last.width % heads:
        raise VitfocusError(
            f"{config} follows a plain ViT's last block, and {last.name} of {type(anatomy.root).__name__} has "
            f"{last.attention_kind} attention on {last.layout} tokens."
        )
    half = HalfBlock(config.kind, last.width, heads)
    surgeon.add(last, "block.end", "extra", half)
    surgeon.route(Port(last.host, "output", last.layout, last.width), half)
