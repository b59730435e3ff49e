"""Digital corruptions of values: brightness, saturation, contrast and pixelation.

Each function takes uint8 images (B, 3, H, W), its setting and its draws, and returns uint8 images. The arithmetic is
the reference's own, in float64 and in its order, so the results are equal to it pixel for pixel.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vitfocus.corruptions.constants import Setting
from vitfocus.corruptions.draws import Draws
from vitfocus.corruptions.filters import to_uint8


def _to_hsv(image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue in sixths of a turn, saturation and value of (B, 3, H, W) in [0, 1], as scikit-image computes them."""
    red, green, blue = image.unbind(1)
    value = image.amax(1)
    chroma = value - image.amin(1)
    grey = chroma == 0
    divisor = chroma.masked_fill(grey, 1)
    hue = torch.where(green == value, 2 + (blue - red) / divisor, (green - blue) / divisor)
    hue = torch.where(blue == value, 4 + (red - green) / divisor, hue)
    hue = (hue / 6).remainder_(1).masked_fill_(grey, 0).mul_(6)
    saturation = chroma / value.masked_fill(value == 0, 1)
    return hue, saturation, value


def _to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """The way back."""
    sector = hue.floor()
    part = hue - sector
    sector = sector.remainder_(6).long()
    low = value * (1 - saturation)
    falling = value * (1 - part * saturation)
    rising = value * (1 - (1 - part) * saturation)
    choices = torch.stack([value, rising, falling, low], dim=1)
    order = torch.tensor([[0, 2, 3, 3, 1, 0], [1, 0, 0, 2, 3, 3], [3, 3, 1, 0, 0, 2]], device=hue.device)
    return choices.gather(1, order[:, sector].transpose(0, 1))


def brightness(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Raise V."""
    hue, saturation, value = _to_hsv(x.double() / 255)
    return to_uint8(_to_rgb(hue, saturation, value.add_(setting.constants).clamp_(0, 1)).mul_(255), slack=0)


def saturate(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Scale and shift S; greys, whose hue counts as red, turn reddish where the shift is not 0."""
    factor, shift = setting.constants
    hue, saturation, value = _to_hsv(x.double() / 255)
    return to_uint8(_to_rgb(hue, saturation.mul_(factor).add_(shift).clamp_(0, 1), value).mul_(255), slack=0)


def contrast(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Pull every channel towards its own mean: 256 values a channel, so a table and a look-up."""
    batch, channels = x.shape[:2]
    mean = x.flatten(2).sum(2, keepdim=True).double() / (255 * x[0, 0].numel())
    values = torch.arange(256, device=x.device, dtype=torch.float64) / 255
    table = to_uint8(((values - mean) * setting.constants + mean).clamp_(0, 1).mul_(255))
    return table.gather(2, x.flatten(2).long()).view(batch, channels, *x.shape[-2:])


@functools.lru_cache(maxsize=64)
def _box(source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pillow's BOX filter along one axis: the pixels each target averages, (taps, target), and its 22-bit weights.

    Where a target averages fewer pixels than others, the rest of its taps read the zero just beyond the source.
    """
    scale = source / target
    reach = max(scale, 1.0)
    ranges = []
    for i in range(target):
        centre = (i + 0.5) * scale
        low, high = max(int(centre - reach / 2 + 0.5), 0), min(int(centre + reach / 2 + 0.5), source)
        ranges.append([k for k in range(low, high) if -0.5 < (k - centre + 0.5) / reach <= 0.5])
    taps = max(len(pixels) for pixels in ranges)
    index = [[pixels[t] if t < len(pixels) else source for pixels in ranges] for t in range(taps)]
    weights = [[int(0.5 + (1 << 22) / len(pixels))] for pixels in ranges]
    return torch.tensor(index, device=device), torch.tensor(weights, dtype=torch.int32, device=device)


def _shrink_rows(x: Tensor, target: int) -> Tensor:
    """Average the rows of uint8 images (..., H, W) down to `target` rows in Pillow's fixed point."""
    index, weights = _box(x.shape[-2], target, x.device)
    padded = torch.cat([x, x.new_zeros(1).expand(*x.shape[:-2], 1, x.shape[-1])], dim=-2)
    total = padded.index_select(-2, index[0]).to(torch.int16)
    for pixels in index[1:]:
        total += padded.index_select(-2, pixels)
    return (total * weights).add_(1 << 21).bitwise_right_shift_(22).to(torch.uint8)


@functools.lru_cache(maxsize=64)
def _nearest(source: int, target: int, device: torch.device) -> Tensor:
    """Pillow's NEAREST along one axis, its accumulated steps included: they decide where a step falls on a border."""
    scale = source / target
    position, index = scale * 0.5, []
    for _ in range(target):
        index.append(min(int(position), source - 1))
        position += scale
    return torch.tensor(index, device=device)


def pixelate(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Shrink with a box filter and enlarge again, by box (one pixel each) or, for any size, by nearest neighbour."""
    height, width = x.shape[-2:]
    small = (max(int(height * setting.constants), 1), max(int(width * setting.constants), 1))
    x = _shrink_rows(x.mT.contiguous(), small[1]).mT.contiguous()  # Pillow shrinks the width first
    x = _shrink_rows(x, small[0])
    if setting.flavour == "any":
        rows, columns = _nearest(small[0], height, x.device), _nearest(small[1], width, x.device)
    else:
        rows, columns = _box(small[0], height, x.device)[0][0], _box(small[1], width, x.device)[0][0]
    return x.index_select(-1, columns).index_select(-2, rows)
