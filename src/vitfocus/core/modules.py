"""Models and their tensors: eval mode for a while, the logits of any output, and tensors ready to be saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError


@contextmanager
def eval_mode(*models: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Within the context the models are in eval mode, on `device` if one is given; afterwards mode and device are back.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with eval_mode(model):
        ...     model.training
        False
        >>> model.training, model[0].training, model[1].training
        (True, True, False)
    """
    training = [module for model in models for module in model.modules() if module.training]
    homes = [next((parameter.device for parameter in model.parameters()), device) for model in models]
    try:
        for model in models:
            if device is not None:
                model.to(device)
            if training:
                model.eval()
        yield
    finally:
        for module in training:
            module.training = True
        if device is not None:
            for model, home in zip(models, homes, strict=True):
                model.to(home)


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: a tensor, a Hugging Face or torchvision output, or a pair of distilled heads.

    Raises:
        VitfocusError: The output holds no logits.

    Example:
        >>> logits_of({"out": torch.zeros(1, 5)}).shape, logits_of((torch.zeros(1, 5), torch.ones(1, 5)))[0, 0]
        (torch.Size([1, 5]), tensor(0.5000))
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits
    if isinstance(output, dict) and isinstance(output.get("out"), Tensor):  # torchvision's segmenters
        return output["out"]
    if isinstance(output, tuple | list) and output and all(isinstance(part, Tensor) for part in output):
        return torch.stack(list(output)).mean(0)
    raise VitfocusError(f"The model returns a {type(output).__name__} without logits; a classifier is expected.")


def separate_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors of which none shares memory with another or is part of a larger one, as safetensors requires.

    Example:
        >>> shared = torch.zeros(4)
        >>> one, two = separate_tensors({"a": shared, "b": shared}).values()
        >>> one.data_ptr() == two.data_ptr()
        False
    """
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage()
        shared = storage.data_ptr() in seen or storage.nbytes() > tensor.nbytes
        seen.add(storage.data_ptr())
        result[name] = tensor.clone() if shared else tensor
    return result
