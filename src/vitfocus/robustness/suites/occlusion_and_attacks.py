"""Images that were tampered with: parts hidden (occlusion), or changed against the model (FGSM, PGD, AutoAttack)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitfocus.core.arguments import real, several, whole
from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions.draws import Draws
from vitfocus.robustness.attacks import NORMS, autoattack, fgsm, pgd, require_autoattack
from vitfocus.robustness.classification import CLEAN, classification_plan, classify, num_classes, open_images
from vitfocus.robustness.engine import Condition, EvaluationArguments, Group, Plan
from vitfocus.robustness.metrics import condition_summary
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.sources import EvaluationBatch

GRID = 14


def _plan(
    arguments: EvaluationArguments, conditions: Sequence[Condition], protocol: Mapping[str, Any], *notes: str
) -> Plan:
    classes = num_classes(arguments)
    images = open_images(arguments, classes)
    group = Group(arguments.suite.name, images.source, (CLEAN, *conditions))
    protocol = {**protocol, **images.protocol, "seed": arguments.seed}
    return classification_plan([group], classes, protocol, condition_summary, (*notes, *images.notes))


def occlusion(arguments: EvaluationArguments) -> Plan:
    """The centre hidden, at several sizes (pixels of 224), and random cells of a 14 x 14 grid."""
    centres, drops = (
        [whole(f"One of {name}", value, 0, most) for value in several(name, given, empty=True)]
        for name, given, most in (
            ("sizes", arguments.options.sizes, 224),
            ("drops", arguments.options.drops, GRID * GRID),
        )
    )
    conditions = [Condition(f"centre/{side}", classify, partial(_centre, side)) for side in centres]
    conditions += [Condition(f"drop/{count}", classify, partial(_drop, count, arguments.seed)) for count in drops]
    protocol = {"sizes": centres, "drops": drops, "grid": GRID, "fill": "black, before normalisation"}
    return _plan(arguments, conditions, protocol)


def _centre(side: int, batch: EvaluationBatch) -> Tensor:
    return occlude_centre(batch.images, side)


def _drop(count: int, seed: int, batch: EvaluationBatch) -> Tensor:
    return drop_patches(batch.images, count, batch.ids, seed)


def occlude_centre(images: Tensor, side: int, base: int = 224) -> Tensor:
    """Black out the central square of `side` pixels, measured on an image of `base`: (B, C, H, W) of any dtype.

    >>> images = occlude_centre(torch.ones(1, 1, 8, 8), side=4, base=8)
    >>> int(images.sum()), float(images[0, 0, 2, 2]), float(images[0, 0, 1, 2])
    (48, 0.0, 1.0)
    """
    if not 0 <= side <= base:
        raise VitfocusError(f"A centre of {side} pixels cannot be hidden; expected 0 to {base}.")
    height, width = images.shape[-2:]
    tall, wide = round(side * height / base), round(side * width / base)
    top, left = (height - tall) // 2, (width - wide) // 2
    hidden = images.clone()
    hidden[..., top : top + tall, left : left + wide] = 0
    return hidden


def drop_patches(images: Tensor, count: int, ids: Tensor, seed: int = 0, grid: int = GRID) -> Tensor:
    """Black out `count` random cells of a `grid` x `grid` grid, drawn for each image from (seed, id): (B, C, H, W).

    >>> images = drop_patches(torch.ones(2, 1, 28, 28), 98, ids=torch.tensor([5, 6]))
    >>> images.sum(dim=(1, 2, 3)).tolist()
    [392.0, 392.0]
    """
    if not 0 <= count <= grid * grid:
        raise VitfocusError(f"{count} cells of a {grid}x{grid} grid cannot be dropped; expected 0 to {grid * grid}.")
    draws = Draws(seed, "patch drop", count, ids).uniform((grid * grid,))
    keep = (draws.argsort(dim=1).argsort(dim=1) >= count).view(-1, 1, grid, grid)
    rows = torch.arange(images.shape[-2], device=images.device) * grid // images.shape[-2]
    columns = torch.arange(images.shape[-1], device=images.device) * grid // images.shape[-1]
    return images * keep[:, :, rows][:, :, :, columns].to(images.dtype)


def attack(arguments: EvaluationArguments) -> Plan:
    """FGSM, PGD or AutoAttack at one or several epsilons, in 1/255."""
    options, suite = arguments.options, arguments.suite.name
    epsilons = [real("eps", eps, "distances in 1/255, such as 4") for eps in several("eps", options.eps)]
    if options.norm not in NORMS:
        raise VitfocusError(f"There is no norm {options.norm!r}; expected {' or '.join(NORMS)}.")
    if arguments.models[0].precision != "float32":
        raise VitfocusError("Attacks need gradients in full precision: leave precision at float32.")
    settings: dict[str, Any] = {"norm": options.norm}
    if suite == "pgd":
        stride = options.step_size
        settings["steps"] = whole("steps", options.steps, low=1)
        settings["step_size"] = None if stride is None else real("step_size", stride, "a length in 1/255, such as 0.5")
        settings["random_start"] = bool(options.random_start)
    if suite == "autoattack":
        require_autoattack()
    conditions = [
        Condition(f"{suite}/{eps:g}", classify, attack=partial(_attacked, suite, eps, settings, arguments.seed))
        for eps in epsilons
    ]
    note = f"Epsilon is in 1/255, {options.norm}, between images in [0, 1]; normalisation is part of the model."
    return _plan(arguments, conditions, {"eps": epsilons, **settings}, note)


def _attacked(
    suite: str, eps: float, settings: dict[str, Any], seed: int, model: PixelModel, batch: EvaluationBatch
) -> Tensor:
    if suite == "fgsm":
        return fgsm(model, batch.images, batch.labels, eps, settings["norm"])
    if suite == "autoattack":
        return autoattack(model, batch.images, batch.labels, eps, settings["norm"], seed)
    return pgd(model, batch.images, batch.labels, eps, seed=seed, ids=batch.ids, **settings)
