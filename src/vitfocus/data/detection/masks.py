"""Masks in COCO's formats: polygons for single objects, run lengths for crowds and detections.

Polygons written here follow pixel edges, so their area is exactly the number of pixels. COCO's polygons cannot have
holes: a mask with a hole is cut in two through it, and both parts are listed, as COCO does for objects in pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vitfocus.core.errors import VitfocusError

Mask = npt.NDArray[np.bool_]
Loop = list[tuple[int, int]]


def decode_mask(stored: Any, height: int, width: int) -> np.ndarray:
    """Decode COCO's polygons or run lengths, compressed or not, to a mask uint8 (height, width)."""
    coco = mask_tools()
    if isinstance(stored, list):
        lists = [polygon for polygon in stored if len(polygon) >= 6]  # COCO's tools would read four numbers as a box
        if not lists:
            return np.zeros((height, width), np.uint8)
        stored = coco.merge(coco.frPyObjects(lists, height, width))
    elif isinstance(stored["counts"], list):
        stored = coco.frPyObjects(stored, height, width)
    mask: np.ndarray = coco.decode(stored)
    return mask


def encode_masks(masks: Any) -> list[dict[str, Any]]:
    """Encode masks (n, height, width) as COCO's compressed run lengths, with counts as text for JSON."""
    stacked = np.asfortranarray(np.asarray(masks, np.uint8).transpose(1, 2, 0))
    encoded = mask_tools().encode(stacked) if stacked.shape[2] else []
    return [{"size": list(one["size"]), "counts": _text(one["counts"])} for one in encoded]


def mask_tools() -> Any:
    """The module that encodes and decodes masks, or an error that says how to install it."""
    try:
        from faster_coco_eval import mask
    except ImportError:
        raise VitfocusError("Detection needs the extra vitfocus[det].") from None
    return mask


def run_lengths(mask: Mask) -> dict[str, Any]:
    """Encode a mask as COCO's uncompressed run lengths: column by column, the first run outside the mask.

    >>> run_lengths(np.array([[0, 1], [0, 1], [1, 0]], bool))
    {'counts': [2, 3, 1], 'size': [3, 2]}
    """
    flat = np.concatenate([[False], mask.T.ravel(), [not mask[-1, -1]]])
    ends = np.flatnonzero(flat[1:] != flat[:-1])
    return {"counts": np.diff(ends, prepend=0).tolist(), "size": list(mask.shape)}


def polygons(mask: Mask) -> list[list[int]]:
    """Encode a mask as COCO's polygons [x0, y0, x1, y1, ...], which cover it exactly.

    >>> polygons(np.array([[0, 1, 1], [0, 1, 1]], bool))
    [[1, 0, 3, 0, 3, 2, 1, 2]]
    """
    loops = _loops(mask)
    for loop in loops:
        if _signed_area(loop) < 0:
            middle = (min(x for x, _ in loop) + max(x for x, _ in loop)) // 2
            left, right = mask.copy(), mask.copy()
            left[:, middle:], right[:, :middle] = False, False
            return polygons(left) + polygons(right)
    return [[value for corner in loop for value in corner] for loop in loops]


def _loops(mask: Mask) -> list[Loop]:
    """Follow every outline with the mask on the right: outer ones clockwise, holes counter-clockwise."""
    next_corners = _steps(mask)
    loops = []
    while next_corners:
        start = min(next_corners, key=lambda corner: (corner[1], corner[0]))
        loop: Loop = []
        corner, heading = start, (1, 0)
        while True:
            choices = next_corners[corner]
            # Where two pixels touch at a corner, turning right keeps them apart.
            right = (corner[0] - heading[1], corner[1] + heading[0])
            step = right if len(choices) > 1 and right in choices else choices[0]
            choices.remove(step)
            if not choices:
                del next_corners[corner]
            turned = (step[0] - corner[0], step[1] - corner[1])
            if turned != heading or not loop:
                loop.append(corner)
            corner, heading = step, turned
            if corner == start:
                break
        loops.append(loop)
    return loops


def _steps(mask: Mask) -> dict[tuple[int, int], Loop]:
    """For each corner (x, y) on an outline, the corners one pixel edge further."""
    padded = np.pad(mask, 1)
    sides = {  # which neighbour is outside: where the pixel's edge towards it starts and ends, clockwise
        (-1, 0): ((0, 0), (1, 0)),
        (0, 1): ((1, 0), (1, 1)),
        (1, 0): ((1, 1), (0, 1)),
        (0, -1): ((0, 1), (0, 0)),
    }
    steps: dict[tuple[int, int], Loop] = {}
    for (down, across), (start, end) in sides.items():
        outside = ~np.roll(padded, (-down, -across), (0, 1))[1:-1, 1:-1]
        for y, x in np.argwhere(mask & outside).tolist():
            steps.setdefault((x + start[0], y + start[1]), []).append((x + end[0], y + end[1]))
    return steps


def _signed_area(loop: Loop) -> float:
    """The enclosed area, negative for a hole."""
    return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(loop, loop[1:] + loop[:1], strict=True)) / 2


def _text(counts: bytes | str) -> str:
    return counts.decode("ascii") if isinstance(counts, bytes) else counts
