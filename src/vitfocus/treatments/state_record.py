"""The record of its treatments in a model's state dict: one uint8 buffer that holds their specs as text.

Because of it a plain model refuses a treated checkpoint, even one whose treatments have no parameters, and a checkpoint
alone is enough to restore them. It is a buffer because everything that handles state dicts handles buffers, and of type
uint8 because casts to another precision leave integers unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.base import Treatment
from vitfocus.treatments.spec import parse_treatments

#: The buffer's name on the treated module.
STATE_KEY = "vitfocus_treatments"
_LONGEST = 10_000


class _KeepRecord:
    """Runs before a state dict is loaded: a plain checkpoint may lack the record, and a treated one must agree with it.

    The text is kept here too, which restores the buffer after it was on the meta device.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        key = f"{prefix}{STATE_KEY}"
        saved = state.get(key)
        if isinstance(saved, Tensor) and (theirs := _decode(saved)) != self.text:
            # torch passes strict=True whatever the caller said; unexpected keys are an error only to strict callers.
            unexpected.append(f"{key} of {theirs[:200]!r}, and the model carries {self.text!r}")
        state[key] = _encode(self.text)


def write_record(root: nn.Module, treatments: Sequence[Treatment]) -> None:
    """Make the record on a module that of these treatments; without treatments there is no record."""
    root._buffers.pop(STATE_KEY, None)
    hooks: dict[int, Any] = root._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook.hook, _KeepRecord)]:
        del hooks[key]
    if treatments:
        text = "+".join(map(str, treatments))
        placed = next(root.parameters(), None)
        root.register_buffer(STATE_KEY, _encode(text).to(placed.device if placed is not None else "cpu"))
        root.register_load_state_dict_pre_hook(_KeepRecord(text))


def is_record(name: str) -> bool:
    """Whether a name of a state dict is that of a record."""
    return name.rpartition(".")[2] == STATE_KEY


def recorded_treatments(tensors: Mapping[str, Any], where: str) -> list[Treatment]:
    """The treatments that a state dict records; an empty list for a plain one.

    Raises:
        VitfocusError: The record is damaged, or names a treatment that does not exist here.

    Example:
        >>> import timm, vitfocus as vf
        >>> model = vf.treat_(timm.create_model("vit_tiny_patch16_224", depth=1), "cb+adl")
        >>> [str(treatment) for treatment in recorded_treatments(model.state_dict(), "the state dict")]
        ['cb', 'adl']
    """
    found: list[Treatment] = []
    for name, saved in tensors.items():
        if not is_record(name):
            continue
        if not isinstance(saved, Tensor) or saved.dtype != torch.uint8 or saved.ndim != 1 or len(saved) > _LONGEST:
            raise VitfocusError(f"{where} holds a damaged record of treatments ({name}).")
        found += parse_treatments(_decode(saved))
    return found


def _encode(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _decode(saved: Tensor) -> str:
    if saved.dtype != torch.uint8 or saved.is_meta:
        return ""
    return bytes(saved[:_LONGEST].flatten().tolist()).decode(errors="replace")
