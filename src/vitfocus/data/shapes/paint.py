"""Draws Shapes scenes: each object is a sprite (its distance field, edge, texture and shadow) on the background.

Sprites are computed for a whole batch at once and drawn one after another. Each shape is a signed distance function.
Only operations that IEEE 754 rounds exactly are used (no sine, no exponential), so that an image has the same pixels in
every batch and on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitfocus.data.shapes.scene import MAIN, MAIN_RADIUS, SHAPES, SLOTS, SMALL_RADIUS, TEXTURES, Scenes, Surface

Array = npt.NDArray[np.float32]

SHADOW = 0.045  # length of an object's shadow, in units of the short side
PIXELS_AT_ONCE = 32 * 64 * 64  # fits into the processor's cache

_HALF, _ONE = np.float32(0.5), np.float32(1)
_SQRT_HALF = math.sqrt(0.5)
_PENTAGON = [(math.sin(turn * math.tau / 5), math.cos(turn * math.tau / 5)) for turn in range(5)]


def extent(size: tuple[int, int]) -> tuple[float, float]:
    """Height and width of an image in units of the short side.

    >>> extent((64, 128))
    (1.0, 2.0)
    """
    return size[0] / min(size), size[1] / min(size)


@dataclass(frozen=True)
class Sprite:
    """One object, drawn in its own square window."""

    slot: int
    scene: int
    top: int
    left: int
    keep: Array  # (window, window): the factor of the canvas, darker in the shadow
    colour: Array  # (3, window, window): added to the canvas
    inside: npt.NDArray[np.bool_]  # (window, window): pixels whose centre is inside the object

    def draw_on(self, canvas: Array, owner: npt.NDArray[np.int8]) -> None:
        """Draw on one image (3, height, width) and mark the pixels (height, width) that show the object."""
        (height, width), window = owner.shape, len(self.keep)
        rows, columns = slice(max(self.top, 0), self.top + window), slice(max(self.left, 0), self.left + window)
        part = slice(max(-self.top, 0), height - self.top), slice(max(-self.left, 0), width - self.left)
        view = canvas[:, rows, columns]
        view *= self.keep[part]
        view += self.colour[:, *part]
        np.copyto(owner[rows, columns], np.int8(self.slot), where=self.inside[part])


def paint(scenes: Scenes, size: tuple[int, int]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int8]]:
    """Draw scenes: uint8 images (B, 3, height, width), and the slot that each pixel shows (B, height, width).

    A pixel shows the frontmost object that contains its centre; -1 is the background.
    """
    canvas = _ground(scenes, size)
    owner = np.full((len(scenes), *size), -1, np.int8)
    main = np.arange(SLOTS) == MAIN
    sprites = _sprites(scenes, scenes.present & main, min(size), MAIN_RADIUS[1])
    sprites += _sprites(scenes, scenes.present & ~main, min(size), SMALL_RADIUS[1])
    for sprite in sorted(sprites, key=lambda sprite: sprite.slot):
        sprite.draw_on(canvas[sprite.scene], owner[sprite.scene])
    canvas *= np.float32(255)
    canvas += _HALF
    return np.clip(canvas, 0, 255, out=canvas).astype(np.uint8), owner


def _ground(scenes: Scenes, size: tuple[int, int]) -> Array:
    """Textured backgrounds with a brightness gradient, (B, 3, height, width)."""
    scale, shape = min(size), (len(scenes), *size)
    y, x = (((np.arange(length) + 0.5) / scale).astype(np.float32) for length in size)
    colours = _textured(scenes.ground, np.broadcast_to(x, shape), np.broadcast_to(y[:, None], shape), scale)
    middle_y, middle_x = (np.float32(length / 2) for length in extent(size))
    light = scenes.light.astype(np.float32)[:, :, None, None]
    colours *= (_ONE + light[:, 0] * (x - middle_x) + light[:, 1] * (y - middle_y)[:, None])[:, None]
    return colours


def _sprites(scenes: Scenes, chosen: npt.NDArray[np.bool_], scale: int, largest: float) -> list[Sprite]:
    """The sprites of the chosen objects (B, SLOTS), whose radius is at most `largest`."""
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
    distance = distances(scenes.shape_class[scene, slot], across, down) * length
    cover = np.clip(_HALF - distance * np.float32(scale), 0, 1)
    shadow = np.clip(_ONE - distance * np.float32(1 / SHADOW), 0, 1)
    rim = np.clip(distance * np.float32(scale) + np.maximum(_ONE, np.float32(0.1 * scale) * length), 0, 1)

    colour = _textured(scenes.surface.at(scene, slot), across * length, down * length, scale)
    bulge = _ONE - np.float32(0.12) * (across + down)  # light from the upper left
    colour *= (cover * bulge * (_ONE - np.float32(0.42) * rim))[:, None]
    keep = (_ONE - cover) * (_ONE - np.float32(0.4) * shadow * shadow)
    numbers = (values.tolist() for values in (slot, scene, top, left))
    return [Sprite(*sprite) for sprite in zip(*numbers, keep, colour, distance <= 0, strict=True)]


def _textured(surface: Surface, x: Array, y: Array, scale: int) -> Array:
    """Colours of n surfaces at points x, y (n, height, width): (n, 3, height, width)."""
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
        local_x, local_y = x[chosen], y[chosen]
        u = local_x * c + local_y * s + phase[:, 0, None, None]
        if name == "stripes":
            sharp = (period * np.float32(scale / 4))[:, None, None]
            mixed[chosen] = np.clip(_wave(u) * sharp + _HALF, 0, 1)
            continue
        v = local_y * c - local_x * s + phase[:, 1, None, None]
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
    """A triangle wave of period 1 between -1 and 1."""
    return np.abs(u - np.floor(u) - _HALF) * np.float32(4) - _ONE


def _clouds(u: Array, v: Array, lattice: Array) -> Array:
    """Smooth noise: random values (n, 64) on a periodic 8 × 8 lattice, interpolated."""
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


def distances(shape_class: npt.NDArray[np.int64], x: Array, y: Array) -> Array:
    """Signed distances of points to the outlines of n shapes, negative inside.

    Args:
        shape_class: Indices into `SHAPES` (n,).
        x: Coordinates (n, height, width) in a frame in which a shape fits into the unit circle.
        y: Coordinates, pointing down.

    Example:
        >>> where = np.zeros((2, 1, 1), np.float32)
        >>> (distances(np.array([0, 5]), where, where) < 0).ravel().tolist()  # a disc has its centre, a ring does not
        [True, False]
    """
    result = np.empty_like(x)
    for number, function in enumerate(SIGNED_DISTANCES.values()):
        (chosen,) = np.nonzero(shape_class == number)
        if len(chosen):
            result[chosen] = function(x[chosen], y[chosen])
    return result


def _length(x: Array, y: Array) -> Array:
    return np.sqrt(x * x + y * y)


def circle(x: Array, y: Array) -> Array:
    """Distance to a disc."""
    return _length(x, y) - np.float32(0.86)


def square(x: Array, y: Array) -> Array:
    """Distance to a square with its sides along the axes."""
    return np.maximum(np.abs(x), np.abs(y)) - np.float32(0.7)


def triangle(x: Array, y: Array) -> Array:
    """Distance to an equilateral triangle with a horizontal base."""
    x, y = np.abs(x), y - np.float32(0.14)
    sides = x * np.float32(math.sqrt(0.75)) - y * np.float32(0.5)
    return np.maximum(sides, y) - np.float32(0.46)


def star(x: Array, y: Array) -> Array:
    """Distance to a five-pointed star: points outside at most one of five half-planes."""
    sides = [x * np.float32(right) + y * np.float32(down) for right, down in _PENTAGON]
    largest, second = np.maximum(sides[0], sides[1]), np.minimum(sides[0], sides[1])
    for side in sides[2:]:
        second = np.maximum(second, np.minimum(largest, side))
        largest = np.maximum(largest, side)
    return second - np.float32(0.305)


def cross(x: Array, y: Array) -> Array:
    """Distance to a Greek cross."""
    x, y = np.abs(x), np.abs(y)
    return np.maximum(np.minimum(x, y) - np.float32(0.3), np.maximum(x, y) - np.float32(0.9))


def ring(x: Array, y: Array) -> Array:
    """Distance to a ring."""
    return np.abs(_length(x, y) - np.float32(0.66)) - np.float32(0.25)


def heart(x: Array, y: Array) -> Array:
    """Distance to a heart: a square on its corner below two discs."""
    size = np.float32(1.48)
    x, y = np.abs(x) * (1 / size), np.float32(0.55) - y * (1 / size)
    lobe = _length(x - np.float32(0.25), y - np.float32(0.75)) - np.float32(0.5 * _SQRT_HALF)
    along = np.float32(0.5) * np.maximum(x + y, np.float32(0))
    point = np.minimum(_length(x, y - np.float32(1)), _length(x - along, y - along)) * np.sign(x - y)
    return np.where(x + y > 1, lobe, point) * size


def pill(x: Array, y: Array) -> Array:
    """Distance to a horizontal bar with round ends."""
    beyond = np.maximum(np.abs(x) - np.float32(0.56), np.float32(0))
    return _length(beyond, y) - np.float32(0.38)


def crescent(x: Array, y: Array) -> Array:
    """Distance to a crescent: a disc without a second disc."""
    bitten = np.float32(0.72) - _length(x - np.float32(0.42), y)
    return np.maximum(_length(x, y) - np.float32(0.9), bitten)


def diamond(x: Array, y: Array) -> Array:
    """Distance to an upright rhombus, clearly taller than wide, unlike a rotated square."""
    slope = 1.0 / math.hypot(1 / 0.55, 1 / 0.95)
    x, y = np.abs(x), np.abs(y)
    return x * np.float32(slope / 0.55) + y * np.float32(slope / 0.95) - np.float32(slope)


#: By name, in the order of `SHAPES`.
SIGNED_DISTANCES: dict[str, Callable[[Array, Array], Array]] = {name: globals()[name] for name in SHAPES}
