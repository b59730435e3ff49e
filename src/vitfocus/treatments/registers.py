"""Registers: learned tokens beside the class token, which a model may use as scratch space.

"Vision Transformers Need Registers" (Darcet et al., ICLR 2024). Without them, large models keep global information in a
few patch tokens of high norm. The registers start as in timm and DINOv2 (normal, σ = 1e-6), attend and are attended to
like every token, and are left out of grids, pooling and outputs.

Added tokens, of this and other treatments, are inserted after the prefix tokens at the input of a block and removed at
its output, from where they are passed to the next block. So in every family, whatever is between or after the blocks
(intermediate features, pooling, heads) does not see them, and modules inside a block count them among the prefix tokens
(`Block.prefix_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import grad_is_recomputed
from vitfocus.treatments.base import Treatment, number_option
from vitfocus.treatments.operations import (
    AddHook,
    CountTokens,
    InputHook,
    OutputHook,
    Override,
    StatefulModule,
    Surgeon,
    TokenSlot,
)
from vitfocus.treatments.surgery import handles


@dataclass(frozen=True)
class Registers(Treatment):
    """Learned register tokens (`registers`), for training.

    Args:
        count: How many.

    Example:
        >>> str(Registers(count=8))
        'registers(count=8)'
    """

    name: ClassVar[str] = "registers"
    label: ClassVar[str] = "reg"
    about: ClassVar[str] = "Learned register tokens attend beside the patches and are left out of the output"

    count: int = number_option(4, 1, 10_000)


class AddedTokens(StatefulModule):
    """The module in the first block that returns the added tokens: zeros, unless a subclass says otherwise."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.slots: list[TokenSlot] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """The added tokens (B, count, C) of a batch (B, N, C)."""
        return tokens.new_zeros(tokens.shape[0], self.count, tokens.shape[-1])

    def reset(self) -> None:
        """Drop the tokens of the last forward pass."""
        for slot in self.slots:
            slot.tokens = None


class JoinTokens:
    """At the input of a block: inserts the tokens of a module, or of the slot of the previous block."""

    def __init__(self, source: Callable[[Tensor], Tensor] | TokenSlot, first: int) -> None:
        self.source, self.first = source, first

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, N, C) to (B, N + count, C)."""
        handed_on = isinstance(self.source, TokenSlot)
        added = self.source.tokens if isinstance(self.source, TokenSlot) else self.source(tokens)
        if added is None:
            raise VitfocusError("A block with added tokens was run without the previous block.")
        if handed_on and grad_is_recomputed() and tokens.requires_grad and not added.requires_grad:
            raise VitfocusError(
                "Reentrant gradient checkpointing gives the added tokens no gradient: use use_reentrant=False."
            )
        return torch.cat((tokens[:, : self.first], added.to(tokens.dtype), tokens[:, self.first :]), dim=1)


class JoinHook(InputHook):
    """The pre-hook that joins; a mask (B, heads, N, N) beside the tokens lets everything attend to the added ones.

    transformers passes a mask of ones while a model is traced.
    """

    def __init__(self, join: JoinTokens, count: int) -> None:
        super().__init__(join)
        self.first, self.count = join.first, count

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of the block."""
        tokens: Any = args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor | torch.fx.Proxy))
        args, kwargs = super().__call__(module, args, kwargs)
        length = tokens.shape[1]
        kwargs = {key: self._widen(value, length) for key, value in kwargs.items()}
        return tuple(self._widen(value, length) for value in args), kwargs

    def _widen(self, mask: Any, length: int) -> Any:
        """A mask with rows and columns for the added tokens: True, or 0 where masks are added; others as they are."""
        if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-1] != length:
            return mask
        for axis in (-1, -2):
            if mask.shape[axis] == length:
                before, after = mask.tensor_split((self.first,), dim=axis)
                shape = list(mask.shape)
                shape[axis] = self.count
                added = mask.new_full(shape, mask.dtype == torch.bool)
                mask = torch.cat((before, added, after), dim=axis)
        return mask


class JoinedForward:
    """The `forward` of the first block, which joins, so that hooks on the block see its input without added tokens.

    transformers records this input as the first hidden state.
    """

    def __init__(self, host: nn.Module, join: JoinHook) -> None:
        self.host, self.inner = host, host.__dict__.get("forward")
        self.joins = [join]
        if isinstance(self.inner, JoinedForward):  # of another treatment, which joins first
            self.joins, self.inner = [*self.inner.joins, join], self.inner.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the block, with the added tokens."""
        for join in self.joins:
            args, kwargs = join(self.host, args, kwargs)
        return (self.inner or partial(type(self.host).forward, self.host))(*args, **kwargs)


class SplitTokens:
    """At the output of a block: removes the added tokens and stores them in the slot for the next block."""

    def __init__(self, first: int, count: int, slot: TokenSlot | None) -> None:
        self.first, self.count, self.slot = first, count, slot

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, N + count, C) to (B, N, C)."""
        before, added, after = tokens.tensor_split((self.first, self.first + self.count), dim=1)
        if self.slot is not None:
            self.slot.tokens = added
        return torch.cat((before, after), dim=1) if self.first else after


def add_tokens(module: AddedTokens, name: str, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Let the tokens that a module returns pass through every block with the others.

    Raises:
        VitfocusError: If something in the blocks depends on the number of tokens.
    """
    hosts = [block.host for block in anatomy.trunk]
    blocks = [block for index, block in enumerate(anatomy.trunk) if block.host not in hosts[:index]]
    fits = all(block.layout == "BNC" and block.attention_kind == "global" for block in anatomy.trunk)
    if not fits or not anatomy.takes_tokens or anatomy.encoder is not None or anatomy.text is not None:
        raise VitfocusError(
            f"{surgeon.treatment} adds tokens, and the blocks of {type(anatomy.root).__name__} "
            f"({anatomy.attention_kinds} attention) expect those of the image: it fits plain ViTs, whose blocks take "
            "any number of tokens."
        )
    surgeon.add(blocks[0], "attention.front", name, module)
    given = surgeon.by_name(module)
    source: Callable[[Tensor], Tensor] | TokenSlot = given
    for block in blocks:
        slot = TokenSlot() if block is not blocks[-1] else None
        module.slots += [slot] if slot is not None else []
        surgeon.apply(CountTokens(block.host, module.count))
        join, split = JoinTokens(source, block.prefix_tokens), SplitTokens(block.prefix_tokens, module.count, slot)
        hook = JoinHook(join, module.count)
        inside = Override(block.host, "forward", JoinedForward(block.host, hook)) if block is blocks[0] else None
        surgeon.apply(inside or AddHook(block.host, "input", hook))
        surgeon.apply(AddHook(block.host, "output", OutputHook(split), first=True))
        source = slot or given


class RegisterTokens(AddedTokens):
    """The learned tokens, the same for every image.

    >>> RegisterTokens(4, width=8)(torch.zeros(2, 5, 8)).shape
    torch.Size([2, 4, 8])
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__(count)
        self.tokens = nn.Parameter(1e-6 * torch.randn(1, count, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """The registers (B, count, C) of a batch (B, N, C)."""
        return self.tokens.expand(tokens.shape[0], -1, -1)


@handles(Registers)
def insert_registers(config: Registers, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Add the tokens to every block."""
    first = anatomy.trunk[0]
    if first.registers:
        raise VitfocusError(f"{type(anatomy.root).__name__} has {first.registers} registers already.")
    add_tokens(RegisterTokens(config.count, first.width), "registers", anatomy, surgeon)
