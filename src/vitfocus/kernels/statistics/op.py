"""What attention maps come to, by image and head: entropies, squares, what keys receive, distance, likeness.

`map_statistics` is the reference, on whole maps. `statistics` and `pair_products` take queries and keys and never make
a map: on a GPU they are operators of their own (`vitfocus::statistics`, `vitfocus::pair_products`) with Triton kernels,
elsewhere they go through some rows at a time. What the numbers mean is the readings' business, in `vitfocus.attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.kernels.attention import matched
from vitfocus.kernels.backends import chosen
from vitfocus.kernels.shared_memory import fits, padded, room

#: Numbers in a chunk of maps without Triton.
CHUNK = 1 << 20

#: What the kernels hold of a token: heads, which are unrolled, and bytes of its queries.
MOST_HEADS, MOST_BYTES = 16, 4096

_EPS = 1e-8

Size = tuple[int, int]

#: Queries, keys, and where there are any bias and normalisers.
Attention = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class Numbers(NamedTuple):
    """What one map p (Q, K) of an image and a head comes to; a is the heads' mean, t is a where it passes τ/K, else 0.

    Those from `distance` on are the image's: they stand in the place of its first head, and 0 in those of the others.
    """

    #: The rows' entropies in nats, added up.
    entropy: Tensor
    #: Σ_ij p_ij².
    squares: Tensor
    #: The first row's entropy.
    first: Tensor
    #: The share of all attention that goes to the keys that receive the most.
    top: Tensor
    #: exp of the entropy of the shares that keys receive.
    effective: Tensor
    #: Σ_ij a_ij ‖p_i − p_j‖₁ over tokens with a place, by query that has one; 0 where there are none.
    distance: Tensor
    #: ‖Σ_h p_h / ‖p_h‖‖² over whole maps: the sum of the cosines of all pairs of heads, themselves included.
    joint: Tensor
    #: The mean cosine of the rows t with their average, in the released form (t where a > τ/K; so is the average)...
    official: Tensor
    #: ... and in the paper's (t where a ≥ τ/K).
    paper: Tensor


class Statistics(NamedTuple):
    """Of B images: the entropy of every row in nats, (B, H, Q), and what `Numbers` names, (9, B, H)."""

    entropy: Tensor
    numbers: Tensor


class Sums(NamedTuple):
    """What some rows of B images' maps p (B, H, T, K) add up to; the statistics follow from those of all rows."""

    #: Entropy of every row in nats, (B, H, T).
    entropy: Tensor
    #: What every key receives, Σ_i p_ij, (B, H, K).
    received: Tensor
    #: Σ_ij a_ij ‖p_i − p_j‖₁, (B,).
    distance: Tensor
    #: Inner products of the heads' maps, (B, H, H).
    products: Tensor
    #: Sums over rows, (2, 2, B, K): with the threshold >, of t at unit length and of a; with ≥, of t so, and of t.
    rows: Tensor


class Grids(NamedTuple):
    """Where tokens lie: the first `prefix` nowhere, the rest on these grids row by row, from 0 to 1 along each side."""

    query: Size
    key: Size
    prefix: int = 0


def map_statistics(maps: Tensor, grids: Grids | None = None, threshold: float = 2.0, top: int = 1) -> Statistics:
    """The statistics of whole maps (B, H, Q, K); `top` is how many keys count as those that receive the most.

    >>> uniform = torch.full((1, 2, 4, 4), 0.25)
    >>> entropy, numbers = map_statistics(uniform, Grids((2, 2), (2, 2)))
    >>> entropy[0, 0], Numbers(*numbers).distance, Numbers(*numbers).joint
    (tensor([1.3863, 1.3863, 1.3863, 1.3863]), tensor([[1., 0.]]), tensor([[4., 0.]]))
    """
    sums = _of_rows(maps, _distances(grids, slice(0, maps.shape[2]), maps), threshold / maps.shape[-1])
    return _concluded([sums], grids, threshold, top)


def _of_rows(maps: Tensor, away: Tensor | None, bound: float) -> Sums:
    """The sums over some rows of maps (B, H, T, K)."""
    mean = maps.mean(dim=1)
    strict, kept = mean * (mean > bound), mean * (mean >= bound)
    units, units_paper = (F.normalize(rows, dim=-1, eps=_EPS).sum(dim=1) for rows in (strict, kept))
    flat = maps.flatten(2)
    return Sums(
        torch.special.entr(maps).sum(dim=-1),
        maps.sum(dim=-2),
        maps.new_zeros(len(maps)) if away is None else (mean * away).sum(dim=(-2, -1)),
        flat @ flat.mT,
        torch.stack([units, mean.sum(dim=1), units_paper, kept.sum(dim=1)]).unflatten(0, (2, 2)),
    )


def _concluded(parts: list[Sums], grids: Grids | None, threshold: float, top: int) -> Statistics:
    """The statistics from the sums over some rows at a time."""
    entropies, *others = zip(*parts, strict=True)
    entropy = torch.cat(entropies, dim=-1)
    received, distance, products, rows = (torch.stack(one).sum(dim=0) for one in others)
    (heads, queries), keys = entropy.shape[1:], received.shape[-1]
    shares = received / queries
    average = rows[:, 1] / queries
    average[0] *= average[0] > threshold / keys
    cosines = (rows[:, 0] * average).sum(dim=-1) / torch.linalg.vector_norm(average, dim=-1).clamp_min(_EPS)
    of_images = [distance / placed(queries, grids), all_cosines(products), *(cosines / queries)]
    numbers = Numbers(
        entropy.sum(dim=-1),
        products.diagonal(dim1=-2, dim2=-1),
        entropy[..., 0],
        shares.topk(top, dim=-1).values.sum(dim=-1),
        torch.special.entr(shares).sum(dim=-1).exp(),
        *(F.pad(one[:, None], (0, heads - 1)) for one in of_images),
    )
    return Statistics(entropy, torch.stack(numbers))


def placed(queries: int, grids: Grids | None) -> int:
    """How many queries have a place; 1 where none has, for nothing to be divided by 0."""
    return max(queries - grids.prefix, 1) if grids is not None else 1


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
    top: int = 1,
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
    query, key = matched(query, key)
    name = backend_for(query, key, bias)
    if name == "triton":
        sides = [*grids.query, *grids.key, grids.prefix] if grids is not None else []
        run = _statistics if _is_followed(query, key, bias, lse) else _launch().statistics
        return Statistics(*run(query, key, bias, lse, scale, sides, threshold, top))
    bound = threshold / key.shape[2]
    pieces = [
        _concluded(
            [_of_rows(maps, _distances(grids, rows, maps), bound) for rows, maps in by_rows], grids, threshold, top
        )
        for by_rows in _chunks(query, key, bias, scale, name == "reference")
    ]
    entropy, numbers = zip(*pieces, strict=True)
    return Statistics(torch.cat(entropy), torch.cat(numbers, dim=1))


def backend_for(query: Tensor, *others: Tensor | None) -> str:
    """The backend for these tensors, `query` (B, H, Q, D) first."""
    _, heads, _, width = query.shape
    item = query.element_size()
    name = chosen(query, *others)
    small = heads <= MOST_HEADS and heads * padded(width) * item <= MOST_BYTES
    return name if name != "triton" or (small and fits(heads, width, item, room(query.device))) else "chunked"


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
    from vitfocus.kernels.statistics import launch as statistics_launch

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
    top: int,
) -> tuple[Tensor, Tensor]:
    """The rows' entropies and the numbers; `sides` are those of both grids and the prefix, or none."""
    made: tuple[Tensor, Tensor] = _launch().statistics(query, key, bias, lse, scale, sides, threshold, top)
    return made


@_statistics.register_fake
def _(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    entropy = query.new_empty(batch, heads, queries, dtype=torch.float32)
    return entropy, query.new_empty(len(Numbers._fields), batch, heads, dtype=torch.float32)


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
