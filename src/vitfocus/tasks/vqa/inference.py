"""Answering questions about images with a trained model, its tokenizer, answers and image preprocessing.

>>> from vitfocus.data.vqa.dataset import shapes_questions
>>> from vitfocus.data.vqa.tokenizer import QuestionTokenizer
>>> from vitfocus.treatments.save_load import create_model
>>> small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
>>> names = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
>>> tokenizer = QuestionTokenizer.train(["Is there a star?"], size=60)
>>> model = create_model(
...     "transformers:ViltForQuestionAnswering", **small, **names, image_size=32, patch_size=8, vocab_size=60
... )
>>> attach_tokenizer(model, tokenizer)
>>> images = shapes_questions("val", 2, 32).images
>>> answers = Answerer(model)([images.read(0), images.read(1)], ["Is there a star?", "Is there a ring?"])
>>> len(answers), set(answers) <= {"yes", "no"}
(2, True)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitfocus.anatomy import anatomy, unwrap
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import eval_mode
from vitfocus.data.vqa.batches import VqaPreprocessing, pad_images
from vitfocus.data.vqa.tokenizer import attach_tokenizer, tokenizer_of

__all__ = ["Answerer", "answers_in", "attach_tokenizer"]


class Answerer:
    """Answers questions about images.

    Args:
        model: A `ViltForQuestionAnswering` that carries its tokenizer and its answers.
        size: Short side of the images; by default that of the model.

    Raises:
        VitfocusError: The model has no answers or no tokenizer.
    """

    def __init__(self, model: nn.Module, size: int | None = None) -> None:
        self.model, inner = model, unwrap(model)
        answers, tokenizer = answers_in(getattr(inner, "config", None)), tokenizer_of(inner)
        if answers is None:
            raise VitfocusError(
                f"This {type(inner).__name__} does not name the answers of its outputs: its config needs id2label."
            )
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
