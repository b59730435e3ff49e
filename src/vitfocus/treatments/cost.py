"""What a model costs on paper: its parameters, and the multiply-adds of one image, which papers call FLOPs.

Matrix products and convolutions are counted as they are dispatched, on shapes alone: nothing is computed. What a
treatment does element by element is added as the Context Broadcasting supplement counts it: a mean is one operation an
element, and so is every multiply-add. CB at the end of an MLP therefore costs 2·N·d, its hybrid 4·N·d.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from vitfocus.anatomy import anatomy, unwrap
from vitfocus.core.modules import eval_mode
from vitfocus.treatments.context_broadcasting import ContextBroadcast
from vitfocus.treatments.squeeze_excitation import ChannelGate
from vitfocus.treatments.token_aware_pooling import DilationPredictor, FixedPooling


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
    elementwise = _Elementwise(model)
    shapes = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    image = torch.empty(1, 3, height, width, device="meta")
    with eval_mode(model), elementwise, FlopCounterMode(display=False) as counter:
        functional_call(model, shapes, (image,))
    return Cost(count_parameters(model), counter.get_total_flops() // 2 + elementwise.operations, (height, width))


def count_parameters(model: nn.Module) -> int:
    """The trained parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


class _Elementwise:
    """Adds up what the inserted modules do element by element while a forward pass runs."""

    def __init__(self, model: nn.Module) -> None:
        self.operations = 0
        self._found = [(module, rule) for module in model.modules() for kind, rule in _RULES if type(module) is kind]
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for module, rule in self._found:
            self._hooks.append(module.register_forward_hook(self._noting(rule)))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _noting(self, rule: Callable[[Any], int]) -> Callable[[nn.Module, Any, Tensor], None]:
        def note(module: nn.Module, _: Any, output: Tensor) -> None:
            self.operations += rule(module) * output.numel()

        return note


def _mixture(module: Any) -> int:
    """K - 1 means, and K weighted terms."""
    branches: int = module.proj[-1].out_channels
    return 2 * branches - 1


#: Operations an element of the tokens that pass an inserted module.
_RULES: tuple[tuple[type[nn.Module], Callable[[Any], int]], ...] = (
    (ContextBroadcast, lambda module: 4 if module.variant == "hybrid" else 2),
    (DilationPredictor, _mixture),
    (FixedPooling, lambda _: 1),
    (ChannelGate, lambda _: 2),
)
