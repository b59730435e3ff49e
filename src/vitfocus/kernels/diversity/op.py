"""The Attention Diversification Loss's arithmetic: how alike are the rows of an attention map?

"Robustifying Token Attention for Vision Transformers" (Guo et al., ICCV 2023), section 3.3. Two forms exist. `paper`
is equations (1) and (2): threshold each row with ≥ τ/N, then compare it with the mean of the thresholded rows.
`official` is what the authors' released code computes: the mean of the rows before thresholding, thresholded itself,
with a strict >. There a batch of one silently lost its batch axis and gave a loss of zero; here it does not.

`row_similarity` is the reference, on whole maps. `diversity` takes queries and keys and never makes a map: on a GPU by
the operator `vitfocus::diversity`, whose backward pass makes tiles again, elsewhere in chunks. docs/kernels.md derives
both.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from vitfocus.kernels.attention import matched
from vitfocus.kernels.backends import chosen, forced
from vitfocus.kernels.diversity.chunked import Place, diversity_in_chunks, empty_like_tokens
from vitfocus.kernels.shared_memory import fits, room

Variant = Literal["official", "paper"]
Heads = Literal["mean", "each"]

_EPS = 1e-8

#: Numbers in maps so small that they stay in a core's caches: there, chunks win nothing over whole maps.
SMALL = 1 << 19


def row_similarity(
    attention: Tensor, *, variant: Variant = "official", heads: Heads = "mean", threshold: float = 2.0
) -> Tensor:
    """The mean cosine between the rows of attention maps (B, H, Q, K) and their mean row: a scalar in [0, 1].

    A row with nothing above the threshold contributes 0 and receives no gradient.

    >>> uniform, diagonal = torch.full((1, 1, 4, 4), 0.25), torch.eye(4).expand(1, 1, 4, 4)
    >>> row_similarity(uniform, threshold=1.0, variant="paper").item()
    1.0
    >>> round(row_similarity(diagonal, threshold=1.0, variant="paper").item(), 3)
    0.5
    """
    maps = attention.mean(dim=1) if heads == "mean" else attention.flatten(0, 1)
    bound = threshold / maps.shape[-1]
    if variant == "official":
        mean = maps.mean(dim=-2, keepdim=True)
        rows, mean = _keep(maps, maps > bound), _keep(mean, mean > bound)
    else:
        rows = _keep(maps, maps >= bound)
        mean = rows.mean(dim=-2, keepdim=True)
    dots = (rows * mean).sum(dim=-1)
    return (dots * _inverse_norm(rows) * _inverse_norm(mean)).mean()


def _keep(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, torch.zeros_like(values))


def _inverse_norm(vectors: Tensor) -> Tensor:
    """1 / max(‖v‖, ε), and 0 with a gradient of 0 for the zero vector."""
    squares = vectors.square().sum(dim=-1)
    empty = squares == 0
    inverse = torch.where(empty, torch.ones_like(squares), squares).rsqrt().clamp(max=1 / _EPS)
    return torch.where(empty, torch.zeros_like(inverse), inverse)


def diversity(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    first: int = 0,
    variant: Variant = "official",
    heads: Heads = "mean",
    threshold: float = 2.0,
    lse: Tensor | None = None,
) -> Tensor:
    """`row_similarity` of softmax(scale · q kᵀ + bias), from `query` (B, H, Q, D) and `key` (B, H, K, D) alone.

    `bias` is broadcastable to (B, H, Q, K). `rows` (R,) picks distinct query rows; `first` leaves that many keys out
    (and, where no rows are picked, queries). `lse` (B, H, Q) are the softmax's normalisers, where they are known
    already; the gradient is that of a softmax all the same. No map is made. A row with every key masked by -inf counts
    as empty.

    >>> q, k = torch.randn(2, 2, 3, 5, 8).unbind()
    >>> whole = row_similarity((q @ k.mT).softmax(-1), variant="paper")
    >>> torch.allclose(diversity(q, k, scale=1.0, variant="paper"), whole)
    True
    """
    query, key = matched(query, key)
    name = chosen(query, key, bias)
    group = query.shape[1] if heads == "mean" else 1
    if name == "triton" and not fits(group, query.shape[3], query.element_size(), room(query.device)):
        name = "chunked"
    if not query.numel():  # no images: nothing to launch
        name = "reference"
    if name == "chunked" and forced() == "auto" and query.shape[:3].numel() * key.shape[2] <= SMALL:
        name = "reference"
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
    if name == "reference":
        pick = slice(first, None) if rows is None else rows
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query[:, :, pick].to(wide) * scale @ key.to(wide).mT
        if bias is not None:
            scores = scores + (bias if bias.shape[-2] == 1 else bias[..., pick, :]).to(wide)
        # As an operator, because torch.compile does not trace the function of that name.
        maps = scores.softmax(dim=-1) if bias is None else torch.ops.aten._safe_softmax(scores, -1)
        return row_similarity(maps[..., first:], variant=variant, heads=heads, threshold=threshold)
    where = Place(scale, first, heads == "mean", variant == "paper", threshold)
    if name == "chunked":
        return diversity_in_chunks(query, key, bias, rows, where)
    made: tuple[Tensor, ...] = _diversity(query, key, bias, rows, lse, *where)
    return made[0]


@torch.library.custom_op("vitfocus::diversity", mutates_args=())
def _diversity(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    lse: Tensor | None,
    scale: float,
    first: int,
    average_heads: bool,
    paper: bool,
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, and what its backward pass needs: normalisers unless given, column averages and slopes, three a row."""
    from vitfocus.kernels.diversity import launch as diversity_launch

    where = Place(scale, first, average_heads, paper, threshold)
    return diversity_launch.forward(query, key, bias, rows, lse, where)


@_diversity.register_fake
def _(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    lse: Tensor | None,
    scale: float,
    first: int,
    average_heads: bool,
    paper: bool,
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    keys, count = key.shape[2], queries - first if rows is None else rows.shape[0]
    maps, group = (batch, heads) if average_heads else (batch * heads, 1)
    wide = query.new_empty(0, dtype=torch.float32)
    by_row, by_column = (maps, count), (maps, keys)
    norms = (batch, heads, queries) if lse is None else (0,)
    shapes: tuple[Any, ...] = ((), norms, by_column, by_column, by_row, by_row, (maps, group, count))
    return tuple(wide.new_empty(shape) for shape in shapes)  # type: ignore[return-value]


@torch.library.custom_op("vitfocus::diversity_backward", mutates_args=())
def _diversity_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    rows: Tensor | None,
    average: Tensor,
    slopes: Tensor,
    towards: Tensor,
    along: Tensor,
    inner: Tensor,
    scale: float,
    first: int,
    average_heads: bool,
    paper: bool,
    threshold: float,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and bias (empty where it wants none)."""
    from vitfocus.kernels.diversity import launch as diversity_launch

    where = Place(scale, first, average_heads, paper, threshold)
    saved = diversity_launch.Saved(lse, average, slopes, towards, along, inner)
    return diversity_launch.backward(gradient, query, key, bias, rows, where, saved, wants_bias)


@_diversity_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    wants_bias = bool(rest[-1])
    like = bias if bias is not None and wants_bias else query.new_empty(0)
    return empty_like_tokens(query), empty_like_tokens(key), torch.empty_like(like).contiguous()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, bias, rows, lse, *rest = inputs
    ctx.rest = rest
    ctx.set_materialize_grads(False)
    ctx.wants_bias = bias is not None and bias.requires_grad
    ctx.save_for_backward(query, key, bias, output[1] if lse is None else lse, rows, *output[2:])


def _gradient(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * 10
    made = _diversity_backward(gradient, *ctx.saved_tensors, *ctx.rest, ctx.wants_bias)
    return (made[0], made[1], made[2] if ctx.wants_bias else None, *(None,) * 7)


_diversity.register_autograd(_gradient, setup_context=_setup)
