"""The data of the explorer and the live page: maps, readings and predictions of a model for one image.

`Reader` runs a model and keeps the observed attention of every layer, in memory linear in the number of tokens. A map
is computed when it is requested (`Reader.pack`), and stored in 64 levels, by columns, compressed. Large maps are made
coarser.
"""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfocus.anatomy import Block, anatomy, unwrap
from vitfocus.anatomy.block import Size
from vitfocus.attention.batches import ImageBatch
from vitfocus.attention.capture import WITHOUT_TOKEN_MAP, can_be_read, reading
from vitfocus.attention.layer_readings import geometry_of, rows_by_head
from vitfocus.attention.readings import READINGS, cell, high_norm
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import logits_of
from vitfocus.core.records import Count
from vitfocus.core.tables import ranges
from vitfocus.data.image_files import to_image
from vitfocus.kernels.attention import Observation
from vitfocus.treatments.save_load import task_of

LEVELS = 63
#: Maps with more entries are made coarser: neighbouring patches are merged.
ENTRIES = 170_000
#: The readings shown beside a map, as the table of a diagnosis names and formats them.
SHOWN = (
    "entropy", "entropy_bound", "entropy_cls", "distance", "overfocus", "effective_tokens", "head_similarity",
    "diversity_official", "stability", "high_norm",
)  # fmt: skip
#: The number of predicted classes that are listed.
_TOP_CLASSES = 5


class View(TypedDict):
    """One layer's maps of one view of an image.

    Attributes:
        d: levels of all heads, column by column, deflated, as base64.
        m: the value of the highest level of each head.
        r: the readings as text, of all heads together and then of each head.
        k: centres (x, y) of the high-norm patch tokens at the layer's output, as shares of the image.
    """

    d: str
    m: list[float]
    r: list[dict[str, str]]
    k: NotRequired[list[tuple[float, float]]]


Layer = TypedDict(
    "Layer",
    {
        "name": str,
        "depth": Count,
        "prefix": Count,
        "heads": Count,
        "class": bool,
        "queries": tuple[Count, Count],
        "keys": tuple[Count, Count],
        "group": tuple[Count, Count],
    },
)
#: The likeliest classes of a view: name and probability.
Prediction = list[tuple[str, float]]


@dataclass(frozen=True)
class ObservedImage:
    """What a model did with one image: per layer, its attention, and the positions and share of high-norm tokens.

    `size` is that of the image at the stem.
    """

    attention: dict[str, Observation]
    high_norm: dict[str, list[tuple[float, float]]]
    high_norm_shares: dict[str, float]
    size: Size
    prediction: Prediction


class Reader:
    """A model and the layers that can be explored; `others` are the depths of the remaining ones, by kind."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model
        self.body = anatomy(model)
        self.size: Size = (0, 0)  # of the images given to the model, known after the first
        self.blocks: list[Block] = []
        self.others: dict[str, list[int]] = {}
        self.heads: dict[str, int] = {}
        self._classes: Sequence[str] | None = None
        for block in self.body:
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

    def observe(self, image: Tensor) -> ObservedImage:
        """Run the model on one uint8 image (3, H, W), which is resized if the model requires its own size."""
        batch = image[None]
        if not any(self.size):
            self.size = (int(batch.shape[-2]), int(batch.shape[-1]))
            try:
                self._run(batch)
            except VitfocusError:
                if self.size == self.body.build_size:
                    raise
                self.size = self.body.build_size
        if tuple(batch.shape[-2:]) != self.size:
            resized = F.interpolate(batch.float(), size=self.size, mode="bicubic", antialias=True)
            batch = resized.round().clamp(0, 255).to(torch.uint8)
        return self._run(batch)

    def _run(self, batch: Tensor) -> ObservedImage:
        seen: dict[str, Observation] = {}
        places: dict[str, list[tuple[float, float]]] = {}
        shares: dict[str, float] = {}

        def keep(block: Block, one: Observation, _: Size) -> None:
            seen[block.name] = one

        def keep_norms(block: Block, norms: Tensor) -> None:
            _, rows, columns = norms.shape
            found = high_norm(norms.flatten(1))[0].nonzero().flatten().tolist()
            shares[block.name] = len(found) / (rows * columns)
            places[block.name] = [
                (round((place % columns + 0.5) / columns, 4), round((place // columns + 0.5) / rows, 4))
                for place in found
            ]

        with reading(self.model, self.body, self.blocks, keep, norms=keep_norms, outputs=self.blocks) as session:
            output = session.run(ImageBatch(batch))
        self._keep_placed(seen, session.size)
        return ObservedImage(seen, places, shares, session.size, self._predict(output))

    def _keep_placed(self, seen: dict[str, Observation], size: Size) -> None:
        """Drop layers whose tokens do not form a grid."""
        placed = [block for block in self.blocks if grids_of(block, size, seen[block.name].shape) is not None]
        if not placed:
            raise VitfocusError(f"No layer of {self.name} has its tokens on a grid, so there is nothing to explore.")
        lost = [block.depth for block in self.blocks if block not in placed]
        if lost:
            self.others["off grid"] = lost
        self.blocks = placed
        self.heads = {block.name: seen[block.name].shape[1] for block in placed}

    def _predict(self, output: Any) -> Prediction:
        """The likeliest classes, if the model is a classifier."""
        try:
            logits = logits_of(output)
        except VitfocusError:
            return []
        if logits.ndim != 2 or logits.shape[1] < 2 or getattr(unwrap(self.model), "num_classes", None) == 0:
            return []
        if self._classes is None:
            self._classes = class_names(self.model, logits.shape[1])
        shares, places = logits[0].float().softmax(dim=0).topk(min(_TOP_CLASSES, logits.shape[1]))
        return [
            (self._classes[place], float(f"{share:.4g}"))
            for share, place in zip(shares.tolist(), places.tolist(), strict=True)
        ]

    def layers(self, entries: int = ENTRIES) -> list[Layer]:
        """What the front end needs to know about each layer; available after the first `observe`."""
        return [self._layer(block, entries) for block in self.blocks]

    def _layer(self, block: Block, entries: int) -> Layer:
        queries, keys, group = coarse_grids(block, self.size, entries)
        return {
            "name": block.name, "depth": block.depth, "prefix": block.prefix_tokens, "class": block.class_token,
            "heads": self.heads[block.name], "queries": queries, "keys": keys, "group": group,
        }  # fmt: skip

    def pack(
        self, block: Block, observed: Sequence[ObservedImage], entries: int = ENTRIES, effort: int = 6
    ) -> list[View]:
        """One layer's maps and readings for each view of an image, the clean one first."""
        return [
            self._view(block, one, observed[0] if index else None, entries, effort)
            for index, one in enumerate(observed)
        ]

    def _view(self, block: Block, image: ObservedImage, clean: ObservedImage | None, entries: int, effort: int) -> View:
        seen = image.attention[block.name]
        other = clean.attention[block.name] if clean is not None else None
        rows = rows_by_head(seen, other, geometry_of(block, seen, image.size), block.mixes_tokens_by_attention)
        if block.name in image.high_norm_shares:  # of the block's output, which its heads share
            rows[0]["high_norm"] = image.high_norm_shares[block.name]
        levels, tops = encode(block, image.size, seen.attention()[0].float().cpu(), entries)
        view: View = {
            "d": base64.b64encode(zlib.compress(levels, effort)).decode(),
            "m": tops,
            "r": [{key: cell(row, key) for key in SHOWN if key in row} for row in rows],
        }
        return {**view, "k": places} if (places := image.high_norm.get(block.name)) else view

    def notes(self) -> list[str]:
        """Which layers cannot be explored, and why."""
        kinds = WITHOUT_TOKEN_MAP | {
            "window": "attention within windows",
            "grid": "attention within a grid of windows",
            "class": "attention from the class token only",
            "off grid": "tokens outside a grid",
        }
        return [
            f"{self.name}: layers {', '.join(ranges(depths))} have {kinds.get(kind, 'no map that can be shown')}, "
            "so they are not shown."
            for kind, depths in self.others.items()
        ]


def class_names(model: nn.Module, count: int) -> list[str]:
    """The names of a classifier's outputs: its task's, its configuration's, ImageNet's if there are 1000; else numbers.

    >>> import timm
    >>> class_names(timm.create_model("vit_tiny_patch16_224", depth=1), 1000)[281]
    'tabby'
    """
    names: Sequence[Any] = task_of(model).get("classes") or []
    labels: Any = getattr(getattr(unwrap(model), "config", None), "id2label", None)
    if len(names) != count and isinstance(labels, dict) and len(labels) == count:
        names = [labels.get(index, labels.get(str(index), f"class {index}")) for index in range(count)]
        names = [] if str(names[0]).upper() == "LABEL_0" else names
    if len(names) == count:
        return [str(name).replace("_", " ") for name in names]
    if count == 1000:
        from timm.data import ImageNetInfo

        info = ImageNetInfo("imagenet-1k")
        return [info.index_to_description(index).partition(",")[0] for index in range(count)]
    return [f"class {index}" for index in range(count)]


def headings() -> dict[str, tuple[str, str]]:
    """The heading of each reading that is shown, as in the table of a diagnosis, and what it means."""
    return {
        key: (READINGS[key].heading, chart.meaning if (chart := READINGS[key].chart) is not None else "")
        for key in SHOWN
    }


def grids_of(block: Block, size: Size, shape: Sequence[int]) -> tuple[Size, Size] | None:
    """The grids of queries and keys, if a map of this shape has exactly those tokens."""
    queries, keys = block.attention_grids(size)
    expected = tuple(block.prefix_tokens + rows * columns for rows, columns in (queries, keys))
    return (queries, keys) if tuple(shape[-2:]) == expected else None


def coarse_grids(block: Block, size: Size, entries: int) -> tuple[Size, Size, tuple[int, int]]:
    """The grids of queries and keys after merging patches, and how many per side were merged."""
    queries, keys = block.attention_grids(size)
    group = [1, 1]
    while _tokens(queries, group[0]) * _tokens(keys, group[1]) > entries and max(*queries, *keys) > max(group):
        group[0 if _tokens(queries, group[0]) >= _tokens(keys, group[1]) else 1] *= 2
    small = [(-(-grid[0] // g), -(-grid[1] // g)) for grid, g in zip((queries, keys), group, strict=True)]
    return small[0], small[1], (group[0], group[1])


def _tokens(grid: tuple[int, int], group: int) -> int:
    return -(-grid[0] // group) * -(-grid[1] // group)


def encode(block: Block, size: Size, maps: Tensor, entries: int = ENTRIES) -> tuple[bytes, list[float]]:
    """Maps (heads, queries, keys) as levels, and the value of the highest level of each head."""
    queries, keys = block.attention_grids(size)
    _, _, group = coarse_grids(block, size, entries)
    kept = _merge(maps, 2, keys, block.prefix_tokens, group[1], mean=False)
    kept = _merge(kept, 1, queries, block.prefix_tokens, group[0], mean=True)
    content, tops = [], []
    for one in kept:
        levels, top = quantise(one)
        content.append(levels.T.tobytes())  # columns are similar where attention overfocuses: they compress better
        tops.append(float(f"{top:.5g}"))
    return b"".join(content), tops


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


def data_url(image: Tensor, most: int = 448) -> str:
    """An image as a data URL: PNG if it is tiny, else JPEG."""
    picture = to_image(image)
    picture.thumbnail((most, most))
    buffer = io.BytesIO()
    small = max(picture.size) <= 64
    picture.save(buffer, **({"format": "PNG"} if small else {"format": "JPEG", "quality": 85}))
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
