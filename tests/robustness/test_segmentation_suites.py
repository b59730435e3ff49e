"""Segmentation under noise: mIoU against a naive count, repeats with intervals, and sentences for bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers.processes import run_in_two_processes
from scipy import ndimage
from torch import Tensor, nn

import vitfocus as vf
from vitfocus.data.shapes.dataset import Shapes
from vitfocus.robustness import load_scores
from vitfocus.robustness.suites.segmentation import add_noise, mean_iou


class Segmenter(nn.Module):
    """One linear look at each pixel's neighbourhood, at half the size, as decoders give it."""

    def __init__(self, classes: int = 11) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, classes, 3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images)


def naive(model: nn.Module, images: Tensor, masks: Tensor) -> float:
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        logits = model((images.float() / 255 - mean) / std)
        logits = nn.functional.interpolate(logits, size=masks.shape[-2:], mode="bilinear")
    guess, truth = logits.argmax(1).numpy().ravel(), masks.numpy().ravel()
    guess, truth = guess[truth != 255], truth[truth != 255]
    scores = []
    for label in range(11):
        union = np.sum((guess == label) | (truth == label))
        if union:
            scores.append(np.sum((guess == label) & (truth == label)) / union)
    return 100 * float(np.mean(scores))


def test_noise_suite_equals_a_naive_count() -> None:
    data = Shapes("val", length=6, size=32, task="segment")
    images = torch.stack([torch.as_tensor(data[i][0]) for i in range(6)])
    masks = torch.stack([torch.as_tensor(data[i][1]) for i in range(6)])
    masks[:, :2] = 255
    model = Segmenter()
    batches = [(images[:4], masks[:4]), (images[4:], masks[4:])]
    scores = vf.evaluate(model, "segmentation-noise", iter(batches), seed=3, progress=False)  # read once
    assert scores["miou"] == pytest.approx(naive(model, images, masks), abs=1e-4)
    shot = scores["shot"]
    expected = [naive(model, add_noise(images, "shot", seed=3 + r, ids=list(range(6))), masks) for r in range(5)]
    assert shot["repeats"] == pytest.approx(expected, abs=1e-4)
    low, high = shot["miou_interval"]
    assert low < shot["miou"] < high and shot["miou"] == pytest.approx(np.mean(expected), abs=1e-4)
    assert "miou_interval" not in scores["blur/1"] and scores.images == 6
    assert "mIoU" in str(scores.table()) and scores.to_dict()["fingerprint"]["data"]["images"] == 6


@pytest.mark.parametrize("photons", [255, 60])
def test_noises_have_the_distributions_of_independent_code(photons: int) -> None:
    """Each grey level's mean and variance against NumPy's generators, and the blur against SciPy's."""
    levels = torch.tensor([0, 20, 90, 128, 200], dtype=torch.uint8)
    images = levels.view(-1, 1, 1, 1).expand(-1, 3, 120, 120).contiguous()
    random = np.random.default_rng(1)
    shot = add_noise(images, "shot", seed=4, photons=photons).double()
    for level, got in zip(levels.tolist(), shot, strict=True):
        counted = random.poisson(level / 255 * photons, 200_000) / photons
        expected = np.floor(np.clip(counted, 0, 1) * 255 + 1e-9)
        assert float(got.mean()) == pytest.approx(expected.mean(), abs=0.6), level
        assert float(got.std()) == pytest.approx(expected.std(), rel=0.03, abs=1e-6), level
    for sigma in (5, 10):
        noisy = add_noise(images[1:], f"gaussian/{sigma}", seed=4).double()
        for level, got in zip(levels[1:].tolist(), noisy, strict=True):
            expected = np.clip(np.round(level + sigma * random.standard_normal(200_000)), 0, 255)
            assert float(got.mean()) == pytest.approx(expected.mean(), abs=0.2)
            assert float(got.std()) == pytest.approx(expected.std(), rel=0.03)
    pictures, _ = next(iter(torch.utils.data.DataLoader(Shapes("val", length=2, size=48, task="segment"), 2)))
    for sigma in (1, 2):
        blurred = add_noise(pictures, f"blur/{sigma}").double().numpy()
        expected = ndimage.gaussian_filter(pictures.double().numpy(), (0, 0, sigma, sigma), mode="nearest", truncate=4)
        assert np.abs(blurred - expected).max() <= 0.51  # rounded to a level


def test_two_models_and_bad_input() -> None:
    data = Shapes("val", length=4, size=32, task="segment")
    scores = vf.evaluate({"a": Segmenter(), "b": Segmenter()}, "segmentation-noise", data, progress=False)
    assert scores["a"]["miou"] == scores["b"]["miou"]
    for wrong, said in (("a/folder", "no folder"), (3, "not a int"), ([], "no images")):
        with pytest.raises(vf.VitfocusError, match=said):
            vf.evaluate(Segmenter(), "segmentation-noise", wrong, progress=False)
    with pytest.raises(vf.VitfocusError, match="has 3 classes"):
        vf.evaluate(Segmenter(3), "segmentation-noise", data, progress=False)
    classifier = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    with pytest.raises(vf.VitfocusError, match="is a VisionTransformer, but segmentation evaluates segmenters"):
        vf.evaluate(classifier, "segmentation", data, progress=False)
    with pytest.raises(vf.VitfocusError, match="at least 2"):
        vf.evaluate(Segmenter(), "segmentation-noise", data, repeats=1, progress=False)


class Interrupted(Segmenter):
    """Counts how often it is asked, and gives up when it has answered so often."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.left = answers

    def forward(self, images: Tensor) -> Tensor:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().forward(images)


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    data = Shapes("val", length=12, size=32, task="segment")
    images = torch.stack([torch.as_tensor(data[i][0]) for i in range(12)])
    masks = torch.stack([torch.as_tensor(data[i][1]) for i in range(12)])
    batches = list(zip(images.split(4), masks.split(4), strict=True))

    def run(model: nn.Module, out: str, given: list[tuple[Tensor, Tensor]] = batches, **more: Any) -> vf.Scores:
        named = {"model": model}
        return vf.evaluate(named, "segmentation-noise", given, repeats=2, out=tmp_path / out, progress=False, **more)

    counting = Interrupted(1000)
    whole = run(counting, "whole")
    calls = 1000 - counting.left
    for stop in (calls // 3, calls - 2):
        out = f"stopped-{stop}"
        with pytest.raises(KeyboardInterrupt):
            run(Interrupted(stop), out)
        with pytest.raises(vf.VitfocusError, match="already holds a run"):
            run(Interrupted(1000), out)
        with pytest.raises(vf.VitfocusError, match="differ from those that this run began with"):
            run(Interrupted(1000), out, [(255 - one, mask) for one, mask in batches], resume=True)
        rest = Interrupted(1000)
        finer = list(zip(images.split(2), masks.split(2), strict=True))
        assert run(rest, out, finer, resume=True).models == whole.models  # with another batch size
        done = stop // (calls // 3)  # of three batches
        assert 1000 - rest.left == 2 * (3 - done) * calls // 3
        assert run(Interrupted(0), out, resume=True).models == whole.models  # finished: nothing is asked any more
        with pytest.raises(vf.VitfocusError, match="a finished run on other data"):
            run(Interrupted(0), out, [(255 - one, mask) for one, mask in batches], resume=True)
    with pytest.raises(vf.VitfocusError, match="at least 2"):
        vf.evaluate(Segmenter(), "segmentation-noise", batches, repeats=1, out=tmp_path / "free", progress=False)
    run(Segmenter(), "free")  # what failed before it began has left nothing in the way
    with pytest.raises(vf.VitfocusError, match="Resuming needs"):
        vf.evaluate(Segmenter(), "segmentation-noise", batches, resume=True, progress=False)


SCRIPT = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/robustness"]
from test_segmentation_suites import Segmenter
import vitfocus as vf
vf.evaluate(Segmenter(), "segmentation-noise", "shapes", limit=10, batch_size=2, repeats=2, device="cpu", out={out!r},
            progress=False)
"""


def test_two_processes_share_the_batches(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), out=str(out)))
    run_in_two_processes(script)
    alone = vf.evaluate(
        Segmenter(), "segmentation-noise", "shapes", limit=10, batch_size=2, repeats=2, device="cpu", progress=False
    )
    together = load_scores(out)
    assert together.models == alone.models and together.images == alone.images == 10
    assert together.fingerprint["data"] == alone.fingerprint["data"] and not (out / "parts").exists()


def test_classes_that_never_occur_do_not_count() -> None:
    assert mean_iou(torch.tensor([[2, 2, 0], [2, 2, 0], [2, 2, 0]])) == 100
