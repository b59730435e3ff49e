"""A model that takes pixels, 8-bit or in [0, 1]: the normalisation is part of it, so suites need not know it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.functional import rgb_to_grayscale

from vitfocus.anatomy import input_spec, unwrap
from vitfocus.core.arguments import require_values
from vitfocus.core.errors import VitfocusError, reason
from vitfocus.core.modules import inserted, logits_of
from vitfocus.core.tables import unique_label
from vitfocus.data.image_files import model_interpolation
from vitfocus.treatments import applied
from vitfocus.treatments.spec import STATE_KEY

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PixelModel:
    """A classifier behind its normalisation: `model(images)` is the logits in float32, (B, classes).

    `size` is the (height, width) the model was built for; with `resize`, images of another size are scaled to it.
    """

    def __init__(self, name: str, model: nn.Module, precision: str = "float32", resize: bool = False) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):  # which synchronises with its peers at every batch
            model = model.module
        self.name, self.model, self.precision, self.resize = name, model, precision, resize
        inner = unwrap(model)
        config = getattr(inner, "pretrained_cfg", None) or {}
        self.mean, self.std, self.size = input_spec(model)
        self.interpolation = model_interpolation(config)
        weight = next((weight for weight in inner.parameters() if weight.is_floating_point()), None)
        self.dtype = torch.float32 if weight is None else weight.dtype
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        values = images.float() / 255 if images.dtype == torch.uint8 else images.float()
        if self.resize and tuple(values.shape[-2:]) != self.size:
            values = F.interpolate(values, size=self.size, mode="bicubic", antialias=True).clamp(0, 1)
        if len(self.mean) == 1 and values.shape[1] == 3:
            values = rgb_to_grayscale(values)
        mean, std = self._statistics(values)
        try:
            with self.autocast(images.device):
                output = self.model(((values - mean) / std).to(self.dtype))
        except (AssertionError, RuntimeError, ValueError) as error:
            height, width = values.shape[-2:]
            if (height, width) == self.size or isinstance(error, VitfocusError | torch.OutOfMemoryError):
                raise
            raise VitfocusError(
                f"{self.name} does not take images of {height}x{width} pixels (it was built for "
                f"{self.size[0]}x{self.size[1]}): {reason(error)}."
            ) from error
        return logits_of(output).float()

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, PRECISIONS[self.precision], enabled=self.precision != "float32")

    def resizing(self) -> PixelModel:
        """The same model, which scales images to its own size."""
        other = copy.copy(self)
        other.resize = True
        return other

    def _statistics(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.shape[1] != len(self.mean):
            channels = f"{values.shape[1]} channel{'s' * (values.shape[1] != 1)}"
            raise VitfocusError(f"The images have {channels}, but {self.name} takes {len(self.mean)}.")
        if values.device not in self._constants:
            with torch.inference_mode(False):  # they are cached, and attacks differentiate through them
                mean, std = (torch.tensor(v, device=values.device).view(1, -1, 1, 1) for v in (self.mean, self.std))
            self._constants[values.device] = (mean, std)
        return self._constants[values.device]

    def classes(self, device: torch.device) -> int:
        """The number of classes, from the output for one black image."""
        if getattr(unwrap(self.model), "num_classes", None) == 0:  # it returns features, which look like logits
            raise VitfocusError(f"{self.name} has no classifier (num_classes=0), so there is no accuracy to measure.")
        height, width = self.size
        try:
            with torch.no_grad():
                logits = self(torch.zeros(1, len(self.mean), height, width, dtype=torch.uint8, device=device))
        except VitfocusError:
            raise
        except Exception as error:
            raise VitfocusError(
                f"{self.name} does not take images of {height}x{width} pixels: {reason(error)}."
            ) from error
        if logits.ndim != 2:
            more = "; for a segmenter use --suite segmentation" if logits.ndim == 4 else ""
            raise VitfocusError(
                f"{self.name} returns {tuple(logits.shape)} for one image; expected one row of logits{more}."
            )
        return logits.shape[1]

    def describe(self) -> dict[str, Any]:
        """The model's part of the fingerprint."""
        facts = {"digest": weights_digest(self.model), "treatments": "+".join(map(str, applied(self.model)))}
        since = {"inserted": "+".join(inserted(self.model))} if inserted(self.model) else {}
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return {**facts, **since, "mean": list(self.mean), "std": list(self.std), "parameters": count}


def weights_digest(model: nn.Module) -> str:
    """The `tensors_digest` of a model."""
    return tensors_digest(unwrap(model).state_dict())


def tensors_digest(tensors: Mapping[str, Any]) -> str:
    """A shortened SHA-256 of a state dict without the record of treatments."""
    state = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if isinstance(tensor, Tensor) and not name.endswith(STATE_KEY):
            state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()[:32]


def models_by_name(model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Models by name: as in the mapping, or named by their architecture and treatments."""
    if isinstance(model, nn.Module):
        models: list[tuple[str, nn.Module]] = [(_name(model), model)]
    elif isinstance(model, Mapping):
        models = [(str(name), one) for name, one in model.items()]
    else:
        models = [(_name(one), one) for one in model] if isinstance(model, list | tuple) else []
    if not models or not all(isinstance(one, nn.Module) for _, one in models):
        raise VitfocusError("evaluate takes a model, a list of models, or a dict of models by name.")
    result: dict[str, nn.Module] = {}
    for name, one in models:
        for weight, value in one.named_parameters():
            require_values(weight, value)
        result[unique_label(name, result) if name in result else name] = one
    return result


def _name(model: object) -> str:
    if not isinstance(model, nn.Module):
        return ""
    config = getattr(unwrap(model), "pretrained_cfg", None) or {}
    base = config.get("architecture") or type(unwrap(model)).__name__
    return "+".join([base, *map(str, applied(model))])
