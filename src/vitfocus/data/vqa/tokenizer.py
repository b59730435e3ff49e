"""The tokenizer of questions: a WordPiece vocabulary, trained on questions or read from a model's folder.

A model carries its tokenizer (`attach_tokenizer`), so that it is saved and loaded with the model. Built on the
tokenizers library (the extra `hf`).
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
        tokenizers = _library()
        texts = list(questions)
        drafted = _bert(tokenizers.models.WordPiece(unk_token="[UNK]"))
        # The library numbers continuation pieces in the order of a hash map and breaks ties by these numbers. Passed
        # as special tokens they keep a fixed order; only the vocabulary is used afterwards.
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
    def read(cls, folder: str | Path, longest: int = 40) -> QuestionTokenizer | None:
        """Read tokenizer.json, or BERT's older vocab.txt, from a model's folder; None if it has neither."""
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
            raise VitfocusError(f"The tokenizer in {folder} cannot be read: {error}.") from None
        return None

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def __call__(self, questions: Sequence[str]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, int64 (B, L); L is the longest question's length, at most `longest`."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(questions))]
        return padded(rows, self.padding)

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        text: str = self.tokenizer.to_str(pretty=False)
        return text

    def __deepcopy__(self, memo: dict[int, Any]) -> QuestionTokenizer:
        return self  # nothing in it changes

    def __getstate__(self) -> dict[str, Any]:
        return {"json": self.to_json(), "longest": self.longest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(_library().Tokenizer.from_str(state["json"]), state["longest"])  # type: ignore[misc]


def padded(rows: Sequence[Sequence[int]], padding: int) -> dict[str, Tensor]:
    """Pad rows of token ids to `input_ids` and `attention_mask` (B, L)."""
    longest = max(map(len, rows), default=0)
    ids = torch.full((len(rows), longest), padding, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
        mask[place, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def attach_tokenizer(model: nn.Module, tokenizer: QuestionTokenizer) -> None:
    """Make a model carry its tokenizer."""
    model.__dict__[_KEY] = tokenizer


def tokenizer_of(model: nn.Module) -> QuestionTokenizer | None:
    """The tokenizer that a model carries, if it has one."""
    found: QuestionTokenizer | None = model.__dict__.get(_KEY)
    return found


def _bert(model: Any) -> Any:
    """A tokenizer that normalises and splits text as BERT does."""
    tokenizers = _library()
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    return made


def _framed(tokenizer: Any) -> Any:
    """Put questions between [CLS] and [SEP], as BERT and ViLT expect; these are not split in a question."""
    tokenizer.add_special_tokens([name for name in _SPECIAL if tokenizer.token_to_id(name) is not None])
    cls, sep = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = _library().processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    return tokenizer


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise VitfocusError(
            "Tokenizing questions needs the tokenizers library: install the extra vitfocus[hf]."
        ) from None
    return tokenizers
