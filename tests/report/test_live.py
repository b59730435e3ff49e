"""The live page in Chromium: uploads, bad files, the camera, two tabs, a killed server; and axe on every page."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import build
from PIL import Image

import vitfocus as vf
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.report.serve import create_app

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install vitfocus[dev]")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install vitfocus[serve]")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to open the page in")
TOKEN = "a-secret"


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    made = {"plain": build("vit", seed=1)[0], "other": build("vit", seed=2)[0]}
    for model in made.values():  # sharp attention, in which rows differ
        for name, weight in model.named_parameters():
            if name.endswith("attn.qkv.weight"):
                weight.data.mul_(6)
    return made


@pytest.fixture(scope="module")
def address(models: dict[str, torch.nn.Module]) -> Iterator[str]:
    settings = uvicorn.Config(create_app(models, token=TOKEN), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/?token={TOKEN}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Any]:
    """Open the page; afterwards nothing must have been complained of, and nothing asked of another host."""
    complaints: list[str] = []
    requests: list[str] = []
    contexts = []

    def open_page(where: str = address, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(where)
        settle(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints and all(url.startswith(("http://127.0.0.1:", "data:", "blob:", "file:")) for url in requests)


def settle(page: Any) -> None:
    page.locator('#stage[aria-busy="false"]').wait_for()


def picture(index: int) -> dict[str, Any]:
    content = io.BytesIO()
    Image.fromarray(shapes_batch([index], size=64)[0][0].permute(1, 2, 0).numpy()).save(content, "PNG")
    return {"name": f"<b>{index}</b>.png", "mimeType": "image/png", "buffer": content.getvalue()}


def give(page: Any, index: int) -> None:
    page.locator("#file").set_input_files(picture(index))
    page.locator("#said", has_text=f"<b>{index}</b>.png").wait_for()
    settle(page)


def strongest(page: Any, panel: str) -> tuple[float, int, int]:
    said = page.locator(f'[data-panel="{panel}"] > p').inner_text()
    value, row, column = re.search(r"strongest patch: ([\d.]+) % at row (\d+), column (\d+)", said).groups()  # type: ignore[union-attr]
    return float(value), int(row), int(column)


def expected(model: torch.nn.Module, pixels: torch.Tensor, layer: int, query: int) -> tuple[Any, int, int]:
    row = vf.attention_maps(model, pixels, layers=[layer])[0][0].mean(dim=0)[query, 1:]
    return pytest.approx(100 * float(row.max()), rel=0.06, abs=0.2), *divmod(int(row.argmax()), 4)


def test_an_upload_is_shown_as_the_models_see_it(visit: Any, models: dict[str, torch.nn.Module]) -> None:
    page = visit()
    give(page, 11)
    pixels = shapes_batch([11], size=64)[0]
    for layer in (1, 0):
        page.locator('[data-control="step"]').fill(str(layer))
        settle(page)
        for m, model in enumerate(models.values()):
            assert strongest(page, f"{m}.0") == expected(model, pixels, layer, 1 + 2 * 4 + 2)
    before = page.locator('[data-panel="0.1"] canvas').first.evaluate("canvas => canvas.toDataURL()")
    page.locator('[data-control="corruption"]').select_option("contrast")
    page.locator('[data-control="severity"]').fill("5")
    page.locator("h2", has_text="contrast/5").first.wait_for()
    settle(page)
    noisy = vf.corrupt(pixels, "contrast", 5)
    assert strongest(page, "0.1") == expected(models["plain"], noisy, 0, 1 + 2 * 4 + 2)
    assert page.locator('[data-panel="0.1"] canvas').first.evaluate("canvas => canvas.toDataURL()") != before
    assert page.locator('[data-panel="0.1"] [data-reading="stability"]').count() == 1
    page.locator('[data-control="corruption"]').select_option("none")
    settle(page)
    assert page.locator("[data-panel]").count() == 2 and page.locator(".best li").count() >= 2
    page.wait_for_url("**corruption=none**")
    page.reload()
    settle(page)
    assert page.locator('[data-control="corruption"]').input_value() == "none"
    assert strongest(page, "0.0") == expected(models["plain"], pixels, 0, 1 + 2 * 4 + 2)  # the address keeps it all


def test_bad_files_are_reported_and_the_page_stays_usable(visit: Any) -> None:
    page = visit()
    for content in (b"not an image", picture(1)["buffer"][:100]):
        page.locator("#file").set_input_files({"name": "bad.png", "mimeType": "image/png", "buffer": content})
        page.locator(".alert", has_text="cannot be read as an image").wait_for()
        assert page.locator("[data-image]").count() == 3
        page.locator('[data-control="step"]').fill("0")
        settle(page)
        assert page.locator(".alert").is_hidden()
        page.locator('[data-control="step"]').fill("1")
        settle(page)
    give(page, 12)
    assert page.locator("[data-image]").count() == 4


def test_drag_and_drop_and_camera(visit: Any) -> None:
    page = visit(permissions=["camera"])
    drop = """() => new Promise((done) => {
      const given = new DataTransfer(), canvas = document.createElement("canvas");
      canvas.width = canvas.height = 80;
      canvas.getContext("2d").fillRect(9, 9, 40, 40);
      canvas.toBlob((blob) => {
        given.items.add(new File([blob], "dropped.png", { type: "image/png" }));
        document.dispatchEvent(new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true }));
        done();
      });
    })"""
    page.evaluate(drop)
    page.locator("#said", has_text="dropped.png").wait_for()
    page.locator("#camera").click()
    page.locator("video").evaluate(
        "video => new Promise((seen) => video.videoWidth ? seen() : (video.onplaying = seen))"
    )
    page.locator("#take").click()
    page.locator("#said", has_text="camera").wait_for()
    settle(page)
    assert page.locator("[data-image]").count() == 5 and page.locator("dialog").is_hidden()
    assert page.locator("video").evaluate(
        "video => video.srcObject.getTracks().every((one) => one.readyState === 'ended')"
    )


def test_two_tabs_do_not_disturb_each_other(visit: Any, models: dict[str, torch.nn.Module]) -> None:
    one, two = visit(), visit()
    give(one, 21)
    give(two, 22)
    one.locator('[data-control="step"]').fill("0")
    two.locator('[data-control="severity"]').fill("1")
    two.locator("h2", has_text="gaussian noise/1").first.wait_for()  # the slider waits for a moment before it asks
    for page, index, layer in ((one, 21, 0), (two, 22, 1)):
        settle(page)
        assert strongest(page, "0.0") == expected(models["plain"], shapes_batch([index], size=64)[0], layer, 11)
    assert one.locator("[data-image]").count() == two.locator("[data-image]").count() == 4
    assert one.locator("h2", has_text="gaussian noise/3").count() == 2
    assert not two.locator("h2", has_text="gaussian noise/3").count()


@pytest.mark.slow
def test_a_killed_server_is_reported_and_ctrl_c_ends_it(visit: Any, tmp_path: Path) -> None:
    vf.save(build("vit")[0], tmp_path / "model")
    command = [
        sys.executable,
        "-m",
        "vitfocus",
        "serve",
        str(tmp_path / "model"),
        "--no-browser",
        "--json",
        "--treat",
        "cbs",
    ]
    for ending in (signal.SIGKILL, signal.SIGINT):
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
        )
        assert server.stdout is not None
        page = visit(json.loads(server.stdout.readline())["url"])
        assert page.locator("[data-panel]").count() == 4  # plain and treated, clean and corrupted
        server.send_signal(ending)
        assert server.wait(30) == (0 if ending == signal.SIGINT else -signal.SIGKILL)
        page.locator('[data-control="step"]').fill("0")
        page.locator(".alert", has_text="does not answer. Start `vitfocus serve` again").wait_for()
        page.locator("#stage").focus()
        page.keyboard.press("ArrowUp")  # what is there can still be looked at
        give_up = page.locator("#file")
        give_up.set_input_files(picture(3))
        page.locator(".alert", has_text="does not answer").wait_for()


def axe() -> str | None:
    """The text of axe-core: from $VITFOCUS_AXE, the package axe-playwright-python, or node_modules here."""
    places = [os.environ.get("VITFOCUS_AXE"), Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"]
    if (package := importlib.util.find_spec("axe_playwright_python")) is not None:
        places += [Path(folder) / "axe.min.js" for folder in package.submodule_search_locations or ()]
    return next((Path(place).read_text("utf-8") for place in places if place and Path(place).is_file()), None)


@pytest.fixture(scope="module")
def pages(address: str, models: dict[str, torch.nn.Module], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The live page, a report with its explorer, and a gallery."""
    folder = tmp_path_factory.mktemp("pages")
    images = shapes_batch(range(2), size=64)[0]
    for name, model in models.items():
        vf.diagnose(model, images, "gaussian_noise/3", name=name).save(folder / "runs" / name)
        vf.evaluate({name: model}, "clean", (images, torch.tensor([0, 1])), out=folder / "scores", progress=False).save(
            folder / "runs" / name / "evaluation"
        )
        shutil.rmtree(folder / "scores")
    written = {
        "explorer": vf.explore(models, images, out=folder / "explorer.html").path,
        "report": vf.report(folder / "runs").path,
        "gallery": vf.report(folder / "runs", gallery=True, out=folder / "gallery.html").path,
    }
    return {"live": address} | {name: path.as_uri() for name, path in written.items() if path is not None}


def test_a_notebook_shows_the_explorer_in_a_frame(browser: Any, models: dict[str, torch.nn.Module]) -> None:
    found = vf.explore(models["plain"], shapes_batch(range(1), size=64)[0])._repr_html_()
    page = browser.new_page()
    page.set_content(f"<!doctype html><body>{found}</body>")
    frame = page.frame_locator("iframe")
    frame.locator('#stage[aria-busy="false"]').wait_for()
    frame.locator('[data-control="step"]').fill("0")
    frame.locator('#stage[aria-busy="false"]').wait_for()
    assert "Layer 0" in frame.locator('[data-panel="0.0"] > p').inner_text()
    page.close()


def test_the_gallery_sorts_by_every_column(browser: Any, pages: dict[str, str]) -> None:
    page = browser.new_page()
    page.goto(pages["gallery"])
    heads = page.locator(".sortable thead th")
    for index in range(heads.count()):
        for _ in range(2):  # one way, and the other
            heads.nth(index).locator("button").click()
            shown = page.locator(f".sortable tbody td:nth-child({index + 1})").evaluate_all(
                "cells => cells.map((cell) => cell.dataset.value)"
            )
            values = [one if index == 0 else float(one) for one in shown]
            down = heads.nth(index).get_attribute("aria-sort") == "descending"
            assert len(values) == 2 and values == sorted(values, reverse=down)
        assert page.locator("[aria-sort]").count() == 1
    page.set_viewport_size({"width": 390, "height": 800})
    page.locator(".sorting select").select_option("model")
    assert page.locator(".sortable tbody tr").first.inner_text().startswith("other")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("which", ["live", "explorer", "report", "gallery"])
def test_axe_finds_no_accessibility_violations(browser: Any, pages: dict[str, str], which: str, theme: str) -> None:
    program = axe()
    if program is None:
        pytest.skip("axe-core is not installed: pip install axe-playwright-python, or set VITFOCUS_AXE")
    for width in (1280, 390):
        _run_axe(browser, pages[which], program, theme, width, which in ("live", "explorer"))


def _run_axe(browser: Any, address: str, program: str, theme: str, width: int, explorer: bool) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=True)
    page = context.new_page()
    page.goto(address)
    if explorer:
        settle(page)
    page.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.evaluate(program)
    found = page.evaluate("() => axe.run()")["violations"]
    context.close()
    assert not [(one["id"], [node["html"][:90] for node in one["nodes"][:3]]) for one in found]
