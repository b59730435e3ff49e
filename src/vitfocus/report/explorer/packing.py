"""Attention maps as the page reads them: few levels, columns first, compressed; large maps made coarser."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitfocus.anatomy import Block
from vitfocus.anatomy.block import Size
from vitfocus.attention.overfocus import overfocus, received

LEVELS = 63
#: A map with more entries than this is made coarser: neighbouring patches are taken together.
ENTRIES = 170_000


def grids_of(block: Block, size: Size, maps: Tensor) -> tuple[Size, Size] | None:
    """The grids of queries and keys, if the tokens really lie on them."""
    queries, keys = block.attention_grids(size)
    expected = tuple(block.prefix_tokens + rows * columns for rows, columns in (queries, keys))
    return (queries, keys) if tuple(maps.shape[1:]) == expected else None


def coarse_grids(block: Block, size: Size, maps: Tensor) -> tuple[Any, Any, tuple[int, int]]:
    """The grids after taking patches together, and how many side by side were, for queries and keys."""
    found = grids_of(block, size, maps)
    assert found is not None
    queries, keys = found
    group = [1, 1]
    while _tokens(queries, group[0]) * _tokens(keys, group[1]) > ENTRIES:
        group[0 if _tokens(queries, group[0]) >= _tokens(keys, group[1]) else 1] *= 2
    small = [tuple(-(-side // g) for side in grid) for grid, g in zip((queries, keys), group, strict=True)]
    return small[0], small[1], (group[0], group[1])


def _tokens(grid: tuple[int, int], group: int) -> int:
    return -(-grid[0] // group) * -(-grid[1] // group)


def pack(block: Block, size: Size, maps: Tensor, each: bool) -> dict[str, Any]:
    """Maps (heads, queries, keys) as the page reads them; one map, their mean, unless `each` head is wanted."""
    average = maps.mean(dim=0)
    shares = [float(overfocus(received(average)))]
    if each:
        shares += [float(share) for share in overfocus(received(maps))]
    _, _, group = coarse_grids(block, size, maps)
    found = grids_of(block, size, maps)
    assert found is not None
    kept = maps if each else average[None]
    kept = _taken_together(kept, 2, found[1], block.prefix_tokens, group[1], mean=False)
    kept = _taken_together(kept, 1, found[0], block.prefix_tokens, group[0], mean=True)
    content, tops = b"", []
    for one in kept:
        levels, top = quantise(one)
        content += levels.T.tobytes()  # by columns, which are alike where attention overfocuses, so they pack better
        tops.append(float(f"{top:.5g}"))
    packed = base64.b64encode(zlib.compress(content, 9)).decode()
    return {"d": packed, "m": tops, "o": [round(share, 4) for share in shares]}


def quantise(attention: Tensor) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], float]:
    """A map as 64 levels of the square root of its values, and its greatest value.

    >>> levels, top = quantise(torch.tensor([[0.0, 0.25], [1.0, 0.04]]))
    >>> levels.tolist(), top
    ([[0, 32], [63, 13]], 1.0)
    """
    top = float(attention.max())
    roots = (attention.clamp_min(0) / max(top, 1e-30)).sqrt()
    return (LEVELS * roots).round().to(torch.uint8).numpy(), top


def _taken_together(maps: Tensor, dim: int, grid: tuple[int, int], prefix: int, group: int, mean: bool) -> Tensor:
    """Neighbouring tokens along a dimension taken together, `group` by `group`: summed, or averaged."""
    if group == 1:
        return maps
    rows, columns = grid
    wide = -(-columns // group)
    row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    place = torch.cat([torch.arange(prefix), prefix + row // group * wide + column // group])
    shape = list(maps.shape)
    shape[dim] = int(place.max()) + 1
    joined = torch.zeros(shape).index_add_(dim, place, maps)
    if mean:
        sizes = torch.zeros(shape[dim]).index_add_(0, place, torch.ones(len(place)))
        joined /= sizes.view([-1 if axis == dim else 1 for axis in range(maps.ndim)])
    return joined


def picture_address(image: Tensor) -> str:
    """An image as a data address: lossless where it is tiny, as JPEG otherwise."""
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((320, 320))
    buffer = io.BytesIO()
    small = max(picture.size) <= 64
    picture.save(buffer, **({"format": "PNG"} if small else {"format": "JPEG", "quality": 82}))
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
