"""What a forward pass has said so far that a block deep inside it needs to know: image size, padding, text length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy
from vitfocus.treatments.operations import AddHook, Surgeon


class CallNotes:
    """Notes taken at the start of a forward pass. One object is shared by all modules of a treatment."""

    def __init__(self) -> None:
        self.image_size: tuple[int, int] | None = None
        self.valid: Tensor | None = None
        self.text_tokens: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle starts with nothing noted: a mask may hang on a graph that cannot be copied."""
        return {"image_size": self.image_size, "valid": None, "text_tokens": None}


class NoteImageSize:
    """A pre-hook of the stem: the first four-dimensional tensor is the image."""

    def __init__(self, notes: CallNotes) -> None:
        self.notes = notes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.notes.image_size = None  # an earlier image's size is not that of patches without an image
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 4:
                self.notes.image_size = (value.shape[-2], value.shape[-1])
                return


class NotePadding:
    """A pre-hook of the encoder: which tokens are real, from the attention mask it is given."""

    def __init__(self, notes: CallNotes) -> None:
        self.notes = notes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = (kwargs[name] for name in ("attention_mask", "attn_mask") if name in kwargs)
        mask = next(named, args[1] if len(args) > 1 else None)
        if not isinstance(mask, Tensor):
            self.notes.valid = None
            return
        # A boolean mask marks what is real; an additive one is 0 there and hugely negative elsewhere.
        real = mask if mask.dtype == torch.bool else mask > -1 if mask.is_floating_point() else mask != 0
        # What pads is looked at by no token; where it looks itself may be masked too.
        self.notes.valid = real.flatten(1, -2).any(dim=1) if real.ndim > 2 else real


class NoteTextLength:
    """A hook of the text embedding: how many tokens of the sequence are text."""

    def __init__(self, notes: CallNotes) -> None:
        self.notes = notes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tokens = output[0] if isinstance(output, tuple) else output
        self.notes.text_tokens = tokens.shape[1]


def note_image_size(anatomy: Anatomy, surgeon: Surgeon) -> CallNotes:
    """Notes of the image's size, taken whenever an image enters the model."""
    notes = CallNotes()
    surgeon.do(AddHook(anatomy.stem, "input", NoteImageSize(notes)))
    return notes


def note_sequence(anatomy: Anatomy, surgeon: Surgeon) -> CallNotes | None:
    """Notes of the padding and the text's length, for models that have them; None for the others."""
    if anatomy.encoder is None:
        return None
    notes = CallNotes()
    surgeon.do(AddHook(anatomy.encoder, "input", NotePadding(notes)))
    if anatomy.text is not None:
        surgeon.do(AddHook(anatomy.text, "output", NoteTextLength(notes)))
    return notes
