"""Visual question answering on VQAv2's layout, scored by the official accuracy over ten annotators' answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from vitfocus.anatomy import input_spec
from vitfocus.core.errors import VitfocusError
from vitfocus.core.statistics import evenly_spaced, mean_interval
from vitfocus.data.loader import Broken, read_or_broken, seeded
from vitfocus.data.shapes.dataset import shapes_named
from vitfocus.data.vqa.batches import VqaPreprocessing, pad_images
from vitfocus.data.vqa.dataset import (
    Question,
    QuestionTokenizer,
    VqaDataset,
    read_vqav2,
    shapes_questions,
    splits_in,
)
from vitfocus.robustness.batches import Collated, EvaluationBatch, ItemSource
from vitfocus.robustness.engine import Condition, EvaluationArguments, EvaluationPlan, Group, ModelResults, Outcome
from vitfocus.robustness.metrics import Summary, percent
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.run_folder import Columns
from vitfocus.robustness.suites import DataForm
from vitfocus.tasks.vqa.evaluation import Answerer, language_baselines, soft_accuracy
from vitfocus.treatments.save_load import task_of


def answers(arguments: EvaluationArguments) -> EvaluationPlan:
    """The official accuracy, in percent, overall and by answer type.

    The data is a folder in VQAv2's layout, with `split` ("val2014", or several joined by "+"), the word "shapes", a
    `VqaDataset`, or a data set of (image, {"question", "answers"}). With `out`, the answers are written there in the
    format of the official server; for a split whose answers are withheld that is the only result.
    """
    split = arguments.options.split
    arguments.refuse_unused(DataForm(drawn=shapes_named(arguments.data, 1) is not None))
    asked = open_evaluation_questions(arguments.data, split, _image_size(arguments.models[0].model))
    if not asked.annotated and arguments.out is None:
        raise VitfocusError(
            f"The answers of {split or 'these questions'} are withheld, so nothing can be scored: name a folder with "
            "the option out to write the answers of the model."
        )
    answerers = {model.name: Answerer(model.model, _image_size(model.model)) for model in arguments.models}
    samples = QuestionItems(asked, {name: (one.tokenizer, one.preprocessing) for name, one in answerers.items()})
    pick = evenly_spaced(len(asked), arguments.limit)
    source = ItemSource(samples, pick, samples.collate, digest=asked.digest(), **arguments.reading)
    questions = [asked.questions[index] for index in pick]
    baselines = language_baselines(questions) if asked.annotated else None
    note = f"The answers of {asked.title} are withheld, so nothing is scored; answers.json is for its server."
    if baselines is not None:
        constant = baselines["constant_answer"]
        note = (
            f"VQAv2's official accuracy on {asked.title}. Baselines without images: always {constant!r}, or the best "
        )
        note += "answer per question type."
    return EvaluationPlan(
        (Group("answers", source, (Condition("all", partial(_answer, answerers)),)),),
        {"split": asked.title, "limit": arguments.limit},
        partial(_reduce, questions, baselines),
        (note,),
        batch_sizes=(16, 64),
        unit="question",
    )


class QuestionItems:
    """Questions with their images, preprocessed for each model by name; an image is decoded once."""

    def __init__(self, asked: VqaDataset, readers: Mapping[str, tuple[QuestionTokenizer, VqaPreprocessing]]) -> None:
        self.asked, self.readers = asked, readers

    def __getitem__(self, index: int) -> tuple[str, dict[VqaPreprocessing, Tensor]] | Broken:
        item = read_or_broken(self.asked, index)
        if isinstance(item, Broken):
            return item
        image, question = item
        return question.text, {prepare: prepare.resize(image) for _, prepare in self.readers.values()}

    def collate(self, items: list[tuple[str, dict[VqaPreprocessing, Tensor]]]) -> list[Collated]:
        """The inputs of each model: tokens, images padded to the largest, and masks."""
        texts = [text for text, _ in items]
        inputs = {
            name: tokenizer(texts) | pad_images([resized[prepare] for _, resized in items])
            for name, (tokenizer, prepare) in self.readers.items()
        }
        return [Collated(range(len(items)), inputs, None)]


def open_evaluation_questions(data: Any, split: str = "", size: int = 32) -> VqaDataset:
    """A folder in VQAv2's layout, Shapes at this size, or a data set as it is."""
    if isinstance(data, VqaDataset):
        return data
    if (length := shapes_named(data, 1000)) is not None:
        return shapes_questions("val", length, size)
    if isinstance(data, Dataset):
        return _from_dataset(data)
    if not isinstance(data, str | Path):
        raise VitfocusError(f"answers takes a folder in VQAv2's layout or a data set, not a {type(data).__name__}.")
    found = splits_in(data) if Path(data).is_dir() else []
    chosen = split or (found[0] if found else "val2014")
    return read_vqav2(data, chosen, annotated=not chosen.startswith("test"))


def _from_dataset(data: Any) -> VqaDataset:
    """A data set of (image, {"question", "answers"}), such as `Shapes(task="answer")`; images are uint8 (3, H, W)."""
    images, questions = [], []
    for number in range(len(data)):
        image, target = data[number]
        if not isinstance(target, Mapping) or not {"question", "answers"} <= set(target):
            raise VitfocusError("answers takes items of (image, dict with 'question' and 'answers').")
        kind = str(target.get("answer_type", ""))
        images.append(image)
        questions.append(Question(number, number, target["question"], tuple(target["answers"]), answer_type=kind))
    if len({tuple(getattr(image, "shape", ())) for image in images}) != 1:
        raise VitfocusError("answers takes a data set whose images are uint8 tensors (3, H, W) of one size.")
    return VqaDataset(questions, torch.stack(images), "the given questions")


def _image_size(model: nn.Module) -> int:
    """The shorter side of the images that a model was trained on, or was built for."""
    return int(task_of(model).get("size") or min(input_spec(model).size))


def _answer(
    answerers: Mapping[str, Answerer],
    model: PixelModel,
    inputs: Mapping[str, dict[str, Tensor]],
    batch: EvaluationBatch,
) -> Outcome:
    """The answer to each question, as JSON."""
    answerer, device = answerers[model.name], batch.positions.device
    with model.autocast(device), seeded(0):  # ViLT shuffles patches, and the answers must not depend on the order
        logits = model.model(**answerer.preprocessing.normalise(inputs[model.name], device)).logits
    return {"answer": [json.dumps(answerer.answers[number]) for number in logits.argmax(1).tolist()]}


def _reduce(
    questions: Sequence[Question], baselines: Mapping[str, Any] | None, outcomes: Mapping[str, Columns], seed: int
) -> ModelResults:
    given = [json.loads(line) for line in outcomes["all"]["answer"]]
    pairs = list(zip(questions, given, strict=True))
    files = {"answers": [{"question_id": question.number, "answer": answer} for question, answer in pairs]}
    if baselines is None:
        return ModelResults({"cells": {}}, files=files)
    scores = np.array([soft_accuracy(answer, question.answers) for question, answer in pairs])
    kinds = np.array([question.answer_type for question in questions])
    summary = {
        **_accuracy(scores, seed),
        "constant_accuracy": 100 * baselines["constant_accuracy"],
        "question_type_accuracy": 100 * baselines["question_type_accuracy"],
        "cells": {str(kind): _accuracy(scores[kinds == kind], seed) for kind in sorted(set(kinds.tolist()))},
    }
    return ModelResults(summary, {"all": {"accuracy": scores}}, files)


def _accuracy(scores: Any, seed: int) -> Summary:
    return {"accuracy": 100 * float(scores.mean()), "accuracy_interval": percent(mean_interval(scores, seed))}
