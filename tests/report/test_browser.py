"""The report and its explorer in a real browser: pointing, sliding, typing, touching, saving, printing.

Screenshots are kept in runs/test-artefacts (or $VITFOCUS_TEST_ARTEFACTS) to be looked at.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from helpers.tiny import build

import vitfocus as vf
from vitfocus.data.shapes.dataset import Shapes, shapes_batch
from vitfocus.report import explorer
from vitfocus.report.explorer import add_explorer, explorer_data
from vitfocus.report.page import Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install vitfocus[dev]")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to open the page in")

ARTEFACTS = Path(os.environ.get("VITFOCUS_TEST_ARTEFACTS") or Path(__file__).parents[2] / "runs" / "test-artefacts")
SIZE, PATCHES = (64, 96), (4, 6)


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    plain, treated = build("vit_rect", seed=1)[0], build("vit_rect", seed=2)[0]
    for model in (plain, treated):  # sharp attention, in which rows differ
        for name, weight in model.named_parameters():
            if name.endswith("attn.qkv.weight"):
                weight.data.mul_(6)
    return {"plain": plain, "treated <&>": vf.treat_(treated, "cbs")}


@pytest.fixture(scope="module")
def page_file(models: dict[str, torch.nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real comparison: one evaluation of both models, two diagnoses, and the explorer."""
    folder = tmp_path_factory.mktemp("comparison")
    data = Shapes("val", length=4, size=SIZE)
    corruptions = {"corruptions": ["fog", "snow"], "severities": [1, 3]}
    labelled = [(data[i][0], data[i][1] % 5) for i in range(4)]
    batches = [(torch.stack([image for image, _ in labelled]), torch.tensor([label for _, label in labelled]))]
    vf.evaluate(models, "imagenet-c", batches, out=folder / "scores", progress=False, **corruptions)
    images = shapes_batch(range(3), split="val", size=SIZE)[0]
    for index, (name, model) in enumerate(models.items()):
        vf.diagnose(model, images, "gaussian_noise/3", name=name).save(folder / f"attention-{index}")
    explorer = explorer_data(models, images, "gaussian_noise/3", names=["one", "two", "<three>"])
    return vf.report(folder, explorer=explorer).path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any, page_file: Path) -> Iterator[Callable[..., Any]]:
    """Open the page; afterwards nothing must have been complained of, and nothing fetched."""
    complaints: list[str] = []
    requests: list[str] = []
    contexts: list[Any] = []

    def open_page(part: str = "explorer", **options: Any) -> Any:
        context = browser.new_context(
            **{"viewport": {"width": 1200, "height": 900}, "accept_downloads": True, **options}
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"{page_file.as_uri()}#{part}")
        if part == "explorer":
            settle(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    fetched = {url for url in requests if not url.startswith(("data:", "blob:", page_file.as_uri()))}
    assert not complaints and not fetched


def settle(page: Any) -> None:
    """Wait until what was asked for is drawn."""
    page.locator('#stage[aria-busy="false"]').wait_for()


def drawn(page: Any, panel: str = "0.0", which: int = 0) -> str:
    """What a canvas shows: the photograph with its overlay (0) or the map (1)."""
    return page.locator(f'[data-panel="{panel}"] canvas').nth(which).evaluate("canvas => canvas.toDataURL()")


def said(page: Any, panel: str = "0.0") -> str:
    return page.locator(f'[data-panel="{panel}"] > p').inner_text()


def point(page: Any, row: int, column: int, panel: str = "0.0", act: str = "move") -> None:
    canvas = page.locator(f'[data-panel="{panel}"] canvas').first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    x, y = (column + 0.5) / PATCHES[1] * box["width"], (row + 0.5) / PATCHES[0] * box["height"]
    if act == "move":
        page.mouse.move(box["x"] + x, box["y"] + y)
    else:
        page.touchscreen.tap(box["x"] + x, box["y"] + y)
    settle(page)


def strongest(
    model: torch.nn.Module, image: torch.Tensor, layer: int, query: int, head: int | None
) -> tuple[float, int]:
    """The strongest patch of a row of attention, in percent, and its number: from the model itself."""
    maps = vf.attention_maps(model, image[None], layers=[layer])[0][0]
    row = (maps.mean(dim=0) if head is None else maps[head])[query, 1:]
    return 100 * float(row.max()), int(row.argmax())


def test_pointing_shows_that_tokens_attention(visit: Callable[..., Any], models: dict[str, torch.nn.Module]) -> None:
    page = visit()
    images = shapes_batch(range(3), split="val", size=SIZE)[0]
    noisy = vf.corrupt(images, "gaussian_noise", 3, ids=range(3))
    for row, column in ((0, 0), (3, 5), (1, 2)):
        before = [drawn(page, panel) for panel in ("0.0", "0.1", "1.0", "1.1")]
        point(page, row, column)
        after = [drawn(page, panel) for panel in ("0.0", "0.1", "1.0", "1.1")]
        assert all(one != two for one, two in zip(before, after, strict=True))  # every panel follows
        for m, model in enumerate(models.values()):
            for v, seen in enumerate((images, noisy)):
                value, patch = strongest(model, seen[0], -1, 1 + row * PATCHES[1] + column, None)
                found = re.search(r"strongest patch: ([\d.]+) % at row (\d+), column (\d+)", said(page, f"{m}.{v}"))
                assert found is not None
                assert float(found[1]) == pytest.approx(value, rel=0.06, abs=0.2)
                assert (int(found[2]), int(found[3])) == divmod(patch, PATCHES[1])
    page.screenshot(path=artefact("explorer-light.png"), full_page=True)


def test_sliders_and_lists_change_the_view(visit: Callable[..., Any], models: dict[str, torch.nn.Module]) -> None:
    page = visit()
    point(page, 2, 3)
    page.mouse.move(5, 5)
    seen = {drawn(page)}
    for control, value, words in (("step", "0", "Layer 0, average of heads"), ("head", "1", "Layer 0, head 1")):
        page.locator(f'[data-control="{control}"]').fill(value)
        settle(page)
        assert words in said(page)
        seen.add(drawn(page))
    image = shapes_batch([0], split="val", size=SIZE)[0][0]
    value, _ = strongest(models["plain"], image, 0, 1 + 2 * PATCHES[1] + 3, 1)
    assert float(re.search(r"strongest patch: ([\d.]+)", said(page))[1]) == pytest.approx(value, rel=0.06, abs=0.2)  # type: ignore[index]
    assert page.locator('[data-panel="0.0"] caption').inner_text() == "Layer 0, head 1"
    page.locator('[data-control="strength"]').fill("0")
    settle(page)
    seen.add(drawn(page))
    page.locator('[data-image="2"]').click()
    settle(page)
    seen.add(drawn(page))
    assert len(seen) == 5 and "<three>" in page.locator("#said").inner_text()
    before = drawn(page, "1.1")
    page.locator('[data-control="contrast"]').select_option("panel")
    settle(page)
    page.locator('[data-control="strength"]').fill("85")
    settle(page)
    assert drawn(page, "1.1") != before
    page.locator("select[aria-label=Token]").select_option("0")
    settle(page)
    assert "class token" in page.locator("#said").inner_text()


def test_keyboard_controls_everything(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#stage").focus()
    told = []
    for key in ("ArrowUp", "ArrowLeft", "PageDown", "h", "2", "c"):
        before = (drawn(page), page.locator("#said").inner_text())
        page.keyboard.press(key)
        settle(page)
        told.append(page.locator("#said").inner_text())
        assert (drawn(page), told[-1]) != before, key
    assert told[1].endswith("patch in row 1, column 2.") and "layer 0" in told[2] and "head 0" in told[3]
    assert told[4].startswith("two") and told[5].endswith("class token.")
    page.keyboard.press("Shift+C")
    settle(page)
    assert "patch in row" in page.locator("#said").inner_text()
    assert re.sub(r"\s", "", page.locator("p", has_text="class token").last.inner_text()).endswith(
        "1–3imageCclasstoken"
    )


def test_pointing_at_the_map_picks_its_row(visit: Callable[..., Any]) -> None:
    page = visit()
    canvas = page.locator('[data-panel="0.0"] canvas').nth(1)
    box = canvas.bounding_box()
    for query in (1 + 7, 1 + 23, 0):
        y = 0.12 + (query + 0.5) / 25 * 0.88
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + y * box["height"])
        settle(page)
        where = "class token" if query == 0 else "row {}, column {}".format(*divmod(query - 1, PATCHES[1]))
        assert where in page.locator("#said").inner_text()


def test_pinned_token_is_shown_beside_the_hovered_one(visit: Callable[..., Any]) -> None:
    page = visit()
    point(page, 1, 1)
    page.mouse.down()
    page.mouse.up()
    settle(page)
    assert page.locator('[data-panel="1.1"] canvas[data-photo]').count() == 2
    pinned = drawn(page, "0.0", 0)
    page.locator("#stage").focus()
    page.keyboard.press("ArrowDown")
    settle(page)
    assert drawn(page, "0.0", 0) == pinned != drawn(page, "0.0", 1)
    told = page.locator('[data-panel="0.0"] .photos').inner_text()
    assert "Pinned: patch in row 1, column 1" in told and "Pointed at: patch in row 2, column 1" in told
    page.keyboard.press("ArrowUp")
    page.keyboard.press("p")
    settle(page)
    assert page.locator('[data-panel="0.0"] canvas[data-photo]').count() == 1


def test_the_address_keeps_the_view(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator('[data-image="1"]').click()
    page.locator('[data-control="step"]').fill("0")
    page.locator('[data-control="head"]').fill("1")
    page.locator('[data-control="contrast"]').select_option("panel")
    point(page, 3, 4)
    page.locator('[data-control="pin"]').focus()
    page.keyboard.press("Enter")
    settle(page)
    page.wait_for_url("**pin=3.4**")
    told, picture = page.locator("#said").inner_text(), drawn(page)
    again = visit(page.url.partition("#")[2])
    settle(again)
    assert again.locator("#said").inner_text() == told and drawn(again) == picture
    odd = visit("explorer?image=99&layer=x&head=77&token=9.9&pin=%3Cscript%3E&overlay=-4&models=7.7")
    settle(odd)
    assert "patch in row 3, column 5" in odd.locator("#said").inner_text()


def test_maps_beside_the_page_are_loaded_when_they_are_shown(
    browser: Any, tmp_path: Path, models: dict[str, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explorer, "INLINE", 0)
    page = vf.explore(models["plain"], shapes_batch(range(2), size=SIZE)[0], out=tmp_path / "a page.html").path
    assert page is not None
    files = sorted((tmp_path / "a page-data").iterdir())
    assert len(files) == 2 * 2
    opened = browser.new_page()
    requests: list[str] = []
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto(page.as_uri())
    settle(opened)
    assert "strongest patch" in said(opened) and sum(url.endswith(".js") for url in requests) == 1
    for file in files:
        file.unlink()
    opened.locator('[data-image="1"]').click()
    settle(opened)
    assert "is missing; it belongs beside this page" in opened.locator(".alert").inner_text()
    opened.close()


def test_models_are_compared_layer_by_layer(browser: Any, tmp_path: Path) -> None:
    """Of one depth: the layers both have in the page; of different depths: from first to last."""
    images = shapes_batch(range(1), size=64)[0]
    for options, expected in (({"depth": 3}, ["0", "2"]), ({"depth": 2}, ["0", "1", "2 / 1"])):
        models = {"three": build("vit", depth=3)[0], "other": build("vit", seed=1, **options)[0]}
        data = explorer_data(models, images, None)
        if options["depth"] == 3:
            del data["models"][1]["layers"][1]
        page = Page("explorer")
        add_explorer(page, data)
        opened = browser.new_page()
        opened.goto(page.write(tmp_path / "explorer.html").as_uri())
        slider = opened.locator('[data-control="step"]')
        shown = []
        for step in range(int(slider.get_attribute("max")) + 1):
            slider.fill(str(step))
            settle(opened)
            shown.append(opened.locator("label", has_text="Layer:").locator("output").inner_text())
        assert shown == expected
        opened.close()


def test_touch_works_on_a_phone(visit: Callable[..., Any]) -> None:
    page = visit(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True, device_scale_factor=2)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    before = drawn(page, "1.1")
    point(page, 0, 1, "0.0", act="tap")
    assert drawn(page, "1.1") != before and "row 0, column 1" in page.locator("#said").inner_text()
    page.screenshot(path=artefact("explorer-phone.png"), full_page=True)
    report = visit("report", viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    assert report.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    report.screenshot(path=artefact("report-phone.png"), full_page=True)
    narrow = visit("report", viewport={"width": 360, "height": 800}, has_touch=True, is_mobile=True)
    assert narrow.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    hidden = """[...document.querySelectorAll('#report .stack td.n')].filter((cell) => cell.checkVisibility())
        .filter((cell) => cell.getBoundingClientRect().right > window.innerWidth).length"""
    assert narrow.locator("#report .stack td.n").count() and not narrow.evaluate(hidden)  # numbers need no scrolling
    narrow.screenshot(path=artefact("report-phone-narrow.png"), full_page=True)


def test_light_and_dark_theme(visit: Callable[..., Any]) -> None:
    page = visit("report", color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) == "rgb(20, 24, 29)"
    page.screenshot(path=artefact("report-dark.png"), full_page=True)
    for expected in ("rgb(255, 255, 255)", "rgb(20, 24, 29)", "rgb(20, 24, 29)"):  # light, dark, as the reader has it
        page.locator("#theme").click()
        assert page.evaluate(paper) == expected
        if expected == "rgb(255, 255, 255)":
            page.screenshot(path=artefact("report-light.png"), full_page=True)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(paper) == "rgb(255, 255, 255)" and page.locator("button.save").first.is_hidden()
    closed, opened = page.locator("details").first, page.locator("details").last
    opened.evaluate("details => { details.open = true; }")
    assert closed.is_hidden() and opened.locator("table").is_visible()  # no line on paper without what it announces
    page.screenshot(path=artefact("report-print.png"), full_page=True)


def test_figures_and_tables_can_be_saved(visit: Callable[..., Any]) -> None:
    page = visit("report", color_scheme="dark")
    for button in page.locator("button[data-save=svg]").all()[:3]:
        with page.expect_download() as download:
            button.click()
        picture = ElementTree.fromstring(Path(download.value.path()).read_text("utf-8"))
        assert picture.tag.endswith("svg") and float(picture.get("width", "0")) > 100
        texts = [element for element in picture.iter() if element.tag.endswith("text")]
        assert texts and all(element.get("fill") for element in texts)
        assert not any("var(" in value for element in picture.iter() for value in element.attrib.values())
        light = "rgb(27, 31, 36)"  # the light page's ink, though the page is dark
        assert light in {element.get("fill") for element in texts}
    with page.expect_download() as download:
        page.locator("button[data-save=csv][data-name=scores]").click()
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text("utf-8"))))
    assert {row["model"] for row in rows} == {"plain", "treated <&>"}
    assert all(0 <= float(row["value"]) <= 100 for row in rows)


def artefact(name: str) -> str:
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    return str(ARTEFACTS / name)
