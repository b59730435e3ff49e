"""Which layers and heads the explorer shows, so that the page stays small; what is left out is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfocus.anatomy import Block, anatomy
from vitfocus.anatomy.block import Size
from vitfocus.attention.maps import attention_maps
from vitfocus.attention.session import can_be_read
from vitfocus.core.errors import VitfocusError
from vitfocus.report.explorer.packing import grids_of, pack

#: Bytes of maps that may be held at once while they are read.
_AT_ONCE = 1 << 30
#: Where to look first: places between the first layer (0) and the last (1).
_PLACES = (1.0, 0.0, 0.5, 0.75, 0.25)
#: What is said of layers and heads for which there was no room.
LEFT_OUT = "left out to keep the page small"
#: So many of a model's wishes are worth more than another image.
_CORE = 6


@dataclass
class Reader:
    """A model and those of its layers that can be explored, with what is to be said of the others."""

    name: str
    model: nn.Module

    def __post_init__(self) -> None:
        body = anatomy(self.model)
        self.size: Size = (0, 0)  # of the images as the model gets them, known when the first has come
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
        """The image as it is if the model takes that size, else at the size the model was built for."""
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

    def said(self) -> list[str]:
        """Which layers cannot be explored, and why."""
        reasons = {
            "window": "attend within windows",
            "grid": "attend within a grid of windows",
            "class": "attend from the class token alone",
            "channel": "attend between channels, not tokens",
            "outlook": "use outlook attention, which has no map of tokens",
            "none": "have no attention",
        }
        return [
            f"{self.name}: layers {_ranges(depths)} {reasons.get(kind, 'have no map that can be seen')}, so they are "
            f"not shown."
            for kind, depths in self.others.items()
        ]


Unit = tuple[int, bool]  # a layer's number among those that can be explored; True for its heads, False for their mean


def plan(
    readers: Sequence[Reader], conditions: Sequence[Tensor], budget: int
) -> tuple[dict[str, set[Unit]], int, list[str]]:
    """Which layers and heads to keep of each model, for how many images, and what is left out."""
    notes = [sentence for reader in readers for sentence in reader.said()]
    costs: dict[str, list[tuple[int, int]]] = {}
    for reader in readers:
        found = []
        for block, maps in zip(reader.blocks, reader.maps(conditions[0][0], reader.blocks), strict=True):
            if grids_of(block, reader.size, maps) is None:
                found.append((0, 0))
                notes.append(f"{reader.name}: layer {block.depth} has tokens that lie on no grid, so it is not shown.")
                continue
            mean, heads = pack(block, reader.size, maps, False), pack(block, reader.size, maps, True)
            found.append((len(mean["d"]) * len(conditions), len(heads["d"]) * len(conditions)))
        costs[reader.name] = found
    wishes = _wishes(costs)
    core = sum(_cost(costs[name], set(units[:_CORE])) for name, units in wishes)
    # Other images may pack a little worse than the first, by which all are judged.
    room = budget / 1.1
    count = max(1, min(len(conditions[0]), int(room // max(core, 1))))
    chosen: dict[str, set[Unit]] = {reader.name: set() for reader in readers}
    total = 0
    for rank in range(max(len(units) for _, units in wishes)):
        for name, units in wishes:
            if rank >= len(units):
                continue
            more = _cost(costs[name], chosen[name] | {units[rank]}) - _cost(costs[name], chosen[name])
            if total + count * more <= room or not chosen[name]:
                chosen[name].add(units[rank])
                total += count * more
    for reader in readers:
        notes += _left_out(reader, chosen[reader.name], costs[reader.name])
    return chosen, count, notes


def _wishes(costs: Mapping[str, Sequence[tuple[int, int]]]) -> list[tuple[str, list[Unit]]]:
    """Each model's units, the most telling first: ends and middle as means, heads of the last layer, then the rest."""
    wishes = []
    for name, layers in costs.items():
        usable = [index for index, (cost, _) in enumerate(layers) if cost]
        if not usable:
            raise VitfocusError(f"No layer of {name} has its tokens on a grid, so there is nothing to explore.")
        places = list(dict.fromkeys(usable[round(place * (len(usable) - 1))] for place in _PLACES))
        rest = [index for index in reversed(usable) if index not in places]
        units: list[Unit] = [(index, False) for index in places[:3]] + [(places[0], True)]
        units += [(index, False) for index in places[3:]] + [(index, True) for index in places[1:]]
        units += [(index, False) for index in rest] + [(index, True) for index in rest]
        wishes.append((name, units))
    return wishes


def _cost(layers: Sequence[tuple[int, int]], units: set[Unit]) -> int:
    """Bytes of these units: heads take the place of their mean, which the page works out from them."""
    return sum(layers[i][1] if (i, True) in units else layers[i][0] for i in {index for index, _ in units})


def _left_out(reader: Reader, units: set[Unit], costs: Sequence[tuple[int, int]]) -> list[str]:
    kept = {index for index, _ in units}
    absent = [b.depth for i, b in enumerate(reader.blocks) if i not in kept and costs[i][0]]
    blurred = [reader.blocks[i].depth for i in sorted(kept) if (i, True) not in units]
    said = []
    if absent:
        said.append(_layers(absent))
    if blurred:
        said.append(f"the single heads of {_layers(blurred)}")
    return [f"{reader.name}: {LEFT_OUT}: {' and '.join(said)}."] if said else []


def _layers(depths: Sequence[int]) -> str:
    return f"layer{'s' if len(depths) > 1 else ''} {_ranges(depths)}"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in few words.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
