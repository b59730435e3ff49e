"""Images with hidden parts (occlusion) and adversarial images in pixel space (FGSM, PGD, AutoAttack)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.core.arguments import as_list, check_int, check_number
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.corruptions.base import Draws
from vitfocus.robustness.batches import EvaluationBatch
from vitfocus.robustness.classification import CLEAN, classification_plan, classify, num_classes, open_labelled_images
from vitfocus.robustness.engine import Condition, EvaluationArguments, EvaluationPlan, Group
from vitfocus.robustness.metrics import condition_summary
from vitfocus.robustness.pixel_model import PixelModel

GRID = 14
FILLS = ("black", "mean")


def _plan(
    arguments: EvaluationArguments, conditions: Sequence[Condition], protocol: Mapping[str, Any], *notes: str
) -> EvaluationPlan:
    classes = num_classes(arguments)
    images = open_labelled_images(arguments, classes)
    group = Group(arguments.suite.name, images.source, (CLEAN, *conditions))
    protocol = {**protocol, **images.protocol, "seed": arguments.seed}
    return classification_plan(arguments, [group], classes, protocol, condition_summary, (*notes, *images.notes))


def occlusion(arguments: EvaluationArguments) -> EvaluationPlan:
    """The centre hidden, at several sizes (pixels of 224), and random cells of a 14 x 14 grid."""
    centres, drops = (
        [check_int(f"One of {name}", value, 0, most) for value in as_list(name, given, empty=True)]
        for name, given, most in (
            ("sizes", arguments.options.sizes, 224),
            ("drops", arguments.options.drops, GRID * GRID),
        )
    )
    named, means = arguments.options.fill, {model.mean for model in arguments.models}
    if named not in FILLS:
        raise VitfocusError(f"There is no fill {named!r}: {nearest(str(named), FILLS)}")
    if named == "mean" and len(means) > 1:
        raise VitfocusError("fill=mean uses the mean of the model, but these models have different means: use black.")
    fill = tuple(round(255 * value) for value in next(iter(means))) if named == "mean" else (0,)
    protocol = {"sizes": centres, "drops": drops, "grid": GRID, "fill": f"{named}, before normalisation: {list(fill)}"}

    def hide_centre(side: int, batch: EvaluationBatch) -> Tensor:
        return occlude_centre(batch.images, side, fill=fill)

    def drop(count: int, batch: EvaluationBatch) -> Tensor:
        return drop_patches(batch.images, count, batch.ids, arguments.seed, fill=fill)

    conditions = [Condition(f"centre/{side}", classify, partial(hide_centre, side)) for side in centres]
    conditions += [Condition(f"drop/{count}", classify, partial(drop, count)) for count in drops]
    return _plan(arguments, conditions, protocol)


def _fill_values(images: Tensor, fill: Sequence[int]) -> Tensor:
    """8-bit levels in the range of the images: (1, 1, 1) or (C, 1, 1)."""
    levels = torch.tensor(fill, device=images.device).view(-1, 1, 1)
    return levels.to(images.dtype) if images.dtype == torch.uint8 else levels.to(images.dtype) / 255


def occlude_centre(images: Tensor, side: int, base: int = 224, fill: Sequence[int] = (0,)) -> Tensor:
    """Hide the central square of `side` pixels, for an image of `base` pixels: (B, C, H, W), uint8 or in [0, 1].

    `fill` is an 8-bit level, or one per channel.

    >>> images = occlude_centre(torch.ones(1, 1, 8, 8), side=4, base=8)
    >>> int(images.sum()), float(images[0, 0, 2, 2]), float(images[0, 0, 1, 2])
    (48, 0.0, 1.0)
    """
    height, width = images.shape[-2:]
    tall, wide = round(side * height / base), round(side * width / base)
    top, left = (height - tall) // 2, (width - wide) // 2
    hidden = images.clone()
    hidden[..., top : top + tall, left : left + wide] = _fill_values(images, fill)
    return hidden


def drop_patches(images: Tensor, count: int, ids: Tensor, seed: int = 0, fill: Sequence[int] = (0,)) -> Tensor:
    """Hide `count` random cells of a 14 x 14 grid, drawn for each image from (seed, id): (B, C, H, W).

    >>> images = drop_patches(torch.ones(2, 1, 28, 28), 98, ids=torch.tensor([5, 6]))
    >>> images.sum(dim=(1, 2, 3)).tolist()
    [392.0, 392.0]
    """
    draws = Draws(seed, "patch drop", count, ids).uniform((GRID * GRID,))
    keep = (draws.argsort(dim=1).argsort(dim=1) >= count).view(-1, 1, GRID, GRID)
    rows = torch.arange(images.shape[-2], device=images.device) * GRID // images.shape[-2]
    columns = torch.arange(images.shape[-1], device=images.device) * GRID // images.shape[-1]
    return torch.where(keep[:, :, rows][:, :, :, columns], images, _fill_values(images, fill))


def attack(arguments: EvaluationArguments) -> EvaluationPlan:
    """FGSM, PGD or AutoAttack at one or several epsilons, in 1/255."""
    options, suite = arguments.options, arguments.suite.name
    epsilons = [check_number("eps", eps, "distances in 1/255, such as 4") for eps in as_list("eps", options.eps)]
    if options.norm not in NORMS:
        raise VitfocusError(f"There is no norm {options.norm!r}: {nearest(str(options.norm), NORMS)}")
    if arguments.models[0].precision != "float32":
        raise VitfocusError("Attacks need gradients in full precision: leave precision at float32.")
    settings: dict[str, Any] = {"norm": options.norm}
    if suite == "pgd":
        stride = options.step_size
        settings["steps"] = check_int("steps", options.steps, low=1)
        settings["step_size"] = (
            None if stride is None else check_number("step_size", stride, "a length in 1/255, such as 0.5")
        )
        settings["random_start"] = bool(options.random_start)
    if suite == "autoattack":
        require_autoattack()
    conditions = [
        Condition(f"{suite}/{eps:g}", classify, attack=partial(_attacked, suite, eps, settings, arguments.seed))
        for eps in epsilons
    ]
    note = f"Epsilon is in 1/255, {options.norm}, for images in [0, 1]; normalisation is part of the model."
    return _plan(arguments, conditions, {"eps": epsilons, **settings}, note)


def _attacked(
    suite: str, eps: float, settings: dict[str, Any], seed: int, model: PixelModel, batch: EvaluationBatch
) -> Tensor:
    if suite == "fgsm":
        return fgsm(model, batch.images, batch.labels, eps, settings["norm"])
    if suite == "autoattack":
        return autoattack(model, batch.images, batch.labels, eps, settings["norm"], seed)
    return pgd(model, batch.images, batch.labels, eps, seed=seed, ids=batch.ids, **settings)


Classifier = Callable[[Tensor], Tensor]
NORMS = ("linf", "l2")


def fgsm(model: Classifier, images: Tensor, labels: Tensor, eps: float, norm: str = "linf") -> Tensor:
    """One step of length `eps`, in 1/255, along the gradient of the loss: images in [0, 1], (B, 3, H, W).

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    >>> images = torch.full((2, 3, 2, 2), 0.5)
    >>> attacked = fgsm(model, images, torch.tensor([0, 1]), eps=4)
    >>> round(float((attacked - images).abs().max() * 255), 3)
    4.0
    """
    return pgd(model, images, labels, eps, norm, steps=1, step_size=eps, random_start=False)


def pgd(
    model: Classifier,
    images: Tensor,
    labels: Tensor,
    eps: float,
    norm: str = "linf",
    steps: int = 5,
    step_size: float | None = None,
    seed: int = 0,
    ids: Tensor | None = None,
    random_start: bool = True,
) -> Tensor:
    """Several steps along the gradient of the loss, each projected back into the ball of radius `eps` and into [0, 1].

    `eps` and `step_size` are in 1/255; the step size is 2.5 eps / steps by default. The random start depends on `seed`
    and the id of the image only.
    """
    clean = _as_float(images)
    radius = eps / 255
    stride = (2.5 * eps / steps if step_size is None else step_size) / 255
    current = clean
    if random_start:
        names = torch.arange(len(clean), device=clean.device) if ids is None else ids
        current = (clean + _start(clean, radius, norm, seed, names)).clamp(0, 1)
    for _ in range(steps):
        moved = current + stride * _direction(_gradient(model, current, labels), norm)
        current = (clean + _project(moved - clean, radius, norm)).clamp(0, 1)
    return current


def autoattack(
    model: Classifier, images: Tensor, labels: Tensor, eps: float, norm: str = "linf", seed: int = 0
) -> Tensor:
    """The standard ensemble of the package `autoattack`, if it is installed."""
    AutoAttack = require_autoattack()
    options = {"norm": {"linf": "Linf", "l2": "L2"}[norm], "eps": eps / 255, "seed": seed, "device": images.device}
    attack = AutoAttack(model, version="standard", verbose=False, **options)
    with torch.inference_mode(False):
        clean = _as_float(images).clone()
        return attack.run_standard_evaluation(clean, labels.clone(), bs=len(clean)).clamp(0, 1)


def require_autoattack() -> Any:
    """The class of the package; an error says how to install it."""
    try:
        from autoattack import AutoAttack
    except ImportError:
        raise VitfocusError(
            "The suite autoattack needs its own package: pip install git+https://github.com/fra31/auto-attack"
        ) from None
    return AutoAttack


def _as_float(images: Tensor) -> Tensor:
    return images.detach().float() / 255 if images.dtype == torch.uint8 else images.detach().float()


def _gradient(model: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the loss of each image; the losses are summed, so that no image depends on its batch."""
    with torch.inference_mode(False), torch.enable_grad():  # copies, since inference tensors have no gradients
        leaf = images.detach().clone().requires_grad_(True)
        loss = F.cross_entropy(model(leaf).float(), labels.clone(), reduction="sum")
        return torch.autograd.grad(loss, leaf)[0]


def _length(values: Tensor) -> Tensor:
    return values.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


def _direction(gradient: Tensor, norm: str) -> Tensor:
    return gradient.sign() if norm == "linf" else gradient / _length(gradient).clamp_min(1e-12)


def _project(offset: Tensor, radius: float, norm: str) -> Tensor:
    if norm == "linf":
        return offset.clamp(-radius, radius)
    return offset * (radius / _length(offset).clamp_min(1e-12)).clamp(max=1)


def _start(images: Tensor, radius: float, norm: str, seed: int, ids: Tensor) -> Tensor:
    draws = Draws(seed, "pgd", 0, ids)
    if norm == "linf":
        return draws.uniform(images.shape[1:]) * (2 * radius) - radius
    normal = draws.normal(images.shape[1:])
    # Uniform in the ball: a uniform direction, and a length whose dim-th power is uniform.
    share = draws.uniform((1, 1, 1), stream=1) ** (1 / images[0].numel())
    return normal / _length(normal) * share * radius
