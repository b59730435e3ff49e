"""Answering questions about images, and VQAv2's metric: official answer normalisation, soft accuracy and targets.

Ten people answered each question. The accuracy of an answer is min(1, matches / 3), averaged over the ten ways to leave
one person out, so that people can be scored in the same way: 0.3 for one match of ten, then 0.6, 0.9 and 1.

>>> from vitfocus.data.vqa.dataset import QuestionTokenizer, attach_tokenizer, shapes_questions
>>> from vitfocus.treatments.save_load import create_model
>>> small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
>>> names = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
>>> tokenizer = QuestionTokenizer.train(["Is there a star?"], size=60)
>>> model = create_model(
...     "transformers:ViltForQuestionAnswering", **small, **names, image_size=32, patch_size=8, vocab_size=60
... )
>>> attach_tokenizer(model, tokenizer)
>>> images = shapes_questions("val", 2, 32).images
>>> answers = Answerer(model)(list(images), ["Is there a star?", "Is there a ring?"])
>>> len(answers), set(answers) <= {"yes", "no"}
(2, True)
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitfocus.anatomy import anatomy, unwrap
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import eval_mode
from vitfocus.data.vqa.batches import VqaPreprocessing, pad_images
from vitfocus.data.vqa.dataset import Question, tokenizer_of

ARTICLES = frozenset({"a", "an", "the"})
NUMBERS = {
    word: str(value)
    for value, word in enumerate("zero one two three four five six seven eight nine ten".split())  # noqa: SIM905
} | {"none": "0"}
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'

#: Contractions that the official evaluation repairs if one apostrophe is missing.
_CONTRACTED = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're
there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
CONTRACTIONS = {
    word[:place] + word[place + 1 :]: word
    for word in _CONTRACTED.split()
    for place, letter in enumerate(word)
    if letter == "'"
} | {"somebody'd": "somebodyd"}  # reversed in the official list

_FULL_STOP = re.compile(r"\.(?!\d)")
_THOUSANDS = re.compile(r"\d,\d")
_FULL_STOPS_REMOVED = 32  # the official code passes a regex flag as the number of replacements


@lru_cache(maxsize=1 << 17)
def normalise_answer(answer: str) -> str:
    """Normalise an answer as the official evaluation does.

    >>> [normalise_answer(text) for text in ("The two dogs.", "dont know", "1,000", "black/white")]
    ['2 dogs', "don't know", '1000', 'black white']
    """
    given = text = stripped(answer)
    for mark in PUNCTUATION:
        vanishes = f"{mark} " in given or f" {mark}" in given or _THOUSANDS.search(given)
        text = text.replace(mark, "" if vanishes else " ")
    text = _FULL_STOP.sub("", text, count=_FULL_STOPS_REMOVED)
    words = (NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def stripped(answer: str) -> str:
    """Remove line breaks, tabs and outer spaces: the only normalisation if all people gave the same answer."""
    return answer.replace("\n", " ").replace("\t", " ").strip()


def consensus(matches: int, people: int = 10) -> float:
    """The soft accuracy of an answer that `matches` of the people gave.

    >>> [round(consensus(n), 3) for n in (0, 1, 2, 3, 4, 10)]
    [0.0, 0.3, 0.6, 0.9, 1.0, 1.0]
    """
    if people < 1:
        raise VitfocusError("The accuracy of an answer needs at least one person's answer.")
    left_out_one_of_them, left_out_another = min(1.0, max(0, matches - 1) / 3), min(1.0, matches / 3)
    return (matches * left_out_one_of_them + (people - matches) * left_out_another) / people


def soft_accuracy(answer: str, answers: Sequence[str]) -> float:
    """The official accuracy of an answer, in [0, 1].

    If all people gave exactly the same answer, nothing is normalised, as in the official evaluation.

    Args:
        answer: The model's answer.
        answers: The answers that people gave.

    Example:
        >>> soft_accuracy("two", ["2"] * 3 + ["3"] * 7), soft_accuracy("two", ["2"] * 10)
        (0.9, 0.0)
    """
    given, people = stripped(answer), [stripped(one) for one in answers]
    if len(set(people)) > 1:
        given, people = normalise_answer(given), [normalise_answer(one) for one in people]
    return consensus(people.count(given), len(people))


def frequent_answers(agreed: Iterable[str], size: int = 3129, least: int = 1) -> list[str]:
    """The `size` most frequent agreed answers of the training questions that occur at least `least` times.

    VQAv2's usual 3,129 answers are those that occur nine times or more in training and validation together.

    >>> frequent_answers(["yes", "Yes.", "no", "two"], size=2)
    ['yes', '2']
    """
    counts = Counter(map(normalise_answer, agreed))
    frequent = sorted((word for word in counts if counts[word] >= least), key=lambda word: (-counts[word], word))
    if not frequent:
        raise VitfocusError(f"No answer occurs {least} times or more in the training annotations.")
    return frequent[:size]


def soft_targets(answers: Sequence[str], numbers: Mapping[str, int]) -> dict[int, float]:
    """Training targets: the accuracy of every answer in the vocabulary, by its number.

    >>> soft_targets(["yes"] * 8 + ["no"] * 2, {"no": 0, "yes": 1})
    {1: 1.0, 0: 0.6}
    """
    counts = Counter(map(normalise_answer, answers))
    return {numbers[word]: consensus(count, len(answers)) for word, count in counts.items() if word in numbers}


def best_constant(answers: Iterable[Sequence[str]]) -> tuple[str, float]:
    """The answer with the highest accuracy if given to every question, and that accuracy: a lower bound for models.

    >>> best_constant([["yes"] * 10, ["no"] * 9 + ["yes"]])
    ('yes', 0.65)
    """
    sums: defaultdict[str, float] = defaultdict(float)
    asked = 0
    for people in answers:
        asked += 1
        counts = Counter(map(stripped, people))
        if len(counts) > 1:
            counts = Counter(map(normalise_answer, people))
        for word, count in counts.items():
            if word == normalise_answer(word):  # like every answer of a vocabulary
                sums[word] += consensus(count, len(people))
    if not sums:
        raise VitfocusError("There are no answers to choose from.")
    best = min(sums, key=lambda word: (-sums[word], word))
    return best, sums[best] / asked


def by_answer_type(questions: Iterable[Question], answers: Iterable[str]) -> dict[str, tuple[float, int]]:
    """The summed accuracy and the number of questions, by answer type, and for all questions under ""."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for question, answer in zip(questions, answers, strict=True):
        score = soft_accuracy(answer, question.answers)
        for name in {"", question.answer_type}:
            sums[name][0] += score
            sums[name][1] += 1
    return {name: (total, int(count)) for name, (total, count) in sums.items()}


def language_baselines(questions: Sequence[Question]) -> dict[str, Any]:
    """Accuracies of two baselines that do not see the image: the best single answer, and the best per question type."""
    answer, accuracy = best_constant(question.answers for question in questions)
    kinds: defaultdict[str, list[Question]] = defaultdict(list)
    for question in questions:
        kinds[question.question_type].append(question)
    gained = sum(best_constant(one.answers for one in some)[1] * len(some) for some in kinds.values())
    constant = {"constant_answer": answer, "constant_accuracy": accuracy}
    return {**constant, "question_type_accuracy": gained / len(questions)}


class Answerer:
    """Answers questions about images.

    Args:
        model: A `ViltForQuestionAnswering` with its tokenizer and its answers.
        size: Short side of the images; by default that of the model.

    Raises:
        VitfocusError: The model has no answers or no tokenizer.
    """

    def __init__(self, model: nn.Module, size: int | None = None) -> None:
        self.model, inner = model, unwrap(model)
        answers, tokenizer = answers_in(getattr(inner, "config", None)), tokenizer_of(inner)
        if answers is None:
            raise VitfocusError(f"This {type(inner).__name__} does not name the answers of its outputs: set id2label.")
        if tokenizer is None:
            raise VitfocusError(
                f"This {type(inner).__name__} has no tokenizer: load it from a folder that holds "
                "tokenizer.json or vocab.txt."
            )
        self.answers, self.tokenizer = answers, tokenizer
        self.preprocessing = preprocessing_of(inner, size)

    @torch.no_grad()
    def __call__(self, images: Sequence[Image.Image | Tensor], questions: Sequence[str]) -> list[str]:
        """Answer one question per image (PIL image, or uint8 (3, H, W)); the model runs in eval mode."""
        if len(images) != len(questions):
            raise VitfocusError(f"There are {len(images)} images and {len(questions)} questions; expected one each.")
        if not questions:
            return []
        device = next(self.model.parameters()).device
        inputs = self.tokenizer(questions) | pad_images([self.preprocessing.resize(image) for image in images])
        with eval_mode(self.model):
            chosen = self.model(**self.preprocessing.normalise(inputs, device)).logits.argmax(1)
        return [self.answers[number] for number in chosen.tolist()]


def preprocessing_of(model: nn.Module, size: int | None = None) -> VqaPreprocessing:
    """The image preprocessing of a model, at its own size unless another is given."""
    seen = anatomy(model)
    config: Any = getattr(unwrap(model), "config", None)
    return VqaPreprocessing(size or min(seen.build_size), int(config.patch_size), tuple(seen.mean), tuple(seen.std))


def answers_in(config: Any) -> list[str] | None:
    """The answers in a transformers config, in order; None if its labels are only numbered."""
    labels: Mapping[Any, Any] = getattr(config, "id2label", None) or {}
    names = [str(labels[key]) for key in sorted(labels, key=int)]
    return None if all(name == f"LABEL_{place}" for place, name in enumerate(names)) else names
