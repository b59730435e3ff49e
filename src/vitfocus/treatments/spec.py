"""Treatments as text: the short spec "deit_small_patch16_224+cb(layers=upper)+tap(branches=4)+adl", read and written.

Grammar: parts joined by "+"; a part is a name, optionally followed by options in parentheses; an option is key=value;
a value is a word, a number, None, or a list of numbers or of such lists in square brackets; sets of layers may be
joined by "&" ("upper&inner"). `cbs` is an alias of cb(variant=scaled).

A treated model holds the specs of its treatments in one uint8 buffer. Because of it a plain model refuses a treated
checkpoint, even one whose treatments have no parameters, and a checkpoint alone is enough to restore them. It is a
buffer because everything that handles state dicts handles buffers, and uint8 because casts to another precision leave
integers unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.modules import SCRIPTABLE, refuse_script
from vitfocus.core.registry import TREATMENTS_KEY, nested_configs
from vitfocus.treatments.base import Treatment, keywords

_PART = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\((?P<options>.*)\))?$", re.DOTALL)


def split_spec(spec: str) -> tuple[str, list[Treatment]]:
    """Parse the spec of a model into its name and its treatments.

    >>> name, treatments = split_spec("vit_tiny_patch16_224+cbs(layers=[0,5])+adl")
    >>> name, [str(treatment) for treatment in treatments], treatments[0].variant
    ('vit_tiny_patch16_224', ['cbs(layers=[0,5])', 'adl'], 'scaled')
    """
    base, *parts = _split(spec, "+") or [""]
    if not base:
        raise VitfocusError(f"{spec!r} names no model: a spec begins with one, such as vit_tiny_patch16_224+cb.")
    return base, [_parse_one(part) for part in parts]


def parse_treatments(spec: str) -> list[Treatment]:
    """Parse a spec without a model name.

    >>> [str(treatment) for treatment in parse_treatments("cb(variant=scaled)+tap(branches=4)")]
    ['cbs', 'tap']
    """
    return [_parse_one(part) for part in _split(spec, "+")] if spec.strip() else []


def write_spec(base: str, treatments: Sequence[Treatment]) -> str:
    """The spec of a model and its treatments, which `split_spec` parses back."""
    return "+".join([base, *map(str, treatments)])


def _parse_one(text: str) -> Treatment:
    match = _PART.match(text.strip())
    if match is None:
        raise VitfocusError(f"{text.strip()!r} is not a treatment: write it as name or name(option=value,...).")
    known = keywords()
    if match["name"] not in known:
        raise VitfocusError(f"There is no treatment {match['name']!r}: {nearest(match['name'], known)}")
    config, preset = known[match["name"]]
    name = config.name
    fields = {field.name for field in dataclasses.fields(config)}
    options = dict(preset)
    for part in _split(match["options"] or "", ","):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals:
            raise VitfocusError(f"{part.strip()!r} in {text.strip()!r} is not an option: write it as key=value.")
        if key not in fields:
            raise VitfocusError(f"{name} has no option {key!r}: {nearest(key, fields)}")
        given = _value(value.strip())
        if key in options and options[key] != given:
            why = f"{match['name']} is short for {name}({key}={options[key]})" if key in preset else "say it once"
            raise VitfocusError(f"{text.strip()!r} gives {key} twice, as {options[key]} and as {given}: {why}.")
        options[key] = given
    return config(**options)


def _value(text: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return tuple(_value(part.strip()) for part in _split(text[1:-1], ","))
    if text == "None":
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text.strip("'\"")


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside all brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([") - (character in ")]")
        if depth < 0:
            break
        if character == separator and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    if depth:
        raise VitfocusError(f"The brackets in {text!r} do not match.")
    return [*parts, current] if current.strip() or parts else []


#: The buffer's name on the treated module.
STATE_KEY = TREATMENTS_KEY
_NOTE = "vitfocus_treatments: "
_MAX_LENGTH = 10_000


class _KeepRecord:
    """Runs before a state dict is loaded: a plain checkpoint may lack the record, and a treated one must agree with it.

    The text is stored here too, to restore the buffer after the model was on the meta device.
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
            # torch always passes strict=True here; unexpected keys are an error only for strict callers.
            unexpected.append(f"{key} of {theirs[:200]!r}, and the model carries {self.text!r}")
        state[key] = _encode(self.text)


def write_record(root: nn.Module, treatments: Sequence[Treatment], around: nn.Module | None = None) -> None:
    """Record these treatments on a transformer; without treatments, remove the record.

    Their libraries save it too: in the config of transformers (also `around` a copied one) and timm's `pretrained_cfg`.
    """
    text = "+".join(map(str, treatments))
    _note(root, text)
    own = getattr(root, "config", None)
    if own is None or not any(part is own for part in nested_configs(getattr(around, "config", None))):
        _note(around, text)
    root.__dict__.pop(SCRIPTABLE, None)
    root._buffers.pop(STATE_KEY, None)
    hooks: dict[int, Any] = root._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook.hook, _KeepRecord)]:
        del hooks[key]
    if treatments:
        root.__dict__[SCRIPTABLE] = refuse_script
        root.register_buffer(STATE_KEY, _encode(text).to(next((one.device for one in root.parameters()), "cpu")))
        root.register_load_state_dict_pre_hook(_KeepRecord(text))


def _note(module: Any, text: str) -> None:
    """Write the specs to the config of a transformers model or the `pretrained_cfg` of a timm model."""
    if hasattr(config := getattr(module, "config", None), "model_type"):
        config.__dict__.pop(STATE_KEY, None)
        config.__dict__.update({STATE_KEY: text} if text else {})
    known = getattr(module, "pretrained_cfg", None)
    if isinstance(known, dict):
        notes = [note for note in known.get("notes") or () if not str(note).startswith(_NOTE)]
        notes += [_NOTE + text] if text else []
        module.pretrained_cfg = {k: v for k, v in known.items() if k != "notes"} | ({"notes": notes} if notes else {})


def is_record(name: str) -> bool:
    """Whether a name in a state dict is that of the record of treatments."""
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
        if not isinstance(saved, Tensor) or saved.dtype != torch.uint8 or saved.ndim != 1 or len(saved) > _MAX_LENGTH:
            raise VitfocusError(f"{where} holds a damaged record of treatments ({name}).")
        found += parse_treatments(_decode(saved))
    return found


def _encode(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _decode(saved: Tensor) -> str:
    if saved.dtype != torch.uint8 or saved.is_meta or saved.layout != torch.strided:
        return ""
    return bytes(saved[:_MAX_LENGTH].flatten().tolist()).decode(errors="replace")
