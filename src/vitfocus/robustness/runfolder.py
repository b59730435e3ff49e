"""A run's folder: what has been measured so far, in parts that appear whole or not at all, and the finished results."""

from __future__ import annotations

import json
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import atomic_path, write_text
from vitfocus.core.processes import Processes
from vitfocus.robustness.fingerprint import differences
from vitfocus.robustness.plan import Columns

#: What numpy raises for an archive that was cut off or changed.
DAMAGED = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)
RESULTS, SAMPLES, PROTOCOL, PARTS = "results.json", "samples.npz", "protocol.json", "parts"

KEEP_EVERY = 20.0
"""Seconds of work that a crash may cost."""


class RunFolder:
    """`protocol.json` (the fingerprint), `parts/*.npz` while running; `results.json` and `samples.npz` when done."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def finished(self) -> bool:
        """Whether the results are there."""
        return (self.folder / RESULTS).is_file()

    def begin(self, fingerprint: dict[str, Any], resume: bool) -> None:
        """Claim the folder for a run, or check that what lies there is a part of the same run."""
        if self.folder.exists() and not self.folder.is_dir():
            raise VitfocusError(f"{self.folder} is a file; a run is kept in a folder.")
        known = self.folder / PROTOCOL
        if known.is_file():
            if not resume:
                raise VitfocusError(
                    f"{self.folder} already holds a run: resume it (resume=True, --resume), or name another folder."
                )
            changed = differences(read_json(known), fingerprint)
            if changed:
                raise VitfocusError(
                    f"{self.folder} holds another run, which cannot be resumed; these differ: {'; '.join(changed)}."
                )
            return
        if (self.folder / RESULTS).exists() or (self.folder / PARTS).exists():
            raise VitfocusError(f"{self.folder} holds files of a run but no {PROTOCOL}; name another folder.")
        try:
            write_text(known, json.dumps(fingerprint, indent=2) + "\n")
        except OSError as error:
            raise VitfocusError(f"The run cannot be kept in {self.folder}: {error.strerror or error}.") from None

    def release(self) -> None:
        """Give the folder up again, where nothing was kept in it: a run that failed at once is in nobody's way."""
        if not self.finished and not (self.folder / PARTS).exists():
            (self.folder / PROTOCOL).unlink(missing_ok=True)

    def write_part(self, group: str, columns: Columns) -> None:
        """Keep some images' outcomes of one group."""
        first = int(columns["positions"].min())
        with atomic_path(self.folder / PARTS / f"{_slug(group)}.{first:08d}.npz") as path:
            np.savez(path, **columns)  # type: ignore[arg-type]

    def read_parts(self, group: str) -> list[Columns]:
        """Everything kept of one group; a damaged part counts as not done."""
        parts = []
        for path in sorted((self.folder / PARTS).glob(f"{_slug(group)}.[0-9]*.npz")):
            try:
                with np.load(path) as content:
                    parts.append({name: content[name] for name in content.files})
            except (*DAMAGED, KeyError):
                path.unlink(missing_ok=True)
        return parts

    def write_state(self, name: str, arrays: Columns) -> None:
        """Keep how far a pass has come, in place of what was kept of it before."""
        with atomic_path(self.folder / PARTS / f"{_slug(name)}.state.npz") as path:
            np.savez(path, **arrays)  # type: ignore[arg-type]

    def read_state(self, name: str) -> Columns | None:
        """How far a pass had come; None where it had not begun, or what was kept is damaged."""
        path = self.folder / PARTS / f"{_slug(name)}.state.npz"
        try:
            with np.load(path) as content:
                return {name: content[name] for name in content.files}
        except (*DAMAGED, KeyError):
            return None

    def finish(self, results: dict[str, Any], columns: Columns) -> None:
        """Write the results, then drop the parts they were made of."""
        with atomic_path(self.folder / SAMPLES) as path:
            np.savez_compressed(path, **columns)  # type: ignore[arg-type]
        write_text(self.folder / RESULTS, json.dumps(results, indent=2) + "\n")
        shutil.rmtree(self.folder / PARTS, ignore_errors=True)


def claimed(
    out: str | Path | None, fingerprint: dict[str, Any], resume: bool, processes: Processes
) -> RunFolder | None:
    """The run's folder, once it is sure that it holds nothing else; the first process decides for all."""
    if out is None:
        if resume:
            raise VitfocusError("There is nothing to resume without a run's folder: name it with out (--out).")
        return None
    folder = RunFolder(out)
    problem = None
    if processes.first:
        try:
            folder.begin(fingerprint, resume)
        except VitfocusError as error:
            problem = str(error)
    problem = processes.agree(problem)
    if problem is not None:
        raise VitfocusError(problem)
    return folder


@contextmanager
def keeping(keep: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Gives a function to call after every batch, which keeps what is new now and then; the end, of any kind, does too.

    >>> done = []
    >>> with keeping(lambda: done.append("kept")) as now_and_then:
    ...     now_and_then()
    >>> done
    ['kept']
    """
    last = time.monotonic()

    def now_and_then() -> None:
        nonlocal last
        if time.monotonic() - last > KEEP_EVERY:
            keep()
            last = time.monotonic()

    try:
        yield now_and_then
    finally:
        keep()


def read_json(path: Path) -> dict[str, Any]:
    """A json file's content, or a sentence."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise VitfocusError(f"There is no {path}: {path.parent} is not a finished run.") from None
    except (OSError, ValueError) as error:
        raise VitfocusError(f"{path} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise VitfocusError(f"{path} holds no results.")
    return content


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "__", name)
