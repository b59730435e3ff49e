"""The cost of a model: parameters and multiply-adds as counted, time and memory of a step as measured.

Matrix products and convolutions are counted as they are dispatched, on shapes alone: nothing is computed. What a
treatment does element by element (`Treatment.operations_per_element`) is added as the Context Broadcasting supplement
counts it: a mean is one operation per element, and so is every multiply-add. CB at the end of an MLP therefore costs
2·N·d, its hybrid 4·N·d.

`compare_steps` alternates between the models, so that a machine that slows down does so for all, and takes the fastest
step, which other programs disturbed least. Memory is what was allocated, as measured by the caching allocator on CUDA
and by the profiler on the CPU. All timings of steps (`vitfocus bench`, reports, benchmarks) use `seconds_per_call`.
"""

from __future__ import annotations

import inspect
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from vitfocus.anatomy import anatomy, unwrap
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import eval_mode
from vitfocus.treatments.attention_diversification import auxiliary_loss, reset_losses
from vitfocus.treatments.surgery import surgeons


@dataclass(frozen=True)
class Cost:
    """Parameters, and multiply-adds of one forward pass of one image of `size` (height, width)."""

    parameters: int
    flops: int
    size: tuple[int, int]


def count_cost(model: nn.Module, size: int | tuple[int, int] | None = None) -> Cost:
    """Count the parameters and FLOPs of a model, treated or not.

    The model may be on the meta device, where building it takes neither time nor memory.

    Args:
        model: The model.
        size: Height and width of the image, or one number for both. Default: the size the model was built for.

    Returns:
        The parameters, and the multiply-adds of one forward pass of one image.

    Example:
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
    """The number of parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


MODES = ("train", "infer")


def compare_steps(
    models: Mapping[str, nn.Module],
    images: Tensor,
    *,
    mode: str = "train",
    autocast: torch.dtype | None = None,
    rounds: int = 5,
    warmup: int = 2,
    on_step: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure a step of every model on the same images, and compare it with that of the first model.

    Args:
        models: The models by name.
        images: (B, 3, H, W), on the models' device.
        mode: "train" is a forward pass, a loss with the terms of the treatments, a backward pass and an AdamW step;
            "infer" is a forward pass without gradients.
        autocast: The dtype of autocast, or None for none.
        rounds: Timed steps of each model.
        warmup: Steps of each model before.
        on_step: Called after every step.

    Returns:
        One dict per model: `milliseconds` (the fastest step), `milliseconds_median`, `time_ratio` (of the fastest
        steps), `megabytes` (weights, the optimiser's state, and the peak of a step on top of them), `memory_ratio` and
        `parameters`.

    Raises:
        VitfocusError: The mode is unknown, a model does not take such images, or a step does not fit into memory.

    Example:
        >>> tiny = nn.Linear(4, 4)
        >>> rows = compare_steps({"plain": tiny}, torch.randn(2, 4), mode="infer", rounds=1, warmup=0)
        >>> rows[0]["time_ratio"], rows[0]["memory_ratio"], rows[0]["parameters"]
        (1.0, 1.0, 20)
    """
    if mode not in MODES:
        raise VitfocusError(f"There is no mode {mode!r}: expected train or infer.")
    if rounds < 1:
        raise VitfocusError(f"rounds must be at least 1, but is {rounds}.")
    steps = {name: Step(model, images, mode, autocast) for name, model in models.items()}
    for step in steps.values():
        for _ in range(warmup):
            step()
            on_step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(seconds_per_call(step, images.device))
            on_step()
    taken = {}
    for name, step in steps.items():
        taken[name] = memory(step)
        on_step()
    first = next(iter(steps))
    return [
        {
            "name": name,
            "milliseconds": 1000 * min(seconds[name]),
            "milliseconds_median": 1000 * statistics.median(seconds[name]),
            "time_ratio": min(seconds[name]) / min(seconds[first]),
            "megabytes": taken[name] / 2**20,
            "memory_ratio": taken[name] / taken[first],
            "parameters": count_parameters(models[name]),
        }
        for name in steps
    ]


class Step:
    """One training or inference step of a model; `mode` and `autocast` are those of `compare_steps`."""

    def __init__(self, model: nn.Module, images: Tensor, mode: str, autocast: torch.dtype | None = None) -> None:
        self.model, self.images, self.autocast = model, images, autocast
        self.named = "pixel_values" in inspect.signature(unwrap(model).forward).parameters
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6) if mode == "train" else None

    def __call__(self) -> None:
        if self.optimiser is None:
            self.model.eval()
            with torch.no_grad():
                self._forward()
            return
        self.model.train()
        outputs = list(_differentiable(self._forward()))
        # The backward pass costs the same for any smooth function of the output; this one fits every kind of model.
        loss = torch.stack([output.float().square().mean() for output in outputs]).sum() + auxiliary_loss(self.model)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def held(self) -> int:
        """Bytes that stay between steps: weights, buffers and the optimiser's state."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimiser.state.values() if self.optimiser else ():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _forward(self) -> Any:
        images, autocast = self.images, self.autocast
        try:
            with torch.autocast(images.device.type, dtype=autocast, enabled=autocast is not None):
                return self.model(pixel_values=images) if self.named else self.model(images)
        except (TypeError, AssertionError, ValueError, RuntimeError) as error:
            if isinstance(error, VitfocusError):
                raise
            if "out of memory" in str(error):
                raise VitfocusError(f"The step does not fit into memory: {str(error).splitlines()[0]}") from None
            shape, reason = "x".join(map(str, images.shape)), str(error).rstrip(".")
            raise VitfocusError(
                f"{type(unwrap(self.model)).__name__} does not run on images of {shape} alone: {reason}."
            ) from error


def _differentiable(output: Any) -> Iterator[Tensor]:
    """Every tensor with a gradient in the output of a model."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _differentiable(value)
    elif isinstance(output, Iterable) and not isinstance(output, str):
        for value in output:
            yield from _differentiable(value)


def seconds_per_call(function: Callable[[], object], device: torch.device | str, calls: int = 1) -> float:
    """The mean time of some calls in a row, including all work that they start on the device.

    >>> seconds_per_call(lambda: torch.ones(10), "cpu", calls=3) > 0
    True
    """
    device = torch.device(device)
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    _synchronize(device)
    return (time.perf_counter() - start) / calls


def repeat_timed(
    function: Callable[[], object], device: torch.device | str, most: int, seconds: float = math.inf
) -> list[float]:
    """The times of up to `most` single calls after one warm-up call; none is started after `seconds`."""
    function()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < most and (not times or time.perf_counter() - began < seconds):
        times.append(seconds_per_call(function, device))
    return times


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory(step: Step) -> int:
    """Bytes that a step needs: what stays between steps, and the peak of what it allocates on top of that."""
    device, held = step.images.device, step.held()
    if device.type == "cuda":
        _synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        _synchronize(device)
        return held + torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would warn about missing GPUs
    from torch.profiler import ProfilerActivity, profile

    reset_losses(step.model)  # what is freed during the profile must have been allocated during it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events: Any = seen.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return held + max(accumulate((change for _, change in changes), initial=0))
