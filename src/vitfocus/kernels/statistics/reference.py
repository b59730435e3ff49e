"""What a diagnosis measures, defined on whole attention maps (B, H, Q, K): the oracle for the fast implementations.

From "Scratching Visual Transformer's Back with Uniform Attention" (Hyeon-Woo et al., ICCV 2023): entropy, softmax
gradient and relative distance. From "Robustifying Token Attention for Vision Transformers" (Guo et al., ICCV 2023): row
similarity, which is the Attention Diversification Loss, and stability. Overfocus counts the vertical lines of the
latter's Figures 1 and 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.kernels.diversity.reference import Variant, row_similarity

Size = tuple[int, int]

#: The share of keys that count as the most attended.
TOP = 0.05
#: The threshold τ of the row similarity: an entry counts if it is above τ/K.
THRESHOLD = 2.0


class Grids(NamedTuple):
    """Token positions: the first `prefix` tokens have none, the rest lie row by row on a grid from 0 to 1 per side."""

    query: Size
    key: Size
    prefix: int = 0


class Numbers(NamedTuple):
    """The statistics of one map p (Q, K) of an image and a head; a is the mean over heads, t is a above τ/K, else 0.

    Those from `distance` on are per image: they are stored at its first head, with 0 at the others.
    """

    #: Sum of the rows' entropies in nats.
    entropy: Tensor
    #: Σ_ij p_ij².
    squares: Tensor
    #: Entropy of the first row.
    first: Tensor
    #: Share of all attention that the most attended keys receive.
    top: Tensor
    #: exp of the entropy of the shares that keys receive.
    effective: Tensor
    #: Σ_ij a_ij ‖p_i − p_j‖₁ over tokens with a position, divided by the number of such queries; 0 if there are none.
    distance: Tensor
    #: ‖Σ_h p_h / ‖p_h‖‖² over whole maps: the sum of the cosines of all pairs of heads, including each with itself.
    joint: Tensor
    #: Mean cosine of the rows t with their average in the released form (t where a > τ/K; so is the average)...
    official: Tensor
    #: ... and in the paper's (t where a ≥ τ/K).
    paper: Tensor


class Statistics(NamedTuple):
    """For B images: the entropy of each row in nats (B, H, Q), and what `Numbers` names, (9, B, H).

    With a second set of maps r, `products` (3, B, H) are ⟨p, r⟩, ⟨p, p⟩ and ⟨r, r⟩.
    """

    entropy: Tensor
    numbers: Tensor
    products: Tensor | None = None


def row_entropy(maps: Tensor) -> Tensor:
    """Entropy in nats of each row: maps (..., Q, K) to (..., Q). Masked entries count 0 log 0 = 0.

    0 if the row attends to one token, log K if it attends to all K tokens equally (Context Broadcasting's Figure 4).

    >>> row_entropy(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    return torch.special.entr(maps).sum(dim=-1)


def softmax_gradient(maps: Tensor) -> Tensor:
    """Nuclear norm of the softmax's Jacobian at each row, without its scale λ: maps (..., Q, K) to (..., Q).

    λ Σ_j (a_j − a_j²) in Context Broadcasting's Section 3: largest, 1 − 1/K, at uniform attention, which is why uniform
    attention is hard to learn.

    >>> softmax_gradient(torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]))
    tensor([0.7500, 0.0000])
    """
    return (maps - maps**2).sum(dim=-1)


def received(maps: Tensor) -> Tensor:
    """The attention that each key receives, averaged over queries: maps (..., Q, K) to (..., K)."""
    return maps.mean(dim=-2)


def overfocus(received: Tensor, top: float = TOP) -> Tensor:
    """The share that the most attended `top` of the keys, at least one, receive: (..., K) to (...).

    >>> overfocus(torch.full((40,), 1 / 40)), overfocus(torch.eye(40)[0])
    (tensor(0.0500), tensor(1.))
    """
    return top_share(received / received.sum(dim=-1, keepdim=True), top_tokens(received.shape[-1], top))


def top_share(shares: Tensor, count: int) -> Tensor:
    """The sum of the `count` largest shares: (..., K) to (...)."""
    return shares.topk(count, dim=-1, sorted=False).values.sum(dim=-1)


def top_tokens(keys: int, top: float = TOP) -> int:
    """How many keys are the most attended ones.

    >>> top_tokens(197), top_tokens(49), top_tokens(4)
    (10, 2, 1)
    """
    return max(1, round(top * keys))


def uniform_overfocus(keys: int, top: float = TOP) -> float:
    """The overfocus if all keys receive the same: `top`, up to rounding to whole keys.

    >>> uniform_overfocus(40), round(uniform_overfocus(65), 3), uniform_overfocus(4)
    (0.05, 0.046, 0.25)
    """
    return top_tokens(keys, top) / keys


def effective_tokens(received: Tensor) -> Tensor:
    """exp of the entropy of the received attention: (..., K) to (...).

    >>> effective_tokens(torch.tensor([0.5, 0.5, 0.0, 0.0]))
    tensor(2.)
    """
    return row_entropy(received / received.sum(dim=-1, keepdim=True)).exp()


def relative_distance(maps: Tensor, query_grid: Size, key_grid: Size | None = None, prefix_tokens: int = 0) -> Tensor:
    """Mean over queries of Σ_j a_ij ‖p_i − p_j‖₁, with coordinates from 0 to 1: maps (..., Q, K) to (...).

    Context Broadcasting's Figure 7b. Prefix tokens have no position and are dropped without renormalising the rest, so
    attention to the class token shortens the distance.

    >>> relative_distance(torch.eye(4), (2, 2)), relative_distance(torch.full((4, 4), 0.25), (2, 2))
    (tensor(0.), tensor(1.))
    """
    queries, keys = positions(query_grid, maps), positions(key_grid or query_grid, maps)
    between = torch.cdist(queries, keys, p=1)
    return (maps[..., prefix_tokens:, prefix_tokens:] * between).sum(dim=-1).mean(dim=-1)


def positions(grid: Size, like: Tensor) -> Tensor:
    """Each token's row and column as fractions, i/(H−1) and j/(W−1), or 0 if the side is 1: (H·W, 2)."""
    return torch.cartesian_prod(along(grid[0], like), along(grid[1], like))


def along(length: int, like: Tensor) -> Tensor:
    """The coordinates along one side of a grid, from 0 to 1."""
    return torch.arange(length, device=like.device, dtype=like.dtype) / max(length - 1, 1)


def head_similarity(maps: Tensor) -> Tensor:
    """Mean cosine between the flattened maps of different heads: (B, H, Q, K) to (B,), H at least 2.

    >>> same, other = torch.eye(4), torch.eye(4).flip(0)
    >>> head_similarity(torch.stack([torch.stack([same, same]), torch.stack([same, other])]))
    tensor([1., 0.])
    """
    heads = maps.shape[1]
    return (all_cosines(head_products(maps)) - heads) / (heads * (heads - 1))


def head_products(maps: Tensor) -> Tensor:
    """Inner products of the heads' maps: (B, H, Q, K) to (B, H, H)."""
    rows = maps.transpose(1, 2)
    # Row by row, then over the rows: one inner product of N² single-precision numbers loses digits at N = 4097.
    return (rows @ rows.mT).sum(dim=1)


def all_cosines(products: Tensor) -> Tensor:
    """The sum of the cosines of all pairs of heads, from the inner products of their maps: (B, H, H) to (B,).

    >>> all_cosines(torch.tensor([[[4.0, 3.0], [3.0, 9.0]]]))
    tensor([3.])
    """
    norms = products.diagonal(dim1=-2, dim2=-1).sqrt()
    return (products / (norms[..., None] * norms[..., None, :])).sum(dim=(-2, -1))


def row_diversity(maps: Tensor, form: Variant = "official", threshold: float = THRESHOLD) -> Tensor:
    """The Attention Diversification Loss of maps (B, H, Q, K), heads averaged first: a scalar; low is diverse.

    >>> lines = torch.zeros(1, 1, 8, 8).index_fill(-1, torch.tensor(3), 1.0)
    >>> row_diversity(lines), row_diversity(torch.eye(8)[None, None], form="paper")
    (tensor(1.), tensor(0.3536))
    """
    return row_similarity(maps, variant=form, heads="mean", threshold=threshold)


def stability(clean: Tensor, corrupted: Tensor) -> Tensor:
    """Cosine between the flattened maps of each image and head: two of (B, H, Q, K) to (B, H).

    >>> maps = torch.eye(4).expand(1, 2, 4, 4)
    >>> stability(maps, maps)
    tensor([[1., 1.]])
    """
    return F.cosine_similarity(clean.flatten(2), corrupted.flatten(2), dim=-1)


def map_statistics(
    maps: Tensor,
    other: Tensor | None = None,
    *,
    grids: Grids | None = None,
    threshold: float = THRESHOLD,
    top: int | None = None,
) -> Statistics:
    """The statistics of whole maps (B, H, Q, K); `top` is the number of most attended keys, `top_tokens(K)` if None.

    >>> entropy, numbers, _ = map_statistics(torch.full((1, 2, 4, 4), 0.25), grids=Grids((2, 2), (2, 2)))
    >>> entropy[0, 0], Numbers(*numbers).distance, Numbers(*numbers).joint
    (tensor([1.3863, 1.3863, 1.3863, 1.3863]), tensor([[1., 0.]]), tensor([[4., 0.]]))
    """
    heads, keys = maps.shape[1], maps.shape[3]
    entropy, got = row_entropy(maps), received(maps)
    products = head_products(maps)
    distance = maps.new_zeros(len(maps))
    if grids is not None:
        distance = relative_distance(maps.mean(dim=1), grids.query, grids.key, grids.prefix)
    official, paper = (
        torch.stack([row_similarity(one[None], variant=form, threshold=threshold) for one in maps])
        for form in ("official", "paper")
    )
    numbers = Numbers(
        entropy.sum(dim=-1),
        products.diagonal(dim1=-2, dim2=-1),
        entropy[..., 0],
        top_share(got / got.sum(dim=-1, keepdim=True), top or top_tokens(keys)),
        effective_tokens(got),
        *(F.pad(one[:, None], (0, heads - 1)) for one in (distance, all_cosines(products), official, paper)),
    )
    pairs = None
    if other is not None:
        pairs = torch.stack([(a * b).sum(dim=(-2, -1)) for a, b in ((maps, other), (maps, maps), (other, other))])
    return Statistics(entropy, torch.stack(numbers), pairs)
