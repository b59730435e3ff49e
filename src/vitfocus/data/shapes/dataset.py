"""Shapes, the built-in data set: coloured, textured shapes on textured backgrounds, drawn from a seed.

One scene serves four tasks: classify the main object's shape (`classify`), label every pixel (`segment`), find every
object (`detect`), answer a question (`answer`). Item `i` depends on (seed, split, i) and the image size only, not on
the order of access, the batch or the process. The two splits never share a scene.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitfocus.core.arguments import parse_digits
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.data.shapes.paint import PIXELS_AT_ONCE, extent, paint
from vitfocus.data.shapes.scene import COLOURS, SHAPES, SLOTS, SPLITS, ItemRandom, SceneObject, Scenes, compose, labels

ANNOTATORS = 10
_Item = TypeVar("_Item")
_MOST_SCENES = 10**7


@dataclass(frozen=True)
class ShapesQuestion:
    """A question as in VQAv2: its kind ("how many", ...), text, agreed answer and the ten answers."""

    kind: str
    text: str
    answer: str
    answers: tuple[str, ...] = ()

    @property
    def answer_type(self) -> str:
        """VQAv2's coarse type: yes/no, number or other."""
        if self.answer in ("yes", "no"):
            return "yes/no"
        return "number" if self.answer.isdigit() else "other"


def ask(objects: Sequence[SceneObject], seed: int, split: str, item: int) -> list[ShapesQuestion]:
    """One question of each kind that the scene allows, in an order that depends on the item.

    >>> from vitfocus.data.shapes.scene import compose
    >>> question = ask(compose([5]).objects(0), seed=0, split="train", item=5)[0]
    >>> question.answers.count(question.answer) >= 7
    True
    """
    draws = _Draws(ItemRandom.of(seed, split, [item], purpose=2))
    makers = [_count, _colour, _shape, _existence, _relation]
    made = [maker(objects, draws) for maker in draws.shuffled(makers)]
    return [_annotated(question, draws) for question in made if question]


class _Draws:
    """Random numbers of one item, drawn in advance; far more than five questions need."""

    def __init__(self, random: ItemRandom) -> None:
        self._numbers = iter(random.uniform(128)[0].tolist())

    def chance(self, probability: float) -> bool:
        return next(self._numbers) < probability

    def pick(self, choices: Sequence[_Item]) -> _Item:
        return choices[int(next(self._numbers) * len(choices))]

    def shuffled(self, items: Sequence[_Item]) -> list[_Item]:
        keys = [next(self._numbers) for _ in items]
        return [items[place] for place in sorted(range(len(items)), key=keys.__getitem__)]


def _count(objects: Sequence[SceneObject], draws: _Draws) -> ShapesQuestion:
    if draws.chance(0.3):
        return ShapesQuestion("how many", "How many objects are there?", str(len(objects)))
    seen = Counter(one.shape for one in objects)
    several = [shape for shape, count in seen.items() if count > 1]
    # Most shapes occur once: ask about the others if there are any, and sometimes about one that is missing.
    shapes = several if several and draws.chance(0.7) else SHAPES if draws.chance(0.25) else sorted(seen)
    shape = draws.pick(shapes)
    return ShapesQuestion(
        "how many", f"How many {shape}{'es' if shape.endswith('s') else 's'} are there?", str(seen[shape])
    )


def _named(objects: Sequence[SceneObject], draws: _Draws, key: str) -> tuple[SceneObject, str]:
    """An object, and its shape or colour (`key`) if that identifies it; "" for the main object, the largest."""
    counts = Counter(getattr(one, key) for one in objects)
    one = draws.pick([one for one in objects if one.main or counts[getattr(one, key)] == 1])
    alone = not one.main or (counts[getattr(one, key)] == 1 and draws.chance(0.7))
    return one, getattr(one, key) if alone else ""


def _colour(objects: Sequence[SceneObject], draws: _Draws) -> ShapesQuestion:
    one, shape = _named(objects, draws, "shape")
    return ShapesQuestion("what color is the", f"What color is the {shape or 'largest object'}?", one.colour)


def _shape(objects: Sequence[SceneObject], draws: _Draws) -> ShapesQuestion:
    one, colour = _named(objects, draws, "colour")
    return ShapesQuestion("what shape is the", f"What shape is the {colour or 'largest'} object?", one.shape)


def _existence(objects: Sequence[SceneObject], draws: _Draws) -> ShapesQuestion:
    """Ask for a shape or for a shape of some colour; yes and no are equally frequent."""
    coloured, truth = draws.chance(0.5), draws.chance(0.5)
    seen = {(one.colour if coloured else "", one.shape) for one in objects}
    possible = [(colour, shape) for colour in (COLOURS if coloured else ("",)) for shape in SHAPES]
    colour, shape = draws.pick([pair for pair in possible if (pair in seen) == truth])
    name = f"{colour} {shape}".strip()
    article = "an" if name[0] in "aeiou" else "a"
    return ShapesQuestion("is there a", f"Is there {article} {name}?", "yes" if truth else "no")


def _relation(objects: Sequence[SceneObject], draws: _Draws) -> ShapesQuestion | None:
    """Compare two shapes that occur once each and whose centres are clearly apart horizontally."""
    shapes = Counter(one.shape for one in objects)
    single = [one for one in objects if shapes[one.shape] == 1]
    pairs = [(one, other) for one in single for other in single if abs(one.x - other.x) > 0.1]
    if not pairs:
        return None
    one, other = draws.pick(pairs)
    side = draws.pick(["left", "right"])
    truth = one.x < other.x if side == "left" else one.x > other.x
    text = f"Is the {one.shape} to the {side} of the {other.shape}?"
    return ShapesQuestion("is the", text, "yes" if truth else "no")


def _annotated(question: ShapesQuestion, draws: _Draws) -> ShapesQuestion:
    """Add ten answers, up to three of them wrong."""
    wrong = sum(draws.chance(0.12) for _ in range(3))
    answers = [_wrong_answer(question.answer, draws) for _ in range(wrong)] + [question.answer] * (ANNOTATORS - wrong)
    return ShapesQuestion(question.kind, question.text, question.answer, tuple(draws.shuffled(answers)))


def _wrong_answer(answer: str, draws: _Draws) -> str:
    """A similar wrong answer: the other word, one more or one fewer, the next colour or shape."""
    if answer in ("yes", "no"):
        return "no" if answer == "yes" else "yes"
    if answer.isdigit():
        return str(abs(int(answer) + draws.pick([-1, 1])))
    words = COLOURS if answer in COLOURS else SHAPES
    return words[(words.index(answer) + draws.pick([-1, 1])) % len(words)]


VERSION = 1  # incremented whenever scenes change
CLASSES: tuple[str, ...] = SHAPES
MASK_CLASSES: tuple[str, ...] = ("ground", *SHAPES)
TASKS: tuple[str, ...] = ("classify", "segment", "detect", "answer")
SMALLEST = 16

Size = int | tuple[int, int]


def shapes_batch(indices: npt.ArrayLike, split: str = "train", size: Size = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw some items of Shapes for classification.

    Args:
        indices: Indices of the items, 0 or more.
        split: "train" or "val".
        size: Height and width in pixels, or one number for both; at least 16.
        seed: Seed of the data set.

    Returns:
        Images, uint8 (B, 3, height, width), and labels, int64 (B,), which index `CLASSES`.

    Raises:
        VitfocusError: An index, the split or the size is not valid.

    Example:
        >>> images, labels = shapes_batch(range(4), size=(32, 48))
        >>> images.shape, images.dtype, labels.shape
        (torch.Size([4, 3, 32, 48]), torch.uint8, torch.Size([4]))
    """
    images = draw_all(indices, split, size, seed)[0]
    return torch.from_numpy(images), torch.from_numpy(labels(indices, split, seed))


def draw_all(
    indices: npt.ArrayLike, split: str = "train", size: Size = 64, seed: int = 0
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int8]]:
    """Draw items into memory: images (N, 3, height, width), shapes (N, SLOTS), and the slot that each pixel shows."""
    items, shape = np.asarray(indices, np.int64).reshape(-1), image_size(size)
    images = np.empty((len(items), 3, *shape), np.uint8)
    shape_class = np.empty((len(items), SLOTS), np.int64)
    owner = np.empty((len(items), *shape), np.int8)
    done = 0
    for scenes, drawn, slots in drawn_scenes(items, split, size, seed):
        part = slice(done, done + len(scenes))
        images[part], shape_class[part], owner[part] = drawn, scenes.shape_class, slots
        done += len(scenes)
    return images, shape_class, owner


def drawn_scenes(
    indices: npt.ArrayLike, split: str = "train", size: Size = 64, seed: int = 0
) -> Iterator[tuple[Scenes, npt.NDArray[np.uint8], npt.NDArray[np.int8]]]:
    """Yield items in order and in small batches: the scenes, their images, and the slot that each pixel shows."""
    items, shape = np.asarray(indices, np.int64).reshape(-1), image_size(size)
    if len(items) and items.min() < 0:
        raise VitfocusError(f"Shapes has no item {items.min()}; items are numbered from 0.")
    step = max(1, PIXELS_AT_ONCE // (shape[0] * shape[1]))
    for start in range(0, len(items), step):
        scenes = compose(items[start : start + step], split, seed, extent(shape))
        yield scenes, *paint(scenes, shape)


def image_size(size: Size) -> tuple[int, int]:
    """Height and width of a size given as one number or two.

    >>> image_size(64)
    (64, 64)
    """
    shape = (size, size) if isinstance(size, int) else tuple(size)
    if len(shape) != 2 or min(shape) < SMALLEST:
        raise VitfocusError(f"Shapes draws height x width of at least {SMALLEST} pixels each, but size={size!r}.")
    return shape[0], shape[1]


def semantic_mask(shape_class: npt.NDArray[np.int64], owner: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Convert the slots that pixels show (B, height, width) to classes of `MASK_CLASSES`; 0 is the background."""
    classes = np.pad(shape_class + 1, ((0, 0), (1, 0)))
    return np.take_along_axis(classes, owner.reshape(len(owner), -1) + 1, axis=1).reshape(owner.shape).astype(np.uint8)


def instances(
    shape_class: npt.NDArray[np.int64], owner: npt.NDArray[np.int8]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """The instances of one scene: classes of `MASK_CLASSES` (n,), visible masks (n, height, width), boxes (n, 4).

    A mask has the pixels in which the object is visible, and a box is the tight box of that mask as x0, y0, x1, y1 at
    pixel edges. Objects without a visible pixel are left out.
    """
    masks = owner[None] == np.arange(SLOTS, dtype=np.int8)[:, None, None]
    seen = masks.any(axis=(1, 2))
    masks = masks[seen]
    boxes = np.zeros((len(masks), 4), np.int64)
    for first, axis in ((0, 1), (1, 2)):
        along = masks.any(axis=axis)
        boxes[:, first] = along.argmax(axis=1)
        boxes[:, first + 2] = along.shape[1] - along[:, ::-1].argmax(axis=1)
    return shape_class[seen] + 1, masks, boxes


def detection_target(shape_class: npt.NDArray[np.int64], owner: npt.NDArray[np.int8]) -> dict[str, Tensor]:
    """The `instances` of one scene in the format of torchvision's detectors: boxes, labels and masks."""
    classes, masks, boxes = instances(shape_class, owner)
    target = {"boxes": torch.from_numpy(boxes).float(), "labels": torch.from_numpy(classes)}
    return {**target, "masks": torch.from_numpy(masks.astype(np.uint8))}


class Shapes(Dataset[tuple[Any, Any]]):
    """Shapes as a torch data set of (image, target); images are uint8 (3, height, width).

    The target depends on the task:

    * `classify`: the class, an index into `CLASSES`;
    * `segment`: an int64 mask (height, width) of classes in `MASK_CLASSES`;
    * `detect`: a dict in the format of torchvision's detectors: `boxes` (n, 4) float, the tight boxes of the visible
      masks; `labels` (n,) in `MASK_CLASSES`; `masks` (n, height, width) uint8; `area`, `iscrowd`, `image_id`;
    * `answer`: a dict with `question`, the ten annotators' `answers`, the agreed `answer` and its `answer_type`.

    A `DataLoader` draws whole batches at once, through `__getitems__`.

    Args:
        split: "train" or "val".
        length: Number of items.
        size: Height and width in pixels, or one number for both; at least 16.
        seed: Seed of the data set.
        task: "classify", "segment", "detect" or "answer".
        transform: Applied to each image, but not to the target.

    Raises:
        VitfocusError: An argument is not valid.

    Example:
        >>> image, mask = Shapes("val", length=10, size=32, task="segment")[3]
        >>> image.shape, mask.shape
        (torch.Size([3, 32, 32]), torch.Size([32, 32]))
    """

    def __init__(
        self,
        split: str = "train",
        length: int = 10_000,
        size: Size = 64,
        seed: int = 0,
        task: str = "classify",
        transform: Callable[[Tensor], Any] | None = None,
    ) -> None:
        for given, known, what in ((split, SPLITS, "split"), (task, TASKS, "task")):
            if given not in known:
                raise VitfocusError(f"Shapes has no {what} {given!r}: {nearest(given, known)}")
        if length < 0:
            raise VitfocusError(f"Shapes needs a length of 0 or more, but length={length}.")
        self.split, self.length, self.size, self.seed, self.task = split, length, image_size(size), seed, task
        self.transform = transform

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels; for segmentation and detection the background is the first."""
        return MASK_CLASSES if self.task in ("segment", "detect") else CLASSES

    @property
    def targets(self) -> list[int]:
        """The class of every item's main object, without drawing it."""
        return labels(range(self.length), self.split, self.seed).tolist()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Draw several items at once, which is many times faster than one at a time."""
        for index in indices:
            if not -self.length <= index < self.length:
                raise IndexError(f"Shapes has {self.length} items, but item {index} was asked for.")
        items = [int(index) % self.length for index in indices]
        result: list[tuple[Any, Any]] = []
        for scenes, images, owner in drawn_scenes(items, self.split, self.size, self.seed):
            masks = semantic_mask(scenes.shape_class, owner) if self.task == "segment" else owner
            for scene in range(len(scenes)):
                image = torch.from_numpy(images[scene])
                target = self._target(items[len(result)], scenes, scene, masks[scene])
                result.append((self.transform(image) if self.transform else image, target))
        return result

    def _target(self, item: int, scenes: Scenes, scene: int, mask: npt.NDArray[Any]) -> Any:
        if self.task == "classify":
            return int(scenes.label[scene])
        if self.task == "segment":
            return torch.from_numpy(mask).long()
        if self.task == "answer":
            question = ask(scenes.objects(scene), self.seed, self.split, item)[0]
            return {
                "question": question.text,
                "answers": list(question.answers),
                "answer": question.answer,
                "answer_type": question.answer_type,
            }
        target = detection_target(scenes.shape_class[scene], mask)
        area, crowd = target["masks"].sum((1, 2)).float(), torch.zeros_like(target["labels"])
        return {**target, "area": area, "iscrowd": crowd, "image_id": item}


def shapes_named(data: Any, default: int) -> int | None:
    """The number of scenes in "shapes" (the default) or "shapes:N"; None for any other `data`.

    >>> shapes_named("shapes", 500), shapes_named("shapes:20", 500), shapes_named("data/camvid", 500)
    (500, 20, None)
    """
    word, colon, number = data.partition(":") if isinstance(data, str) else ("", "", "")
    if word != "shapes" or Path(data).is_dir():
        return None
    if colon and not 0 < (parse_digits(number) or 0) <= _MOST_SCENES:
        raise VitfocusError(f"{data!r} has no valid number of scenes: write shapes, or shapes:300.")
    return int(number) if colon else default
