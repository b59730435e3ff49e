"""Four feature maps at doubling strides from any timm model that returns features.

A plain ViT has one stride, so maps from four depths are resampled to a quarter, half, once and twice that stride by
transposed convolutions and max-pooling, as XCiT and BEiT do for dense prediction. The stages of hierarchical backbones
(Swin, PVT) are used directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.builder import Origin

LEVELS = 4
_EFFORT = {4.0: 2, 2.0: 1, 1.0: 0, 0.5: 1}  # stride of a map divided by the wanted stride, and the cost of resampling
_ANY_SIZE: tuple[dict[str, Any], ...] = ({"strict_img_size": False}, {"dynamic_img_size": True}, {})


class PyramidFeatures(nn.Module):
    """A timm backbone whose feature maps are resampled to doubling strides.

    Args:
        name: The timm model.
        pretrained: Whether it starts from timm's weights.
        indices: Four of the backbone's features; by default at a third, half, two thirds and all of the depth, or the
            end of each stage.
        arguments: Passed to timm.

    Attributes:
        widths: Channels of the maps.
        strides: Strides of the maps.
        feeding: Names of the backbone's modules whose output is used, which treatments with layers=inner leave out.

    Example:
        >>> import torch
        >>> features = PyramidFeatures("vit_tiny_patch16_224", depth=4, embed_dim=48, num_heads=3)
        >>> [tuple(level.shape) for level in features(torch.zeros(1, 3, 64, 96))]
        [(1, 48, 16, 24), (1, 48, 8, 12), (1, 48, 4, 6), (1, 48, 2, 3)]
        >>> features.strides, features.feeding
        ((4, 8, 16, 32), ('blocks.0', 'blocks.1', 'blocks.3'))
    """

    def __init__(
        self, name: str, pretrained: bool = False, indices: Sequence[int] | None = None, **arguments: Any
    ) -> None:
        super().__init__()
        body: Any = _build(name, pretrained, arguments)
        self.body = body
        info = list(getattr(body, "feature_info", None) or ())
        if not info or not hasattr(body, "forward_intermediates"):
            raise VitfocusError(f"{name} returns no features at several depths, which a feature pyramid needs.")
        self.indices = _indices(indices, [entry["reduction"] for entry in info], name)
        chosen = [info[index] for index in self.indices]
        self._sources = tuple(str(entry["module"]) for entry in chosen)
        self.widths = tuple(int(entry["num_chs"]) for entry in chosen)
        found = [int(entry["reduction"]) for entry in chosen]
        self.strides = _strides(found, name)
        ratios = (stride / wanted for stride, wanted in zip(found, self.strides, strict=True))
        self.resample = nn.ModuleList(map(_resampler, self.widths, ratios))
        self.keep_finest(LEVELS)

    @property
    def feeding(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._sources))

    def keep_finest(self, levels: int) -> None:
        """Drop the coarser maps, and the parts of the backbone that only they use."""
        self.indices, self._sources = self.indices[:levels], self._sources[:levels]
        self.widths, self.strides = self.widths[:levels], self.strides[:levels]
        self.resample = self.resample[:levels]
        if hasattr(self.body, "prune_intermediate_layers"):
            self.body.prune_intermediate_layers(sorted(set(self.indices)), prune_norm=True, prune_head=True)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Maps (B, width, H/stride, W/stride) of images (B, 3, H, W) whose sides are multiples of the last stride."""
        wanted = sorted(set(self.indices))
        maps = self.body.forward_intermediates(images, indices=wanted, intermediates_only=True)
        by_index = dict(zip(wanted, maps, strict=True))
        return [resample(by_index[index]) for resample, index in zip(self.resample, self.indices, strict=True)]


def no_decay_names(model: nn.Module) -> set[str]:
    """Names of the parameters for which a submodule disables weight decay."""
    return {
        f"{place}.{name}"
        for place, module in model.named_modules()
        if place and callable(getattr(module, "no_weight_decay", None))
        for name in module.no_weight_decay()
    }


def _build(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """The backbone, built to accept images of any size if its family can."""
    for extra in _ANY_SIZE:
        try:
            return Origin("timm", name, {"num_classes": 0, **extra, **arguments}).build(pretrained)
        except VitfocusError as error:
            if not any(key in str(error) and "unexpected keyword" in str(error) for key in extra):
                raise
    raise AssertionError


def _indices(given: Sequence[int] | None, reductions: Sequence[int], name: str) -> tuple[int, ...]:
    count = len(reductions)
    if given is None:
        ends = [i for i in range(count) if i + 1 == count or reductions[i + 1] != reductions[i]]
        if len(ends) >= LEVELS:
            return tuple(ends[-LEVELS:])
        # A third, half, two thirds and all of the depth; the convolutional stages of a hybrid are the first levels.
        depths = [max(0, count * (level + 2) // 6 - 1) for level in range(LEVELS - 1)] + [count - 1]
        return (*ends[:2], *depths[2:]) if len(ends) == LEVELS - 1 else tuple(depths)
    indices = tuple(index + count if index < 0 else index for index in given)
    if len(indices) != LEVELS or any(not 0 <= index < count for index in indices) or list(indices) != sorted(indices):
        raise VitfocusError(f"indices={list(given)} are not {LEVELS} of {name}'s {count} features in order of depth.")
    return indices


def _strides(found: Sequence[int], name: str) -> tuple[int, ...]:
    """The doubling strides that need the least resampling."""
    best: tuple[int, tuple[int, ...]] | None = None
    for first in (found[0], found[0] // 2, found[0] // 4):
        wanted = tuple(first << level for level in range(LEVELS))
        ratios = [stride / goal if goal else 0.0 for stride, goal in zip(found, wanted, strict=True)]
        if first and not first & (first - 1) and all(ratio in _EFFORT for ratio in ratios):
            effort = sum(_EFFORT[ratio] for ratio in ratios)
            best = min(best, (effort, wanted)) if best else (effort, wanted)
    if best is None:
        raise VitfocusError(
            f"{name}'s features have strides of {', '.join(map(str, found))} pixels, which cannot be resampled to "
            "doubling powers of two: use a model with a patch size of 4, 8, 16 or 32."
        )
    return best[1]


def _resampler(width: int, ratio: float) -> nn.Module:
    if ratio == 4:
        return nn.Sequential(_doubled(width), nn.BatchNorm2d(width), nn.GELU(), _doubled(width))
    if ratio == 2:
        return _doubled(width)
    return nn.Identity() if ratio == 1 else nn.MaxPool2d(2)


def _doubled(width: int) -> nn.Module:
    return nn.ConvTranspose2d(width, width, 2, 2)
