"""Checkpoints that survive a crash, a full disk or a flipped bit.

A checkpoint is a folder, `checkpoints/00001200`, with tensors as safetensors, the rest as JSON, and the SHA-256 of both
files in `SHA256SUMS`, in the format of `sha256sum`. It is written under another name and renamed when complete; older
ones are removed after that, once enough newer ones are undamaged. It holds no random state: all random numbers of a run
depend on the seed and the number of the step only.

torch's `get_state_dict` gives full tensors under the model's plain names whether it is wrapped in
DistributedDataParallel, sharded by FSDP2 or compiled, so a run can be resumed on another number of machines.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, field, to_builtins
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from vitfocus.core.arguments import parse_digits
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import digest, writable_path
from vitfocus.core.modules import separate_tensors
from vitfocus.core.records import Count, read_json

_TENSORS, _STATE, _SUMS = "state.safetensors", "state.json", "SHA256SUMS"


class RunRecord(Struct):
    """The state of a run besides its tensors."""

    best: dict[str, Any] = field(default_factory=dict)  # the row of metrics of the best evaluation
    last: dict[str, Any] = field(default_factory=dict)  # and of the last one
    seconds: float = 0.0
    window: list[float] = field(default_factory=list)  # sums of the loss terms since the last row of metrics
    window_steps: Count = 0
    evaluation_due: bool = False  # a signal stopped the run before the evaluation of this step was complete


class OptimiserState(Struct):
    """The state of an optimiser besides its tensors: its groups, and plain values by parameter."""

    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]


class RunState(Struct):
    """A run at one step, apart from its tensors: the content of state.json."""

    step: Count
    recipe: str  # as TOML
    images: Count  # in the training set
    record: RunRecord
    scaler: dict[str, Any]  # the state of the gradient scaler of fp16
    optimiser: OptimiserState


@dataclass
class Checkpoint:
    """A run at one step: tensors by name, and everything else."""

    state: RunState
    tensors: dict[str, Tensor]


class Checkpoints:
    """The checkpoints of one run. The newest `keep` undamaged ones are kept."""

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first."""
        found = [parse_digits(path.name) for path in self.folder.glob("*")] if self.folder.is_dir() else []
        return sorted({step for step in found if step is not None}, reverse=True)

    def write(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint atomically; if that fails, a `VitfocusError` is raised and the others are untouched."""
        step = checkpoint.state.step
        final = self.folder / f"{step:08d}"
        try:
            replace_folder(final, lambda folder: _write(folder, checkpoint))
        except (OSError, SafetensorError) as error:
            last = self.steps()
            where = f"the last one, of step {last[0]}, is untouched" if last else "there is none yet"
            raise VitfocusError(f"The checkpoint of step {step} cannot be written ({error}); {where}.") from None
        self._remove_old(final)
        return final

    def _remove_old(self, written: Path) -> None:
        """Remove checkpoints older than the newest `keep` undamaged ones, except the one just written."""
        undamaged = 0
        for folder in (self.folder / f"{step:08d}" for step in self.steps()):
            if undamaged < self.keep:
                with suppress(VitfocusError):
                    _verify(folder)
                    undamaged += 1
            elif folder != written:
                _remove(folder)

    def newest(self, say: Callable[[str], None] = print) -> Checkpoint | None:
        """The newest checkpoint that can be read; those that cannot are reported."""
        for step in self.steps():
            try:
                return read_checkpoint(self.folder / f"{step:08d}")
            except VitfocusError as error:
                say(f"{str(error).rstrip('.')}; trying the one before.")
        return None


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Read a checkpoint and verify its checksums."""
    folder = Path(folder)
    path = folder / _STATE
    if not path.is_file():
        near = [*folder.glob("[0-9]*"), *folder.glob("checkpoints/[0-9]*")]
        found = next((one for one in sorted(near, reverse=True) if (one / _STATE).is_file()), None)
        hint = f"; {found} is one" if found else ""
        raise VitfocusError(f"{folder} is not a checkpoint, which is a folder with {_TENSORS} and {_STATE}{hint}.")
    _verify(folder)
    state = read_json(path, RunState, writer="vitfocus train")
    try:
        return Checkpoint(state, load_file(folder / _TENSORS))
    except (OSError, SafetensorError) as error:
        raise VitfocusError(f"The checkpoint {folder} cannot be read ({error!r}).") from None


def _verify(folder: Path) -> None:
    """Raise `VitfocusError` if a file of the checkpoint is missing or was changed."""
    if not (folder / _SUMS).exists():
        raise VitfocusError(
            f"The checkpoint {folder} has no {_SUMS}; if an earlier version wrote it, run "
            f"`sha256sum {_STATE} {_TENSORS} > {_SUMS}` there to use it."
        )
    for name in (_STATE, _TENSORS, _SUMS):
        if not (folder / name).is_file():
            raise VitfocusError(f"The checkpoint {folder} is damaged: it has no file {name}.")
    try:
        expected = _sums(folder)
        with (folder / _SUMS).open("rb") as file:
            if file.read(len(expected) + 1) != expected:
                raise VitfocusError(f"The checkpoint {folder} is damaged: its SHA-256 differs.")
    except OSError as error:
        raise VitfocusError(f"The checkpoint {folder} cannot be read ({error!r}).") from None


def _sums(folder: Path) -> bytes:
    """The content of SHA256SUMS for the present files."""
    return "".join(f"{digest(folder / name)}  {name}\n" for name in (_STATE, _TENSORS)).encode()


def replace_folder(final: Path, write: Callable[[Path], Any]) -> None:
    """Replace the folder `final` atomically by one that `write` fills; on failure `final` is unchanged."""
    if writable_path(final, folder=True).is_symlink():
        raise VitfocusError(f"{final} is a link, which would be replaced; expected a folder or a new path.")
    temporary, old = (final.with_name(f".{final.name}.{mark}") for mark in ("new", "old"))
    for stale in (temporary, old):
        _remove(stale)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        _sync(final.parent)
    finally:
        _remove(temporary)
        if old.exists() and not final.exists():
            old.rename(final)
        _remove(old)


def _remove(path: Path) -> None:
    """Remove a folder, or whatever else has its name, such as a link, but not what that leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    save_file(separate_tensors(checkpoint.tensors), folder / _TENSORS)
    (folder / _STATE).write_text(json.dumps(to_builtins(checkpoint.state), indent=1) + "\n", encoding="utf-8")
    (folder / _SUMS).write_bytes(_sums(folder))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's full state dict on the CPU (on the first process; all processes must call this)."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    tensors: dict[str, Any] = get_model_state_dict(model, options=options)
    return tensors


def gather_tensors(
    model: nn.Module, optimiser: Optimizer, ema: nn.Module | None = None
) -> tuple[dict[str, Tensor], OptimiserState]:
    """Collect the content of a checkpoint. Every process must call this; the first gets the tensors."""
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
    # The learning rate follows from the step, and is a tensor in a captured step: neither is part of the state.
    kept: list[dict[str, Any]] = optimised.get("param_groups", [])  # type: ignore[assignment]
    groups = [{key: value for key, value in group.items() if key not in ("lr", "capturable")} for group in kept]
    for number, group in enumerate(groups):  # Lamb counts its steps there, in a tensor
        for key in [key for key, value in group.items() if isinstance(value, Tensor)]:
            tensors[f"group/{number}/{key}"] = group.pop(key)
    return tensors, OptimiserState(groups, scalars)


def restore(checkpoint: Checkpoint, model: nn.Module, optimiser: Optimizer, ema: nn.Module | None) -> None:
    """Load a checkpoint's tensors into the model, the optimiser and the moving average, on every process."""
    stored, tensors = checkpoint.state.optimiser, checkpoint.tensors
    moments: dict[str, dict[str, Any]] = {name: dict(values) for name, values in stored.scalars.items()}
    for path, value in _under(tensors, "optimiser/").items():
        name, _, key = path.rpartition("/")
        moments.setdefault(name, {})[key] = value
    now: list[dict[str, Any]] = get_state_dict(model, optimiser)[1]["param_groups"]  # type: ignore[assignment]
    here = {
        name: {key: group[key] for key in ("lr", "capturable") if key in group}
        for group in now
        for name in group["params"]
    }
    groups = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()} | here[group["params"][0]]
        for group in stored.groups
    ]
    for path, value in _under(tensors, "group/").items():
        number, _, key = path.partition("/")
        groups[int(number)][key] = value
    optimised: dict[str, Any] = {"state": moments, "param_groups": groups}
    weights: dict[str, Any] = dict(_under(tensors, "model/"))
    # A sharded model is given the full tensors, of which each process takes its part.
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=optimised, options=options)
    if ema is not None:
        ema.load_state_dict(_under(tensors, "ema/"))


def all_finite(model: nn.Module) -> bool:
    """Whether no weight is NaN or infinite."""
    values = [p.detach() for p in model.parameters() if p.is_floating_point()]
    norms = torch.stack([value.to_local().norm() if hasattr(value, "to_local") else value.norm() for value in values])
    return bool(norms.isfinite().all())


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
