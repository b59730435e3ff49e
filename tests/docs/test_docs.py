"""The documentation: it builds without a warning, and what it tells people to type exists."""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

import vitfocus as vf
import vitfocus.train
from vitfocus.cli import COMMANDS, build_parser
from vitfocus.cli.common import refuse_unused
from vitfocus.train import load_recipe, shipped_recipes, train

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "loops").glob("*.md")),
]
#: Pages whose Python blocks run one after the other. The others show fragments on data that only their reader has.
FRAGMENTS = {"adding-a-family", "examples", "kernels", "report", "robustness", "ARCHITECTURE", "CONTRIBUTING"}
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
            args = parser.parse_intermixed_args([word for word in rest if word != "…"])
            refuse_unused(parser, args)
            if command == "train" and args.recipe in shipped_recipes():
                load_recipe(args.recipe, args.overrides)
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
def test_links_point_to_existing_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_example_is_listed() -> None:
    listed = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert all(f"`{file.name}`" in listed for file in (ROOT / "examples").iterdir() if file.suffix in (".py", ".ipynb"))


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert all(f"| `{name}" in page for name in COMMANDS)


@pytest.mark.parametrize("name", [name for name in vf.__all__ if name != "__version__"])
def test_public_name_is_in_the_reference_with_all_sections(name: str) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert re.search(rf"^::: vitfocus\.[\w.]+\.{name}$", pages, re.MULTILINE), "not in docs/reference"
    public = getattr(vf, name)
    text = inspect.getdoc(public) or ""
    assert re.search(r"^Example:\n(.*\n)?    >>> ", text, re.MULTILINE), "no example that runs"
    if not isinstance(public, type):
        assert lacking_sections(public) == []
        return
    fields = [field.name for field in dataclasses.fields(public)] if dataclasses.is_dataclass(public) else []
    assert [field for field in fields if not documents(text, field)] == []
    members = {key: getattr(value, "__func__", value) for key, value in vars(public).items() if key[0] != "_"}
    inherited = {key for base in public.__mro__[1:] for key in vars(base)}
    methods = {key: value for key, value in members.items() if inspect.isfunction(value) and key not in inherited}
    assert {key: lacking for key, method in methods.items() if (lacking := lacking_sections(method))} == {}


def documents(text: str, name: str) -> bool:
    return re.search(rf"^    \*{{0,2}}{name}:", text, re.MULTILINE) is not None


def lacking_sections(function: Callable[..., Any]) -> list[str]:
    """The arguments and sections that a docstring in Google style lacks."""
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    lacking = [name for name in signature.parameters if name not in ("self", "cls") and not documents(text, name)]
    if signature.return_annotation not in (None, "None") and not re.search(r"^(Returns|Yields):$", text, re.MULTILINE):
        lacking.append("Returns")
    if "raise VitfocusError" in inspect.getsource(function) and not re.search(r"^Raises:$", text, re.MULTILINE):
        lacking.append("Raises")
    return lacking


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


def _reader(folder: Path) -> dict[str, Any]:
    """Put into a folder what the pages say a reader has, and return the names that some pages take for granted."""
    for name, size in (("photographs", 64), ("imagenet/val/n01440764", 224)):
        (folder / name).mkdir(parents=True)
        Image.effect_noise((size, size), 64).convert("RGB").save(folder / name / "one.png")
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 10}
    plain, treated = (vf.create_model(f"vit_tiny_patch16_224{spec}", **small).eval() for spec in ("", "+tap+adl"))
    for name in ("demo/plain", "demo/high-rate", "plain", "cb"):
        vf.save(plain, folder / "runs" / name / "model")
    vf.save(treated, folder / "runs" / "demo" / "treated" / "model")
    (folder / "runs" / "demo" / "high-rate" / "metrics.jsonl").write_text(
        '{"kind": "attention", "step": 1, "epoch": 1, "layer": [0], "entropy_share": [0.1], "overfocus": [0.9]}\n'
    )
    model = timm.create_model("vit_tiny_patch16_224", **small | {"depth": 12}).eval()
    return {"model": model, "images": torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)}


RUNNING = [page for page in PAGES if page.stem not in {*FRAGMENTS, "index"} and any(blocks(page, "python"))]


def test_the_first_page_shows_the_code_of_the_readme() -> None:
    assert list(blocks(ROOT / "docs" / "index.md", "python")) == list(blocks(ROOT / "README.md", "python"))


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_code_on_the_page_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder as after `make demo`; trained weights are not downloaded, and training is cut short."""
    names = _reader(tmp_path)
    if page.stem == "models":
        torch.save(timm.create_model("rvt_small").state_dict(), tmp_path / "rvt_small.pth")
    if page.stem == "tasks":
        arguments = ["model.arguments.hidden_size=24", "train_length=8", "val_length=4", "batch=4", "epochs=1"]
        train("shapes_answer", tmp_path / "runs" / "shapes_answer", overrides=[*arguments, "warmup_epochs=0"])

    def create_model(name: str, pretrained: bool = False, **rest: Any) -> Any:
        return real(name, **({"depth": 2} if name.startswith("deit_") else {}), **rest)

    def short(recipe: str, overrides: list[str], **rest: Any) -> Any:
        return train(recipe, overrides=[*overrides, "train_length=8", "val_length=4", "batch=4"], **rest)

    real = timm.create_model
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timm, "create_model", create_model)
    monkeypatch.setattr(vitfocus.train, "train", short, raising=False)
    for text in blocks(page, "python"):
        exec(compile(text, page.name, "exec"), names)
