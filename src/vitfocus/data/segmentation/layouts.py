"""Where the segmentation data sets keep their pictures and masks: one small function a layout.

Each finds the pairs of a split and says what is missing where the folder is not laid out so. Samples of a data set that
lie in one folder, without splits, are read as any split.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import PICTURES
from vitfocus.data.classification.folders import SPLITS
from vitfocus.data.segmentation.classes import ADE20K, CAMVID, CITYSCAPES, CITYSCAPES_IDS, IGNORE

Pair = tuple[Path, Path]
Table = npt.NDArray[np.uint8]  # (256,): the class that each stored value means
CONDITIONS = ("fog", "night", "rain", "snow")


@dataclass(frozen=True)
class Layout:
    """The pairs of one split; `table` translates stored values to classes."""

    pairs: list[Pair]
    classes: tuple[str, ...]
    table: Table


def ade20k(root: Path, split: str, given: str) -> Layout:
    """ADEChallengeData2016: stored values count from 1, and 0 is unlabelled."""
    pictures, masks = _two_folders(root, split, given, "ADE20K", ("images",), ("annotations",))
    table = np.full(256, IGNORE, np.uint8)
    table[1:151] = np.arange(150)
    return Layout(_by_stem(pictures, masks), ADE20K, table)


def cityscapes(root: Path, split: str, given: str) -> Layout:
    """Pictures in leftImg8bit, masks in gtFine: the ids trained on where they are there, else Cityscapes' own."""
    name = given or split
    pictures, masks = root / "leftImg8bit" / name, root / "gtFine" / name
    if not pictures.is_dir() and any(root.glob("*_leftImg8bit.png")):
        pictures = masks = root
    _need(root, "Cityscapes", pictures, masks)
    return _street(pictures, masks, "_leftImg8bit.png", "_gtFine", "Cityscapes")


def acdc(root: Path, split: str, given: str, condition: str = "") -> Layout:
    """Cityscapes' classes in fog, at night, in rain and snow: rgb_anon/CONDITION/SPLIT and gt/CONDITION/SPLIT."""
    name, pairs = given or split, []
    for one in (condition,) if condition else CONDITIONS:
        pictures, masks = root / "rgb_anon" / one / name, root / "gt" / one / name
        _need(root, "ACDC", pictures, masks)
        layout = _street(pictures, masks, "_rgb_anon.png", "_gt", "ACDC")
        pairs += layout.pairs
    return Layout(pairs, layout.classes, layout.table)


def camvid(root: Path, split: str, given: str) -> Layout:
    """Eleven classes, 11 is void: train and trainannot, or images/train and annotations/train."""
    name = given or split
    if (root / f"{name}annot").is_dir():
        _need(root, "CamVid", root / name)
        pairs = _by_stem(root / name, root / f"{name}annot")
    else:
        pairs = _by_stem(*_two_folders(root, split, given, "CamVid", ("images",), ("annotations", "labels", "masks")))
    table = np.full(256, IGNORE, np.uint8)
    table[:11] = np.arange(11)
    return Layout(pairs, CAMVID, table)


def masks(root: Path, split: str, given: str) -> Layout:
    """Any pictures and masks: images/train and masks/train; classes count from 0, 255 does not count.

    classes.txt (a name a line) or classes.json (a list) says what the classes are.
    """
    folders = _two_folders(root, split, given, "A folder of masks", ("images",), ("masks", "annotations", "labels"))
    return Layout(_by_stem(*folders), _class_names(root), np.arange(256, dtype=np.uint8))


LAYOUTS: dict[str, Callable[[Path, str, str], Layout]] = {
    "ade20k": ade20k,
    "cityscapes": cityscapes,
    "acdc": acdc,
    "camvid": camvid,
    "masks": masks,
}


def _street(pictures: Path, folder: Path, ending: str, mark: str, what: str) -> Layout:
    files = sorted(pictures.rglob(f"*{ending}"))
    if not files:
        raise VitfocusError(f"{pictures} holds no *{ending}, as {what} names its pictures.")
    places = {file: folder / file.parent.relative_to(pictures) / file.name.removesuffix(ending) for file in files}
    for suffix, table in ((f"{mark}_labelTrainIds.png", _train_ids()), (f"{mark}_labelIds.png", _own_ids())):
        found = {file: place.with_name(place.name + suffix) for file, place in places.items()}
        if any(mask.is_file() for mask in found.values()):
            return Layout(_present(found.items()), CITYSCAPES, table)
    raise VitfocusError(f"{folder} holds neither *{mark}_labelTrainIds.png nor *{mark}_labelIds.png.")


def _train_ids() -> Table:
    table = np.full(256, IGNORE, np.uint8)
    table[:19] = np.arange(19)
    return table


def _own_ids() -> Table:
    table = np.full(256, IGNORE, np.uint8)
    table[list(CITYSCAPES_IDS)] = np.arange(19)
    return table


def _two_folders(
    root: Path, split: str, given: str, what: str, pictures: tuple[str, ...], others: tuple[str, ...]
) -> tuple[Path, Path]:
    """Folders of pictures and of masks for a split, or, where they hold files alone, for all splits."""
    names = (given,) if given else SPLITS[split]
    wanted = [tuple(root / kind / name for name in names for kind in kinds) for kinds in (pictures, others)]
    found = [next((folder for folder in folders if folder.is_dir()), None) for folders in wanted]
    if found[0] is None and not given and _has_pictures(root / pictures[0]):
        flat = [root / pictures[0], next((root / kind for kind in others if (root / kind).is_dir()), None)]
        if flat[1] is not None and not any(path.is_dir() for path in (root / pictures[0]).iterdir()):
            found = flat
    for folder, folders in zip(found, wanted, strict=True):
        if folder is None:
            _missing(root, what, *folders)
    assert found[0] is not None and found[1] is not None
    return found[0], found[1]


def _need(root: Path, what: str, *folders: Path) -> None:
    for folder in folders:
        if not folder.is_dir():
            _missing(root, what, folder)


def _missing(root: Path, what: str, *folders: Path) -> NoReturn:
    """Say which folder is missing, any of several that would do, and what is there instead."""
    if not root.is_dir():
        raise VitfocusError(f"There is no data folder {str(root)!r}: set data.root to where the pictures are.")
    wanted = " or ".join(str(folder.relative_to(root)) for folder in folders)
    there = ", ".join(sorted(path.name for path in root.iterdir())[:8]) or "nothing"
    raise VitfocusError(f"{what} keeps files in {wanted}, and {root} has only: {there}.")


def _has_pictures(folder: Path) -> bool:
    return folder.is_dir() and any(path.suffix.lower() in PICTURES for path in folder.iterdir())


def _by_stem(pictures: Path, folder: Path) -> list[Pair]:
    """Pair files of the same name, whatever their endings, below both folders."""
    known = {path.relative_to(folder).with_suffix(""): path for path in folder.rglob("*") if _is_picture(path)}
    files = sorted(path for path in pictures.rglob("*") if _is_picture(path))
    if not files:
        raise VitfocusError(f"{pictures} holds no picture.")
    return _present((file, known.get(file.relative_to(pictures).with_suffix(""))) for file in files)


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURES and not path.name.startswith(".")


def _present(pairs: Iterable[tuple[Path, Path | None]]) -> list[Pair]:
    whole, lone = [], []
    for picture, mask in pairs:
        if mask is not None and mask.is_file():
            whole.append((picture, mask))
        else:
            lone.append(picture)
    if lone:
        raise VitfocusError(f"{len(lone)} of {len(lone) + len(whole)} pictures have no mask; the first is {lone[0]}.")
    return whole


def _class_names(root: Path) -> tuple[str, ...]:
    if (root / "classes.json").is_file():
        try:
            names = json.loads((root / "classes.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise VitfocusError(f"{root / 'classes.json'} cannot be read: {error}.") from None
        if not isinstance(names, list):
            raise VitfocusError(f"{root / 'classes.json'} is no list of the classes' names.")
        return tuple(map(str, names))
    if (root / "classes.txt").is_file():
        lines = (root / "classes.txt").read_text(encoding="utf-8").splitlines()
        return tuple(line.strip() for line in lines if line.strip())
    return ()
