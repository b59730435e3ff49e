"""Models that stand on a vision transformer: a spec's prefix ("upernet:vit_tiny_patch16_224") and who builds it.

Each module named here has `build(name, pretrained, arguments)`, in which `name` is what stands behind the colon, as a
rule a timm model, and the arguments that are not the head's own go to that backbone.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

#: The prefix of a spec, and the module that builds such models; imported when one is asked for.
COMPOSED = {
    "upernet": "vitfocus.tasks.segmentation.upernet",
    "segformer": "vitfocus.tasks.segmentation.segformer",
    "smp": "vitfocus.tasks.segmentation.smp",
    "maskrcnn": "vitfocus.tasks.detection.model",
}


def build_composed(prefix: str, name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """Build one; with `pretrained`, its backbone starts from its library's weights."""
    model: nn.Module = importlib.import_module(COMPOSED[prefix]).build(name, pretrained, dict(arguments))
    return model
