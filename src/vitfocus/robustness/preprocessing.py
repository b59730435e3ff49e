"""From a picture of any size to what a suite works on: shorter side resized, centre cut out, 8 bits a channel."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as T

from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions.arguments import real
from vitfocus.data.image_files import cut_centre, rgb_picture

INTERPOLATIONS = ("bilinear", "bicubic")


@dataclass(frozen=True)
class Preprocessing:
    """Shorter side to `resize` pixels (None: as it is), then the central `crop` = (height, width) (None: all of it).

    A picture that has the size `keep` already is taken as it is: each picture is decided by itself.

    >>> Preprocessing(resize=256, crop=(224, 224)).apply(Image.new("RGB", (500, 375))).shape
    torch.Size([3, 224, 224])
    """

    resize: int | None = 256
    crop: tuple[int, int] | None = (224, 224)
    interpolation: str = "bilinear"
    keep: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise VitfocusError(f"interpolation is {self.interpolation!r}; expected {' or '.join(INTERPOLATIONS)}.")

    def apply(self, picture: Image.Image) -> Tensor:
        """The picture as uint8 (3, height, width)."""
        picture = rgb_picture(picture)
        if self.keep == (picture.height, picture.width):
            return T.pil_to_tensor(picture)
        if self.resize is not None:
            shorter = min(picture.size)
            whole = (int(self.resize * picture.height / shorter), int(self.resize * picture.width / shorter))
            mode = InterpolationMode(self.interpolation)
            if self.crop is not None:
                return T.pil_to_tensor(cut_centre(picture, whole, self.crop, mode))
            picture = T.resize(picture, list(whole), mode)
        tensor = T.pil_to_tensor(picture)
        return tensor if self.crop is None else T.center_crop(tensor, list(self.crop))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the fingerprint."""
        return asdict(self) if self.resize is not None else {"resize": "none", "crop": self.crop}


def standard(size: tuple[int, int], crop_pct: float, interpolation: str) -> Preprocessing:
    """Resize to size / crop_pct, then crop the centre: 256 and 224 where size is 224 and crop_pct 0.875.

    >>> standard((224, 224), 0.875, "bicubic").to_dict()
    {'resize': 256, 'crop': (224, 224), 'interpolation': 'bicubic', 'keep': None}
    """
    expected = "a share of the resized picture, such as 0.875"
    crop_pct = real("crop_pct", crop_pct, expected)
    if not 0 < crop_pct <= 1:
        raise VitfocusError(f"crop_pct is {crop_pct}; expected {expected}.")
    return Preprocessing(int(max(size) / crop_pct), size, interpolation)
