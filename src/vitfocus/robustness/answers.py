"""Visual question answering on VQAv2's layout, scored by the official accuracy over ten people's answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from vitfocus.anatomy import pixels_of
from vitfocus.core.environment import versions
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import eval_mode
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.classification.dataset import BrokenLog
from vitfocus.data.classification.loader import Share, seeded
from vitfocus.data.shapes.dataset import shapes_named
from vitfocus.data.vqa.answers import soft_accuracy
from vitfocus.data.vqa.batches import QuestionSamples, every_question
from vitfocus.data.vqa.dataset import ArrayPictures, Question, QuestionSet, read_vqav2, shapes_questions, splits_in
from vitfocus.robustness.pixels import PixelModel
from vitfocus.robustness.plan import Samples, Summary
from vitfocus.robustness.request import Request
from vitfocus.robustness.results import Scores
from vitfocus.robustness.scores import mean_interval
from vitfocus.robustness.turns import Measure, in_turns
from vitfocus.tasks.vqa.model import Answerer, language_alone, write_predictions
from vitfocus.treatments.save_load import task_of

NAME = "answers"


def measure(asked: Request, split: str = "") -> Scores:
    """The official accuracy, in percent, of one model or several, in all and by answer type.

    The data is a folder in VQAv2's layout, of which `split` ("val2014", or several joined by "+") is taken, the word
    "shapes", a `QuestionSet`, or a data set of (picture, {"question", "answers"}). Where results are kept, the answers
    are written there too, as the official server takes them; of a split whose answers are withheld that is all there is
    to have.
    """
    questions = open_set(asked.data, split, _size(asked.first_model))
    if not questions.annotated and asked.out is None:
        raise VitfocusError(
            f"The answers of {split or 'these questions'} are withheld, so there is nothing to score: name a folder "
            "with out (--out) to keep what the model answers."
        )
    places = evenly_spaced(len(questions), asked.limit)
    size = asked.batch_size or (64 if asked.device.type == "cuda" else 16)
    models = {name: PixelModel(name, model) for name, model in asked.models.items()}
    fingerprint: dict[str, Any] = {
        "suite": asked.suite,
        "protocol": {"precision": asked.precision, "split": split, "limit": asked.limit},
        "data": {"digest": questions.digest(), "limit": asked.limit, "images": len(places)},
        "libraries": versions(),
        "models": {name: one.describe() for name, one in models.items()},
    }
    with asked.claimed(fingerprint | {"options": {"batch_size": size, "seed": asked.seed}}) as folder:
        if (stored := asked.stored(folder)) is not None:
            return stored
        with torch.inference_mode(False), eval_mode(*asked.models.values(), device=asked.device), torch.no_grad():
            answering = {name: _answering(asked, one.model, questions, size) for name, one in models.items()}
            answers = dict(in_turns(asked, folder, places, size, answering))
    if asked.out is not None and asked.processes.first:
        for number, given in enumerate(answers.values()):
            file = "answers.json" if len(models) == 1 else f"answers-{number}.json"
            numbers = (questions.questions[place].number for place in places)
            write_predictions(Path(asked.out) / file, zip(numbers, given, strict=True))
    return asked.kept(_scored(asked, questions, places, answers, fingerprint))


def _answering(asked: Request, model: nn.Module, questions: QuestionSet, size: int) -> Measure:
    """A model's answers to some questions."""
    answerer = Answerer(model, _size(model))
    samples = QuestionSamples(questions, answerer.words, answerer.look)

    def answered(places: Sequence[int]) -> Iterator[dict[int, str]]:
        log = BrokenLog(fatal=True)
        for batch in every_question(samples, Share(size), asked.workers, asked.device, log, print, places):
            with asked.autocast(), seeded(0):  # ViLT shuffles patches: a batch has its answers whenever it comes
                given = dict(answerer.each([batch]))
            yield given

    return answered


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
    return int(task_of(model).get("size") or min(pixels_of(model).size))


def _scored(
    asked: Request,
    whole: QuestionSet,
    places: Sequence[int],
    answers: Mapping[str, Sequence[str]],
    fingerprint: dict[str, Any],
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
    return Scores(asked.suite, len(questions), summaries, (note,), fingerprint, samples)


def _accuracy(scores: Any, seed: int) -> Summary:
    low, high = mean_interval(scores, seed)
    return {"accuracy": 100 * float(scores.mean()), "accuracy_interval": [100 * low, 100 * high]}
