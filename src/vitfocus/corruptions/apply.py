"""`corrupt`: one call for all nineteen corruptions, on a batch or a single image."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from vitfocus.core.arguments import checked, whole
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.corruptions import digital, noise_and_blur, weather
from vitfocus.corruptions.constants import CONSTANTS, CORRUPTIONS, EXTRA_CORRUPTIONS, FLAVOURS, Setting
from vitfocus.corruptions.draws import Draws, as_ids

VERSION = 1
"""Incremented whenever any output changes."""

_EFFECTS: dict[str, Callable[[Tensor, Setting, Draws], Tensor]] = {
    "gaussian_noise": noise_and_blur.gaussian_noise,
    "shot_noise": noise_and_blur.shot_noise,
    "impulse_noise": noise_and_blur.impulse_noise,
    "defocus_blur": noise_and_blur.defocus_blur,
    "glass_blur": noise_and_blur.glass_blur,
    "motion_blur": noise_and_blur.motion_blur,
    "zoom_blur": noise_and_blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": digital.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise_and_blur.speckle_noise,
    "gaussian_blur": noise_and_blur.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": digital.saturate,
}

# Pixels processed at once: few enough for a CPU's cache, enough to keep a GPU busy.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}


def parse(text: str) -> tuple[str, int]:
    """Read "name/severity"; a bare name means severity 3.

    >>> parse("gaussian_noise/5")
    ('gaussian_noise', 5)
    >>> parse("fogg/2")
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: There is no corruption 'fogg': did you mean 'fog'?
    """
    name, _, severity = text.partition("/")
    _check_name(name)
    if not severity:
        return name, 3
    try:
        number = int(severity)
    except ValueError:
        raise VitfocusError(f"The severity in {text!r} is not a number; expected 1 to 5, as in '{name}/3'.") from None
    return name, _check_severity(number)


@checked
def corrupt(
    images: Tensor,
    name: str,
    severity: int = 3,
    seed: int = 0,
    ids: Tensor | Iterable[int | str] | None = None,
    flavour: str = "imagenet",
    frost: str | os.PathLike[str] | None = None,
) -> Tensor:
    """Corrupt images as in ImageNet-C, CIFAR-C or the benchmarks for images of any size.

    Random draws depend only on `seed`, the id of the image, `name` and `severity`, so an image is corrupted identically
    in any batch, order or process.

    Args:
        images: (B, 3, H, W) or (3, H, W), uint8 or float in [0, 1]. Floats are rounded to 8 bits first.
        name: One of the 19 common corruptions, such as "gaussian_noise".
        severity: 1 to 5.
        seed: Seed of the random draws.
        ids: One integer or string per image, such as dataset indices or file names (default: 0, 1, 2, ...).
        flavour: "imagenet", "cifar" (constants for 32 pixels) or "any" (as in Cityscapes-C and COCO-C).
        frost: Folder of the published frost overlays (see `fingerprint`).

    Returns:
        The corrupted images, with the shape, dtype and device of `images`; floats are 8-bit values / 255.

    Raises:
        VitfocusError: If an argument is invalid; the message names the nearest valid choice.

    Example:
        >>> images = torch.randint(256, (2, 3, 64, 48), dtype=torch.uint8)
        >>> corrupt(images, "glass_blur", severity=5).shape
        torch.Size([2, 3, 64, 48])
        >>> both = corrupt(images, "fog", ids=["a", "b"])
        >>> bool((both[1] == corrupt(images[1], "fog", ids=["b"])).all())
        True
    """
    _check_name(name)
    severity = _check_severity(severity)
    _check_flavour(flavour)
    seed = whole("seed", seed)
    batch = _as_bytes(images)
    if batch.device.type not in _CHUNK:  # devices without float64
        batch = batch.cpu()
    identity = as_ids([ids] if isinstance(ids, Integral | str) else ids, len(batch), batch.device)
    if len(identity) != len(batch):
        raise VitfocusError(f"Got {len(identity)} ids for {len(batch)} images; expected one id per image.")
    if not len(batch):
        return images.clone()
    folder = weather.locate_frost(frost) if name == "frost" else None
    setting = Setting(CONSTANTS[flavour][name][severity - 1], flavour, folder)
    effect = _EFFECTS[name]
    step = max(1, _CHUNK[batch.device.type] // (batch.shape[-1] * batch.shape[-2]))
    with torch.no_grad(), torch.autocast(batch.device.type, enabled=False):
        parts = [
            effect(batch[start : start + step], setting, Draws(seed, name, severity, identity[start : start + step]))
            for start in range(0, len(batch), step)
        ]
        result = torch.cat(parts).to(images.device)
    if images.dtype != torch.uint8:
        result = result.to(torch.float32).div_(255).to(images.dtype)
    return result.reshape(images.shape)


def fingerprint(
    flavour: str = "imagenet",
    frost: str | os.PathLike[str] | None = None,
    names: Sequence[str] = (*CORRUPTIONS, *EXTRA_CORRUPTIONS),
) -> dict[str, Any]:
    """The facts that the output of these corruptions depends on, to publish with a number.

    The JPEG codec and the frost overlays are among them where `names` include the corruptions that use them.
    `comparable` is False where frost is drawn because the published overlays are missing.

    Example:
        >>> fingerprint("cifar")["flavour"], "jpeg" in fingerprint(names=["fog"])
        ('cifar', False)
    """
    _check_flavour(flavour)
    facts = {"implementation": "vitfocus.corruptions", "version": VERSION, "flavour": flavour}
    facts |= {"torch": torch.__version__, "comparable": True}
    if "jpeg_compression" in names:
        facts["jpeg"] = digital.jpeg_codec()
    if "frost" in names:
        folder = weather.locate_frost(frost)
        drawn = folder == weather.DRAWN_FROST
        facts["frost"] = "drawn, not the published overlays" if drawn else f"sha256:{weather.frost_digest(folder)}"
        facts["comparable"] = not drawn
    return facts


def _check_name(name: str) -> None:
    if not isinstance(name, str) or name not in _EFFECTS:
        raise VitfocusError(
            f"There is no corruption {name!r}: {nearest(str(name), (*CORRUPTIONS, *EXTRA_CORRUPTIONS))}"
        )


def _check_severity(severity: int) -> int:
    try:
        return whole("severity", severity, 1, 5)
    except VitfocusError:
        raise VitfocusError(f"Severity {severity!r} does not exist; expected a whole number from 1 to 5.") from None


def _check_flavour(flavour: str) -> None:
    if not isinstance(flavour, str) or flavour not in FLAVOURS:
        raise VitfocusError(f"There is no flavour {flavour!r}: {nearest(str(flavour), FLAVOURS)}")


def _as_bytes(images: Tensor) -> Tensor:
    """The images as a (B, 3, H, W) uint8 batch; anything else is refused."""
    if not isinstance(images, Tensor):
        raise VitfocusError(
            f"Images are a {type(images).__name__}; expected a tensor of shape (B, 3, H, W) or (3, H, W)."
        )
    if images.dim() not in (3, 4) or images.shape[-3] != 3 or 0 in images.shape[-2:]:
        raise VitfocusError(f"Images have shape {tuple(images.shape)}; expected (B, 3, H, W) or (3, H, W), RGB.")
    batch = images if images.dim() == 4 else images[None]
    if images.dtype == torch.uint8:
        return batch
    if not images.is_floating_point():
        raise VitfocusError(f"Images have dtype {images.dtype}; expected uint8, or floats in [0, 1].")
    # Reading values from a GPU would synchronise with it, so there they are only clipped.
    if images.device.type == "cpu" and images.numel():
        low, high = (float(v) for v in images.aminmax())
        if not (low >= -1e-3 and high <= 1 + 1e-3):
            raise VitfocusError(
                f"Float images lie in [{low:.3g}, {high:.3g}]; expected [0, 1]: corrupt first, then normalise."
            )
    return batch.detach().float().mul(255).round_().clamp_(0, 255).to(torch.uint8)
