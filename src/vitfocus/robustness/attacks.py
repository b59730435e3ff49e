"""Adversarial images in pixel space: FGSM, PGD, and AutoAttack through its own package.

The model carries its normalisation inside (`PixelModel`), so epsilon is a distance between images in [0, 1] and results
are valid images; epsilon is given in 1/255 for either norm. Every image is attacked on its own, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.core.arguments import real, whole
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.corruptions.draws import Draws

Classifier = Callable[[Tensor], Tensor]
NORMS = ("linf", "l2")


def fgsm(model: Classifier, images: Tensor, labels: Tensor, eps: float, norm: str = "linf") -> Tensor:
    """One step of the whole length up the loss: images in [0, 1], (B, 3, H, W), `eps` in 1/255.

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    >>> images = torch.full((2, 3, 2, 2), 0.5)
    >>> attacked = fgsm(model, images, torch.tensor([0, 1]), eps=4)
    >>> round(float((attacked - images).abs().max() * 255), 3)
    4.0
    """
    eps = _check(norm, eps)
    images = _as_float(images)
    step = _direction(_gradient(model, images, labels), norm) * (eps / 255)
    return (images + step).clamp(0, 1)


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
    """Several steps up the loss, each projected back into the ball of radius `eps` and into [0, 1].

    `eps` and `step_size` are in 1/255; the step is 2.5 eps / steps unless given. The start is drawn in the ball from
    (`seed`, the image's id) and nothing else.
    """
    eps = _check(norm, eps)
    steps = whole("steps", steps, low=1)
    if step_size is not None:
        step_size = real("step_size", step_size, "a length in 1/255, such as 0.5")
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
    """The standard ensemble of the `autoattack` package, where it is installed."""
    eps = _check(norm, eps)
    AutoAttack = require_autoattack()
    attack = AutoAttack(
        model,
        norm={"linf": "Linf", "l2": "L2"}[norm],
        eps=eps / 255,
        version="standard",
        seed=seed,
        device=images.device,
        verbose=False,
    )
    with torch.inference_mode(False):
        clean = _as_float(images).clone()
        return attack.run_standard_evaluation(clean, labels.clone(), bs=len(clean)).clamp(0, 1)


def require_autoattack() -> Any:
    """AutoAttack's own class, or how to get it."""
    try:
        from autoattack import AutoAttack
    except ImportError:
        raise VitfocusError(
            "The suite autoattack needs its own package: pip install git+https://github.com/fra31/auto-attack"
        ) from None
    return AutoAttack


def _check(norm: str, eps: float) -> float:
    if norm not in NORMS:
        raise VitfocusError(f"There is no norm {norm!r}: {nearest(str(norm), NORMS)}")
    return real("eps", eps, "a distance in 1/255, such as 4")


def _as_float(images: Tensor) -> Tensor:
    return images.detach().float() / 255 if images.dtype == torch.uint8 else images.detach().float()


def _gradient(model: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of each image's own loss: a sum, so that no image's step depends on the batch."""
    with torch.inference_mode(False), torch.enable_grad():  # copies: a caller's inference tensors take no gradient
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
