"""Shared by all corruptions: published constants (severities 1 to 5), random draws, conversion to 8 bits.

Every random number is a hash of (seed, corruption, severity, image id, stream, position): a counter-based generator in
plain torch integer arithmetic. A draw does not depend on batch size, order, device or the number of processes, and no
global generator is read or advanced.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitfocus.core.arguments import check_int
from vitfocus.core.errors import VitfocusError

FLAVOURS: tuple[str, ...] = ("imagenet", "cifar", "any")

_IMAGENET: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),  # standard deviation on [0, 1]
    "shot_noise": (60, 25, 12, 5, 3),  # photons at full intensity
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),  # share of values replaced
    "speckle_noise": (0.15, 0.2, 0.35, 0.45, 0.6),  # standard deviation relative to the value
    "gaussian_blur": (1, 2, 3, 4, 6),  # sigma
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),  # sigma, reach, passes
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),  # radius, antialias sigma
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),  # radius, sigma
    "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),  # np.arange's stop, step
    # mean, spread, zoom, threshold, blur radius, blur sigma, share of the image kept
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),  # weights of image and overlay
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),  # amount, decay of the fractal
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),  # added to V
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),  # factor about the mean
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),  # S times a plus b
    "jpeg_compression": (25, 18, 15, 10, 7),  # quality
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),  # scale
    # amplitude, sigma and affine jitter in pixels; 244 is a typo for 224 in the reference, kept here
    "elastic_transform": (
        (244 * 2, 244 * 0.7, 244 * 0.1),
        (244 * 2, 244 * 0.08, 244 * 0.2),
        (244 * 0.05, 244 * 0.01, 244 * 0.02),
        (244 * 0.07, 244 * 0.01, 244 * 0.02),
        (244 * 0.12, 244 * 0.01, 244 * 0.02),
    ),
    # mean, spread, sigma, threshold, intensity (water) or blur (mud), mud?
    "spatter": (
        (0.65, 0.3, 4, 0.69, 0.6, False),
        (0.65, 0.3, 3, 0.68, 0.6, False),
        (0.65, 0.3, 2, 0.68, 0.5, False),
        (0.65, 0.3, 1, 0.65, 1.5, True),
        (0.67, 0.4, 1, 0.65, 1.5, True),
    ),
}

_CIFAR: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    "jpeg_compression": (80, 65, 58, 50, 40),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "elastic_transform": (
        (0, 0, 32 * 0.08),
        (32 * 0.05, 32 * 0.2, 32 * 0.07),
        (32 * 0.08, 32 * 0.06, 32 * 0.06),
        (32 * 0.1, 32 * 0.04, 32 * 0.05),
        (32 * 0.1, 32 * 0.03, 32 * 0.03),
    ),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ),
}

# Amplitudes of the any-size elastic transform; its field has sigma 0.01 (H, W) and noise of half-width 0.005 H.
_ANY = _IMAGENET | {"elastic_transform": (250 * 0.05, 250 * 0.065, 250 * 0.085, 250 * 0.1, 250 * 0.12)}

CONSTANTS: dict[str, dict[str, tuple[Any, ...]]] = {"imagenet": _IMAGENET, "cifar": _CIFAR, "any": _ANY}


@dataclass(frozen=True)
class Setting:
    """The inputs of a corruption besides the pixels: its constants at this severity, the flavour, the frost folder."""

    constants: Any
    flavour: str = "imagenet"
    frost: str | None = None


def _signed(value: int, bits: int) -> int:
    """The lowest bits of an integer as a signed integer."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _shift(value: Tensor, bits: int, width: int) -> Tensor:
    """Logical right shift of signed integers."""
    return (value >> bits) & ((1 << (width - bits)) - 1)


def _splitmix(value: Tensor) -> Tensor:
    """One step of splitmix64 on int64 tensors."""
    value = value + _signed(0x9E3779B97F4A7C15, 64)
    value = (value ^ _shift(value, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    value = (value ^ _shift(value, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return value ^ _shift(value, 31, 64)


def _avalanche_(value: Tensor) -> Tensor:
    """Wellons' low-bias 32-bit hash on int32, in place, with one scratch tensor to avoid allocations."""
    scratch = torch.empty_like(value)
    for shift, factor in ((16, 0x7FEB352D), (15, _signed(0x846CA68B, 32)), (16, 1)):
        torch.bitwise_right_shift(value, shift, out=scratch)
        value.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
        if factor != 1:
            value.mul_(factor)
    return value


def stable_hash(text: str) -> int:
    """Hash a string to 63 bits, the same in every process and on every machine.

    >>> stable_hash("n01440764/ILSVRC2012_val_00000293.JPEG")
    2244706137835791788
    >>> stable_hash("\\ud800") == stable_hash("\\ud801")
    False
    """
    try:
        content = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # a surrogate that does not encode a byte of a file name
        content = text.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


def as_ids(ids: Tensor | Iterable[int | str] | None, count: int, device: torch.device) -> Tensor:
    """Image ids as an int64 tensor of `count`; None means 0..count-1, strings are hashed."""
    if ids is None:
        return torch.arange(count, device=device)
    if isinstance(ids, Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise VitfocusError(f"ids are {ids.dtype}; expected whole numbers or strings, one per image.")
        return ids.reshape(-1).to(device=device, dtype=torch.int64)
    if not isinstance(ids, Iterable) or getattr(ids, "ndim", 1) == 0:
        raise VitfocusError(f"ids are {ids!r}; expected whole numbers or strings, one per image.")
    numbers = [stable_hash(i) if isinstance(i, str) else _signed(check_int("An image's id", i), 64) for i in ids]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


class Draws:
    """The random numbers of a batch of images under one (seed, corruption, severity).

    Independent draws of one corruption use different streams: two calls with the same stream and count return the same
    numbers.

    >>> both = Draws(0, "fog", 3, torch.tensor([7, 9])).uniform((4,))
    >>> alone = Draws(0, "fog", 3, torch.tensor([9])).uniform((4,))
    >>> bool((both[1] == alone[0]).all())
    True
    """

    def __init__(self, seed: int, name: str, severity: int, ids: Tensor) -> None:
        start = _splitmix(torch.tensor(_signed(check_int("seed", seed), 64)))
        self.base = _splitmix(_splitmix(start ^ stable_hash(name)) + severity)
        self.ids = ids

    def __len__(self) -> int:
        return self.ids.shape[0]

    @functools.cached_property
    def keys(self) -> Tensor:
        """One 64-bit key per image, computed on first use, since half of the corruptions are deterministic."""
        return _splitmix(self.ids ^ self.base)

    def bits(self, count: int, stream: int = 0) -> Tensor:
        """Uniform int32 bit patterns, (images, count)."""
        keys = _splitmix(self.keys + _splitmix(torch.tensor(stream))).unsqueeze(1)
        low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
        counter = torch.arange(count, dtype=torch.int32, device=keys.device)
        return _avalanche_(_avalanche_(counter ^ low).bitwise_xor_(high))

    def uniform(self, shape: Sequence[int], stream: int = 0) -> Tensor:
        """Float32 in the open interval (0, 1), on a grid of 2**-23: (images, *shape)."""
        bits = self.bits(math.prod(shape), stream)
        bits.bitwise_right_shift_(9).bitwise_and_((1 << 23) - 1)
        return bits.float().add_(0.5).mul_(2.0**-23).view(len(self), *shape)

    def normal(self, shape: Sequence[int], stream: int = 0) -> Tensor:
        """Standard normal float32 by Box and Muller: (images, *shape)."""
        count = math.prod(shape)
        half = (count + 1) // 2
        radius, angle = self.uniform((2, half), stream).unbind(1)
        radius.log_().mul_(-2.0).sqrt_()
        angle.mul_(2.0 * math.pi)
        pair = torch.stack([angle.cos(), angle.sin_()], dim=1).mul_(radius.unsqueeze(1))
        return pair.flatten(1)[:, :count].reshape(len(self), *shape)

    def integers(self, low: int, high: Tensor | int, shape: Sequence[int] = (), stream: int = 0) -> Tensor:
        """Int64 in [low, high); `high` may be a tensor of one bound per image (broadcast against (images, *shape))."""
        bits = _shift(self.bits(max(math.prod(shape), 1), stream), 1, 32).long().view(len(self), *shape)
        return ((bits * (high - low)) >> 31) + low


_SLACK = 1e-9  # a value this close below an integer counts as it, since the order of summation may differ


def to_uint8(values: Tensor, slack: float = _SLACK) -> Tensor:
    """Clip to [0, 255] and truncate, as `np.uint8(np.clip(...))` does.

    >>> to_uint8(torch.tensor([-3.0, 7.99, 8.0 - 1e-12, 300.0], dtype=torch.float64)).tolist()
    [0, 7, 8, 255]
    """
    if slack and values.dtype == torch.float64:
        values = values + slack
    return values.clamp(0, 255).to(torch.int32).to(torch.uint8)  # via int32, which CPUs vectorise
