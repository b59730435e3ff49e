"""`corrupt`: one call for all nineteen corruptions, on images in any form."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitfocus.core.arguments import check_int, parse_digits
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.files import home_path
from vitfocus.core.metrics import CORRUPTIONS, EXTRA_CORRUPTIONS
from vitfocus.corruptions import digital, noise_and_blur, weather
from vitfocus.corruptions.base import CONSTANTS, FLAVOURS, Draws, Setting, as_ids
from vitfocus.data.image_files import (
    array_to_tensor,
    as_images,
    is_image,
    open_image,
    require_pixels,
    to_image,
    to_tensor,
)
from vitfocus.data.shapes.dataset import shapes_batch, shapes_named

VERSION = 1
"""Incremented whenever any output changes."""

_EFFECTS: dict[str, Callable[[Tensor, Setting, Draws], Tensor]] = {
    name: next(getattr(family, name) for family in (noise_and_blur, weather, digital) if hasattr(family, name))
    for name in (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
}

#: Images of "shapes" without a number.
SHAPES = 64

# Pixels processed at once: few enough for a CPU's cache, enough to keep a GPU busy.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}


def parse(text: str) -> tuple[str, int]:
    """Parse a corruption.

    Args:
        text: "name/severity"; a name alone means severity 3.

    Returns:
        The name and the severity.

    Raises:
        VitfocusError: There is no such corruption or severity.

    Example:
        >>> parse("gaussian_noise/5")
        ('gaussian_noise', 5)
        >>> parse("fogg/2")
        Traceback (most recent call last):
        vitfocus.core.errors.VitfocusError: There is no corruption 'fogg': did you mean 'fog'?
    """
    name, _, severity = text.partition("/")
    _check_choice("corruption", name, _EFFECTS)
    if not severity:
        return name, 3
    number = parse_digits(severity)
    if number is None:
        raise VitfocusError(f"The severity in {text!r} is not a number; expected 1 to 5, as in '{name}/3'.")
    return name, _check_severity(number)


def corrupt(
    images: Any,
    name: str,
    severity: int = 3,
    seed: int = 0,
    ids: Tensor | Iterable[int | str] | int | str | None = None,
    flavour: str = "imagenet",
    frost: str | os.PathLike[str] | None = None,
) -> Any:
    """Corrupt images as in ImageNet-C, CIFAR-C or the benchmarks for images of any size.

    Random draws depend only on `seed`, the id of the image, `name` and `severity`, so an image is corrupted identically
    in any batch, order or process.

    Args:
        images: A tensor (B, 3, H, W) or (3, H, W), uint8 or float in [0, 1], which is rounded to 8 bits first. Or a
            folder, a path, a PIL image, an array (H, W, 3) or (B, H, W, 3), or a list of these, each at its own size;
            a data set, a DataLoader or another iterable of batches; or "shapes:N", N images of the data set Shapes.
        name: One of the 19 common corruptions, such as "gaussian_noise".
        severity: 1 to 5.
        seed: Seed of the random draws.
        ids: One integer or string per image, such as dataset indices or file names (default: 0, 1, 2, ...; the paths
            below a folder, as in an evaluation).
        flavour: "imagenet", "cifar" (constants for 32 pixels) or "any" (as in Cityscapes-C and COCO-C).
        frost: Folder of the published frost overlays (see `fingerprint`).

    Returns:
        The corrupted images in the form of `images`: a tensor of the same shape, dtype and device, an array or a PIL
            image; lists of those for lists; PIL images for files; an iterator for a loader or a data set, in which only
            the images are replaced. Floats are 8-bit values / 255.

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
    _check_choice("corruption", name, _EFFECTS)
    severity = _check_severity(severity)
    _check_choice("flavour", flavour, FLAVOURS)
    seed = check_int("seed", seed)
    if not isinstance(images, Tensor):
        again = partial(corrupt, name=name, severity=severity, seed=seed, flavour=flavour, frost=frost)
        return _corrupt_any(images, again, ids)
    batch = _as_bytes(images)
    if batch.device.type not in _CHUNK:  # devices without float64
        batch = batch.cpu()
    listed: Any = [ids] if isinstance(ids, Integral | str) else ids
    identity = as_ids(listed, len(batch), batch.device)
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


def _corrupt_any(images: Any, change: Callable[..., Tensor], ids: Any) -> Any:
    """Corrupt images that are not a tensor, and return them in the form in which they were given."""
    if isinstance(images, str) and (count := shapes_named(images, SHAPES)) is not None:
        return change(shapes_batch(range(count), split="val")[0], ids=ids)
    pictures = as_images(images)
    if pictures is None and isinstance(images, np.ndarray):
        return change(array_to_tensor(images), ids=ids).numpy()
    if pictures is not None:
        folder = home_path(images) if isinstance(images, str | os.PathLike) else None
        single = is_image(images) and not (folder is not None and folder.is_dir())
        if ids is None and folder is not None and not single:
            ids = [picture.relative_to(folder).as_posix() for picture in pictures]
        names = range(len(pictures)) if ids is None else [ids] if isinstance(ids, Integral | str) else list(ids)
        if len(names) != len(pictures):
            raise VitfocusError(f"Got {len(names)} ids for {len(pictures)} images; expected one id per image.")
        pairs = zip(pictures, names, strict=True)
        changed = [_same_type(one, change(to_tensor(open_image(one)), ids=[name])) for one, name in pairs]
        if single:
            return changed[0]
        return np.stack(changed) if isinstance(images, np.ndarray) else changed
    if isinstance(images, Dataset) and not isinstance(images, Iterable):  # with a length, but without an iterator
        items: Any = images
        images = map(items.__getitem__, range(len(items)))
    if isinstance(images, bytes | Mapping) or not isinstance(images, Iterable):
        raise VitfocusError(
            f"Images are a {type(images).__name__}; expected a tensor (B, 3, H, W) or (3, H, W), a folder, paths, PIL "
            "images, arrays, a data set, a loader, or shapes:N."
        )
    return _corrupt_batches(images, change, ids)


def _same_type(picture: Any, pixels: Tensor) -> Any:
    if not isinstance(picture, np.ndarray):
        return to_image(pixels)
    array = pixels.permute(1, 2, 0).numpy()
    return array if picture.dtype == np.uint8 else (array / np.float32(255)).astype(picture.dtype)


def _corrupt_batches(loader: Iterable[Any], change: Callable[..., Tensor], ids: Any) -> Iterator[Any]:
    """Corrupt the batches of a loader, or the items of a data set: the whole item, or the first entry of a tuple."""
    names, done = None if ids is None else iter(ids), 0
    for item in loader:
        pair = isinstance(item, list | tuple) and not all(map(is_image, item))
        images = item[0] if pair else item
        single = images.ndim == 3 if isinstance(images, Tensor) else is_image(images)
        count = 1 if single else len(images)
        chosen = range(done, done + count) if names is None else list(islice(names, count))
        done += count
        changed = change(images, ids=chosen)
        yield type(item)((changed, *item[1:])) if pair else changed


def fingerprint(
    flavour: str = "imagenet",
    frost: str | os.PathLike[str] | None = None,
    names: Sequence[str] = (*CORRUPTIONS, *EXTRA_CORRUPTIONS),
) -> dict[str, Any]:
    """The settings and versions that the output of these corruptions depends on, to report with a result.

    Args:
        flavour: The flavour, as for `corrupt`.
        frost: The folder of the frost overlays, as for `corrupt`.
        names: The corruptions. The JPEG codec and the frost overlays are included only if one of them uses it.

    Returns:
        Plain data; `comparable` is False if frost is drawn because the published overlays are missing.

    Example:
        >>> fingerprint("cifar")["flavour"], "jpeg" in fingerprint(names=["fog"])
        ('cifar', False)
    """
    _check_choice("flavour", flavour, FLAVOURS)
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


def _check_choice(what: str, given: str, choices: Collection[str]) -> None:
    if not isinstance(given, str) or given not in choices:
        raise VitfocusError(f"There is no {what} {given!r}: {nearest(str(given), choices)}")


def _check_severity(severity: int) -> int:
    try:
        return check_int("severity", severity, 1, 5)
    except VitfocusError:
        raise VitfocusError(f"Severity {severity!r} does not exist; expected a whole number from 1 to 5.") from None


def _as_bytes(images: Tensor) -> Tensor:
    """The images as a (B, 3, H, W) uint8 batch; anything else is refused."""
    # Reading values from a GPU would synchronise with it, so there they are only clipped.
    require_pixels(images, "corrupt first, then normalise", check_range=images.device.type == "cpu")
    if images.dim() not in (3, 4) or images.shape[-3] != 3 or 0 in images.shape[-2:]:
        raise VitfocusError(f"Images have shape {tuple(images.shape)}; expected (B, 3, H, W) or (3, H, W), RGB.")
    batch = images if images.dim() == 4 else images[None]
    if images.dtype == torch.uint8:
        return batch
    return batch.detach().float().mul(255).round_().clamp_(0, 255).to(torch.uint8)
