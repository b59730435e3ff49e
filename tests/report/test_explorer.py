"""The explorer's data: true to the maps, within its budget, honest about what it leaves out."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers.tiny import build

import vitfocus as vf
from vitfocus.core.errors import VitfocusError
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.report import explorer_maps
from vitfocus.report.explorer import explorer_data, load_explorer, size_of, write_explorer
from vitfocus.report.runs import ReportModel


def pictures(size: tuple[int, int], count: int = 2) -> torch.Tensor:
    return shapes_batch(range(count), size=size)[0]


def unpack(layer: dict[str, Any], image: int, view: int) -> np.ndarray:
    """A layer's maps (maps, queries, keys) as the page reads them, written down independently of the packing."""
    blob = layer["maps"][image][view]
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
                kept = unpack(layer, image, view)
                assert layer["each"] and kept.shape == true.shape and layer["heads"] == len(true)
                top = true.max(axis=(1, 2), keepdims=True)
                # Half a level of the square root, which is widest at the top.
                assert (np.abs(kept - true) <= top * (1 / 63 + 1e-3)).all()
                received = np.sort(true.mean(axis=0).mean(axis=0))[::-1]
                share = received[: max(1, round(0.05 * len(received)))].sum() / received.sum()
                assert layer["maps"][image][view]["o"][0] == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize(("name", "said"), [("swin", "window"), ("mixer", "none"), ("xcit", "channel")])
def test_models_without_a_whole_map_are_refused(name: str, said: str) -> None:
    model, batch = build(name)
    with pytest.raises(VitfocusError, match=f"nothing to explore|no layer in which.*{said}"):
        explorer_data(model, pictures(tuple(batch.shape[-2:])))


def test_layers_that_cannot_be_explored_are_named() -> None:
    model, _ = build("cait")
    notes = explorer_data(model, pictures((64, 64)), None)["notes"]
    assert any("attend from the class token only, so they are not shown" in note for note in notes), notes


def test_the_budget_is_kept_and_what_is_left_out_is_said() -> None:
    torch.manual_seed(0)
    models = {
        name: timm.create_model("vit_tiny_patch16_224", img_size=128, depth=6, embed_dim=48, num_heads=4)
        for name in ("one", "two")
    }
    images = pictures((128, 128), 4)
    everything = explorer_data(models, images)
    assert not everything["notes"] and all(layer["each"] for m in everything["models"] for layer in m["layers"])
    budget = size_of(everything) // 3
    data = explorer_data(models, images, budget=budget)
    assert budget / 3 < size_of(data) <= budget and len(data["models"]) == 2
    kept = [(layer["depth"], layer["each"]) for layer in data["models"][0]["layers"]]
    assert (5, True) in kept and {0, 5} <= {depth for depth, _ in kept}
    said = " ".join(data["notes"])
    absent = set(range(6)) - {depth for depth, _ in kept}
    assert "left out to keep the page small" in said and (not absent or "one: left out" in said)
    tight = explorer_data(models, images, budget=budget // 20)
    assert len(tight["images"]) < 4 and "images" in " ".join(tight["notes"]) and size_of(tight) <= budget // 4


def test_large_maps_are_made_coarser_without_losing_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build("vit_rect")  # 4 by 6 patches of 64 by 96 pixels, one class token: 25 x 25 entries
    monkeypatch.setattr(explorer_maps, "ENTRIES", 300)
    images = pictures((64, 96))
    layer = explorer_data(model, images, None)["models"][0]["layers"][-1]
    assert layer["group"] != [1, 1]
    true = vf.attention_maps(model, images[:1], layers=[layer["name"]])[0][0].double().numpy()
    kept = unpack(layer, 0, 0)
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
    subjects = []
    for index, shown in enumerate((images, images[:2], images.flip(-1))):
        folder = tmp_path / str(index)
        write_explorer(folder, explorer_data(build("vit", seed=index)[0], shown))
        subjects.append(ReportModel(f"model {index}", folders=[folder]))
    joined = load_explorer(subjects)
    assert joined is not None
    assert [model["name"] for model in joined["models"]] == ["model 0", "model 1"] and len(joined["images"]) == 2
    assert joined["notes"] == [
        "Only images that every model was explored on are shown.",
        "model 2 was explored on other images, so it is not shown here.",
    ]
    small = load_explorer(subjects[:2], budget=size_of(json.loads((tmp_path / "0" / "explorer.json").read_text())))
    assert small is not None and len(small["images"]) == 3  # what is left out takes no image along
    (note,) = small["notes"]
    assert note.startswith("model 1 is left out to keep the page small") and "--limit" in note


def test_the_number_of_images_that_is_said_is_the_number_shown(tmp_path: Path) -> None:
    """Two explorations keep different numbers of the same images; joined, the page shows the fewer."""
    images = pictures((128, 128), 6)
    subjects, kept = [], []
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=128, depth=6, embed_dim=48, num_heads=4)
    for budget in (30_000, 20_000):
        data = explorer_data(model, images, budget=budget)
        kept.append(len(data["images"]))
        write_explorer(tmp_path / str(budget), data)
        subjects.append(ReportModel(f"within {budget}", folders=[tmp_path / str(budget)]))
    assert 1 < kept[1] < kept[0] < 6
    joined = load_explorer(subjects)
    assert joined is not None and len(joined["models"]) == 2
    (said,) = [note for note in joined["notes"] if "images" in note]
    assert said.startswith(f"Shown here: {len(joined['images'])} of 6 images") and len(joined["images"]) == kept[1]
    assert "with fewer (--limit N, or limit=N) there is room for more layers and heads" in said


def test_models_of_different_sizes_share_a_page() -> None:
    models = {"small": build("vit")[0], "wide": build("vit_rect")[0]}
    data = explorer_data(models, pictures((64, 64)), None)
    grids = [model["layers"][0]["queries"] for model in data["models"]]
    assert grids == [[4, 4], [4, 6]]


@pytest.mark.parametrize("images", [torch.zeros(1, 3, 64, 64), torch.zeros(0, 3, 64, 64, dtype=torch.uint8)])
def test_images_must_be_pixels(images: torch.Tensor) -> None:
    with pytest.raises(VitfocusError, match="uint8 images"):
        explorer_data(build("vit")[0], images)
