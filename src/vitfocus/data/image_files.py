"""Images in files and in memory: class folders, any mode as upright 8-bit RGB, evaluation preprocessing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as T

from vitfocus.core.arguments import check_number, require_values
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import home_path, is_file, is_folder, open_file

#: File name endings of images, in lower case.
IMAGE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"},
)

#: What Pillow raises for a file that is not an image, is truncated, or would not fit into memory.
UNREADABLE = (UnidentifiedImageError, Image.DecompressionBombError, OSError, RuntimeError, SyntaxError, ValueError)

#: The formats that are decoded, for any file name. Pillow has many more, and its EPS reader runs Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")

#: Usual names of the folders or files of a split.
SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "test")}

# A resized image with more than this many times the pixels of its crop is not computed as a whole.
_LARGEST_RATIO = 16


def files_below(folder: str | Path, suffixes: Collection[str] = IMAGE_SUFFIXES) -> Iterator[Path]:
    """Files with these suffixes, in any case, below a folder; hidden ones are skipped, links are followed once."""
    entered = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in files if name[0] != "." and Path(name).suffix.lower() in suffixes)


@contextmanager
def image_file(path: str | Path) -> Iterator[Image.Image]:
    """Open an image file in one of `FORMATS`; other files raise one of `UNREADABLE`."""
    with open_file(path) as stream, Image.open(stream, formats=FORMATS) as image:
        yield image


def read_rgb(path: str | Path) -> Image.Image:
    """Open and decode an image file as 8-bit RGB, as it is stored: annotations refer to these pixels."""
    with image_file(path) as image:
        return to_rgb(image)


def is_image(one: Any) -> bool:
    """Whether this is a single picture: a path, a PIL image, or an array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4)."""
    if isinstance(one, np.ndarray):
        return one.ndim == 2 or (one.ndim == 3 and one.shape[-1] in (1, 3, 4))
    return isinstance(one, str | os.PathLike | Image.Image)


def as_images(images: Any) -> list[Any] | None:
    """The pictures of a folder (read recursively), a file, a PIL image, an array or a list; None for anything else.

    >>> len(as_images(np.zeros((5, 8, 8, 3)))), as_images(torch.zeros(5, 3, 8, 8))
    (5, None)
    """
    if isinstance(images, str | os.PathLike):
        path = home_path(images)
        if is_file(path):
            return [path]
        if not is_folder(path):
            raise VitfocusError(f"There is no file or folder {path}; expected a folder of images, or an image.")
        found = sorted(files_below(path))
        if not found:
            kinds = ", ".join(sorted(suffix.lstrip(".") for suffix in IMAGE_SUFFIXES))
            raise VitfocusError(f"{path} and its subfolders contain no image ({kinds}).")
        return list(found)
    if isinstance(images, np.ndarray) and images.ndim == 4:
        images = list(images)
    if is_image(images):
        return [images]
    listed = isinstance(images, list | tuple) and len(images) > 0 and all(map(is_image, images))
    return list(images) if listed else None


def open_image(picture: Any, most: int | None = None) -> Image.Image:
    """A picture (see `is_image`) as 8-bit RGB, turned as its EXIF data says; arrays are uint8 or floats in [0, 1].

    `picture` may also be an open binary file. An image with more than `most` pixels is refused.

    >>> open_image(np.full((4, 6), 0.5)).getpixel((0, 0))
    (128, 128, 128)
    """
    if isinstance(picture, np.ndarray):
        return to_rgb(Image.fromarray(_bytes(picture)))
    try:
        if isinstance(picture, Image.Image):
            return to_rgb(upright(picture))
        named = isinstance(picture, str | os.PathLike)
        with image_file(picture) if named else Image.open(picture, formats=FORMATS) as opened:
            if most is not None and opened.width * opened.height > most:
                size = f"{opened.width} x {opened.height} pixels"
                raise VitfocusError(f"The picture has {size}; expected at most {most / 1e6:g} million.")
            return to_rgb(upright(opened))
    except VitfocusError:
        raise
    except UNREADABLE as error:
        raise VitfocusError(unreadable(picture, error)) from error


def unreadable(picture: Any, error: Exception) -> str:
    """The error message for an image that cannot be read."""
    named = picture if isinstance(picture, str | os.PathLike) else "An image"
    if isinstance(error, FileNotFoundError):
        return f"There is no file {named}."
    return f"{named} cannot be read as an image ({type(error).__name__}): fetch it again or remove it."


def out_of_range(low: float, high: float, advice: str) -> str:
    """The error message for floats outside [0, 1]; empty if they are in that range.

    >>> out_of_range(0.0, 1.0, ""), out_of_range(-2.1, 2.6, "normalise afterwards")
    ('', 'Float images lie in [-2.1, 2.6]; expected [0, 1]: normalise afterwards.')
    """
    if low >= -1e-3 and high <= 1 + 1e-3:  # so that NaN is out of range as well
        return ""
    advice = "divide them by 255, or pass uint8" if low >= 0 and high > 16 else advice
    return f"Float images lie in [{low:.3g}, {high:.3g}]; expected [0, 1]: {advice}."


def require_pixels(images: Tensor, advice: str, check_range: bool = True) -> None:
    """Refuse a tensor that does not hold pixels, which are uint8, or floats in [0, 1]; `advice` is for other floats."""
    require_values("images", images, pixels=True)
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise VitfocusError(f"Images have dtype {images.dtype}; expected uint8, or floats in [0, 1].")
    if check_range and images.numel():
        low, high = (float(value) for value in images.aminmax())
        if wrong := out_of_range(low, high, advice):
            raise VitfocusError(wrong)


def array_to_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """An array of numbers as a tensor; flipped views and foreign byte orders are copied.

    >>> array_to_tensor(np.arange(3)[::-1])
    tensor([2, 1, 0])
    """
    if array.dtype.kind not in "biuf":
        raise VitfocusError(f"An array of {array.dtype} is not a set of images: expected uint8, or floats in [0, 1].")
    return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert an array (H, W) or (H, W, C) to 8 bits."""
    array = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise VitfocusError(f"An array of pixels has dtype {array.dtype}; expected uint8, or floats in [0, 1].")
    values = array.astype(np.float32)
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    if wrong := out_of_range(low, high, "arrays hold pixels; pass a tensor (B, 3, H, W) if it is normalised"):
        raise VitfocusError(wrong)
    return np.rint(255 * values.clip(0, 1)).astype(np.uint8)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB; 16-bit and 32-bit greyscale values are scaled, where Pillow would clip them to white.

    >>> deep = Image.fromarray(np.array([[0, 32896, 65535]], np.uint16))
    >>> np.asarray(to_rgb(deep))[0, :, 0].tolist()
    [0, 128, 255]
    """
    if not image.mode.startswith("I") and image.mode != "F":
        return image.convert("RGB")
    values = np.nan_to_num(np.asarray(image, np.float64))
    most = values.max(initial=0)
    if image.mode == "F":
        full = 1.0 if most <= 1 else 255.0 if most <= 255 else 65535.0
    else:  # Pillow reads 16 bits as "I" in some formats
        full = 255.0 if image.mode == "I" and most <= 255 else 65535.0
    return Image.fromarray(np.rint(values / full * 255).clip(0, 255).astype(np.uint8)).convert("RGB")


def upright(image: Image.Image) -> Image.Image:
    """Rotate or flip an image as its EXIF orientation says, if that can be read."""
    try:
        return ImageOps.exif_transpose(image)
    except UNREADABLE:
        raise
    except Exception:  # Pillow raises many types for bad EXIF data; the pixels may be fine
        return image


def cut_centre(
    image: Image.Image, resized: tuple[int, int], crop: tuple[int, int], interpolation: InterpolationMode
) -> Image.Image:
    """Resize an image to `resized` = (height, width) and return its central `crop`.

    For an image that is far longer than wide, only the cropped part is computed.

    >>> cut_centre(Image.new("RGB", (60000, 1)), (256, 15_360_000), (224, 224), InterpolationMode.BICUBIC).size
    (224, 224)
    """
    height, width = crop
    if resized[0] * resized[1] <= _LARGEST_RATIO * height * width:
        return T.center_crop(T.resize(image, list(resized), interpolation), [height, width])
    down, across = image.height / resized[0], image.width / resized[1]
    top, left = round((resized[0] - height) / 2), round((resized[1] - width) / 2)
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    mode = Image.Resampling.BILINEAR if interpolation is InterpolationMode.BILINEAR else Image.Resampling.BICUBIC
    return image.resize((width, height), mode, box=box)


def to_tensor(image: Image.Image) -> Tensor:
    """An RGB image as a uint8 tensor (3, height, width)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def to_image(pixels: Tensor) -> Image.Image:
    """A uint8 tensor (3, height, width) as an RGB image.

    >>> to_image(torch.zeros(3, 4, 6, dtype=torch.uint8)).size
    (6, 4)
    """
    return Image.fromarray(pixels.cpu().permute(1, 2, 0).contiguous().numpy())


class Normalise:
    """Moves uint8 images (..., 3, H, W) to a device and normalises them: (pixels / 255 - mean) / std."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device | str) -> None:
        self.device = device
        self.mean = torch.tensor(mean, device=device)[:, None, None] * 255
        self.std = torch.tensor(std, device=device)[:, None, None] * 255

    def __call__(self, pixels: Tensor) -> Tensor:
        return (pixels.to(self.device, non_blocking=True).float() - self.mean) / self.std


def digest_of(lines: Iterable[str], length: int = 32) -> str:
    """The SHA-256 of lines of text, which may contain file names of any bytes, shortened to `length` digits."""
    state = hashlib.sha256()
    for line in lines:
        state.update(line.encode(errors="surrogateescape") + b"\n")
    return state.hexdigest()[:length]


class Entry(NamedTuple):
    """A file in a class folder: its path below the root, the class folder, its size in bytes."""

    name: str
    folder: str
    size: int


@dataclass(frozen=True)
class ClassFolders:
    """The sorted files of a folder that holds one folder per class."""

    root: Path
    classes: tuple[str, ...]
    entries: tuple[Entry, ...]

    def digest(self) -> str:
        """A hash of names and sizes, which identifies the data without reading it."""
        return digest_of(f"{entry.name} {entry.size}" for entry in self.entries)


def list_classes(root: Path, suffixes: frozenset[str] = IMAGE_SUFFIXES, complete: bool = True) -> ClassFolders:
    """List a folder that holds one folder per class; subfolders of these are included, hidden files are not.

    Args:
        root: The folder of class folders.
        suffixes: Extensions of the files to list, in lower case.
        complete: Whether empty files and broken links are errors; otherwise they are listed with size 0.

    Raises:
        VitfocusError: There is no class folder, or a class has no file.
    """
    if not root.is_dir():
        raise VitfocusError(f"There is no folder {root}; expected a folder that holds one folder per class.")
    classes = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise VitfocusError(f"{root} holds no class folders; expected {root}/CLASS/IMAGE, one folder per class.")
    entries: list[Entry] = []
    for folder in classes:
        found = sorted(
            Entry(file.relative_to(root).as_posix(), folder, _size(file, complete))
            for file in files_below(root / folder, suffixes)
        )
        if not found:
            what = "image" if suffixes is IMAGE_SUFFIXES else "file"
            kinds = ", ".join(sorted(suffix.lstrip(".") for suffix in suffixes))
            raise VitfocusError(f"{root / folder} holds no {what} ({kinds}): the data set is only half extracted.")
        entries += found
    return ClassFolders(root, tuple(classes), tuple(entries))


def find_split(root: Path, split: str, given: str = "", suffix: str = "") -> Path:
    """The folder (or with a suffix the file) of a split: the given name, or the first usual name that exists."""
    if not root.is_dir():
        raise VitfocusError(f"There is no data folder {str(root)!r}: set data.root to the folder of the images.")
    names = [name + suffix for name in ((given.removesuffix(suffix),) if given else SPLITS[split])]
    for name in names:
        if (root / name).is_file() if suffix else (root / name).is_dir():
            return root / name
    kind = "file" if suffix else "folder"
    here = root == Path()  # data.root is empty by default
    place, how = ("The current folder", "data.root to the data's folder, or ") if here else (root, "")
    wanted = " or ".join(names)
    raise VitfocusError(f"{place} has no {kind} {wanted} for {split}: set {how}data.{split}_split to its name.")


def _size(file: Path, complete: bool) -> int:
    try:
        size = file.stat().st_size
    except OSError:
        if complete:
            raise VitfocusError(f"{file} is a link to a file that does not exist.") from None
        return 0
    if complete and not size:
        raise VitfocusError(f"{file} is empty: the data set is only half extracted.")
    return size


INTERPOLATIONS = ("bilinear", "bicubic")


@dataclass(frozen=True)
class Preprocessing:
    """Resize, then crop the centre, keeping the aspect ratio.

    Args:
        resize: Pixels of the shorter side; a (height, width) is covered by the resized image; None keeps the size.
        crop: The (height, width) cut out of the centre; None keeps all of it.
        interpolation: "bilinear" or "bicubic".
        keep: An image of this (height, width) is not resized.

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
        picture = to_rgb(picture)
        if self.keep == (picture.height, picture.width):
            return to_tensor(picture)
        if self.resize is not None:
            resized = self._resized(picture.height, picture.width)
            mode = InterpolationMode(self.interpolation)
            if self.crop is not None:
                return to_tensor(cut_centre(picture, resized, self.crop, mode))
            picture = T.resize(picture, list(resized), mode)
        tensor = to_tensor(picture)
        return tensor if self.crop is None else T.center_crop(tensor, list(self.crop))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) if self.resize is not None else {"resize": "none", "crop": self.crop}

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The smallest size of the same aspect ratio that covers the frame; timm rounds it down for squares only."""
        assert self.resize is not None
        tall, wide = self.resize if isinstance(self.resize, tuple) else (self.resize, self.resize)
        rounded: Callable[[float], int] = round if tall != wide else int
        if height * wide <= width * tall:
            return tall, max(rounded(tall * width / height), wide)
        return max(rounded(wide * height / width), tall), wide


def evaluation_preprocessing(
    size: tuple[int, int], interpolation: str, crop_pct: float | None = None, keep: bool = True
) -> Preprocessing:
    """Resize to cover size / crop_pct, then crop the centre: 256 and 224 where size is 224 and crop_pct 0.875.

    Args:
        size: The (height, width) of the model's input.
        interpolation: "bilinear" or "bicubic".
        crop_pct: The share of the resized image that is kept (default: 0.875).
        keep: Whether an image of that size is not resized.

    Example:
        >>> evaluation_preprocessing((224, 224), "bicubic").to_dict()
        {'resize': 256, 'crop': (224, 224), 'interpolation': 'bicubic', 'keep': (224, 224)}
        >>> evaluation_preprocessing((224, 448), "bicubic").resize
        (256, 512)
    """
    expected = "a share of the resized picture, such as 0.875"
    share = check_number("crop_pct", 0.875 if crop_pct is None else crop_pct, expected)
    if not 0 < share <= 1:
        raise VitfocusError(f"crop_pct is {share}; expected {expected}.")
    height, width = (int(side / share) for side in size)
    resize = height if height == width else (height, width)
    return Preprocessing(resize, size, interpolation, size if keep else None)


def model_interpolation(config: Mapping[str, Any]) -> str:
    """The interpolation that timm's configuration of a model names; anything but "bilinear" is bicubic."""
    return "bilinear" if config.get("interpolation") == "bilinear" else "bicubic"


def read_image(file: Path, size: tuple[int, int], crop: float = 0.875, interpolation: str = "bicubic") -> Tensor:
    """Read an image file as a model of that size is evaluated: uint8 (3, height, width)."""
    return evaluation_preprocessing(size, interpolation, crop).apply(open_image(file))
