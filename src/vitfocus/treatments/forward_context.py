"""What a module deep inside a forward pass needs to know of its start: image size, padding mask, text length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy
from vitfocus.treatments.operations import AddHook, Surgeon


class ForwardContext:
    """Facts about the current forward pass, set by hooks. All modules of one treatment share one object."""

    def __init__(self) -> None:
        self.image_size: tuple[int, int] | None = None
        self.valid: Tensor | None = None
        self.text_tokens: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle starts without a mask, which may be part of a graph that cannot be copied."""
        return {"image_size": self.image_size, "valid": None, "text_tokens": None}


class ImageSizeHook:
    """A pre-hook of the stem: the first four-dimensional tensor is the image."""

    def __init__(self, context: ForwardContext) -> None:
        self.context = context

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.context.image_size = None  # patches without an image must not get the size of an earlier image
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 4:
                self.context.image_size = (value.shape[-2], value.shape[-1])
                return


class PaddingHook:
    """A pre-hook of the encoder: which tokens are not padding, from the attention mask it receives."""

    def __init__(self, context: ForwardContext) -> None:
        self.context = context

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = (kwargs[name] for name in ("attention_mask", "attn_mask") if name in kwargs)
        mask = next(named, args[1] if len(args) > 1 else None)
        if not isinstance(mask, Tensor):
            self.context.valid = None
            return
        # A boolean mask is True for real tokens; an additive one is 0 there and very negative for padding.
        real = mask if mask.dtype == torch.bool else mask > -1 if mask.is_floating_point() else mask != 0
        # No query attends to padding, so a token is real if any query may attend to it.
        self.context.valid = real.flatten(1, -2).any(dim=1) if real.ndim > 2 else real


class TextLengthHook:
    """A hook of the text embedding: how many tokens of the sequence are text."""

    def __init__(self, context: ForwardContext) -> None:
        self.context = context

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tokens = output[0] if isinstance(output, tuple) else output
        self.context.text_tokens = tokens.shape[1]


def track_image_size(anatomy: Anatomy, surgeon: Surgeon) -> ForwardContext:
    """Insert a hook that records the size of each image that enters the model."""
    context = ForwardContext()
    surgeon.do(AddHook(anatomy.stem, "input", ImageSizeHook(context)))
    return context


def track_sequence(anatomy: Anatomy, surgeon: Surgeon) -> ForwardContext | None:
    """Insert hooks that record padding and text length; None if the model takes neither."""
    if anatomy.encoder is None:
        return None
    context = ForwardContext()
    surgeon.do(AddHook(anatomy.encoder, "input", PaddingHook(context)))
    if anatomy.text is not None:
        surgeon.do(AddHook(anatomy.text, "output", TextLengthHook(context)))
    return context
