"""The pages on other people's loops: their code runs as it stands, with the real packages."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "loops"
BLOCK = re.compile(r"^```(python|sh)( title=\"(.+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: How the command that a page names is started by this interpreter.
STARTED = {"accelerate": ["accelerate.commands.accelerate_cli"], "torchrun": ["torch.distributed.run"]}


@pytest.mark.parametrize(
    ("page", "package"),
    [
        ("timm", "timm"),
        ("hf-trainer", "transformers"),
        ("lightning", "lightning"),
        ("peft", "peft"),
        pytest.param("accelerate", "accelerate", marks=pytest.mark.slow),
        pytest.param("fsdp2", "torch", marks=pytest.mark.slow),
    ],
)
def test_the_code_of_the_page_runs(
    page: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    importlib.import_module(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names = {"__name__": "__main__"}
    ran = 0
    for language, _, title, text in BLOCK.findall((PAGES / f"{page}.md").read_text(encoding="utf-8")):
        if language == "sh":
            command, *rest = shlex.split(text)
            done = subprocess.run([sys.executable, "-m", *STARTED[command], *rest], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
        elif title:
            Path(title).write_text(text, encoding="utf-8")
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(text, f"{page}.md", "exec"), names)
        ran += 1
    assert ran >= 2
    assert list(tmp_path.joinpath("runs").iterdir())


def test_every_page_is_listed_and_tested() -> None:
    pages = {path.stem for path in PAGES.glob("*.md")} - {"index"}
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    tested = {mark.values[0] if hasattr(mark, "values") else mark[0] for mark in _cases()}
    assert pages == tested and all(f"({page}.md)" in index for page in pages)


def _cases() -> list[object]:
    (mark,) = test_the_code_of_the_page_runs.pytestmark  # type: ignore[attr-defined]
    return list(mark.args[1])
