"""The metrics: corruption errors, flip rates and calibration, and summaries of per-image outcomes.

Errors, accuracies and probabilities are fractions in [0, 1]; mCE, mFR and summaries are in percent. Intervals in
summaries are bootstrap 95 % intervals over images.

mCE and mFR divide by AlexNet's published errors. Errors by severity: hendrycks/robustness issue 10 (a table by the
authors). Flip probabilities: the authors' sheet linked in issue 49, as transcribed in clovaai/assembled-cnn. We found
no published top-5 distances of AlexNet, so none are used unless the user supplies them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitfocus.core.statistics import Array, mean_interval
from vitfocus.corruptions import CORRUPTIONS
from vitfocus.robustness.run_folder import Columns

Summary = dict[str, Any]

BINS = 15

ALEXNET_ERRORS: dict[str, tuple[float, ...]] = {
    "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
    "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
    "impulse_noise": (0.78374, 0.89808, 0.94870, 0.98720, 0.99548),
    "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
    "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
    "motion_blur": (0.58430, 0.70048, 0.82108, 0.89750, 0.92638),
    "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
    "snow": (0.71726, 0.88392, 0.86468, 0.91870, 0.94952),
    "frost": (0.61390, 0.79734, 0.88790, 0.89942, 0.93430),
    "fog": (0.67474, 0.76050, 0.84378, 0.87260, 0.94500),
    "brightness": (0.45140, 0.48502, 0.54048, 0.62166, 0.72440),
    "contrast": (0.64548, 0.76150, 0.88874, 0.97760, 0.99270),
    "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
    "pixelate": (0.52218, 0.54620, 0.73728, 0.87092, 0.91262),
    "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
    "speckle_noise": (0.66192, 0.74440, 0.90246, 0.94548, 0.97268),
    "gaussian_blur": (0.54732, 0.70444, 0.82574, 0.89864, 0.95940),
    "spatter": (0.47196, 0.62194, 0.75052, 0.84132, 0.90182),
    "saturate": (0.59342, 0.65514, 0.51174, 0.70834, 0.82260),
}
"""Top-1 error at severities 1 to 5; mCE uses the first fifteen, and the last four are the extra corruptions."""

ALEXNET_CLEAN_ERROR = 0.43478
"""1 - 56.522 %, the top-1 accuracy of torchvision's AlexNet_Weights.IMAGENET1K_V1, the weights ImageNet-C used."""

ALEXNET_FLIPS: dict[str, float] = {
    "gaussian_noise": 0.23653,
    "shot_noise": 0.30062,
    "motion_blur": 0.09297,
    "zoom_blur": 0.05942,
    "snow": 0.11928,
    "brightness": 0.04889,
    "translate": 0.11007,
    "rotate": 0.13104,
    "tilt": 0.07050,
    "scale": 0.23531,
}
"""Flip probability of the ten test perturbations of ImageNet-P, difficulty 1."""


def corruption_error(corruption: str, errors: Sequence[float], clean_error: float | None = None) -> float:
    """CE in percent: the sum of the errors over severities 1 to 5 divided by the sum of AlexNet's.

    With `clean_error`, the relative CE: both sums less five times the clean error.

    >>> round(corruption_error("fog", [0.3, 0.4, 0.5, 0.6, 0.7]), 3)
    61.026
    """
    above, below = sum(errors), sum(ALEXNET_ERRORS[corruption])
    if clean_error is not None:
        above, below = above - 5 * clean_error, below - 5 * ALEXNET_CLEAN_ERROR
    return 100 * (above / below)


def calibration_error(confidence: Array, hit: npt.NDArray[np.bool_], bins: int = BINS) -> float:
    """ECE: the mean gap between confidence and accuracy over equal-width bins, weighted by the images in each.

    >>> round(calibration_error(np.array([0.9, 0.9, 0.6, 0.6]), np.array([True, True, True, False])), 6)
    0.1
    """
    which = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)  # bins are (low, high]
    gaps = np.bincount(which, weights=confidence - hit, minlength=bins)
    return float(np.abs(gaps).sum() / max(len(which), 1))


def calibration_interval(confidence: Array, hit: npt.NDArray[np.bool_], seed: int = 0) -> tuple[float, float]:
    """The bootstrap 95 % interval of the ECE, from 200 resamples."""
    if not len(confidence):
        return math.nan, math.nan
    generator = np.random.default_rng(seed)
    drawn = (generator.integers(0, len(hit), len(hit)) for _ in range(200))
    low, high = np.quantile([calibration_error(confidence[pick], hit[pick]) for pick in drawn], [0.025, 0.975])
    return float(low), float(high)


def frame_pairs(frames: int, noise: bool, stride: int = 1) -> Iterator[tuple[int, int]]:
    """The frames that are compared, earlier first.

    >>> list(frame_pairs(4, noise=True)), list(frame_pairs(4, noise=False)), list(frame_pairs(4, False, stride=2))
    ([(0, 1), (0, 2), (0, 3)], [(0, 1), (1, 2), (2, 3)], [(0, 2), (1, 3)])
    """
    if noise:
        yield from ((0, frame) for frame in range(1, frames))
        return
    for phase in range(stride):
        yield from ((frame - stride, frame) for frame in range(phase + stride, frames, stride))


def flip_share(ranking: Tensor, noise: bool, stride: int = 1) -> Tensor:
    """The share of compared frames whose top-1 differs: (videos,), from rankings (videos, frames, 5 or more)."""
    first, second = _pairs(ranking, noise, stride)
    return (first[..., 0] != second[..., 0]).double().mean(1)


def top5_distance(ranking: Tensor, noise: bool, stride: int = 1) -> Tensor:
    """The mean distance of compared frames' top-5 lists: (videos,), from rankings (videos, frames, 5).

    As in the reference: a class at rank i of the earlier frame's five and at rank j of the later frame costs
    |i - min(j, 6)|; the five costs are added.
    """
    first, second = _pairs(ranking[..., :5], noise, stride)
    same = first.unsqueeze(-1) == second.unsqueeze(-2)  # (videos, pairs, rank before, rank after)
    ranks = torch.arange(1, first.shape[-1] + 1, device=ranking.device)
    later = torch.where(same.any(-1), (same * ranks).sum(-1), 6)
    return (later - ranks).abs().sum(-1).double().mean(1)


def _pairs(ranking: Tensor, noise: bool, stride: int) -> tuple[Tensor, Tensor]:
    pairs = torch.tensor(list(frame_pairs(ranking.shape[1], noise, stride)), device=ranking.device)
    return ranking[:, pairs[:, 0]], ranking[:, pairs[:, 1]]


def percent(values: Sequence[float]) -> list[float]:
    """Fractions as percentages."""
    return [100 * float(value) for value in values]


def accuracy(columns: Columns, seed: int = 0, headline: bool = False) -> Summary:
    """Top-1, top-5, error and ECE of one condition; the last two intervals only for a headline."""
    top1, confidence = columns["top1"], columns["confidence"].astype(np.float64)
    result: Summary = {
        "images": len(top1),
        "top1": 100 * float(top1.mean()),
        "top1_interval": percent(mean_interval(top1, seed)),
        "top5": 100 * float(columns["top5"].mean()),
        "error": 100 * (1 - float(top1.mean())),
        "ece": 100 * calibration_error(confidence, top1),
    }
    if headline:
        result["top5_interval"] = percent(mean_interval(columns["top5"], seed))
        result["ece_interval"] = percent(calibration_interval(confidence, top1, seed))
    return result


def condition_summary(outcomes: Mapping[str, Columns], seed: int) -> Summary:
    """The numbers of each condition; those of a single condition are the headline too."""
    each = {name: accuracy(columns, seed, headline=len(outcomes) <= 8) for name, columns in outcomes.items()}
    if len(each) == 1:
        return {**next(iter(each.values())), "cells": each}
    return {"cells": each}


def corruption_summary(outcomes: Mapping[str, Columns], seed: int, alexnet: bool = True) -> Summary:
    """Errors by corruption, the mean over the fifteen, and, for ImageNet-C, CE, mCE and relative mCE."""
    each = {name: accuracy(columns, seed, headline=name == "clean") for name, columns in outcomes.items()}
    errors: dict[str, dict[int, float]] = {}
    for condition, columns in outcomes.items():
        corruption, slash, severity = condition.partition("/")
        if slash:
            errors.setdefault(corruption, {})[int(severity)] = 1 - float(columns["top1"].mean())
    clean = 1 - float(outcomes["clean"]["top1"].mean()) if "clean" in outcomes else None
    rows: dict[str, Summary] = {}
    for name, values in errors.items():
        rows[name] = {"error": 100 * float(np.mean(list(values.values())))}
        if alexnet and sorted(values) == [1, 2, 3, 4, 5]:
            listed = [values[severity] for severity in range(1, 6)]
            rows[name]["ce"] = corruption_error(name, listed)
            if clean is not None:
                rows[name]["relative_ce"] = corruption_error(name, listed, clean)
    result: Summary = {k: v for k, v in each["clean"].items() if k != "images"} if "clean" in each else {}
    if all(len(errors.get(name, ())) == 5 for name in CORRUPTIONS):
        means: list[tuple[str, bool | None]] = [("mean_error", None)]
        means += [("mce", False)] * alexnet + [("relative_mce", True)] * (alexnet and clean is not None)
        for key, relative in means:
            shares = mce_shares(outcomes, relative)
            result[key] = 100 * float(shares.mean())
            result[f"{key}_interval"] = percent(mean_interval(shares, seed))
    return {**result, "corruptions": rows, "cells": each}


def mce_shares(outcomes: Mapping[str, Columns], relative: bool | None = False) -> Array:
    """The contribution of each image to mCE (None: to the mean error), whose mean over images is the score.

    If there are not as many clean images as corrupted ones, they cannot be paired, and the mean clean error is used.
    """
    total = np.zeros(len(outcomes[f"{CORRUPTIONS[0]}/1"]["top1"]))
    clean: Any = 0.0
    if relative:
        clean = ~outcomes["clean"]["top1"].astype(bool)
        clean = clean if len(clean) == len(total) else clean.mean()
    for name in CORRUPTIONS:
        missed = np.sum([~outcomes[f"{name}/{severity}"]["top1"].astype(bool) for severity in range(1, 6)], axis=0)
        below = 5.0 if relative is None else sum(ALEXNET_ERRORS[name])
        above = missed.astype(np.float64)
        if relative:
            above -= 5 * clean
            below -= 5 * ALEXNET_CLEAN_ERROR
        total += above / below
    return total / len(CORRUPTIONS)


def perturbation_summary(
    outcomes: Mapping[str, Columns], seed: int, difficulty: int = 1, t5d: Mapping[str, float] | None = None
) -> Summary:
    """Flip probability and top-5 distance per perturbation; mFR and mean top-5 distance if there are all ten."""
    each: dict[str, Summary] = {
        name: {
            "videos": len(columns["flip"]),
            "flip_probability": 100 * float(columns["flip"].mean()),
            "flip_interval": percent(mean_interval(columns["flip"], seed)),
            "top5_distance": float(columns["top5_distance"].mean()),
            "top5_distance_interval": list(mean_interval(columns["top5_distance"], seed)),
        }
        for name, columns in outcomes.items()
    }
    flips = {name: float(columns["flip"].mean()) for name, columns in outcomes.items()}
    result: Summary = {}
    if difficulty == 1:  # AlexNet's flips are published for difficulty 1 only
        for name, row in each.items():
            row["flip_rate"] = 100 * flips[name] / ALEXNET_FLIPS[name]
    if all(name in outcomes for name in ALEXNET_FLIPS):
        if difficulty == 1:
            shares = np.mean([outcomes[name]["flip"] / ALEXNET_FLIPS[name] for name in ALEXNET_FLIPS], axis=0)
            result["mfr"] = 100 * float(shares.mean())
            result["mfr_interval"] = percent(mean_interval(shares, seed))
        result["mean_flip_probability"] = 100 * float(np.mean(list(flips.values())))
        result["mean_top5_distance"] = float(np.mean([each[name]["top5_distance"] for name in ALEXNET_FLIPS]))
        if t5d is not None:
            result["mt5d"] = 100 * float(np.mean([each[name]["top5_distance"] / t5d[name] for name in ALEXNET_FLIPS]))
    return {**result, "cells": each}
