"""Augmentation on the device: RandAugment against Pillow through timm, and mixing, cropping, erasing by their laws."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from msgspec.structs import asdict
from PIL import Image
from scipy import ndimage
from timm.data import auto_augment

from vitfocus.data.classification.augmentation import (
    OPERATIONS,
    Augmenter,
    ClassificationBatch,
    apply_operations,
    augment_patches,
    draw_uniform,
    mix,
    parse_policy,
    rand_augment,
)
from vitfocus.data.image_files import Normalise
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.recipes import Augment

TIMM = {"Posterize": "PosterizeIncreasing", "Solarize": "SolarizeIncreasing", "TranslateX": "TranslateXRel",
        "TranslateY": "TranslateYRel", "Color": "ColorIncreasing", "Contrast": "ContrastIncreasing",
        "Brightness": "BrightnessIncreasing", "Sharpness": "SharpnessIncreasing"}  # fmt: skip
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
NOTHING = Augment(crop="none", flip=0.0, randaugment="", erase=0.0, mixup=0.0, cutmix=0.0)
ZERO, ONE = (0.0,) * 3, (1 / 255,) * 3


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_each_operation_equals_pillow(name: str, sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At level 7 of 10, with a flat channel among the pictures, to one grey level (geometric: more at the edges)."""
    images = shapes_batch(range(6), size=(33, 40))[0]
    images[5, 1] = 77
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: sign * value)
    operation = auto_augment.AugmentOp(
        TIMM.get(name, name), prob=1.0, magnitude=7, hparams={"img_mean": (128,) * 3, "interpolation": Image.BILINEAR}
    )
    pictures = [operation(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images]
    expected = torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]).float()
    code = torch.full((6,), OPERATIONS.index(name))
    result = apply_operations(images.float(), code, torch.full((6,), 0.7), torch.full((6,), float(sign)))
    difference = (result - expected).abs()
    if name in GEOMETRIC:
        inner = difference[:, :, 3:-3, 3:-3]
        assert (inner <= 2).float().mean() > 0.9 and difference.mean() < 6
    else:
        assert difference.max() <= 1 and (difference == 0).float().mean() > 0.9


def test_randaugment_leaves_what_it_does_not_draw() -> None:
    images = shapes_batch(range(64), size=32)[0].float()
    policy = parse_policy("rand-m9-mstd0.5-inc1")
    uniform = draw_uniform(0, 0, 64, policy.layers * 4)
    result = rand_augment(images, uniform, policy)
    untouched = (uniform[:, 0] >= 0.5) & (uniform[:, 4] >= 0.5)
    assert 5 < untouched.sum() < 30
    assert torch.equal(result[untouched], images[untouched])
    changed = (result != images).flatten(1).any(1)
    assert (changed | untouched).float().mean() > 0.9
    assert result.min() >= 0 and result.max() <= 255 and torch.equal(result, result.round())


def test_crops_flips_and_erasing_keep_what_they_should() -> None:
    images = shapes_batch(range(32), size=32)[0]
    uniform = draw_uniform(1, 0, 32, 12)

    def augment(**changes: object) -> torch.Tensor:
        return Augmenter(Augment(**{**asdict(NOTHING), **changes}), ZERO, ONE, "cpu", True)(images, uniform)

    whole = images.float()
    assert torch.allclose(augment(), whole, atol=1e-4)
    assert torch.allclose(augment(flip=1.0), whole.flip(3), atol=1e-4)
    padded = torch.nn.functional.pad(whole, (4,) * 4)
    for index, crop in enumerate(augment(crop="pad", padding=4)):
        top, left = (int(value * 9) for value in uniform[index, :2])
        assert torch.allclose(crop, padded[index, :, top : top + 32, left : left + 32], atol=1e-4)
    assert torch.allclose(augment(crop="resized", scale=(1.0, 1.0)).mean(), whole.mean(), rtol=0.03)
    erased = augment(erase=1.0)
    share = (erased != augment()).any(1).float().mean((1, 2))
    assert share.min() > 0.01 and share.max() < 0.4
    assert torch.equal(augment(erase=0.0), augment())


def test_mixing_is_the_same_for_a_divided_batch_and_its_labels_follow_the_pixels() -> None:
    labels = torch.arange(16)
    images = labels.float()[:, None, None, None].expand(16, 3, 8, 8).contiguous()
    kinds = set()
    for step in range(30):
        section = Augment(**{**asdict(NOTHING), "mixup": 0.8, "cutmix": 1.0, "mix_probability": 0.9})
        whole = mix(ClassificationBatch(images, labels, labels), section, 3, step)
        halves = [
            mix(ClassificationBatch(images[half], labels[half], labels[half]), section, 3, step)
            for half in (slice(8), slice(8, 16))
        ]
        assert torch.equal(whole.images, torch.cat([half.images for half in halves]))
        assert torch.equal(whole.other_labels, torch.cat([half.other_labels for half in halves]))
        target = whole.weight * whole.labels + whole.other_weight * whole.other_labels
        assert torch.allclose(whole.images.mean((1, 2, 3)), target.float(), atol=1e-5)
        kinds.add("none" if whole.weight == 1 else "cut" if torch.equal(whole.images, whole.images.round()) else "mix")
    assert kinds == {"none", "cut", "mix"}
    odd = mix(ClassificationBatch(images[:5], labels[:5], labels[:5]), section, 3, 0)
    assert torch.equal(odd.images[4], images[4]) and odd.other_labels[4] == labels[4]


def test_patchwise_augmentation_equals_rvts() -> None:
    """Patch by patch: unchanged, or a crop of 15 of 16 pixels resized back by SciPy, or noise of 0.01, or mirrored."""
    torch.manual_seed(0)
    side, normalise = 16, Normalise((0.5,) * 3, (0.25,) * 3, "cpu")
    images = normalise(torch.randint(30, 226, (40, 3, 64, 96), dtype=torch.uint8))
    before = images.clone()
    after = augment_patches(images, side, normalise)
    assert after.shape == images.shape and torch.equal(images, before)
    seen: Counter[str] = Counter()
    for top in range(0, 64, side):
        for left in range(0, 96, side):
            places = (slice(None), slice(None), slice(top, top + side), slice(left, left + side))
            for old, new in zip(images[places].numpy(), after[places].numpy(), strict=True):
                crops = [old, *(_resized(old[:, y : y + 15, x : x + 15], side) for y in (0, 1) for x in (0, 1))]
                error = min((abs(new - (c[..., ::-1] if f else c)) for c in crops for f in (False, True)), key=np.max)
                assert error.max() < 0.06, "neither the patch nor one of its forms"
                noisy = error.max() > 1e-4
                assert not noisy or 0.008 < error.std() / np.sqrt(1 - 2 / np.pi) < 0.012
                plain = min(float(np.abs(new - one).max()) for one in (old, old[..., ::-1]))
                seen["cropped"] += plain > 0.06
                seen["noisy"] += noisy
                seen["patches"] += 1
    assert seen["patches"] == 960
    assert 60 < seen["noisy"] < 140, "about a tenth"
    assert 20 < seen["cropped"] < 100, "a tenth, of which some crops are whole"
    assert float(augment_patches(torch.full((1, 3, 16, 16), 9.0), 16, normalise).max()) == 2.0, "limited to white"


def _resized(patch: np.ndarray, side: int) -> np.ndarray:
    """Bilinear, corners on corners."""
    return np.stack([ndimage.zoom(one, side / patch.shape[-1], order=1, grid_mode=False) for one in patch])
