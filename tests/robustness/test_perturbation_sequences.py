"""ImageNet-P: the generated frames against Pillow and torchvision, and the suite in both of its forms."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.robustness_layouts import Blobs, as_input, pictures, write_classes
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as T

from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions.base import stable_hash
from vitfocus.robustness import evaluate
from vitfocus.robustness.suites.perturbations import NOISE, PERTURBATIONS, frame_count, frames

CROP = (48, 48)


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    """A wide picture with fine and coarse structure."""
    coarse = pictures(1, 96)[0][:60]
    return Image.fromarray(np.where(np.indices((60, 96)).sum(0)[..., None] % 12 < 6, coarse, 255 - coarse))


def tensor(picture: Image.Image) -> torch.Tensor:
    return T.pil_to_tensor(picture)[None]


def centre(picture: Image.Image) -> np.ndarray:
    return T.pil_to_tensor(T.center_crop(picture, list(CROP))).numpy()


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_every_sequence_has_its_frames_and_passes_through_the_clean_picture(name: str, picture: Image.Image) -> None:
    sequence = frames(tensor(picture), name, CROP)[0].numpy()
    assert sequence.shape == (frame_count(name), 3, *CROP) and sequence.dtype == np.uint8
    assert frame_count(name) == (41 if name == "translate" else 31)
    clean = {**dict.fromkeys(NOISE, 0), "zoom_blur": 0, "translate": 20, "rotate": 15, "scale": 24, "brightness": 15}
    if name in clean:
        assert np.abs(sequence[clean[name]].astype(int) - centre(picture)).max() <= 1
    steps = np.abs(np.diff(sequence.astype(int), axis=0)).mean((1, 2, 3))
    assert (steps > 0).mean() > 0.9  # ImageMagick's whole-pixel streaks are alike at -92 and -88 degrees


def test_geometry_equals_torchvisions_on_pillow(picture: Image.Image) -> None:
    rotated, scaled, moved = (
        frames(tensor(picture), name, CROP)[0].numpy() for name in ("rotate", "scale", "translate")
    )
    for i in (0, 7, 22, 30):
        bilinear = {"translate": [0, 0], "shear": [0.0], "interpolation": InterpolationMode.BILINEAR}
        by_pillow = centre(T.affine(picture, angle=i - 15, scale=1.0, **bilinear))
        assert np.abs(rotated[i].astype(int) - by_pillow).mean() < 0.6
        by_pillow = centre(T.affine(picture, angle=0, scale=(40 + 2.5 * i) / 100, **bilinear))
        assert np.abs(scaled[i].astype(int) - by_pillow).mean() < 0.6
        by_pillow = centre(T.affine(picture, angle=0, translate=[i - 20, 0], scale=1.0, shear=[0.0]))
        assert np.array_equal(moved[i], by_pillow)


def test_tilt_equals_the_published_projection(picture: Image.Image) -> None:
    sequence = frames(tensor(picture), "tilt", CROP)[0].numpy()
    width, height = picture.size
    focal = math.hypot(width, height)
    for i in (0, 10, 30):
        angle = math.radians(i - 15)
        c, s = math.cos(angle), math.sin(angle)
        lift = np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1], [0, 0, 1]])
        about_x = np.array([[1, 0, 0, 0], [0, c, -s, 0], [0, s, c, 0], [0, 0, 0, 1]])
        about_y = np.array([[c, 0, -s, 0], [0, 1, 0, 0], [s, 0, c, 0], [0, 0, 0, 1]])
        away = np.eye(4) + np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, focal], [0, 0, 0, 0]])
        project = np.array([[focal, 0, width / 2, 0], [0, focal, height / 2, 0], [0, 0, 1, 0]])
        half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
        back = half @ np.linalg.inv(project @ away @ about_x @ about_y @ lift) @ np.linalg.inv(half)
        tilted = picture.transform(
            picture.size, Image.Transform.PERSPECTIVE, (back / back[2, 2]).flatten()[:8], Image.Resampling.BILINEAR
        )
        assert np.abs(sequence[i].astype(int) - centre(tilted)).mean() < 0.6


def test_noise_sequences_draw_from_the_image_and_the_seed_alone() -> None:
    images = torch.full((3, 3, 64, 64), 128, dtype=torch.uint8)
    ids = torch.tensor([11, 12, 13])
    for name, spread in (("gaussian_noise", 0.03 * 255), ("shot_noise", 255 * (128 / 255 / 300) ** 0.5)):
        whole = frames(images, name, CROP, ids=ids, seed=4)
        assert torch.equal(whole[1:2], frames(images[1:2], name, CROP, ids=ids[1:2], seed=4))
        assert float(whole[:, 1:].float().std()) == pytest.approx(spread, rel=0.03)
        harder = frames(images, name, CROP, ids=ids, seed=4, difficulty=3)
        assert float(harder[:, 1:].float().std()) > 2 * spread
    assert torch.equal(frames(images, "snow", CROP, ids=ids)[2], frames(images[2:], "snow", CROP, ids=ids[2:])[0])


def test_pictures_padded_into_one_batch_give_what_they_give_alone(picture: Image.Image) -> None:
    small = picture.crop((10, 0, 70, 50))
    batch = torch.zeros(2, 3, 60, 96, dtype=torch.uint8)
    batch[0] = tensor(picture)[0]
    batch[1, :, :50, :60] = tensor(small)[0]
    sizes = torch.tensor([[60, 96], [50, 60]])
    for name in PERTURBATIONS:
        both = frames(batch, name, CROP, sizes=sizes, ids=torch.tensor([0, 1]))
        alone = frames(tensor(small), name, CROP, ids=torch.tensor([1]))
        assert (both[1].int() - alone[0].int()).abs().max() <= 1, name


def test_generated_suite_counts_flips_as_a_loop_does(tmp_path: Path) -> None:
    model = Blobs(8, size=32)
    images = pictures(4, 40)
    root = write_classes(tmp_path / "data", images, ["a", "a", "b", "c"])
    scores = evaluate(
        model, "imagenet-p", root, perturbations=["translate", "shot_noise"], resize=False, progress=False
    )
    for name in ("translate", "shot_noise"):
        flips = []
        for index, image in enumerate(images):
            named = f"{'aabc'[index]}/{index:08d}.png"
            sequence = frames(
                torch.from_numpy(image).permute(2, 0, 1)[None], name, (32, 32), ids=torch.tensor([stable_hash(named)])
            )
            with torch.no_grad():
                said = model(as_input(sequence[0].permute(0, 2, 3, 1).numpy())).argmax(1).tolist()
            pairs = itertools.pairwise(said) if name == "translate" else ((said[0], later) for later in said[1:])
            flips.append(np.mean([before != after for before, after in pairs]))
        assert scores[name]["flip_probability"] == pytest.approx(100 * np.mean(flips))
    assert "mfr" not in scores.models["blobs"] and any("H.264" in note for note in scores.notes)
    with pytest.raises(VitfocusError, match="did you mean 'tilt'"):
        evaluate(model, "imagenet-p", root, perturbations=["tilts"], progress=False)


def test_published_videos(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="reading videos needs PyAV")
    model = Blobs(8, size=32)
    for name in ("rotate", "gaussian_noise"):
        for folder, index in (("a", 0), ("b", 1)):
            sequence = frames(torch.from_numpy(pictures(2, 40)[index]).permute(2, 0, 1)[None], name, (32, 32))[0]
            (tmp_path / name / folder).mkdir(parents=True)
            with av.open(str(tmp_path / name / folder / f"{index}.mp4"), "w") as container:
                stream = container.add_stream("mpeg4", rate=1)
                stream.width = stream.height = 32
                stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
                for frame in sequence:
                    picture = av.VideoFrame.from_ndarray(frame.permute(1, 2, 0).contiguous().numpy(), format="rgb24")
                    container.mux(stream.encode(picture))
                container.mux(stream.encode())
    scores = evaluate(model, "imagenet-p", tmp_path, perturbations=["rotate", "gaussian_noise"], progress=False)
    assert scores.images == 2 and 0 <= scores["rotate"]["flip_probability"] <= 100
    assert scores.fingerprint["protocol"]["mode"] == "published" and "av" in scores.fingerprint["protocol"]["decoder"]
    with pytest.raises(VitfocusError, match="lacks shot_noise"):
        evaluate(model, "imagenet-p", tmp_path, perturbations=["shot_noise"], progress=False)
    (tmp_path / "rotate/b/1.mp4").write_bytes(b"no video")
    with pytest.raises(VitfocusError, match=r"rotate/b/1\.mp4 cannot be read as a video"):
        evaluate(model, "imagenet-p", tmp_path, perturbations=["rotate"], progress=False)


def test_videos_without_a_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitfocus.robustness.suites import perturbations

    monkeypatch.setattr(perturbations.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "rotate/a").mkdir(parents=True)
    (tmp_path / "rotate/a/0.mp4").write_bytes(b"x")
    with pytest.raises(VitfocusError, match="crop_pct is about resizing images, and this data is not resized"):
        evaluate(Blobs(8), "imagenet-p", tmp_path, perturbations=["rotate"], crop_pct=0.9, progress=False)
    with pytest.raises(VitfocusError, match="pip install av"):
        evaluate(Blobs(8), "imagenet-p", tmp_path, perturbations=["rotate"], progress=False)
