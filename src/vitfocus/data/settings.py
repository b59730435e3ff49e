"""The settings of data and augmentation: the [data] and [augment] sections of a recipe, key by key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def choice(default: str, *others: str) -> Any:
    """A key whose value must be one of a few words, the first being the default."""
    return field(default=default, metadata={"choices": (default, *others)})


def bounded(default: Any, low: float = 0.0, high: float = float("inf")) -> Any:
    """A number between two bounds, both allowed."""
    return field(default=default, metadata={"bounds": (low, high)})


def pair(default: tuple[float, float], low: float, high: float = float("inf"), rising: bool = True) -> Any:
    """Two numbers between two bounds, the second no less than the first unless `rising` is False."""
    return field(default=default, metadata={"bounds": (low, high), "rising": rising})


def harmless(default: Any, low: float = 0.0) -> Any:
    """A number that may differ when a run is resumed: it does not change the weights."""
    return field(default=default, metadata={"harmless": True, "bounds": (low, float("inf"))})


@dataclass(frozen=True)
class Data:
    """Which images, how many at a time, and where they are kept."""

    source: str = "folder"  # shapes, cifar10, cifar100, fashion-mnist, cifar-mosaic, folder, shards, or timm:NAME
    root: str = ""
    train_split: str = ""  # a folder's or shards' name of the split; found by the usual names when empty
    val_split: str = ""
    train_length: int = bounded(0)  # the first so many images; 0: all (Shapes: 20,000 and 2,000)
    val_length: int = bounded(0)
    holdout: int = bounded(0)  # so many training images, drawn once and for all, are the validation set; 0: its own is
    size: int = bounded(224, 8)
    batch: int = bounded(1024, 1)  # over all processes and all accumulated parts
    repeats: int = bounded(1, 1)  # repeated augmentation: each chosen image so many times, as a rule in one batch
    resident: str = choice("auto", "yes", "no")  # the whole set as one tensor on the device
    enlarge: int = bounded(0)  # resident images are enlarged from size to so many pixels, augmented; 0: not
    workers: int = harmless(4)
    download: bool = False
    broken: str = choice("fatal", "skip")  # what an unreadable image does; skipped ones are named and counted
    crop: float = bounded(0.875, 0.05, 1)  # evaluation: the centre's share of the resized image
    interpolation: str = choice("bicubic", "bilinear")


@dataclass(frozen=True)
class Augment:
    """What happens to training images."""

    crop: str = choice("resized", "pad", "none")
    scale: tuple[float, float] = pair((0.08, 1.0), 1e-6, 1)  # crop=resized: share of the area
    padding: int = bounded(4)  # crop=pad: zeros around the image before a crop of its own size
    flip: float = bounded(0.5, 0, 1)
    randaugment: str = "rand-m9-mstd0.5-inc1"  # timm's spelling; empty: none
    colour_jitter: float = bounded(0.0)  # not with randaugment, as in timm
    erase: float = bounded(0.25, 0, 1)
    mixup: float = bounded(0.8)
    cutmix: float = bounded(1.0)
    mix_probability: float = bounded(1.0, 0, 1)
    cutmix_share: float = bounded(0.5, 0, 1)  # how often cutmix rather than mixup, where both are on
