"""Uniform heads: attention in which some channels receive the mean of the values.

Rows A, B and C of Table 1 in "Scratching Visual Transformer's Back with Uniform Attention". A (`replace`): one head has
no queries and keys and averages. B (`replace_matched`): the same, with the queries and keys of the other heads widened
so that the number of parameters is that of the original. C (`append`): the width of the attention is doubled and the
added half averages; its queries and keys count among the paper's 29M parameters and are never read, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfocus.anatomy import Anatomy
from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.base import Treatment, option
from vitfocus.treatments.operations import Surgeon
from vitfocus.treatments.surgery import handles

_VIT_ATTENTION = "timm.layers.attention.Attention"


@dataclass(frozen=True)
class UniformHead(Treatment):
    """Uniform attention instead of heads (`uniform`); it changes the width, so it is for training from scratch.

    Args:
        mode: "replace", "replace_matched" or "append": rows A, B and C of the paper's Table 1.

    Example:
        >>> str(UniformHead(mode="append"))
        'uniform(mode=append)'
    """

    name: ClassVar[str] = "uniform"
    label: ClassVar[str] = "uni"
    colour: ClassVar[int] = 4
    about: ClassVar[str] = "Uniform attention takes the place of a head"
    structural: ClassVar[bool] = True

    mode: str = option("replace", "replace", "replace_matched", "append")


class UniformHeadAttention(nn.Module):
    """Multi-head attention whose last head, or whole second half, is the mean of its values.

    It is built from a ViT's attention and starts from its weights where the shapes agree.
    """

    def __init__(self, original: Any, mode: str) -> None:
        super().__init__()
        dim, heads = original.qkv.in_features, original.num_heads
        self.num_heads = heads if mode == "append" else heads - 1
        self.head_dim = original.head_dim
        inner = heads * original.head_dim
        uniform = inner if mode == "append" else original.head_dim
        self.value_dim = inner + uniform if mode == "append" else inner
        self.qk_dim = {
            "replace": inner - uniform,
            "replace_matched": round(inner / self.num_heads) * self.num_heads,
            "append": 2 * inner,
        }[mode]
        self.attended = self.value_dim - uniform
        self.read = self.qk_dim // 2 if mode == "append" else self.qk_dim
        self.qkv = nn.Linear(dim, 2 * self.qk_dim + self.value_dim, bias=original.qkv.bias is not None)
        self.q_norm = nn.Identity()
        self.k_norm = nn.Identity()
        self.attn_drop = nn.Dropout(original.attn_drop.p)
        self.proj = nn.Linear(self.value_dim, original.proj.out_features, bias=original.proj.bias is not None)
        self.proj_drop = nn.Dropout(original.proj_drop.p)
        self._start_from(original, inner)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, N, C) to the same."""
        queries, keys, values = self.qkv(x).split((self.qk_dim, self.qk_dim, self.value_dim), dim=-1)
        heads = (self.num_heads, -1)
        query, key = (part[..., : self.read].unflatten(-1, heads) for part in (queries, keys))
        value = values[..., : self.attended].unflatten(-1, heads)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=attn_mask,
            dropout_p=self.attn_drop.p if self.training else 0.0,
            is_causal=is_causal,
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        uniform = values[..., self.attended :].mean(dim=1, keepdim=True).expand(-1, x.shape[1], -1)
        return self.proj_drop(self.proj(torch.cat((mixed, uniform), dim=-1)))

    @torch.no_grad()
    def _start_from(self, original: Any, inner: int) -> None:
        for layer in (self.qkv, self.proj):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        old = (
            original.qkv.weight.split(inner),
            original.qkv.bias.split(inner) if original.qkv.bias is not None else None,
        )
        starts = (0, self.qk_dim, 2 * self.qk_dim)
        for part, start in enumerate(starts):
            count = inner if part == 2 else min(self.read, inner)
            if part < 2 and self.read not in (inner, inner - self.head_dim):
                continue
            self.qkv.weight[start : start + count] = old[0][part][:count]
            if old[1] is not None:
                self.qkv.bias[start : start + count] = old[1][part][:count]
        self.proj.weight[:, :inner] = original.proj.weight
        if original.proj.bias is not None:
            self.proj.bias.copy_(original.proj.bias)


@handles(UniformHead)
def insert_uniform_head(config: UniformHead, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Replace every block's attention."""
    for block in anatomy.trunk:
        original: Any = block.attention
        kind = f"{type(original).__module__}.{type(original).__qualname__}"
        if kind != _VIT_ATTENTION:  # in full: BEiT's is called Attention too
            raise VitfocusError(
                f"{config} rebuilds plain ViT attention ({_VIT_ATTENTION}), and {block.name} has "
                f"{'none' if original is None else kind}."
            )
        if original.num_heads < 2 and config.mode != "append":
            raise VitfocusError(f"{config} needs at least two heads, and {block.name} has one: use mode=append.")
        parts = {name: getattr(original, name, None) for name in ("q_norm", "k_norm", "norm", "gate")}
        extras = [name for name, part in parts.items() if not isinstance(part, nn.Identity | None)]
        if extras:
            raise VitfocusError(f"{config} cannot widen {' and '.join(extras)} in {block.name}.attn.")
        with original.qkv.weight.device:
            module = UniformHeadAttention(original, config.mode)
        surgeon.replace(block, "attention", module)
