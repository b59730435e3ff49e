"""Every reading of one attention, with memory linear in the number of tokens: by kernels on a GPU, else by tiles.

In the tile pass maps are made a tile at a time, of as many images and query rows as fit the cache; every reading takes
what it needs from the tile before the next one is made. On a GPU, kernels go through the tiles of queries and keys and
the readings take finished sums. Nothing of the size of a whole map exists unless the model itself made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from vitfocus.anatomy.block import Block, Size
from vitfocus.attention.distance import DistanceReading
from vitfocus.attention.entropy import EntropyReading
from vitfocus.attention.head_similarity import HeadReading
from vitfocus.attention.observation import Observation
from vitfocus.attention.overfocus import FocusReading, top_tokens
from vitfocus.attention.reading import Geometry, Later, Number, Reading, Tile, Totals, arrived
from vitfocus.attention.row_diversity import THRESHOLD, DiversityReading
from vitfocus.attention.softmax_gradient import GradientReading
from vitfocus.attention.stability import StabilityReading
from vitfocus.kernels.statistics.op import Grids, backend_for, pair_products, statistics

#: Numbers in a tile, on the CPU from the least to the most: what the caches hold. A GPU wants more to be busy.
CPU_TILES, GPU_TILE = (1 << 17, 1 << 20), 1 << 22


def tiles(seen: Observation, budget: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Cut B images and Q rows into pieces of at most `budget` numbers (one row of one image at least).

    >>> seen = Observation(map=torch.full((2, 3, 4, 4), 0.25))
    >>> [(images.start, rows.start, rows.stop) for images, rows in tiles(seen, budget=36)]
    [(0, 0, 3), (0, 3, 4), (1, 0, 3), (1, 3, 4)]
    """
    images, heads, queries, keys = seen.shape
    budget = budget or _budget(seen)
    rows_at_once = min(queries, max(1, budget // (heads * keys)))
    images_at_once = max(1, budget // (heads * keys * queries))
    for image in range(0, images, images_at_once):
        for row in range(0, queries, rows_at_once):
            yield slice(image, min(image + images_at_once, images)), slice(row, min(row + rows_at_once, queries))


def part(seen: Observation, images: slice = slice(None), heads: slice | Tensor = slice(None)) -> Observation:
    """The same attention of some of the images and heads."""
    cut = _views(seen, images, heads)
    # Made contiguous once here, a key matrix is not copied again by every tile's product.
    return cut if cut.key is None else replace(cut, key=cut.key.contiguous())


def _views(seen: Observation, images: slice, heads: slice | Tensor = slice(None)) -> Observation:
    """The same as `part`, in the same memory."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor if tensor.shape[0] == 1 and seen.shape[0] > 1 else tensor[images]
        return tensor if tensor.shape[1] == 1 and seen.shape[1] > 1 else tensor[:, heads]

    return Observation(
        query=cut(seen.query),
        key=cut(seen.key),
        scale=seen.scale,
        bias=cut(seen.bias),
        lse=cut(seen.lse),
        logits=cut(seen.logits),
        map=cut(seen.map),
    )


def attention_and_entropy(seen: Observation, rows: slice) -> tuple[Tensor, Tensor]:
    """Those rows of the map, and their entropies: (B, H, T, K) and (B, H, T), from the logits in one go."""
    if seen.map is not None:
        attention = seen.attention(rows)
        log = attention.clamp_min(torch.finfo(attention.dtype).tiny).log()
    else:
        scores = seen.scores(rows)
        log = scores.log_softmax(dim=-1)
        # Scores made here give their memory to the map; logits are the model's own.
        attention = torch.exp(log, out=scores if seen.query is not None else None)
        # A masked entry is 0 with the logarithm -inf: the least finite number makes their product 0 log 0 = 0.
        log.clamp_(min=torch.finfo(log.dtype).min)
    return attention, log.mul_(attention).sum(dim=-1).neg_()


class LayerStream:
    """Every reading of one layer, over any number of batches.

    >>> from vitfocus.attention.reading import Geometry
    >>> stream = LayerStream(token_attention=True)
    >>> square = Geometry(4, 4, query_grid=(2, 2), key_grid=(2, 2))
    >>> stream.observe(Observation(map=torch.full((1, 2, 4, 4), 0.25)), square)
    >>> row = stream.row()
    >>> round(row["entropy"], 4), row["distance"], round(row["effective_tokens"], 4)
    (1.3863, 1.0, 4.0)
    """

    def __init__(self, token_attention: bool, against: bool = False, budget: int | None = None) -> None:
        self.readings: list[Reading] = [EntropyReading(), GradientReading(), FocusReading(), HeadReading()]
        if token_attention:
            self.readings += [DistanceReading(), DiversityReading()]
        self.stability = StabilityReading() if against else None
        if self.stability is not None:
            self.readings.append(self.stability)
        self.totals = Totals()
        self.budget = budget
        self.maps = 0

    def observe(self, seen: Observation, geometry: Geometry) -> None:
        """Read one attention; with `against`, its second half is the first half's images corrupted."""
        seen = seen.detach() if torch.is_grad_enabled() else seen
        other = None
        if self.stability is not None:
            half = seen.shape[0] // 2
            seen, other = _views(seen, slice(0, half)), _views(seen, slice(half, 2 * half))
        self.maps += seen.shape[0]
        if _by_kernels(seen):
            self._observe_by_kernels(seen, other, geometry)
        else:
            self._observe_by_tiles(seen, other, geometry)

    def row(self) -> dict[str, float]:
        """The layer's numbers."""
        return rows([self])[0]

    def numbers(self) -> dict[str, Number]:
        """The same, where they are: on a GPU nobody waits for them."""
        if self.totals.sums is not None:
            for reading in self.readings:
                reading.fill(self.totals.numbers)
        return {key: value for reading in self.readings for key, value in reading.row().items()}

    def _observe_by_kernels(self, seen: Observation, other: Observation | None, geometry: Geometry) -> None:
        assert seen.query is not None and seen.key is not None
        grids = None
        if geometry.placed:
            assert geometry.query_grid is not None and geometry.key_grid is not None
            grids = Grids(geometry.query_grid, geometry.key_grid, geometry.prefix_tokens)
        query, key, scale, bias = seen.query, seen.key, seen.scale, seen.bias
        top = top_tokens(geometry.keys)
        made = statistics(query, key, scale=scale, bias=bias, grids=grids, threshold=THRESHOLD, top=top, lse=seen.lse)
        products = None
        if other is not None:
            assert other.query is not None and other.key is not None
            others = (other.query, other.key, other.bias, other.lse)
            products = pair_products((query, key, bias, seen.lse), others, scale=scale)
        self.totals.add(made.numbers)
        images, heads, _, _ = seen.shape
        for reading in self.readings:
            reading.begin(images, heads, geometry)
            reading.look(made, products)

    def _observe_by_tiles(self, seen: Observation, other: Observation | None, geometry: Geometry) -> None:
        begun: slice | None = None
        for images, rows in tiles(seen, self.budget):
            if images != begun:
                self._end(begun)
                begun, piece = images, part(seen, images)
                other_piece = part(other, images) if other is not None else None
                like = torch.empty(0, device=_any_tensor(seen).device, dtype=_wide_dtype(seen))
                for reading in self.readings:
                    reading.begin(images.stop - images.start, seen.shape[1], geometry)
                    reading.make_room(like)
            attention, entropy = attention_and_entropy(piece, rows)
            corrupted = other_piece.attention(rows) if other_piece is not None else None
            tile = Tile(attention, entropy, rows, corrupted)
            for reading in self.readings:
                reading.add(tile)
        self._end(begun)

    def _end(self, begun: slice | None) -> None:
        for reading in self.readings if begun is not None else ():
            reading.end()


def rows(streams: Iterable[LayerStream]) -> list[dict[str, float]]:
    """The numbers of several layers, brought over from a GPU all at once."""
    found = [stream.numbers() for stream in streams]
    values = iter(arrived([value for row in found for value in row.values() if isinstance(value, Later)]))
    return [{key: next(values) if isinstance(value, Later) else value for key, value in row.items()} for row in found]


def _by_kernels(seen: Observation) -> bool:
    """Whether the sums come from queries and keys at once: on a GPU, or where the reference is asked for."""
    if seen.query is None or seen.key is None:
        return False
    return backend_for(seen.query, seen.key, seen.bias) != "chunked"


def geometry_of(block: Block, seen: Observation, size: Size, text_tokens: int = 0) -> Geometry:
    """What lies behind an observed map of that block, for images of that size behind so many tokens of text."""
    query_grid, key_grid = block.attention_grids(size)
    _, _, queries, keys = seen.shape
    return Geometry(queries, keys, block.prefix_tokens + text_tokens, block.class_token, query_grid, key_grid)


def _budget(seen: Observation) -> int:
    """Numbers in a tile: as many as the queries have, so that the pass adds little to what the model itself takes."""
    if _any_tensor(seen).device.type != "cpu":
        return GPU_TILE
    least, most = CPU_TILES
    return most if seen.query is None else min(max(seen.query.numel(), least), most)


def _any_tensor(seen: Observation) -> Tensor:
    for tensor in (seen.query, seen.logits, seen.map):
        if tensor is not None:
            return tensor
    raise ValueError("An observation without a tensor.")


def _wide_dtype(seen: Observation) -> torch.dtype:
    dtype = _any_tensor(seen).dtype
    return dtype if dtype == torch.float64 else torch.float32
