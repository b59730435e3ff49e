"""Evaluation preprocessing of an image of any size: resize, crop the centre, 8 bits per channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as T

from vitfocus.core.arguments import real
from vitfocus.core.errors import VitfocusError
from vitfocus.data.image_files import UNREADABLE, cut_centre, rgb_picture, upright

INTERPOLATIONS = ("bilinear", "bicubic")


@dataclass(frozen=True)
class Preprocessing:
    """Resize, then crop the centre, keeping the aspect ratio.

    Args:
        resize: Pixels of the shorter side; a (height, width) is covered by the resized image; None keeps the size.
        crop: The (height, width) cut out of the centre; None keeps all of it.
        interpolation: "bilinear" or "bicubic".
        keep: An image of this (height, width) is taken as it is.

    Example:
        >>> Preprocessing(resize=256, crop=(224, 224)).apply(Image.new("RGB", (500, 375))).shape
        torch.Size([3, 224, 224])
    """

    resize: int | tuple[int, int] | None = 256
    crop: tuple[int, int] | None = (224, 224)
    interpolation: str = "bilinear"
    keep: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise VitfocusError(f"interpolation is {self.interpolation!r}; expected {' or '.join(INTERPOLATIONS)}.")

    def apply(self, picture: Image.Image) -> Tensor:
        """The image as uint8 (3, height, width)."""
        picture = rgb_picture(picture)
        if self.keep == (picture.height, picture.width):
            return T.pil_to_tensor(picture)
        if self.resize is not None:
            resized = self._resized(picture.height, picture.width)
            mode = InterpolationMode(self.interpolation)
            if self.crop is not None:
                return T.pil_to_tensor(cut_centre(picture, resized, self.crop, mode))
            picture = T.resize(picture, list(resized), mode)
        tensor = T.pil_to_tensor(picture)
        return tensor if self.crop is None else T.center_crop(tensor, list(self.crop))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the fingerprint."""
        return asdict(self) if self.resize is not None else {"resize": "none", "crop": self.crop}

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The smallest size of the same aspect ratio that covers the frame; timm rounds it down for squares only."""
        assert self.resize is not None
        tall, wide = self.resize if isinstance(self.resize, tuple) else (self.resize, self.resize)
        rounded: Callable[[float], int] = round if tall != wide else int
        if height * wide <= width * tall:
            return tall, max(rounded(tall * width / height), wide)
        return max(rounded(wide * height / width), tall), wide


def standard_preprocessing(size: tuple[int, int], crop_pct: float, interpolation: str) -> Preprocessing:
    """Resize to cover size / crop_pct, then crop the centre: 256 and 224 where size is 224 and crop_pct 0.875.

    Example:
        >>> standard_preprocessing((224, 224), 0.875, "bicubic").to_dict()
        {'resize': 256, 'crop': (224, 224), 'interpolation': 'bicubic', 'keep': None}
        >>> standard_preprocessing((224, 448), 0.875, "bicubic").resize
        (256, 512)
    """
    expected = "a share of the resized picture, such as 0.875"
    crop_pct = real("crop_pct", crop_pct, expected)
    if not 0 < crop_pct <= 1:
        raise VitfocusError(f"crop_pct is {crop_pct}; expected {expected}.")
    height, width = (int(side / crop_pct) for side in size)
    return Preprocessing(height if height == width else (height, width), size, interpolation)


def read_image(file: Path, size: tuple[int, int], crop: float = 0.875, interpolation: str = "bicubic") -> Tensor:
    """Read an image file as a model of that size is evaluated: uint8 (3, height, width).

    Args:
        file: The image file; it is turned as its EXIF data says.
        size: The (height, width) of the model's input.
        crop: The share of the resized image that is kept.
        interpolation: As the model's configuration names it; anything but "bilinear" is bicubic.
    """
    preprocessing = standard_preprocessing(size, crop, "bilinear" if interpolation == "bilinear" else "bicubic")
    try:
        with Image.open(file) as opened:
            picture = rgb_picture(upright(opened))
    except UNREADABLE as error:
        raise VitfocusError(f"{file} cannot be read as an image: {str(error).rstrip('.')}.") from error
    return preprocessing.apply(picture)
