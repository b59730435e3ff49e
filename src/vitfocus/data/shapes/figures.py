"""The ten figures of Shapes as signed distance functions.

Each function takes coordinates in the figure's own frame (y points down, the figure fits into the unit circle) and
returns the signed distance to its outline: negative inside, positive outside. Only operations that IEEE 754 rounds
exactly are used (no sine, no exponential), so that a pixel comes out the same in every batch and on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

_SQRT_HALF = math.sqrt(0.5)
_PENTAGON = [(math.sin(turn * math.tau / 5), math.cos(turn * math.tau / 5)) for turn in range(5)]


def _length(x: Array, y: Array) -> Array:
    return np.sqrt(x * x + y * y)


def circle(x: Array, y: Array) -> Array:
    """Return the distance to a disc."""
    return _length(x, y) - np.float32(0.86)


def square(x: Array, y: Array) -> Array:
    """Return the distance to a square with its sides along the axes."""
    return np.maximum(np.abs(x), np.abs(y)) - np.float32(0.7)


def triangle(x: Array, y: Array) -> Array:
    """Return the distance to an equilateral triangle that stands on its base."""
    x, y = np.abs(x), y - np.float32(0.14)
    sides = x * np.float32(math.sqrt(0.75)) - y * np.float32(0.5)
    return np.maximum(sides, y) - np.float32(0.46)


def star(x: Array, y: Array) -> Array:
    """Return the distance to a five-pointed star: the points that at most one of five half-planes leaves out."""
    sides = [x * np.float32(right) + y * np.float32(down) for right, down in _PENTAGON]
    largest, second = np.maximum(sides[0], sides[1]), np.minimum(sides[0], sides[1])
    for side in sides[2:]:
        second = np.maximum(second, np.minimum(largest, side))
        largest = np.maximum(largest, side)
    return second - np.float32(0.305)


def cross(x: Array, y: Array) -> Array:
    """Return the distance to a Greek cross."""
    x, y = np.abs(x), np.abs(y)
    return np.maximum(np.minimum(x, y) - np.float32(0.3), np.maximum(x, y) - np.float32(0.9))


def ring(x: Array, y: Array) -> Array:
    """Return the distance to a ring, open in the middle."""
    return np.abs(_length(x, y) - np.float32(0.66)) - np.float32(0.25)


def heart(x: Array, y: Array) -> Array:
    """Return the distance to a heart: a square on its corner below two discs."""
    size = np.float32(1.48)
    x, y = np.abs(x) * (1 / size), np.float32(0.55) - y * (1 / size)
    lobe = _length(x - np.float32(0.25), y - np.float32(0.75)) - np.float32(0.5 * _SQRT_HALF)
    along = np.float32(0.5) * np.maximum(x + y, np.float32(0))
    point = np.minimum(_length(x, y - np.float32(1)), _length(x - along, y - along)) * np.sign(x - y)
    return np.where(x + y > 1, lobe, point) * size


def pill(x: Array, y: Array) -> Array:
    """Return the distance to a lying bar with round ends."""
    beyond = np.maximum(np.abs(x) - np.float32(0.56), np.float32(0))
    return _length(beyond, y) - np.float32(0.38)


def crescent(x: Array, y: Array) -> Array:
    """Return the distance to a crescent: a disc from which a second one has bitten."""
    bitten = np.float32(0.72) - _length(x - np.float32(0.42), y)
    return np.maximum(_length(x, y) - np.float32(0.9), bitten)


def diamond(x: Array, y: Array) -> Array:
    """Return the distance to an upright rhombus, clearly taller than wide so that no turned square resembles it."""
    slope = 1.0 / math.hypot(1 / 0.55, 1 / 0.95)
    x, y = np.abs(x), np.abs(y)
    return x * np.float32(slope / 0.55) + y * np.float32(slope / 0.95) - np.float32(slope)


FIGURES: dict[str, Callable[[Array, Array], Array]] = {
    function.__name__: function
    for function in (circle, square, triangle, star, cross, ring, heart, pill, crescent, diamond)
}


def distances(figure: npt.NDArray[np.int64], x: Array, y: Array) -> Array:
    """Evaluate many figures at once: `figure` is (n,), `x` and `y` are (n, height, width), as is what is returned.

    >>> where = np.zeros((2, 1, 1), np.float32)
    >>> bool((distances(np.array([0, 5]), where, where) < 0).ravel()[0])  # a disc holds its centre, a ring does not
    True
    """
    result = np.empty_like(x)
    for number, function in enumerate(FIGURES.values()):
        (chosen,) = np.nonzero(figure == number)
        if len(chosen):
            result[chosen] = function(x[chosen], y[chosen])
    return result
