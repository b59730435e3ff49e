"""What every registration with timm repeats: the preprocessing of ImageNet-1k and the call of timm's builder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from .published import checkpoint_filter_fn


def imagenet_cfgs(names: Iterable[str], first_conv: str, paper: str, title: str, origin: str, crop_pct: float) -> Any:
    """Return timm's default configurations for `names`; none has weights to download."""
    cfg = {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": first_conv,
        "classifier": "head",
        "paper_ids": paper,
        "paper_name": title,
        "origin_url": origin,
    }
    return generate_default_cfgs({name: dict(cfg) for name in names})


def build(
    cls: type, variant: str, pretrained: bool, out_indices: int | tuple[int, ...], arguments: dict[str, Any]
) -> Any:
    """Build `cls` as timm does; `out_indices` are the features that `features_only=True` gives by default."""
    return build_model_with_cfg(
        cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **arguments,
    )
