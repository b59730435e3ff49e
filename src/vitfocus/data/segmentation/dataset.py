"""Segmentation data sets: ADE20K, Cityscapes, ACDC, CamVid, any folder of images and masks, and Shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.files import home_path
from vitfocus.core.records import read_json, read_text
from vitfocus.data.image_files import SPLITS, files_below, image_file, to_rgb
from vitfocus.data.loader import SampleDataset
from vitfocus.data.shapes.dataset import MASK_CLASSES, draw_all, semantic_mask
from vitfocus.recipes import Data

IGNORE = 255  # the label of pixels that are not trained on or scored

CITYSCAPES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
    *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
#: Cityscapes' ids of the 19 classes that are trained on; all other ids are ignored.
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_CITYSCAPES_COLOURS = (
    *((128, 64, 128), (244, 35, 232), (70, 70, 70), (102, 102, 156), (190, 153, 153), (153, 153, 153)),
    *((250, 170, 30), (220, 220, 0), (107, 142, 35), (152, 251, 152), (70, 130, 180), (220, 20, 60), (255, 0, 0)),
    *((0, 0, 142), (0, 0, 70), (0, 60, 100), (0, 80, 100), (0, 0, 230), (119, 11, 32)),
)
CAMVID = (
    *("sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian"),
    "bicyclist",
)
_CAMVID_COLOURS = (
    *((128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0)),
    *((192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192)),
)
ADE20K = tuple(
    """wall;building;sky;floor;tree;ceiling;road;bed;windowpane;grass;cabinet;sidewalk;person;earth;door;table;mountain;
plant;curtain;chair;car;water;painting;sofa;shelf;house;sea;mirror;rug;field;armchair;seat;fence;desk;rock;wardrobe;
lamp;bathtub;railing;cushion;base;box;column;signboard;chest of drawers;counter;sand;sink;skyscraper;fireplace;
refrigerator;grandstand;path;stairs;runway;case;pool table;pillow;screen door;stairway;river;bridge;bookcase;blind;
coffee table;toilet;flower;book;hill;bench;countertop;stove;palm;kitchen island;computer;swivel chair;boat;bar;
arcade machine;hovel;bus;towel;light;truck;tower;chandelier;awning;streetlight;booth;television receiver;airplane;
dirt track;apparel;pole;land;bannister;escalator;ottoman;bottle;buffet;poster;stage;van;ship;fountain;conveyer belt;
canopy;washer;plaything;swimming pool;stool;barrel;basket;waterfall;tent;bag;minibike;cradle;oven;ball;food;step;tank;
trade name;microwave;pot;animal;bicycle;lake;dishwasher;screen;blanket;sculpture;hood;sconce;vase;traffic light;tray;
ashcan;fan;pier;crt screen;plate;monitor;bulletin board;shower;radiator;glass;clock;flag""".replace("\n", "").split(";")
)
CONDITIONS = ("fog", "night", "rain", "snow")  # of ACDC

Pair = tuple[Path, Path | None]  # an image and its mask, which may be withheld
Table = npt.NDArray[np.uint8]  # (256,): the class that each stored value means


@dataclass(frozen=True)
class Layout:
    """Image and mask files of one split; `table` (256,) maps stored mask values to classes."""

    pairs: list[Pair]
    classes: tuple[str, ...]
    table: Table


def ade20k(root: Path, split: str, given: str) -> Layout:
    """ADEChallengeData2016: classes are stored from 1, and 0 is unlabelled."""
    pairs = _paired_files(root, split, given, "ADE20K", "annotations")
    return Layout(pairs, ADE20K, _table(range(1, 151)))


def cityscapes(root: Path, split: str, given: str) -> Layout:
    """Images in leftImg8bit, masks in gtFine: labelTrainIds if there are any, otherwise labelIds; none for test.

    The images may be in "clean" instead, beside folders of corrupted copies.
    """
    name = given or split
    images, masks = root / "leftImg8bit" / name, root / "gtFine" / name
    if not images.is_dir() and (root / "clean").is_dir():
        images = root / "clean"
    elif not images.is_dir() and any(root.glob("*_leftImg8bit.png")):
        images = masks = root
    return _street_scenes(root, "Cityscapes", images, masks, "_leftImg8bit.png", "_gtFine", withheld=name == "test")


def acdc(root: Path, split: str, given: str, condition: str = "") -> Layout:
    """ACDC, with the classes of Cityscapes: rgb_anon/CONDITION/SPLIT and gt/CONDITION/SPLIT; test has no masks.

    The folders of the published archives, rgb_anon_trainvaltest and gt_trainval, may be above them.
    """
    name = given or split
    above = {kind: root / archive for kind, archive in (("rgb_anon", "rgb_anon_trainvaltest"), ("gt", "gt_trainval"))}
    images, masks = (place / kind if place.is_dir() else root / kind for kind, place in above.items())
    layouts = [
        _street_scenes(
            root, "ACDC", images / one / name, masks / one / name, "_rgb_anon.png", "_gt", withheld=name == "test"
        )
        for one in ((condition,) if condition else CONDITIONS)
    ]
    return Layout([pair for layout in layouts for pair in layout.pairs], CITYSCAPES, layouts[-1].table)


def has_acdc_test(root: Path) -> bool:
    """Whether a folder has the images of ACDC's test split."""
    return any((root / above / "rgb_anon" / CONDITIONS[0] / "test").is_dir() for above in ("", "rgb_anon_trainvaltest"))


def camvid(root: Path, split: str, given: str) -> Layout:
    """CamVid's eleven classes (11 is void): train and trainannot, or images/train and annotations/train."""
    name = given or split
    if (root / f"{name}annot").is_dir():
        pairs = _pairs_by_stem(_require_folder(root, "CamVid", root / name), root / f"{name}annot")
    else:
        pairs = _paired_files(root, split, given, "CamVid", "annotations", "labels", "masks")
    return Layout(pairs, CAMVID, _table(range(11)))


def masks(root: Path, split: str, given: str) -> Layout:
    """Any images and masks: images/train and masks/train; classes are counted from 0, and 255 is ignored.

    The names of the classes are read from classes.txt (one per line) or classes.json (a list).
    """
    pairs = _paired_files(root, split, given, "A folder of masks", "masks", "annotations", "labels")
    return Layout(pairs, _class_names(root), np.arange(256, dtype=np.uint8))


LAYOUTS: dict[str, Callable[[Path, str, str], Layout]] = {
    "ade20k": ade20k,
    "cityscapes": cityscapes,
    "acdc": acdc,
    "camvid": camvid,
    "masks": masks,
}


def _street_scenes(root: Path, what: str, images: Path, masks: Path, ending: str, mark: str, withheld: bool) -> Layout:
    """Images and masks named as in Cityscapes; withheld masks are not published."""
    _require_folder(root, what, images)
    files = sorted(images.rglob(f"*{ending}"))
    if not files:
        raise VitfocusError(f"{images} has no file *{ending}, which is how {what} names its images.")
    if withheld:
        return Layout([(file, None) for file in files], CITYSCAPES, _table(range(19)))
    _require_folder(root, what, masks)
    stems = {file: masks / file.parent.relative_to(images) / file.name.removesuffix(ending) for file in files}
    if images.name == "clean" and images.parent in masks.parents:  # whose copies may leave out the folders of cities
        for file, stem in stems.items():
            city = masks / file.name.partition("_")[0]
            stems[file] = city / stem.name if city.is_dir() else stem
    for suffix, stored in ((f"{mark}_labelTrainIds.png", range(19)), (f"{mark}_labelIds.png", CITYSCAPES_IDS)):
        found = {file: stem.with_name(stem.name + suffix) for file, stem in stems.items()}
        if any(mask.is_file() for mask in found.values()):
            return Layout(_require_masks(found.items()), CITYSCAPES, _table(stored))
    raise VitfocusError(f"{masks} has neither *{mark}_labelTrainIds.png nor *{mark}_labelIds.png.")


def _table(stored: Sequence[int]) -> Table:
    """The classes 0, 1, ... of these stored values; all others are ignored."""
    table = np.full(256, IGNORE, np.uint8)
    table[list(stored)] = np.arange(len(stored))
    return table


def _paired_files(root: Path, split: str, given: str, what: str, *kinds: str) -> list[Pair]:
    """Images in images/SPLIT and masks in KIND/SPLIT, or in both folders themselves if they have no subfolders."""
    images, names = root / "images", (given,) if given else SPLITS[split]
    flat = not given and images.is_dir() and not any(path.is_dir() for path in images.iterdir())
    if flat and any(files_below(images)):
        return _pairs_by_stem(images, _require_folder(root, what, *(root / kind for kind in kinds)))
    return _pairs_by_stem(
        _require_folder(root, what, *(images / name for name in names)),
        _require_folder(root, what, *(root / kind / name for name in names for kind in kinds)),
    )


def _require_folder(root: Path, what: str, *folders: Path) -> Path:
    """The first of some folders that exists; the error names them, and what is there instead."""
    for folder in folders:
        if folder.is_dir():
            return folder
    if not root.is_dir():
        raise VitfocusError(f"There is no data folder {str(root)!r}: set data.root to the folder of the images.")
    wanted = " or ".join(str(folder.relative_to(root)) for folder in folders)
    present = ", ".join(sorted(path.name for path in root.iterdir())[:8]) or "nothing"
    raise VitfocusError(f"{what} has its files in {wanted}, but {root} has only: {present}.")


def _pairs_by_stem(images: Path, masks: Path) -> list[Pair]:
    """Pair files of the same name in both folders; their extensions may differ."""
    known: dict[Path, Path] = {}
    for path in sorted(files_below(masks)):
        first = known.setdefault(path.relative_to(masks).with_suffix(""), path)
        if first != path:
            raise VitfocusError(f"{first.parent} has two masks of one image, {first.name} and {path.name}: keep one.")
    files = sorted(files_below(images))
    if not files:
        raise VitfocusError(f"{images} has no image.")
    return _require_masks((file, known.get(file.relative_to(images).with_suffix(""))) for file in files)


def _require_masks(pairs: Iterable[Pair]) -> list[Pair]:
    found = list(pairs)
    if unpaired := [image for image, mask in found if mask is None or not mask.is_file()]:
        raise VitfocusError(f"{len(unpaired)} of {len(found)} images have no mask; the first is {unpaired[0]}.")
    return found


def _class_names(root: Path) -> tuple[str, ...]:
    if (root / "classes.json").is_file():
        return tuple(read_json(root / "classes.json", list[str], writer="a data set with class names"))
    if (root / "classes.txt").is_file():
        lines = read_text(root / "classes.txt").splitlines()
        return tuple(line.strip() for line in lines if line.strip())
    return ()


def palette(classes: int, source: str = "") -> npt.NDArray[np.uint8]:
    """Colours of the classes, (256, 3): the data set's own if it has some; ignored pixels are black.

    >>> palette(19, "cityscapes")[0].tolist(), palette(3)[:3].tolist()
    ([128, 64, 128], [[128, 0, 0], [0, 128, 0], [128, 128, 0]])
    """
    known = {"cityscapes": _CITYSCAPES_COLOURS, "acdc": _CITYSCAPES_COLOURS, "camvid": _CAMVID_COLOURS}.get(source)
    colours = np.array([_spread(number + 1) for number in range(256)], np.uint8)
    if known is not None and len(known) == classes:
        colours[:classes] = known
    colours[IGNORE] = 0
    return colours


def _spread(number: int) -> list[int]:
    """A colour for a class number, as in PASCAL VOC: its bits become the highest bits of the channels in turn."""
    channels = [0, 0, 0]
    for place in range(8):
        for channel in range(3):
            channels[channel] |= ((number >> (3 * place + channel)) & 1) << (7 - place)
    return channels


SOURCES = ("shapes", *LAYOUTS)
SHAPES_LENGTH = {"train": 4_000, "val": 500}
Mask = npt.NDArray[np.uint8]


class SegmentationDataset(SampleDataset[tuple[Image.Image, Mask]], Protocol):
    """RGB images and their masks (height, width); 255 in a mask is ignored."""

    classes: tuple[str, ...]


def open_masks(data: Data, split: str) -> SegmentationDataset:
    """Open a split ("train" or "val") of the data set that `data.source` names.

    Raises:
        VitfocusError: The source is unknown, or its folder has another layout.
    """
    length = data.train_length if split == "train" else data.val_length
    if data.source == "shapes":
        return ShapesMasks(split, length or SHAPES_LENGTH[split], data.size)
    if data.source not in LAYOUTS:
        raise VitfocusError(f"There is no segmentation data source {data.source!r}: {nearest(data.source, SOURCES)}")
    given = data.train_split if split == "train" else data.val_split
    root = home_path(data.root)
    layout = LAYOUTS[data.source](root, split, given)
    return MaskFiles(root, Layout(layout.pairs[: length or None], layout.classes, layout.table))


def guess_source(root: Path) -> str | None:
    """The layout of a folder, if its file names tell."""
    if any((root / name).is_dir() for name in ("leftImg8bit", "gtFine")) or any(root.glob("*_leftImg8bit.png")):
        return "cityscapes"
    if any((root / name).is_dir() for name in ("rgb_anon", "rgb_anon_trainvaltest")):
        return "acdc"
    if (root / "trainannot").is_dir() or (root / "valannot").is_dir():
        return "camvid"
    return "ade20k" if next(root.glob("images/**/ADE_*.jpg"), None) else None


class MaskFiles:
    """Image and mask files."""

    def __init__(self, root: Path, layout: Layout) -> None:
        self.root, self.pairs, self.classes, self.table = root, layout.pairs, layout.classes, layout.table

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def withheld(self) -> bool:
        """Whether only a benchmark's server has the masks; they then read as ignored everywhere."""
        return any(mask is None for _, mask in self.pairs)

    def read(self, index: int) -> tuple[Image.Image, Mask]:
        file, mask = self.pairs[index]
        if mask is None:
            with image_file(file) as image:
                return to_rgb(image), np.full((image.height, image.width), IGNORE, np.uint8)
        with image_file(file) as image, image_file(mask) as stored:
            if stored.mode not in ("L", "P", "1"):
                raise VitfocusError(f"{mask} has the mode {stored.mode}; a mask has one 8-bit number per pixel")
            values = np.asarray(stored, np.uint8)
            if values.shape != (image.height, image.width):
                size = f"{values.shape[1]}x{values.shape[0]}"
                raise VitfocusError(f"{mask} is {size} pixels, but its image is {image.width}x{image.height}")
            return to_rgb(image), self.table[values]

    def name(self, index: int) -> str:
        return str(self.pairs[index][0])

    def digest(self) -> str:
        """SHA-256 of the files' names and sizes; their contents are not read."""
        listing = hashlib.sha256(self.table.tobytes())
        for pair in self.pairs:
            for file in filter(None, pair):
                line = f"{file.relative_to(self.root)} {file.stat().st_size}\n"
                listing.update(line.encode(errors="surrogateescape"))
        return listing.hexdigest()


class ShapesMasks:
    """Shapes, drawn once and kept in memory."""

    classes = MASK_CLASSES

    def __init__(self, split: str, length: int, size: int) -> None:
        self.split = split
        self.images, shape_class, owner = draw_all(range(length), split, size)
        self.masks = semantic_mask(shape_class, owner)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Image.Image, Mask]:
        return Image.fromarray(np.ascontiguousarray(self.images[index].transpose(1, 2, 0))), self.masks[index]

    def name(self, index: int) -> str:
        return f"Shapes {self.split} {index}"

    def digest(self) -> str:
        digest = hashlib.sha256(self.images.data)
        digest.update(self.masks.data)
        return digest.hexdigest()


def stored_corruptions(
    folder: str | Path, clean: SegmentationDataset | None, names: Sequence[str]
) -> dict[tuple[str, int], MaskFiles]:
    """Stored images by (corruption, severity), each with the mask of the clean image of the same name.

    Both "gaussian_noise/3/..." and "gaussian_noise_3/..." are recognised, anywhere in a path.
    """
    root = home_path(folder)
    if not root.is_dir():
        raise VitfocusError(f"There is no folder {root} of corrupted images.")
    if not isinstance(clean, MaskFiles):
        raise VitfocusError("Stored corruptions need the folder of the clean images, whose masks they share.")
    order = {image.stem: index for index, (image, _) in enumerate(clean.pairs)}
    found: dict[tuple[str, int], list[Path]] = {}
    for image in root.rglob("*"):
        if image.stem in order and (corruption := _corruption_in(image.relative_to(root).parts[:-1], names)):
            found.setdefault(corruption, []).append(image)
    if not found:
        raise VitfocusError(
            f"{root} has no corrupted copies of the clean images: expected paths such as "
            f"gaussian_noise/3/.../{clean.pairs[0][0].name}."
        )
    layouts = {}
    for (name, severity), images in sorted(found.items()):
        if len(images) != len(order):
            raise VitfocusError(f"{root} has {len(images)} images of {name} at severity {severity}, not {len(order)}.")
        pairs = [
            (image, clean.pairs[order[image.stem]][1]) for image in sorted(images, key=lambda one: order[one.stem])
        ]
        layouts[name, severity] = MaskFiles(Path(root.anchor), Layout(pairs, clean.classes, clean.table))
    return layouts


def _corruption_in(parts: tuple[str, ...], names: Sequence[str]) -> tuple[str, int] | None:
    for index, part in enumerate(parts):
        for name in names:
            if not part.startswith(name):
                continue
            rest = part.removeprefix(name).lstrip("_-")
            around = [rest] if rest else [*parts[index + 1 :], *parts[:index]]
            numbers = [text.removeprefix("severity").lstrip("_-") for text in around]
            if found := [int(number) for number in numbers if number in ("1", "2", "3", "4", "5")]:
                return name, found[0]
    return None
