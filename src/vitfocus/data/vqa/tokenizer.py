"""Questions as numbers: a word-piece vocabulary, trained from the questions at hand or read from a model's folder.

A model that reads text carries its `Words` with it (`attach_words`), so that saving it saves them, and a loaded model
reads the next question as it read those it was trained on. Built on the tokenizers library (the extra `hf`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError

FILE = "tokenizer.json"  # Hugging Face's own name and format
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_KEY = "_vitfocus_words"


class Words:
    """Turns questions into padded token numbers and a mask of what is not padding.

    >>> words = Words.train(["Is there a red star?", "How many stars are there?"], size=60)
    >>> rows = words(["Is there a star?", "How many?"])
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
    def train(cls, questions: Iterable[str], size: int = 30522, longest: int = 40) -> Words:
        """A lower-case vocabulary of at most `size` word pieces, as BERT has it, made from these questions alone.

        The same questions always give the same vocabulary, so that a run which is resumed reads as it did before.
        """
        tokenizers = _library()
        texts = list(questions)
        drafted = _bert(tokenizers.models.WordPiece(unk_token="[UNK]"))
        # The library numbers the pieces that continue a word as a hash map hands them out, and settles ties by these
        # numbers. Named in advance they keep their order; the vocabulary alone is then taken over.
        letters = sorted({letter for text in texts for letter in drafted.normalizer.normalize_str(text)} - {" "})
        trainer = tokenizers.trainers.WordPieceTrainer(
            vocab_size=max(size, len(_SPECIAL) + len(letters)),
            special_tokens=[*_SPECIAL, *(f"##{letter}" for letter in letters)],
            show_progress=False,
        )
        drafted.train_from_iterator(texts, trainer)
        pieces = tokenizers.models.WordPiece(vocab=drafted.get_vocab(), unk_token="[UNK]")
        return cls(_framed(_bert(pieces)), longest)

    @classmethod
    def read(cls, folder: str | Path, longest: int = 40) -> Words | None:
        """Those of a model's folder: its tokenizer.json, or BERT's older vocab.txt; None where it has neither."""
        folder = Path(folder)
        try:
            if (folder / FILE).is_file():
                return cls(_library().Tokenizer.from_file(str(folder / FILE)), longest)
            if (folder / "vocab.txt").is_file():
                pieces = _library().models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token="[UNK]")
                return cls(_framed(_bert(pieces)), longest)
        except VitfocusError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise VitfocusError(f"The word pieces in {folder} cannot be read: {error}.") from None
        return None

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def __call__(self, questions: Sequence[str]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, int64 (B, L); L is the longest question's length, at most `longest`."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(questions))]
        return padded(rows, self.padding)

    def to_json(self) -> str:
        """What `read` reads."""
        text: str = self.tokenizer.to_str(pretty=False)
        return text

    def __deepcopy__(self, memo: dict[int, Any]) -> Words:
        return self  # nothing in it changes

    def __getstate__(self) -> dict[str, Any]:
        return {"json": self.to_json(), "longest": self.longest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(_library().Tokenizer.from_str(state["json"]), state["longest"])  # type: ignore[misc]


def padded(rows: Sequence[Sequence[int]], padding: int) -> dict[str, Tensor]:
    """Rows of different lengths as `input_ids` and `attention_mask` (B, L)."""
    longest = max(map(len, rows), default=0)
    ids = torch.full((len(rows), longest), padding, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
        mask[place, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def attach_words(model: nn.Module, words: Words) -> None:
    """Let a model carry its words."""
    model.__dict__[_KEY] = words


def words_of(model: nn.Module) -> Words | None:
    """Those that a model carries."""
    found: Words | None = model.__dict__.get(_KEY)
    return found


def _bert(model: Any) -> Any:
    """A tokenizer that lowers and splits text as BERT does, on top of word pieces."""
    tokenizers = _library()
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    return made


def _framed(tokenizer: Any) -> Any:
    """The question between [CLS] and [SEP], as BERT and ViLT expect it; both stay whole where a question has them."""
    tokenizer.add_special_tokens([name for name in _SPECIAL if tokenizer.token_to_id(name) is not None])
    cls, sep = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = _library().processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    return tokenizer


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise VitfocusError("Questions are read by the tokenizers library: it needs the extra vitfocus[hf].") from None
    return tokenizers
