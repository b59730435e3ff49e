"""The documentation: it builds without a warning, and what it tells people to type exists."""

from __future__ import annotations

import ast
import html
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitfocus as vf
from vitfocus.cli import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "loops").glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield text


def commands(page: Path) -> Iterator[list[str]]:
    for text in blocks(page, "", "sh", "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            if line.strip().startswith("vitfocus "):
                yield shlex.split(line.partition(" > ")[0], comments=True)[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_on_the_page_parse(page: Path) -> None:
    for command, *rest in commands(page):
        assert command in COMMANDS, f"{page.name}: there is no command {command}"
        parser, _ = build_parser(command)
        try:
            parser.parse_intermixed_args([word for word in rest if word != "…"])
        except vf.VitfocusError as error:
            pytest.fail(f"{page.name}: vitfocus {command} {shlex.join(rest)}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_on_the_page_is_python_with_names_that_exist(page: Path) -> None:
    for text in blocks(page, "python"):
        if "--8<--" not in text:
            ast.parse(re.sub(r"^(>>> |\.\.\. )", "", text, flags=re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    defined = set(re.findall(r"\bclass (\w+)", text))  # a page may show how to add a name
    assert not {*re.findall(r"\bvf\.(\w+)", text)} - {*vf.__all__} - defined


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_example_is_listed() -> None:
    listed = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert all(f"`{file.name}`" in listed for file in (ROOT / "examples").iterdir() if file.suffix in (".py", ".ipynb"))


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert all(f"| `{name}" in page for name in COMMANDS)


def test_the_picture_is_small_enough() -> None:
    assert 20_000 < (ROOT / "docs" / "images" / "diagnosis.jpg").stat().st_size < 400_000


def test_the_site_builds_without_warnings_and_reads_offline(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="building the documentation needs the extra [docs]")
    pytest.importorskip("mkdocstrings", reason="building the documentation needs the extra [docs]")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"(https?://[^\"]+)", text)
        assert not fetched, f"{page.name} fetches {fetched}"
    shown = html.unescape(re.sub(r"<[^>]+>", "", (tmp_path / "examples.html").read_text(encoding="utf-8")))
    included = re.findall(r'^--8<-- "(.+)"$', (ROOT / "docs" / "examples.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert included and all((ROOT / name).read_text(encoding="utf-8").strip() in shown for name in included)
    verbs = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    assert "Measure what each attention layer" in verbs and "&gt;&gt;&gt;" in verbs
