"""Frost overlays: found where the user names them or where `imagecorruptions` is installed, otherwise drawn.

Only the first five of the six published photographs are used, as in the reference. Drawn frost looks alike and is
reproducible, but is not the published one: `fingerprint` says so, and scores made with it are not comparable.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions.draws import Draws

FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
VARIABLE = "VITFOCUS_FROST"
DRAWN = "drawn"


@dataclass(frozen=True)
class Sheets:
    """The overlays for one image size on one device, end to end in one buffer, so that one gather crops from any."""

    pixels: Tensor  # (3, total) uint8
    starts: Tensor
    heights: Tensor
    widths: Tensor


def locate(folder: str | os.PathLike[str] | None = None) -> str:
    """The folder of the overlays: the one named, else $VITFOCUS_FROST, else imagecorruptions' own, else "drawn"."""
    named = folder if folder is not None else os.environ.get(VARIABLE) or None
    if named is not None:
        if not isinstance(named, str | os.PathLike):
            raise VitfocusError(f"frost is {named!r}; expected the folder of the overlays.")
        path = Path(named).expanduser()
        missing = [name for name in FILES if not (path / name).is_file()]
        if missing:
            raise VitfocusError(
                f"The frost folder {str(path)!r} lacks {', '.join(missing)}; it should hold {', '.join(FILES)}."
            )
        return str(path)
    return _installed() or DRAWN


@functools.cache
def _installed() -> str | None:
    """The overlays inside an installed `imagecorruptions`, found without importing it."""
    try:
        spec = importlib.util.find_spec("imagecorruptions")
    except (ImportError, ValueError):
        return None
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root) / "frost"
        if all((path / name).is_file() for name in FILES):
            return str(path)
    return None


@functools.cache
def digest(folder: str) -> str:
    """A short SHA-256 of the five overlay files."""
    return hashlib.sha256(b"".join((Path(folder) / name).read_bytes() for name in FILES)).hexdigest()[:16]


@functools.lru_cache(maxsize=2)
def _load(folder: str) -> tuple[Tensor, ...]:
    """The five overlays, (3, H, W) uint8; transparency is dropped, not blended, as OpenCV does."""
    if folder == DRAWN:
        return tuple(_draw(i) for i in range(len(FILES)))
    overlays = []
    for name in FILES:
        try:
            with Image.open(Path(folder) / name) as image:
                overlays.append(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous())
        except OSError as problem:
            raise VitfocusError(
                f"The frost overlay {str(Path(folder) / name)!r} cannot be read: {problem}."
            ) from problem
    return tuple(overlays)


def _draw(number: int) -> Tensor:
    """Procedural frost: six octaves of ridges, about as bright and busy as the published; (3, 480, 640) uint8."""
    height, width = 480, 640
    draws = Draws(0, "frost overlay", 0, torch.tensor([number]))
    field = torch.zeros(height, width)
    for octave in range(6):
        noise = draws.normal((1, 4 << octave, 6 << octave), stream=octave)
        smooth = F.interpolate(noise, size=(height, width), mode="bicubic", align_corners=False)
        field += smooth[0, 0].abs().neg().exp() ** 2 * 0.9**octave
    field = (field - field.mean()) / field.std()
    levels = torch.tensor([[[146.0]], [[167.0]], [[179.0]]])
    return (levels + 32 * field).clamp(0, 255).to(torch.uint8)


def _fit(overlay: Tensor, flavour: str, height: int, width: int) -> Tensor:
    """Scale an overlay as the flavour does: to a fifth for CIFAR, to cover the image and 10 % more for any size.

    ImageNet's are used as they are, and enlarged only for images they do not cover.
    """
    image = overlay[None].float()
    tall, wide = overlay.shape[-2:]
    cover = max(height / tall, width / wide)
    if flavour == "any":
        scale = max(cover, 1.0) * 1.1
        size = (int(np.ceil(tall * scale)), int(np.ceil(wide * scale)))
        image = F.interpolate(image, size=size, mode="bicubic", align_corners=False)
    elif flavour == "cifar" and 5 * cover < 1:
        image = _shrink(image, 5)
    elif cover >= 1:
        size = (int(np.ceil(tall * cover)) + 1, int(np.ceil(wide * cover)) + 1)
        image = F.interpolate(image, size=size, mode="bicubic", align_corners=False)
    return image[0].round().clamp(0, 255).to(torch.uint8)


def _shrink(image: Tensor, factor: int) -> Tensor:
    """OpenCV's linear resize by 1/factor: no antialiasing, so an odd factor reads every factor-th pixel."""
    tall, wide = (round(size / factor) for size in image.shape[-2:])
    rows = (torch.arange(tall) * factor + factor // 2).clamp(max=image.shape[-2] - 1)
    columns = (torch.arange(wide) * factor + factor // 2).clamp(max=image.shape[-1] - 1)
    return image.index_select(-2, rows).index_select(-1, columns)


@functools.lru_cache(maxsize=8)
def sheets(folder: str | None, flavour: str, height: int, width: int, device: torch.device) -> Sheets:
    """All overlays, scaled for one image size, on one device."""
    fitted = [_fit(overlay, flavour, height, width) for overlay in _load(folder or DRAWN)]
    areas = torch.tensor([0] + [f[0].numel() for f in fitted]).cumsum(0)
    return Sheets(
        pixels=torch.cat([f.flatten(1) for f in fitted], dim=1).to(device),
        starts=areas[:-1].to(device),
        heights=torch.tensor([f.shape[-2] for f in fitted], device=device),
        widths=torch.tensor([f.shape[-1] for f in fitted], device=device),
    )
