"""The gallery: many diagnoses made by one command that can be resumed, and one sortable page of them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import pytest
import timm
from helpers.tiny import build
from torch import nn

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.data.shapes.dataset import shapes_batch

GALLERY = 'class="wide stack sortable"'
IMAGES = shapes_batch(range(2), size=64)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three small models in folders, one of them with windows only, which cannot be explored."""
    folder = tmp_path_factory.mktemp("models")
    for seed, (name, kind) in enumerate((("one", "vit"), ("two", "vit"), ("windows", "swin"))):
        vf.save(build(kind, seed=seed)[0], folder / name)
    return {name: folder / name for name in ("one", "two", "windows")}


def ten_classes() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64, embed_dim=48, num_heads=3, num_classes=10)


class Table(HTMLParser):
    """The cells of the gallery: data-value of each, and the links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str | None]] = []
        self.links: list[str] = []
        self.feed(text[text.index(GALLERY) : text.index("Save table as CSV")])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append(found.get("data-value"))
        elif tag == "a":
            self.links.append(found["href"] or "")


def test_one_command_makes_the_gallery_and_resumes(
    saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gallery"
    words = ["diagnose", *map(str, saved.values()), "--images", "shapes:4", "--against", "fog/2", "--out", str(out)]
    words += ["--explore", "--batch-size", "4", "--json"]
    assert main([*words[:2], "no_such_model", *words[2:]]) == 2  # the others are diagnosed all the same
    told = capsys.readouterr()
    assert "no_such_model" in told.err and "1 of 4 models could not be diagnosed" in told.err
    assert [one["model"] for one in json.loads(told.out)] == list(saved)
    made = {name: (out / name / "diagnosis.json").stat().st_mtime_ns for name in saved}

    (out / "two" / "request.json").unlink()  # as if it had been interrupted there
    other = json.loads((out / "windows" / "request.json").read_text()) | {"seed": 7}
    (out / "windows" / "request.json").write_text(json.dumps(other))  # as if it had been made with other settings
    assert main(words) == 0
    told = capsys.readouterr()
    assert told.err.count("Already in") == 1
    again = {name: (out / name / "diagnosis.json").stat().st_mtime_ns for name in saved}
    assert {name for name in saved if made[name] != again[name]} == {"two", "windows"}

    table = Table((out / "report.html").read_text())
    rows = {row[0]: row[1:] for row in table.rows if row}
    assert list(rows) == list(saved)
    for name, row in rows.items():
        diagnosis = vf.Diagnosis.load(out / name)
        shares = [one["entropy"] / one["entropy_bound"] for one in diagnosis.rows]
        assert float(row[0] or "nan") == pytest.approx(100 * fmean(shares))
        assert float(row[4] or "nan") == pytest.approx(fmean(one["stability"] for one in diagnosis.rows))
    explorers = [link.partition("/")[0] for link in table.links if link.endswith("#explorer")]
    assert explorers == ["one", "two"]  # windows have no map of the whole image
    assert all((out / link.partition("#")[0]).is_file() for link in table.links)


def test_accuracy_equals_that_of_evaluate(
    tmp_path: Path, saved: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ten_classes()
    vf.save(model, tmp_path / "ten")
    words = ["diagnose", str(tmp_path / "ten"), str(saved["one"]), "--images", "shapes:12", "--accuracy"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    scores = vf.evaluate(model, "clean", "shapes:12", progress=False)
    rows = {row[0]: row for row in Table((tmp_path / "out" / "report.html").read_text()).rows if row}
    assert float(rows["ten"][1] or "nan") == pytest.approx(scores["top1"])
    assert rows["one"][1] is None and "The accuracy was not measured" in capsys.readouterr().err  # 5 classes, not 10
    assert main(words) == 2 and "--out" in capsys.readouterr().err


def test_many_diagnoses_make_a_gallery_by_default(tmp_path: Path) -> None:
    markup = '<img src=x onerror="alert(1)">'
    for index in range(3):
        diagnosis = vf.diagnose(build("vit", seed=index)[0], IMAGES, name=f"{index} {markup}")
        diagnosis.save(tmp_path / f"run {index}")
    page = vf.report(tmp_path, title=markup).path.read_text()
    assert GALLERY in page and "<img src=x" not in page and page.count("&lt;img src=x") > 6
    assert GALLERY not in vf.report(tmp_path, gallery=False).path.read_text()
    two = vf.report(tmp_path / "run 0", tmp_path / "run 1", out=tmp_path / "two.html")
    assert GALLERY not in two.path.read_text()
    assert GALLERY in vf.report(tmp_path / "run 0", gallery=True).path.read_text()
    assert re.search(r"<svg[^>]*>.*?Overfocus by depth: first layer", page, re.S)
    vf.evaluate(ten_classes(), "clean", "shapes:2", out=tmp_path / "a" / "scores", progress=False)
    with pytest.raises(VitfocusError, match="these folders hold none"):
        vf.report(tmp_path / "a", gallery=True)
