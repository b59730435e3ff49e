"""The baselines of the Context Broadcasting paper: uniform heads, squeeze-and-excitation, and one more half-block.

"Scratching Visual Transformer's Back with Uniform Attention" (Hyeon-Woo et al., ICCV 2023).

Uniform heads (rows A, B and C of Table 1): some channels of attention receive the mean of the values. A (`replace`):
one head has no queries and keys and averages. B (`replace_matched`): the same, with the queries and keys of the other
heads widened so that the number of parameters is that of the original. C (`append`): the width of the attention is
doubled and the added half averages; its queries and keys count among the paper's 29M parameters and are never read.

Squeeze-and-excitation after the MLP (Table 3): the mean token m is squeezed to d/r channels and expanded to a gate,
x_i ⊙ σ(W₂ ReLU(W₁ m)) (Hu et al., CVPR 2018).

One more half-block after the last (Figure 3) asks whether one more attention or one more MLP helps a ViT more. Both
cost about the same: attention has 4d² weights, so the MLP has a hidden width of 2d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from timm.layers import Attention, Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from vitfocus.anatomy import Anatomy, Port
from vitfocus.core.errors import VitfocusError
from vitfocus.kernels.context.reference import TOKEN_AXES, token_mean
from vitfocus.treatments.base import Layers, Treatment, choose_blocks, layers_option, number_option, option
from vitfocus.treatments.operations import ForwardContext, Surgeon, track_sequence
from vitfocus.treatments.surgery import handles

_VIT_ATTENTION = "timm.layers.attention.Attention"


@dataclass(frozen=True)
class UniformHead(Treatment):
    """Uniform attention instead of heads (`uniform`), for training from scratch, because it changes the width.

    Args:
        mode: "replace", "replace_matched" or "append": rows A, B and C of the paper's Table 1.

    Example:
        >>> str(UniformHead(mode="append"))
        'uniform(mode=append)'
    """

    name: ClassVar[str] = "uniform"
    label: ClassVar[str] = "uni"
    colour: ClassVar[int] = 4
    about: ClassVar[str] = "Uniform attention replaces a head"
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


@dataclass(frozen=True)
class SqueezeExcitation(Treatment):
    """Squeeze-and-excitation (`se`) at the end of the MLP.

    Args:
        reduction: Factor by which the channels are squeezed.
        layers: The blocks, chosen as for `ContextBroadcasting`.

    Example:
        >>> str(SqueezeExcitation(reduction=8))
        'se(reduction=8)'
    """

    name: ClassVar[str] = "se"
    label: ClassVar[str] = "SE"
    colour: ClassVar[int] = 3
    about: ClassVar[str] = "Squeeze-and-excitation scales each channel by a gate computed from the mean token"

    reduction: int = number_option(4, 1)
    layers: Layers = layers_option("upper")

    @property
    def operations_per_element(self) -> int:
        """One for the mean and one for the product with the gate."""
        return 2


class ChannelGate(nn.Module):
    """The inserted module.

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
    if anatomy.found_by == "structure":  # the host may return something else than the tokens of the block
        surgeon.ports([last], "block.end")
    end = last.ports.get("block.end", Port(last.host, "output", last.layout, last.width))
    plain = end.layout == "BNC" and last.attention_kind == "global" and anatomy.text is None
    if not plain or not heads or last.width % heads:
        raise VitfocusError(
            f"{config} follows a plain ViT's last block, and {last.name} of {type(anatomy.root).__name__} has "
            f"{last.attention_kind} attention on {end.layout} tokens."
        )
    half = HalfBlock(config.kind, last.width, heads)
    surgeon.add(last, "block.end", "extra", half)
    surgeon.route(end, half)
