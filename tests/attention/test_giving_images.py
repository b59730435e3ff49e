"""One way to give images: diagnose, attention_maps, evaluate and corrupt take the same things, prepared alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.data.shapes.dataset import shapes_batch

SIZE = 32
MEAN, STD = (torch.tensor([0.5, 0.5, 0.5]).view(3, 1, 1),) * 2  # of the model below


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", depth=1, img_size=SIZE, num_classes=4).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs in four class folders: one of the model's size, others not, one that its EXIF data turns."""
    root = tmp_path_factory.mktemp("photographs")
    for index, size in enumerate(((SIZE, SIZE), (60, 40), (37, 81), (50, 70))):
        pixels, _ = shapes_batch([index], size=size)
        picture = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
        exif = Image.Exif()
        exif[0x0112] = 6 if index == 3 else 1
        (root / str(index)).mkdir()
        picture.save(root / str(index) / "a.png", exif=exif)
    return root


def given(model: nn.Module, call: Any) -> Tensor:
    """What the model is given during a call."""
    seen: list[Tensor] = []
    handle = model.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    try:
        call()
    finally:
        handle.remove()
    return torch.cat([batch for batch in seen if len(batch)])


def test_every_form_of_an_image_is_the_same_image(model: nn.Module, folder: Path) -> None:
    files = sorted(folder.rglob("*.png"))
    expected = given(model, lambda: vf.diagnose(model, folder))
    opened = [Image.open(file) for file in files]
    labels = [0, 1, 2, 3]
    for form in (
        str(folder),
        files,
        [str(file) for file in files],
        opened,
        list(zip(opened, labels, strict=True)),
        DataLoader(opened, batch_size=3, collate_fn=list),  # type: ignore[arg-type]
    ):
        assert torch.equal(given(model, lambda: vf.diagnose(model, form)), expected)  # noqa: B023
    # As evaluate shows them to the model, whose first forward pass counts the classes.
    for data in (folder, (opened, labels), (files, labels), list(zip(files, labels, strict=True))):
        scores = given(model, lambda: vf.evaluate(model, "clean", data, progress=False, device="cpu"))  # noqa: B023
        assert torch.allclose(scores[1:], expected, atol=1e-6)


def test_pixels_are_pixels_in_every_type(model: nn.Module) -> None:
    pixels, labels = shapes_batch(range(4), size=SIZE)
    rows = vf.diagnose(model, pixels).rows
    arrays = pixels.permute(0, 2, 3, 1).numpy()
    normalised = (pixels / 255 - MEAN) / STD
    for form in (
        pixels / 255,
        (pixels / 255).double(),
        list(pixels / 255),
        arrays,
        arrays.astype(np.float32) / 255,
        list(arrays),
        pixels.numpy(),
        DataLoader(TensorDataset(pixels / 255, labels), batch_size=2),
        normalised,
    ):
        for found, row in zip(vf.diagnose(model, form).rows, rows, strict=True):
            assert all(found[key] == pytest.approx(row[key], abs=1e-4) for key in ("entropy", "overfocus"))
    maps = [vf.attention_maps(model, form)[0] for form in (pixels, pixels / 255, arrays, normalised)]
    assert all(torch.allclose(found, maps[0], atol=1e-5) for found in maps[1:])
    kinds = [vf.diagnose(model, form).taken_as for form in (pixels, pixels / 255, normalised)]
    assert kinds == ["pixels", "pixels", "normalised (assumed)"]
    assert "were taken as normalised" in vf.diagnose(model, normalised).table().caption
    said = vf.diagnose(model, normalised, normalised=True)
    assert said.taken_as == "normalised" and "taken as" not in said.table().caption
    assert vf.attention.diagnosis.Diagnosis.from_dict(said.to_dict()).taken_as == "normalised"


def test_the_range_of_values_catches_mistakes(model: nn.Module) -> None:
    pixels, _ = shapes_batch(range(2), size=SIZE)
    normalised = (pixels / 255 - MEAN) / STD
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (pixels.float(), {}, r"expected \[0, 1\]: divide them by 255"),
        (normalised, {"normalised": False}, "say normalised=True"),
        (pixels, {"normalised": True}, "for float tensors"),
        ([pixels / 255, normalised], {}, "expected \\[0, 1\\]"),
        (pixels.permute(0, 2, 3, 1).numpy().astype(float), {}, "divide them by 255"),
    ]
    for images, options, message in wrong:
        for verb in (vf.diagnose, vf.attention_maps):
            with pytest.raises(vf.VitfocusError, match=message):
                verb(model, images, **options)
    with pytest.warns(vf.VitfocusWarning, match="as pixels do"):
        vf.diagnose(model, pixels / 255, normalised=True)


def test_evaluate_undoes_a_normalisation_only_if_told(model: nn.Module) -> None:
    pixels, _ = shapes_batch(range(6), size=SIZE)
    labels = torch.arange(6) % 4
    normalised = (pixels / 255 - MEAN) / STD
    options: dict[str, Any] = {"corruptions": "fog", "severities": 2, "progress": False, "device": "cpu"}
    plain = vf.evaluate(model, "imagenet-c", (pixels, labels), **options)
    told = vf.evaluate(model, "imagenet-c", [(normalised, labels)], normalised=True, **options)
    pair = vf.evaluate(model, "imagenet-c", (normalised, labels), normalised=True, **options)
    for scores in (told, pair):
        for cell, found in scores.samples.items():
            names = [next(iter(one.values()))["confidence"] for one in (found, plain.samples[cell])]
            assert np.allclose(*names, atol=1e-5)
    with pytest.raises(vf.VitfocusError, match="set normalised=True"):
        vf.evaluate(model, "clean", (normalised, labels), progress=False)
    with pytest.raises(vf.VitfocusError, match="normalised differently"):
        vf.evaluate(model, "clean", (normalised * 2, labels), normalised=True, progress=False)
    for data in ("shapes:4", (list(pixels.permute(0, 2, 3, 1).numpy()), labels)):
        with pytest.raises(vf.VitfocusError, match="normalised=True is for"):
            vf.evaluate(model, "clean", data, normalised=True, progress=False)
    for data in (pixels, list(pixels), [Image.new("RGB", (9, 9))]):
        with pytest.raises(vf.VitfocusError, match=r"label"):
            vf.evaluate(model, "clean", data, progress=False)


def test_what_the_command_line_takes_python_takes(
    model: nn.Module, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, _ = shapes_batch(range(5), split="val", size=SIZE)
    assert vf.diagnose(model, "shapes:5").rows == vf.diagnose(model, drawn).rows
    ten = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=SIZE, num_classes=10)
    assert vf.evaluate(ten, "clean", "shapes:5", progress=False).images == 5
    assert vf.diagnose(model, folder, against=folder).rows[0]["stability"] == pytest.approx(1, abs=1e-6)
    tiny = "vit_tiny_patch16_224"
    assert main(["diagnose", tiny, "--images", "shapes:2", "--json"]) == 0
    assert '"images": 2,' in capsys.readouterr().out
    assert main(["diagnose", tiny, "--images", "shapes:many"]) == 2
    assert "no valid number of scenes" in capsys.readouterr().err


def test_corrupt_returns_what_it_was_given(folder: Path) -> None:
    pixels, labels = shapes_batch(range(4), size=SIZE)
    expected = vf.corrupt(pixels, "shot_noise", 2)
    arrays = pixels.permute(0, 2, 3, 1).numpy()
    wanted = expected.permute(0, 2, 3, 1).numpy()
    assert np.array_equal(vf.corrupt(arrays, "shot_noise", 2), wanted)
    assert np.allclose(vf.corrupt(arrays.astype(np.float32) / 255, "shot_noise", 2), wanted / 255, atol=1e-6)
    assert np.array_equal(vf.corrupt(pixels.numpy(), "shot_noise", 2), expected.numpy())
    pictures = vf.corrupt([Image.fromarray(one) for one in arrays], "shot_noise", 2)
    assert all(np.array_equal(np.asarray(one), array) for one, array in zip(pictures, wanted, strict=True))
    single = vf.corrupt(Image.fromarray(arrays[2]), "shot_noise", 2, ids=2)
    assert isinstance(single, Image.Image) and np.array_equal(np.asarray(single), wanted[2])
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=3)
    batches = list(vf.corrupt(loader, "shot_noise", 2))
    assert torch.equal(torch.cat([images for images, _ in batches]), expected)
    assert torch.equal(torch.cat([names for _, names in batches]), labels)
    found = vf.corrupt(folder, "shot_noise", 2)
    first = np.asarray(Image.open(folder / "0" / "a.png"))
    assert np.array_equal(np.asarray(found[0]), vf.corrupt(first, "shot_noise", 2, ids=["0/a.png"]))
    assert [one.size for one in found] == [(32, 32), (40, 60), (81, 37), (50, 70)]  # each at its own size, upright
    with pytest.raises(vf.VitfocusError, match="3 ids for 4 images"):
        vf.corrupt(arrays, "fog", ids=[1, 2, 3])
    with pytest.raises(vf.VitfocusError, match="Images are a NoneType"):
        vf.corrupt(None, "fog")


def test_corrupt_takes_data_sets_and_shapes() -> None:
    pixels, labels = shapes_batch(range(3), split="val")
    expected = vf.corrupt(pixels, "gaussian_noise")
    assert torch.equal(vf.corrupt("shapes:3", "gaussian_noise"), expected)
    pictures = [(Image.fromarray(one.permute(1, 2, 0).numpy()), 0) for one in pixels]
    for data in (TensorDataset(pixels, labels), Listed(pictures)):
        items = list(vf.corrupt(data, "gaussian_noise"))
        found = [np.asarray(one) if isinstance(one, Image.Image) else one.permute(1, 2, 0).numpy() for one, _ in items]
        assert len(items) == 3 and (np.stack(found) == expected.permute(0, 2, 3, 1).numpy()).all()


class Listed(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_one_labelled_image_can_be_evaluated(model: nn.Module, folder: Path) -> None:
    picture = folder / "0" / "a.png"
    tensor = torch.from_numpy(np.asarray(Image.open(picture).convert("RGB")).copy()).permute(2, 0, 1)
    found = [vf.evaluate(model, "clean", data=(one, [2]))["top1"] for one in (picture, str(picture), tensor)]
    assert len(set(found)) == 1
