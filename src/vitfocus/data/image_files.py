"""Pictures as people have them, of any mode and shape: as 8-bit RGB, and the centre cut out of a resized one."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as T

#: What Pillow raises for a file that is no picture, or half of one, or one that would fill the memory.
UNREADABLE = (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError)

# A resized picture with so many times the pixels of what is cut out of it is never made as a whole.
_MUCH = 16


def rgb_picture(picture: Image.Image) -> Image.Image:
    """The picture in 8-bit RGB; greys of 16 or 32 bits are scaled, where Pillow by itself would clip them to white.

    >>> deep = Image.fromarray(np.array([[0, 32896, 65535]], np.uint16))
    >>> np.asarray(rgb_picture(deep))[0, :, 0].tolist()
    [0, 128, 255]
    """
    if not picture.mode.startswith("I") and picture.mode != "F":
        return picture.convert("RGB")
    values = np.nan_to_num(np.asarray(picture, np.float64))
    most = values.max(initial=0)
    if picture.mode == "F":
        full = 1.0 if most <= 1 else 255.0 if most <= 255 else 65535.0
    else:  # Pillow reads 16 bits as "I" in some formats
        full = 255.0 if picture.mode == "I" and most <= 255 else 65535.0
    return Image.fromarray(np.rint(values / full * 255).clip(0, 255).astype(np.uint8)).convert("RGB")


def upright(picture: Image.Image) -> Image.Image:
    """The picture as its owner sees it: turned as its EXIF data asks, where that can be read."""
    try:
        return ImageOps.exif_transpose(picture)
    except UNREADABLE:
        raise
    except Exception:  # Pillow's readers of EXIF raise what they like, and the pixels may be sound
        return picture


def cut_centre(
    picture: Image.Image, resized: tuple[int, int], crop: tuple[int, int], interpolation: InterpolationMode
) -> Image.Image:
    """The central `crop` = (height, width) of the picture resized to `resized`.

    Of a picture that is far longer than wide only the part that is cut out is computed.

    >>> cut_centre(Image.new("RGB", (60000, 1)), (256, 15_360_000), (224, 224), InterpolationMode.BICUBIC).size
    (224, 224)
    """
    height, width = crop
    if resized[0] * resized[1] <= _MUCH * height * width:
        return T.center_crop(T.resize(picture, list(resized), interpolation), [height, width])
    down, across = picture.height / resized[0], picture.width / resized[1]
    top, left = round((resized[0] - height) / 2), round((resized[1] - width) / 2)
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    mode = Image.Resampling.BILINEAR if interpolation is InterpolationMode.BILINEAR else Image.Resampling.BICUBIC
    return picture.resize((width, height), mode, box=box)
