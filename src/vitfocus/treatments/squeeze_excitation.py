"""Squeeze-and-excitation after the MLP, the baseline of Context Broadcasting's Table 3.

The mean token m is squeezed to d/r channels and expanded to a gate: x_i ⊙ σ(W₂ ReLU(W₁ m)) (Hu et al., CVPR 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from vitfocus.anatomy import Anatomy
from vitfocus.core.errors import VitfocusError
from vitfocus.kernels.context.reference import TOKEN_AXES, token_mean
from vitfocus.treatments.base import Layers, Treatment, choose_blocks, layers_option
from vitfocus.treatments.operations import ForwardContext, Surgeon, track_sequence
from vitfocus.treatments.surgery import handles


@dataclass(frozen=True)
class SqueezeExcitation(Treatment):
    """Squeeze-and-excitation (`se`) at the end of the MLP.

    Args:
        reduction: Factor by which the channels are squeezed.
        layers: "all", "upper" (the upper half), "upper:K" (the last K blocks), "inner" (not the blocks that feed a
            feature pyramid), a list of block numbers, or several of these joined by "&".

    Example:
        >>> str(SqueezeExcitation(reduction=8))
        'se(reduction=8)'
    """

    name: ClassVar[str] = "se"
    label: ClassVar[str] = "SE"
    colour: ClassVar[int] = 3
    about: ClassVar[str] = "Squeeze-and-excitation scales each channel by a gate computed from the mean token"

    reduction: int = 4
    layers: Layers = layers_option("upper")

    def check(self) -> None:
        """A reduction of at least one."""
        if not isinstance(self.reduction, int) or self.reduction < 1:
            raise VitfocusError(f"se needs a reduction of at least 1, not {self.reduction!r}.")

    @property
    def operations_per_element(self) -> int:
        """One for the mean and one for the product with the gate."""
        return 2


class ChannelGate(nn.Module):
    """The inserted module.

    >>> import torch
    >>> ChannelGate(8, 4, "BNC")(torch.ones(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, width: int, reduction: int, layout: str, context: ForwardContext | None = None) -> None:
        super().__init__()
        self.context = context
        self.axes = TOKEN_AXES[layout]
        self.channels_first = layout == "BCHW"
        self.squeeze = nn.Linear(width, max(1, width // reduction))
        self.expand = nn.Linear(max(1, width // reduction), width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens in the layout of the port; the shape is kept."""
        mean = token_mean(tokens, self.axes, self.context.valid if self.context is not None else None)
        if self.channels_first:
            mean = mean.movedim(1, -1)
        gate = self.expand(self.squeeze(mean).relu()).sigmoid()
        return tokens * (gate.movedim(-1, 1) if self.channels_first else gate)


@handles(SqueezeExcitation)
def insert_squeeze(config: SqueezeExcitation, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Put a `ChannelGate` after the MLP of every chosen block."""
    context = track_sequence(anatomy, surgeon)
    for block in choose_blocks(config.layers, surgeon.ports(anatomy.trunk, "mlp.end")):
        port = block.ports["mlp.end"]
        gate = ChannelGate(port.width, config.reduction, port.layout, context)
        surgeon.insert(block, "mlp.end", "squeeze_excitation", gate)
