"""What a run consists of at one step, gathered from model, moving average, optimiser and scaler, and put back.

torch's own `get_state_dict` gives full tensors under the model's plain names whether it is wrapped in
DistributedDataParallel, sharded by FSDP2, compiled or none of these, so a run may continue on other machines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from vitfocus.train.checkpoint import State


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's full state dict on the CPU (on the first process; the others take part and get nothing)."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    tensors: dict[str, Any] = get_model_state_dict(model, options=options)
    return tensors


def gather(step: int, model: nn.Module, optimiser: Optimizer, ema: nn.Module | None, rest: dict[str, Any]) -> State:
    """Collect the state. Every process must call this; the first gets the tensors."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, optimised = get_state_dict(model, optimiser, options=options)
    tensors: dict[str, Any] = {f"model/{name}": value for name, value in weights.items()}
    if ema is not None:
        tensors |= {f"ema/{name}": value.cpu() for name, value in ema.state_dict().items()}
    scalars: dict[str, dict[str, Any]] = {}
    moments: dict[str, Any] = optimised.get("state", {})  # type: ignore[assignment]
    for name, entries in moments.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser/{name}/{key}"] = value
            else:
                scalars.setdefault(name, {})[key] = value
    # The rate follows from the step, and a recorded step's lies in a tensor: neither it nor that is part of the state.
    kept: list[dict[str, Any]] = optimised.get("param_groups", [])  # type: ignore[assignment]
    groups = [{key: value for key, value in group.items() if key not in ("lr", "capturable")} for group in kept]
    for number, group in enumerate(groups):  # Lamb counts its steps there, in a tensor
        for key in [key for key, value in group.items() if isinstance(value, Tensor)]:
            tensors[f"group/{number}/{key}"] = group.pop(key)
    return State(step, tensors, {**rest, "optimiser": {"groups": groups, "scalars": scalars}})


def restore(state: State, model: nn.Module, optimiser: Optimizer, ema: nn.Module | None) -> None:
    """Put a state back, on every process."""
    weights: dict[str, Any] = dict(_under(state.tensors, "model/"))
    moments: dict[str, dict[str, Any]] = {name: dict(v) for name, v in state.rest["optimiser"]["scalars"].items()}
    for path, value in _under(state.tensors, "optimiser/").items():
        name, _, key = path.rpartition("/")
        moments.setdefault(name, {})[key] = value
    now: list[dict[str, Any]] = get_state_dict(model, optimiser)[1]["param_groups"]  # type: ignore[assignment]
    saved: list[dict[str, Any]] = state.rest["optimiser"]["groups"]
    here = {
        name: {key: group[key] for key in ("lr", "capturable") if key in group}
        for group in now
        for name in group["params"]
    }
    groups = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()} | here[group["params"][0]]
        for group in saved
    ]
    for path, value in _under(state.tensors, "group/").items():
        number, _, key = path.partition("/")
        groups[int(number)][key] = value
    optimised: dict[str, Any] = {"state": moments, "param_groups": groups}
    # A sharded model is given the full tensors, of which each process takes its part.
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=optimised, options=options)
    if ema is not None:
        ema.load_state_dict(_under(state.tensors, "ema/"))


def all_finite(model: nn.Module) -> bool:
    """Whether no weight is NaN or infinite."""
    values = [p.detach() for p in model.parameters() if p.is_floating_point()]
    norms = torch.stack([value.to_local().norm() if hasattr(value, "to_local") else value.norm() for value in values])
    return bool(norms.isfinite().all())


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
