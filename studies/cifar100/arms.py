"""What is compared: the models, their arms, the seeds, the order of runs, and the recipe that all of them share.

Every run is vitfocus's own `cifar100` recipe with a few keys changed: the same ones for every arm, but for the spec.
The candidates of `CANDIDATES` are tried on the plain ViT-Ti with 5,000 training images held out; the best one's keys go
to every arm and to ViT-S. Nothing is tuned for an arm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

EPOCHS = 20
WARMUP_EPOCHS = 3
SEEDS = (0, 1, 2)
FINETUNE_EPOCHS = 2
HOLDOUT = 5_000

TINY, SMALL = "deit_tiny_patch16_224", "deit_small_patch16_224"

#: Treatments by arm. Where CB is compared in place (attention, front) it stands in the same upper half as in cb-upper.
TREATMENTS = {
    "plain": "",
    "cb-all": "cb(layers=all)",
    "cb-upper": "cb(layers=upper)",
    "cbs": "cbs(layers=all)",
    "cb-attention": "cb(site=attention,layers=upper)",
    "cb-front": "cb(position=front,layers=upper)",
    "se": "se",
    "tap": "tap(branches=4)",
    "adl": "adl(variant=official,threshold=2,weight=1)",
    "adl-paper": "adl(variant=paper,threshold=2,weight=1)",
    "tap-adl": "tap(branches=4)+adl",
    "cb-tap-adl": "cb(layers=upper)+tap(branches=4)+adl",
    "cbs-tap-adl": "cbs(layers=all)+tap(branches=4)+adl",
}
#: What is inserted into the trained DeiT-Ti: nothing that changes its answers.
FINETUNE_TREATMENTS = {
    "plain": "",
    "cbs": "cbs(layers=all)",
    "tap": "tap(branches=4,init=near_identity)",
    "adl": "adl",
    "cbs-tap-adl": "cbs(layers=all)+tap(branches=4,init=near_identity)+adl",
}


@dataclass(frozen=True)
class Arm:
    """One row of the study: a model with its treatments; `arguments` are the model's own, beyond the recipe's."""

    group: str
    name: str
    base: str
    treatments: str
    arguments: tuple[str, ...] = ()

    @property
    def spec(self) -> str:
        """As `vitfocus.create_model` reads it."""
        return "+".join(filter(None, [self.base, self.treatments]))


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    arm: Arm
    seed: int

    @property
    def place(self) -> str:
        """The run's file below the results, and its folder below the work, without the ending.

        >>> Run(ARMS["vit-ti"]["cbs"], 2).place
        'vit-ti/cbs/seed2'
        """
        return f"{self.arm.group}/{self.arm.name}/seed{self.seed}"


def _arms(group: str, base: str, names: tuple[str, ...]) -> dict[str, Arm]:
    return {name: Arm(group, name, base, TREATMENTS[name]) for name in names}


def _heads() -> dict[str, Arm]:
    """ViT-Ti with 1 and with 12 heads; the rows with its usual 3 are those of `vit-ti`."""
    return {
        f"{name}-{heads}": Arm("heads", f"{name}-{heads}", TINY, TREATMENTS[name], (f"num_heads={heads}",))
        for heads in (1, 12)
        for name in ("plain", "cb-upper")
    }


ARMS: dict[str, dict[str, Arm]] = {
    "vit-ti": _arms("vit-ti", TINY, tuple(TREATMENTS)),
    "vit-s": _arms("vit-s", SMALL, ("plain", "cb-upper", "cbs", "tap-adl", "cb-tap-adl")),
    "heads": _heads(),
    "fine-tune": {name: Arm("fine-tune", name, TINY, spec) for name, spec in FINETUNE_TREATMENTS.items()},
}

#: What every run has in place of the shipped recipe's: few epochs leave nothing for stochastic depth to regularise, and
#: blocks that are alike are compiled once.
SHARED = ("name=adamw", "drop_path=0", "compile=blocks")
_UNMIXED = ("mixup=0", "cutmix=0")
_LIGHT = "randaugment=rand-m6-mstd0.5-inc1"
_DEIT = "randaugment=rand-m9-mstd0.5-inc1"
#: What may differ from the shipped recipe, tried on the plain ViT-Ti: first DeiT's own strength, then lighter pictures
#: and more steps, clipped.
CANDIDATES: dict[str, tuple[str, ...]] = {
    "shipped": ("lr=1e-3", "batch=512", _DEIT),
    "fast": ("lr=2e-3", "batch=512", _DEIT),
    "light": ("lr=2e-3", "batch=512", _LIGHT),
    "unmixed": ("lr=2e-3", "batch=512", _DEIT, *_UNMIXED),
    "clipped": ("lr=1e-3", "batch=512", _LIGHT, *_UNMIXED, "clip=1"),
    "batch-256": ("lr=1e-3", "batch=256", _LIGHT, *_UNMIXED, "clip=1"),
    "batch-128": ("lr=1e-3", "batch=128", _LIGHT, *_UNMIXED, "clip=1"),
    "batch-128-slow": ("lr=5e-4", "batch=128", _LIGHT, *_UNMIXED, "clip=1"),
}


#: What is trained from scratch, and what from trained weights.
SCRATCH, TUNED = ("vit-ti", "vit-s", "heads"), ("fine-tune",)
#: Which group's seeds come when: an arm can be judged by three, and the small runs show the most for their time.
ORDER = ("vit-ti", "fine-tune", "vit-s", "heads")


def study_runs(groups: Iterable[str] = ORDER, seeds: tuple[int, ...] = SEEDS) -> Iterator[Run]:
    """Every run of some groups, in order: one seed of every arm before the next, so that a group is balanced anywhere.

    >>> [run.place for run in study_runs()][:2], sum(1 for _ in study_runs()), sum(1 for _ in study_runs(SCRATCH))
    (['vit-ti/plain/seed0', 'vit-ti/cb-all/seed0'], 81, 66)
    """
    for group in (group for group in ORDER if group in set(groups)):
        for seed in seeds:
            yield from (Run(arm, seed) for arm in ARMS[group].values())
