"""What a model wants its pixels to be: mean, standard deviation and size, whether or not it is a transformer.

Treatments and readings need an anatomy; training, saving and measuring a model need only this.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from vitfocus.anatomy.block import Size
from vitfocus.anatomy.normalisation import stated_normalising
from vitfocus.anatomy.registry import anatomy, unwrap
from vitfocus.core.errors import VitfocusError

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Pixels(NamedTuple):
    """Mean and standard deviation of each channel, for pixels from 0 to 1, and (height, width)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: Size


def pixels_of(model: nn.Module) -> Pixels:
    """What the anatomy says; else what a note or a timm model, or the one inside it, says; else ImageNet's usual.

    >>> import timm
    >>> pixels_of(timm.create_model("resnet18")).size, pixels_of(nn.Linear(2, 2)).std
    ((224, 224), (0.229, 0.224, 0.225))
    """
    try:
        body = anatomy(model)
    except VitfocusError:
        config: Any = next((c for m in unwrap(model).modules() if (c := getattr(m, "pretrained_cfg", None))), {})
        own = tuple(config.get("mean") or _IMAGENET[0]), tuple(config.get("std") or _IMAGENET[1])
        mean, std = stated_normalising(unwrap(model)) or own
        height, width = (config.get("input_size") or (3, 224, 224))[1:]
        return Pixels(mean, std, (int(height), int(width)))
    return Pixels(tuple(body.mean), tuple(body.std), body.build_size)
