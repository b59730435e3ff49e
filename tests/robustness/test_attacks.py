"""FGSM and PGD against attacks written anew in normalised space, what any attack must respect, and occlusion."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.robustness_layouts import Blobs, as_input, half_right, pictures
from helpers.tiny import build
from PIL import Image
from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError
from vitfocus.robustness import evaluate
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.suites.occlusion_and_attacks import drop_patches, fgsm, occlude_centre, pgd

STD = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)


def by_hand(model: nn.Module, images: Tensor, labels: Tensor, eps: float, step: float, steps: int, l2: bool) -> Tensor:
    """An attack in normalised space, image by image: the step and the ball are scaled by each channel's std."""
    results = []
    for image, label in zip(images, labels, strict=True):
        clean = ((image[None] - MEAN) / STD).detach()
        low, high = (0 - MEAN) / STD, (1 - MEAN) / STD
        x = clean.clone()
        for _ in range(steps):
            x = x.detach().requires_grad_(True)
            (-model(x).log_softmax(1)[0, label]).backward()
            model.zero_grad()
            slope = x.grad / STD  # the slope with respect to pixels
            move = slope / slope.norm() if l2 else slope.sign()
            pixels = (x.detach() + move * step / 255 / STD - clean) * STD
            shrink = min(1.0, eps / 255 / float(pixels.norm()))
            pixels = pixels * shrink if l2 else pixels.clamp(-eps / 255, eps / 255)
            x = torch.maximum(torch.minimum(clean + pixels / STD, high), low)
        results.append(x.detach() * STD + MEAN)
    return torch.cat(results)


@pytest.fixture(scope="module")
def victim() -> tuple[nn.Module, Tensor, Tensor]:
    model, _ = build("deit_distilled")  # whose std differs from channel to channel
    images = torch.from_numpy(pictures(3, 64)).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        labels = model((images - MEAN) / STD).argmax(1)
    return model, images, labels


@pytest.mark.parametrize("eps", [1.0, 8.0])
def test_fgsm_equals_an_attack_in_normalised_space(victim: tuple[nn.Module, Tensor, Tensor], eps: float) -> None:
    model, images, labels = victim
    ours = fgsm(PixelModel("deit", model), images, labels, eps)
    theirs = by_hand(model, images, labels, eps, eps, 1, l2=False)
    assert ((ours - theirs).abs() > 1e-5).float().mean() < 2e-3  # the sign of a slope near 0 is anyone's guess


@pytest.mark.parametrize(("norm", "eps"), [("linf", 2.0), ("l2", 128.0)])
def test_pgd_equals_an_attack_in_normalised_space(
    victim: tuple[nn.Module, Tensor, Tensor], norm: str, eps: float
) -> None:
    model, images, labels = victim
    ours = pgd(PixelModel("deit", model), images, labels, eps, norm, steps=3, step_size=eps / 2, random_start=False)
    theirs = by_hand(model, images, labels, eps, eps / 2, 3, l2=norm == "l2")
    close = (ours - theirs).abs() < 2e-4
    assert close.float().mean() > 0.99


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_attacks_stay_in_the_ball_and_in_the_image_and_leave_the_model_alone(norm: str) -> None:
    model = Blobs(10)
    pixel = PixelModel("blobs", model)
    images = torch.from_numpy(pictures(6)).permute(0, 3, 1, 2)
    images[0, :, :8] = 0
    images[1, :, :8] = 255
    labels = pixel(images).argmax(1)
    for attacked in (fgsm(pixel, images, labels, 6, norm), pgd(pixel, images, labels, 6, norm, steps=4, seed=3)):
        offset = attacked - images / 255
        length = offset.abs().amax((1, 2, 3)) if norm == "linf" else offset.flatten(1).norm(dim=1)
        assert attacked.min() >= 0 and attacked.max() <= 1 and length.max() <= 6 / 255 + 1e-6
        assert (length > 0.5 / 255).all()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(fgsm(pixel, images, labels, 0), images / 255)


def test_attacks_do_not_depend_on_the_batch_and_pgd_is_stronger() -> None:
    pixel = PixelModel("blobs", Blobs(10))
    images = torch.from_numpy(pictures(8)).permute(0, 3, 1, 2)
    labels = pixel(images).argmax(1)
    ids = torch.arange(8) + 100
    whole = pgd(pixel, images, labels, 4, ids=ids, seed=1)
    alone = pgd(pixel, images[5:6], labels[5:6], 4, ids=ids[5:6], seed=1)
    assert torch.allclose(whole[5:6], alone, atol=1e-6)
    assert not torch.equal(whole, pgd(pixel, images, labels, 4, ids=ids, seed=2))

    def loss(x: Tensor) -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(pixel(x), labels))

    assert loss(pgd(pixel, images, labels, 4, steps=10)) >= loss(fgsm(pixel, images, labels, 4)) - 1e-3 > loss(images)


def test_the_suites_measure_the_attacks_they_name() -> None:
    model = Blobs(10)
    images = pictures(16)
    labels = half_right(model, images, 10)
    data = [(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels))]
    scores = evaluate(model, "fgsm", data, eps=[2, 30], progress=False, device="cpu")
    by_eps = [scores[name]["top1"] for name in ("clean", "fgsm/2", "fgsm/30")]
    assert by_eps[0] == 50 and by_eps[0] >= by_eps[1] >= by_eps[2] and by_eps[2] < 50
    pixel = PixelModel("blobs", model)
    attacked = fgsm(pixel, data[0][0], data[0][1], 2)
    assert by_eps[1] == 100 * float((pixel(attacked).argmax(1) == data[0][1]).float().mean())
    linear = evaluate(model, "pgd", data, eps=2, norm="l2", steps=2, random_start=False, progress=False, device="cpu")
    assert linear["pgd/2"]["top1"] == 50 and linear.fingerprint["protocol"]["norm"] == "l2"
    with pytest.raises(VitfocusError, match="no norm 'l1'"):
        evaluate(model, "pgd", data, norm="l1", progress=False)
    with pytest.raises(VitfocusError, match="full precision"):
        evaluate(model, "fgsm", data, precision="bfloat16", progress=False)


@pytest.mark.skipif(importlib.util.find_spec("autoattack") is not None, reason="autoattack is installed")
def test_autoattack_says_how_to_get_it() -> None:
    data = [(torch.from_numpy(pictures(2)).permute(0, 3, 1, 2), torch.zeros(2))]
    with pytest.raises(VitfocusError, match="pip install"):
        evaluate(Blobs(10), "autoattack", data, progress=False)


def test_occlusion_hides_exactly_the_requested_pixels() -> None:
    images = torch.full((2, 3, 224, 224), 9, dtype=torch.uint8)
    hidden = occlude_centre(images, 112)
    assert (hidden[..., 56:168, 56:168] == 0).all() and int((hidden == 0).sum()) == 2 * 3 * 112 * 112
    assert int((occlude_centre(images[..., :32, :32], 112) == 0).sum()) == 2 * 3 * 16 * 16
    dropped = drop_patches(images, 98, torch.tensor([4, 5]), seed=1)
    cells = dropped.view(2, 3, 14, 16, 14, 16).permute(0, 1, 2, 4, 3, 5).flatten(4)
    assert (cells.amax(-1) == cells.amin(-1)).all() and ((cells[:, 0, :, :, 0] == 0).sum((1, 2)) == 98).all()
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(drop_patches(images[1:], 98, torch.tensor([5]), seed=1), dropped[1:])


@pytest.mark.parametrize("fill", ["black", "mean"])
def test_occlusion_equals_one_written_in_numpy(fill: str, tmp_path: Path) -> None:
    """A trained-like model, files on disk: zero as a pixel, or zero after normalisation (up to 8 bits)."""
    model, _ = build("deit_distilled")  # 1,000 classes at 64 pixels, whose mean differs from channel to channel
    model.eval()
    images = pictures(8, 64)
    with torch.no_grad():
        mean, std = MEAN.double(), STD.double()
        x = (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - mean) / std
        x[:, :, 16:48, 16:48] = 0 if fill == "mean" else -mean / std
        expected = model(x.float())
    labels = expected.argmax(1)
    labels[::2] = (labels[::2] + 1) % expected.shape[1]  # half of them wrong
    data = [(torch.from_numpy(images).permute(0, 3, 1, 2), labels)]
    scores = evaluate(model, "occlusion", data, sizes=[112], drops=[98], fill=fill, progress=False, device="cpu")
    assert scores["centre/112"]["top1"] == 50
    hidden = occlude_centre(data[0][0], 112, fill=(124, 116, 104) if fill == "mean" else (0,))
    with torch.no_grad():
        got = model(((hidden / 255 - mean) / std).float())
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)
    dropped = drop_patches(data[0][0], 98, torch.arange(8), fill=(124, 116, 104))
    hit = (dropped == torch.tensor([124, 116, 104], dtype=torch.uint8).view(3, 1, 1)).all(1)
    same = (dropped == data[0][0]).all(1)
    assert (hit | same).all() and 0.4 < float(hit.float().mean()) < 0.6
    with pytest.raises(VitfocusError, match="did you mean 'mean'"):
        evaluate(model, "occlusion", data, fill="means", progress=False)


def test_the_occlusion_suite_is_a_curve() -> None:
    model = Blobs(10, size=28)
    images = pictures(12, 28)
    labels = torch.from_numpy(half_right(model, images, 10))
    data = [(torch.from_numpy(images).permute(0, 3, 1, 2), labels)]
    scores = evaluate(model, "occlusion", data, sizes=[0, 112], drops=[0, 196], progress=False)
    assert list(scores.models["blobs"]["cells"]) == ["clean", "centre/0", "centre/112", "drop/0", "drop/196"]
    assert scores["centre/0"]["top1"] == scores["drop/0"]["top1"] == scores["clean"]["top1"] == 50
    masked = images.copy()
    masked[:, 7:21, 7:21] = 0
    with torch.no_grad():
        expected = float((model(as_input(masked)).argmax(1) == labels).float().mean())
    assert scores["centre/112"]["top1"] == pytest.approx(100 * expected)
    with pytest.raises(VitfocusError, match="0 to 224"):
        evaluate(model, "occlusion", data, sizes=[300], progress=False)


def test_fgsm_on_a_trained_model(shared: Path) -> None:
    from vitfocus.treatments.save_load import open_model

    model = open_model("deit_tiny_patch16_224", weights=shared / "data/deit_tiny_patch16_224.safetensors")
    root = shared / "data/imagenet1k-sample"
    scores = evaluate(model, "fgsm", root, eps=1, limit=6, progress=False, device="cpu")
    folders = sorted(root.iterdir())
    picked = [index * 1000 // 6 for index in range(6)]
    images = np.stack([np.array(Image.open(next(folders[index].iterdir()))) for index in picked])
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    attacked = by_hand(model, pixels, torch.tensor(picked), 1.0, 1.0, 1, l2=False)
    with torch.no_grad():
        right = model((attacked - MEAN) / STD).argmax(1) == torch.tensor(picked)
    assert scores["fgsm/1"]["top1"] == pytest.approx(100 * float(right.float().mean()))
    assert scores["clean"]["top1"] > scores["fgsm/1"]["top1"]
