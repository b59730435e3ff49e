"""The noise that segmentation papers add to test images: shot, Gaussian of 5 and 10 levels, blur of 1 and 2 pixels.

`segmentation.py` repeats each random one over five seeds and reports the mean with a 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.corruptions.constants import Setting
from vitfocus.corruptions.draws import Draws, as_ids
from vitfocus.corruptions.filters import gaussian, to_uint8
from vitfocus.corruptions.noise import shot_noise

NOISES = ("shot", "gaussian/5", "gaussian/10", "blur/1", "blur/2")
REPEATS = 5


def add_noise(images: Tensor, name: str, seed: int = 0, ids: Tensor | Sequence[int | str] | None = None) -> Tensor:
    """Noisy copies of uint8 images (B, 3, H, W): one of `NOISES`; draws belong to (seed, id).

    "shot" draws every value from the Poisson law of its own grey level; "gaussian/S" adds normal noise of S levels,
    rounded; "blur/S" is a Gaussian blur of S pixels.

    >>> images = torch.full((1, 3, 16, 16), 100, dtype=torch.uint8)
    >>> bool((add_noise(images, "blur/2") == images).all()), bool((add_noise(images, "shot") == images).all())
    (True, False)
    """
    if name not in NOISES:
        raise VitfocusError(f"There is no noise {name!r}: {nearest(name, NOISES)}")
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise VitfocusError(f"Images are {images.dtype} of shape {tuple(images.shape)}; expected uint8, (B, 3, H, W).")
    kind, _, amount = name.partition("/")
    if kind == "blur":
        return to_uint8(gaussian(images, float(amount)) + 0.5)
    draws = Draws(seed, f"segmentation {name}", 0, as_ids(ids, len(images), images.device))
    if kind == "shot":
        return shot_noise(images, Setting(255, "any"), draws)  # 255 photons at white: the grey level is the mean count
    return to_uint8(draws.normal(images.shape[1:]).mul_(float(amount)).add_(images).add_(0.5))


def repeat_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of repeated measurements and half of its 95 % interval, by Student's t.

    >>> mean, half = repeat_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> mean, round(half, 3)
    (3.0, 1.963)
    """
    count = len(values)
    if not 2 <= count <= len(_STUDENT) + 1:
        raise VitfocusError(f"{count} repeats give no 95 % interval here; expected 2 to {len(_STUDENT) + 1}.")
    mean = math.fsum(values) / count
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return mean, _STUDENT[count - 2] * spread / math.sqrt(count)


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
