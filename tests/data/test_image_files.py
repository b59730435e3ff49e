"""Pictures as people have them: 16 bits deep, endlessly wide, behind links, turned, named in bytes that are no text."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers.robustness_layouts import Blobs, pictures
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as T

from vitfocus.cli import main
from vitfocus.cli.diagnose import image_files
from vitfocus.core.errors import VitfocusError
from vitfocus.data.classification.dataset import FolderImages
from vitfocus.data.image_files import (
    Preprocessing,
    cut_centre,
    evaluation_preprocessing,
    open_image,
    read_image,
    to_rgb,
)
from vitfocus.robustness import evaluate


@pytest.mark.parametrize(
    ("name", "kind", "full"),
    [("a.png", "uint16", 65535), ("a.tif", "uint16", 65535), ("a.tif", "int32", 255), ("a.tif", "float32", 1)],
)
def test_16_bit_images_keep_their_grey_levels(name: str, kind: str, full: int, tmp_path: Path) -> None:
    grey, file = pictures(1, 24)[0][..., 0], tmp_path / name
    Image.fromarray((grey * (full / 255)).astype(kind)).save(file)
    with Image.open(file) as stored:
        read = np.asarray(to_rgb(stored))
    assert np.array_equal(read, np.repeat(grey[..., None], 3, axis=2))
    assert np.asarray(read_image(file, (24, 24), crop=1.0)).std() == pytest.approx(grey.std(), rel=1e-3)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_centre_crop_of_a_long_image_is_that_of_the_whole(interpolation: str) -> None:
    long = Image.fromarray(np.concatenate(list(pictures(40, 12)), axis=1))  # 12 x 480: enough to be cut first
    mode, resized = InterpolationMode(interpolation), (36, 1440)
    whole = T.center_crop(T.resize(long, list(resized), mode), [32, 32])
    cut = cut_centre(long, resized, (32, 32), mode)
    assert cut.size == (32, 32)
    assert np.abs(np.asarray(cut, int) - np.asarray(whole, int)).max() <= 1
    assert Preprocessing(36, (32, 32), interpolation).apply(long).shape == (3, 32, 32)


def test_an_image_of_one_row_is_preprocessed_quickly() -> None:
    line = Image.fromarray(np.zeros((1, 400_000, 3), np.uint8))  # resized as a whole: 79 GB
    assert Preprocessing(256, (224, 224)).apply(line).shape == (3, 224, 224)


def test_links_are_followed_and_hidden_files_are_skipped(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (folder / "sub.jpg").mkdir(parents=True)
    elsewhere.mkdir()
    for file in (folder / "a.png", folder / "sub.jpg" / "b.png", elsewhere / "c.png"):
        Image.fromarray(pictures(1, 8)[0]).save(file)
    (folder / "._a.png").write_bytes(b"what another system leaves behind")
    (folder / "link").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    found = image_files(folder, limit=10)
    assert [file.relative_to(folder).as_posix() for file in found] == ["a.png", "link/c.png", "sub.jpg/b.png"]


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    upright = Image.fromarray(np.repeat(np.arange(0, 256, 8, dtype=np.uint8), 32).reshape(32, 32)).convert("RGB")
    turned, exif = upright.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    turned.save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(read_image(tmp_path / "a.png", (32, 32), 1.0).permute(1, 2, 0), np.asarray(upright))


def test_oversized_picture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    header = (60_000).to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    (tmp_path / "cat").mkdir()
    bomb = tmp_path / "cat" / "a.png"
    bomb.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    assert main(["diagnose", "vit_tiny_patch16_224", "--images", str(tmp_path)]) == 2
    assert "cannot be read as an image" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(VitfocusError, match="cannot be read as an image"):
        evaluate(Blobs(1), "clean", tmp_path, progress=False, device="cpu")


def test_names_need_not_be_text(tmp_path: Path) -> None:
    names = [os.fsdecode(b"caf\xe9.png"), os.fsdecode(b"th\xe9.png")]
    (tmp_path / "cat").mkdir()
    try:
        for name, pixels in zip(names, pictures(2, 32), strict=True):
            Image.fromarray(pixels).save(tmp_path / "cat" / name)
    except OSError:
        pytest.skip("this file system wants names in UTF-8")
    scores = evaluate(
        Blobs(1), "imagenet-c", tmp_path, corruptions="shot_noise", severities=1, progress=False, device="cpu"
    )
    assert scores.images == 2
    assert len(FolderImages(tmp_path).digest()) == 64


@pytest.mark.parametrize(
    ("size", "interpolation"),
    [((32, 32), "bilinear"), ((32, 32), "bicubic"), ((32, 48), "bilinear")],  # timm's rectangles are always bilinear
)
@pytest.mark.parametrize("crop", [0.875, 0.9, 1.0])
def test_preprocessing_equals_timm(size: tuple[int, int], crop: float, interpolation: str) -> None:
    transform = create_transform((3, *size), crop_pct=crop, interpolation=interpolation, use_prefetcher=True)
    preprocessing = evaluation_preprocessing(size, interpolation, crop, keep=False)
    for shape in ((50, 71), (97, 40), (33, 33), (20, 25)):
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8))
        assert np.array_equal(preprocessing.apply(picture).numpy(), transform(picture)), shape


def test_only_usual_formats_are_decoded(tmp_path: Path) -> None:
    """PostScript, for which Pillow starts Ghostscript, under any name; the usual ones open under any name too."""
    for kind in ("EPS", "PCX", "TGA"):
        Image.new("RGB", (8, 8)).save(tmp_path / "x.png", kind)
        with pytest.raises(VitfocusError, match="UnidentifiedImageError"):
            open_image(tmp_path / "x.png")
    for kind in ("AVIF", "PPM", "WEBP", "JPEG", "GIF", "BMP", "TIFF"):
        Image.new("RGB", (8, 8)).save(tmp_path / "x.png", kind)
        assert open_image(tmp_path / "x.png").size == (8, 8)
        assert open_image(io.BytesIO((tmp_path / "x.png").read_bytes()), most=64).size == (8, 8)


def test_fifo_among_the_images_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(VitfocusError, match=r"x\.png cannot be read"):
        open_image(tmp_path / "x.png")
