"""Questions about a Shapes scene, each with ten answers as in VQAv2.

There are five kinds: how many, which colour, which shape, is there, is it to the left. Up to three of the ten
annotators give a similar wrong answer, so that soft accuracies between 0 and 1 occur; at least seven are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from vitfocus.data.shapes.scene import COLOURS, SHAPES, ItemRandom, SceneObject

ANNOTATORS = 10
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Question:
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


def ask(objects: Sequence[SceneObject], seed: int, split: str, item: int) -> list[Question]:
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


def _count(objects: Sequence[SceneObject], draws: _Draws) -> Question:
    if draws.chance(0.3):
        return Question("how many", "How many objects are there?", str(len(objects)))
    seen = Counter(one_object.shape for one_object in objects)
    several = [shape for shape, count in seen.items() if count > 1]
    # Most shapes occur once: ask about the others if there are any, and sometimes about one that is missing.
    shapes = several if several and draws.chance(0.7) else SHAPES if draws.chance(0.25) else sorted(seen)
    shape = draws.pick(shapes)
    return Question("how many", f"How many {_plural(shape)} are there?", str(seen[shape]))


def _colour(objects: Sequence[SceneObject], draws: _Draws) -> Question:
    shapes = Counter(one_object.shape for one_object in objects)
    one_object = draws.pick([one_object for one_object in objects if one_object.main or shapes[one_object.shape] == 1])
    name = (
        one_object.shape
        if not one_object.main or (shapes[one_object.shape] == 1 and draws.chance(0.7))
        else "largest object"
    )
    return Question("what color is the", f"What color is the {name}?", one_object.colour)


def _shape(objects: Sequence[SceneObject], draws: _Draws) -> Question:
    colours = Counter(one_object.colour for one_object in objects)
    one_object = draws.pick(
        [one_object for one_object in objects if one_object.main or colours[one_object.colour] == 1]
    )
    name = (
        one_object.colour
        if not one_object.main or (colours[one_object.colour] == 1 and draws.chance(0.7))
        else "largest"
    )
    return Question("what shape is the", f"What shape is the {name} object?", one_object.shape)


def _existence(objects: Sequence[SceneObject], draws: _Draws) -> Question:
    """Ask for a shape or for a shape of some colour; yes and no are equally frequent."""
    coloured, truth = draws.chance(0.5), draws.chance(0.5)
    seen = {(one_object.colour if coloured else "", one_object.shape) for one_object in objects}
    possible = [(colour, shape) for colour in (COLOURS if coloured else ("",)) for shape in SHAPES]
    colour, shape = draws.pick([pair for pair in possible if (pair in seen) == truth])
    name = f"{colour} {shape}".strip()
    article = "an" if name[0] in "aeiou" else "a"
    return Question("is there a", f"Is there {article} {name}?", "yes" if truth else "no")


def _relation(objects: Sequence[SceneObject], draws: _Draws) -> Question | None:
    """Compare two shapes that occur once each and whose centres are clearly apart horizontally."""
    shapes = Counter(one_object.shape for one_object in objects)
    single = [one_object for one_object in objects if shapes[one_object.shape] == 1]
    pairs = [(one, other) for one in single for other in single if abs(one.x - other.x) > 0.1]
    if not pairs:
        return None
    one, other = draws.pick(pairs)
    side = draws.pick(["left", "right"])
    truth = one.x < other.x if side == "left" else one.x > other.x
    text = f"Is the {one.shape} to the {side} of the {other.shape}?"
    return Question("is the", text, "yes" if truth else "no")


def _plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


def _annotated(question: Question, draws: _Draws) -> Question:
    """Add ten answers, up to three of them wrong."""
    wrong = sum(draws.chance(0.12) for _ in range(3))
    answers = [_wrong_answer(question.answer, draws) for _ in range(wrong)] + [question.answer] * (ANNOTATORS - wrong)
    return Question(question.kind, question.text, question.answer, tuple(draws.shuffled(answers)))


def _wrong_answer(answer: str, draws: _Draws) -> str:
    """A similar wrong answer: the other word, one more or one fewer, the next colour or shape."""
    if answer in ("yes", "no"):
        return "no" if answer == "yes" else "yes"
    if answer.isdigit():
        return str(abs(int(answer) + draws.pick([-1, 1])))
    words = COLOURS if answer in COLOURS else SHAPES
    return words[(words.index(answer) + draws.pick([-1, 1])) % len(words)]
