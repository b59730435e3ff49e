"""A model that answers questions about pictures, with all it needs for it: its words, its answers, its look.

>>> from vitfocus.data.vqa.dataset import shapes_questions
>>> from vitfocus.data.vqa.tokenizer import Words
>>> from vitfocus.treatments.save_load import create_model
>>> small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
>>> names = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
>>> words = Words.train(["Is there a star?"], size=60)
>>> model = create_model(
...     "transformers:ViltForQuestionAnswering", **small, **names, image_size=32, patch_size=8, vocab_size=len(words)
... )
>>> attach_words(model, words)
>>> pictures = shapes_questions("val", 2, 32).pictures
>>> answers = Answerer(model)([pictures.read(0), pictures.read(1)], ["Is there a star?", "Is there a ring?"])
>>> len(answers), set(answers) <= {"yes", "no"}
(2, True)
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitfocus.anatomy import anatomy, unwrap
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.core.modules import eval_mode
from vitfocus.data.vqa.answers import best_constant, soft_accuracy
from vitfocus.data.vqa.batches import Look, QuestionBatch, stacked
from vitfocus.data.vqa.dataset import Question
from vitfocus.data.vqa.tokenizer import attach_words, words_of

__all__ = ["Answerer", "answers_in", "attach_words", "by_answer_type", "language_alone", "write_predictions"]


class Answerer:
    """A question-answering model, its words and its answers; `size` is the pictures' shorter side."""

    def __init__(self, model: nn.Module, size: int | None = None) -> None:
        self.model, inner = model, unwrap(model)
        answers, words = answers_in(getattr(inner, "config", None)), words_of(inner)
        if answers is None:
            raise VitfocusError(
                f"This {type(inner).__name__} does not say which answers its outputs mean: its config needs id2label."
            )
        if words is None:
            raise VitfocusError(
                f"This {type(inner).__name__} has no words to read questions with: load it from a folder that holds "
                "tokenizer.json or vocab.txt."
            )
        self.answers, self.words = answers, words
        self.look = look_of(inner, size)

    @torch.no_grad()
    def __call__(self, pictures: Sequence[Image.Image | Tensor], questions: Sequence[str]) -> list[str]:
        """The answer to each question about its picture (Pillow's, or uint8 (3, H, W)); runs in eval mode."""
        if len(pictures) != len(questions):
            raise VitfocusError(f"There are {len(pictures)} pictures and {len(questions)} questions: one for each.")
        if not questions:
            return []
        device = next(self.model.parameters()).device
        inputs = self.words(questions) | stacked([self.look.fitted(picture) for picture in pictures])
        with eval_mode(self.model):
            chosen = self.model(**self.look.normalised(inputs, device)).logits.argmax(1)
        return [self.answers[number] for number in chosen.tolist()]

    def each(self, batches: Iterable[QuestionBatch]) -> Iterator[tuple[int, str]]:
        """The place of every question that counts, and the answer to it; the caller sees to eval mode and autocast."""
        for batch in batches:
            chosen = self.model(**batch.inputs).logits.argmax(1).tolist()
            for place, number, counts in zip(batch.places.tolist(), chosen, batch.counted.tolist(), strict=True):
                if counts:
                    yield place, self.answers[number]


def look_of(model: nn.Module, size: int | None = None) -> Look:
    """How a model's pictures are prepared: as it was built, unless another size is asked for."""
    seen = anatomy(model)
    config: Any = getattr(unwrap(model), "config", None)
    return Look(size or min(seen.build_size), int(config.patch_size), tuple(seen.mean), tuple(seen.std))


def answers_in(config: Any) -> list[str] | None:
    """The answers of a transformers config, in order; None where its labels are mere numbers."""
    labels: Mapping[Any, Any] = getattr(config, "id2label", None) or {}
    names = [str(labels[key]) for key in sorted(labels, key=int)]
    return None if all(name == f"LABEL_{place}" for place, name in enumerate(names)) else names


def by_answer_type(questions: Iterable[Question], answers: Iterable[str]) -> dict[str, tuple[float, int]]:
    """The sum of the official accuracies and the number of questions, by answer type, and under "" for all."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for question, answer in zip(questions, answers, strict=True):
        score = soft_accuracy(answer, question.answers)
        for name in {"", question.answer_type}:
            sums[name][0] += score
            sums[name][1] += 1
    return {name: (total, int(count)) for name, (total, count) in sums.items()}


def language_alone(questions: Sequence[Question]) -> dict[str, Any]:
    """What can be had without looking: the best single answer, and the best answer to each type of question."""
    answer, accuracy = best_constant(question.answers for question in questions)
    kinds: defaultdict[str, list[Question]] = defaultdict(list)
    for question in questions:
        kinds[question.question_type].append(question)
    gained = sum(best_constant(one.answers for one in some)[1] * len(some) for some in kinds.values())
    return {
        "constant_answer": answer,
        "constant_accuracy": accuracy,
        "question_type_accuracy": gained / len(questions),
    }


def write_predictions(path: str | Path, numbered: Iterable[tuple[int, str]]) -> None:
    """Write answers by question number as the official evaluation and its server read them."""
    write_text(path, json.dumps([{"question_id": number, "answer": answer} for number, answer in numbered]) + "\n")
