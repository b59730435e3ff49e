"""From per-image outcomes to the numbers people quote, in percent, with bootstrap 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitfocus.corruptions import CORRUPTIONS
from vitfocus.robustness.plan import Columns, Summary
from vitfocus.robustness.references import ALEXNET_CLEAN_ERROR, ALEXNET_ERRORS, ALEXNET_FLIPS
from vitfocus.robustness.scores import (
    Array,
    calibration_error,
    calibration_interval,
    corruption_error,
    mean_corruption_error,
    mean_flip_rate,
    mean_interval,
)


def percent(values: Sequence[float]) -> list[float]:
    """Fractions as percentages."""
    return [100 * float(value) for value in values]


def accuracy(columns: Columns, seed: int = 0, headline: bool = False) -> Summary:
    """Top-1, top-5, error and ECE of one condition; the ECE's interval only where it is a headline."""
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


def simple(cells: Mapping[str, Columns], seed: int) -> Summary:
    """Conditions that stand beside each other; a single one is the headline itself."""
    each = {name: accuracy(columns, seed, headline=len(cells) <= 8) for name, columns in cells.items()}
    if len(each) == 1:
        return {**next(iter(each.values())), "cells": each}
    return {"cells": each}


def corrupted(cells: Mapping[str, Columns], seed: int, alexnet: bool = True) -> Summary:
    """Errors by corruption, the mean over the fifteen, and, for ImageNet-C, CE, mCE and relative mCE."""
    each = {name: accuracy(columns, seed, headline=name == "clean") for name, columns in cells.items()}
    errors = _by_corruption({name: 1 - float(columns["top1"].mean()) for name, columns in cells.items()})
    clean = 1 - float(cells["clean"]["top1"].mean()) if "clean" in cells else None
    whole = {name: values for name, values in errors.items() if sorted(values) == [1, 2, 3, 4, 5]}
    rows: dict[str, Summary] = {}
    for name, values in errors.items():
        rows[name] = {"error": 100 * float(np.mean(list(values.values())))}
        if alexnet and name in whole:
            listed = [values[severity] for severity in range(1, 6)]
            rows[name]["ce"] = corruption_error(name, listed)
            if clean is not None:
                rows[name]["relative_ce"] = corruption_error(name, listed, clean)
    result: Summary = {k: v for k, v in each["clean"].items() if k != "images"} if "clean" in each else {}
    if all(name in whole for name in CORRUPTIONS):
        listed_all = {name: [whole[name][severity] for severity in range(1, 6)] for name in CORRUPTIONS}
        result["mean_error"] = float(np.mean([rows[name]["error"] for name in CORRUPTIONS]))
        result["mean_error_interval"] = percent(mean_interval(mce_shares(cells, None), seed))
        if alexnet:
            result["mce"] = mean_corruption_error(listed_all)
            result["mce_interval"] = percent(mean_interval(mce_shares(cells, False), seed))
            if clean is not None:
                result["relative_mce"] = mean_corruption_error(listed_all, clean)
                result["relative_mce_interval"] = percent(mean_interval(mce_shares(cells, True), seed))
    return {**result, "corruptions": rows, "cells": each}


def _by_corruption(errors: Mapping[str, float]) -> dict[str, dict[int, float]]:
    result: dict[str, dict[int, float]] = {}
    for name, error in errors.items():
        corruption, slash, severity = name.partition("/")
        if slash:
            result.setdefault(corruption, {})[int(severity)] = error
    return result


def mce_shares(cells: Mapping[str, Columns], relative: bool | None = False) -> Array:
    """Each image's own contribution to mCE (None: to the plain mean error), whose mean over images is the score.

    Where the clean images are not as many as the corrupted, no image has a clean one of its own, and the clean error
    counts as it is.
    """
    total = np.zeros(len(cells[f"{CORRUPTIONS[0]}/1"]["top1"]))
    clean: Any = 0.0
    if relative:
        clean = ~cells["clean"]["top1"].astype(bool)
        clean = clean if len(clean) == len(total) else clean.mean()
    for name in CORRUPTIONS:
        missed = np.sum([~cells[f"{name}/{severity}"]["top1"].astype(bool) for severity in range(1, 6)], axis=0)
        below = 5.0 if relative is None else sum(ALEXNET_ERRORS[name])
        above = missed.astype(np.float64)
        if relative:
            above -= 5 * clean
            below -= 5 * ALEXNET_CLEAN_ERROR
        total += above / below
    return total / len(CORRUPTIONS)


def watched(
    cells: Mapping[str, Columns], seed: int, difficulty: int = 1, t5d: Mapping[str, float] | None = None
) -> Summary:
    """Flip probability and top-5 distance by perturbation; mFR and mean top-5 distance where all ten are there."""
    each: dict[str, Summary] = {
        name: {
            "videos": len(columns["flip"]),
            "flip_probability": 100 * float(columns["flip"].mean()),
            "flip_interval": percent(mean_interval(columns["flip"], seed)),
            "top5_distance": float(columns["top5_distance"].mean()),
            "top5_distance_interval": list(mean_interval(columns["top5_distance"], seed)),
        }
        for name, columns in cells.items()
    }
    flips = {name: float(columns["flip"].mean()) for name, columns in cells.items()}
    result: Summary = {}
    if difficulty == 1:  # AlexNet's flips are published for difficulty 1 only
        for name, row in each.items():
            row["flip_rate"] = 100 * flips[name] / ALEXNET_FLIPS[name]
    if all(name in cells for name in ALEXNET_FLIPS):
        if difficulty == 1:
            result["mfr"] = mean_flip_rate(flips)
            shares = np.mean([cells[name]["flip"] / ALEXNET_FLIPS[name] for name in ALEXNET_FLIPS], axis=0)
            result["mfr_interval"] = percent(mean_interval(shares, seed))
        result["mean_flip_probability"] = 100 * float(np.mean(list(flips.values())))
        result["mean_top5_distance"] = float(np.mean([each[name]["top5_distance"] for name in ALEXNET_FLIPS]))
        if t5d is not None:
            result["mt5d"] = 100 * float(np.mean([each[name]["top5_distance"] / t5d[name] for name in ALEXNET_FLIPS]))
    return {**result, "cells": each}
