"""The numbers of a run that are compared: what each is called, in what unit, and which way is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One number of a run; `better` is +1 where more is better, -1 where less is, 0 where neither is meant."""

    title: str
    unit: str
    digits: int
    better: int
    take: Callable[[Run], float | None]

    def write(self, value: float, signed: bool = False) -> str:
        """The number with its usual digits.

        >>> ACCURACY.write(75.4321), ACCURACY.write(-0.001, signed=True)
        ('75.43', '+0.00')
        """
        return f"{value:+z.{self.digits}f}" if signed else f"{value:z.{self.digits}f}"


def at(*path: str) -> Callable[[Run], float | None]:
    """The number at a path of keys."""
    return lambda run: _number(walk(run, path))


def mean_at(*path: str, deep: bool = False) -> Callable[[Run], float | None]:
    """The mean over the layers of a list at a path of keys; `deep`: over the upper half of them.

    >>> mean_at("reading", "entropy", deep=True)({"reading": {"entropy": [1.0, 2.0, 3.0, 5.0]}})
    4.0
    """

    def take(run: Run) -> float | None:
        layers = by_layer(run, *path)
        return fmean(layers[len(layers) // 2 :] if deep else layers) if layers else None

    return take


def by_layer(run: Run, *path: str) -> list[float]:
    """The numbers of all layers, or nothing where one is missing."""
    found = walk(run, path)
    numbers = [_number(value) for value in found] if isinstance(found, list) else []
    return [number for number in numbers if number is not None] if None not in numbers else []


def names_at(runs: Iterable[Run], *path: str) -> list[str]:
    """The keys that runs have at a path, in the order in which they are met."""
    found: dict[str, None] = {}
    for run in runs:
        inner = walk(run, path)
        if isinstance(inner, Mapping):
            found.update(dict.fromkeys(inner))
    return list(found)


def walk(run: Any, path: Iterable[str]) -> Any:
    """What lies at a path of keys, or None."""
    for key in path:
        if not isinstance(run, Mapping) or key not in run:
            return None
        run = run[key]
    return run


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _mean(found: Any) -> float | None:
    """The mean of a record of numbers, if there are any and none is missing."""
    numbers = [_number(value) for value in found.values()] if isinstance(found, Mapping) else []
    kept = [number for number in numbers if number is not None]
    return fmean(kept) if kept and len(kept) == len(numbers) else None


def _kept(run: Run) -> float | None:
    """Accuracy on corrupted images as a share of accuracy on clean ones, in percent.

    >>> _kept({"clean": {"accuracy": 50.0}, "corruption": {"mean_error": 60.0}})
    80.0
    """
    accuracy, error = at("clean", "accuracy")(run), at("corruption", "mean_error")(run)
    return 100 * (100 - error) / accuracy if accuracy and error is not None else None


ACCURACY = Outcome("accuracy", "%", 2, 1, at("clean", "accuracy"))
TOP5 = Outcome("top-5 accuracy", "%", 2, 1, at("clean", "top5"))
CORRUPTION = Outcome("corruption error", "%", 2, -1, at("corruption", "mean_error"))
KEPT = Outcome("accuracy kept under corruption", "% of clean", 2, 1, _kept)
ENTROPY = Outcome("entropy", "nats", 3, 0, mean_at("reading", "entropy"))
DEEP_ENTROPY = Outcome("entropy, upper half", "nats", 3, 0, mean_at("reading", "entropy", deep=True))
OVERFOCUS = Outcome("overfocus", "share", 3, 0, mean_at("reading", "overfocus"))
HEADS_ALIKE = Outcome("head similarity", "cosine", 3, 0, mean_at("reading", "head_similarity"))
DIAGONAL = Outcome("diagonal share", "share", 3, 0, mean_at("reading", "diagonal"))
OCCLUSION = Outcome("occlusion, mean", "%", 2, 1, lambda run: _mean(walk(run, ("occlusion",))))
STABILITY = Outcome("stability under noise", "cosine", 3, 1, at("stability", "gaussian_noise", "mean"))


def corruption(name: str) -> Outcome:
    """The error under one corruption, the mean over its severities."""
    return Outcome(name.replace("_", " "), "%", 2, -1, at("corruption", "by_corruption", name))


def fgsm(epsilon: str) -> Outcome:
    """The accuracy under FGSM at an epsilon."""
    return Outcome(f"FGSM {epsilon}", "%", 2, 1, at("fgsm", epsilon))


def occlusion(name: str) -> Outcome:
    """The accuracy with parts of the image hidden, under the suite's own name of them."""
    return Outcome(f"occlusion: {name}", "%", 2, 1, at("occlusion", name))


def stability(name: str) -> Outcome:
    """The stability under one corruption."""
    return Outcome(f"stability: {name.replace('_', ' ')}", "cosine", 3, 1, at("stability", name, "mean"))
