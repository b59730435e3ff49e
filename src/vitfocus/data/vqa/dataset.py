"""Data sets for visual question answering: VQAv2's published files, and Shapes.

A VQAv2 folder has for each split a JSON file of questions, a JSON file of annotations (ten answers per question; none
for the test splits) and the COCO images. They can be in one folder or in the folders of the official tools (Questions,
Annotations, Images/mscoco). Everything is checked before training starts.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.records import MAX_ANNOTATION_BYTES, read_json
from vitfocus.data.image_files import read_rgb
from vitfocus.data.shapes.dataset import ask, drawn_scenes
from vitfocus.data.shapes.layouts import QUESTIONS_PER_IMAGE
from vitfocus.recipes import Data

FILE = "tokenizer.json"  # Hugging Face's own name and format
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_KEY = "_vitfocus_tokenizer"


class QuestionTokenizer:
    """Turns questions into padded token ids and an attention mask.

    >>> tokenizer = QuestionTokenizer.train(["Is there a red star?", "How many stars are there?"], size=60)
    >>> rows = tokenizer(["Is there a star?", "How many?"])
    >>> rows["input_ids"].shape == rows["attention_mask"].shape, rows["attention_mask"].sum(1).tolist()
    (True, [7, 5])
    """

    def __init__(self, tokenizer: Any, longest: int = 40) -> None:
        self.tokenizer, self.longest = tokenizer, longest
        padding = tokenizer.token_to_id(_SPECIAL[0])
        self.padding = 0 if padding is None else int(padding)
        tokenizer.no_padding()
        tokenizer.enable_truncation(longest)

    @classmethod
    def train(cls, questions: Iterable[str], size: int = 30522, longest: int = 40) -> QuestionTokenizer:
        """Train a lower-case WordPiece vocabulary of at most `size` tokens, as BERT has it.

        The same questions always give the same vocabulary, so a resumed run has the same tokens.
        """
        bert = _library().BertWordPieceTokenizer
        texts, draft = list(questions), bert()
        # The library numbers continuation pieces in the order of a hash map and breaks ties by these numbers. Passed
        # as special tokens they keep a fixed order; only the vocabulary is used afterwards.
        letters = sorted({letter for text in texts for letter in draft.normalizer.normalize_str(text)} - {" "})
        draft.train_from_iterator(
            texts,
            vocab_size=max(size, len(_SPECIAL) + len(letters)),
            min_frequency=0,
            limit_alphabet=len(letters) + 1,
            special_tokens=[*_SPECIAL, *(f"##{letter}" for letter in letters)],
            show_progress=False,
        )
        return cls(bert(draft.get_vocab()), longest)

    @classmethod
    def read(cls, folder: str | Path, longest: int = 40) -> QuestionTokenizer | None:
        """Read tokenizer.json, or BERT's older vocab.txt, from a model's folder or the hub; None if it has neither."""
        path = Path(folder)
        if not path.is_dir():
            from transformers import AutoTokenizer

            try:
                found: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
                return cls(found.backend_tokenizer, longest)
            except (OSError, ValueError, AttributeError):
                return None
        try:
            if (path / FILE).is_file():
                return cls(_library().Tokenizer.from_file(str(path / FILE)), longest)
            if (path / "vocab.txt").is_file():
                return cls(_library().BertWordPieceTokenizer.from_file(str(path / "vocab.txt")), longest)
        except VitfocusError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise VitfocusError(f"The tokenizer in {folder} cannot be read: {error}.") from None
        return None

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def __call__(self, questions: Sequence[str]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, int64 (B, L); L is the longest question's length, at most `longest`."""
        encoded = self.tokenizer.encode_batch(list(questions))
        rows = [torch.tensor(encoding.ids, dtype=torch.int64) for encoding in encoded]
        ids = pad_sequence(rows, batch_first=True, padding_value=self.padding)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask}

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        text: str = self.tokenizer.to_str(pretty=False)
        return text

    def __deepcopy__(self, memo: dict[int, Any]) -> QuestionTokenizer:
        return self  # immutable

    def __getstate__(self) -> dict[str, Any]:
        return {"json": self.to_json(), "longest": self.longest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(_library().Tokenizer.from_str(state["json"]), state["longest"])  # type: ignore[misc]


def attach_tokenizer(model: nn.Module, tokenizer: QuestionTokenizer) -> None:
    """Store the tokenizer of a model in it."""
    model.__dict__[_KEY] = tokenizer


def tokenizer_of(model: nn.Module) -> QuestionTokenizer | None:
    """The tokenizer of a model, if it has one."""
    found: QuestionTokenizer | None = model.__dict__.get(_KEY)
    return found


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise VitfocusError("Tokenizing questions needs the library tokenizers, in the extra vitfocus[hf].") from None
    return tokenizers


SOURCES = ("shapes", "vqav2")
DEFAULT_SPLITS = {"train": "train2014", "val": "val2014"}
_JSON_FOLDERS = ("", "Questions", "Annotations", "questions", "annotations")
_IMAGE_FOLDERS = ("", "images", "Images", "Images/mscoco", "coco", "mscoco")


@dataclass(frozen=True, slots=True)
class Question:
    """One question: `image` is the index of its image; `answers` is empty if they are not published."""

    number: int
    image: int
    text: str
    answers: tuple[str, ...] = ()
    agreed: str = ""
    answer_type: str = ""
    question_type: str = ""


@dataclass
class VqaDataset:
    """The questions of a split, and their images: files, or uint8 (N, 3, H, W). `title` names the split."""

    questions: Sequence[Question]
    images: Sequence[Path] | Tensor
    title: str = ""

    def __len__(self) -> int:
        return len(self.questions)

    def read(self, index: int) -> tuple[Image.Image | Tensor, Question]:
        """A question and its image, RGB or uint8 (3, H, W)."""
        question = self.questions[index]
        image = self.images[question.image]
        return read_rgb(image) if isinstance(image, Path) else image, question

    def name(self, index: int) -> str:
        """The name of a question's image, in messages."""
        place = self.questions[index].image
        return f"{self.title} {place}" if isinstance(self.images, Tensor) else str(self.images[place])

    @property
    def annotated(self) -> bool:
        """Whether the answers are known."""
        return bool(self.questions) and bool(self.questions[0].answers)

    def first(self, count: int) -> VqaDataset:
        """The questions about the first `count` images."""
        some = [question for question in self.questions if question.image < count]
        return VqaDataset(some, self.images, f"the first {count:,} images of {self.title}")

    def digest(self) -> str:
        """SHA-256 of the questions, the answers, and the images (of files, the names and sizes)."""
        state = hashlib.sha256()
        for question in self.questions:
            state.update(f"{question.number} {question.image} {question.text} {question.answers}\n".encode())
        if isinstance(self.images, Tensor):
            state.update(f"{hashlib.sha256(self.images.contiguous().numpy().data).hexdigest()}\n".encode())
        else:
            for file in self.images:
                state.update(f"{file.name} {file.stat().st_size}\n".encode(errors="surrogateescape"))
        return state.hexdigest()


def open_questions(data: Data, split: str, annotated: bool = True) -> VqaDataset:
    """Open a split of the data set that `data.source` names.

    Args:
        data: The [data] section of a recipe; `train_split` and `val_split` name VQAv2's splits, several joined by "+".
            With `holdout`, "val" is the questions about that many images of the last training split, drawn once.
        split: "train" or "val".
        annotated: Whether the answers are required.

    Example:
        >>> found = open_questions(Data(source="shapes", size=32, train_length=2), "train")
        >>> len(found), len(found.questions[0].answers)
        (6, 10)
    """
    length = data.train_length if split == "train" else data.val_length
    if data.source == "shapes":
        return shapes_questions(split, length or {"train": 10_000, "val": 1_000}[split], data.size)
    if data.source != "vqav2":
        raise VitfocusError(f"There is no source of questions {data.source!r}: {nearest(data.source, SOURCES)}")
    opened = "train" if data.holdout else split
    given = (data.train_split if opened == "train" else data.val_split) or DEFAULT_SPLITS[opened]
    found = read_vqav2(data.root, given, annotated)
    if data.holdout:
        found = _hold_out(found, split, data.holdout, given.rpartition("+")[2].strip())
    return found.first(length) if length else found


def _hold_out(whole: VqaDataset, split: str, count: int, last: str) -> VqaDataset:
    """The questions about `count` images of the last split, as ViLT holds them out, or the others."""
    assert not isinstance(whole.images, Tensor)
    files = [index for index, file in enumerate(whole.images) if file.parent.name == last]
    if count >= len(files):
        raise VitfocusError(f"data.holdout={count} leaves none of the {len(files)} images of {last} to train on.")
    held = {files[place] for place in np.random.default_rng(0).permutation(len(files))[:count].tolist()}
    chosen = [question for question in whole.questions if (question.image in held) == (split == "val")]
    part = f"{count:,} held-out images"
    return VqaDataset(chosen, whole.images, f"{part} of {last}" if split == "val" else f"{whole.title} without {part}")


def splits_in(root: str | Path) -> list[str]:
    """The VQAv2 splits with questions in a folder, validation first."""
    found = {
        file.name.removeprefix("v2_").removeprefix("OpenEnded_mscoco_").removesuffix("_questions.json")
        for folder in _JSON_FOLDERS
        for file in (Path(root) / folder).glob("*OpenEnded_mscoco_*_questions.json")
    }
    return sorted(found, key=lambda split: (not split.startswith("val"), split))


def read_vqav2(root: str | Path, split: str, annotated: bool = True) -> VqaDataset:
    """Read and check a split of VQAv2, or several joined by "+"."""
    root = Path(root)
    if not root.is_dir():
        raise VitfocusError(f"There is no data folder {str(root)!r}: set data.root to the folder of VQAv2's files.")
    questions, files = list[Question](), list[Path]()
    for one in split.split("+"):
        more, images = _read_split(root, one.strip(), annotated, len(files))
        questions += more
        files += images
    if not questions:
        raise VitfocusError(f"The split {split} in {root} has no questions.")
    return VqaDataset(questions, files, split)


def shapes_questions(split: str, count: int, size: int | tuple[int, int]) -> VqaDataset:
    """Shapes: `count` scenes with three questions each, the same ones as in its written layout "vqav2"."""
    pixels: list[Tensor] = []
    questions: list[Question] = []
    item = 0
    for scenes, images, _ in drawn_scenes(range(count), split, size):
        pixels.append(torch.from_numpy(images))
        for scene in range(len(scenes)):
            for place, one in enumerate(ask(scenes.objects(scene), 0, split, item)[:QUESTIONS_PER_IMAGE]):
                number = item * QUESTIONS_PER_IMAGE + place
                questions.append(Question(number, item, one.text, one.answers, one.answer, one.answer_type, one.kind))
            item += 1
    return VqaDataset(questions, torch.cat(pixels), f"Shapes {split}")


class _QuestionRecord(msgspec.Struct):
    question_id: int
    image_id: int
    question: str


class _AnswerRecord(msgspec.Struct):
    answer: str | int | float


class _AnnotationRecord(msgspec.Struct):
    question_id: int
    answers: Annotated[list[_AnswerRecord], msgspec.Meta(min_length=1)]
    multiple_choice_answer: str | int | float = ""
    answer_type: str = ""
    question_type: str = ""


class _Questions(msgspec.Struct):
    questions: list[_QuestionRecord]


class _Annotations(msgspec.Struct):
    annotations: list[_AnnotationRecord]


def _read_split(root: Path, split: str, annotated: bool, first: int) -> tuple[list[Question], list[Path]]:
    options: dict[str, Any] = {"writer": "VQAv2", "max_bytes": MAX_ANNOTATION_BYTES}
    file = _find_json(root, split, "questions")
    asked = read_json(file, _Questions, **options).questions
    _by_number(file, asked)
    answered: dict[int, _AnnotationRecord] = {}
    file = _find_json(root, split, "annotations", needed=annotated)
    if file is not None:
        answered = _by_number(file, read_json(file, _Annotations, **options).annotations)
        without = [one.question_id for one in asked if one.question_id not in answered]
        if without:
            raise VitfocusError(
                f"{file} answers {len(asked) - len(without)} of the {len(asked)} questions of {split}; the question "
                f"{without[0]} is the first without an answer."
            )
    numbers = sorted({one.image_id for one in asked})
    images = _find_images(root, split, numbers)
    places = {number: first + place for place, number in enumerate(numbers)}
    return [_question(one, places[one.image_id], answered.get(one.question_id)) for one in asked], images


def _by_number(file: Path, records: Iterable[Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for one in records:
        if found.setdefault(one.question_id, one) is not one:
            raise VitfocusError(f"{file} lists the question {one.question_id} twice.")
    return found


def _question(asked: _QuestionRecord, place: int, answered: _AnnotationRecord | None) -> Question:
    if answered is None:
        return Question(asked.question_id, place, asked.question)
    answers = tuple(sys.intern(str(one.answer)) for one in answered.answers)
    # The agreed answer is in the file; if it is missing, it is the most frequent one, by VQAv2's definition.
    agreed = str(answered.multiple_choice_answer or Counter(answers).most_common(1)[0][0])
    labels = (sys.intern(text) for text in (agreed, answered.answer_type, answered.question_type))
    return Question(asked.question_id, place, asked.question, answers, *labels)


def _find_json(root: Path, split: str, what: str, needed: bool = True) -> Any:
    usual = f"v2_OpenEnded_mscoco_{split}_questions.json" if what == "questions" else f"v2_mscoco_{split}_{what}.json"
    for folder in _JSON_FOLDERS:
        for name in (usual, usual.removeprefix("v2_")):
            if (root / folder / name).is_file():
                return root / folder / name
    if not needed:
        return None
    capital = what.capitalize()
    raise VitfocusError(f"{root} lacks VQAv2's {what} of {split}: neither {usual} nor {capital}/{usual} is there.")


def _find_images(root: Path, split: str, numbers: Sequence[int]) -> list[Path]:
    """The COCO images with these numbers; the test-dev questions are about the test images."""
    name = split.replace("test-dev", "test")
    folder = next((root / beside / name for beside in _IMAGE_FOLDERS if (root / beside / name).is_dir()), None)
    if folder is None:
        raise VitfocusError(f"{root} lacks the COCO images of {split}: there is no folder {name} or images/{name}.")
    present = {file.name for file in folder.iterdir()}
    names = [(f"COCO_{name}_{number:012d}.jpg", f"{number:012d}.jpg", f"{number}.jpg") for number in numbers]
    files = [next((folder / one for one in some if one in present), None) for some in names]
    if missing := [usual for (usual, *_), file in zip(names, files, strict=True) if file is None]:
        what = f"{len(missing)} of the {len(numbers)} images that the questions are about"
        raise VitfocusError(f"{folder} lacks {what}, such as {missing[0]}.")
    return [file for file in files if file is not None]
