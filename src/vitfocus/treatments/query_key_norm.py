"""Query-key normalisation: a layer norm on the queries and keys of every head, against attention that collapses.

"Scaling Vision Transformers to 22 Billion Parameters" (Dehghani et al., ICML 2023): logits that grow without bound make
rows one-hot and training diverge; softmax(norm(q) norm(k)ᵀ / √d) bounds them. It is timm's `qk_norm=True`: one norm for
queries and one for keys, shared by the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from vitfocus.anatomy import Anatomy
from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.base import Layers, Treatment, choose_blocks, layers_option
from vitfocus.treatments.operations import Surgeon
from vitfocus.treatments.surgery import handles


@dataclass(frozen=True)
class QueryKeyNorm(Treatment):
    """Normalised queries and keys (`qknorm`), for training.

    Args:
        layers: The blocks, chosen as for `ContextBroadcasting`.

    Example:
        >>> str(QueryKeyNorm(layers="upper"))
        'qknorm(layers=upper)'
    """

    name: ClassVar[str] = "qknorm"
    label: ClassVar[str] = "QK"
    about: ClassVar[str] = "Layer norms bound the queries and keys of each head"

    layers: Layers = layers_option("upper")

    @property
    def operations_per_element(self) -> int:
        """A mean, a variance, the normalisation, a scale and an offset."""
        return 5


class HeadNorm(nn.LayerNorm):
    """A layer norm over the channels of each head, of tensors (..., head width) or (..., heads * head width).

    >>> import torch
    >>> HeadNorm(4)(torch.randn(2, 5, 12)).shape
    torch.Size([2, 5, 12])
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; the shape is kept."""
        (width,) = self.normalized_shape
        if input.shape[-1] == width:
            return super().forward(input)
        return super().forward(input.unflatten(-1, (-1, width))).flatten(-2)


@handles(QueryKeyNorm)
def insert_norms(config: QueryKeyNorm, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Put a norm where queries and one where keys leave their projections."""
    able = [block for block in anatomy.trunk if block.query_key is not None and block.mixes_tokens_by_attention]
    if not able:
        raise VitfocusError(
            f"{config} needs modules that return queries and keys, and the attention of {type(anatomy.root).__name__} "
            "has none."
        )
    for block in choose_blocks(config.layers, able):
        assert block.query_key is not None
        for name, port in zip(("query_norm", "key_norm"), block.query_key, strict=True):
            if not isinstance(port.module, nn.Identity | nn.Linear):
                raise VitfocusError(f"{block.name} normalises its queries and keys already, so {config} adds nothing.")
            heads = block.heads if isinstance(port.module, nn.Linear) else 1
            if not heads or port.width % heads or not port.width:
                raise VitfocusError(f"{config} does not know the heads of {block.name}.")
            norm = HeadNorm(port.width // heads)
            surgeon.add(block, "attention", name, norm)
            surgeon.route(port, norm)
