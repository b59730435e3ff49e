"""What items measure: the name in an item's TOML, the heading, and where the number comes from at each scale.

A `Suite` is one of `vitfocus evaluate`. A measure without a suite at a scale is not measured there, as the table notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitfocus.core.metrics import METRICS
from vitfocus.corruptions import CORRUPTIONS


@dataclass(frozen=True)
class Suite:
    """A number of an evaluation: `path` leads to it in the model's summary.

    `data` names a data set's folder; if empty, the run's validation images are used. A `generated` suite is computed
    from the validation images if its published folder is missing. `limit` bounds the images; `title`
    replaces the heading.
    """

    suite: str
    path: tuple[str, ...]
    data: str = ""
    generated: bool = False
    folder_option: str = ""  # the suite's option that takes the folder, if it is not the data
    limit: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True)
class Measure:
    """A column. `source` is counted, result, curve, diagnosis, suite or computed."""

    title: str
    source: str
    unit: str = "%"
    better: str = "up"  # up, down, or "" if neither is better
    digits: int = 1
    key: str = ""  # in results.json or in a diagnosis
    scale: float = 1.0  # the stored number is multiplied by this
    suites: Mapping[str, Suite] = field(default_factory=dict)  # by scale

    @property
    def heading(self) -> str:
        """Title, unit, and an arrow that points to better."""
        arrow = {"up": " ↑", "down": " ↓"}.get(self.better, "")
        return f"{self.title}{f' [{self.unit}]' if self.unit else ''}{arrow}"


def _result(key: str, title: str = "", digits: int = 1) -> Measure:
    return Measure(title or METRICS[key].short, "result", key=key, scale=100.0, digits=digits)


def _reading(title: str, key: str, unit: str = "", better: str = "", digits: int = 2) -> Measure:
    return Measure(title, "diagnosis", unit, better, digits, key)


def _corruption(name: str) -> Measure:
    title, plain = f"CE {name.replace('_', ' ')}", f"error under {name.replace('_', ' ')}"
    path = ("corruptions", name)
    return Measure(title, "suite", better="down", digits=2, suites=_corrupted((*path, "ce"), (*path, "error"), plain))


def _corrupted(published: tuple[str, ...], plain: tuple[str, ...], title: str) -> dict[str, Suite]:
    """ImageNet-C, or the same corruptions of small images, for which there are no AlexNet references."""
    return {
        "imagenet": Suite("imagenet-c", published, "imagenet-c", generated=True),
        "cifar100": Suite("cifar100-c", plain, limit=2000, title=title),
        "smoke": Suite("cifar10-c", plain, limit=100, title=title),
    }


def _published(suite: str, *path: str) -> dict[str, Suite]:
    return {"imagenet": Suite(suite, path or ("top1",), suite)}


_ALL = ("smoke", "cifar100", "imagenet")
_FLIPS = METRICS["mean_flip_probability"].title

MEASURES: dict[str, Measure] = {
    "parameters": Measure("parameters", "counted", "M", "", 1),
    "flops": Measure("FLOPs", "counted", "G", "", 1),
    "parameters_added": Measure("parameters added", "counted", "M", "", 3),
    "flops_added": Measure("FLOPs added", "counted", "M", "", 1),
    "top1": _result("top1"),
    "top5": _result("top5"),
    "eval_loss": Measure("evaluation loss", "result", "", "down", 3, "loss"),
    "train_loss": Measure("training loss", "curve", "", "down", 3, "loss"),
    "miou": _result("miou"),
    **{f"{kind}_ap{level}": _result(f"{kind}_ap{level}") for kind in ("box", "mask") for level in ("", "50", "75")},
    "vqa": _result("accuracy", "VQA accuracy", 2),
    "entropy": _reading("mean entropy", "entropy", "nats"),
    "entropy_p15": _reading("15th percentile of entropy", "entropy_p15", "nats"),
    "entropy_bound": _reading("bound of entropy", "entropy_bound", "nats"),
    "entropy_class": _reading("class token's entropy", "entropy_cls", "nats"),
    "entropy_last": _reading("entropy of the last layer", "entropy@last", "nats"),
    "distance": _reading("relative distance", "distance", digits=4),
    "overfocus": Measure("attention on the top 5 % of tokens", "diagnosis", "%", "down", 1, "overfocus", 100.0),
    "stability": _reading("stability under Gaussian noise", "stability", better="up"),
    "head_similarity": _reading("similarity of heads", "head_similarity", better="down"),
    "scaling_ratio": _reading("ratio of scales", "scaling_ratio"),
    "scaling_mean": _reading("mean scale", "scaling_mean", digits=3),
    "scaling_ratio_rise": _reading("rise of the ratio with depth", "scaling_ratio@rise"),
    "scaling_mean_rise": _reading("rise of the mean with depth", "scaling_mean@rise", digits=3),
    "steepest_at": Measure("|x1 - x2| of the steepest gradient", "computed", "", "", 2),
    "gradient_uniform": Measure("gradient at uniform attention", "computed", "", "", 3),
    "mce": Measure(
        "mCE",
        "suite",
        better="down",
        suites=_corrupted(("mce",), ("mean_error",), METRICS["mean_error"].title),
    ),
    **{f"ce_{name}": _corruption(name) for name in CORRUPTIONS},
    "mfr": Measure(
        "mFR",
        "suite",
        better="down",
        suites={
            "imagenet": Suite("imagenet-p", ("mfr",), "imagenet-p", generated=True),
            "cifar100": Suite("imagenet-p", ("mean_flip_probability",), limit=200, title=_FLIPS),
            "smoke": Suite("imagenet-p", ("mean_flip_probability",), limit=20, title=_FLIPS),
        },
    ),
    "cityscapes_c": Measure(
        "mIoU under corruption",
        "suite",
        suites={
            "imagenet": Suite(
                "cityscapes-c", ("miou_corrupted",), "cityscapes-c", generated=True, folder_option="corrupted_data"
            ),
            "smoke": Suite("cityscapes-c", ("miou_corrupted",), limit=20),
        },
    ),
    "acdc": Measure("mIoU on ACDC", "suite", suites=_published("acdc", "miou")),
    "imagenet_a": Measure("ImageNet-A", "suite", suites=_published("imagenet-a")),
    "imagenet_r": Measure("ImageNet-R", "suite", suites=_published("imagenet-r")),
    "imagenet_v2": Measure(
        "ImageNet-V2", "suite", suites=_published("imagenet-v2", "cells", "matched-frequency", "top1")
    ),
    "imagenet_real": Measure("ImageNet-ReaL", "suite", suites={"imagenet": Suite("imagenet-real", ("top1",))}),
    "occlusion": Measure(
        "centre occluded",
        "suite",
        suites=dict.fromkeys(
            _ALL, Suite("occlusion", ("cells", "centre/112", "top1"), options={"sizes": [112], "drops": []})
        ),
    ),
    "fgsm": Measure(
        "FGSM",
        "suite",
        suites=dict.fromkeys(_ALL, Suite("fgsm", ("cells", "fgsm/1", "top1"), options={"eps": [1]})),
    ),
    **{
        f"noise_{short}": Measure(
            f"mIoU, {title}",
            "suite",
            digits=2,
            suites={
                scale: Suite("segmentation-noise", ("cells", cell, "miou"), limit=limit)
                for scale, limit in (("imagenet", None), ("smoke", 100))
            },
        )
        for short, cell, title in (
            ("clean", "clean", "clean"),
            ("shot", "shot", "shot noise"),
            ("gaussian5", "gaussian/5", "Gaussian noise of 5"),
            ("gaussian10", "gaussian/10", "Gaussian noise of 10"),
            ("blur1", "blur/1", "blur of 1 px"),
            ("blur2", "blur/2", "blur of 2 px"),
        )
    },
}
