"""Digital corruptions: brightness, saturation, contrast, pixelation, the elastic transform and JPEG.

Each function takes uint8 images (B, 3, H, W), its setting and its draws, and returns uint8 images. The first four use
float64 and the order of operations of the reference, so they equal it pixel for pixel.

JPEG uses libjpeg through torchvision on the CPU. On other devices, colour conversion, 4:2:0 subsampling, cosine
transform, quantisation and their inverses run on tensors in libjpeg's integer arithmetic ("islow" transform, "fancy"
upsampling), with the same result bit for bit. nvJPEG is not used: it always encodes 4:4:4, unlike the reference.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.corruptions.base import Draws, Setting, to_uint8
from vitfocus.corruptions.filters import gaussian


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
    """The inverse of `_to_hsv`."""
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
    """Add to the value (V) of HSV."""
    hue, saturation, value = _to_hsv(x.double() / 255)
    return to_uint8(_to_rgb(hue, saturation, value.add_(setting.constants).clamp_(0, 1)).mul_(255), slack=0)


def saturate(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Scale and shift the saturation (S); greys, whose hue is red by convention, turn reddish if the shift is not 0."""
    factor, shift = setting.constants
    hue, saturation, value = _to_hsv(x.double() / 255)
    return to_uint8(_to_rgb(hue, saturation.mul_(factor).add_(shift).clamp_(0, 1), value).mul_(255), slack=0)


def contrast(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Move every channel towards its own mean, with a lookup table of 256 values."""
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
    """Pillow's NEAREST along one axis, with its accumulated rounding, which decides steps that fall on a border."""
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


def _sample(x: Tensor, right: Tensor, down: Tensor, corners: bool) -> Tensor:
    """Bilinear samples at pixel coordinates (B, H, W), reflected about border pixels' centres (`corners`) or edges."""
    height, width = x.shape[-2:]
    shift = 0.0 if corners else 0.5
    across = (right + shift) * (2.0 / max(width - 1 + 2 * shift, 1)) - 1
    along = (down + shift) * (2.0 / max(height - 1 + 2 * shift, 1)) - 1
    grid = torch.stack([across, along], dim=-1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=corners)


def _affine(x: Tensor, jitter: float, draws: Draws, right: Tensor, down: Tensor) -> Tensor:
    """Warp so that three points of a centred square move by up to `jitter` pixels each way.

    The reference lists the points as (row, column) but OpenCV reads (x, y), which only matters for rectangles; this is
    kept.
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
    """Jitter three points by a random affine map, then move every pixel by a smooth random displacement."""
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


def jpeg_codec() -> str:
    """The codec's name and version, for fingerprints."""
    return f"libjpeg (torchvision {metadata.version('torchvision')}), 4:2:0, islow"


def jpeg_compression(x: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Encode and decode (B, 3, H, W) uint8 images at a quality."""
    if x.device.type != "cpu":
        return jpeg_in_tensors(x, setting.constants)
    from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg  # here, because it takes a second

    pixels = torch.stack(x.unbind(1), dim=-1)  # libjpeg's layout, for the whole batch at once
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


def jpeg_in_tensors(x: Tensor, quality: int) -> Tensor:
    """The lossy steps of JPEG at a quality, on the device of the tensor: (B, 3, H, W) uint8."""
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
