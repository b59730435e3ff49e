"""Sums over attention maps from which every reading is concluded: entropies, squares, what keys receive, likeness.

`map_statistics` is the reference, on whole maps. `statistics` and `pair_products` take queries and keys and never make
a map: on a GPU they are operators of their own (`vitfocus::statistics`, `vitfocus::pair_products`) with Triton kernels,
elsewhere they go through some rows at a time. What the sums mean is the readings' business, in `vitfocus.attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.kernels.backends import chosen

#: Numbers in a chunk of maps without Triton.
CHUNK = 1 << 20

#: What the kernels hold of a token: heads, which are unrolled, and bytes of its queries.
MOST_HEADS, MOST_BYTES = 16, 4096

_EPS = 1e-8

Size = tuple[int, int]

#: Queries, keys, and where there are any bias and normalisers.
Attention = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class Statistics(NamedTuple):
    """Sums over B images' maps p (B, H, Q, K); a is the mean over heads, t is a where it passes τ/K and 0 elsewhere."""

    #: Entropy of every row in nats, (B, H, Q).
    entropy: Tensor
    #: Σ_j p_ij² of every row, (B, H, Q).
    squares: Tensor
    #: What every key receives, Σ_i p_ij, (B, H, K).
    received: Tensor
    #: Σ_ij a_ij ‖p_i − p_j‖₁ over tokens with a place, (B,); 0 where there are none.
    distance: Tensor
    #: ‖Σ_h p_h / ‖p_h‖‖² over whole maps: the sum of the cosines of all pairs of heads, themselves included, (B,).
    joint: Tensor
    #: Sums over rows of their entropies and their squares, (2, B, H).
    totals: Tensor
    #: Sums over rows, (2, 2, B, K): with the threshold >, of t at unit length and of a; with ≥, of t so, and of t.
    rows: Tensor


class Grids(NamedTuple):
    """Where tokens lie: the first `prefix` nowhere, the rest on these grids row by row, from 0 to 1 along each side."""

    query: Size
    key: Size
    prefix: int = 0


def map_statistics(maps: Tensor, grids: Grids | None = None, threshold: float = 2.0) -> Statistics:
    """The statistics of whole maps (B, H, Q, K).

    >>> uniform = torch.full((1, 2, 4, 4), 0.25)
    >>> made = map_statistics(uniform, Grids((2, 2), (2, 2)))
    >>> made.entropy[0, 0], made.distance / 4, made.joint
    (tensor([1.3863, 1.3863, 1.3863, 1.3863]), tensor([1.]), tensor([4.]))
    """
    return _joined([_of_rows(maps, _distances(grids, slice(0, maps.shape[2]), maps), threshold / maps.shape[-1])])


def _of_rows(maps: Tensor, away: Tensor | None, bound: float) -> Statistics:
    """The statistics of some rows of maps (B, H, T, K), their part of every sum; `joint` holds inner products."""
    mean = maps.mean(dim=1)
    strict, kept = mean * (mean > bound), mean * (mean >= bound)
    units, units_paper = (F.normalize(rows, dim=-1, eps=_EPS).sum(dim=1) for rows in (strict, kept))
    flat = maps.flatten(2)
    entropy, squares = torch.special.entr(maps).sum(dim=-1), maps.square().sum(dim=-1)
    return Statistics(
        entropy,
        squares,
        maps.sum(dim=-2),
        maps.new_zeros(len(maps)) if away is None else (mean * away).sum(dim=(-2, -1)),
        flat @ flat.mT,
        torch.stack([entropy.sum(dim=-1), squares.sum(dim=-1)]),
        torch.stack([units, mean.sum(dim=1), units_paper, kept.sum(dim=1)]).unflatten(0, (2, 2)),
    )


def _joined(parts: list[Statistics]) -> Statistics:
    """All rows' statistics from those of some at a time."""
    entropy, squares, *sums = zip(*parts, strict=True)
    received, distance, products, totals, rows = (torch.stack(one).sum(dim=0) for one in sums)
    by_row = torch.cat(entropy, dim=-1), torch.cat(squares, dim=-1)
    return Statistics(*by_row, received, distance, all_cosines(products), totals, rows)


def all_cosines(products: Tensor) -> Tensor:
    """The sum of the cosines of all pairs of heads, from the inner products of their maps: (B, H, H) to (B,).

    >>> all_cosines(torch.tensor([[[4.0, 3.0], [3.0, 9.0]]]))
    tensor([3.])
    """
    norms = products.diagonal(dim1=-2, dim2=-1).sqrt()
    return (products / (norms[..., None] * norms[..., None, :])).sum(dim=(-2, -1))


def _distances(grids: Grids | None, rows: slice, like: Tensor) -> Tensor | None:
    """‖p_i − p_j‖₁ of these queries (T, K), 0 where a token has no place."""
    if grids is None:
        return None
    queries, keys = _places(grids.query, like), _places(grids.key, like)
    first = max(rows.start, grids.prefix)
    away = torch.cdist(queries[first - grids.prefix : max(rows.stop - grids.prefix, 0)], keys, p=1)
    return F.pad(away, (grids.prefix, 0, min(first, rows.stop) - rows.start, 0))


def _places(grid: Size, like: Tensor) -> Tensor:
    """Every token's row and column as fractions, (H·W, 2)."""
    return torch.cartesian_prod(*(torch.arange(side).to(like) / max(side - 1, 1) for side in grid))


def statistics(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    grids: Grids | None = None,
    threshold: float = 2.0,
    lse: Tensor | None = None,
) -> Statistics:
    """`map_statistics` of softmax(scale · q kᵀ + bias), from `query` (B, H, Q, D) and `key` (B, H, K, D) alone.

    `bias` is broadcastable to (B, H, Q, K). `lse` (B, H, Q) are the softmax's normalisers log Σ exp, where they are
    known already. Memory is linear in Q and K. The kernels hold rows of all heads: more than sixteen heads, or queries
    of more than 4096 bytes a token, are left to the pass in chunks.

    >>> q, k = torch.randn(2, 2, 3, 5, 8).unbind()
    >>> whole = map_statistics((q @ k.mT).softmax(-1))
    >>> all(torch.allclose(a, b, atol=1e-5) for a, b in zip(statistics(q, k, scale=1.0), whole))
    True
    """
    name = backend_for(query, key, bias)
    if name == "triton":
        sides = [*grids.query, *grids.key, grids.prefix] if grids is not None else []
        run = _statistics if _is_followed(query, key, bias, lse) else _launch().statistics
        return _named(*run(query, key, bias, lse, scale, sides, threshold), keys=key.shape[2])
    bound = threshold / key.shape[2]
    pieces = [
        _joined([_of_rows(maps, _distances(grids, rows, maps), bound) for rows, maps in by_rows])
        for by_rows in _chunks(query, key, bias, scale, name == "reference")
    ]
    axes = (0, 0, 0, 0, 0, 1, 2)
    return Statistics(*(torch.cat(parts, axis) for parts, axis in zip(zip(*pieces, strict=True), axes, strict=True)))


def backend_for(query: Tensor, *others: Tensor | None) -> str:
    """The backend for these tensors, `query` (B, H, Q, D) first."""
    _, heads, _, width = query.shape
    padded = 1 << (width - 1).bit_length()
    name = chosen(query, *others)
    fits = heads <= MOST_HEADS and heads * padded * query.element_size() <= MOST_BYTES
    return name if name != "triton" or fits else "chunked"


def pair_products(one: Attention, other: Attention, *, scale: float) -> Tensor:
    """Inner products of two maps p and r of every image and head: ⟨p, r⟩, ⟨p, p⟩ and ⟨r, r⟩, (3, B, H).

    An `Attention` is query (B, H, Q, D), key (B, H, K, D), bias and normalisers, or None for the last two.

    >>> q, k = torch.randn(2, 2, 3, 5, 8).unbind()
    >>> both, first, second = pair_products((q, k, None, None), (q, k, None, None), scale=1.0)
    >>> torch.equal(both, first), torch.equal(first, second)
    (True, True)
    """
    name = backend_for(*one, *other)
    if name == "triton":
        followed = _is_followed(*one, *other)
        made: Tensor = _pair_products(*one, *other, scale) if followed else _launch().pair_products(one, other, scale)
        return made
    pieces = []
    both = (_chunks(query, key, bias, scale, name == "reference") for query, key, bias, _ in (one, other))
    for images in zip(*both, strict=True):
        by_rows = [
            torch.stack([(a * b).sum(dim=(-2, -1)) for a, b in ((p, r), (p, p), (r, r))])
            for (_, p), (_, r) in zip(*images, strict=True)
        ]
        pieces.append(torch.stack(by_rows).sum(dim=0))
    return torch.cat(pieces, dim=1)


def _chunks(
    query: Tensor, key: Tensor, bias: Tensor | None, scale: float, whole: bool
) -> Iterator[Iterator[tuple[slice, Tensor]]]:
    """For some images at a time, for some of their rows at a time: which rows, and the maps (b, H, T, K)."""
    images, heads, queries, _ = query.shape
    budget = images * heads * queries * key.shape[2] if whole else CHUNK
    at_once = max(1, budget // (heads * queries * key.shape[2]))
    rows_at_once = max(1, budget // (heads * key.shape[2]))
    wide = torch.promote_types(query.dtype, torch.float32)

    def of_images(picked: slice) -> Iterator[tuple[slice, Tensor]]:
        keys = key[picked].to(wide).mT
        for start in range(0, queries, rows_at_once):
            rows = slice(start, min(start + rows_at_once, queries))
            scores = query[picked, :, rows].to(wide) * scale @ keys
            if bias is not None:
                mine = bias if bias.shape[0] == 1 else bias[picked]
                scores = scores + (mine if mine.shape[2] == 1 else mine[:, :, rows]).to(wide)
            yield rows, scores.softmax(dim=-1)

    return (of_images(slice(start, start + at_once)) for start in range(0, images, at_once))


def _named(by_head: Tensor, totals: Tensor, sums: Tensor, *, keys: int) -> Statistics:
    """The statistics from the operator's results, in the same memory but for numbers that somebody may keep."""
    _, batch, heads, _ = by_head.shape
    entropy, squares = by_head.unbind()
    received, rows, of_all = sums.split_with_sizes([batch * heads * keys, 4 * batch * keys, 2 * batch])
    distance, joint = of_all.clone().view(2, batch).unbind()
    by_key, by_form = received.view(batch, heads, keys), rows.view(2, 2, batch, keys)
    return Statistics(entropy, squares, by_key, distance, joint, totals, by_form)


def _is_followed(*tensors: Tensor | None) -> bool:
    """Whether somebody traces or differentiates, so that torch must see an operator.

    Else its function is called at once: the way through an operator costs the host as much as several launches.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.compiler.is_compiling() or any(type(tensor) is not Tensor for tensor in given):
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)


def _launch() -> Any:
    """The kernels' launchers, imported where there is Triton."""
    from vitfocus.kernels.triton import statistics_launch

    return statistics_launch


@torch.library.custom_op("vitfocus::statistics", mutates_args=())
def _statistics(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    lse: Tensor | None,
    scale: float,
    sides: list[int],
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `Statistics` are views of; `sides` are those of both grids and the prefix, or none.

    Entropy and squares (2, B, H, Q), their sums (2, B, H), and one after the other in one vector what keys receive, the
    sums over rows, distance and joint.
    """
    made: tuple[Tensor, Tensor, Tensor] = _launch().statistics(query, key, bias, lse, scale, sides, threshold)
    return made


@_statistics.register_fake
def _(query: Tensor, key: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    sums = batch * ((heads + 4) * key.shape[2] + 2)
    shapes: tuple[Any, ...] = ((2, batch, heads, queries), (2, batch, heads), (sums,))
    return tuple(query.new_empty(shape, dtype=torch.float32) for shape in shapes)  # type: ignore[return-value]


@torch.library.custom_op("vitfocus::pair_products", mutates_args=())
def _pair_products(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    lse: Tensor | None,
    other_query: Tensor,
    other_key: Tensor,
    other_bias: Tensor | None,
    other_lse: Tensor | None,
    scale: float,
) -> Tensor:
    """Inner products of two maps, (3, B, H)."""
    one, two = (query, key, bias, lse), (other_query, other_key, other_bias, other_lse)
    made: Tensor = _launch().pair_products(one, two, scale)
    return made


@_pair_products.register_fake
def _(query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(3, *query.shape[:2], dtype=torch.float32)
