"""Conventions of the command line: fast help, plain text in pipes, complete files after Ctrl-C, true measurements."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import timm
from helpers.processes import command, start
from helpers.train_tools import TINY
from PIL import Image

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core.files import write_text
from vitfocus.data.shapes.layouts import write_layout
from vitfocus.train import load_recipe, train

MODEL = "vit_tiny_patch16_224"


def test_help_is_quick() -> None:
    """In under 0.7 seconds; the fastest of three, since other programs run too."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        shown = subprocess.run([sys.executable, "-m", "vitfocus"], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.7 and len(shown.stdout.splitlines()) < 30


def test_help_and_version_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    assert "diagnose" in json.loads(capsys.readouterr().out)["commands"]
    assert main(["--version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("terminal", "no_color"), [(True, False), (True, True), (False, False)])
def test_colours_only_on_terminals(terminal: bool, no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    shown = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["bench", MODEL, "--size", "32", "--batch-size", "1", "--rounds", "1", "--mode", "infer"]) == 0
    escapes = re.findall(r"\x1b\[([\d;]*)m", shown.getvalue())
    coloured = [code for code in escapes if re.search(r"(^|;)(3[0-8]|4[0-8]|9[0-7]|10[0-7])($|;)", code)]
    assert bool(escapes) == terminal and not (no_color and coloured)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_narrow_terminals_do_not_cut_numbers(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "40")
    for words in (["diagnose", MODEL, "--limit", "1"], ["reproduce", "cb/table3a", "--count"]):
        shown = Terminal()
        monkeypatch.setattr(sys, "stdout", shown)
        assert main(words) == 0
        plain = re.sub(r"\x1b\[[\d;]*m", "", shown.getvalue())
        assert "…" not in plain and ("overfocus" in plain or "FLOPs added [M]" in plain)
        assert words[0] != "diagnose" or max(map(len, plain.splitlines())) <= 40  # columns continue below


def test_models_without_an_explorer_are_still_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    small = {"img_size": 56, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
    vf.save(timm.create_model("swin_tiny_patch4_window7_224", **small), tmp_path / "model")
    out = tmp_path / "out"
    assert main(["diagnose", str(tmp_path / "model"), "--limit", "1", "--out", str(out), "--explore"]) == 0
    assert "window" in shown.getvalue() and "nothing to explore" in capsys.readouterr().err
    assert {"diagnosis.json", "report.html"} <= set(readable(out))
    saved = (out / "diagnosis.txt").read_text(encoding="utf-8")
    assert "\x1b" in shown.getvalue() and "\x1b" not in saved, "files stay plain, whatever the terminal"


def readable(folder: Path) -> list[str]:
    """The names of all files below a folder, each of which opens as what it claims to be."""
    for file in folder.rglob("*"):
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".npz":
            with np.load(file) as content:
                assert all(content[name] is not None for name in content.files)
        elif file.suffix == ".png":
            with Image.open(file) as picture:
                picture.load()
        assert not file.name.startswith("."), f"{file.name} was left behind"
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("write", [1, 3])
def test_ctrl_c_while_a_file_is_written(write: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vitfocus.core.files

    real, calls = vitfocus.core.files.os.fsync, 0

    def interrupted(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == write:
            raise KeyboardInterrupt
        real(handle)

    monkeypatch.setattr(vitfocus.core.files.os, "fsync", interrupted)
    words = ["diagnose", MODEL, "--limit", "1", "--out", str(tmp_path / "out")]
    assert main(words) == 130
    assert readable(tmp_path / "out") == [], "the files of a diagnosis belong together"


def save_often(*words: str) -> int:
    """A command that saves partial results at every chance."""
    from vitfocus.robustness import engine

    engine.SAVE_EVERY = 0.0
    return command(*words)


def test_ctrl_c_in_the_middle_of_an_evaluation(tmp_path: Path) -> None:
    data, out = write_layout(tmp_path / "data", "imagefolder", 0, val_count=300, size=32), tmp_path / "out"
    index = tmp_path / "index.json"
    index.write_text(
        json.dumps({folder.name: number for number, folder in enumerate(sorted((data / "val").iterdir()))})
    )
    words = ["evaluate", MODEL, "--suite", "imagenet-c", "--data", str(data / "val"), "--index", str(index)]
    few = ["--corruptions", "gaussian_noise", "fog"]  # of a batch, so that it is soon done
    run = start(save_often, *words, "--out", str(out), "--batch-size", "1", *few)
    deadline = time.monotonic() + 120
    while not list(out.glob("parts/*.npz")) and run.process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.error
    assert "Traceback" not in run.error and "use --resume" in run.error
    assert "protocol.json" in readable(out) and not (out / "results.json").exists()


def test_bench_measures_time_memory_and_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", MODEL, "--size", "32x48", "--batch-size", "2", "--rounds", "2", "--json"]
    assert main([*words, "--treat", "cbs", "--treat", "tap", "--treat", "uniform"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in result["rows"]}
    assert result["size"] == [32, 48] and set(rows) == {"plain", "cbs", "tap", "uniform"}
    assert rows["plain"]["time_ratio"] == rows["plain"]["memory_ratio"] == 1.0
    assert rows["cbs"]["parameters"] - rows["plain"]["parameters"] == 12 * 192
    assert all(0 < row["milliseconds"] <= row["milliseconds_median"] for row in rows.values())
    assert rows["tap"]["megabytes"] > rows["plain"]["megabytes"]
    # Weights and AdamW's two moments are held, and gradients are a part of the peak.
    assert rows["plain"]["megabytes"] > 4 * 4 * rows["plain"]["parameters"] / 2**20


def test_bench_says_what_it_cannot_measure(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "mixer_s32_224", "--mode", "infer", "--batch-size", "1", "--rounds", "1", "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert "tap" in [row["name"] for row in result["refused"]] and "cb" in [row["name"] for row in result["rows"]]
    for wrong, said in (
        (["--size", "12y"], "512x1024"),
        (["--rounds", "0"], "--rounds: expected"),
        (["--treat", "tpa"], "tap"),
        (["--treat", ""], "--treat is empty"),
        (["--treat", "cb", "--treat", "cb(layers=[99])"], "There is no treatable block 99"),
    ):
        assert main(["bench", MODEL, *wrong]) == 2
        assert said in capsys.readouterr().err


def test_memory_is_what_was_allocated() -> None:
    import torch
    from torch import nn

    from vitfocus.treatments.cost import compare_steps

    class Hungry(nn.Module):
        def __init__(self, megabytes: int) -> None:
            super().__init__()
            self.weight, self.count = nn.Parameter(torch.ones(1)), megabytes * 2**18

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + torch.zeros(self.count).sum()

    models = {"small": Hungry(8), "large": Hungry(24)}
    rows = compare_steps(models, torch.ones(1, 1), mode="infer", rounds=1, warmup=0)
    assert rows[0]["megabytes"] == pytest.approx(8, rel=0.01) and rows[1]["megabytes"] == pytest.approx(24, rel=0.01)


def test_a_terminal_without_unicode_gets_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["diagnose", MODEL, "--limit", "1", "--treat", "cb"]) == 0
    sys.stdout.flush()
    assert b"Layers 0" in shown.getvalue() and b"\\u2013" in shown.getvalue()


def test_unwritable_output_is_reported_before_any_slow_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["diagnose", MODEL, "--limit", "1", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert str(out) in error and "Reading" not in error and len(error.splitlines()) == 1
    for words, reason in ((["--images", "0"], "at least 1"), (["--treat", ""], "--treat is empty")):
        assert main(["demo", "--out", str(tmp_path / "demo"), *words]) == 2
        assert reason in capsys.readouterr().err and not (tmp_path / "demo").exists()
    for words in (["diagnose", MODEL], ["evaluate", MODEL, "--suite", "clean", "--data", "shapes:2"]):
        assert main([*words, "--device", "meta"]) == 2
        assert "'meta' stores no values: expected cpu" in capsys.readouterr().err


def test_error_for_an_invalid_weights_file_suggests_no_unsafe_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("not weights")
    assert main(["diagnose", MODEL, "--weights", str(tmp_path / "notes.txt")]) == 2
    error = capsys.readouterr().err
    assert "not a file of weights" in error and "weights_only" not in error


@pytest.mark.parametrize("sizes", [["size=24"], ["size=16", "enlarge=24"]])
def test_shapes_are_drawn_as_large_as_the_model_takes_them(
    sizes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train(load_recipe("shapes", [*TINY, *sizes, "epochs=0.2", "warmup_epochs=0"]), out=tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["models"]["run"]
    assert scores["top1"] == pytest.approx(100 * trained["last"]["top1"])
    assert main(["evaluate", str(tmp_path / "run" / "model"), "--suite", "clean", "--data", "shapes:3"]) == 0
    assert main(["report", str(tmp_path / "run"), "--out", f"{tmp_path / 'pages'}/"]) == 0  # a folder, and says so
    (tmp_path / "notes.txt").write_text("kept")
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "notes.txt")]) == 2
    assert (tmp_path / "notes.txt").read_text() == "kept"
    assert (tmp_path / "pages" / "report.html").is_file()
    capsys.readouterr()
    assert main(["diagnose", f"{tmp_path / 'run'}+cb"]) == 2 and "--treat cb" in capsys.readouterr().err


def test_undecodable_names_are_escaped(tmp_path: Path) -> None:
    write_text(tmp_path / "a.html", "caf\udce9")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == "caf\\udce9"
    write_text(tmp_path / ("x" * 250), "whole")
    assert (tmp_path / ("x" * 250)).read_text() == "whole"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["diagnose", MODEL, "--out", ""], "--out"),
        (["evaluate", MODEL, "--data", ""], "--data"),
        (["evaluate", "", "--suite", "clean"], "MODEL"),
        (["bench", MODEL, "--treat", ""], "--treat"),
        (["train", "shapes", ""], "key=value"),
        (["models", ""], "pattern"),
        (["demo", "--out", ""], "--out"),
    ],
)
def test_empty_text_does_not_count_as_absent(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As an unset variable of the shell gives it."""
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f"vitfocus: {name} is empty: give it a value, or leave it out.\n")


@pytest.mark.parametrize("number", ["²", "٣", "1_0", "0x1", "1e3", "9" * 5000, "nan"])
def test_whole_numbers_are_plain_digits(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--limit", number], ["--seed", number], ["--severities", "1", number]):
        assert main(["evaluate", "vit_tiny_patch16_224", "--suite", "imagenet-c", "--data", "shapes:4", *words]) == 2
        assert "expected a whole number" in capsys.readouterr().err, words
    if number == "nan":
        for size in (number, "-1", "0", "x", "1_0", "inf", "٣"):
            for words in (
                ["diagnose", "vit_tiny_patch16_224", "--explore", "--budget", size],
                ["demo", "--epochs", size],
            ):
                assert main([*words, "--out", "x"]) == 2
                assert "expected a number above 0" in capsys.readouterr().err
