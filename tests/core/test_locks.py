"""The lock of a folder: one process at a time, named to the next, and released by the death of its owner."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from helpers.processes import start
from helpers.train_tools import TINY, tiny

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError, VitfocusWarning
from vitfocus.core.files import LOCK, lock_folder
from vitfocus.train import train


def hold(folder: Path, told: Path) -> None:
    """Lock the folder, fork a process that outlives this one, and wait to be killed."""
    with lock_folder(folder):
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        told.with_suffix(".new").write_text(str(child))
        told.with_suffix(".new").rename(told)
        time.sleep(60)


def test_a_lock_names_its_owner_and_ends_with_it(tmp_path: Path) -> None:
    folder, told = tmp_path / "run", tmp_path / "told"
    holder = start(hold, folder, told)
    while not told.exists():
        assert holder.process.is_alive(), holder.error
        time.sleep(0.02)
    owner = re.escape(f"{folder} is in use by process {holder.process.pid} on {socket.gethostname()} since 2")
    for _ in range(2):
        with pytest.raises(VitfocusError, match=owner), lock_folder(folder):
            pass
    holder.process.kill()
    assert holder.wait() == -signal.SIGKILL
    child = int(told.read_text())
    os.kill(child, 0)  # it is alive, and does not keep the lock
    try:
        with lock_folder(folder):
            assert f"process {os.getpid()} on" in (folder / LOCK).read_text()
    finally:
        os.kill(child, signal.SIGKILL)
    assert not any(folder.iterdir())


def test_a_folder_that_was_made_for_nothing_is_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock_folder(tmp_path / "run"):
        raise KeyError
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to", "mkfifo", "mkdir"])
def test_a_lock_file_that_is_something_else_is_refused_and_left_alone(kind: str, tmp_path: Path) -> None:
    precious, lock = tmp_path / "precious", tmp_path / "run" / LOCK
    precious.write_text("content")
    lock.parent.mkdir()
    if kind == "mkfifo":
        os.mkfifo(lock)
    else:
        getattr(lock, kind)(*([precious] if "link" in kind else []))
    with pytest.raises(VitfocusError, match=r"cannot be kept in|is not a lock file"), lock_folder(lock.parent):
        pass
    assert precious.read_text() == "content" and os.path.lexists(lock)


def test_a_file_system_without_locks_is_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(VitfocusWarning, match="cannot be locked on this file system"), lock_folder(tmp_path):
        assert not any(tmp_path.iterdir())


def test_diagnoses_and_the_demo_lock_their_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gallery locks its own folder and that of each model."""
    model = "vit_tiny_patch16_224"
    words = ["--limit", "1", "--device", "cpu", "--out", str(tmp_path)]
    with lock_folder(tmp_path):
        for command in (["diagnose", model, *words], ["diagnose", model, model, *words], ["demo", *words[-2:]]):
            assert main(command) == 2 and f"{tmp_path} is in use by process" in capsys.readouterr().err
    with lock_folder(tmp_path / model):
        assert main(["diagnose", model, f"{model}+cb", *words]) == 2
        assert f"{tmp_path / model} is in use by process" in capsys.readouterr().err
    assert not (tmp_path / model / "diagnosis.json").exists()
    assert (tmp_path / f"{model}+cb" / "diagnosis.json").exists()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "parts"])
def test_a_link_in_a_run_folder_leads_no_file_out_of_it(name: str, tmp_path: Path) -> None:
    """A run folder from somebody else, which is resumed."""
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    (elsewhere / "clean.00000000.0.npz").write_bytes(b"not a part")
    run.mkdir()
    (run / "metrics.jsonl").touch()
    (run / name).symlink_to(elsewhere)
    with pytest.raises(VitfocusError, match=f"{name}.* is behind a link out of "):
        if name == "parts":
            model = vf.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
            data = torch.utils.data.TensorDataset(torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))
            vf.evaluate(model, "clean", data, out=run, resume=True, device="cpu", workers=0, progress=False)
        else:
            train(tiny("epochs=1", "tensorboard=true"), run, resume="auto")
    assert [file.name for file in elsewhere.iterdir()] == ["clean.00000000.0.npz"]


@pytest.mark.parametrize("command", [["train", "shapes", *TINY, "epochs=1"], ["demo", "--treat", "nonsense"]])
@pytest.mark.parametrize("resume", [[], ["--resume", "auto"]])
def test_a_folder_of_other_files_is_refused(
    command: list[str], resume: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a killed run left before it wrote anything is not in the way; a run that was begun is."""
    out = tmp_path / "mine"
    out.mkdir()
    words = [*command, *(resume if command[0] == "train" else []), "--out", str(out)]
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (out / name).write_text("precious")
    assert main(words) == 2
    said = (
        f"{out} holds a.txt, b.txt, c.txt, 1 more and no run of vitfocus {command[0]}: name a new folder, such as "
        f"{out / command[0]}."
    )
    assert said in capsys.readouterr().err
    assert {path.read_text() for path in out.iterdir()} == {"precious"} and len(list(out.iterdir())) == 4
    for path in out.iterdir():
        path.unlink()
    (out / ".lock").write_text("process 1")
    (out / ".vitfocus-metrics.jsonl.abc").write_text("")
    for name in (".DS_Store", "train.log", "slurm-1.out", "slurm-1.err"):  # the system's, or the job's own
        (out / name).touch()
    reached = main(words)
    error = capsys.readouterr().err
    if command[0] == "demo":  # which is refused for its treatment, later
        assert reached == 2 and "nonsense" in error
        return
    assert reached == 0
    assert main(words) == (0 if resume else 2)
    assert ("nothing is left to do" if resume else "holds a run already") in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "vit_tiny_patch16_224", "--suite", "clean", "--data", "shapes:2"],
        ["diagnose", "vit_tiny_patch16_224", "--limit", "1"],
        ["diagnose", "vit_tiny_patch16_224", "vit_tiny_patch16_224+cb", "--limit", "1"],
    ],
)
def test_evaluations_and_diagnoses_refuse_a_folder_of_other_files(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed run is not in the way: it has its lock and, of several models, the folder of the first."""
    words = [*command, "--device", "cpu", "--out", str(tmp_path)]
    (tmp_path / "report.html").write_text("precious")
    assert main(words) == 2
    new = tmp_path / command[0]
    said = f"{tmp_path} holds report.html and no run of vitfocus {command[0]}: name a new folder, such as {new}."
    assert said in capsys.readouterr().err and (tmp_path / "report.html").read_text() == "precious"
    (tmp_path / "report.html").unlink()
    if len(command) == 5 and command[0] == "diagnose":
        (tmp_path / command[1]).mkdir()
    torch.manual_seed(0)  # the weights of the model
    assert main(words) == 0
    (tmp_path / "notes.txt").write_text("mine")
    torch.manual_seed(0)
    assert main([*words, "--resume"] if command[0] == "evaluate" else words) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_keeps_its_folder_and_has_others_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run, a measurement and a gallery would overwrite each other's card and report."""
    train(tiny("epochs=1"), tmp_path / "run")
    model, other = str(tmp_path / "run" / "model"), "vit_tiny_patch16_224"
    diagnose, evaluate = ["diagnose", model, "--limit", "1"], ["evaluate", model, "--suite", "clean"]
    evaluate += ["--data", "shapes:2"]
    for words, out in [
        (diagnose, "run"),
        (evaluate, "run"),
        ([*diagnose, other], ""),
        ([*diagnose, "--against", "nonsense"], "new"),
        (["diagnose", str(tmp_path / "absent" / "model")], "new"),
    ]:
        before = sorted(tmp_path.rglob("*"))
        assert main([*words, "--device", "cpu", "--out", str(tmp_path / out)]) == 2
        assert sorted(tmp_path.rglob("*")) == before
        error = capsys.readouterr().err
        expected = f"name a new folder, such as {tmp_path / 'run' / words[0]}." if out != "new" else "here is no"
        assert expected in error
    for words in (diagnose, evaluate):
        assert main([*words, "--device", "cpu", "--out", str(tmp_path / "run" / words[0])]) == 0
    assert main([*diagnose, "--device", "cpu", "--out", str(tmp_path / "run")]) == 2  # still
