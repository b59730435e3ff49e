"""Elastic transform: a random affine jitter of three points, then a smooth random displacement of every pixel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.corruptions.constants import Setting
from vitfocus.corruptions.draws import Draws
from vitfocus.corruptions.filters import gaussian, to_uint8


def _sample(x: Tensor, right: Tensor, down: Tensor, corners: bool) -> Tensor:
    """Bilinear samples at pixel coordinates (B, H, W), reflected about the edge pixels' centres (`corners`) or rims."""
    height, width = x.shape[-2:]
    shift = 0.0 if corners else 0.5
    across = (right + shift) * (2.0 / max(width - 1 + 2 * shift, 1)) - 1
    along = (down + shift) * (2.0 / max(height - 1 + 2 * shift, 1)) - 1
    grid = torch.stack([across, along], dim=-1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=corners)


def _affine(x: Tensor, jitter: float, draws: Draws, right: Tensor, down: Tensor) -> Tensor:
    """Warp so that three points of a centred square move by up to `jitter` pixels each way.

    The reference lists the points as (row, column) and OpenCV reads (x, y): kept, it only shows on rectangles.
    """
    height, width = x.shape[-2:]
    first, second, reach = float(height // 2), float(width // 2), float(max(min(height, width) // 3, 1))
    points = [[first + reach, second + reach], [first + reach, second - reach], [first - reach, second - reach]]
    before = torch.tensor(points, dtype=torch.float64, device=x.device)
    after = before + (draws.uniform((3, 2), stream=0).double() * 2 - 1) * jitter
    # Where the target's pixel (x, y) was: u = inverse @ (x, y, 1). Three points, so the 3x3 system by cofactors.
    origin, first_leg, second_leg = after[:, 2], after[:, 0] - after[:, 1], after[:, 1] - after[:, 2]
    determinant = first_leg[:, 0] * second_leg[:, 1] - first_leg[:, 1] * second_leg[:, 0]
    dx = right - origin[:, 0].view(-1, 1, 1)
    dy = down - origin[:, 1].view(-1, 1, 1)
    scale = (2 * reach / determinant).view(-1, 1, 1)
    legs = [leg.view(-1, 1, 1) for leg in (*first_leg.unbind(1), *second_leg.unbind(1))]
    # `first_leg` was (0, 2 reach) and `second_leg` was (2 reach, 0).
    source_down = (dx * legs[3] - dy * legs[2]) * scale + points[2][1]
    source_right = (dy * legs[0] - dx * legs[1]) * scale + points[2][0]
    return _sample(x, source_right.float(), source_down.float(), corners=True)


def elastic_transform(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Warp (B, 3, H, W) uint8 images."""
    height, width = x.shape[-2:]
    image = x.float()
    down = torch.arange(height, device=x.device, dtype=torch.float64).view(1, -1, 1)
    right = torch.arange(width, device=x.device, dtype=torch.float64).view(1, 1, -1)
    if setting.flavour == "any":
        amplitude, sigma, noise = setting.constants, (0.01 * height, 0.01 * width), 0.005 * height
    else:
        amplitude, sigma, jitter = setting.constants
        noise = 1.0
        image = _affine(image, jitter, draws, right, down)
    if amplitude:
        field = draws.uniform((2, height, width), stream=1).mul_(2).sub_(1)
        field = gaussian(field, sigma, mode="reflect", truncate=3.0).float() * (noise * amplitude)
        image = _sample(image, field[:, 0] + right.float(), field[:, 1] + down.float(), corners=False)
    return to_uint8(image)
