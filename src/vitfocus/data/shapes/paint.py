"""From scenes to pixels: every object is a stamp (its distance field, edge, texture and shadow) laid on the ground.

Stamps are computed for the whole batch at once and laid down one after another. As in shapes_figures, only exactly
rounded operations are used, so an image does not depend on the batch it was drawn in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitfocus.data.shapes.figures import Array, distances
from vitfocus.data.shapes.scene import MAIN, MAIN_RADIUS, SLOTS, SMALL_RADIUS, TEXTURES, Scenes, Surface

SHADOW = 0.045  # how far an object's shadow reaches, in units of the shorter side
PIXELS_AT_ONCE = 32 * 64 * 64  # keeps what is being worked on inside the processor's cache

_HALF, _ONE = np.float32(0.5), np.float32(1)


def extent(size: tuple[int, int]) -> tuple[float, float]:
    """Return a picture's height and width in units of the shorter side.

    >>> extent((64, 128))
    (1.0, 2.0)
    """
    return size[0] / min(size), size[1] / min(size)


@dataclass(frozen=True)
class Stamp:
    """One object, drawn in a square window of its own."""

    slot: int
    scene: int
    top: int
    left: int
    keep: Array  # (window, window): the share of the canvas that remains, darkened where the shadow falls
    colour: Array  # (3, window, window): what is added to it
    inside: npt.NDArray[np.bool_]  # (window, window): the pixels whose centre the object holds

    def lay_on(self, canvas: Array, owner: npt.NDArray[np.int8]) -> None:
        """Draw onto one image (3, height, width) and sign the pixels (height, width) that the object now owns."""
        (height, width), window = owner.shape, len(self.keep)
        rows, columns = slice(max(self.top, 0), self.top + window), slice(max(self.left, 0), self.left + window)
        part = slice(max(-self.top, 0), height - self.top), slice(max(-self.left, 0), width - self.left)
        view = canvas[:, rows, columns]
        view *= self.keep[part]
        view += self.colour[:, *part]
        np.copyto(owner[rows, columns], np.int8(self.slot), where=self.inside[part])


def paint(scenes: Scenes, size: tuple[int, int]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int8]]:
    """Draw scenes as uint8 images (B, 3, height, width) and say which slot each pixel shows (B, height, width).

    A pixel belongs to the frontmost object that holds its centre; -1 is the ground.
    """
    canvas = _ground(scenes, size)
    owner = np.full((len(scenes), *size), -1, np.int8)
    main = np.arange(SLOTS) == MAIN
    stamps = _stamps(scenes, scenes.present & main, min(size), MAIN_RADIUS[1])
    stamps += _stamps(scenes, scenes.present & ~main, min(size), SMALL_RADIUS[1])
    for stamp in sorted(stamps, key=lambda stamp: stamp.slot):
        stamp.lay_on(canvas[stamp.scene], owner[stamp.scene])
    canvas *= np.float32(255)
    canvas += _HALF
    return np.clip(canvas, 0, 255, out=canvas).astype(np.uint8), owner


def _ground(scenes: Scenes, size: tuple[int, int]) -> Array:
    """Return the textured, softly lit grounds (B, 3, height, width)."""
    scale, shape = min(size), (len(scenes), *size)
    y, x = (((np.arange(length) + 0.5) / scale).astype(np.float32) for length in size)
    colours = _textured(scenes.ground, np.broadcast_to(x, shape), np.broadcast_to(y[:, None], shape), scale)
    middle_y, middle_x = (np.float32(length / 2) for length in extent(size))
    light = scenes.light.astype(np.float32)[:, :, None, None]
    colours *= (_ONE + light[:, 0] * (x - middle_x) + light[:, 1] * (y - middle_y)[:, None])[:, None]
    return colours


def _stamps(scenes: Scenes, chosen: npt.NDArray[np.bool_], scale: int, largest: float) -> list[Stamp]:
    """Draw the chosen objects (B, SLOTS), none of which has more than the largest radius."""
    scene, slot = np.nonzero(chosen)
    x, y, radius, cosine, sine = (
        values[scene, slot] for values in (scenes.x, scenes.y, scenes.radius, scenes.cosine, scenes.sine)
    )
    window = 2 * math.ceil((largest + SHADOW) * scale) + 1
    left, top = (np.floor(centre * scale - window / 2).astype(np.int64) for centre in (x, y))
    pixel = np.arange(window) + 0.5
    over = (((left[:, None] + pixel) / scale - x[:, None]) / radius[:, None]).astype(np.float32)[:, None, :]
    under = (((top[:, None] + pixel) / scale - y[:, None]) / radius[:, None]).astype(np.float32)[:, :, None]
    c, s = (value.astype(np.float32)[:, None, None] for value in (cosine, sine))
    across, down = over * c + under * s, under * c - over * s

    length = radius.astype(np.float32)[:, None, None]
    distance = distances(scenes.figure[scene, slot], across, down) * length
    cover = np.clip(_HALF - distance * np.float32(scale), 0, 1)
    shadow = np.clip(_ONE - distance * np.float32(1 / SHADOW), 0, 1)
    rim = np.clip(distance * np.float32(scale) + np.maximum(_ONE, np.float32(0.1 * scale) * length), 0, 1)

    colour = _textured(scenes.surface.at(scene, slot), across * length, down * length, scale)
    bulge = _ONE - np.float32(0.12) * (across + down)  # light falls in from the upper left
    colour *= (cover * bulge * (_ONE - np.float32(0.42) * rim))[:, None]
    keep = (_ONE - cover) * (_ONE - np.float32(0.4) * shadow * shadow)
    numbers = (values.tolist() for values in (slot, scene, top, left))
    return [Stamp(*stamp) for stamp in zip(*numbers, keep, colour, distance <= 0, strict=True)]


def _textured(surface: Surface, x: Array, y: Array, scale: int) -> Array:
    """Colour n surfaces at the points x, y (n, height, width): the result is (n, 3, height, width)."""
    mixed = np.zeros(x.shape, np.float32)
    for number, name in enumerate(TEXTURES):
        (chosen,) = np.nonzero(surface.texture == number)
        if name == "plain" or not len(chosen):
            continue
        period, c, s, phase = (
            values[chosen].astype(np.float32)
            for values in (surface.period, surface.cosine, surface.sine, surface.phase)
        )
        c, s = ((value / period)[:, None, None] for value in (c, s))
        own_x, own_y = x[chosen], y[chosen]
        u = own_x * c + own_y * s + phase[:, 0, None, None]
        if name == "stripes":
            sharp = (period * np.float32(scale / 4))[:, None, None]
            mixed[chosen] = np.clip(_wave(u) * sharp + _HALF, 0, 1)
            continue
        v = own_y * c - own_x * s + phase[:, 1, None, None]
        if name == "clouds":
            mixed[chosen] = _clouds(u * _HALF, v * _HALF, surface.clouds[chosen].astype(np.float32))
            continue
        sharp = (period * np.float32(scale / 4))[:, None, None]
        if name == "checks":
            a, b = _wave(u * _HALF), _wave(v * _HALF)
            field = np.float32(2) * np.maximum(np.minimum(a, b), -np.maximum(a, b))
        else:
            u -= np.floor(u) + _HALF
            v -= np.floor(v) + _HALF
            field = np.float32(4) * (np.float32(0.3) - np.sqrt(u * u + v * v))
        mixed[chosen] = np.clip(field * sharp + _HALF, 0, 1)
    first, second = (tone.astype(np.float32)[:, :, None, None] for tone in surface.tones)
    colours = mixed[:, None] * (second - first)
    colours += first
    return colours


def _wave(u: Array) -> Array:
    """Return a triangle wave of period 1 between -1 and 1."""
    return np.abs(u - np.floor(u) - _HALF) * np.float32(4) - _ONE


def _clouds(u: Array, v: Array, lattice: Array) -> Array:
    """Return smooth noise: random values (n, 64) on an 8 by 8 lattice that repeats, smoothly interpolated."""
    column, row = np.floor(u), np.floor(v)
    u, v = u - column, v - row
    u, v = (w * w * (np.float32(3) - np.float32(2) * w) for w in (u, v))
    left, top = column.astype(np.int32) & 7, row.astype(np.int32) & 7
    right, bottom = (left + 1) & 7, (top + 1) & 7
    which = np.arange(len(lattice), dtype=np.int32)[:, None, None] * 64
    flat = lattice.reshape(-1)
    high = flat[which + top * 8 + left] * (_ONE - u) + flat[which + top * 8 + right] * u
    low = flat[which + bottom * 8 + left] * (_ONE - u) + flat[which + bottom * 8 + right] * u
    return high * (_ONE - v) + low * v
