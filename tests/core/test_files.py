"""Files are written only to new paths and regular files; what a killed process left is removed, not what is in use."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core import files
from vitfocus.train.checkpoint import replace_folder


def _append(path: Path) -> None:
    files.Appender(path).add(b"new")


def _atomic(path: Path) -> None:
    with files.atomic_path(path) as temporary:
        temporary.write_bytes(b"new")


WRITERS: list[Callable[[Path], None]] = [
    lambda path: files.write_text(path, "new"),
    lambda path: files.write_bytes(path, b"new"),
    _atomic,
    _append,
]


def _device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except OSError as error:
        pytest.skip(f"device nodes cannot be made here: {error}")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is limited to about 100 bytes
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


def _outward(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.write_text("old")
    path.symlink_to(elsewhere)


OTHERS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": _device,
    "a socket": _socket,
    "a link to a path that does not exist": lambda path: path.symlink_to(path.with_name("nowhere")),
    "a link out of its folder": _outward,
}


@pytest.mark.parametrize("writer", WRITERS, ids=["text", "bytes", "atomic", "append"])
@pytest.mark.parametrize("kind", OTHERS)
def test_only_regular_files_are_replaced(kind: str, writer: Callable[[Path], None], tmp_path: Path) -> None:
    target = tmp_path / "run" / "target"
    target.parent.mkdir()
    OTHERS[kind](target)
    before = target.lstat()
    if kind == "a FIFO":  # a reader, without which opening it to write would wait forever
        reader = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(vf.VitfocusError, match=f"target is {kind}; expected a regular file or a new path"):
        writer(target)
    if kind == "a FIFO":
        os.close(reader)
    assert (target.lstat().st_mode, target.lstat().st_ino) == (before.st_mode, before.st_ino)
    assert list(target.parent.iterdir()) == [target]
    if kind == "a link out of its folder":
        assert target.read_text() == "old"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file/below", "below cannot be written: .*file is not a folder"),
        ("dangling/below", "dangling is a link to a path that does not exist"),
        ("a\0b", "cannot be the name of a file"),
        ("\ud800", "cannot be the name of a file"),
        ("x" * 300, "cannot be written: File name too long"),
        ("loop", "cannot be written: Too many levels of symbolic links"),
    ],
)
def test_paths_that_cannot_be_written_are_told(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(vf.VitfocusError, match=said):
        files.write_text(tmp_path / name, "new")
    with pytest.raises(vf.VitfocusError), files.lock_folder(tmp_path / name):
        pass


@pytest.mark.parametrize("writer", WRITERS, ids=["text", "bytes", "atomic", "append"])
def test_new_paths_files_and_links_within_the_folder_are_written(
    writer: Callable[[Path], None], tmp_path: Path
) -> None:
    new, real, link = tmp_path / "new", tmp_path / "real", tmp_path / "link"
    real.touch()
    link.symlink_to(real)
    writer(new)
    writer(link)
    assert new.read_text() == real.read_text() == "new"
    assert link.is_symlink() and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("kind", ["a FIFO", "a file", "a link"])
def test_only_folders_are_replaced_by_folders(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "model"
    {"a FIFO": os.mkfifo, "a file": Path.touch, "a link": lambda path: path.symlink_to(tmp_path)}[kind](target)
    before = target.lstat().st_ino
    with pytest.raises(vf.VitfocusError, match=f"model is {kind}.*expected a folder or a new path"):
        replace_folder(target, lambda folder: (folder / "weights").touch())
    assert target.lstat().st_ino == before and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("report nowhere", "a regular file"),
        ("diagnose no_such_model", "a folder"),
        ("train no_such_recipe", "a folder"),
        ("evaluate no_such_model --suite imagenet-c", "a folder"),
        ("reproduce cb-table-1", "a folder"),
        ("demo", "a folder"),
    ],
)
def test_out_is_checked_first(words: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    os.mkfifo(out)
    assert main([*words.split(), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"vitfocus: {out} is a FIFO; expected {expected} or a new path.\n"
    assert stat.S_ISFIFO(out.lstat().st_mode)


def test_what_a_killed_run_left_is_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    killed = (
        "import os, signal, sys; from vitfocus.core.files import atomic_path\n"
        "with atomic_path(sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)"
    )
    for name in ("metrics.jsonl", "results.json"):
        subprocess.run([sys.executable, "-c", killed, str(tmp_path / name)], check=False)
    (tmp_path / ".metrics.jsonl.backup").touch()  # not a name that atomic_path makes
    assert len(list(tmp_path.glob(".vitfocus-*"))) == 2
    with files.atomic_path(tmp_path / "metrics.jsonl") as live:
        live.write_text("")
        with files.lock_folder(tmp_path):
            assert list(tmp_path.glob(".vitfocus-*")) == [live]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", ".metrics.jsonl.backup"}


def test_a_report_stays_in_the_folder_of_its_run(tmp_path: Path) -> None:
    """Links in a run folder of unknown origin: in the place of the page, and of the folder with its data."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    model = vf.create_model("vit_tiny_patch16_224", depth=1, img_size=32, embed_dim=24, num_heads=2)
    vf.diagnose(model, torch.rand(1, 3, 32, 32)).save(run)
    (run / "report.html").symlink_to(elsewhere)
    with pytest.raises(vf.VitfocusError, match=r"report\.html is a folder; expected a regular file"):
        vf.report(run)
    (run / "data").symlink_to(elsewhere)
    with files.confined(run), pytest.raises(vf.VitfocusError, match="is behind a link out of"):
        files.write_text(run / "data" / "a.js", "")
    assert not list(elsewhere.iterdir())
