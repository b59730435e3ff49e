"""Random numbers that belong to an image, not to a batch.

Every number is a hash of (seed, corruption, severity, image id, stream, position): a counter-based generator in plain
torch integer arithmetic. A draw does not depend on batch size, order, device or the number of processes, and no global
generator is read or advanced.

A 64-bit splitmix turns the names into one key per image; two rounds of a 32-bit avalanche hash, one per half of the
key, turn positions into bits. 32-bit arithmetic wraps identically on CPU and GPU and vectorises well on both.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vitfocus.core.arguments import whole
from vitfocus.core.errors import VitfocusError

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _splitmix(value: int) -> int:
    """One step of splitmix64 on Python integers."""
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK64
    return value ^ (value >> 31)


def _shift(value: Tensor, bits: int, width: int) -> Tensor:
    """Logical right shift of signed integers."""
    return (value >> bits) & ((1 << (width - bits)) - 1)


def _splitmix_tensor(value: Tensor) -> Tensor:
    """One step of splitmix64 on int64 tensors, equal to the Python one bit for bit."""
    value = value + _signed(_GOLDEN, 64)
    value = (value ^ _shift(value, 30, 64)) * _signed(_MIX1, 64)
    value = (value ^ _shift(value, 27, 64)) * _signed(_MIX2, 64)
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
    """
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), "big") >> 1


def as_ids(ids: Tensor | Iterable[int | str] | None, count: int, device: torch.device) -> Tensor:
    """Image ids as an int64 tensor of `count`; None means 0..count-1, strings are hashed."""
    if ids is None:
        return torch.arange(count, device=device)
    if isinstance(ids, Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise VitfocusError(f"ids are {ids.dtype}; expected whole numbers or strings, one per image.")
        return ids.reshape(-1).to(device=device, dtype=torch.int64)
    if not isinstance(ids, Iterable):
        raise VitfocusError(f"ids are {ids!r}; expected whole numbers or strings, one per image.")
    numbers = [stable_hash(i) if isinstance(i, str) else _signed(whole("An image's id", i), 64) for i in ids]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


class Draws:
    """The random numbers of a batch of images under one (seed, corruption, severity).

    Streams keep independent draws of one corruption apart: two calls with the same stream and count give the same
    numbers.

    >>> both = Draws(0, "fog", 3, torch.tensor([7, 9])).uniform((4,))
    >>> alone = Draws(0, "fog", 3, torch.tensor([9])).uniform((4,))
    >>> bool((both[1] == alone[0]).all())
    True
    """

    def __init__(self, seed: int, name: str, severity: int, ids: Tensor) -> None:
        self.base = _splitmix(_splitmix(_splitmix(whole("seed", seed) & _MASK64) ^ stable_hash(name)) + severity)
        self.ids = ids

    def __len__(self) -> int:
        return self.ids.shape[0]

    @functools.cached_property
    def keys(self) -> Tensor:
        """One 64-bit key per image, computed when first needed, since half of the corruptions draw nothing."""
        return _splitmix_tensor(self.ids ^ _signed(self.base, 64))

    def bits(self, count: int, stream: int = 0) -> Tensor:
        """Uniform int32 bit patterns, (images, count)."""
        keys = _splitmix_tensor(self.keys + _signed(_splitmix(stream), 64)).unsqueeze(1)
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
