"""Visual question answering with ViLT: VQAv2's questions, soft targets and official accuracy.

Tokenizer and answers come from the checkpoint if it has them. Otherwise the tokenizer is trained on the training
questions, and the answers are the most frequent ones of the training annotations. Both are saved with the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import is_folder
from vitfocus.core.modules import eval_mode
from vitfocus.data.loader import equal_batches
from vitfocus.data.vqa.batches import QuestionBatch, QuestionSamples, diagnosis_batches, fitted_size
from vitfocus.data.vqa.dataset import (
    Question,
    QuestionTokenizer,
    VqaDataset,
    attach_tokenizer,
    open_questions,
    tokenizer_of,
)
from vitfocus.recipes import changed
from vitfocus.tasks.base import DATA_KEYS, RunContext, Task, build_model
from vitfocus.tasks.vqa.evaluation import (
    answers_in,
    by_answer_type,
    frequent_answers,
    language_baselines,
    normalise_answer,
    preprocessing_of,
    soft_targets,
)
from vitfocus.treatments.builder import split_library
from vitfocus.treatments.save_load import load
from vitfocus.treatments.spec import split_spec

if TYPE_CHECKING:
    from accelerate import Accelerator

ANSWER_TYPES = ("yes/no", "number", "other")


class AnswerTask(Task):
    """A `ViltForQuestionAnswering`, small and from scratch or from a checkpoint."""

    name: ClassVar[str] = "answer"
    items: ClassVar[str] = "questions"
    best: ClassVar[str] = "accuracy"
    compiles: ClassVar[bool] = False  # ViLT selects patches in loops over the batch
    reads: ClassVar[Mapping[str, frozenset[str]]] = {
        "model": frozenset({"spec", "pretrained", "weights", "arguments"}),
        "augment": frozenset({"randaugment"}),
        "loss": frozenset({"adl_warmup_epochs"}),
        "distill": frozenset(),
        "data": DATA_KEYS | {"holdout"},
    }

    train: VqaDataset
    val: VqaDataset

    def open_data(self) -> None:
        """Read both splits, then find tokenizer and answers."""
        recipe, section = self.recipe, self.recipe.answer
        self.train, self.val = (open_questions(recipe.data, split) for split in ("train", "val"))
        library, self.checkpoint = split_library(split_spec(recipe.model.spec)[0])
        if library != "transformers":
            raise VitfocusError(
                f"task=answer trains ViLT, not {recipe.model.spec!r}: set model.spec to "
                "transformers:ViltForQuestionAnswering, or to transformers:FOLDER_OR_NAME of a checkpoint."
            )
        tokenizer, answers, vocabulary = self._from_checkpoint()
        self.unused = ["words"] * bool(tokenizer or vocabulary) + ["answers", "least"] * (answers is not None)
        self.trained_tokenizer = tokenizer is None
        self.tokenizer = tokenizer or QuestionTokenizer.train(
            (question.text for question in self.train.questions), vocabulary or section.words, section.longest
        )
        if answers is None:
            parts = [self.train, self.val] if recipe.data.holdout else [self.train]  # part of the training set
            agreed = (question.agreed for part in parts for question in part.questions)
            answers = frequent_answers(agreed, section.answers, section.least)
        self.classes = answers
        self.numbers = {answer: number for number, answer in enumerate(answers)}
        self.baselines = language_baselines(self.val.questions)

    def build_model(self) -> nn.Module:
        """The model, with its tokenizer."""
        model = build_model(self.recipe, self.arguments())
        if type(model).__name__ != "ViltForQuestionAnswering":
            raise VitfocusError(f"task=answer trains a ViltForQuestionAnswering, but this is a {type(model).__name__}.")
        attach_tokenizer(model, self.tokenizer)
        prepare, token = preprocessing_of(model, self.recipe.data.size), torch.zeros(1, 1, dtype=torch.int64)
        side = fitted_size(prepare.size, prepare.size, prepare.size, prepare.patch)[0]
        self.dry_run(model, side, lambda image: model(input_ids=token, pixel_values=image))
        return model

    def arguments(self) -> dict[str, Any]:
        """The answers as labels of the config; from scratch, also the sizes of vocabulary, images and questions."""
        given = dict(self.recipe.model.arguments)
        names: dict[str, Any] = {"id2label": dict(enumerate(self.classes)), "label2id": self.numbers}
        if self.recipe.model.pretrained:
            return {**names, "ignore_mismatched_sizes": True, **given}
        sizes = {
            "vocab_size": len(self.tokenizer),
            "image_size": self.recipe.data.size,
            "max_position_embeddings": self.recipe.answer.longest,
        }
        return {**names, **(sizes if self.checkpoint.isidentifier() else {}), **given}

    def start(self, model: nn.Module, context: RunContext) -> None:
        super().start(model, context)
        recipe, tokenizer = self.recipe, self.tokenizer
        self.preprocessing = preprocessing = preprocessing_of(model, recipe.data.size)
        self.names = ["bce", *["adl"] * self.diversifies]
        samples = QuestionSamples(self.train, tokenizer, preprocessing, recipe.augment.randaugment, recipe.engine.seed)
        self.val_samples = QuestionSamples(self.val, tokenizer, preprocessing)
        self.batches = self.sample_batches(samples, samples.collate, self._finish)
        for key, value in changed(recipe.answer).items():
            if key in self.unused:
                context.say(f"answer.{key}={value} is not used, since the checkpoint determines it.")
        if self.trained_tokenizer and recipe.model.pretrained:
            context.say(f"{self.checkpoint} has no tokenizer: one is trained on the training questions.")

    def terms(self, model: nn.Module, batch: QuestionBatch, epoch: float) -> list[Tensor]:
        """Binary cross-entropy with the soft targets, summed over answers as in ViLT, and attention diversification."""
        return [_loss(model(**batch.inputs).logits, batch.targets), *self.diversity_terms(epoch)]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """The official accuracy, overall and by answer type, and the loss."""
        sums = torch.zeros(len(ANSWER_TYPES) + 2, 2, dtype=torch.float64)
        samples, batches = self.val_samples, equal_batches(len(self.val), self.context.partition)
        with eval_mode(model):
            for keys, batch in self.validation_batches(samples, batches, samples.collate):
                with accelerator.autocast():
                    logits = model(**self.preprocessing.normalise(batch.inputs, self.context.device)).logits.float()
                rows = [row for row, (_, counts) in enumerate(keys) if counts]
                if not rows:
                    continue
                logits, questions = logits[rows], [batch.questions[row] for row in rows]
                answers = [self.classes[number] for number in logits.argmax(1).tolist()]
                scored = by_answer_type(questions, answers)
                for row, name in enumerate(("", *ANSWER_TYPES)):
                    sums[row] += torch.tensor(scored.get(name, (0.0, 0)), dtype=torch.float64)
                loss = float(_loss(logits, self._targets(questions).to(logits.device)))
                sums[-1] += torch.tensor([loss * len(rows), len(rows)], dtype=torch.float64)
        summed = accelerator.reduce(sums.to(accelerator.device)).tolist()
        names = ("accuracy", *(f"accuracy_{name.replace('/', '_')}" for name in ANSWER_TYPES), "loss")
        return {name: total / count for name, (total, count) in zip(names, summed, strict=True) if count}

    def sample_images(self, count: int) -> list[dict[str, Any]]:
        return list(diagnosis_batches(self.val, self.preprocessing, count // 4, count // 4))

    def headline(self, scores: Mapping[str, float]) -> str:
        """The accuracy, and those of two baselines that do not see the image."""
        baselines = self.baselines
        return (
            f"accuracy on {self.val.title} {100 * scores['accuracy']:.2f} % (always {baselines['constant_answer']!r}: "
            f"{100 * baselines['constant_accuracy']:.2f} %, the best answer to each type of question: "
            f"{100 * baselines['question_type_accuracy']:.2f} %)"
        )

    def card(self) -> dict[str, Any]:
        """The image size; the tokenizer is in tokenizer.json, and the answers are in the model's config."""
        return {"task": self.name, "size": self.recipe.data.size}

    def facts(self) -> dict[str, Any]:
        """Sizes of the vocabularies, the share of questions that they can answer, and the baselines."""
        covered = sum(normalise_answer(question.agreed) in self.numbers for question in self.train.questions)
        return {
            "splits": {"train": self.train.title, "val": self.val.title},
            "answers": len(self.classes),
            "answers_cover": covered / len(self.train),
            "word_pieces": len(self.tokenizer),
            "words_from": "the training questions" if self.trained_tokenizer else "the checkpoint",
            "without_looking": self.baselines,
            "preprocessing": {name: getattr(self.preprocessing, name) for name in ("size", "mean", "std")},
        }

    def _from_checkpoint(self) -> tuple[QuestionTokenizer | None, list[str] | None, int]:
        """Tokenizer and answers of the weights that the run starts from, and the size of that model's vocabulary."""
        source, longest = self.recipe.model.weights, self.recipe.answer.longest
        if source and is_folder(source):
            model: Any = load(source)
            return tokenizer_of(model), answers_in(getattr(model, "config", None)), 0
        if self.checkpoint.isidentifier() and not is_folder(self.checkpoint):
            return None, None, 0
        from vitfocus.treatments.safe_arguments import checkpoint_config

        config: Any = checkpoint_config(self.checkpoint)
        limit = min(longest, int(getattr(config, "max_position_embeddings", longest)))
        return QuestionTokenizer.read(self.checkpoint, limit), answers_in(config), int(getattr(config, "vocab_size", 0))

    def _targets(self, questions: Sequence[Question]) -> Tensor:
        targets = torch.zeros(len(questions), len(self.classes))
        for row, question in enumerate(questions):
            for number, score in soft_targets(question.answers, self.numbers).items():
                targets[row, number] = score
        return targets

    def _finish(self, batch: QuestionBatch, step: int, rows: Tensor) -> QuestionBatch:
        batch.inputs = self.preprocessing.normalise(batch.inputs, self.context.device)
        batch.targets = self._targets(batch.questions).to(self.context.device, non_blocking=True)
        return batch


def _loss(logits: Tensor, targets: Tensor | None) -> Tensor:
    assert targets is not None
    return F.binary_cross_entropy_with_logits(logits.float(), targets) * targets.shape[1]
