"""Context Broadcasting: add the mean of all tokens, which is dense uniform attention, to every token.

"Scratching Visual Transformer's Back with Uniform Attention" (Hyeon-Woo et al., ICCV 2023). With N tokens x_i,

    mean    CB(x_i)   = (x_i + m) / 2            m = (1/N) Σ_j x_j
    scaled  CB_S(x_i) = x_i + Λ ⊙ m              Λ one learned value per channel, initialised to 0
    gate              = x_i ⊙ (x_0 + 1)          x_0 the class token
    hybrid            = x_i ⊙ x_0 + CB(x_i)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy, Block, Port
from vitfocus.core.errors import VitfocusError
from vitfocus.kernels.backends import chosen, exporting
from vitfocus.kernels.context import reference as arithmetic
from vitfocus.kernels.context.op import share_mean
from vitfocus.treatments.base import Layers, Treatment, choose_blocks, layers_option, option
from vitfocus.treatments.operations import ForwardContext, Surgeon, track_sequence
from vitfocus.treatments.surgery import handles


@dataclass(frozen=True)
class ContextBroadcasting(Treatment):
    """Context Broadcasting (`cb`), also with one learned scale per channel (`cbs`).

    Args:
        variant: "mean", "scaled", "gate" or "hybrid", as defined at the top of this module.
        site: Whether it acts on the "mlp", the "attention" or "both".
        position: At the "end" of the site, as the paper recommends, at its "front", or in the "mid": between the two
            linear layers of the MLP, after the activation, or before the output projection of attention.
        layers: "all", "upper" (the upper half), "upper:K" (the last K blocks), "inner" (not the blocks that feed a
            feature pyramid), a list of block numbers, or several of these joined by "&".
        tokens: The tokens that enter the mean and receive it. "image" excludes prefix tokens; in a vision-language
            model "image" and "text" are the two groups, and each may have its own treatment. Padding tokens are always
            excluded.

    Example:
        >>> str(ContextBroadcasting(variant="scaled", layers="upper&inner"))
        'cbs(layers=upper&inner)'
    """

    name: ClassVar[str] = "cb"
    aliases: ClassVar[Mapping[str, Mapping[str, Any]]] = {"cbs": {"variant": "scaled"}}
    label: ClassVar[str] = "CB"
    colour: ClassVar[int] = 0
    about: ClassVar[str] = "Context Broadcasting adds the mean of all tokens to each token"
    columns: ClassVar[Mapping[str, str]] = {
        "cb": "cb",
        "cbs": "cbs",
        "cb gate": "cb(variant=gate)",
        "msa": "cb(site=attention)",
    }

    variant: str = option("mean", "mean", "scaled", "gate", "hybrid")
    site: str = option("mlp", "mlp", "attention", "both")
    position: str = option("end", "end", "mid", "front")
    layers: Layers = layers_option("upper")
    tokens: str = option("all", "all", "image", "text")

    def preserving(self) -> ContextBroadcasting:
        """The scaled variant, whose scale starts at zero."""
        return replace(self, variant="scaled")

    @property
    def operations_per_element(self) -> int:
        """One for the mean and one for its addition; the hybrid also multiplies and adds."""
        return 4 if self.variant == "hybrid" else 2


class ContextBroadcast(nn.Module):
    """The inserted module: tokens in, tokens of the same shape out.

    >>> module = ContextBroadcast(ContextBroadcasting(), "BNC", width=2)
    >>> module(torch.tensor([[[0.0, 0.0], [2.0, 4.0]]]))
    tensor([[[0.5000, 1.0000],
             [1.5000, 3.0000]]])
    """

    context_scale: nn.Parameter | None

    def __init__(
        self,
        config: ContextBroadcasting,
        layout: str,
        width: int,
        prefix_tokens: int = 0,
        context: ForwardContext | None = None,
    ) -> None:
        super().__init__()
        self.variant = config.variant
        self.tokens = config.tokens
        self.layout = layout
        self.axes = arithmetic.TOKEN_AXES[layout]
        self.prefix_tokens = prefix_tokens
        self.context = context
        scale = nn.Parameter(torch.zeros(width)) if config.variant == "scaled" else None
        self.register_parameter("context_scale", scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N, C), (B, H, W, C) or (B, C, H, W), in the layout of the port; the shape is kept."""
        valid = self.context.valid if self.context is not None else None
        if self.tokens == "all" or self.layout != "BNC":
            return self._broadcast(tokens, valid)
        start, stop = self._group(tokens.shape[1])
        part = self._broadcast(tokens[:, start:stop], valid[:, start:stop] if valid is not None else None)
        return torch.cat((tokens[:, :start], part, tokens[:, stop:]), dim=1)

    def _group(self, count: int) -> tuple[int, int]:
        if self.context is None or self.context.text_tokens is None:
            return self.prefix_tokens, count
        return (0, self.context.text_tokens) if self.tokens == "text" else (self.context.text_tokens, count)

    def _broadcast(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        if self.variant == "gate":
            return arithmetic.broadcast_gate(tokens, tokens[:, :1])
        if self.variant != "hybrid" and valid is None and fits_kernel(tokens, self.layout):
            flat = tokens.flatten(1, -2) if self.layout == "BHWC" else tokens
            return share_mean(flat, self.context_scale).view(tokens.shape)
        mean = arithmetic.token_mean(tokens, self.axes, valid)
        if self.variant == "hybrid":
            return arithmetic.broadcast_hybrid(tokens, mean, tokens[:, :1])
        if self.context_scale is None:
            return arithmetic.broadcast_mean(tokens, mean)
        scale = self.context_scale[:, None, None] if self.layout == "BCHW" else self.context_scale
        return arithmetic.broadcast_scaled(tokens, mean, scale)

    def extra_repr(self) -> str:
        """Shown when the model is printed."""
        return f"variant={self.variant}, tokens={self.tokens}"


def fits_kernel(tokens: Tensor, layout: str) -> bool:
    """Whether the kernel takes these tokens: channels last, on a GPU, and not during an export."""
    return layout != "BCHW" and not exporting() and chosen(tokens) == "triton"


@handles(ContextBroadcasting)
def insert_context(config: ContextBroadcasting, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Put a `ContextBroadcast` at every place the record names."""
    sites = ("attention", "mlp") if config.site == "both" else (config.site,)
    places = [f"{site}.{config.position}" for site in sites]
    trunk = surgeon.ports(anatomy.trunk, *places)
    chosen = choose_blocks(config.layers, trunk)
    _refuse_missing_tokens(config, anatomy, [block for block in chosen if not _class_token_at(block, places)])
    context = track_sequence(anatomy, surgeon)
    for block in chosen:
        for site, place in zip(sites, places, strict=True):
            port: Port = block.ports[place]
            prefix_tokens = block.prefix_tokens if port.layout == "BNC" else 0
            module = ContextBroadcast(config, port.layout, port.width, prefix_tokens, context)
            surgeon.insert(block, place, _name(block, site, config), module)


def _name(block: Block, site: str, config: ContextBroadcasting) -> str:
    """The submodule's name, which includes the token group if the other group is treated too."""
    name = f"context_{site}"
    there = getattr(block.host, name + block.suffix, None)
    groups = {config.tokens, getattr(there, "tokens", None)}
    return f"{name}_{config.tokens}" if groups == {"image", "text"} else name


def _class_token_at(block: Block, places: list[str]) -> bool:
    """Whether the class token is among the tokens at all these places; it is not if they are laid out as an image."""
    return block.class_token and all(block.ports[place].layout == "BNC" for place in places)


def _refuse_missing_tokens(config: ContextBroadcasting, anatomy: Anatomy, without_class: list[Block]) -> None:
    if config.variant in ("gate", "hybrid"):
        if without_class:
            raise VitfocusError(
                f"{config} multiplies by the class token, and {type(anatomy.root).__name__} has none in "
                f"{without_class[0].name}: use variant=mean or variant=scaled."
            )
        if config.tokens != "all":
            raise VitfocusError(f"{config} multiplies by the class token, so it needs tokens=all.")
    if config.tokens == "text" and anatomy.text is None:
        raise VitfocusError(
            f"{config} needs text tokens, and {type(anatomy.root).__name__} has none: use tokens=image."
        )
