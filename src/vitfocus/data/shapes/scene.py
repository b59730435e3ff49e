"""The objects of a Shapes scene, before anything is drawn.

Every scene has one large main object near the centre, whose shape is the class label, and up to five small objects,
some in front of it and some behind. Colour, texture, position and the small objects are independent of the label. In
about a third of the scenes all small objects have the same shape, so that there is something to count.

Scene `i` depends on (seed, split, i) and the aspect ratio of the image, but not on its resolution: lengths are in units
of the short side, x points right and y points down.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from vitfocus.core.errors import VitfocusError, nearest

SHAPES: tuple[str, ...] = (
    *("circle", "square", "triangle", "star", "cross", "ring", "heart", "pill", "crescent", "diamond"),
)
COLOURS: tuple[str, ...] = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
TEXTURES: tuple[str, ...] = ("plain", "stripes", "checks", "dots", "clouds")
SPLITS: tuple[str, ...] = ("train", "val")

SLOTS = 6  # objects are drawn in this order, so a later slot hides an earlier one
MAIN = 3
MAIN_RADIUS = (0.29, 0.37)
MAIN_SPREAD = 0.4  # share of the possible positions that the main object uses; it stays near the centre
SMALL_RADIUS = (0.1, 0.16)
DEEPEST_OVERLAP = 1.2  # largest sum of overlaps with earlier objects, in radii of the smaller object of each pair
MAX_TURN = 0.25  # radians, in both directions

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class ItemRandom:
    """Counter-based random numbers with one independent sequence per item: the same in any batch and any order.

    >>> both, alone = ItemRandom.of(0, "train", [4, 9]), ItemRandom.of(0, "train", [9])
    >>> bool((both.uniform(3)[1] == alone.uniform(3)[0]).all())
    True
    """

    _STEP = np.uint64(0x9E3779B97F4A7C15)

    def __init__(self, keys: npt.NDArray[np.uint64]) -> None:
        self.keys, self.drawn = keys, 0

    @classmethod
    def of(cls, seed: int, split: str, indices: npt.ArrayLike, purpose: int = 0) -> ItemRandom:
        """The random numbers of these items; for one seed and purpose no two items of any split share a key."""
        if split not in SPLITS:
            raise VitfocusError(f"Shapes has no split {split!r}: {nearest(split, SPLITS)}")
        items = np.asarray(indices, np.int64).reshape(-1).astype(np.uint64)
        start = cls._mix(np.array([seed % 2**64], np.uint64) * cls._STEP + np.uint64(purpose))
        return cls(cls._mix(start + (items * np.uint64(2) + np.uint64(SPLITS.index(split))) * cls._STEP))

    @staticmethod
    def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """A bijection of 64 bits (the finaliser of splitmix64)."""
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Floats:
        """Numbers in [low, high), shaped (keys, *shape)."""
        count = int(np.prod(shape, dtype=np.int64))
        steps = np.arange(self.drawn + 1, self.drawn + 1 + count, dtype=np.uint64)
        self.drawn += count
        bits = self._mix(self.keys[:, None] + steps * self._STEP)
        unit = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return (low + (high - low) * unit).reshape(len(self.keys), *shape)

    def integers(self, below: int, *shape: int) -> Integers:
        """Integers in [0, below), shaped (keys, *shape)."""
        return (self.uniform(*shape) * below).astype(np.int64)


@dataclass(frozen=True)
class SceneObject:
    """One object of a scene, with lengths in units of the short side; a higher slot is further in front."""

    shape: str
    colour: str
    texture: str
    x: float
    y: float
    radius: float
    slot: int

    @property
    def main(self) -> bool:
        """Whether this is the scene's main object."""
        return self.slot == MAIN


@dataclass(frozen=True)
class Surface:
    """A texture: two RGB tones (..., 3) in [0, 1] and the parameters of the pattern that mixes them, each (...)."""

    tones: tuple[Floats, Floats]
    texture: Integers
    period: Floats
    cosine: Floats
    sine: Floats
    phase: Floats  # (..., 2)
    clouds: Floats  # (..., 64): the lattice of smooth noise

    def at(self, scene: Integers, slot: Integers) -> Surface:
        """The surfaces of some objects."""
        (first, second), *others = (getattr(self, one.name) for one in fields(self))
        tones = (first[scene, slot], second[scene, slot])
        return Surface(tones, *(values[scene, slot] for values in others))


@dataclass(frozen=True)
class Scenes:
    """Some scenes as arrays; the first axis is the scene, the second, if there is one, the slot."""

    label: Integers  # (B,)
    shape_class: Integers  # (B, SLOTS)
    colour: Integers
    present: npt.NDArray[np.bool_]
    x: Floats
    y: Floats
    radius: Floats
    cosine: Floats
    sine: Floats
    surface: Surface
    ground: Surface  # (B,)
    light: Floats  # (B, 2): brightness gradient of the background from left to right and from top to bottom

    def __len__(self) -> int:
        return len(self.label)

    def objects(self, scene: int) -> list[SceneObject]:
        """The objects of one scene, from back to front."""
        return [
            SceneObject(
                SHAPES[self.shape_class[scene, slot]],
                COLOURS[self.colour[scene, slot]],
                TEXTURES[self.surface.texture[scene, slot]],
                float(self.x[scene, slot]),
                float(self.y[scene, slot]),
                float(self.radius[scene, slot]),
                slot,
            )
            for slot in range(SLOTS)
            if self.present[scene, slot]
        ]


def labels(indices: npt.ArrayLike, split: str = "train", seed: int = 0) -> Integers:
    """The classes of these items: every ten items (0-9, 10-19, ...) have each class once.

    >>> sorted(labels(range(20, 30)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    items = np.asarray(indices, np.int64).reshape(-1)
    shuffled = np.argsort(ItemRandom.of(seed, split, items // len(SHAPES), purpose=1).uniform(len(SHAPES)), axis=1)
    return np.take_along_axis(shuffled, (items % len(SHAPES))[:, None], axis=1)[:, 0]


def compose(
    indices: npt.ArrayLike, split: str = "train", seed: int = 0, extent: tuple[float, float] = (1.0, 1.0)
) -> Scenes:
    """The scenes of these items on a background of this extent (height, width; the short one is 1).

    >>> [one.shape for one in compose([3]).objects(0) if one.main] == [SHAPES[labels([3])[0]]]
    True
    """
    random = ItemRandom.of(seed, split, indices)
    label = labels(indices, split, seed)
    same_shape = random.uniform(1) < 0.35
    shape_class = np.where(same_shape, random.integers(len(SHAPES), 1), random.integers(len(SHAPES), SLOTS))
    shape_class[:, MAIN] = label
    colour = random.integers(len(COLOURS), SLOTS)
    present, x, y, radius = _place(random, extent)
    cosine, sine = _direction(random.uniform(SLOTS, low=-MAX_TURN, high=MAX_TURN))
    surface = _surface(random, _object_tones(random, colour), (SLOTS,), period=(0.09, 0.15))
    ground = _surface(random, _ground_tones(random), (), period=(0.12, 0.3))
    light = random.uniform(2, low=-0.25, high=0.25)
    return Scenes(label, shape_class, colour, present, x, y, radius, cosine, sine, surface, ground, light)


def _place(random: ItemRandom, extent: tuple[float, float]) -> tuple[npt.NDArray[np.bool_], Floats, Floats, Floats]:
    """Place the main object, then each small one at the first of six random spots with little overlap, or nowhere."""
    height, width = extent
    scenes = len(random.keys)
    wanted = 1 + random.integers(SLOTS - 1, 1)
    turn = np.argsort(random.uniform(SLOTS - 1), axis=1)
    present = np.insert(turn < wanted, MAIN, True, axis=1)
    radius = random.uniform(SLOTS, low=SMALL_RADIUS[0], high=SMALL_RADIUS[1])
    radius[:, MAIN] = random.uniform(low=MAIN_RADIUS[0], high=MAIN_RADIUS[1])
    x, y = np.zeros((2, scenes, SLOTS))
    placed = np.zeros_like(present)
    for slot in (MAIN, *(slot for slot in range(SLOTS) if slot != MAIN)):
        size = radius[:, slot, None]
        spots = random.uniform(2, 6)
        if slot == MAIN:
            spots = 0.5 + MAIN_SPREAD * (spots - 0.5)
        spot_x, spot_y = size + (width - 2 * size) * spots[:, 0], size + (height - 2 * size) * spots[:, 1]
        apart = np.sqrt((spot_x[:, :, None] - x[:, None]) ** 2 + (spot_y[:, :, None] - y[:, None]) ** 2)
        overlap = (size + radius)[:, None] - apart
        relative = np.where(placed[:, None], overlap / np.minimum(size, radius)[:, None], 0).clip(0).sum(axis=2)
        first = np.argmax(relative < DEEPEST_OVERLAP, axis=1)[:, None]
        x[:, slot], y[:, slot] = (np.take_along_axis(spot, first, 1)[:, 0] for spot in (spot_x, spot_y))
        present[:, slot] &= np.take_along_axis(relative, first, 1)[:, 0] < DEEPEST_OVERLAP
        placed[:, slot] = present[:, slot]
    return present, x, y, radius


def _direction(angle: Floats) -> tuple[Floats, Floats]:
    """Cosine and sine, rounded so that they are equal on all machines."""
    return np.cos(angle).round(6), np.sin(angle).round(6)


def _surface(
    random: ItemRandom, tones: tuple[Floats, Floats], shape: tuple[int, ...], period: tuple[float, float]
) -> Surface:
    texture = random.integers(len(TEXTURES), *shape)
    cosine, sine = _direction(random.uniform(*shape, high=np.pi))
    periods = random.uniform(*shape, low=period[0], high=period[1])
    return Surface(tones, texture, periods, cosine, sine, random.uniform(*shape, 2), random.uniform(*shape, 64))


def _object_tones(random: ItemRandom, colour: Integers) -> tuple[Floats, Floats]:
    """A saturated tone of each colour, and a lighter or darker one."""
    hue = np.array([0.0, 0.075, 0.145, 0.36, 0.5, 0.61, 0.76, 0.9])[colour]
    hue = hue + random.uniform(SLOTS, low=-0.012, high=0.012)
    saturation = random.uniform(SLOTS, low=0.75, high=0.95)
    value = random.uniform(SLOTS, low=0.76, high=0.95)
    lighter = random.uniform(SLOTS) < 0.5
    companion = np.where(lighter, 0.6, 1.0) * saturation, np.where(lighter, 1.02, 0.73) * value
    return _rgb(hue, saturation, value), _rgb(hue, *companion)


def _ground_tones(random: ItemRandom) -> tuple[Floats, Floats]:
    """Two similar pale tones of one hue, so that darker and more saturated objects stand out."""
    hue, saturation = random.uniform(), random.uniform(low=0.04, high=0.22)
    value, step = random.uniform(low=0.86, high=0.99), random.uniform(low=0.05, high=0.14)
    return _rgb(hue, saturation, value), _rgb(hue + 0.05, saturation, value - step)


def _rgb(hue: Floats, saturation: Floats, value: Floats) -> Floats:
    """Convert hue, saturation and value (...) to RGB (..., 3)."""
    wheel = (hue[..., None] * 6 + np.array([0.0, 4.0, 2.0])) % 6
    pure = np.clip(np.abs(wheel - 3) - 1, 0, 1)
    return value[..., None] * (1 - saturation[..., None] * (1 - pure))
