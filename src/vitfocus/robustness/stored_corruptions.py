"""Corrupted pictures that were stored, such as Cityscapes-C: found by the corruption and severity in their paths."""

from __future__ import annotations

from pathlib import Path

from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS
from vitfocus.data.segmentation.dataset import MaskFiles
from vitfocus.data.segmentation.layouts import Layout, Pair


def stored_corruptions(folder: str | Path, clean: MaskFiles) -> dict[tuple[str, int], MaskFiles]:
    """Sets of pictures by (corruption, severity), each with the masks of the clean pictures of the same names.

    Both "gaussian_noise/3/..." and "gaussian_noise_3/..." are understood, wherever they stand in a path.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise VitfocusError(f"There is no folder {root} of corrupted pictures.")
    if not isinstance(clean, MaskFiles):
        raise VitfocusError("Stored corruptions need the folder of the clean pictures, whose masks they share.")
    masks = {picture.stem: mask for picture, mask in clean.pairs}
    found: dict[tuple[str, int], list[Pair]] = {}
    for picture in sorted(root.rglob("*")):
        if picture.stem in masks and (condition := _condition(picture.relative_to(root).parts[:-1])):
            found.setdefault(condition, []).append((picture, masks[picture.stem]))
    if not found:
        raise VitfocusError(
            f"{root} holds no corrupted copies of the clean pictures: expected paths such as "
            f"gaussian_noise/3/.../{clean.pairs[0][0].name}."
        )
    for (name, severity), pairs in found.items():
        if len(pairs) != len(masks):
            raise VitfocusError(f"{root} has {len(pairs)} pictures of {name} at severity {severity}, not {len(masks)}.")
    return {
        key: MaskFiles(Path(root.anchor), Layout(_in_order(clean, pairs), clean.classes, clean.table))
        for key, pairs in found.items()
    }


def _in_order(clean: MaskFiles, pairs: list[Pair]) -> list[Pair]:
    by_stem = {picture.stem: (picture, mask) for picture, mask in pairs}
    return [by_stem[picture.stem] for picture, _ in clean.pairs]


def _condition(parts: tuple[str, ...]) -> tuple[str, int] | None:
    for place, part in enumerate(parts):
        for name in (*CORRUPTIONS, *EXTRA_CORRUPTIONS):
            if not part.startswith(name):
                continue
            rest = part.removeprefix(name).lstrip("_-")
            around = [rest] if rest else [*parts[place + 1 :], *parts[:place]]
            numbers = [text.removeprefix("severity").lstrip("_-") for text in around]
            if found := [int(number) for number in numbers if number in ("1", "2", "3", "4", "5")]:
                return name, found[0]
    return None
