"""What a model costs on paper: its parameters, and the multiply-adds of one image, which papers call FLOPs.

Matrix products and convolutions are counted as they are dispatched, on shapes alone: nothing is computed. What a
treatment does element by element (`Treatment.operations_per_element`) is added as the Context Broadcasting supplement
counts it: a mean is one operation per element, and so is every multiply-add. CB at the end of an MLP therefore costs
2·N·d, its hybrid 4·N·d.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from vitfocus.anatomy import anatomy, unwrap
from vitfocus.core.modules import eval_mode
from vitfocus.treatments.surgery import surgeons


@dataclass(frozen=True)
class Cost:
    """Parameters, and multiply-adds of one forward pass of one image of `size` (height, width)."""

    parameters: int
    flops: int
    size: tuple[int, int]


def count_cost(model: nn.Module, size: int | tuple[int, int] | None = None) -> Cost:
    """Parameters and FLOPs of a model, treated or not, for images of `size` (default: what it was built for).

    The model may live on the meta device, where building it takes neither time nor memory.

    >>> from vitfocus import create_model
    >>> with torch.device("meta"):
    ...     plain, treated = (create_model(f"deit_tiny_patch16_224{spec}") for spec in ("", "+cb"))
    >>> count_cost(plain)
    Cost(parameters=5717416, flops=1253683200, size=(224, 224))
    >>> count_cost(treated).flops - count_cost(plain).flops == 12 * 2 * 197 * 192
    True
    """
    model = unwrap(model)
    if size is None:
        size = anatomy(model).build_size
    height, width = (size, size) if isinstance(size, int) else size
    elementwise: list[int] = []
    shapes = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    image = torch.empty(1, 3, height, width, device="meta")
    hooks = [
        module.register_forward_hook(partial(_count_elements, per_element, elementwise))
        for surgeon in surgeons(model)
        if (per_element := surgeon.treatment.operations_per_element)
        for module in surgeon.modules()
    ]
    try:
        with eval_mode(model), FlopCounterMode(display=False) as counter:
            functional_call(model, shapes, (image,))
    finally:
        for hook in hooks:
            hook.remove()
    return Cost(count_parameters(model), counter.get_total_flops() // 2 + sum(elementwise), (height, width))


def _count_elements(per_element: int, counts: list[int], module: nn.Module, args: Any, output: Tensor) -> None:
    counts.append(per_element * output.numel())


def count_parameters(model: nn.Module) -> int:
    """The trained parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
