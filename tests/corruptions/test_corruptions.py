"""Corruptions: agreement with the reference, draws that belong to images, and every shape a user may bring."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.io import decode_jpeg, encode_jpeg

from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions import (
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    FLAVOURS,
    apply,
    corrupt,
    digital,
    filters,
    fingerprint,
    noise_and_blur,
    parse,
    weather,
)
from vitfocus.corruptions.base import Draws, stable_hash

ALL = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
DETERMINISTIC = (
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
)
RANDOM = tuple(name for name in ALL if name not in DETERMINISTIC)
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee")


def photograph(shared: Path, name: str) -> tuple[Tensor, dict[str, np.ndarray]]:
    stored = dict(np.load(shared / "golden" / "corruptions" / f"{name}.npz"))
    return torch.from_numpy(stored["clean"]).permute(2, 0, 1).contiguous(), stored


def picture(height: int = 64, width: int = 64, count: int = 1) -> Tensor:
    """Smooth colours with edges and noise, uint8."""
    draws = Draws(0, "test picture", 0, torch.arange(count))
    coarse = draws.normal((3, 5, 5), stream=0)
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear") * 60 + 120
    return (smooth + draws.normal((3, height, width), stream=1) * 10).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_corruptions_equal_the_reference(shared: Path, name: str) -> None:
    # Rounding of the reference's float32 sums and of its DFT leaves a value in a hundred thousand one level off.
    allowed = 1e-4 if name in ("defocus_blur", "zoom_blur") else 0.0
    for photo in PHOTOGRAPHS:
        clean, stored = photograph(shared, photo)
        for severity in range(1, 6):
            ours = corrupt(clean, name, severity).permute(1, 2, 0).numpy().astype(int)
            error = np.abs(ours - stored[f"{name}_{severity}"])
            if name == "jpeg_compression":  # another libjpeg may round otherwise
                assert 10 * math.log10(255**2 / max((error**2).mean(), 1e-9)) >= 40
            else:
                assert error.max() <= 1, (photo, severity)
                assert (error > 0).mean() <= allowed, (photo, severity)


@pytest.mark.parametrize("severity", [1, 3, 5])
@pytest.mark.parametrize("name", RANDOM)
def test_random_corruptions_have_the_reference_statistics(shared: Path, name: str, severity: int) -> None:
    clean, _ = photograph(shared, "astronaut")
    expected = json.loads((shared / "golden" / "corruptions" / "stats.json").read_text())[
        f"astronaut/{name}/{severity}"
    ]
    draws = 12
    many = corrupt(clean.expand(draws, -1, -1, -1), name, severity, frost=shared / "data" / "frost").double()
    psnr = 10 * torch.log10(255**2 / (many - clean).square().mean((1, 2, 3)))
    variation = many.diff(dim=-1).abs().mean((1, 2, 3)) + many.diff(dim=-2).abs().mean((1, 2, 3))

    def near(ours: Tensor, reference: float, spread: float) -> None:
        # `spread` is one draw's; the reference's own mean over its 32 draws is uncertain as well.
        slack = max(0.02 * abs(reference), 3 * spread)
        assert abs(float(ours.mean()) - reference) <= slack, (float(ours.mean()), reference, slack)

    near(psnr, expected["psnr_mean"], expected["psnr_sd"])
    near(variation, expected["tv_mean"], expected["tv_sd"])
    for channel in range(3):
        values = many[:, channel].flatten(1)
        near(values.mean(1), expected["channel_mean"][channel], expected["channel_mean_sd"][channel])
        deviation = values.std(1)
        uncertain = float(deviation.std()) * math.sqrt(1 / draws + 1 / expected["draws"])
        near(deviation, expected["channel_std"][channel], uncertain)


@pytest.mark.parametrize("name", ALL)
def test_corruption_does_not_depend_on_batch_order_and_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images, ids = picture(48, 40, count=5), torch.tensor([3, 11, 5, 2**40, 8])
    together = corrupt(images, name, 4, seed=1, ids=ids)
    turned = torch.tensor([4, 2, 0, 3, 1])
    assert torch.equal(corrupt(images[turned], name, 4, seed=1, ids=ids[turned].tolist()), together[turned])
    for index in range(5):
        assert torch.equal(corrupt(images[index], name, 4, seed=1, ids=int(ids[index])), together[index])
    monkeypatch.setitem(apply._CHUNK, "cpu", 2 * 48 * 40)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert torch.equal(corrupt(images, name, 4, seed=1, ids=ids), together)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was moved"


@pytest.mark.parametrize("name", RANDOM)
def test_seed_and_id_change_the_draw(name: str) -> None:
    image = picture(64, 64)
    first = corrupt(image, name, 3, seed=0, ids=[0])
    assert torch.equal(first, corrupt(image, name, 3, seed=0, ids=[0]))
    assert not torch.equal(first, corrupt(image, name, 3, seed=1, ids=[0]))
    assert not torch.equal(first, corrupt(image, name, 3, seed=0, ids=["cat.jpeg"]))


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", ALL)
def test_any_size_dtype_and_layout(name: str, flavour: str) -> None:
    sizes = [(32, 32), (37, 70)] + ([(7, 5), (300, 19)] if flavour != "cifar" else [])
    for height, width in sizes:
        image = picture(height, width, count=2)
        before = image.clone()
        for severity in (1, 2, 5):
            result = corrupt(image, name, severity, flavour=flavour)
            assert result.shape == image.shape and result.dtype == torch.uint8
            assert torch.equal(image, before)
            as_float = corrupt(image.float() / 255, name, severity, flavour=flavour)
            assert as_float.dtype == torch.float32
            assert torch.equal(as_float, result.float() / 255)
    image = picture(33, 40, count=2)
    result = corrupt(image, name, flavour=flavour)
    strided = image.to(memory_format=torch.channels_last)
    assert torch.equal(corrupt(strided, name, flavour=flavour), result)
    half = corrupt((image.double() / 255).half(), name, flavour=flavour)
    assert half.dtype == torch.float16
    assert torch.equal((half.float() * 255).round().to(torch.uint8), result)
    assert corrupt(image[:0], name, flavour=flavour).shape == (0, 3, 33, 40)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_fog_on_an_image_of_one_pixel(flavour: str) -> None:
    fogged = corrupt(torch.full((8, 3, 1, 1), 60, dtype=torch.uint8), "fog", flavour=flavour)
    assert 0 < int(fogged.min()) <= int(fogged.max()) <= 60  # the brightest value of the image stays the limit


def test_glass_blur_equals_the_sequential_scan() -> None:
    """Guards the pointer jumping: the literal scan of the reference, with the same offsets, pixel after pixel."""
    height, width = 40, 31
    for reach in (1, 2, 4):
        draws = Draws(2, "glass_blur", 5, torch.arange(2))
        source = noise_and_blur._glass_sources(height, width, reach, draws, stream=0)
        rows, columns = height - 2 * reach, width - 2 * reach
        bits = draws.bits(rows * columns, 0).view(2, rows, columns)
        across = ((bits & 0xFFFF) * 2 * reach >> 16) - reach
        down = (((bits >> 16) & 0xFFFF) * 2 * reach >> 16) - reach
        assert int(across.min()) == -reach and int(down.max()) == reach - 1
        for image in range(2):
            pixels = np.arange(height * width).reshape(height, width)
            for h in range(height - reach, reach, -1):
                for w in range(width - reach, reach, -1):
                    dy = int(down[image, h - reach - 1, w - reach - 1])
                    dx = int(across[image, h - reach - 1, w - reach - 1])
                    pixels[h, w] = pixels[h + dy, w + dx]
            assert np.array_equal(pixels.ravel(), source[image].numpy())


@pytest.mark.parametrize("size", [(64, 64), (33, 47), (17, 3), (1, 1)])
def test_jpeg_in_tensors_is_libjpeg_bit_for_bit(size: tuple[int, int]) -> None:
    images = torch.cat([picture(*size), torch.randint(256, (1, 3, *size), dtype=torch.uint8)])
    for quality in (7, 15, 25, 50, 80):
        coded = torch.stack([decode_jpeg(encode_jpeg(image, quality=quality)) for image in images])
        assert torch.equal(digital.jpeg_in_tensors(images, quality), coded)


def test_both_forms_of_motion_blur_agree() -> None:
    image = picture(40, 52, count=3)
    angles = torch.tensor([-45.0, 13.7, 44.9])
    by_slices = filters.streak(image, 15, 8, angles)
    steps = torch.arange(31, dtype=torch.float64)
    radians = torch.deg2rad(angles.double())[:, None]
    weights = [math.exp(-(i**2) / 128) for i in range(31)]
    weights = [w / sum(weights) for w in weights]
    right = torch.ceil(steps * torch.cos(radians) - 0.5).long()
    down = torch.ceil(steps * torch.sin(radians) - 0.5).long()
    assert torch.allclose(filters._streak_by_gather(image, weights, down, right), by_slices, atol=1e-3)
    flat = filters.streak(torch.full((1, 1, 20, 20), 77, dtype=torch.uint8), 20, 15, torch.tensor([30.0]))
    assert torch.allclose(flat, torch.tensor(77.0))


def test_filters_agree_with_scipy() -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    rng = np.random.default_rng(0)
    x = rng.random((150, 90))
    for sigma, mode, truncate in (
        (1.0, "nearest", 4.0),
        (3.0, "reflect", 3.0),
        (170.8, "reflect", 3.0),
        (0.25, "nearest", 4.0),
    ):
        expected = ndimage.gaussian_filter(x, sigma, mode=mode, truncate=truncate)
        assert np.allclose(filters.gaussian(torch.from_numpy(x), sigma, mode, truncate).numpy(), expected, atol=1e-12)
    expected = ndimage.gaussian_filter(x, (2.0, 0.9), mode="reflect", truncate=3.0)
    assert np.allclose(filters.gaussian(torch.from_numpy(x), (2.0, 0.9), "reflect", 3.0).numpy(), expected, atol=1e-12)
    kernel = rng.random((7, 5))
    expected = ndimage.correlate(x, kernel, mode="mirror")
    ours = filters.correlate(torch.from_numpy(x), tuple(map(tuple, kernel.tolist())))
    assert np.allclose(ours.numpy(), expected, atol=1e-10)
    for factor in (1.0, 1.07, 2.5):
        crop = [math.ceil(n / factor) for n in x.shape]
        top, left = ((n - c) // 2 for n, c in zip(x.shape, crop, strict=True))
        expected = ndimage.zoom(x[top : top + crop[0], left : left + crop[1]], factor, order=1)
        ours = filters.clipped_zoom(torch.from_numpy(x)[None, None], factor, "none")[0, 0]
        assert np.allclose(ours.numpy(), expected, atol=1e-12)


def test_random_draws_have_the_expected_distributions() -> None:
    draws = Draws(0, "law", 1, torch.arange(4))
    uniform = draws.uniform((100_000,))
    counts = torch.histc(uniform, 50, 0, 1)
    assert float(((counts - 8000) ** 2 / 8000).sum()) < 90  # chi-square, 49 degrees of freedom
    assert float(uniform.min()) > 0 and float(uniform.max()) < 1
    normal = draws.normal((100_001,))
    assert abs(float(normal.mean())) < 0.01 and abs(float(normal.std()) - 1) < 0.01
    assert abs(float((normal**4).mean()) - 3) < 0.06
    assert torch.corrcoef(normal).fill_diagonal_(0).abs().max() < 0.015
    lagged = normal[:, 1:] * normal[:, :-1]
    assert abs(float(lagged.mean())) < 0.01
    whole = draws.integers(-3, torch.tensor([4, 5, 6, 7]).view(4, 1), (5000,))
    assert whole.amin(1).tolist() == [-3] * 4 and whole.amax(1).tolist() == [3, 4, 5, 6]


def test_random_draws_match_stored_values() -> None:
    """A seed names a published result: these numbers are a promise."""
    assert Draws(0, "fog", 3, torch.tensor([7, -1])).bits(3, stream=1).tolist() == [
        [938941824, 1095041374, 2015813743],
        [1171912420, -872793344, 1062468864],
    ]
    assert stable_hash("a") == 2340832890917691671


def test_shot_noise_is_poisson() -> None:
    value, photons = 100, 12
    image = torch.full((1, 3, 200, 200), value, dtype=torch.uint8)
    result = corrupt(image, "shot_noise", 3)
    rate = value / 255 * photons
    for count in range(photons):
        expected = math.exp(-rate) * rate**count / math.factorial(count)
        seen = float((result == int(count / photons * 255)).double().mean())
        assert abs(seen - expected) < 5 * math.sqrt(expected / result.numel()) + 1e-9, count


def test_errors_say_what_to_do() -> None:
    image = picture(32, 32)
    with pytest.raises(VitfocusError, match="did you mean 'gaussian_noise'"):
        corrupt(image, "gausian_noise")
    for severity in (0, 6, 3.0, True, "3"):
        with pytest.raises(VitfocusError, match="from 1 to 5"):
            corrupt(image, "fog", severity)  # type: ignore[arg-type]
    with pytest.raises(VitfocusError, match="did you mean 'cifar'"):
        corrupt(image, "fog", flavour="cifar10")
    with pytest.raises(VitfocusError, match="2 ids for 1 images"):
        corrupt(image, "fog", ids=[1, 2])
    with pytest.raises(VitfocusError, match="shape"):
        corrupt(image[:, :1], "fog")
    with pytest.raises(VitfocusError, match="dtype"):
        corrupt(image.int(), "fog")
    with pytest.raises(VitfocusError, match="divide them by 255"):
        corrupt(image.float(), "fog")
    with pytest.raises(VitfocusError, match="corrupt first, then normalise"):
        corrupt(image.float() / 127.5 - 1, "fog")
    with pytest.raises(VitfocusError, match="not a number"):
        parse("fog/high")
    assert parse("fog") == ("fog", 3)
    with pytest.raises(VitfocusError, match="There is no corruption"):
        corrupt(image, ["fog"])  # type: ignore[arg-type]
    for ids in ([None], [1.5], 1.5, torch.tensor([1.0]), np.array([1.0])):
        with pytest.raises(VitfocusError, match="whole number"):
            corrupt(image, "fog", ids=ids)  # type: ignore[arg-type]
    for seed in (1.5, None, "1"):
        with pytest.raises(VitfocusError, match="seed is"):
            corrupt(image, "fog", seed=seed)  # type: ignore[arg-type]


def test_numpy_numbers_are_accepted() -> None:
    image = picture(32, 32)
    plain = corrupt(image, "gaussian_noise", 4, seed=7, ids=[9])
    numbers = corrupt(image, "gaussian_noise", np.int64(4), seed=np.int64(7), ids=np.array([9]))  # type: ignore[arg-type]
    assert torch.equal(plain, numbers)


def test_frost_sources(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, folder = picture(64, 64), shared / "data" / "frost"
    monkeypatch.delenv(weather.FROST_VARIABLE, raising=False)
    monkeypatch.setattr(weather, "_installed", lambda: None)
    drawn = corrupt(image, "frost")
    assert fingerprint()["comparable"] is False and "drawn" in fingerprint()["frost"]
    real = corrupt(image, "frost", frost=folder)
    assert not torch.equal(drawn, real)
    monkeypatch.setenv(weather.FROST_VARIABLE, str(folder))
    assert torch.equal(corrupt(image, "frost"), real)
    assert fingerprint()["comparable"] is True and fingerprint("any")["flavour"] == "any"
    monkeypatch.delenv(weather.FROST_VARIABLE)
    monkeypatch.setattr(weather, "_installed", lambda: str(folder))
    assert torch.equal(corrupt(image, "frost"), real)
    with pytest.raises(VitfocusError, match=r"lacks frost1\.png"):
        corrupt(image, "frost", frost=tmp_path)


def test_an_installed_imagecorruptions_is_found_but_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "imagecorruptions"
    (package / "frost").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('broken on this NumPy')")
    for name in weather.FROST_FILES:
        (package / "frost" / name).write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    weather._installed.cache_clear()
    try:
        assert weather._installed() == str(package / "frost")
    finally:
        weather._installed.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_the_gpu_gives_the_same_draws_and_corruptions(name: str) -> None:
    images = picture(224, 224, count=4)
    for severity in range(1, 6):
        here = corrupt(images, name, severity).int()
        there = corrupt(images.cuda(), name, severity)
        assert there.is_cuda
        error = (there.cpu().int() - here).abs()
        assert (error > 1).double().mean() < 1e-3, severity
        assert error.double().mean() < 0.15, severity
