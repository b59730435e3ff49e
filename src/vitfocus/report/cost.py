"""What a model costs: multiply-adds by counting, time and memory by measuring, with the hardware they were measured on.

Nothing here is estimated. What cannot be measured (a model that needs a text, too little memory) is left out.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.anatomy import anatomy, unwrap
from vitfocus.core.environment import device_name
from vitfocus.core.modules import eval_mode
from vitfocus.treatments.cost import count_cost
from vitfocus.treatments.step_cost import Step, memory, timed

#: Steps to time at most, and the seconds after which no further one is begun.
REPEATS, PATIENCE = 7, 2.0


def multiply_adds(model: nn.Module) -> int | None:
    """Multiply-adds of one image at the model's own size, as papers count "FLOPs"; None where an image is not enough.

    >>> import timm
    >>> round(multiply_adds(timm.create_model("vit_tiny_patch16_224")) / 1e9, 2)
    1.25
    """
    try:
        return count_cost(model).flops
    except Exception:  # a model that takes more than an image; there is no number then
        return None


def usual_batch(device: torch.device, multiply_adds: int | None) -> int:
    """Images at a time to measure with: enough to be telling, few enough not to keep a person waiting.

    >>> usual_batch(torch.device("cpu"), 1_250_000_000), usual_batch(torch.device("cpu"), 61_000_000_000)
    (8, 1)
    """
    if device.type == "cuda":
        return 32
    return 8 if (multiply_adds or 0) < 20_000_000_000 else 1


def measure(model: nn.Module, batch: int = 8) -> dict[str, Any]:
    """Seconds of a forward pass and of a training step, the memory of a step, and where, as `compare_steps` has them.

    A copy of the model is trained, so the model itself is left alone. An empty dict where the model cannot be run.
    """
    device = next(model.parameters()).device
    try:
        images = _images(model, batch)
        with eval_mode(model):
            forward = _times(Step(model, images, "infer"))
        training = Step(copy.deepcopy(unwrap(model)), images, "train")
        step, taken = _times(training), memory(training)
    except Exception:  # as above; out of memory, too
        return {}
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "batch": batch,
        "forward_seconds": forward,
        "step_seconds": step,
        "memory_bytes": taken,
    }


def _images(model: nn.Module, batch: int) -> Tensor:
    """Noise of the model's own size; a generator of its own, so that nobody's draws change."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    body = anatomy(model)
    noise = torch.randn(batch, len(body.mean), *body.build_size, generator=torch.Generator().manual_seed(0))
    return noise.to(weight.device, weight.dtype)


def _times(step: Step) -> dict[str, Any]:
    """Median, least and greatest seconds of some steps after one that warms up."""
    step()
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < REPEATS and (not seconds or time.perf_counter() - began < PATIENCE):
        seconds.append(timed(step))
    return {"median": statistics.median(seconds), "range": [min(seconds), max(seconds)], "runs": len(seconds)}
