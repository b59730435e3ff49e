"""One condition of a suite, such as "fog/3": what is done to a batch, and what each model's answers are reduced to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vitfocus.attention.reading import resting
from vitfocus.robustness.pixels import PixelModel
from vitfocus.robustness.sources import Batch
from vitfocus.robustness.stability import flip_share, top5_distance

Outcome = dict[str, Tensor]  # one value an image, (B,)
Change = Callable[[Batch], Tensor]
Attack = Callable[[PixelModel, Batch], Tensor]


class Cell(Protocol):
    """One condition: a name, and each model's outcome on a batch under it."""

    @property
    def name(self) -> str: ...

    def __call__(self, batch: Batch, models: Sequence[PixelModel]) -> list[Outcome]:
        """Return one outcome per model."""
        ...


@dataclass(frozen=True)
class Classify:
    """Change the images once, ask every model. `classes` keeps only those logits; labels then count within them."""

    name: str
    change: Change | None = None
    classes: tuple[int, ...] | None = None

    def __call__(self, batch: Batch, models: Sequence[PixelModel]) -> list[Outcome]:
        images = batch.images if self.change is None else self.change(batch)
        with torch.no_grad():
            return [hits(model(images), batch.labels, self.classes) for model in models]


@dataclass(frozen=True)
class Attacked:
    """Change the images against each model in turn, and ask that model."""

    name: str
    attack: Attack

    def __call__(self, batch: Batch, models: Sequence[PixelModel]) -> list[Outcome]:
        outcomes = []
        for model in models:
            images = self.attack(model, batch)
            with torch.no_grad():
                outcomes.append(hits(model(images), batch.labels))
        return outcomes


@dataclass(frozen=True)
class Watched:
    """Show every model a sequence of frames per image, (B, frames, 3, H, W), and count how its answer changes."""

    name: str
    frames: Change
    noise: bool
    stride: int = 1
    at_once: int = 128

    def __call__(self, batch: Batch, models: Sequence[PixelModel]) -> list[Outcome]:
        frames = self.frames(batch)
        flat = frames.flatten(0, 1)
        outcomes = []
        for model in models:
            with torch.no_grad():
                logits = [model(part) for part in flat.split(self.at_once)]
            ranking = torch.cat([_best(part, 5) for part in logits]).view(*frames.shape[:2], -1)
            broken = torch.cat([part.isnan().any(1) for part in logits]).view(*frames.shape[:2]).any(1)
            ranking, broken = resting(ranking), resting(broken)
            flips = flip_share(ranking, self.noise, self.stride).masked_fill(broken, torch.nan)
            outcomes.append({"flip": flips, "top5_distance": top5_distance(ranking, self.noise, self.stride)})
        return outcomes


def hits(logits: Tensor, labels: Tensor, classes: tuple[int, ...] | None = None) -> Outcome:
    """Top-1, top-5, confidence and prediction; labels are (B,), or (B, K) where any of several is right (-1: none)."""
    if classes is not None:
        logits = logits[:, torch.tensor(classes, device=logits.device)]
    best = _best(logits, 5)
    right = (best.unsqueeze(2) == labels.view(len(labels), 1, -1)).any(2)
    return {
        "top1": right[:, 0],
        "top5": right.any(1),
        "confidence": logits.softmax(1).amax(1),
        "prediction": best[:, 0].int(),
    }


def _best(logits: Tensor, count: int) -> Tensor:
    return logits.topk(min(count, logits.shape[1]), dim=1).indices
