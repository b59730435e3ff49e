"""Images that were tampered with: parts hidden (occlusion), or changed against the model (FGSM, PGD, AutoAttack)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from vitfocus.core.arguments import real, several, whole
from vitfocus.core.errors import VitfocusError
from vitfocus.robustness.attacks import NORMS, autoattack, fgsm, pgd, require_autoattack
from vitfocus.robustness.cells import Attacked, Cell, Classify
from vitfocus.robustness.occlusion import GRID, drop_patches, occlude_centre
from vitfocus.robustness.pixels import PixelModel
from vitfocus.robustness.plan import Group, Plan
from vitfocus.robustness.sources import Batch
from vitfocus.robustness.suites.context import Context
from vitfocus.robustness.summaries import simple

CENTRES = (56, 112, 168)
DROPS = (49, 98, 147)  # a quarter, a half, three quarters of 14 x 14
EPSILONS = (1.0,)


def _plan(context: Context, cells: Sequence[Cell]) -> Plan:
    group = Group(context.suite, context.images(), (Classify("clean"), *cells))
    return Plan((group,), context.protocol, simple, tuple(context.notes))


def occlusion(context: Context) -> Plan:
    """The centre hidden, at several sizes (pixels of 224), and random cells of a 14 x 14 grid."""
    centres, drops = (
        [
            whole(f"One of {name}", value, 0, most)
            for value in several(name, context.options.get(name, usual), empty=True)
        ]
        for name, usual, most in (("sizes", CENTRES, 224), ("drops", DROPS, GRID * GRID))
    )
    context.protocol |= {
        "seed": context.seed,
        "sizes": centres,
        "drops": drops,
        "grid": GRID,
        "fill": "black, before normalisation",
    }
    cells: list[Cell] = [Classify(f"centre/{side}", partial(_centre, side)) for side in centres]
    cells += [Classify(f"drop/{count}", partial(_drop, count, context.seed)) for count in drops]
    return _plan(context, cells)


def _centre(side: int, batch: Batch) -> Tensor:
    return occlude_centre(batch.images, side)


def _drop(count: int, seed: int, batch: Batch) -> Tensor:
    return drop_patches(batch.images, count, batch.ids, seed)


def attack(context: Context) -> Plan:
    """FGSM, PGD or AutoAttack at one or several epsilons, in 1/255."""
    epsilons = [
        real("eps", eps, "distances in 1/255, such as 4")
        for eps in several("eps", context.options.get("eps", EPSILONS))
    ]
    norm = context.options.get("norm", "linf")
    if norm not in NORMS:
        raise VitfocusError(f"There is no norm {norm!r}; expected {' or '.join(NORMS)}.")
    if context.models and context.models[0].precision != "float32":
        raise VitfocusError("Attacks need gradients in full precision: leave precision at float32.")
    settings: dict[str, Any] = {"norm": norm}
    if context.suite == "pgd":
        stride = context.options.get("step_size")
        settings["steps"] = whole("steps", context.options.get("steps", 5), low=1)
        settings["step_size"] = None if stride is None else real("step_size", stride, "a length in 1/255, such as 0.5")
        settings["random_start"] = bool(context.options.get("random_start", True))
    if context.suite == "autoattack":
        require_autoattack()
    context.protocol |= {"seed": context.seed, "eps": epsilons, **settings}
    cells = [
        Attacked(f"{context.suite}/{eps:g}", partial(_attacked, context.suite, eps, settings, context.seed))
        for eps in epsilons
    ]
    context.notes.append(
        f"Epsilon is in 1/255, {norm}, between images in [0, 1]; the model's normalisation is inside the attack."
    )
    return _plan(context, cells)


def _attacked(suite: str, eps: float, settings: dict[str, Any], seed: int, model: PixelModel, batch: Batch) -> Tensor:
    if suite == "fgsm":
        return fgsm(model, batch.images, batch.labels, eps, settings["norm"])
    if suite == "autoattack":
        return autoattack(model, batch.images, batch.labels, eps, settings["norm"], seed)
    return pgd(model, batch.images, batch.labels, eps, seed=seed, ids=batch.ids, **settings)
