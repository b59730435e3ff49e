"""The live page's server: what it lets in, what it refuses, and that its answers are the model's own."""

from __future__ import annotations

import base64
import io
import json
import re
import runpy
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import build
from PIL import Image

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.report import serve

pytest.importorskip("starlette", reason="starlette is not installed: pip install vitfocus[serve]")
testclient = pytest.importorskip("starlette.testclient", reason="httpx is not installed: pip install vitfocus[dev]")

TOKEN = "a-secret"
HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {HOSTILE: build("vit", seed=1)[0], "rectangular": build("vit_rect", seed=2)[0]}


@pytest.fixture(scope="module")
def client(models: dict[str, torch.nn.Module]) -> Any:
    app = serve.create_app(models, token=TOKEN)
    return testclient.TestClient(app, base_url="http://127.0.0.1", headers={"X-Token": TOKEN})


def picture(size: tuple[int, int] = (64, 64), form: str = "PNG", **options: Any) -> bytes:
    """A file of an image that all models take without resizing, unless another size is asked for."""
    content = io.BytesIO()
    Image.fromarray(shapes_batch([7], size=size)[0][0].permute(1, 2, 0).numpy()).save(content, form, **options)
    return content.getvalue()


def give(client: Any, content: bytes, name: str = "a.png") -> Any:
    return client.post("/pictures", params={"name": name}, content=content)


def test_the_page_needs_its_token_and_its_host(client: Any) -> None:
    assert client.get("/").status_code == client.get("/?token=wrong").status_code == 403
    answer = client.get(f"/?token={TOKEN}")
    assert answer.status_code == 200 and answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["cache-control"] == "no-store"
    for path in ("/look", "/maps"):
        assert client.get(path, headers={"X-Token": "wrong"}).status_code == 403
    assert client.post("/pictures", content=picture(), headers={"X-Token": ""}).status_code == 403
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80"):  # DNS rebinding
        assert client.get(f"/?token={TOKEN}", headers={"Host": host}).status_code == 400
    cross = client.get(f"/?token={TOKEN}", headers={"Origin": "https://evil.example"})
    assert not any(name.startswith("access-control") for name in cross.headers)
    assert client.options("/pictures", headers={"Origin": "https://evil.example"}).status_code == 405


def test_names_are_escaped(client: Any) -> None:
    html = client.get(f"/?token={TOKEN}").text
    assert HOSTILE not in html and html.count("<script") == 2  # the data and the program
    (data,) = re.findall(r'id="explorer-data">(.*?)</script>', html)
    assert json.loads(data)["models"][0]["name"] == HOSTILE
    assert "https://" not in re.sub(r'"headings".*', "", data) and 'src="http' not in html


def test_live_page_equals_the_library(client: Any, models: dict[str, torch.nn.Module]) -> None:
    """Photographs, predictions and maps of an upload equal what the library computes from the same pixels."""
    given = give(client, picture()).json()
    image = shapes_batch([7], size=64)[0]  # of the model's size, so it is neither resized nor cropped
    asked = {"picture": given["id"], "against": "contrast/4"}
    seen = client.get("/look", params=asked).json()["models"]
    assert [len(one["views"]) for one in seen] == [2, 2] and all(url.startswith("data:") for url in seen[0]["views"])
    model = models[HOSTILE]
    noisy = vf.corrupt(image, "contrast", 4)
    for view, pixels in enumerate((image, noisy)):
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in _normal(model))
        with torch.no_grad():
            shares = model((pixels / 255 - mean) / std)[0].softmax(0)
        assert seen[0]["best"][view][0] == [
            f"class {int(shares.argmax())}",
            pytest.approx(float(shares.max()), rel=2e-3),
        ]
        for layer in (0, 1):
            views = client.get("/maps", params={**asked, "model": 0, "layer": layer}).json()
            true = vf.attention_maps(model, pixels, layers=[layer])[0][0].numpy()
            levels = np.frombuffer(zlib.decompress(base64.b64decode(views[view]["d"])), np.uint8)
            kept = levels.reshape(true.shape).transpose(0, 2, 1) / 63.0
            tops = np.array(views[view]["m"])[:, None, None]
            assert np.abs(tops * kept**2 - true).max() <= true.max() * (1 / 63 + 1e-3)
            assert ("stability" in views[view]["r"][0]) == bool(view)
    wide = client.get("/maps", params={**asked, "model": 1, "layer": 0}).json()
    assert len(zlib.decompress(base64.b64decode(wide[0]["d"]))) % 25**2 == 0  # its own size: 4 x 6 patches


def _normal(model: torch.nn.Module) -> tuple[Any, Any]:
    body = vf.anatomy(model)
    return body.mean, body.std


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_usual_formats_are_accepted(client: Any, form: str) -> None:
    answer = give(client, picture((90, 70), form), "é<b>.img")
    assert answer.status_code == 200 and answer.json()["name"] == "é<b>.img"


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be huge."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read as an image"),
        (b"<html>", "cannot be read as an image"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "cannot be read as an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read as an image"),  # would start Ghostscript
        (picture()[:200], "cannot be read as an image"),
        (picture(form="JPEG")[:150], "cannot be read as an image"),
        (bomb(8000, 8000), "8000 x 8000 pixels; expected at most 40 million"),
        (bomb(60000, 60000), "cannot be read as an image"),
        (bytes(serve.BYTES + 1), "more than 20 MB"),
    ],
    ids=["empty", "html", "svg", "eps", "png cut", "jpeg cut", "too large", "bomb", "too long"],
)
def test_bad_files_are_refused_in_one_sentence(client: Any, content: bytes, said: str) -> None:
    answer = give(client, content, "bad")
    assert answer.status_code == 400 and said in answer.json()["error"] and "\n" not in answer.json()["error"]
    assert give(client, picture()).status_code == 200  # and the next one is taken


@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        ("/look", {"picture": "0" * 32}, "no longer stored"),
        ("/look", {"against": "fogg/2"}, "did you mean 'fog'"),
        ("/look", {"against": "fog/9"}, "Severity 9"),
        ("/maps", {"model": "0", "layer": "99"}, "There is no layer 99"),
        ("/maps", {"model": "-1", "layer": "0"}, "There is no layer"),
        ("/maps", {"model": "x", "layer": "0"}, "are numbers"),
        ("/maps", {}, "are numbers"),
    ],
)
def test_invalid_requests_are_refused(client: Any, path: str, asked: dict[str, str], said: str) -> None:
    given = give(client, picture()).json()["id"]
    answer = client.get(path, params={"picture": given, **asked})
    assert answer.status_code == 400 and said in answer.json()["error"]


def test_old_pictures_are_dropped_and_ids_cannot_be_guessed(
    models: dict[str, torch.nn.Module], monkeypatch: Any
) -> None:
    monkeypatch.setattr(serve, "_PICTURES", 3)
    one, two = (serve.Live(models) for _ in range(2))
    content = Image.open(io.BytesIO(picture()))
    first = one.add(content)
    assert first == one.add(content) != two.add(content)  # an id depends on a secret of the server
    for shade in range(3):
        one.add(Image.new("RGB", (64, 64), (shade, 0, 0)))
    with pytest.raises(VitfocusError, match="no longer stored"):
        one.look(first, "")


def test_space_needs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITFOCUS_PRETRAINED", "0")
    monkeypatch.setenv("VITFOCUS_MODELS", "vit_tiny_patch16_224 vit_tiny_patch16_224+cbs")
    open_model = vf.open_model
    monkeypatch.setattr(vf, "open_model", lambda name, **_: open_model(name, depth=2, img_size=32))
    app = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "space" / "app.py"))["app"]
    client = testclient.TestClient(app, base_url="https://somebody-vitfocus.hf.space")
    assert "x-frame-options" not in client.get("/").headers  # a Space is shown in a frame
    given = give(client, picture()).json()["id"]
    seen = client.get("/look", params={"picture": given, "against": "fog/1"}).json()["models"]
    assert len(seen) == 2 and client.get("/maps", params={"picture": given, "model": 1, "layer": 1}).status_code == 200


def test_missing_files_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(VitfocusError, match="pip install 'vitfocus\\[serve\\]'"):
        serve.create_app(build("vit")[0])
    for words, said in (
        (["a", "b", "c"], "one or two models, not 3"),
        (["a", "b", "--treat", "cb"], "give one MODEL"),
        (["a", "--port", "99999"], "--port is 99999"),
        (["a", "--images", "no/such"], "no/such"),
    ):
        assert main(["serve", *words]) == 2
        assert said in capsys.readouterr().err
