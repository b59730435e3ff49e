"""Visual question answering on VQAv2's layout, scored by the official accuracy over ten people's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from vitfocus.anatomy import anatomy
from vitfocus.data.answers import soft_accuracy
from vitfocus.data.images import BrokenLog
from vitfocus.data.loading import Share
from vitfocus.data.questions import ArrayPictures, Question, QuestionSet, read_vqav2, shapes_questions, splits_in
from vitfocus.data.questions_batches import QuestionSamples, every_question
from vitfocus.data.shapes import shapes_named
from vitfocus.errors import VitfocusError
from vitfocus.robustness.fingerprint import versions
from vitfocus.robustness.pixels import PixelModel, evaluating
from vitfocus.robustness.plan import Samples, Summary
from vitfocus.robustness.progress import progress as shown_progress
from vitfocus.robustness.request import Request
from vitfocus.robustness.results import Scores
from vitfocus.robustness.scores import mean_interval
from vitfocus.robustness.sources import evenly
from vitfocus.tasks.answering import Answerer, language_alone, write_predictions
from vitfocus.treatments.store import task_of

NAME = "answers"


def measure(asked: Request, split: str = "") -> Scores:
    """The official accuracy, in percent, of one model or several, in all and by answer type.

    The data is a folder in VQAv2's layout, of which `split` ("val2014", or several joined by "+") is taken, the word
    "shapes", a `QuestionSet`, or a data set of (picture, {"question", "answers"}). Where results are kept, the answers
    are written there too, as the official server takes them; of a split whose answers are withheld that is all there is
    to have.
    """
    models, device = asked.models, asked.device
    questions = open_set(asked.data, split, _size(asked.first_model))
    if not questions.annotated and asked.out is None:
        raise VitfocusError(
            f"The answers of {split or 'these questions'} are withheld, so there is nothing to score: name a folder "
            "with out (--out) to keep what the model answers."
        )
    places = evenly(len(questions), asked.limit)
    answers: dict[str, list[str]] = {}
    with evaluating(list(models.values()), device), torch.no_grad():
        with shown_progress(asked.suite, len(places) * len(models), show=asked.progress) as advance:
            for name, model in models.items():
                answerer = Answerer(model, _size(model))
                samples = QuestionSamples(questions, answerer.words, answerer.look)
                share = Share(asked.batch_size or (64 if device.type == "cuda" else 16))
                given: dict[int, str] = {}
                for batch in every_question(
                    samples, share, asked.workers, device, BrokenLog(fatal=True), print, places
                ):
                    with asked.autocast():
                        given.update(answerer.each([batch]))
                    advance(int(batch.counted.sum()), name)
                answers[name] = [given[place] for place in places]
        described = {name: PixelModel(name, model).describe() for name, model in models.items()}
    if asked.out is not None and asked.processes.first:
        for name, given_answers in answers.items():
            file = "answers.json" if len(models) == 1 else f"answers-{list(models).index(name)}.json"
            numbers = (questions.questions[place].number for place in places)
            write_predictions(Path(asked.out) / file, zip(numbers, given_answers, strict=True))
    return asked.kept(_scored(asked, questions, places, answers, described, split))


def open_set(data: Any, split: str = "", size: int = 32) -> QuestionSet:
    """A folder in VQAv2's layout, the embedded Shapes drawn at that size, or a set as it is."""
    if isinstance(data, QuestionSet):
        return data
    if (length := shapes_named(data, 1000)) is not None:
        return shapes_questions("val", length, size)
    if isinstance(data, Dataset):
        return _from_items(data)
    if not isinstance(data, str | Path):
        raise VitfocusError(f"{NAME} takes a folder in VQAv2's layout or a data set, not a {type(data).__name__}.")
    found = splits_in(data) if Path(data).is_dir() else []
    chosen = split or (found[0] if found else "val2014")
    return read_vqav2(data, chosen, annotated=not chosen.startswith("test"))


def _from_items(data: Any) -> QuestionSet:
    """A data set of (picture, {"question", "answers"}), such as `Shapes(task="answer")`; pictures uint8 (3, H, W)."""
    pictures, questions = [], []
    for number in range(len(data)):
        picture, target = data[number]
        if not isinstance(target, Mapping) or not {"question", "answers"} <= set(target):
            raise VitfocusError(f"{NAME} takes items of (picture, dict with 'question' and 'answers').")
        kind = str(target.get("answer_type", ""))
        pictures.append(picture)
        questions.append(Question(number, number, target["question"], tuple(target["answers"]), answer_type=kind))
    if len({tuple(getattr(picture, "shape", ())) for picture in pictures}) != 1:
        raise VitfocusError(f"{NAME} takes a data set whose pictures are uint8 tensors (3, H, W) of one size.")
    return QuestionSet(questions, ArrayPictures(torch.stack(pictures), "picture"))


def _size(model: nn.Module) -> int:
    """The shorter side of the pictures that a model was trained on, or else built for."""
    return int(task_of(model).get("size") or min(anatomy(model).build_size))


def _scored(
    asked: Request,
    whole: QuestionSet,
    places: Sequence[int],
    answers: Mapping[str, Sequence[str]],
    described: Mapping[str, Any],
    split: str,
) -> Scores:
    questions = [whole.questions[place] for place in places]
    kinds = np.array([question.answer_type for question in questions])
    samples: Samples = {"all": {}} if whole.annotated else {}
    summaries: dict[str, Summary] = {name: {"cells": {}} for name in answers}
    note = "The answers are withheld, so nothing is scored; answers.json holds the model's own."
    blind: dict[str, Any] = {}
    if whole.annotated:
        blind = language_alone(questions)
        note = f"VQAv2's official accuracy. Without looking: always {blind['constant_answer']!r}, or by question type."
    for name, given in answers.items() if whole.annotated else ():
        pairs = zip(given, questions, strict=True)
        scores = np.array([soft_accuracy(answer, question.answers) for answer, question in pairs])
        cells = {str(kind): _accuracy(scores[kinds == kind], asked.seed) for kind in sorted(set(kinds.tolist()))}
        summaries[name] = {
            **_accuracy(scores, asked.seed),
            "constant_accuracy": 100 * blind["constant_accuracy"],
            "question_type_accuracy": 100 * blind["question_type_accuracy"],
            "cells": cells,
        }
        samples["all"][name] = {"accuracy": scores}
    fingerprint = {
        "suite": asked.suite,
        "protocol": {"precision": asked.precision, "split": split, "limit": asked.limit},
        "data": {"digest": whole.digest(), "limit": asked.limit, "images": len(questions)},
        "libraries": versions(),
        "models": dict(described),
    }
    return Scores(asked.suite, len(questions), summaries, (note,), fingerprint, samples)


def _accuracy(scores: Any, seed: int) -> Summary:
    low, high = mean_interval(scores, seed)
    return {"accuracy": 100 * float(scores.mean()), "accuracy_interval": [100 * low, 100 * high]}
