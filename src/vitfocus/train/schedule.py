"""The length of a run and its learning rate at each step, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from vitfocus.recipes.settings import Recipe


@dataclass(frozen=True)
class TrainingSchedule:
    """How many steps a run has, where its epochs end, and its learning rate at each step."""

    steps: int
    images: int
    steps_per_epoch: float
    warmup: int
    lr: float
    warmup_lr: float
    min_lr: float
    decay: str = "cosine"
    power: float = 1.0
    drops: tuple[float, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, images: int) -> TrainingSchedule:
        """The schedule of a recipe for so many training images."""
        per_epoch = images / recipe.data.batch
        optimiser, schedule = recipe.optimiser, recipe.schedule
        steps = schedule.steps or max(1, math.ceil(schedule.epochs * per_epoch - 1e-9))
        scale = recipe.data.batch / optimiser.lr_batch if optimiser.lr_batch else 1.0
        by_epochs = 0 if schedule.steps else round(schedule.warmup_epochs * per_epoch)
        warmup = min(steps, schedule.warmup_steps or by_epochs)
        rates = (optimiser.lr * scale, schedule.warmup_lr, schedule.min_lr)
        return cls(steps, images, per_epoch, warmup, *rates, schedule.decay, schedule.power, schedule.drops)

    def learning_rate(self, step: int) -> float:
        """Linear from warmup_lr up to lr, then down: half a cosine or a line to min_lr after the warm-up, a power of
        the share of the run that is left (counted from the first step, as is usual in segmentation), or divided by ten
        at each drop.

        >>> schedule = TrainingSchedule(
        ...     steps=110, images=160, steps_per_epoch=10, warmup=10, lr=1.0, warmup_lr=0.0, min_lr=0.0
        ... )
        >>> [round(schedule.learning_rate(step), 3) for step in (0, 5, 10, 60)]
        [0.0, 0.5, 1.0, 0.5]
        """
        low, high = min(self.min_lr, self.lr), self.lr
        if self.decay == "polynomial":
            high = low + (self.lr - low) * (1 - step / self.steps) ** self.power
        elif self.decay == "drops":
            high = max(low, self.lr * 0.1 ** sum(step >= share * self.steps for share in self.drops))
        if step < self.warmup:
            return self.warmup_lr + (high - self.warmup_lr) * step / self.warmup
        if self.decay in ("polynomial", "drops"):
            return high
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        left = 1 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return low + (self.lr - low) * left

    def epoch(self, step: int) -> float:
        """Epochs done after so many steps."""
        return step / self.steps_per_epoch

    def ends_epoch(self, step: int) -> int:
        """The number of the epoch that this step completes, or 0."""
        before, after = math.floor(self.epoch(step) + 1e-9), math.floor(self.epoch(step + 1) + 1e-9)
        return after if after > before else 0


def set_learning_rate(optimiser: Optimizer, rate: float) -> None:
    """Set the rate of every group; layer-wise decay is a factor that timm keeps as `lr_scale`."""
    for group in optimiser.param_groups:
        value = rate * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):  # which a captured step reads
            group["lr"].fill_(value)
        else:
            group["lr"] = value
