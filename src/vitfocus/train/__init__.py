"""Training: recipes, the training loop, and checkpoints that survive a crash."""

from __future__ import annotations

from typing import Any

from vitfocus.recipes import Recipe
from vitfocus.train.recipe import load_recipe, shipped_recipes

__all__ = ["Recipe", "load_recipe", "shipped_recipes", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":  # accelerate and timm are imported when a run begins, not when recipes are listed
        from vitfocus.train.run import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
