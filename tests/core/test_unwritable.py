"""What cannot be written is one sentence in every verb that writes, and what was saved there before is kept."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import build

import vitfocus as vf
from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.core import files
from vitfocus.core.errors import VitfocusError
from vitfocus.robustness.results import Scores
from vitfocus.train import train

DIAGNOSIS = Diagnosis([{"layer": 0, "name": "blocks.0", "entropy": 4.2}], "vit", images=2, size=(64, 64))
SCORES = Scores("clean", 2, {"vit": {"top1": 50.0, "cells": {}}}, samples={"clean": {"vit": {"top1": torch.ones(2)}}})


def _report(place: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        DIAGNOSIS.save(run)
        vf.report(run, out=place / "report.html")


def _explore(place: Path) -> None:
    vf.explore(build("vit")[0], torch.zeros(1, 3, 64, 64, dtype=torch.uint8), None, out=place / "explorer.html")


WRITERS: dict[str, Callable[[Path], Any]] = {
    "save": lambda place: vf.save(build("vit")[0], place),
    "treatments": lambda place: vf.save(vf.treat_(build("vit")[0], "cbs"), place, only="treatments"),
    "diagnosis": DIAGNOSIS.save,
    "scores": SCORES.save,
    "report": _report,
    "explore": _explore,
    "train": lambda place: train("shapes", out=place, overrides=["device=cpu"]),
}
PLACES: dict[str, Callable[[Path], Path]] = {
    "below a file": lambda file: file / "a" / "b",
    "a long name": lambda file: file.parent / ("x" * 300) / "a",
    "a folder that the system refuses": lambda file: Path("/proc/vitfocus/a"),  # to root as well
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_place_that_cannot_be_written(writer: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(VitfocusError) as error:
        WRITERS[writer](PLACES[place](tmp_path / "file"))
    assert "Errno" not in str(error.value) and str(error.value).endswith(".")
    if place == "below a file":
        assert str(tmp_path / "file") in str(error.value)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("written", range(4))
@pytest.mark.parametrize("writer", ["save", "diagnosis", "scores"])
def test_files_that_belong_together_are_replaced_together(
    writer: str, written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after some of the files: none is replaced."""
    WRITERS[writer](tmp_path / "a")
    before = _snapshot(tmp_path / "a")
    for path in (tmp_path / "a").iterdir():
        path.write_bytes(b"old")
    real, count = Path.write_bytes, iter(range(10))

    def full(path: Path, content: bytes) -> int:
        real(path, content[:5])
        if next(count) >= written:
            raise OSError(28, "No space left on device")
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    try:
        WRITERS[writer](tmp_path / "a")
    except VitfocusError as error:
        assert "cannot be written: No space left on device." in str(error)
        assert _snapshot(tmp_path / "a") == dict.fromkeys(before, b"old")
    else:
        assert _snapshot(tmp_path / "a").keys() == before.keys() and b"old" not in _snapshot(tmp_path / "a").values()


def test_an_error_of_a_file_that_is_read_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"), files.atomic_path(tmp_path / "copy") as path:
        path.write_bytes((tmp_path / "nowhere").read_bytes())
    with (
        pytest.raises(files.NotWritten, match="copy cannot be written: No such file"),
        files.atomic_path(tmp_path / "copy") as path,
    ):
        path.unlink()
        path.open("rb+")
    assert not list(tmp_path.iterdir())
