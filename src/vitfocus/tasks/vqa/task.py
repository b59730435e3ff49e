"""Visual question answering with ViLT: VQAv2's questions, soft targets, and its official accuracy.

Words and answers come with a checkpoint that has them; else word pieces are trained from the training questions, and
the answers are the most frequent of the training annotations. Both are saved with the model.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import eval_mode
from vitfocus.data.sample_loader import SampleBatches
from vitfocus.data.sample_order import Stream
from vitfocus.data.vqa.answers import AnswerVocabulary, normalise, soft_targets
from vitfocus.data.vqa.batches import QuestionBatch, QuestionSamples, every_question, fitted_size
from vitfocus.data.vqa.dataset import QuestionSet, open_questions
from vitfocus.data.vqa.tokenizer import Words, attach_words, words_of
from vitfocus.tasks.base import DiversityTerm, Setting, Task
from vitfocus.tasks.building import create_seeded, start_from
from vitfocus.tasks.vqa.model import answers_in, by_answer_type, language_alone, look_of
from vitfocus.treatments.origin import split_library
from vitfocus.treatments.save_load import load
from vitfocus.treatments.spec import split_spec

if TYPE_CHECKING:
    from accelerate import Accelerator

ANSWER_TYPES = ("yes/no", "number", "other")


class Answer(Task):
    """A `ViltForQuestionAnswering`, small and from scratch or from a checkpoint."""

    name: ClassVar[str] = "answer"
    best: ClassVar[str] = "accuracy"
    compiles: ClassVar[bool] = False  # ViLT chooses patches by loops over the batch
    reads: ClassVar[Mapping[str, frozenset[str]]] = {
        "model": frozenset({"spec", "pretrained", "weights", "arguments"}),
        "augment": frozenset({"randaugment"}),
        "loss": frozenset({"adl_warmup_epochs"}),
        "distill": frozenset(),
        "data": frozenset(
            {"source", "root", "train_split", "val_split", "train_length", "val_length", "size", "batch", "workers"}
        )
        | {"broken"},
    }

    train: QuestionSet
    val: QuestionSet

    def open_data(self) -> None:
        """Read both splits, then find the words and the answers."""
        recipe, section = self.recipe, self.recipe.answer
        self.train, self.val = (open_questions(recipe.data, split) for split in ("train", "val"))
        library, self.checkpoint = split_library(split_spec(recipe.model.spec)[0])
        if library != "transformers":
            raise VitfocusError(
                f"task=answer trains ViLT, not {recipe.model.spec!r}: set model.spec to "
                "transformers:ViltForQuestionAnswering, or to transformers:FOLDER_OR_NAME of a checkpoint."
            )
        words, answers, room = self._brought()
        self.unread = ["words"] * bool(words or room) + ["answers", "least"] * (answers is not None)
        self.words_from = "the checkpoint" if words else "the training questions"
        self.words = words or Words.train(
            (question.text for question in self.train.questions), room or section.words, section.longest
        )
        if answers is None:
            agreed = (question.agreed for question in self.train.questions)
            answers = list(AnswerVocabulary.build(agreed, section.answers, section.least).answers)
        self.classes = answers
        self.numbers = {answer: number for number, answer in enumerate(answers)}
        self.without_looking = language_alone(self.val.questions)

    def build_model(self) -> nn.Module:
        """The model, which carries its words."""
        model = create_seeded(self.recipe, self.arguments())
        if type(model).__name__ != "ViltForQuestionAnswering":
            raise VitfocusError(f"task=answer trains a ViltForQuestionAnswering, and this is a {type(model).__name__}.")
        if self.recipe.model.weights:
            start_from(model, self.recipe.model.weights)
        attach_words(model, self.words)
        look, word = look_of(model, self.recipe.data.size), torch.zeros(1, 1, dtype=torch.int64)
        side = fitted_size(look.size, look.size, look.size, look.patch)[0]
        self.try_model(model, side, lambda image: model(input_ids=word, pixel_values=image))
        return model

    def arguments(self) -> dict[str, Any]:
        """The answers as the config names them; from scratch, also the sizes that follow from data and words."""
        given = dict(self.recipe.model.arguments)
        names: dict[str, Any] = {"id2label": dict(enumerate(self.classes)), "label2id": self.numbers}
        if self.recipe.model.pretrained:
            return {**names, "ignore_mismatched_sizes": True, **given}
        sizes = {
            "vocab_size": len(self.words),
            "image_size": self.recipe.data.size,
            "max_position_embeddings": self.recipe.answer.longest,
        }
        return {**names, **(sizes if self.checkpoint.isidentifier() else {}), **given}

    def start(self, model: nn.Module, setting: Setting) -> None:
        """Lay out the batches; the questions count as images."""
        recipe, self.setting = self.recipe, setting
        self.look = look_of(model, recipe.data.size)
        self.diversity = DiversityTerm(model, recipe.loss.adl_warmup_epochs)
        self.names = ["bce", *self.diversity.names]
        self.train_images, self.val_images = len(self.train), len(self.val)
        samples = QuestionSamples(self.train, self.words, self.look, recipe.augment.randaugment, recipe.engine.seed)
        self.asked = QuestionSamples(self.val, self.words, self.look)
        self.batches = SampleBatches(
            samples,
            Stream(len(self.train), recipe.data.batch, recipe.engine.seed),
            setting.share,
            samples.collate,
            self._finished,
            workers=recipe.data.workers,
            device=setting.device,
            log=self.broken["train"],
            say=setting.say,
        )
        for key in self.unread:
            if (value := getattr(recipe.answer, key)) != getattr(type(recipe.answer)(), key):
                setting.say(f"The run starts from a model that brings its own: answer.{key}={value} is not used.")
        if self.words_from == "the training questions" and recipe.model.pretrained:
            setting.say(f"{self.checkpoint} brings no word pieces: they are trained from the questions at hand.")

    def iterate(self, start: int, stop: int) -> Generator[QuestionBatch, None, None]:
        """Batches with their soft targets."""
        return self.batches.iterate(start, stop)

    def terms(self, model: nn.Module, batch: QuestionBatch, epoch: float) -> list[Tensor]:
        """Binary cross-entropy with the soft targets, summed over the answers as in ViLT, and what treatments add."""
        logits: Tensor = model(**batch.inputs).logits
        return [_loss(logits, batch.targets), *self.diversity(epoch)]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """The official accuracy, in all and by answer type, and the loss."""
        sums = torch.zeros(len(ANSWER_TYPES) + 2, 2, dtype=torch.float64)
        where = self.setting.share, self.recipe.data.workers, self.setting.device, self.broken["val"], self.setting.say
        with eval_mode(model), closing(every_question(self.asked, *where)) as batches:
            for batch in self.setting.until_stopped(batches):
                with accelerator.autocast():
                    logits = model(**batch.inputs).logits.float()
                rows = batch.counted.tolist()
                places = [place for place, counts in zip(batch.places.tolist(), rows, strict=True) if counts]
                kept = logits[batch.counted.to(logits.device)]
                if not places:
                    continue
                answers = [self.classes[number] for number in kept.argmax(1).tolist()]
                scored = by_answer_type([self.val.questions[place] for place in places], answers)
                for row, name in enumerate(("", *ANSWER_TYPES)):
                    sums[row] += torch.tensor(scored.get(name, (0.0, 0)), dtype=torch.float64)
                loss = float(_loss(kept, self._targets(self.val, places).to(kept.device)))
                sums[-1] += torch.tensor([loss * len(places), len(places)], dtype=torch.float64)
        summed = accelerator.reduce(sums.to(accelerator.device)).tolist()
        names = ("accuracy", *(f"accuracy_{name.replace('/', '_')}" for name in ANSWER_TYPES), "loss")
        return {name: total / count for name, (total, count) in zip(names, summed, strict=True) if count}

    def headline(self, scores: Mapping[str, float]) -> str:
        """The accuracy, beside what can be had without looking."""
        blind = self.without_looking
        return (
            f"accuracy {100 * scores['accuracy']:.2f} % (always {blind['constant_answer']!r}: "
            f"{100 * blind['constant_accuracy']:.2f} %, the best answer to each type of question: "
            f"{100 * blind['question_type_accuracy']:.2f} %)"
        )

    def digests(self) -> dict[str, str]:
        """Of both splits."""
        return {"train": self.train.digest(), "val": self.val.digest()}

    def card(self) -> dict[str, Any]:
        """The pictures' size; words lie in tokenizer.json, and the answers in the model's own config."""
        return {"task": self.name, "size": self.recipe.data.size}

    def facts(self) -> dict[str, Any]:
        """Vocabularies, how far the answers reach, and what can be had without looking."""
        reached = sum(normalise(question.agreed) in self.numbers for question in self.train.questions)
        return {
            "answers": len(self.classes),
            "answers_cover": reached / len(self.train),
            "word_pieces": len(self.words),
            "words_from": self.words_from,
            "without_looking": self.without_looking,
            "preprocessing": {"size": self.look.size, "mean": self.look.mean, "std": self.look.std},
        }

    def _brought(self) -> tuple[Words | None, list[str] | None, int]:
        """The words and answers of the weights the run starts from, and how many words that model has room for."""
        source, longest = self.recipe.model.weights, self.recipe.answer.longest
        if source and Path(source).is_dir():
            model: Any = load(source)
            return words_of(model), answers_in(getattr(model, "config", None)), 0
        if self.checkpoint.isidentifier() and not Path(self.checkpoint).is_dir():
            return None, None, 0
        from vitfocus.treatments.arguments import checkpoint_config

        config: Any = checkpoint_config(self.checkpoint)
        limit = min(longest, int(getattr(config, "max_position_embeddings", longest)))
        return checkpoint_words(self.checkpoint, limit), answers_in(config), int(getattr(config, "vocab_size", 0))

    def _targets(self, asked: QuestionSet, places: list[int]) -> Tensor:
        targets = torch.zeros(len(places), len(self.classes))
        for row, place in enumerate(places):
            for number, score in soft_targets(asked.questions[place].answers, self.numbers).items():
                targets[row, number] = score
        return targets

    def _finished(self, batch: QuestionBatch) -> QuestionBatch:
        batch.inputs = self.look.normalised(batch.inputs, self.setting.device)
        batch.targets = self._targets(self.train, batch.places.tolist()).to(self.setting.device, non_blocking=True)
        return batch


def checkpoint_words(name: str, longest: int) -> Words | None:
    """The word pieces of a checkpoint: of its folder, or fetched with it from the hub; None where it has none."""
    if Path(name).is_dir():
        return Words.read(name, longest)
    from transformers import AutoTokenizer

    try:
        return Words(AutoTokenizer.from_pretrained(name, trust_remote_code=False).backend_tokenizer, longest)
    except (OSError, ValueError, AttributeError):
        return None


def _loss(logits: Tensor, targets: Tensor | None) -> Tensor:
    assert targets is not None
    return F.binary_cross_entropy_with_logits(logits.float(), targets) * targets.shape[1]
