"""Checkpoints that a crash, a full disk or a flipped bit cannot turn into a lost run.

A checkpoint is a folder, `checkpoints/00001200`, with tensors as safetensors and the rest as JSON, which holds the
tensors' SHA-256. It is written under another name and renamed when whole; older ones go only after that. There are no
random states in it: every draw of a run follows from the seed and the step's number.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitfocus.core.contents import check_contents
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import digest

_TENSORS, _REST = "state.safetensors", "state.json"

#: The shape of state.json.
_RECORD = {"best": dict, "last": dict, "seconds": float, "window": [float], "window_steps": int}
_OPTIMISER = {"groups": [dict], "scalars": {"*": dict}}
_SHAPE = {
    **{"step": int, "sha256": str, "recipe": str, "images": int},
    **{"record": _RECORD, "optimiser": _OPTIMISER, "scaler": dict},
}


@dataclass
class State:
    """A run at one step: tensors by name, and everything else as JSON has it."""

    step: int
    tensors: dict[str, Tensor]
    rest: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, the newest few kept."""

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep

    def steps(self) -> list[int]:
        """The steps that have one, newest first."""
        names = [path.name for path in self.folder.glob("*") if path.name.isdigit()] if self.folder.is_dir() else []
        return sorted(map(int, names), reverse=True)

    def write(self, state: State) -> Path:
        """Write one, whole or not at all; raises `VitfocusError` where it cannot be, the others untouched."""
        final = self.folder / f"{state.step:08d}"
        try:
            replace_folder(final, lambda folder: _write(folder, state))
        except (OSError, SafetensorError) as error:
            last = self.steps()
            where = f"the last one, of step {last[0]}, is untouched" if last else "there is none yet"
            raise VitfocusError(f"The checkpoint of step {state.step} cannot be written ({error}); {where}.") from None
        for step in self.steps()[self.keep :]:
            shutil.rmtree(self.folder / f"{step:08d}", ignore_errors=True)
        return final

    def newest(self, say: Callable[[str], None] = print) -> State | None:
        """The newest that is whole; says which ones are not."""
        for step in self.steps():
            try:
                return read_checkpoint(self.folder / f"{step:08d}")
            except VitfocusError as error:
                say(f"{error} Trying the one before.")
        return None


def read_checkpoint(folder: str | Path) -> State:
    """Read and verify one."""
    folder = Path(folder)
    if not (folder / _REST).is_file():
        near = [*folder.glob("[0-9]*"), *folder.glob("checkpoints/[0-9]*")]
        found = next((path for path in sorted(near, reverse=True) if (path / _REST).is_file()), None)
        hint = f"; {found} is one" if found else ""
        raise VitfocusError(f"{folder} is no checkpoint, which is a folder with {_TENSORS} and {_REST}{hint}.")
    try:
        rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
        check_contents(folder / _REST, rest, _SHAPE, "vitfocus train")
        if digest(folder / _TENSORS) != rest.pop("sha256"):
            raise VitfocusError(f"The checkpoint {folder} is damaged: its SHA-256 differs.")
        return State(rest.pop("step"), load_file(folder / _TENSORS), rest)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, VitfocusError):
            raise
        raise VitfocusError(f"The checkpoint {folder} cannot be read ({error!r}).") from None


def replace_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder that then takes the place of `final`; on failure nothing of it remains."""
    temporary, old = (final.with_name(f".{final.name}.{mark}") for mark in ("new", "old"))
    for stale in (temporary, old):
        shutil.rmtree(stale, ignore_errors=True)
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
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not final.exists():
            old.rename(final)
        shutil.rmtree(old, ignore_errors=True)


def _write(folder: Path, state: State) -> None:
    save_file(_own_memory(state.tensors), folder / _TENSORS)
    rest = {"step": state.step, "sha256": digest(folder / _TENSORS), **state.rest}
    (folder / _REST).write_text(json.dumps(rest, indent=1) + "\n", encoding="utf-8")


def _own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous and apart from each other, as safetensors wants them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        place = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return result


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
