"""Shell completion, asked of the shells themselves; and its lists beside the registries they repeat."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from vitfocus.cli import COMMANDS, main
from vitfocus.cli.completion import CORRUPTIONS, SHELLS, TREATMENTS, known_commands, recipes, suites


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    file = folder / f"vitfocus.{shell}"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    return file


def test_the_lists_are_the_registries() -> None:
    from vitfocus.corruptions import CORRUPTIONS as COMMON
    from vitfocus.corruptions import EXTRA_CORRUPTIONS
    from vitfocus.robustness import SUITES
    from vitfocus.train.recipe import shipped_recipes
    from vitfocus.treatments.base import TREATMENTS as HANDLED

    assert set(suites()) == set(SUITES)
    assert set(CORRUPTIONS) == {*COMMON, *EXTRA_CORRUPTIONS}
    assert set(TREATMENTS) == {*HANDLED, "cbs"}
    assert {name for name in recipes() if "/" not in name} == set(shipped_recipes())


def test_every_option_of_every_command_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert [command.name for command in known_commands()] == list(COMMANDS)
    assert main(["completion", "bash", "--json"]) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    assert all("--json" in command["options"] and "--help" in command["options"] for command in commands.values())
    assert "shapes" in commands["train"]["words"] and "imagenet-c" in commands["evaluate"]["options"]["--suite"]


CASES = [
    ("vitfocus diag", {"diagnose"}),
    ("vitfocus evaluate m --suite imagenet-s", {"imagenet-sketch"}),
    ("vitfocus diagnose m --agai", {"--against"}),
    ("vitfocus diagnose m --against gaussian_noise/", {f"gaussian_noise/{severity}" for severity in range(1, 6)}),
    ("vitfocus train deit_ti_cb", {"deit_ti_cb", "deit_ti_cbs"}),
    ("vitfocus completion z", {"zsh"}),
]


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script("bash", tmp_path, capsys)
    for typed, expected in CASES:
        words = typed.split(" ")
        ask = f"source {file}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _vitfocus; "
        answer = subprocess.run(
            ["bash", "-c", ask + 'printf "%s\\n" "${COMPREPLY[@]}"'], cwd=tmp_path, capture_output=True, text=True
        )
        assert set(answer.stdout.split()) == expected, (typed, answer.stderr)


def test_fish_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script("fish", tmp_path, capsys)
    for typed, expected in CASES:
        answer = subprocess.run(
            ["fish", "--no-config", "-c", f"source {file}; complete -C '{typed}'"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert {line.split("\t")[0] for line in answer.stdout.splitlines()} == expected, (typed, answer.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_its_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script(shell, tmp_path, capsys)
    assert subprocess.run([shell, "-n", str(file)], capture_output=True).returncode == 0
