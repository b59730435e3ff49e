"""The explorer's maps: which layers and heads fit into the page, and how a map is encoded.

A map is stored in 64 levels, by columns, compressed; large maps are made coarser. What is left out is reported.
"""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from vitfocus.anatomy import Block, anatomy
from vitfocus.anatomy.block import Size
from vitfocus.attention.capture import can_be_read
from vitfocus.attention.maps import attention_maps
from vitfocus.core.errors import VitfocusError
from vitfocus.core.tables import ranges
from vitfocus.kernels.statistics.reference import overfocus, received

LEVELS = 63
#: Maps with more entries are made coarser: neighbouring patches are merged.
ENTRIES = 170_000
#: Bytes of maps held at once while they are read.
_AT_ONCE = 1 << 30
#: The layers to include first, as positions between the first layer (0) and the last (1).
_POSITIONS = (1.0, 0.0, 0.5, 0.75, 0.25)
#: The start of the note on layers and heads that did not fit.
LEFT_OUT = "left out to keep the page small"
#: This many layers and heads of each model have priority over another image.
_PRIORITY = 6


@dataclass
class Reader:
    """A model and its layers that can be explored; the others are kept by kind of attention."""

    name: str
    model: nn.Module

    def __post_init__(self) -> None:
        body = anatomy(self.model)
        self.size: Size = (0, 0)  # of the images given to the model, known after the first
        self._build_size = body.build_size
        self.depth = len(body)
        self.blocks: list[Block] = []
        self.others: dict[str, list[int]] = {}
        for block in body:
            if can_be_read(block) and block.mixes_tokens_by_attention and block.window is None:
                self.blocks.append(block)
            else:
                self.others.setdefault(block.attention_kind, []).append(block.depth)
        if not self.blocks:
            kinds = ", ".join(sorted(self.others))
            raise VitfocusError(
                f"{self.name} has no layer in which tokens attend to the whole image (its layers: {kinds}), so there "
                f"is nothing to explore."
            )

    def maps(self, image: Tensor, blocks: Sequence[Block]) -> list[Tensor]:
        """One image's maps (heads, queries, keys) of some layers."""
        batch = self._sized(image[None])
        layers = [block.name for block in blocks]
        try:
            return [maps[0] for maps in attention_maps(self.model, batch, layers, limit=_AT_ONCE)]
        except VitfocusError:
            if len(layers) == 1:
                raise
            return [attention_maps(self.model, batch, [layer], limit=1 << 33)[0][0] for layer in layers]

    def _sized(self, batch: Tensor) -> Tensor:
        """The image as it is if the model takes that size, else resized to the size the model was built for."""
        if not any(self.size):
            self.size = (int(batch.shape[-2]), int(batch.shape[-1]))
            try:
                attention_maps(self.model, batch, [self.blocks[0].name], queries=0)
            except VitfocusError:
                if self.size == self._build_size:
                    raise
                self.size = self._build_size
        if tuple(batch.shape[-2:]) == self.size:
            return batch
        resized = F.interpolate(batch.float(), size=self.size, mode="bicubic", antialias=True)
        return resized.round().clamp(0, 255).to(torch.uint8)

    def notes(self) -> list[str]:
        """Which layers cannot be explored, and why."""
        reasons = {
            "window": "attend within windows",
            "grid": "attend within a grid of windows",
            "class": "attend from the class token only",
            "channel": "attend between channels, not tokens",
            "outlook": "use outlook attention, which has no map of tokens",
            "none": "have no attention",
        }
        return [
            f"{self.name}: layers {', '.join(ranges(depths))} "
            f"{reasons.get(kind, 'have no map that can be shown')}, so they are not shown."
            for kind, depths in self.others.items()
        ]


Unit = tuple[int, bool]  # index of an explorable layer; True for each head, False for their mean


def choose_maps(
    readers: Sequence[Reader], conditions: Sequence[Tensor], budget: int
) -> tuple[dict[str, set[Unit]], int, list[str]]:
    """Which layers and heads of each model to include, for how many images, and notes on what is left out."""
    notes = [sentence for reader in readers for sentence in reader.notes()]
    costs: dict[str, list[tuple[int, int]]] = {}
    for reader in readers:
        found = []
        for block, maps in zip(reader.blocks, reader.maps(conditions[0][0], reader.blocks), strict=True):
            if grids_of(block, reader.size, maps) is None:
                found.append((0, 0))
                notes.append(f"{reader.name}: layer {block.depth} has tokens outside a grid, so it is not shown.")
                continue
            mean, heads = encode(block, reader.size, maps, False), encode(block, reader.size, maps, True)
            found.append((len(mean["d"]) * len(conditions), len(heads["d"]) * len(conditions)))
        costs[reader.name] = found
    ranked = _by_priority(costs)
    core = sum(_cost(costs[name], set(units[:_PRIORITY])) for name, units in ranked)
    # Other images may compress a little worse than the first, from which sizes are estimated.
    room = budget / 1.1
    count = max(1, min(len(conditions[0]), int(room // max(core, 1))))
    chosen: dict[str, set[Unit]] = {reader.name: set() for reader in readers}
    total = 0
    for rank in range(max(len(units) for _, units in ranked)):
        for name, units in ranked:
            if rank >= len(units):
                continue
            more = _cost(costs[name], chosen[name] | {units[rank]}) - _cost(costs[name], chosen[name])
            if total + count * more <= room or not chosen[name]:
                chosen[name].add(units[rank])
                total += count * more
    for reader in readers:
        notes += _left_out(reader, chosen[reader.name], costs[reader.name])
    return chosen, count, notes


def _by_priority(costs: Mapping[str, Sequence[tuple[int, int]]]) -> list[tuple[str, list[Unit]]]:
    """Each model's units, most useful first: last, first and middle as means, heads of the last, then the rest."""
    ranked = []
    for name, layers in costs.items():
        usable = [index for index, (cost, _) in enumerate(layers) if cost]
        if not usable:
            raise VitfocusError(f"No layer of {name} has its tokens on a grid, so there is nothing to explore.")
        places = list(dict.fromkeys(usable[round(place * (len(usable) - 1))] for place in _POSITIONS))
        rest = [index for index in reversed(usable) if index not in places]
        units: list[Unit] = [(index, False) for index in places[:3]] + [(places[0], True)]
        units += [(index, False) for index in places[3:]] + [(index, True) for index in places[1:]]
        units += [(index, False) for index in rest] + [(index, True) for index in rest]
        ranked.append((name, units))
    return ranked


def _cost(layers: Sequence[tuple[int, int]], units: set[Unit]) -> int:
    """Bytes of these units; heads replace their mean, which the page computes from them."""
    return sum(layers[i][1] if (i, True) in units else layers[i][0] for i in {index for index, _ in units})


def _left_out(reader: Reader, units: set[Unit], costs: Sequence[tuple[int, int]]) -> list[str]:
    kept = {index for index, _ in units}
    absent = [b.depth for i, b in enumerate(reader.blocks) if i not in kept and costs[i][0]]
    averaged = [reader.blocks[i].depth for i in sorted(kept) if (i, True) not in units]
    said = []
    if absent:
        said.append(_layers(absent))
    if averaged:
        said.append(f"single heads of {_layers(averaged)}")
    return [f"{reader.name}: {LEFT_OUT}: {' and '.join(said)}."] if said else []


def _layers(depths: Sequence[int]) -> str:
    return f"layer{'s' if len(depths) > 1 else ''} {', '.join(ranges(depths))}"


def grids_of(block: Block, size: Size, maps: Tensor) -> tuple[Size, Size] | None:
    """The grids of queries and keys, if the map has exactly those tokens."""
    queries, keys = block.attention_grids(size)
    expected = tuple(block.prefix_tokens + rows * columns for rows, columns in (queries, keys))
    return (queries, keys) if tuple(maps.shape[1:]) == expected else None


def coarse_grids(block: Block, size: Size, maps: Tensor) -> tuple[Any, Any, tuple[int, int]]:
    """The grids of queries and keys after merging patches, and how many per side were merged."""
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


def encode(block: Block, size: Size, maps: Tensor, each: bool) -> dict[str, Any]:
    """Maps (heads, queries, keys) as the page reads them: every head with `each`, else only their mean."""
    average = maps.mean(dim=0)
    shares = [float(overfocus(received(average)))]
    if each:
        shares += [float(share) for share in overfocus(received(maps))]
    _, _, group = coarse_grids(block, size, maps)
    found = grids_of(block, size, maps)
    assert found is not None
    kept = maps if each else average[None]
    kept = _merge(kept, 2, found[1], block.prefix_tokens, group[1], mean=False)
    kept = _merge(kept, 1, found[0], block.prefix_tokens, group[0], mean=True)
    content, tops = b"", []
    for one in kept:
        levels, top = quantise(one)
        content += levels.T.tobytes()  # columns are similar where attention overfocuses, so they compress better
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


def _merge(maps: Tensor, dim: int, grid: tuple[int, int], prefix: int, group: int, mean: bool) -> Tensor:
    """Merge `group` by `group` neighbouring tokens along a dimension: summed, or averaged."""
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


def data_url(image: Tensor) -> str:
    """An image as a data URL: PNG if it is tiny, else JPEG."""
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((320, 320))
    buffer = io.BytesIO()
    small = max(picture.size) <= 64
    picture.save(buffer, **({"format": "PNG"} if small else {"format": "JPEG", "quality": 82}))
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
