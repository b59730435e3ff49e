"""The statistics in plain torch, one tile at a time: memory linear in the number of tokens, on any device.

A tile is some rows of some images' maps, small enough to stay in the caches. Each tile is added to running
sums before the next one is computed, and the statistics follow from the sums. No whole map is held in memory unless
the model itself made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.kernels.attention import Observation
from vitfocus.kernels.statistics.reference import (
    Grids,
    Numbers,
    Statistics,
    all_cosines,
    along,
    positions,
    row_entropy,
    top_share,
)

#: Elements per tile: on a CPU between these two, which fit in its caches; a GPU needs more to be busy.
CPU_TILES, GPU_TILE = (1 << 17, 1 << 20), 1 << 22

_EPS = 1e-8


def tiled_statistics(
    seen: Observation,
    other: Observation | None,
    grids: Grids | None,
    threshold: float,
    top: int,
    budget: int | None = None,
) -> Statistics:
    """`map_statistics` of an observed attention, and of `other` beside it, with at most `budget` elements per tile.

    >>> maps = torch.rand(2, 3, 5, 5).softmax(-1)
    >>> entropy, _, _ = tiled_statistics(Observation(map=maps), None, None, threshold=2.0, top=1, budget=20)
    >>> torch.allclose(entropy, row_entropy(maps))
    True
    """
    sums = _Sums(seen, other is not None, grids, threshold)
    for images, rows, piece, partner in _tiles(seen, other, budget):
        attention, entropy = _attention_and_entropy(piece, rows)
        sums.add(images, rows, attention, entropy)
        if partner is not None:
            sums.add_pair(images, attention, partner.attention(rows).to(attention.dtype))
    return sums.statistics(top)


def row_sums(seen: Observation, functions: list[Callable[[Tensor], Tensor]], budget: int | None = None) -> list[Tensor]:
    """For each function of rows, maps (B, H, T, K) to (B, H, T), the sum of its values over all rows: scalars."""
    wide = torch.promote_types(seen.source.dtype, torch.float32)
    totals = [torch.zeros((), dtype=wide, device=seen.device) for _ in functions]
    for _, rows, piece, _ in _tiles(seen, None, budget):
        attention = piece.attention(rows)
        totals = [total + function(attention).sum() for total, function in zip(totals, functions, strict=True)]
    return totals


def _tiles(
    seen: Observation, other: Observation | None, budget: int | None
) -> Iterator[tuple[slice, slice, Observation, Observation | None]]:
    """Slices of images and rows of at most `budget` elements (at least one row of one image), and those images."""
    images, heads, queries, keys = seen.shape
    if budget is None:
        # As many as in the queries, so that the pass adds little to the model's own memory.
        least, most = CPU_TILES
        budget = most if seen.query is None else min(max(seen.query.numel(), least), most)
        budget = budget if seen.device.type == "cpu" else GPU_TILE
    rows_at_once = min(queries, max(1, budget // (heads * keys)))
    images_at_once = max(1, budget // (heads * keys * queries))
    for image in range(0, images, images_at_once):
        picked = slice(image, min(image + images_at_once, images))
        piece, partner = _pick(seen, picked), None if other is None else _pick(other, picked)
        for row in range(0, queries, rows_at_once):
            yield picked, slice(row, min(row + rows_at_once, queries)), piece, partner


def _pick(seen: Observation, images: slice) -> Observation:
    """Some images, with contiguous keys, which the product of each tile would otherwise copy again."""
    seen = seen if images.stop - images.start == seen.shape[0] else seen.select(images)
    return seen if seen.key is None else replace(seen, key=seen.key.contiguous())


def _attention_and_entropy(seen: Observation, rows: slice) -> tuple[Tensor, Tensor]:
    """Rows of the map (B, H, T, K) and their entropies (B, H, T), from the logits in one pass."""
    if seen.map is not None or seen.bias is not None:
        attention = seen.attention(rows)
        log = attention.clamp_min(torch.finfo(attention.dtype).tiny).log()
    else:
        scores = seen.scores(rows)
        log = scores.log_softmax(dim=-1)
        # Scores computed here are overwritten by the map; logits belong to the model.
        attention = torch.exp(log, out=scores if seen.query is not None else None)
        # A masked entry is 0 with logarithm -inf: clamped to a finite value, their product 0 log 0 is 0.
        log.clamp_(min=torch.finfo(log.dtype).min)
    return attention, log.mul_(attention).sum(dim=-1).neg_()


class _Sums:
    """Sums over the rows of B images' maps p; a is the mean over heads, t is a where it passes the threshold, else 0.

    `entropy` of each row (B, H, Q). `received` Σ_i p_ij (B, H, K). `gram` inner products of the heads' maps (B, H, H).
    `distance` Σ_ij a_ij ‖p_i − p_j‖₁ (B,). `rows` (2, 2, B, K): with the threshold >, Σ_i of t at unit length and of a;
    with ≥, of t at unit length and of t. `pairs` (2, B, H): ⟨p, r⟩ and ⟨r, r⟩ for other maps r.
    """

    def __init__(self, seen: Observation, paired: bool, grids: Grids | None, threshold: float) -> None:
        images, heads, queries, keys = seen.shape
        source = seen.source
        like = source.new_empty(0, dtype=torch.float64 if source.dtype == torch.float64 else torch.float32)
        self.queries, self.grids = queries, grids
        self.entropy = like.new_empty(images, heads, queries)
        self.received = like.new_zeros(images, heads, keys)
        self.gram = like.new_zeros(images, heads, heads)
        self.distance = like.new_zeros(images)
        self.rows = like.new_zeros(2, 2, images, keys)
        self.pairs = like.new_zeros(2, images, heads) if paired else None
        # x ≥ t is x > the float just below t, which `threshold` applies in one operation.
        bound, zero = torch.tensor([threshold / keys, 0.0], dtype=like.dtype, device="cpu")
        self.bound, self.below = threshold / keys, float(torch.nextafter(bound, zero))
        if grids is not None:
            self.query_positions = positions(grids.query, like)
            self.key_rows, self.key_columns = along(grids.key[0], like), along(grids.key[1], like)

    def add(self, images: slice, rows: slice, attention: Tensor, entropy: Tensor) -> None:
        """Add a tile: these rows of these images' maps (b, H, T, K), and their entropies (b, H, T)."""
        batch, heads, count, keys = attention.shape
        flat = attention.flatten(2)
        self.entropy[images, :, rows] = entropy
        self.gram[images] += torch.bmm(flat, flat.mT)
        maps = attention.flatten(0, 1)
        given = torch.bmm(maps.new_ones(batch * heads, 1, count), maps)
        self.received[images] += given.view(batch, heads, keys)
        mean = torch.bmm(flat.new_full((batch, 1, heads), 1 / heads), flat).view(batch, count, keys)
        (units, total), paper = self.rows[:, :, images]
        strict = F.threshold(mean, self.bound, 0.0)
        units += torch.bmm(_inverse_norms(strict), strict)[:, 0]
        total += mean.sum(dim=1)
        kept = F.threshold(mean, self.below, 0.0)
        weights = _inverse_norms(kept)
        paper += torch.bmm(torch.cat([weights, torch.ones_like(weights)], dim=1), kept).transpose(0, 1)
        if self.grids is not None and rows.stop > self.grids.prefix:
            self._add_distance(self.grids, images, rows, mean)

    def _add_distance(self, grids: Grids, images: slice, rows: slice, mean: Tensor) -> None:
        """‖·‖₁ is a distance in rows plus one in columns, so attention per row and column of the key grid is enough.

        H + W values per query instead of H·W.
        """
        first = max(rows.start, grids.prefix)
        queries = self.query_positions[first - grids.prefix : rows.stop - grids.prefix]
        patches = mean[:, first - rows.start :, grids.prefix :].unflatten(-1, grids.key)
        down = (patches.sum(dim=-1) * (queries[:, :1] - self.key_rows).abs()).sum(dim=(1, 2))
        across = (patches.sum(dim=-2) * (queries[:, 1:] - self.key_columns).abs()).sum(dim=(1, 2))
        self.distance[images] += down + across

    def add_pair(self, images: slice, attention: Tensor, other: Tensor) -> None:
        """Add the inner products of a tile with the same rows of the other maps, and of those with themselves."""
        assert self.pairs is not None
        clean, corrupted = (maps.flatten(2).flatten(0, 1)[:, None] for maps in (attention, other))
        products = torch.stack([torch.bmm(clean, corrupted.mT), torch.bmm(corrupted, corrupted.mT)])
        self.pairs[:, images] += products.view(2, *attention.shape[:2])

    def statistics(self, top: int) -> Statistics:
        """The statistics, once every tile has been added.

        The mean cosine of the rows t with their average v is (Σ_i t_i / ‖t_i‖) · v / ‖v‖ / Q: no row is needed again.
        """
        units, totals = self.rows.unbind(dim=1)
        averages = totals / self.queries
        torch.threshold_(averages[0], self.bound, 0.0)
        norms = torch.linalg.vector_norm(averages, dim=-1).clamp_min_(_EPS)
        squares = self.gram.diagonal(dim1=-2, dim2=-1)
        shares = self.received / self.received.sum(dim=-1, keepdim=True)
        prefix = 0 if self.grids is None else self.grids.prefix
        numbers = self.entropy.new_zeros(len(Numbers._fields), *self.entropy.shape[:2])
        numbers[0] = self.entropy.sum(dim=-1)
        numbers[1] = squares
        numbers[2] = self.entropy[..., 0]
        numbers[3] = top_share(shares, top)
        numbers[4] = row_entropy(shares).exp_()
        numbers[5, :, 0] = self.distance / max(self.queries - prefix, 1)
        numbers[6, :, 0] = all_cosines(self.gram)
        numbers[7:, :, 0] = averages.mul_(units).sum(dim=-1) / norms / self.queries
        products = None
        if self.pairs is not None:
            products = torch.stack([self.pairs[0], squares, self.pairs[1]])
        return Statistics(self.entropy, numbers, products)


def _inverse_norms(rows: Tensor) -> Tensor:
    """1 / ‖row‖ (B, 1, T); that of an empty row is large but is multiplied only with zeros."""
    return torch.linalg.vector_norm(rows, dim=-1).clamp_min(_EPS).reciprocal()[:, None]
