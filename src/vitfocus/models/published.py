"""Loading published checkpoints: unwrap the file's nesting, compare names and shapes, then load.

The modules of `vitfocus.models` carry the names of the published layout, so almost nothing is renamed here. Names
that are left over on either side are returned to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from ..core.errors import VitfocusError

# Averaged weights first, as in timm's own loader: a training checkpoint holds both and the average is what is reported.
_NESTS = ("state_dict_ema", "model_ema", "state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")


class Loaded(NamedTuple):
    """The names that `load_published` filled, those missing from the checkpoint, and those unknown to the model."""

    loaded: list[str]
    missing: list[str]
    unexpected: list[str]


def unwrap(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Take the tensors out of a training checkpoint: nesting and wrappers' prefixes removed, names otherwise kept.

    >>> import torch
    >>> unwrap({"epoch": 3, "state_dict": {"module.head.bias": torch.zeros(2)}})
    {'head.bias': tensor([0., 0.])}
    """
    if not isinstance(checkpoint, Mapping):
        raise VitfocusError(
            f"A checkpoint is a mapping from names to tensors, but {type(checkpoint).__name__} was given."
        )
    nested = next(
        (checkpoint[key] for key in _NESTS if isinstance(checkpoint.get(key), Mapping) and checkpoint[key]), None
    )
    if nested is not None:
        return unwrap(nested)
    state = {}
    for name, value in checkpoint.items():
        while name.startswith(_PREFIXES):
            name = name.split(".", 1)[1]
        state[name] = value
    return state


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Turn a published checkpoint into a state dict for `model`; what depends on the token grid is resampled to it."""
    state = unwrap(state_dict)
    fit = getattr(model, "fit_published", None)
    return state if fit is None else fit(state)


def load_published(model: nn.Module, state_dict: Mapping[str, Any]) -> Loaded:
    """Load a state dict in the published layout of names into `model`, treated or not.

    The dict may be nested (`state_dict`, `model`, `state_dict_ema`) and prefixed (`module.`). Nothing is loaded unless
    every shape fits.

    >>> import torch
    >>> from vitfocus.models import RVT
    >>> model = RVT(img_size=32, base_dims=(8,), depths=(1,), heads=(2,), num_classes=3)
    >>> report = load_published(model, {"model": {"module.head.bias": torch.ones(3), "decoder.bias": torch.ones(3)}})
    >>> report.loaded, report.unexpected, len(report.missing)
    (['head.bias'], ['decoder.bias'], 37)
    """
    state = checkpoint_filter_fn(state_dict, model)
    own = model.state_dict()
    fitting = {name: value for name, value in state.items() if name in own and isinstance(value, Tensor)}
    misfits = [name for name, value in fitting.items() if value.shape != own[name].shape]
    if misfits:
        name = misfits[0]
        others = f" (and {len(misfits) - 1} more tensors differ)" if len(misfits) > 1 else ""
        raise VitfocusError(
            f"{name} has shape {tuple(fitting[name].shape)} in the checkpoint but {tuple(own[name].shape)} in the model"
            f"{others}: build the model with the checkpoint's sizes and num_classes; nothing was loaded."
        )
    missing = model.load_state_dict(fitting, strict=False).missing_keys
    return Loaded(list(fitting), list(missing), [name for name in state if name not in fitting])


def fit_position(position: Any, grid: tuple[int, int], prefix_tokens: int = 0, interpolation: str = "bicubic") -> Any:
    """Resample a position embedding `1, prefix + N, C` made for a square grid to `grid`; anything else passes through.

    >>> import torch
    >>> fit_position(torch.zeros(1, 1 + 16, 8), (2, 6), prefix_tokens=1).shape
    torch.Size([1, 13, 8])
    """
    if not isinstance(position, Tensor) or position.ndim != 3 or position.shape[1] == grid[0] * grid[1] + prefix_tokens:
        return position
    side = math.isqrt(max(position.shape[1] - prefix_tokens, 0))
    if side < 1 or side * side + prefix_tokens != position.shape[1]:
        return position
    smooth = interpolation == "bicubic"
    return resample_abs_pos_embed(position, list(grid), [side, side], prefix_tokens, interpolation, antialias=smooth)


def resize_pair_map(pairs: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resample a map over pairs of tokens, `H, N, N`, from one token grid to another: keys first, then queries.

    >>> import torch
    >>> resize_pair_map(torch.ones(3, 4, 4), (2, 2), (3, 4)).shape
    torch.Size([3, 12, 12])
    """
    for _ in range(2):
        rows = pairs.reshape(pairs.shape[0], pairs.shape[1], old[0], old[1])
        rows = nn.functional.interpolate(rows, size=new, mode="bilinear", align_corners=False)
        pairs = rows.flatten(2).transpose(1, 2)
    return pairs
