"""Shell completion: the generated scripts, run by the shells that are installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from vitfocus.cli import COMMANDS, main
from vitfocus.cli.completion import SHELLS


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    file = folder / f"vitfocus.{shell}"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    return file


def test_every_option_of_every_command_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash", "--json"]) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    assert list(commands) == list(COMMANDS)
    assert all("--json" in command["options"] and "--help" in command["options"] for command in commands.values())
    assert "shapes" in commands["train"]["words"] and "cb/table4a" in commands["reproduce"]["words"]
    options = commands["evaluate"]["options"]
    assert {"imagenet-c", "list"} <= set(options["--suite"]) and "fog" in options["--corruptions"]
    assert {"cb", "cbs", "tap", "adl"} <= set(options["--treat"])


CASES = [
    ("vitfocus diag", {"diagnose"}),
    ("vitfocus evaluate m --suite imagenet-s", {"imagenet-sketch"}),
    ("vitfocus diagnose m --agai", {"--against"}),
    ("vitfocus diagnose m --against gaussian_noise/", {f"gaussian_noise/{severity}" for severity in range(1, 6)}),
    ("vitfocus train deit_ti_cb", {"deit_ti_cb", "deit_ti_cbs"}),
    ("vitfocus train shapes epochs=1 --resu", {"--resume"}),
    ("vitfocus diagnose m --treat tap --weights we", {"weights.pt"}),
    ("vitfocus train mine", {"mine.toml"}),
    ("vitfocus completion z", {"zsh"}),
]


def files(folder: Path, shell: str, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script, beside files that can be completed."""
    for name in ("weights.pt", "mine.toml"):
        (folder / name).touch()
    return script(shell, folder, capsys)


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = files(tmp_path, "bash", capsys)
    for typed, expected in CASES:
        words = typed.split(" ")
        ask = f"source {file}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_vitfocus; "
        answer = subprocess.run(
            ["bash", "-c", ask + 'printf "%s\\n" "${COMPREPLY[@]}"'], cwd=tmp_path, capture_output=True, text=True
        )
        assert set(answer.stdout.split()) == expected, (typed, answer.stderr)


def test_fish_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = files(tmp_path, "fish", capsys)
    for typed, expected in CASES:
        answer = subprocess.run(
            ["fish", "--no-config", "-c", f"source {file}; complete -C '{typed}'"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert {line.split("\t")[0] for line in answer.stdout.splitlines()} == expected, (typed, answer.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_written_for_every_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in (*COMMANDS, "imagenet-c", "shapes", "tap"))


@pytest.mark.parametrize("shell", SHELLS)
def test_shell_accepts_its_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script(shell, tmp_path, capsys)
    assert subprocess.run([shell, "-n", str(file)], capture_output=True).returncode == 0
