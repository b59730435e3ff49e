"""The explorer's data: true to the maps, within its budget, honest about what it leaves out."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers.tiny import build

import vitfocus as vf
from vitfocus.attention.readings import cell
from vitfocus.core.errors import VitfocusError
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.kernels.statistics.reference import overfocus, received
from vitfocus.report import explorer
from vitfocus.report.explorer import explorer_data, load_explorer, write_explorer
from vitfocus.report.explorer_maps import SHOWN
from vitfocus.report.runs import ReportModel
from vitfocus.treatments.save_load import remember_task


def pictures(size: tuple[int, int], count: int = 2) -> torch.Tensor:
    return shapes_batch(range(count), size=size)[0]


def unpack(data: dict[str, Any], layer: dict[str, Any], image: int, view: int) -> np.ndarray:
    """A layer's maps (heads, queries, keys) as the page reads them, written down independently of the packing."""
    blob = data["chunks"][layer["chunks"][image]][view]
    queries, keys = (layer["prefix"] + rows * columns for rows, columns in (layer["queries"], layer["keys"]))
    levels = np.frombuffer(zlib.decompress(base64.b64decode(blob["d"])), np.uint8).reshape(-1, keys, queries)
    return np.stack([top * (one.T / 63.0) ** 2 for one, top in zip(levels, blob["m"], strict=True)])


@pytest.mark.parametrize("name", ["vit", "vit_rect", "vit_registers", "pvt", "pvt_v2", "mvit", "cait", "eva02"])
def test_maps_survive_the_packing(name: str) -> None:
    model, batch = build(name)
    images = pictures(tuple(batch.shape[-2:]))
    data = explorer_data(model, images, "fog/2")
    assert len(data["images"]) == 2 and all(len(image["views"]) == 2 for image in data["images"])
    (made,) = data["models"]
    corrupted = vf.corrupt(images, "fog", 2, ids=[0, 1])
    for layer in made["layers"][-2:]:
        for view, seen in enumerate((images, corrupted)):
            for image in range(2):
                true = vf.attention_maps(model, seen[image : image + 1], layers=[layer["name"]])[0][0].numpy()
                kept = unpack(data, layer, image, view)
                assert kept.shape == true.shape and layer["heads"] == len(true)
                top = true.max(axis=(1, 2), keepdims=True)
                # Half a level of the square root, which is widest at the top.
                assert (np.abs(kept - true) <= top * (1 / 63 + 1e-3)).all()


def map_bytes(data: dict[str, Any]) -> int:
    """Bytes of the maps as base64 text."""
    return sum(len(view["d"]) for views in data["chunks"].values() for view in views)


def test_readings_are_those_of_the_table() -> None:
    """The same number in the same words: all heads as the diagnosis of that image, and each head on its own."""
    model, _ = build("vit")
    images = pictures((64, 64), 1)
    data = explorer_data(model, images, "fog/2")
    diagnosis = vf.diagnose(model, images, "fog/2")
    noisy = vf.diagnose(model, vf.corrupt(images, "fog", 2, ids=[0]))
    for layer, clean, corrupted in zip(data["models"][0]["layers"], diagnosis.rows, noisy.rows, strict=True):
        views = data["chunks"][layer["chunks"][0]]
        expected = {key: cell(clean, key) for key in SHOWN if key in clean}
        stability = expected.pop("stability")
        assert views[0]["r"][0] == expected
        assert views[1]["r"][0] == {key: cell(corrupted, key) for key in SHOWN if key in corrupted} | {
            "stability": stability
        }
        maps = vf.attention_maps(model, images, layers=[layer["name"]])[0][0]
        for head, one in enumerate(maps):
            told = views[0]["r"][1 + head]
            assert told["overfocus"] == f"{float(overfocus(received(one[None]))):.1%}"
            assert told["entropy"] == f"{float(-(one * one.log()).sum(-1).mean()):.2f}"


def test_predictions_are_the_models_with_the_names_of_its_classes() -> None:
    model, _ = build("vit")
    images = pictures((64, 64), 1)
    told = explorer_data(model, images, "fog/2")["models"][0]["predictions"]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (vf.anatomy(model).mean, vf.anatomy(model).std))
    for view, seen in enumerate((images, vf.corrupt(images, "fog", 2, ids=[0]))):
        with torch.no_grad():
            shares = model(((seen / 255 - mean) / std).float())[0].softmax(0)
        name, share = told[0][view][0]
        assert name == f"class {int(shares.argmax())}" and share == pytest.approx(float(shares.max()), rel=1e-3)
    names = [f"<{letter}>" for letter in "abcdefghijklmnop"[: len(shares)]]
    remember_task(model, {"task": "classify", "classes": names})
    (best,) = explorer_data(model, images[:1], None)["models"][0]["predictions"][0]
    assert best[0][0] == names[int(told[0][0][0][0].removeprefix("class "))]


@pytest.mark.parametrize(("name", "said"), [("swin", "window"), ("mixer", "none"), ("xcit", "channel")])
def test_models_without_a_whole_map_are_refused(name: str, said: str) -> None:
    model, batch = build(name)
    with pytest.raises(VitfocusError, match=f"nothing to explore|no layer in which.*{said}"):
        explorer_data(model, pictures(tuple(batch.shape[-2:])))


def test_layers_that_cannot_be_explored_are_named() -> None:
    model, _ = build("cait")
    notes = explorer_data(model, pictures((64, 64)), None)["notes"]
    assert any("attention from the class token only, so they are not shown" in note for note in notes), notes


def test_every_layer_and_head_is_kept_within_the_budget() -> None:
    torch.manual_seed(0)
    models = {
        name: timm.create_model("vit_tiny_patch16_224", img_size=128, depth=6, embed_dim=48, num_heads=4)
        for name in ("one", "two")
    }
    images = pictures((128, 128), 4)
    everything = explorer_data(models, images)
    assert not everything["notes"] and len(everything["images"]) == 4
    budget = map_bytes(everything) / 1e6
    for part in (0.6, 0.02):
        data = explorer_data(models, images, budget=part * budget)
        assert 0 < map_bytes(data) <= 1e6 * part * budget and len(data["images"]) < 4
        for model in data["models"]:
            assert [layer["depth"] for layer in model["layers"]] == list(range(6))
            assert all(len(view["m"]) == 4 for layer in model["layers"] for view in data["chunks"][layer["chunks"][0]])
        said = " ".join(data["notes"])
        assert f"{len(data['images'])} of 4 images; a larger --budget" in said and "--limit" not in said
        assert ("patches are merged" in said) == (part == 0.02)


def test_large_maps_are_made_coarser_without_losing_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build("vit_rect")  # 4 by 6 patches of 64 by 96 pixels, one class token: 25 x 25 entries
    monkeypatch.setattr(explorer, "ENTRIES", 300)
    images = pictures((64, 96))
    data = explorer_data(model, images, None)
    layer = data["models"][0]["layers"][-1]
    assert layer["group"] != (1, 1)
    true = vf.attention_maps(model, images[:1], layers=[layer["name"]])[0][0].double().numpy()
    kept = unpack(data, layer, 0, 0)
    (rows, columns), (q, k) = (4, 6), layer["group"]

    def places(group: int) -> np.ndarray:
        patches = [1 + (r // group) * -(-columns // group) + c // group for r in range(rows) for c in range(columns)]
        return np.array([0, *patches])

    expected = np.zeros_like(kept)
    counts = np.bincount(places(q))
    for i, a in enumerate(places(q)):
        for j, b in enumerate(places(k)):
            expected[:, a, b] += true[:, i, j] / counts[a]
    assert np.abs(kept - expected).max() <= expected.max() / 63 + 1e-3
    assert expected.sum(axis=2) == pytest.approx(1.0)


def test_two_explorations_are_joined_where_they_show_the_same_images(tmp_path: Path) -> None:
    images = pictures((64, 64), 3)
    models = []
    for index, shown in enumerate((images, images[:2], images.flip(-1))):
        folder = tmp_path / str(index)
        write_explorer(folder, explorer_data(build("vit", seed=index)[0], shown))
        models.append(ReportModel(f"model {index}", folders=[folder]))
    joined = load_explorer(models)
    assert joined is not None
    assert [model["name"] for model in joined["models"]] == ["model 0", "model 1"] and len(joined["images"]) == 2
    assert joined["notes"] == [
        "Only images that every model was explored on are shown.",
        "model 2 was explored with different images, so it is not shown here.",
    ]


def test_maps_beyond_the_page_are_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page in the run's folder uses the run's own files; one elsewhere gets copies, and old copies are removed."""
    monkeypatch.setattr(explorer, "INLINE", 1500)
    run, out = tmp_path / "run", tmp_path / "out" / "page.html"
    model, _ = build("vit")
    images = pictures((64, 64), 2)
    vf.diagnose(model, images, name="tiny").save(run)
    data = explorer_data(model, images)
    write_explorer(run, data)
    inside = page_data(vf.report(run).path)
    assert inside["chunks"] and inside["files"].keys() | inside["chunks"].keys() == data["chunks"].keys()
    assert all((run / url).is_file() and url.startswith("explorer-maps/") for url in inside["files"].values())
    assert not (run / "report-data").exists()
    copied = page_data(vf.report(run, out=out).path)
    assert all((out.parent / url).is_file() and url.startswith("page-data/") for url in copied["files"].values())
    stale = out.parent / "page-data" / f"{'0' * 16}.js"
    stale.write_text("old")
    vf.report(run, out=out)
    assert not stale.exists() and len(list(stale.parent.iterdir())) == len(copied["files"])


def page_data(page: Path) -> dict[str, Any]:
    (found,) = re.findall(r'id="explorer-data">(.*?)</script>', page.read_text("utf-8"))
    return json.loads(found)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text + "alert(1)",
        lambda text: text.replace("vitfocusChunk(", "alert(", 1),
        lambda text: text.replace('"d":', '"x":alert(1),"d":', 1),
        lambda text: text.replace('"d":', '"more":1,"d":', 1),
        lambda text: "",
    ],
)
def test_a_changed_script_is_not_taken_over(tmp_path: Path, spoil: Any) -> None:
    model, _ = build("vit")
    images = pictures((64, 64), 1)
    vf.diagnose(model, images, name="tiny").save(tmp_path)
    write_explorer(tmp_path, explorer_data(model, images))
    file = sorted((tmp_path / "explorer-maps").iterdir())[0]
    file.write_text(spoil(file.read_text()))
    with pytest.raises(VitfocusError, match=r"cannot be read|not as vitfocus wrote it|explorer-maps"):
        vf.report(tmp_path)


def test_models_of_different_sizes_share_a_page() -> None:
    models = {"small": build("vit")[0], "wide": build("vit_rect")[0]}
    data = explorer_data(models, pictures((64, 64)), None)
    grids = [model["layers"][0]["queries"] for model in data["models"]]
    assert grids == [(4, 4), (4, 6)]


@pytest.mark.parametrize("images", [torch.zeros(1, 3, 64, 64), torch.zeros(0, 3, 64, 64, dtype=torch.uint8)])
def test_images_must_be_pixels(images: torch.Tensor) -> None:
    with pytest.raises(VitfocusError, match="uint8 images"):
        explorer_data(build("vit")[0], images)
