"""Models and their tensors: eval mode, logits of any output, tensors ready to be saved, normalising over processes."""

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


class SharedBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation over the images of all processes, on any device; one process alone has `nn.BatchNorm2d`.

    Statistics and gradients are those of the whole batch, so a run does not depend on the number of processes. A custom
    operator adds the sums, so that a compiled model stays one graph.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, (B, C, H, W)."""
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not (self.training and several and torch.distributed.get_world_size() > 1):
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        values = x if x.dtype == torch.float64 else x.float()
        here = values.new_full((1,), x.numel() / x.shape[1])
        sums = sum_over_processes(torch.cat((values.sum((0, 2, 3)), here)))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = values - mean[:, None, None]
        variance = sum_over_processes(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            share = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.item()
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            unbiased = variance * count / (count - 1).clamp(min=1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)


@torch.library.custom_op("vitfocus::sum_over_processes", mutates_args=())
def sum_over_processes(values: Tensor) -> Tensor:
    """The sum of every process's values, on every process; so are the gradients."""
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total


@sum_over_processes.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


def _sum_gradients(_: Any, gradient: Tensor) -> Tensor:
    total: Tensor = sum_over_processes(gradient.contiguous())
    return total


sum_over_processes.register_autograd(_sum_gradients)
