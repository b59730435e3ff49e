"""JPEG: the host's libjpeg through torchvision, and the same arithmetic in tensors for other devices.

What JPEG loses, it loses before entropy coding: in colour conversion, 4:2:0 subsampling, integer cosine transform and
quantisation. `in_tensors` does exactly these steps, both ways, in libjpeg's own integer arithmetic ("islow" transform,
"fancy" upsampling), so that a GPU returns what libjpeg returns, bit for bit, without a byte being written. nvJPEG, as
torchvision calls it, always encodes 4:4:4 and so is another corruption than the reference's: it is not used.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.corruptions.constants import Setting
from vitfocus.corruptions.draws import Draws

_LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8 for _ in range(4)),
)
# libjpeg's cosine matrix in 13-bit fixed point, the left half; rows are even or odd about the middle in turn.
_COSINES = (
    (8192, 8192, 8192, 8192),
    (11363, 9633, 6437, 2260),
    (10703, 4433, -4433, -10703),
    (9633, -2259, -11362, -6436),
    (8192, -8192, -8192, 8192),
    (6437, -11362, 2261, 9633),
    (4433, -10704, 10704, -4433),
    (2260, -6436, 9633, -11363),
)


def codec() -> str:
    """The codec's name and version, for fingerprints."""
    return f"libjpeg (torchvision {metadata.version('torchvision')}), 4:2:0, islow"


def jpeg_compression(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Encode and decode (B, 3, H, W) uint8 images at a quality."""
    if x.device.type != "cpu":
        return in_tensors(x, setting.constants)
    from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg  # imported late: it takes a second

    pixels = torch.stack(x.unbind(1), dim=-1)  # libjpeg's own layout, for the whole batch at once
    result = torch.empty_like(x, memory_format=torch.contiguous_format)

    def code(index: int) -> None:
        coded = encode_jpeg(pixels[index].permute(2, 0, 1), quality=setting.constants)
        result[index] = decode_jpeg(coded, mode=ImageReadMode.RGB)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # the codec releases the GIL
        list(pool.map(code, range(len(pixels))))
    return result


@functools.lru_cache(maxsize=16)
def _tables(quality: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The cosine matrix and the two quantisation tables, float64."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    cosines = torch.tensor(
        [[*row, *(v if i % 2 == 0 else -v for v in reversed(row))] for i, row in enumerate(_COSINES)]
    )
    tables = [((torch.tensor(t) * scale + 50) // 100).clamp(1, 255) for t in (_LUMINANCE, _CHROMINANCE)]
    luminance, chrominance = (t.double().to(device) for t in tables)
    return cosines.double().to(device), luminance, chrominance


def _descale(values: Tensor, bits: int) -> Tensor:
    """Divide by 2**bits and round half up; exact, because whole numbers below 2**53 are exact in float64."""
    return values.mul(2.0**-bits).add_(0.5).floor_()


def _quantise_plane(plane: Tensor, cosines: Tensor, table: Tensor) -> Tensor:
    """Transform, quantise and transform back a plane (B, C, H, W) whose sides are multiples of 8.

    Blocks stay on the left of every product, one tall matrix by one 8x8, so coefficients come out transposed.
    """
    batch, channels, height, width = plane.shape
    blocks = plane.view(batch, channels, height // 8, 8, width // 8, 8).transpose(3, 4) - 128
    rows = _descale(blocks @ cosines.mT, 11)
    coefficients = _descale(rows.mT @ cosines.mT, 15)
    divisor = table.mT * 8
    steps = coefficients.abs().add_(torch.floor(divisor / 2)).div_(divisor).floor_().mul_(coefficients.sign())
    columns = _descale((steps * table.mT) @ cosines, 11)
    pixels = _descale(columns.mT @ cosines, 18).add_(128).clamp_(0, 255)
    return pixels.transpose(3, 4).reshape(plane.shape)


def _pad_to(x: Tensor, height: int, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2]), mode="replicate")


def _smooth_double(x: Tensor) -> Tensor:
    """libjpeg's fancy upsampling by 2 each way: a triangle filter on whole numbers, edges replicated."""
    upper = torch.cat([x[..., :1, :], x[..., :-1, :]], dim=-2)
    lower = torch.cat([x[..., 1:, :], x[..., -1:, :]], dim=-2)
    x = torch.stack([3 * x + upper, 3 * x + lower], dim=-2).flatten(-3, -2)
    before = torch.cat([x[..., :1], x[..., :-1]], dim=-1)
    after = torch.cat([x[..., 1:], x[..., -1:]], dim=-1)
    return torch.stack([(3 * x + before + 8) >> 4, (3 * x + after + 7) >> 4], dim=-1).flatten(-2)


def in_tensors(x: Tensor, quality: int) -> Tensor:
    """JPEG's losses at a quality, on the tensor's own device: (B, 3, H, W) uint8."""
    height, width = x.shape[-2:]
    cosines, luminance, chrominance = _tables(quality, x.device)
    red, green, blue = x.int().unbind(1)
    luma = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16
    middle = (128 << 16) + 32767
    chroma = torch.stack(
        [
            (-11058 * red - 21710 * green + 32768 * blue + middle) >> 16,
            (32768 * red - 27439 * green - 5329 * blue + middle) >> 16,
        ],
        dim=1,
    )
    full = (-(-height // 16) * 16, -(-width // 16) * 16)
    half = (-(-height // 2), -(-width // 2))
    luma = _quantise_plane(_pad_to(luma[:, None].double(), *full), cosines, luminance)[..., :height, :width].int()[:, 0]

    chroma = _pad_to(chroma.double(), 2 * half[0], full[1]).int()
    chroma = chroma[..., ::2, :] + chroma[..., 1::2, :]
    bias = torch.arange(full[1] // 2, device=x.device, dtype=torch.int32) % 2 + 1
    chroma = (chroma[..., ::2] + chroma[..., 1::2] + bias) >> 2
    chroma = _pad_to(chroma.double(), full[0] // 2, full[1] // 2)
    chroma = _quantise_plane(chroma, cosines, chrominance)[..., : half[0], : half[1]].int()
    chroma = _smooth_double(chroma) if half[1] > 2 else chroma.repeat_interleave(2, -1).repeat_interleave(2, -2)
    blue_part, red_part = (chroma[..., :height, :width] - 128).unbind(1)
    rgb = torch.stack(
        [
            luma + ((91881 * red_part + 32768) >> 16),
            luma + ((-22554 * blue_part - 46802 * red_part + 32768) >> 16),
            luma + ((116130 * blue_part + 32768) >> 16),
        ],
        dim=1,
    )
    return rgb.clamp_(0, 255).to(torch.uint8)
