"""The learning rate and the run's length, in closed form: a step's number says everything."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer

from vitfocus.train.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """How many steps a run has, where its epochs end, and its rate at each step."""

    steps: int
    images: int
    steps_per_epoch: float
    warmup: int
    lr: float
    warmup_lr: float
    min_lr: float

    @classmethod
    def of(cls, recipe: Recipe, images: int) -> Plan:
        """The plan of a recipe for so many training images."""
        per_epoch = images / recipe.data.batch
        steps = max(1, math.ceil(recipe.schedule.epochs * per_epoch - 1e-9))
        optimiser, schedule = recipe.optimiser, recipe.schedule
        scale = recipe.data.batch / optimiser.lr_batch if optimiser.lr_batch else 1.0
        warmup = min(steps, round(schedule.warmup_epochs * per_epoch))
        return cls(steps, images, per_epoch, warmup, optimiser.lr * scale, schedule.warmup_lr, schedule.min_lr)

    def rate(self, step: int) -> float:
        """Linear from warmup_lr to lr, then half a cosine down to min_lr.

        >>> plan = Plan(steps=110, images=160, steps_per_epoch=10, warmup=10, lr=1.0, warmup_lr=0.0, min_lr=0.0)
        >>> plan.rate(0), plan.rate(5), plan.rate(10), round(plan.rate(60), 3)
        (0.0, 0.5, 1.0, 0.5)
        """
        if step < self.warmup:
            return self.warmup_lr + (self.lr - self.warmup_lr) * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        low = min(self.min_lr, self.lr)
        return low + (self.lr - low) * 0.5 * (1 + math.cos(math.pi * done))

    def epoch(self, step: int) -> float:
        """Epochs done after so many steps."""
        return step / self.steps_per_epoch

    def ends_epoch(self, step: int) -> int:
        """The number of the epoch that this step completes, or 0."""
        before, after = math.floor(self.epoch(step) + 1e-9), math.floor(self.epoch(step + 1) + 1e-9)
        return after if after > before else 0


def set_rate(optimiser: Optimizer, rate: float) -> None:
    """Give every group its rate; layer-wise decay is a factor that timm keeps as `lr_scale`."""
    for group in optimiser.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
