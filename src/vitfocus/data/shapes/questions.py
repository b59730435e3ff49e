"""Questions about a Shapes scene, with the ten answers that VQAv2 collects for each.

Five kinds are asked: how many, which colour, which shape, is there, is it to the left. Up to three of the ten
annotators slip to a neighbouring answer, so that the soft accuracy is not all or nothing; the truth keeps seven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from vitfocus.data.shapes.scene import COLOURS, FIGURES, Dice, Thing

ANNOTATORS = 10
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Question:
    """A question in VQAv2's terms: its kind ("how many", ...), text, agreed answer and the ten single answers."""

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


def ask(things: Sequence[Thing], seed: int, split: str, item: int) -> list[Question]:
    """Ask one question of each kind that this scene allows, in an order of the item's own.

    >>> from vitfocus.data.shapes.scene import compose
    >>> question = ask(compose([5]).things(0), seed=0, split="train", item=5)[0]
    >>> question.answers.count(question.answer) >= 7
    True
    """
    luck = _Luck(Dice.of(seed, split, [item], purpose=2))
    makers = [_count, _colour, _shape, _existence, _relation]
    made = [maker(things, luck) for maker in luck.shuffled(makers)]
    return [_annotated(question, luck) for question in made if question]


class _Luck:
    """One item's random numbers, thrown in advance and used up one by one; far more than five questions need."""

    def __init__(self, dice: Dice) -> None:
        self._throws = iter(dice.uniform(128)[0].tolist())

    def chance(self, probability: float) -> bool:
        return next(self._throws) < probability

    def pick(self, choices: Sequence[_Item]) -> _Item:
        return choices[int(next(self._throws) * len(choices))]

    def shuffled(self, items: Sequence[_Item]) -> list[_Item]:
        keys = [next(self._throws) for _ in items]
        return [items[place] for place in sorted(range(len(items)), key=keys.__getitem__)]


def _count(things: Sequence[Thing], luck: _Luck) -> Question:
    if luck.chance(0.3):
        return Question("how many", "How many objects are there?", str(len(things)))
    seen = Counter(thing.figure for thing in things)
    several = [figure for figure, count in seen.items() if count > 1]
    # Most figures occur once: ask about the others when there are any, and now and then about one that is missing.
    figures = several if several and luck.chance(0.7) else FIGURES if luck.chance(0.25) else sorted(seen)
    figure = luck.pick(figures)
    return Question("how many", f"How many {_plural(figure)} are there?", str(seen[figure]))


def _colour(things: Sequence[Thing], luck: _Luck) -> Question:
    figures = Counter(thing.figure for thing in things)
    thing = luck.pick([thing for thing in things if thing.main or figures[thing.figure] == 1])
    name = thing.figure if not thing.main or (figures[thing.figure] == 1 and luck.chance(0.7)) else "largest object"
    return Question("what color is the", f"What color is the {name}?", thing.colour)


def _shape(things: Sequence[Thing], luck: _Luck) -> Question:
    colours = Counter(thing.colour for thing in things)
    thing = luck.pick([thing for thing in things if thing.main or colours[thing.colour] == 1])
    name = thing.colour if not thing.main or (colours[thing.colour] == 1 and luck.chance(0.7)) else "largest"
    return Question("what shape is the", f"What shape is the {name} object?", thing.figure)


def _existence(things: Sequence[Thing], luck: _Luck) -> Question:
    """Ask for a figure or for a figure of some colour; yes and no come equally often."""
    coloured, truth = luck.chance(0.5), luck.chance(0.5)
    seen = {(thing.colour if coloured else "", thing.figure) for thing in things}
    possible = [(colour, figure) for colour in (COLOURS if coloured else ("",)) for figure in FIGURES]
    colour, figure = luck.pick([pair for pair in possible if (pair in seen) == truth])
    name = f"{colour} {figure}".strip()
    article = "an" if name[0] in "aeiou" else "a"
    return Question("is there a", f"Is there {article} {name}?", "yes" if truth else "no")


def _relation(things: Sequence[Thing], luck: _Luck) -> Question | None:
    """Compare two figures that occur once each and whose centres are clearly apart from left to right."""
    figures = Counter(thing.figure for thing in things)
    single = [thing for thing in things if figures[thing.figure] == 1]
    pairs = [(one, other) for one in single for other in single if abs(one.x - other.x) > 0.1]
    if not pairs:
        return None
    one, other = luck.pick(pairs)
    side = luck.pick(["left", "right"])
    truth = one.x < other.x if side == "left" else one.x > other.x
    text = f"Is the {one.figure} to the {side} of the {other.figure}?"
    return Question("is the", text, "yes" if truth else "no")


def _plural(figure: str) -> str:
    return figure + ("es" if figure.endswith("s") else "s")


def _annotated(question: Question, luck: _Luck) -> Question:
    """Add ten answers: the truth, but for up to three slips."""
    slips = sum(luck.chance(0.12) for _ in range(3))
    answers = [_slip(question.answer, luck) for _ in range(slips)] + [question.answer] * (ANNOTATORS - slips)
    return Question(question.kind, question.text, question.answer, tuple(luck.shuffled(answers)))


def _slip(answer: str, luck: _Luck) -> str:
    """Return a neighbouring answer: the other word, one more or one fewer, the next hue or figure."""
    if answer in ("yes", "no"):
        return "no" if answer == "yes" else "yes"
    if answer.isdigit():
        return str(abs(int(answer) + luck.pick([-1, 1])))
    words = COLOURS if answer in COLOURS else FIGURES
    return words[(words.index(answer) + luck.pick([-1, 1])) % len(words)]
