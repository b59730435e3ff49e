"""Every reading of one layer, summed over any number of batches, with memory linear in the number of tokens.

The statistics of each batch (`vitfocus.kernels.statistics`) are added up where they are, on the CPU or a GPU, those of
all layers together at the end of the batch. They are copied to the host once, when the last batch has been read.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitfocus.anatomy.block import Block, Size
from vitfocus.attention.readings import READINGS, median_and_outliers
from vitfocus.core.environment import float64_capable
from vitfocus.kernels.attention import Observation
from vitfocus.kernels.statistics.chunked import row_sums
from vitfocus.kernels.statistics.op import Histogram, statistics
from vitfocus.kernels.statistics.reference import Grids, Numbers, Statistics


@dataclass(frozen=True)
class Geometry:
    """What the rows and columns of a map stand for.

    The first `prefix_tokens` of queries and keys lie on no grid, the rest on the grids, row by row; a grid is None
    where the tokens fit none (text, for instance). `class_token` says whether query 0 is the class token.
    """

    queries: int
    keys: int
    prefix_tokens: int = 0
    class_token: bool = False
    query_grid: Size | None = None
    key_grid: Size | None = None

    @property
    def grids(self) -> Grids | None:
        """The grids, if every token but the prefix has a position in the image."""
        if self.query_grid is None or self.key_grid is None:
            return None
        fits = math.prod(self.query_grid) == self.queries - self.prefix_tokens
        fits = fits and math.prod(self.key_grid) == self.keys - self.prefix_tokens
        return Grids(self.query_grid, self.key_grid, self.prefix_tokens) if fits else None


def geometry_of(block: Block, seen: Observation, size: Size, text_tokens: int = 0) -> Geometry:
    """The geometry of an observed map of a block, for images of this size after so many tokens of text."""
    query_grid, key_grid = block.attention_grids(size)
    _, _, queries, keys = seen.shape
    return Geometry(queries, keys, block.prefix_tokens + text_tokens, block.class_token, query_grid, key_grid)


class LayerReadings:
    """Every reading of one layer.

    Args:
        token_attention: whether tokens attend to tokens; if only the class token attends, distance and row similarity
            have no meaning.
        against: whether the second half of each batch holds the images of the first half, corrupted.
        budget: the numbers in a tile, where the statistics are computed in tiles.

    Example:
        >>> layer = LayerReadings(token_attention=True)
        >>> square = Geometry(4, 4, query_grid=(2, 2), key_grid=(2, 2))
        >>> layer.observe(Observation(map=torch.full((1, 2, 4, 4), 0.25)), square)
        >>> (row,) = layer_rows([layer])
        >>> round(row["entropy"], 4), row["distance"], round(row["effective_tokens"], 4)
        (1.3863, 1.0, 4.0)
    """

    def __init__(self, token_attention: bool, against: bool = False, budget: int | None = None) -> None:
        self.token_attention, self.against, self.budget = token_attention, against, budget
        self.rows = {key: reading.rows for key, reading in READINGS.items() if reading.rows is not None}
        self.names = [*Numbers._fields, *(["stability"] if against else []), *self.rows]
        self.latest: Tensor | None = None  # not in the sums yet
        self.sums: Tensor | None = None
        self.further_sums: Tensor | None = None  # of `names` after the fields of `Numbers`
        self.bound = 0.0
        self.counts: Counter[str] = Counter()
        self.entropies = Quantiles()
        self.heads = 0

    def observe(self, seen: Observation, geometry: Geometry) -> Tensor | None:
        """Add one batch; with `against`, return the stability (maps, heads) of each clean map."""
        seen, other = seen.detach() if torch.is_grad_enabled() else seen, None
        if self.against:
            half = seen.shape[0] // 2
            seen, other = seen.select(slice(0, half)), seen.select(slice(half, 2 * half))
        grids = geometry.grids if self.token_attention else None
        made = statistics(seen, other, grids=grids, budget=self.budget)
        return self.add(made, seen, geometry)

    def add(self, made: Statistics, seen: Observation, geometry: Geometry) -> Tensor | None:
        """Add the statistics of one batch; return the stability (maps, heads) if they have it."""
        grids, cosines = geometry.grids if self.token_attention else None, None
        self.entropies.add(made.entropy)
        add_up([self])
        self.latest = float64_capable(made.numbers)
        further = []
        if made.products is not None:
            both, clean, corrupted = made.products
            cosines = (both / (clean * corrupted).sqrt_()).clamp_(max=1)
            further.append(float64_capable(cosines).sum(dtype=torch.float64)[None])
        if self.rows:
            extra = row_sums(seen, list(self.rows.values()), self.budget)
            further.append(float64_capable(torch.stack(extra)).double())
        if further:
            added = torch.cat(further)
            self.further_sums = added if self.further_sums is None else self.further_sums.add_(added)
        self._count(seen, geometry, grids)
        return cosines

    def _count(self, seen: Observation, geometry: Geometry, grids: Grids | None) -> None:
        images, self.heads, queries, keys = seen.shape
        maps = images * self.heads
        self.bound += images * queries * math.log(keys)
        self.counts["images"] += images
        self.counts["maps"] += maps
        self.counts["queries"] += images * queries
        self.counts["rows"] += maps * queries
        self.counts["class_token_maps"] += maps * geometry.class_token
        self.counts["placed_images"] += images * (grids is not None)
        self.counts["images_of_many_heads"] += images * (self.heads > 1)
        self.counts["token_images"] += images * self.token_attention
        self.counts["paired_maps"] += maps * self.against

    def totals(self) -> Tensor:
        """What was added up, and two quantiles, in double precision on the layer's device."""
        add_up([self])
        assert self.sums is not None
        further = [] if self.further_sums is None else [self.further_sums]
        return torch.cat([self.sums, *further, self.entropies.quantiles(0.15, 0.85)])

    def row(self, totals: Sequence[float]) -> dict[str, float]:
        """The layer's numbers by key, from `totals` on the host."""
        named = dict(zip([*self.names, "p15", "p85"], totals, strict=True)) | {"bound": self.bound}
        row = {}
        for key, reading in READINGS.items():
            count = self.counts[reading.per] if reading.per else 1
            if count and reading.scale is None and reading.norms is None:
                mean = named[reading.total or key] / count
                row[key] = mean if reading.finish is None else reading.finish(mean, self.heads)
        return row


def add_up(layers: Sequence[LayerReadings]) -> None:
    """Add what each layer observed last to its sums: all layers in a few operations, at the end of a batch.

    One by one they would take the host longer than the GPU.
    """
    alike: dict[tuple[torch.Size, torch.device], list[LayerReadings]] = defaultdict(list)
    for layer in layers:
        if layer.latest is not None:
            alike[layer.latest.shape, layer.latest.device].append(layer)
    for group in alike.values():
        numbers = torch.stack([layer.latest for layer in group if layer.latest is not None])
        sums = [layer.sums for layer in group if layer.sums is not None]
        added = numbers.sum(dim=(2, 3), dtype=torch.float64).unbind()
        if sums:
            torch._foreach_add_(sums, [new for layer, new in zip(group, added, strict=True) if layer.sums is not None])
        for layer, new in zip(group, added, strict=True):
            layer.sums, layer.latest = new if layer.sums is None else layer.sums, None


def layer_rows(layers: Sequence[LayerReadings]) -> list[dict[str, float]]:
    """The rows of several layers, copied to the host at once."""
    if not layers:
        return []
    add_up(layers)
    totals = [layer.totals() for layer in layers]
    values = torch.cat([one.to(totals[0].device) for one in totals]).cpu()
    pieces = values.split([len(one) for one in totals])
    return [layer.row(piece.tolist()) for layer, piece in zip(layers, pieces, strict=True)]


def rows_by_head(
    seen: Observation, other: Observation | None, geometry: Geometry, token_attention: bool
) -> list[dict[str, float]]:
    """The readings of one image's map: of all heads together, then those that a single head has, head by head.

    >>> square = Geometry(4, 4, query_grid=(2, 2), key_grid=(2, 2))
    >>> rows = rows_by_head(Observation(map=torch.full((1, 2, 4, 4), 0.25)), None, square, True)
    >>> [round(row["entropy"], 4) for row in rows], rows[0]["distance"], "distance" in rows[1]
    ([1.3863, 1.3863, 1.3863], 1.0, False)
    """
    layer = LayerReadings(token_attention, other is not None)
    made = statistics(seen, other, grids=geometry.grids if token_attention else None)
    cosines = layer.add(made, seen, geometry)
    (together,) = layer_rows([layer])
    numbers = Numbers(*made.numbers[:, 0].double().cpu())
    queries, bound = geometry.queries, math.log(geometry.keys)
    single = {
        "entropy": numbers.entropy / queries,
        "entropy_bound": torch.full_like(numbers.entropy, bound),
        "overfocus": numbers.top,
        "effective_tokens": numbers.effective,
        "gradient": 1 - numbers.squares / queries,
    }
    if geometry.class_token:
        single["entropy_cls"] = numbers.first
    if cosines is not None:
        single["stability"] = cosines[0].double().cpu()
    return [together, *({key: float(values[h]) for key, values in single.items()} for h in range(layer.heads))]


@dataclass
class NormReadings:
    """The readings of the norms of patch tokens, of every layer.

    `pairs` is 2 if the second half of each batch holds the images of the first half, corrupted, which is left out.
    """

    pairs: int = 1
    images: Counter[int] = field(default_factory=Counter)
    latest: list[tuple[int, Tensor]] = field(default_factory=list)
    #: By depths of blocks and token grid: sums of each reading (readings, blocks), outliers (blocks, rows, columns).
    sums: dict[tuple[tuple[int, ...], torch.Size], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, block: Block, norms: Tensor) -> None:
        """Note the norms (B, rows, columns) at the output of a block."""
        norms = norms[: len(norms) // self.pairs]
        self.images[block.depth] += len(norms)
        self.latest.append((block.depth, norms))

    def add_up(self) -> None:
        """Add what was noted since the last call to the sums, of all blocks in a few operations."""
        alike: dict[tuple[torch.Size, torch.device], list[tuple[int, Tensor]]] = defaultdict(list)
        for depth, norms in self.latest:
            alike[norms.shape, norms.device].append((depth, norms))
        self.latest.clear()
        for (shape, _), group in alike.items():
            norms = torch.cat([one.flatten(1) for _, one in group])
            median, outliers = median_and_outliers(norms)
            made = [one.norms(norms, median, outliers) for one in READINGS.values() if one.norms is not None]
            sums = torch.stack(made).view(len(made), len(group), -1).sum(dim=2)
            places = outliers.view(len(group), *shape).sum(dim=1)
            key = tuple(depth for depth, _ in group), shape[1:]
            if key in self.sums:
                sums, places = sums + self.sums[key][0], places + self.sums[key][1]
            self.sums[key] = sums, places

    def finish(self) -> tuple[dict[int, dict[str, float]], dict[int, list[list[float]]]]:
        """The numbers of each layer; and for those with outliers, the share of images with one at each place."""
        self.add_up()
        rows: dict[int, dict[str, float]] = {}
        found: dict[int, Tensor] = {}
        keys = [key for key, reading in READINGS.items() if reading.norms is not None]
        for (depths, _), (sums, places) in self.sums.items():
            for depth, totals, outliers in zip(depths, sums.mT.tolist(), places.cpu(), strict=True):
                row = rows.setdefault(depth, dict.fromkeys(keys, 0.0))
                for key, total in zip(keys, totals, strict=True):
                    row[key] += total / self.images[depth]
                if depth not in found or found[depth].shape == outliers.shape:  # other images may have another grid
                    found[depth] = found[depth] + outliers if depth in found else outliers
        shares = {depth: (counts / self.images[depth]).tolist() for depth, counts in found.items()}
        return rows, {depth: share for depth, share in shares.items() if rows[depth]["high_norm"] > 0}


class Quantiles:
    """Quantiles of a stream of values: exact up to `exact` values, then from a fine histogram in bounded memory.

    >>> values = Quantiles()
    >>> values.add(torch.tensor([3.0, 1.0])); values.add(torch.tensor([2.0]))
    >>> values.quantiles(0.5, 0.75).tolist()
    [2.0, 2.5]
    """

    #: Entropies lie in [0, log K], up to rounding; 15 nats cover three million keys, in steps of 6e-5.
    LOW, HIGH, BINS = -1.0, 15.0, 1 << 18

    def __init__(self, exact: int = 1 << 19) -> None:
        self.exact = exact
        self.parts: list[Tensor] = []
        self.count = 0
        self.histogram: Histogram | None = None

    def add(self, values: Tensor) -> None:
        """Add every value of a tensor."""
        self.count += values.numel()
        values = float64_capable(values).float().flatten()
        self.parts.append(values)
        if self.count > self.exact:
            if self.histogram is None:
                self.histogram = Histogram(self.LOW, self.HIGH, self.BINS, values.device)
            for part in self.parts:
                self.histogram.add(part)
            self.parts = []

    def quantiles(self, *probabilities: float) -> Tensor:
        """Quantiles with linear interpolation, in double precision, on the values' device."""
        if self.histogram is not None:
            return self._from_histogram(self.histogram.counts(), probabilities)
        # torch.quantile would wait for the GPU, and takes at most 2²⁴ values.
        ordered = torch.cat(self.parts).sort().values.double()
        found = []
        for probability in probabilities:
            place = probability * (len(ordered) - 1)
            low, high = int(place), min(int(place) + 1, len(ordered) - 1)
            found.append(torch.lerp(ordered[low], ordered[high], place - low))
        return torch.stack(found)

    def _from_histogram(self, histogram: Tensor, probabilities: Sequence[float]) -> Tensor:
        """The values below which so many lie; within a bin, values are taken as evenly spread."""
        below = histogram.cumsum(0, dtype=torch.float64)
        wanted = torch.tensor([one * self.count for one in probabilities], dtype=torch.float64, device="cpu")
        wanted = wanted.to(below.device, non_blocking=True)
        bins = torch.searchsorted(below, wanted).clamp_(max=self.BINS - 1)
        inside = histogram[bins].double()
        share = (wanted - (below[bins] - inside)) / inside.clamp_min(1)
        return (self.LOW + (bins + share) * ((self.HIGH - self.LOW) / self.BINS)).clamp_min(0)
