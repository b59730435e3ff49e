"""The folder of an evaluation run: partial results, written atomically, and the final results.

All tasks share one format. A part contains the outcomes of some images in one group of conditions: `positions` and one
column per condition, model and value. Columns are numeric arrays with one entry per image, or lines of text (JSON).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitfocus.core.environment import Processes
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import (
    DAMAGED,
    atomic_path,
    atomic_paths,
    encoded,
    open_file,
    require_run_folder,
    writable_path,
    write_text,
)
from vitfocus.core.records import read_json

Columns = dict[str, npt.NDArray[Any]]  # one entry per image, in order of position

RESULTS, SAMPLES, PROTOCOL, PARTS = "results.json", "samples.npz", "protocol.json", "parts"

#: Parts of the fingerprint that two comparable runs may differ in: what is being compared, and where it ran.
MAY_DIFFER = ("models", "environment")


class RunFolder:
    """`protocol.json` (the fingerprint), `parts/*.npz` while running; `results.json` and `samples.npz` when done."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def finished(self) -> bool:
        return (self.folder / RESULTS).is_file()

    def begin(self, fingerprint: dict[str, Any], resume: bool) -> None:
        """Claim the folder for a new run, or check that it contains a part of the same run."""
        known = self.folder / PROTOCOL
        require_run_folder(self.folder, (PROTOCOL, RESULTS, PARTS), "vitfocus evaluate")
        writable_path(self.folder / PARTS, folder=True)
        if known.is_file():
            if not resume:
                raise VitfocusError(
                    f"{self.folder} already holds a run: resume it with the option resume, or choose another folder."
                )
            changed = differences(read_json(known, dict[str, Any]), fingerprint)
            if changed:
                raise VitfocusError(
                    f"{self.folder} holds another run, which cannot be resumed; it differs in {'; '.join(changed)}."
                )
            if self.finished:  # and perhaps killed before its parts were removed
                shutil.rmtree(self.folder / PARTS, ignore_errors=True)
            return
        if (self.folder / RESULTS).exists() or (self.folder / PARTS).exists():
            raise VitfocusError(
                f"{self.folder} holds files of a run but no {PROTOCOL}: name a new folder, such as "
                f"{self.folder / 'evaluate'}."
            )
        write_text(known, json.dumps(fingerprint, indent=2) + "\n")

    def release(self) -> None:
        """Release the folder if nothing was measured, so that a run that failed early can be repeated."""
        if not self.finished and not (self.folder / PARTS).exists():
            (self.folder / PROTOCOL).unlink(missing_ok=True)

    def write_part(self, group: str, columns: Columns) -> None:
        name = f"{_slug(group)}.{int(columns['positions'].min()):08d}"
        number = len(list((self.folder / PARTS).glob(f"{name}.*")))  # a resumed run may measure an image again
        with atomic_path(self.folder / PARTS / f"{name}.{number}.npz") as path:
            np.savez(path, **{name: _encoded(values) for name, values in columns.items()})  # type: ignore[arg-type]

    def read_parts(self, group: str) -> list[Columns]:
        """Everything saved of one group; a damaged part counts as not done."""
        parts = []
        for path in sorted((self.folder / PARTS).glob(f"{_slug(group)}.[0-9]*.npz")):
            try:
                with open_file(path) as file, np.load(file) as content:
                    parts.append({name: _decoded(content[name]) for name in content.files})
            except DAMAGED:
                path.unlink(missing_ok=True)
        return parts

    def finish(self, results: dict[str, Any], columns: Columns) -> None:
        """Write the results and remove the parts."""
        with atomic_paths([self.folder / SAMPLES, self.folder / RESULTS]) as [samples, path]:
            with samples.open("wb") as file:
                np.savez_compressed(file, **columns)  # type: ignore[arg-type]
            path.write_bytes(encoded(json.dumps(results, indent=2) + "\n"))
        shutil.rmtree(self.folder / PARTS, ignore_errors=True)


def _encoded(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Text as bytes, since arrays of objects would need pickle."""
    return np.frombuffer("\n".join(values).encode(), "S1") if values.dtype == object else values


def _decoded(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.array(values.tobytes().decode().split("\n"), object) if values.dtype.kind == "S" else values


@contextmanager
def claim_folder(
    out: str | Path, fingerprint: dict[str, Any], resume: bool, processes: Processes
) -> Iterator[RunFolder]:
    """The folder of a run, after checking that it contains no other run; the first process decides for all.

    It is released if the run fails before anything was measured.
    """
    folder = RunFolder(out)
    problem = None
    if processes.first:
        try:
            folder.begin(fingerprint, resume)
        except VitfocusError as error:
            problem = str(error)
    problem = processes.broadcast(problem)
    if problem is not None:
        raise VitfocusError(problem)
    try:
        yield folder
    except BaseException:
        if processes.first:
            folder.release()
        raise


def differences(first: Mapping[str, Any], second: Mapping[str, Any], ignored: tuple[str, ...] = ()) -> list[str]:
    """Where two fingerprints differ, as short phrases.

    >>> differences({"seed": 0, "data": {"digest": "a"}}, {"seed": 1, "data": {"digest": "a"}, "limit": 5})
    ['limit (absent | 5)', 'seed (0 | 1)']
    """
    one, two = (dict(flat_settings(one, ignored)) for one in (first, second))
    absent = "absent"
    return [
        f"{key} ({_short(one.get(key, absent))} | {_short(two.get(key, absent))})"
        for key in sorted(one.keys() | two.keys())
        if one.get(key, absent) != two.get(key, absent)
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def flat_settings(content: Mapping[str, Any], ignored: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Nested settings as (dotted name, value), without those whose first part is `ignored`."""
    for key, value in content.items():
        if key in ignored:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in flat_settings(value))
        else:
            yield key, list(value) if isinstance(value, tuple) else value


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "__", name)
