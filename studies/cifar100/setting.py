"""Where a study takes place, and at which scale: everything that a run needs besides its arm and seed."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mosaics
from arms import CANDIDATES, EPOCHS, FINETUNE_EPOCHS, HOLDOUT, SEEDS, WARMUP_EPOCHS

from vitfocus.core.statistics import evenly_spaced
from vitfocus.corruptions import CORRUPTIONS


@dataclass(frozen=True)
class Scale:
    """How much is done. `recipe` are keys changed for the scale's sake alone; images are counted in test images."""

    name: str = "full"
    epochs: float = EPOCHS
    warmup_epochs: float = WARMUP_EPOCHS
    finetune_epochs: float = FINETUNE_EPOCHS
    seeds: tuple[int, ...] = SEEDS
    holdout: int = HOLDOUT
    recipe: tuple[str, ...] = ()
    finetune: tuple[str, ...] = ("enlarge=224",)
    candidates: int = len(CANDIDATES)
    steps: tuple[str, ...] = ("select", "train", "finetune", "diagnose", "cost")
    places: tuple[str, ...] = ()  # runs that are made; none named: all
    corruptions: tuple[str, ...] = CORRUPTIONS
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    test_images: int | None = None  # None: all
    reading_images: int = 1_000
    corrupted_images: int = 5_000  # of the test images, evenly spaced
    finetune_corrupted_images: int = 2_500
    finetune_severities: tuple[int, ...] = (1, 3, 5)
    cost_rounds: int = 7
    cost_seconds: float = 0.3


FULL = Scale()

#: The study's own models, data and steps for some seconds each: shows what would fail, and compiles what is needed.
REHEARSAL = Scale(
    name="rehearsal",
    epochs=0.5,
    warmup_epochs=0.1,
    finetune_epochs=0.1,
    seeds=(0,),
    candidates=1,
    steps=("select", "train", "finetune"),
    places=("vit-ti/plain", "vit-ti/cb-tap-adl", "vit-s/tap-adl", "heads/cb-upper-1", "fine-tune/cbs-tap-adl"),
    test_images=1_000,
    reading_images=100,
    corrupted_images=100,
    finetune_corrupted_images=100,
)

_LITTLE = "model.arguments.embed_dim=24", "model.arguments.depth=2"
#: A few hundred images and models of two layers: shows that everything runs, and says nothing about any treatment.
SMOKE = Scale(
    name="smoke",
    epochs=1,
    warmup_epochs=0.25,
    finetune_epochs=1,
    seeds=(0, 1),
    holdout=32,
    recipe=(
        "train_length=128",
        "val_length=64",
        "batch=32",
        *_LITTLE,
        "model.arguments.patch_size=8",
        "model.arguments.num_classes=100",
        "device=cpu",
        "compile=no",
    ),
    finetune=("enlarge=64", "model.arguments.patch_size=16", "model.arguments.num_heads=3"),
    candidates=2,
    corruptions=("gaussian_noise", "fog"),
    severities=(1, 5),
    test_images=64,
    reading_images=16,
    corrupted_images=32,
    finetune_corrupted_images=32,
    finetune_severities=(3,),
    cost_rounds=2,
    cost_seconds=0.0,
)


@dataclass(frozen=True)
class Setting:
    """Folders and scale of one study. `frost`, `weights` and `photos` may be missing; what needs them says so."""

    data: Path | None
    results: Path
    work: Path
    frost: Path | None = None
    weights: Path | None = None
    photos: Path | None = None
    scale: Scale = field(default_factory=Scale)
    workers: int = 1
    slots: int = 2  # of the workers, those that may compute on the device at once
    limit: int | None = None  # photographs of the diagnosis

    def data_keys(self) -> list[str]:
        """The recipe's keys that name the data, chosen by what the folder holds."""
        if self.data is None:
            return ["source=shapes"]
        return mosaics.data_keys(self.data, self.work)

    def result(self, place: str) -> Path:
        """The file of a finished run."""
        return self.results / f"{place}.json"


def evenly(images: Any, labels: Any, count: int) -> tuple[Any, Any]:
    """So many of the images and their labels, evenly spaced; all where there are no more."""
    chosen = list(evenly_spaced(len(images), count))
    return images[chosen], labels[chosen]


@functools.lru_cache(maxsize=1)
def test_images(setting: Setting) -> tuple[Any, Any]:
    """The test set, uint8 (N, 3, 32, 32) and labels (N,), read once a process."""
    from vitfocus.data.classification.dataset import open_images
    from vitfocus.train import load_recipe

    recipe = load_recipe("cifar100", [*setting.data_keys(), *setting.scale.recipe])
    images: Any = open_images(recipe.data, "val")
    count = setting.scale.test_images
    return images.pixels[:count], images.labels[:count]
