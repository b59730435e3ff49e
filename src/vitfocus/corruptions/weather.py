"""Weather corruptions: snow, frost, fog and spatter.

Each function takes uint8 images (B, 3, H, W), its setting and its draws, and returns uint8 images. The water of spatter
is an edge map, its distance transform, equalised and embossed: OpenCV's Canny, 5x5 chamfer distance and histogram
equalisation, here for a whole batch at once and on any device, in the same integer arithmetic.

Frost overlays are read from the folder that the user names or from an installed `imagecorruptions`, and drawn
otherwise; the first five of the six published photographs are used, as in the reference. `fingerprint` says if frost
was drawn, because such scores are not comparable with published ones.
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
from torch import Tensor
from torch.nn import functional as F

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import home_path
from vitfocus.corruptions.base import Draws, Setting, to_uint8
from vitfocus.corruptions.filters import clipped_zoom, correlate3, gaussian, streak
from vitfocus.data.image_files import UNREADABLE, image_file

# Spatter.
_WATER = (175, 238, 238)
_MUD = (63, 42, 20)
_UNIT = 10_000  # distances are whole numbers of ten-thousandths of a pixel
_FARTHEST = 20 * _UNIT
_TAN22 = 13573  # tan(22.5 degrees) with 15 fractional bits
_GROW = 48  # pixels by which a weak edge can extend a strong one
_STEPS = ((10_000, ((0, 1), (1, 0))), (14_000, ((1, 1), (1, -1))), (21_969, ((1, 2), (2, 1), (1, -2), (2, -1))))


def snow(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Whiten the image and add two layers of streaked flakes; the second is the first, rotated by 180 degrees."""
    mean, spread, zoom, threshold, radius, sigma, keep = setting.constants
    height, width = x.shape[-2:]
    layer = draws.normal((1, height, width), stream=0).mul_(spread).add_(mean)
    layer = clipped_zoom(layer, zoom, "none" if setting.flavour == "any" else "centre")
    layer = torch.where(layer < threshold, 0.0, layer).clamp_(0, 1).mul_(255)
    if setting.flavour != "any":
        layer = layer.floor_()  # an 8-bit image went through ImageMagick
    angle = draws.uniform((), stream=1) * 90.0 - 135.0
    layer = streak(layer, radius, sigma, angle).add_(0.5).floor_()[..., :height, :width]
    image = x.float()
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device).view(1, 3, 1, 1)
    grey = (image * weights).sum(1, keepdim=True)
    white = torch.maximum(image, grey.mul_(1.5).add_(127.5))
    return to_uint8(image.mul_(keep).add_(white, alpha=1 - keep).add_(layer + layer.flip(-2, -1)))


def frost(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Lay a random crop of one of five frost photographs over the image; the sixth is never drawn."""
    image_weight, frost_weight = setting.constants
    height, width = x.shape[-2:]
    sheets = frost_sheets(setting.frost, setting.flavour, height, width, x.device)
    which = draws.integers(0, len(sheets.heights), stream=0)
    top = draws.integers(0, (sheets.heights[which] - height).clamp_min(1), stream=1)
    left = draws.integers(0, (sheets.widths[which] - width).clamp_min(1), stream=2)
    stride = sheets.widths[which]
    rows = (top[:, None] + torch.arange(height, device=x.device)) * stride[:, None] + sheets.starts[which, None]
    columns = left[:, None] + torch.arange(width, device=x.device)
    index = (rows[:, :, None] + columns[:, None, :]).flatten()
    layer = sheets.pixels.index_select(1, index).view(3, len(draws), height, width).transpose(0, 1)
    # In float32 these weights are inexact; in double, sums that are whole numbers stay whole.
    return to_uint8(x.double().mul_(image_weight).add_(layer, alpha=frost_weight))


def plasma(size: int, decay: float, draws: Draws) -> Tensor:
    """A cloud in [0, 1] by the diamond-square algorithm on a torus, (B, size, size); `size` is a power of two."""
    uniform = draws.uniform((size * size,)).mul_(2).sub_(1)
    cloud = torch.zeros(len(draws), size, size, device=uniform.device)
    used = 1  # the first point is 0
    wibble = 100.0

    def settle(total: Tensor) -> Tensor:
        nonlocal used
        count = total[0].numel()
        jitter = uniform[:, used : used + count].view(total.shape)
        used += count
        return (total / 4).add_(jitter, alpha=wibble * wibble)

    step = size
    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        total = corners + corners.roll(-1, 1)
        cloud[:, half::step, half::step] = settle(total + total.roll(-1, 2))
        middles = cloud[:, half::step, half::step]
        cloud[:, ::step, half::step] = settle(middles + middles.roll(1, 1) + corners + corners.roll(-1, 2))
        cloud[:, half::step, ::step] = settle(middles + middles.roll(1, 2) + corners + corners.roll(-1, 1))
        step = half
        wibble /= decay
    cloud -= cloud.amin((1, 2), keepdim=True)
    return cloud.div_(cloud.amax((1, 2), keepdim=True))


def fog(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Add a cloud and scale back to the image's own maximum."""
    amount, decay = setting.constants
    side = max(x.shape[-2:])
    base = {"imagenet": 256, "cifar": 32, "any": 2}[setting.flavour]
    cloud = plasma(max(base, 1 << (side - 1).bit_length()), decay, draws)[:, None, : x.shape[-2], : x.shape[-1]]
    brightest = x.amax((1, 2, 3), keepdim=True).float() / 255
    fogged = x + cloud * (255.0 * amount)
    return to_uint8(fogged.mul_(brightest / (brightest + amount)))


def canny(x: Tensor, low: int, high: int) -> Tensor:
    """Canny edges of whole-valued images (B, H, W), L1 gradient, as a mask."""
    padded = F.pad(x.float()[:, None], (1, 1, 1, 1), mode="replicate")[:, 0].int()
    height, width = x.shape[-2:]
    around = {(i, j): padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)}
    right = around[0, 2] + 2 * around[1, 2] + around[2, 2] - around[0, 0] - 2 * around[1, 0] - around[2, 0]
    down = around[2, 0] + 2 * around[2, 1] + around[2, 2] - around[0, 0] - 2 * around[0, 1] - around[0, 2]
    across, along = right.abs(), down.abs()
    size = across + along
    flat = across * _TAN22
    lifted = along << 15
    horizontal = lifted < flat
    vertical = lifted > flat + (across << 16)
    falling = (right ^ down) < 0
    ring = F.pad(size, (1, 1, 1, 1))
    near = {(i, j): ring[:, 1 + i : 1 + i + height, 1 + j : 1 + j + width] for i in (-1, 0, 1) for j in (-1, 0, 1)}
    peak = torch.where(
        falling, (size > near[-1, 1]) & (size > near[1, -1]), (size > near[-1, -1]) & (size > near[1, 1])
    )
    peak = torch.where(vertical, (size > near[-1, 0]) & (size >= near[1, 0]), peak)
    peak = torch.where(horizontal, (size > near[0, -1]) & (size >= near[0, 1]), peak)
    candidate = peak & (size > low)
    edge = torch.zeros(len(x), height + 2, width + 2, dtype=torch.bool, device=x.device)
    inside = edge[:, 1:-1, 1:-1]
    inside.copy_(candidate & (size > high))
    for _ in range(_GROW):
        wide = edge[:, :, :-2] | edge[:, :, 1:-1] | edge[:, :, 2:]
        grown = (wide[:, :-2] | wide[:, 1:-1] | wide[:, 2:]) & candidate
        if x.device.type == "cpu" and torch.equal(grown, inside):
            break
        inside.copy_(grown)
    return inside


def distance(edge: Tensor) -> Tensor:
    """Chamfer distance to the nearest edge, at most 20 pixels, in 1/10,000 pixel: int32 (B, H, W).

    The chamfer distance is the cheapest path of axial, diagonal and knight's moves. Their order does not matter, so
    each direction is relaxed separately, with doubling strides; such a path stays in the rectangle between its ends.
    """
    far = torch.full_like(edge, _FARTHEST, dtype=torch.int32).masked_fill_(edge, 0)
    for cost, directions in _STEPS:
        for down, right in directions:
            stride = 1
            while stride * cost < _FARTHEST:
                for sign in (stride, -stride):
                    _relax_(far, down * sign, right * sign, stride * cost)
                stride *= 2
    return far


def _relax_(far: Tensor, down: int, right: int, cost: int) -> None:
    """far[i, j] = min(far[i, j], far[i + down, j + right] + cost) wherever both exist."""
    height, width = far.shape[-2:]
    if abs(down) >= height or abs(right) >= width:
        return
    here = (slice(max(-down, 0), height - max(down, 0)), slice(max(-right, 0), width - max(right, 0)))
    there = (slice(max(down, 0), height - max(-down, 0)), slice(max(right, 0), width - max(-right, 0)))
    far[:, *here].clamp_max_(far[:, *there] + cost)


def _equalise(x: Tensor) -> Tensor:
    """Histogram equalisation of whole values below 256 in (B, H, W), as OpenCV: the lowest present value becomes 0."""
    flat = x.flatten(1).long()
    histogram = torch.zeros(len(x), 256, dtype=torch.int64, device=x.device)
    histogram.scatter_add_(1, flat, torch.ones_like(flat))
    lowest = flat.amin(1, keepdim=True)
    first = histogram.gather(1, lowest)
    total = flat.shape[1]
    scale = 255.0 / (total - first).clamp_min(1).float()
    table = ((histogram.cumsum(1) - first).float() * scale).round_().clamp_(0, 255)
    table = torch.where(first == total, lowest.float(), table)
    return table.gather(1, flat).view(x.shape)


def spatter(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Spatter (B, 3, H, W) uint8 images with water (severities 1 to 3) or mud (4 and 5)."""
    mean, spread, sigma, threshold, strength, mud = setting.constants
    layer = draws.normal(x.shape[-2:]).mul_(spread).add_(mean)
    layer = gaussian(layer, sigma)
    colour = torch.tensor(_MUD if mud else _WATER, device=x.device).float().view(1, 3, 1, 1)
    if mud:
        cover = gaussian((layer > threshold).to(layer.dtype), strength).float()
        cover = torch.where(cover < 0.8, 0.0, cover)[:, None]
        return to_uint8(x * (1 - cover) + colour * cover)
    water = torch.where(layer < threshold, 0.0, layer).mul_(255).clamp_(0, 255).floor_().int()
    box = [[1] * 3] * 3  # light on the water, from its 8-bit height
    far = correlate3(distance(canny(water, 50, 150)), box).div_(9 * _UNIT, rounding_mode="floor")
    embossed = correlate3(_equalise(far), [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]).clamp_(0, 255)
    light = correlate3(embossed, box).div_(9).round_() * water
    light = light / light.amax((1, 2), keepdim=True).clamp_min(1)
    return to_uint8((light * strength)[:, None] * colour + x)


FROST_FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
FROST_VARIABLE = "VITFOCUS_FROST"
DRAWN_FROST = "drawn"


@dataclass(frozen=True)
class FrostSheets:
    """The overlays for one image size on one device, end to end in one buffer, so that one gather crops from any."""

    pixels: Tensor  # (3, total) uint8
    starts: Tensor
    heights: Tensor
    widths: Tensor


def locate_frost(folder: str | os.PathLike[str] | None = None) -> str:
    """The folder of the overlays: `folder`, $VITFOCUS_FROST, or that of imagecorruptions; "drawn" if there is none."""
    named = folder if folder is not None else os.environ.get(FROST_VARIABLE) or None
    if named is not None:
        if not isinstance(named, str | os.PathLike):
            raise VitfocusError(f"frost is {named!r}; expected the folder of the overlays.")
        path = home_path(named)
        missing = [name for name in FROST_FILES if not (path / name).is_file()]
        if missing:
            raise VitfocusError(
                f"The frost folder {str(path)!r} lacks {', '.join(missing)}; it should hold {', '.join(FROST_FILES)}."
            )
        return str(path)
    return _installed() or DRAWN_FROST


@functools.cache
def _installed() -> str | None:
    """The overlays inside an installed `imagecorruptions`, found without importing it."""
    try:
        spec = importlib.util.find_spec("imagecorruptions")
    except (ImportError, ValueError):
        return None
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root) / "frost"
        if all((path / name).is_file() for name in FROST_FILES):
            return str(path)
    return None


@functools.cache
def frost_digest(folder: str) -> str:
    """A short SHA-256 of the five overlay files."""
    return hashlib.sha256(b"".join((Path(folder) / name).read_bytes() for name in FROST_FILES)).hexdigest()[:16]


@functools.lru_cache(maxsize=2)
def _load_frost(folder: str) -> tuple[Tensor, ...]:
    """The five overlays, (3, H, W) uint8; transparency is dropped, not blended, as OpenCV does."""
    if folder == DRAWN_FROST:
        return tuple(_draw_frost(i) for i in range(len(FROST_FILES)))
    overlays = []
    for name in FROST_FILES:
        try:
            with image_file(Path(folder) / name) as image:
                overlays.append(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous())
        except UNREADABLE as problem:
            raise VitfocusError(f"The frost overlay {Path(folder) / name} cannot be read: {problem}.") from problem
    return tuple(overlays)


def _draw_frost(number: int) -> Tensor:
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


def _fit_frost(overlay: Tensor, flavour: str, height: int, width: int) -> Tensor:
    """Scale an overlay for a flavour: to a fifth for CIFAR, to 10 % more than the image for any size.

    For ImageNet it is enlarged only if it does not cover the image.
    """
    image = overlay[None].float()
    tall, wide = overlay.shape[-2:]
    cover = max(height / tall, width / wide)
    if flavour == "any":
        scale = max(cover, 1.0) * 1.1
        size = (int(np.ceil(tall * scale)), int(np.ceil(wide * scale)))
        image = F.interpolate(image, size=size, mode="bicubic", align_corners=False)
    elif flavour == "cifar" and 5 * cover < 1:
        # OpenCV's linear resize to a fifth, without antialiasing, reads every fifth pixel.
        rows, columns = ((torch.arange(round(side / 5)) * 5 + 2).clamp(max=side - 1) for side in (tall, wide))
        image = image.index_select(-2, rows).index_select(-1, columns)
    elif cover >= 1:
        size = (int(np.ceil(tall * cover)) + 1, int(np.ceil(wide * cover)) + 1)
        image = F.interpolate(image, size=size, mode="bicubic", align_corners=False)
    return image[0].round().clamp(0, 255).to(torch.uint8)


@functools.lru_cache(maxsize=8)
def frost_sheets(folder: str | None, flavour: str, height: int, width: int, device: torch.device) -> FrostSheets:
    """All overlays, scaled for one image size, on one device."""
    fitted = [_fit_frost(overlay, flavour, height, width) for overlay in _load_frost(folder or DRAWN_FROST)]
    areas = torch.tensor([0] + [f[0].numel() for f in fitted]).cumsum(0)
    return FrostSheets(
        pixels=torch.cat([f.flatten(1) for f in fitted], dim=1).to(device),
        starts=areas[:-1].to(device),
        heights=torch.tensor([f.shape[-2] for f in fitted], device=device),
        widths=torch.tensor([f.shape[-1] for f in fitted], device=device),
    )
