"""The command line from the outside: exit codes, one-line refusals, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
from torch import nn

import vitfocus as vf
from vitfocus import __version__
from vitfocus.anatomy import Family, families
from vitfocus.cli import COMMANDS, main
from vitfocus.treatments import save_load as store


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in COMMANDS) and "vitfocus --version" in shown
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"vitfocus {__version__}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["diagnose", "vit_tiny_patch16_224", "--limit", "1"],
        ["evaluate", "--suite", "list"],
        ["train"],
        ["train", "shapes", "epochs=0.006", "warmup_epochs=0", "val_length=20", "--out", "run"],
        ["models", "mixer"],
        ["reproduce", "--list"],
        ["completion", "fish"],
    ],
    ids=" ".join,
)
def test_json_is_all_that_is_printed(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["modles"], "did you mean 'models'?"),
        (["models", "no-such-family"], "No family or model matches"),
        (["models", "--nmaes"], "did you mean '--names'?"),
        (["bench", "--rounds", "many"], "--rounds: expected a whole number of at least 1, not 'many'"),
        (["report"], "the following arguments are required: RUN"),
        (["report", "run", "--bogus"], "has no option --bogus: expected one of: --against, --budget"),
        (["report", "run", "--limt=3"], "has no option --limt: did you mean '--limit'?"),
        (["report", "run", "--limit", "3"], "--limit is for the attention explorer: add --explore"),
        (["report", "run", "--images", "photos"], "--images is for the attention explorer: add --explore"),
        (["report", "run", "--against", "fog/1"], "--against is for the attention explorer: add --explore"),
        (["diagnose", "vit_tiny_patch16_242"], "did you mean 'vit_tiny_patch16_224'?"),
        (["diagnose", "vit_tiny_patch16_224", "--treat", "tpa"], "did you mean 'tap'?"),
        (["diagnose", "vit_tiny_patch16_224", "--device", "gpu"], "There is no device 'gpu'"),
        (["diagnose", "vit_tiny_patch16_224", "--images", "no/such/folder"], "no/such/folder"),
        (["diagnose", "vit_tiny_patch16_224", "--weights", "no/such.safetensors"], "no/such.safetensors"),
        (["diagnose", "vit_tiny_patch16_224", "--weights", "a", "--pretrained"], "give one of them"),
        (["diagnose", "rvt_tiny", "--pretrained"], "cannot start from pretrained weights"),
        (["diagnose", ".", "--pretrained"], "leave --pretrained out"),
        (["train", "--resume", "auto", "--out", "run"], "vitfocus train run/config.toml --out run"),
        (["reproduce", "--count"], "The table or figure is missing"),
        (["evaluate", "--force"], "--force is for --compare"),
        (["evaluate", "--compare", "a", "b", "--no-resize"], "--no-resize has no effect with --compare"),
        (["evaluate", "a_model", "--compare", "a", "b"], "MODEL has no effect with --compare"),
        (["evaluate", ".", "--suite", "clean", "--data", "shapes:2", "--pretrained"], "leave --pretrained out"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("vitfocus: ") and said in lines[0]


def test_pretrained_asks_the_library_for_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, asked = store.create_model, []

    def create(name: str, pretrained: bool = False) -> nn.Module:
        asked.append((name, pretrained))
        return real(name)

    monkeypatch.setattr(store, "create_model", create)
    for words in (["diagnose"], ["evaluate", "--suite", "clean", "--data", "shapes:2"]):
        for flags, said in ((["--pretrained"], False), ([], True)):
            assert main([*words, "vit_tiny_patch16_224+cb", "--limit", "1", *flags]) == 0
            assert asked.pop() == ("vit_tiny_patch16_224+cb", not said)
            assert ("random weights" in capsys.readouterr().err) == said


def test_the_list_of_suites_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--suite", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0] for line in lines]
    start = max(map(len, names)) + 2
    assert len(lines) > 15 and all(line[start - 2 : start] == "  " and line[start] != " " for line in lines)


def test_model_without_attention_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "resnet18"]) == 2
    said = capsys.readouterr().err
    assert "its forward pass computes no softmax attention" in said and "vitfocus.register" in said
    assert said.strip().count("\n") <= 1, "one sentence, beside the one about random weights"


def test_models_json_is_computed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "swin", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"timm", "torchvision"} <= {row["library"] for row in rows}
    for row in rows:
        assert row["treatments"]["tap"] in (True, None) and row["treatments"]["uniform"] in (False, None)


def test_a_family_is_found_by_a_model_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "deit_tiny_patch16_224", "--json"]) == 0
    assert [row["family"] for row in json.loads(capsys.readouterr().out)] == ["vision_transformer"]
    assert main(["models", "deit_t?ny_patch16_*", "--json"]) == 0
    assert [row["family"] for row in json.loads(capsys.readouterr().out)] == ["vision_transformer"]
    assert main(["models", "torchvision:vit_b_16+cb", "--json"]) == 0
    assert [row["library"] for row in json.loads(capsys.readouterr().out)] == ["torchvision"]


def test_a_family_is_found_by_a_saved_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=24)
    vf.save(model, tmp_path)
    assert main(["models", str(tmp_path), "--json"]) == 0
    found = [(row["library"], row["family"]) for row in json.loads(capsys.readouterr().out)]
    assert found == [("timm", "vision_transformer")]


def test_folders_do_not_hide_the_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def support(family: Family) -> dict[str, Any]:
        tried.append(family.name)
        return {}

    monkeypatch.setattr("vitfocus.treatments.surgery.support", support)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swin").mkdir()
    assert main(["models", "--json"]) == 0
    assert tried == [family.name for family in families()]
    tried.clear()
    assert main(["models", "swin", "--json"]) == 0
    assert "swin_transformer" in tried and all("swin" in name for name in tried)
    (tmp_path / "empty").mkdir()
    assert main(["models", "empty"]) == 2 and "config.json" in capsys.readouterr().err


def test_vitfocus_models_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("vitfocus.treatments.surgery.support", lambda family: {})  # the names do not depend on it
    assert main(["models", "vitfocus", "--names", "--json"]) == 0
    names = {name for row in json.loads(capsys.readouterr().out) for name in row["names"]}
    assert {"fan_base_16_p4_hybrid", "rvt_base_plus", "pvt_small", "localvit_tiny"} <= names


def test_a_closed_pipe_leaves_no_traceback() -> None:
    command = f"{sys.executable} -m vitfocus train | head -c 1"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert shown.stdout and "Traceback" not in shown.stderr
