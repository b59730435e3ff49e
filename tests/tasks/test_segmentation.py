"""Segmentation: the published sizes, scores against a naive count, sliding windows, layouts, and runs that survive."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.data.loader import Broken, Samples
from vitfocus.data.segmentation.batches import RandomCrop
from vitfocus.data.segmentation.dataset import CITYSCAPES_IDS, open_masks
from vitfocus.data.shapes.layouts import write_layout
from vitfocus.recipes import Data
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.suites.segmentation import severities_by_type
from vitfocus.tasks.base import start_from
from vitfocus.tasks.segmentation.evaluation import InferenceSettings, class_counts, predict, scores_of, slide
from vitfocus.train import Recipe, load_recipe
from vitfocus.train.optimiser import TrainingSchedule
from vitfocus.train.run import train

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 2, "channels": 8}
TINY = [
    "model.arguments={img_size=32,patch_size=8,embed_dim=24,depth=4,num_heads=2,channels=8,auxiliary_channels=4}",
    *("size=32", "train_length=24", "val_length=6", "batch=4", "epochs=1", "warmup_epochs=0", "log_every=1"),
    *("checkpoint_steps=3", "device=cpu"),
]


def tiny(*overrides: str) -> Recipe:
    return load_recipe("shapes_segment", [*TINY, *overrides])


def small(spec: str = "upernet:vit_tiny_patch16_224", classes: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return vf.create_model(spec, num_classes=classes, **SMALL).eval()


def parameters(spec: str, **arguments: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in vf.create_model(spec, **arguments).parameters())


def test_upernet_has_the_published_sizes() -> None:
    for letter, millions in (("tiny", 34.06), ("small", 53.55), ("base", 127.02)):
        for spec in (f"vit_{letter}_patch16_224", f"deit_{letter}_patch16_224"):
            assert round(parameters(f"upernet:{spec}", num_classes=150) / 1e6, 2) == millions
    recipe = load_recipe("ade20k_upernet_s")
    assert round(parameters(recipe.model.spec, num_classes=150, **recipe.model.arguments) / 1e6, 2) == 53.55


def test_fan_gives_segformer_the_published_widths() -> None:
    with torch.device("meta"):
        model = vf.create_model("segformer:fan_base_16_p4_hybrid", num_classes=19)
    assert model.features.widths == (128, 256, 448, 448) and model.features.strides == (4, 8, 16, 32)


def test_scores_equal_a_naive_count() -> None:
    draw = np.random.default_rng(0)
    truth, guess = draw.integers(0, 6, (3, 20, 21)), draw.integers(0, 7, (3, 20, 21))
    truth[:, :2] = 255
    counts = class_counts(torch.from_numpy(truth), torch.from_numpy(guess), 7)
    counted = truth != 255
    iou, accuracy = [], []
    for label in range(7):
        is_truth, is_guess = (truth == label) & counted, (guess == label) & counted
        if (is_truth | is_guess).any():
            iou.append((is_truth & is_guess).sum() / (is_truth | is_guess).sum())
        if is_truth.any():
            accuracy.append((is_truth & is_guess).sum() / is_truth.sum())
    scores = scores_of(counts.sum(0))
    assert scores["miou"] == pytest.approx(np.mean(iou)) and len(iou) == 7  # class 6 is only ever guessed
    assert scores["macc"] == pytest.approx(np.mean(accuracy)) and len(accuracy) == 6
    assert scores["aacc"] == pytest.approx((truth == guess)[counted].mean())
    for wrong in (5, -1):
        with pytest.raises(VitfocusError, match=f"has the class {wrong}, but the model has 3"):
            class_counts(torch.tensor([[2, wrong]]), torch.tensor([[0, 0]]), 3)


def test_full_size_window_changes_nothing_and_smaller_windows_are_averaged() -> None:
    model, images = small(), torch.randn(2, 3, 40, 56)
    with torch.no_grad():
        whole = model(images)
        assert whole.shape == (2, 5, 40, 56)
        torch.testing.assert_close(slide(model, images, 64, 16), whole)
        expected, count = torch.zeros_like(whole), torch.zeros(40, 56)
        for top in (0, 8):
            for left in (0, 20, 24):
                expected[..., top : top + 32, left : left + 32] += model(images[..., top : top + 32, left : left + 32])
                count[top : top + 32, left : left + 32] += 1
        torch.testing.assert_close(slide(model, images, 32, 20), expected / count)
        both = model(images).softmax(1) + model(images.flip(3)).softmax(1).flip(3)
        torch.testing.assert_close(predict(model, images, InferenceSettings(flip=True)), both)
        assert predict(model, images, InferenceSettings(), (80, 112)).shape == (2, 5, 80, 112)
    with pytest.raises(VitfocusError, match="leaves gaps"):
        InferenceSettings(window=32, stride=40)
    with pytest.raises(VitfocusError, match="no effect without a window"):
        InferenceSettings(stride=8)


@pytest.mark.parametrize("spec", ["upernet:vit_tiny_patch16_224", "segformer:vit_tiny_patch16_224"])
def test_diversification_loss_is_nonzero_at_batch_size_1(spec: str) -> None:
    arguments = {**SMALL, "img_size": 64} if spec.startswith("upernet") else {**SMALL, "img_size": 64, "channels": None}
    arguments = {key: value for key, value in arguments.items() if value is not None}
    torch.manual_seed(0)
    model = vf.create_model(f"{spec}+adl(threshold=1.0)", num_classes=5, **arguments).train()
    output = model(torch.randn(1, 3, 64, 64))
    assert output["out"].shape == (1, 5, 64, 64) and ("aux" in output) == spec.startswith("upernet")
    loss = vf.auxiliary_loss(model)
    assert loss > 0
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.features.body.parameters())


@pytest.mark.parametrize("name", ["smp:unet:pvt_v2_b0", "smp:fpn:pvt_v2_b0"])
def test_library_decoders_are_treated_and_saved(name: str, tmp_path: Path) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    model = vf.create_model(f"{name}+cb(layers=upper)", num_classes=4, depths=(1, 1, 1, 1)).eval()
    images = torch.randn(1, 3, 50, 70)
    vf.save(model, tmp_path)
    with torch.no_grad():
        assert model(images).shape == (1, 4, 50, 70)
        torch.testing.assert_close(vf.load(tmp_path)(images), model(images))
    with pytest.raises(VitfocusError, match="does not fit"):
        vf.create_model("smp:deeplabv3:pvt_v2_b0", num_classes=4)
    with pytest.raises(VitfocusError, match="did you mean 'unet'"):
        vf.create_model("smp:unett:pvt_v2_b0", num_classes=4)


@pytest.mark.parametrize(
    ("backbone", "options"),
    [("pvt_v2_b0", {"depths": (1, 1, 1, 1)}), ("vit_tiny_patch16_224", {"depth": 4, "embed_dim": 48, "num_heads": 3})],
)
def test_decoder_that_uses_few_feature_maps_has_no_unused_parameters(backbone: str, options: dict[str, Any]) -> None:
    """Under DDP a parameter that waits for a gradient and gets none is an error."""
    pytest.importorskip("segmentation_models_pytorch")
    model = vf.create_model(f"smp:pspnet:{backbone}", num_classes=4, **options).train()
    whole = vf.create_model(f"smp:fpn:{backbone}", num_classes=4, **options)
    model(torch.randn(2, 3, 64, 96)).square().mean().backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
    backbones = [one.network.encoder.features.body for one in (model, whole)]
    few, all_of_them = (sum(p.numel() for p in body.parameters()) for body in backbones)
    assert few < all_of_them  # what makes only the other maps is gone


def test_a_backbone_alone_starts_a_segmenter(tmp_path: Path) -> None:
    """A classifier's weights at another size fill the treated backbone inside; what fits nowhere is refused."""
    arguments = {key: SMALL[key] for key in ("patch_size", "embed_dim", "depth", "num_heads")}
    donor = vf.create_model("vit_tiny_patch16_224", num_classes=3, img_size=64, **arguments)
    save_file(donor.state_dict(), tmp_path / "donor.safetensors")
    model = small("upernet:vit_tiny_patch16_224+cbs+tap")
    start_from(model, str(tmp_path / "donor.safetensors"))
    inside = model.features.body
    assert torch.equal(inside.blocks[3].mlp.fc2.weight, donor.blocks[3].mlp.fc2.weight)
    assert inside.pos_embed.shape[1] == 17 and donor.pos_embed.shape[1] == 65
    fan = vf.create_model("fan_tiny_8_p4_hybrid", num_classes=3, depth=3)
    save_file(fan.state_dict(), tmp_path / "fan.safetensors")
    hybrid = vf.create_model("segformer:fan_tiny_8_p4_hybrid+tap", num_classes=5, depth=3, embed_channels=8)
    start_from(hybrid, str(tmp_path / "fan.safetensors"))
    assert torch.equal(hybrid.features.body.blocks[2].attn.q.weight, fan.blocks[2].attn.q.weight)
    shallow = vf.create_model("segformer:fan_tiny_8_p4_hybrid", num_classes=5, depth=2, embed_channels=8)
    with pytest.raises(VitfocusError, match=r"does not fit the FAN inside Segmenter: blocks\.2"):
        start_from(shallow, str(tmp_path / "fan.safetensors"))
    save_file({"nothing.like.it": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(VitfocusError, match="does not fit"):
        start_from(model, str(tmp_path / "other.safetensors"))


def test_a_checkpoint_of_a_wrapped_model_starts_one_with_other_classes(tmp_path: Path) -> None:
    arguments = {key: SMALL[key] for key in ("patch_size", "embed_dim", "depth", "num_heads")}
    donor, model = (vf.create_model("vit_tiny_patch16_224", num_classes=n, img_size=32, **arguments) for n in (3, 5))
    before = model.head.weight.clone()
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in donor.state_dict().items()}}, tmp_path / "a.pt"
    )
    start_from(model, str(tmp_path / "a.pt"))
    assert torch.equal(model.pos_embed, donor.pos_embed) and torch.equal(model.head.weight, before)


def test_a_treated_run_resumes_bit_for_bit_is_saved_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = "spec=upernet:vit_tiny_patch16_224+cbs+tap(branches=2)+adl(threshold=1.0)"
    recipe = tiny(spec, "head_lr=10", "decay=polynomial", "segment.scale=[0.5,2.0]", "photometric=true")
    whole = train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "run")
    folder = tmp_path / "run"
    for stale in (folder / "results.json", folder / "checkpoints" / "00000006"):
        (stale.unlink() if stale.is_file() else [f.unlink() for f in stale.iterdir()] and stale.rmdir())
    again = train(recipe, folder, resume="auto")
    assert again["steps"] == 6 and again["model_sha256"] == whole["model_sha256"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"ce", "aux", "adl"} <= set(rows[0]) and rows[0]["adl"] > 0
    assert whole["last"]["miou"] > 0 and whole["headline"].startswith("mIoU")

    model = vf.load(folder / "model")
    assert [str(one) for one in vf.applied(model)] == ["cbs", "tap(branches=2)", "adl(threshold=1.0)"]
    diagnosis = vf.diagnose(model, torch.zeros(2, 3, 64, 48, dtype=torch.uint8))
    assert len(diagnosis.rows) == 4 and diagnosis.rows[0]["entropy"] > 0

    call = ["evaluate", str(folder / "model"), "--data", "shapes", "--limit", "6", "--json"]
    assert main([*call, "--pictures", str(tmp_path / "seen")]) == 0
    shown = json.loads(capsys.readouterr().out)
    (summary,) = shown["models"].values()
    assert shown["suite"] == "segmentation" and summary["miou"] == pytest.approx(100 * again["last"]["miou"])
    assert len(list((tmp_path / "seen").glob("*_overlay.png"))) == 6
    assert Image.open(tmp_path / "seen" / "00000_overlay.png").size == (3 * 32 + 8, 32)


def test_head_has_its_own_learning_rate(tmp_path: Path) -> None:
    """With head_lr=0 what stands on the backbone stays as it was."""
    train(tiny("head_lr=0", "weight_decay=0", "epochs=0.2"), tmp_path)
    model = vf.load(tmp_path / "model")
    torch.manual_seed(0)
    fresh = vf.create_model(tiny().model.spec, num_classes=11, **tiny().model.arguments).state_dict()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p.detach(), fresh[name])}
    assert moved and all(name.startswith("features.body") for name in moved)


def test_learning_rates_of_dense_prediction() -> None:
    """Polynomial from the first step, as the field's libraries count it, and a tenth after epochs 8 and 11 of 12."""
    plan = TrainingSchedule.of(load_recipe("ade20k_upernet_ti"), 20_210)
    assert plan.steps == 160_000 and plan.warmup == 1500 and plan.learning_rate(0) == 0
    assert plan.learning_rate(750) == pytest.approx(0.5 * 6e-5 * (1 - 750 / 160_000))
    assert plan.learning_rate(120_000) == pytest.approx(6e-5 / 4) and plan.learning_rate(159_999) < 1e-9
    overrides = ["decay=drops", "epochs=12", "warmup_epochs=0", "schedule.steps=0", "warmup_steps=0", "batch=10"]
    steps = TrainingSchedule.of(load_recipe("camvid", overrides), 100)
    rates = [steps.learning_rate(step) / steps.lr for step in (0, 79, 80, 109, 110, 119)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_keys_of_other_tasks_are_refused() -> None:
    for override, said in (
        ("mixup=0.5", "augment.mixup"),
        ("smoothing=0.2", "loss.smoothing"),
        ("resident=yes", "resident"),
    ):
        with pytest.raises(VitfocusError, match=said):
            train(tiny(override), "nowhere")
    with pytest.raises(VitfocusError, match=r"does not use segment\.window"):
        train(load_recipe("shapes", ["segment.window=3"]), "nowhere")


def test_layouts_are_read_as_published(tmp_path: Path) -> None:
    """Shapes written as ADE20K and Cityscapes: the same scenes, the classes decoded, the rim ignored."""
    for layout in ("ade20k", "cityscapes"):
        write_layout(tmp_path / layout, layout, 3, size=32)
    ade, city = (open_masks(Data(source=name, root=str(tmp_path / name)), "train") for name in ("ade20k", "cityscapes"))
    assert len(ade) == len(city) == 3 and len(ade.classes) == 150 and len(city.classes) == 19
    for index in range(3):
        first, second = ade.read(index)[1], city.read(index)[1]
        assert np.array_equal(first, second) and (first[0] == 255).all() and first[1:-1, 1:-1].max() < 11
    digest = city.digest()
    for file in (tmp_path / "cityscapes" / "gtFine").rglob("*TrainIds.png"):
        file.unlink()
    own = open_masks(Data(source="cityscapes", root=str(tmp_path / "cityscapes")), "train")
    assert np.array_equal(own.read(2)[1], second) and own.digest() != digest
    next((tmp_path / "ade20k" / "annotations" / "training").glob("*.png")).unlink()
    for source, root, said in (
        ("ade20k", "ade20k", "1 of 3 images have no mask"),
        (
            "ade20k",
            "cityscapes",
            r"has its files in images/train or images/training, but .* only: gtFine, leftImg8bit",
        ),
        ("acdc", "cityscapes", "has its files in rgb_anon/fog/train"),
        ("camvid", "nowhere", "no data folder"),
        ("cityscape", "cityscapes", "did you mean 'cityscapes'"),
    ):
        with pytest.raises(VitfocusError, match=said):
            open_masks(Data(source=source, root=str(tmp_path / root)), "train")


def write_pair(picture: Path, mask: Path, value: int, size: tuple[int, int] = (48, 32)) -> None:
    for path in (picture, mask):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise(size, 60).convert("RGB").save(picture)
    content = np.full(size[::-1], value, np.uint8)
    content[: size[1] // 2] = 1
    Image.fromarray(content).save(mask)


def test_weather_and_stored_corruptions_are_scored_apart_and_together(tmp_path: Path) -> None:
    """ACDC's total is the matrix of all four; stored corruptions that equal the clean pictures score as those do."""
    for number, condition in enumerate(("fog", "night", "rain", "snow")):
        name = f"{condition}/val/GOPR0{number}/frame"
        write_pair(
            tmp_path / f"acdc/rgb_anon/{name}_rgb_anon.png", tmp_path / f"acdc/gt/{name}_gt_labelTrainIds.png", 2
        )
    city = tmp_path / "city"
    for town in ("a", "b"):
        stem = f"val/{town}/{town}_0"
        write_pair(city / f"leftImg8bit/{stem}_leftImg8bit.png", city / f"gtFine/{stem}_gtFine_labelTrainIds.png", 3)
        for severity in (1, 2):
            copy = tmp_path / f"city-c/fog/{severity}/{town}/{town}_0_leftImg8bit.png"
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((city / f"leftImg8bit/{stem}_leftImg8bit.png").read_bytes())
    model = small(classes=19)
    scores = vf.evaluate(model, "acdc", tmp_path / "acdc", progress=False)
    assert set(scores["cells"]) == {"fog", "night", "rain", "snow", "all"} and scores.images == 4
    assert scores["miou"] == scores["all"]["miou"]
    with pytest.raises(VitfocusError, match="no option 'source'"):  # its layout is ACDC's
        vf.evaluate(model, "acdc", tmp_path / "acdc", source="camvid")
    options = {"severities": [1, 2], "progress": False}
    stored = vf.evaluate(
        model, "cityscapes-c", city, corruptions="fog", corrupted_data=str(tmp_path / "city-c"), **options
    )
    assert stored["fog"]["miou"] == pytest.approx(stored["miou"]) == pytest.approx(stored["miou_corrupted"])
    made = vf.evaluate(model, "cityscapes-c", city, corruptions=["gaussian_noise", "contrast"], **options)
    assert set(made["cells"]) == {"clean", "gaussian_noise", "contrast"} and made["miou"] == stored["miou"]
    mean = np.mean([made[name]["miou"] for name in ("gaussian_noise", "contrast")])
    assert made["miou_corrupted"] == pytest.approx(mean)
    again = vf.evaluate(model, "cityscapes-c", city, corruptions=["gaussian_noise"], limit=1, **options)
    assert again.images == 1
    noise = vf.evaluate(model, "segmentation-noise", city, window=32, stride=16, progress=False)
    assert len(noise["shot"]["repeats"]) == 5 and noise.fingerprint["protocol"]["test"]["window"] == 32


class ByBrightness(nn.Module):
    """Class 1 where a picture is bright, and class 3 where it is dark."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = torch.full((len(images), 19, *images.shape[-2:]), -9.0)
        scores[:, 1], scores[:, 3] = images.mean(1), -images.mean(1)
        return scores


def test_the_papers_cityscapes_c(tmp_path: Path) -> None:
    """A folder of the released layout, 16 types with the noises at 1 to 3, read beside its clean pictures."""
    root, draw = tmp_path / "city", np.random.default_rng(0)
    noises = ("gaussian_noise", "shot_noise", "speckle_noise", "impulse_noise")
    others = ("gaussian_blur", "motion_blur", "glass_blur", "defocus_blur", "contrast", "jpeg_compression", "saturate")
    others += ("brightness", "snow", "fog", "frost", "spatter")
    conditions = [(name, severity) for name in noises for severity in (1, 2, 3)]
    conditions += [(name, severity) for name in others for severity in (1, 2, 3, 4, 5)]
    for town in ("aachen", "bochum"):
        file = f"{town}/{town}_000000_000019"
        write_pair(root / f"clean/{file}_leftImg8bit.png", root / f"gtFine/val/{file}_gtFine_labelTrainIds.png", 3)
        for name, severity in conditions:
            copy = root / name / str(severity) / f"{file}_leftImg8bit.png"
            copy.parent.mkdir(parents=True)
            Image.fromarray(draw.integers(0, 256, (32, 48, 3), dtype=np.uint8)).save(copy)
    model = ByBrightness()
    scores = vf.evaluate(model, "cityscapes-c", root, progress=False)
    assert set(scores["cells"]) == {"clean", *noises, *others} and len(scores["cells"]) == 17
    assert all(len(scores[name]["severities"]) == 3 for name in noises)
    by_hand = [np.mean(list(scores[name]["severities"].values())) for name in (*noises, *others)]
    assert scores["miou_corrupted"] == pytest.approx(np.mean(by_hand)) and np.std(by_hand) > 0
    assert any("the paper's, 16 types" in note for note in scores.notes)
    assert any("read from files" in note for note in scores.notes)
    with pytest.raises(VitfocusError, match="no images of gaussian_noise at severity 4"):
        vf.evaluate(model, "cityscapes-c", root, types="all", progress=False)
    chosen = vf.evaluate(model, "cityscapes-c", root, corruptions=["snow/2-3", "fog/5"], progress=False)
    assert {name: list(chosen[name]["severities"]) for name in ("snow", "fog")} == {"snow": ["2", "3"], "fog": ["5"]}
    segmenter = small(classes=11)
    drawn = vf.evaluate(segmenter, "cityscapes-c", "shapes", types="all", severities=[1], limit=2, progress=False)
    assert len(drawn["cells"]) == 20
    whole = severities_by_type("all")
    assert len(whole) == 19 and set(map(len, whole.values())) == {5}


def test_predictions_for_the_servers(tmp_path: Path) -> None:
    """Cityscapes takes its own class numbers, ACDC those of training; the masks of their test splits are withheld."""
    folders = {"city": "leftImg8bit/test/berlin", "acdc": "rgb_anon_trainvaltest/rgb_anon/{}/test/GOPR01"}
    for name, folder in folders.items():
        for condition in ("fog", "night", "rain", "snow"):
            place = tmp_path / name / folder.format(condition)
            place.mkdir(parents=True, exist_ok=True)
            file = f"berlin_{condition}_leftImg8bit.png" if name == "city" else f"GOPR01_{condition}_rgb_anon.png"
            Image.effect_noise((48, 32), 60).convert("RGB").save(place / file)
    model = small(classes=19)
    for suite, name in (("segmentation", "city"), ("acdc", "acdc")):
        given: dict[str, Any] = {"split": "test", "progress": False}
        with pytest.raises(VitfocusError, match="withheld, so nothing can be scored: name a folder with --subm"):
            vf.evaluate(model, suite, tmp_path / name, **given)
        scores = vf.evaluate(model, suite, tmp_path / name, submission=str(tmp_path / "sent" / name), **given)
        assert "miou" not in next(iter(scores.models.values()))
        sent = {file.name: np.asarray(Image.open(file)) for file in (tmp_path / "sent" / name).iterdir()}
        assert len(sent) == 4
        for file in (tmp_path / name).rglob("*.png"):
            pixels = torch.from_numpy(np.asarray(Image.open(file)).copy()).permute(2, 0, 1)[None]
            with torch.no_grad():
                expected = predict(PixelModel("m", model), pixels, InferenceSettings())[0].argmax(0).numpy()
            if name == "city":
                expected = np.array(CITYSCAPES_IDS)[expected]
            assert sent[file.name].dtype == np.uint8 and np.array_equal(sent[file.name], expected)
    with pytest.raises(VitfocusError, match="--submission is for Cityscapes and ACDC"):
        vf.evaluate(small(classes=11), "segmentation", "shapes", limit=1, submission="no", progress=False)


def test_training_crops_change_image_and_mask_together(tmp_path: Path) -> None:
    """A picture whose colour says its class stays so, whatever scale, crop and mirror image do."""
    draw = np.random.default_rng(0)
    mask = np.kron(draw.integers(0, 4, (4, 6)), np.ones((16, 16), int)).astype(np.uint8)
    for folder in ("images/train", "masks/train", "images/val", "masks/val"):
        (tmp_path / folder).mkdir(parents=True)
    for split in ("train", "val"):
        Image.fromarray(np.repeat(mask[..., None] * 60, 3, 2)).save(tmp_path / f"images/{split}/a.png")
        Image.fromarray(mask).save(tmp_path / f"masks/{split}/a.png")
    (tmp_path / "classes.txt").write_text("w\nx\ny\nz\n")
    masks = open_masks(Data(source="masks", root=str(tmp_path)), "train")
    assert masks.classes == ("w", "x", "y", "z")
    for wrong, said in (("{", "cannot be read"), ("3", "It is 3; expected a list")):
        (tmp_path / "classes.json").write_text(wrong)
        with pytest.raises(vf.VitfocusError, match=rf"classes\.json .*{said}"):
            open_masks(Data(source="masks", root=str(tmp_path)), "train")
    (tmp_path / "classes.json").unlink()
    crops = Samples(masks, RandomCrop(48, photometric=False))
    seen = []
    for position in range(12):
        item = crops[0, position]
        assert not isinstance(item, Broken)
        pixels, labels = item
        inside = labels != 255
        right = (pixels[0].float() / 60).round()[inside] == labels[inside]
        assert right.float().mean() > 0.85 and pixels.shape == (3, 48, 48)  # borders between classes are smoothed
        assert torch.equal(crops[0, position][0], pixels)
        seen.append(pixels)
    assert not torch.equal(seen[0], seen[1])
    bright = Samples(masks, RandomCrop(48))[0, 3]
    assert not isinstance(bright, Broken) and not torch.equal(bright[0], seen[3])
    assert torch.equal(bright[1], crops[0, 3][1])  # type: ignore[index]
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(tmp_path / "masks/train/a.png")
    broken = crops[0, 0]
    assert isinstance(broken, Broken) and "is 5x5" in str(broken)


def test_real_samples(shared: Path) -> None:
    """CamVid, ADE20K and Cityscapes as they were published, by the names of their folders."""
    data = shared / "data"
    for source, folder, count, classes in (
        ("camvid", "camvid", 101, set(range(11))),
        ("ade20k", "ade20k-sample", 3, set(range(150))),
        ("cityscapes", "cityscapes-sample", 1, set(range(19))),
    ):
        masks = open_masks(Data(source=source, root=str(data / folder)), "val")
        found = set(np.unique(masks.read(0)[1]).tolist())
        assert len(masks) == count and len(found) > 3 and found <= classes | {255}
    scores = vf.evaluate(
        small(classes=150), "segmentation", data / "ade20k-sample", limit=2, progress=False, short_side=64
    )
    assert scores.images == 2 and scores["miou"] >= 0


def test_weights_of_a_saved_segmenter_start_another(tmp_path: Path) -> None:
    model = small()
    vf.save(model, tmp_path / "saved")
    other = small("upernet:vit_tiny_patch16_224+cbs")
    start_from(other, str(tmp_path / "saved"))
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(other.decoder.fuse[0].weight, weights["decoder.fuse.0.weight"])


def test_a_convolutional_backbone_trains_saves_and_is_evaluated_on_its_own_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe("shapes_segment", [*TINY, "spec=smp:unet:resnet10t", "model.arguments={}", "val_length=5"])
    trained = train(recipe, tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 5
    (summary,) = found["models"].values() if "models" in found else found["summaries"].values()
    assert summary["miou"] == pytest.approx(100 * trained["last"]["miou"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["spec=vit_tiny_patch16_224", "model.arguments={img_size=32}"], "upernet:vit_tiny_patch16_224"),
        (["segment.scale=[2.0,0.5]"], "segment.scale"),
        (["model.arguments.num_classes=0"], "at least 1"),
    ],
)
def test_unsupported_segmentation_settings_are_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(VitfocusError, match=said):
        train(tiny(*overrides), tmp_path / "run")


def test_protocol_with_negative_sizes_is_refused() -> None:
    with pytest.raises(VitfocusError, match="0 or more"):
        InferenceSettings(window=32, stride=-5)


def test_a_run_is_evaluated_with_the_layout_of_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with that which the names of its files suggest; "~" in a path is the home folder."""
    written = write_layout(tmp_path / "ade20k", "ade20k", 4, val_count=2, size=32)
    home = tmp_path / "home"
    for split, folder in (("train", "training"), ("val", "validation")):
        shutil.copytree(written / "images" / folder, home / "mine" / "images" / split)
        shutil.copytree(written / "annotations" / folder, home / "mine" / "annotations" / split)
    (home / "mine" / "classes.txt").write_text("\n".join(f"c{number}" for number in range(12)))
    monkeypatch.setenv("HOME", str(home))
    trained = train(tiny("source=masks", "root=~/mine", "val_length=0"), tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--json", "--device", "cpu"]) == 0
    (scores,) = json.loads(capsys.readouterr().out)["models"].values()
    assert scores["miou"] == pytest.approx(100 * trained["last"]["miou"])
    assert main(["evaluate", str(tmp_path / "run"), "--suite", "segmentation", "--data", str(written)]) == 2
    assert "run was trained on other classes than the data has: airplane, animal" in capsys.readouterr().err


def test_two_masks_of_one_image_are_refused(tmp_path: Path) -> None:
    root = write_layout(tmp_path / "ade20k", "ade20k", 2, val_count=1, size=32)
    mask = root / "annotations" / "training" / "ADE_train_00000001.png"
    Image.open(mask).save(mask.with_suffix(".jpg"))
    with pytest.raises(
        VitfocusError, match=r"two masks of one image, ADE_train_00000001.jpg and ADE_train_00000001.png"
    ):
        open_masks(Data(source="ade20k", root=str(root)), "train")


@pytest.mark.parametrize(("split", "number"), [("train", 0), ("val", 0), ("train", 1), ("val", 1)])
def test_a_mask_with_an_unknown_class_is_named(
    split: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before training if it is among those that are checked, and otherwise in the first batch that holds it."""
    steps: list[int] = []
    for part in ("train", "val"):
        for one in range(16):  # of which every second is checked
            for kind, pixels in (("images", np.zeros((32, 32, 3), np.uint8)), ("masks", np.zeros((32, 32), np.uint8))):
                pixels[:16] = 255 if one % 2 else 2
                if kind == "masks" and (part, one) == (split, number):
                    pixels[20:] = 5
                place = tmp_path / kind / part / f"{one:02d}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(place)
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    lengths = ["train_length=16", "val_length=16", "segment.scale=[1,1]"]
    recipe = tiny("source=masks", f"root={tmp_path}", *lengths)
    said = rf"The mask of {tmp_path}/images/{split}/0{number}.png has the class 5, but the model has 3 classes: set "
    with pytest.raises(VitfocusError, match=said + r"model\.arguments\.num_classes=6, or use 255"):
        train(recipe, tmp_path / "run", before_step=steps.append)
    assert len(steps) in {("train", 1): range(5), ("val", 1): [4]}.get((split, number), [0])
    more = tiny("source=masks", f"root={tmp_path}", *lengths, "model.arguments.num_classes=6")
    if number == 0:
        assert train(more, tmp_path / "more")["finished"]
