"""The Attention Diversification Loss from queries and keys, without a map: `vitfocus::diversity` and its gradient.

`diversity` chooses the backend: Triton on a GPU, chunks elsewhere, the reference on whole maps that fit a cache. The
operator's backward pass recomputes tiles. docs/kernels.md derives both passes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitfocus.kernels.attention import matched
from vitfocus.kernels.backends import chosen, forced, on_device_of_first
from vitfocus.kernels.diversity.chunked import LossOptions, diversity_in_chunks, empty_like_tokens
from vitfocus.kernels.diversity.reference import Heads, Variant, row_similarity
from vitfocus.kernels.shared_memory import available, fits, padded, power_of_two, shrink

#: Numbers in maps that stay in a core's caches: up to here, chunks are no faster than whole maps.
SMALL = 1 << 19
#: The number of programs that keep a large GPU busy, and of partial sums that one program adds up.
BUSY, MANY_BLOCKS = 264, 32
#: Heads of a map whose tiles stay in registers in full precision, as the compiler reports for an H200.
FEW_HEADS = 8


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
    (and, where no rows are picked, queries). `lse` (B, H, Q) are the softmax's normalisers, if they are
    known already; the gradient is that of a softmax in either case. No map is made. A row with every key masked by -inf
    counts as empty.

    >>> q, k = torch.randn(2, 2, 3, 5, 8).unbind()
    >>> whole = row_similarity((q @ k.mT).softmax(-1), variant="paper")
    >>> torch.allclose(diversity(q, k, scale=1.0, variant="paper"), whole)
    True
    """
    query, key = matched(query, key)
    name = chosen(query, key, bias)
    group = query.shape[1] if heads == "mean" else 1
    if name == "triton" and not fits(group, query.shape[3], query.element_size(), available(query.device)):
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
    options = LossOptions(scale, first, heads == "mean", variant == "paper", threshold)
    if name == "chunked":
        return diversity_in_chunks(query, key, bias, rows, options)
    made: tuple[Tensor, ...] = _diversity(query, key, bias, rows, lse, *options)
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
    """The loss, and what its backward pass needs: normalisers unless given, column averages and slopes, row vectors."""
    options = LossOptions(scale, first, average_heads, paper, threshold)
    return launch_forward(query, key, bias, rows, lse, options)


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
    options = LossOptions(scale, first, average_heads, paper, threshold)
    saved = Saved(lse, average, slopes, towards, along, inner)
    return launch_backward(gradient, query, key, bias, rows, options, saved, wants_bias)


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


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass."""

    lse: Tensor
    average: Tensor
    slopes: Tensor
    towards: Tensor
    along: Tensor
    inner: Tensor


@on_device_of_first
def launch_forward(
    query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, lse: Tensor | None, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss and what the backward pass needs, as the operator returns them; normalisers only if none are given."""
    from vitfocus.kernels.diversity import triton as kernels
    from vitfocus.kernels.tiles import normalisers

    shape = _Shape(query, key, bias, rows, options)
    norms = normalisers(query, key, bias, options.scale) if lse is None else lse.contiguous()
    inputs = (query, key, norms, shape.bias, shape.rows)
    maps, group, count, keys = shape.maps, shape.group, shape.count, shape.keys
    floats: Any = {"dtype": torch.float32, "device": query.device}
    blocks, settings = shape.row_blocks("row")
    parts = shape.parts(blocks, settings)
    sums = torch.empty(maps, blocks, keys, **floats)
    squares, overlaps = torch.empty(parts, maps, count, **floats), torch.empty(parts, maps, group, count, **floats)
    kernels.row_pass[blocks * parts * maps,](
        *inputs, sums, squares, overlaps, options.scale, shape.bound, *shape.sizes, maps, parts, *shape.strides,
        **settings,
    )  # fmt: skip
    squares, overlaps, sums = _added(squares, 0), _added(overlaps, 0), _added(sums, 1, MANY_BLOCKS)
    average, column_slopes = torch.empty(maps, keys, **floats), torch.empty(maps, keys, **floats)
    weights, slopes = torch.empty(2, maps, keys, **floats).unbind()
    kept = torch.empty(maps, keys, dtype=torch.int32, device=query.device)
    counts = torch.empty(maps, dtype=torch.int32, device=query.device)
    lengths, losses = torch.empty(2, maps, **floats).unbind()
    width = min(1024, power_of_two(keys))
    kernels.column_pass[maps,](
        sums, average, column_slopes, kept, weights, counts, lengths, shape.bound, sums.shape[1], keys, count, BK=width,
        PAPER=options.paper,
    )  # fmt: skip
    dots, towards, along = (torch.empty(maps, count, **floats) for _ in range(3))
    head_dots, inner = torch.empty(maps, group, count, **floats), torch.empty(maps, group, count, **floats)
    units = torch.empty(maps, blocks, keys, **floats)
    kernels.dot_pass[blocks * maps,](
        *inputs, kept, weights, counts, squares, dots, head_dots, units, options.scale, shape.bound, *shape.sizes,
        *shape.strides, **settings,
    )  # fmt: skip
    units = _added(units, 1, MANY_BLOCKS)
    kernels.slope_column_pass[maps,](
        units, kept, weights, counts, lengths, slopes, column_slopes, losses, units.shape[1], keys, count, BK=width
    )
    kernels.slope_pass[blocks * maps,](
        *inputs, kept, slopes, counts, lengths, squares, dots, overlaps, head_dots, towards, along, inner,
        options.scale, shape.bound, *shape.sizes, *shape.strides, **settings,
    )  # fmt: skip
    own_norms = norms if lse is None else norms.new_empty(0)
    return losses.mean(), own_norms, average, column_slopes, towards, along, inner


def _added(parts: Tensor, axis: int, most: int = 1) -> Tensor:
    """Partial sums, added up if there are more than `most`; the axis stays, with a length of one, if `most` > 1."""
    if parts.shape[axis] > most:
        return parts.sum(dim=axis, keepdim=most > 1)
    return parts if most > 1 else parts.squeeze(axis)


@on_device_of_first
def launch_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    options: LossOptions,
    saved: Saved,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and bias."""
    from vitfocus.kernels.diversity import triton as kernels

    shape = _Shape(query, key, bias, rows, options)
    vectors = (saved.average, saved.slopes, saved.towards, saved.along, saved.inner, gradient)
    inputs = (query, key, saved.lse.contiguous(), shape.bias, shape.rows, *vectors)
    share = 1 / (shape.maps * shape.count)
    key_gradient = empty_like_tokens(key)
    settings = shape.settings("key")
    kernels.key_gradient[_ceil_div(shape.keys, settings["BN"]) * shape.maps,](
        *inputs, key_gradient, share, options.scale, shape.bound, *shape.sizes, *shape.strides, key_gradient.stride(),
        **settings, NARROW=shape.narrow,
    )  # fmt: skip
    query_gradient = _query_gradient(shape, inputs, query, rows, options, share)
    if bias is None or not wants_bias:
        return query_gradient, key_gradient, query.new_empty(0)
    return query_gradient, key_gradient, _bias_gradient(shape, inputs, bias, options, share)


def _query_gradient(
    shape: _Shape, inputs: tuple[Any, ...], query: Tensor, rows: Tensor | None, options: LossOptions, share: float
) -> Tensor:
    """Written directly; or, if there are few rows, in parts by columns that are summed afterwards."""
    from vitfocus.kernels.diversity import triton as kernels

    made = empty_like_tokens(query)
    if shape.count != query.shape[2]:
        made.zero_()
    blocks, settings = shape.row_blocks("query")
    parts = shape.parts(blocks, settings)
    out = made
    if parts > 1:
        out = torch.empty(parts * shape.batch, shape.heads, shape.count, shape.width, device=query.device)
    kernels.query_gradient[blocks * parts * shape.maps,](
        *inputs, out, share, options.scale, shape.bound, *shape.sizes, parts, *shape.strides, out.stride(), **settings,
        PARTS=parts > 1, NARROW=shape.narrow, TURNED=shape.turned,
    )  # fmt: skip
    if parts > 1:
        summed = out.unflatten(0, (parts, shape.batch)).sum(dim=0).to(query.dtype)
        if rows is None:
            made[:, :, options.first :] = summed
        else:
            made.index_copy_(2, rows, summed)
    return made


def _bias_gradient(shape: _Shape, inputs: tuple[Any, ...], bias: Tensor, options: LossOptions, share: float) -> Tensor:
    """Per image if the bias is per image; else summed over images in chunks, so that many cores work."""
    from vitfocus.kernels.diversity import triton as kernels

    batch, heads, queries, keys = shape.batch, shape.heads, shape.queries, shape.keys
    at_once = 1 if bias.shape[0] > 1 else max(1, _ceil_div(batch, 64))
    chunks = _ceil_div(batch, at_once)
    partial = torch.zeros(chunks, heads, queries, keys, dtype=torch.float32, device=bias.device)
    blocks, settings = shape.row_blocks("row")
    grid = (blocks * _ceil_div(keys, settings["BN"]) * chunks * (heads // shape.group),)
    kernels.bias_gradient[grid](
        *inputs, partial, share, options.scale, shape.bound, *shape.sizes, batch, at_once, *shape.strides,
        partial.stride(), **settings, NARROW=shape.narrow,
    )  # fmt: skip
    for axis in range(4):
        if bias.shape[axis] == 1 and partial.shape[axis] > 1:
            partial = partial.sum(dim=axis, keepdim=True)
    return partial.to(bias.dtype)


class _Shape:
    """The sizes of a call, and the block sizes that fit them."""

    def __init__(
        self, query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, options: LossOptions
    ) -> None:
        self.batch, self.heads, self.queries, self.width = query.shape
        self.keys = key.shape[2]
        self.count = self.queries - options.first if rows is None else len(rows)
        self.group = self.heads if options.average_heads else 1
        self.maps = self.batch * self.heads // self.group
        self.bound = options.bound(self.keys)
        self.paper, self.has_bias, self.has_rows = options.paper, bias is not None, rows is not None
        self.bias: Tensor = bias if bias is not None else query
        self.rows: Tensor = rows.contiguous() if rows is not None else query
        spread = (self.batch, self.heads, self.queries, self.keys)
        bias_strides = bias.expand(spread).stride() if bias is not None else (0, 0, 0, 0)
        self.strides = (query.stride(), key.stride(), bias_strides)
        self.sizes = (self.heads, self.queries, self.keys, self.count, options.first)
        self.item, self.shared_memory = query.element_size(), available(query.device)
        self.narrow = self.group > FEW_HEADS  # the tiles of more would not stay in registers
        few = self.group > 1 and self.group * self.width <= FEW_HEADS * 64
        self.turned = few and self.width > 32 and query.element_size() == 2 and _hopper(query.device)

    def row_blocks(self, kind: str) -> tuple[int, dict[str, Any]]:
        """How many blocks of rows there are, and the kernel's settings."""
        settings = self.settings(kind)
        return _ceil_div(self.count, settings["BM"]), settings

    def parts(self, blocks: int, settings: dict[str, Any]) -> int:
        """How many programs share the columns, if there are too few blocks of rows."""
        programs = blocks * self.maps
        if 2 * programs > BUSY:
            return 1
        return max(1, min(_ceil_div(self.keys, 4 * settings["BN"]), BUSY // programs))

    def settings(self, kind: str) -> dict[str, Any]:
        """Block sizes: the tiles of all heads, and their gradients, are to stay in registers."""
        wide = padded(self.width)
        rows, columns, warps = block_sizes(kind, self.group, wide, self.count, self.keys, self.turned)
        rows, columns = shrink(kind, self.group, self.width, self.item, rows, columns, self.shared_memory)
        return {
            "G": self.group,
            "D": self.width,
            "DP": wide,
            "BM": rows,
            "BN": columns,
            "HAS_BIAS": self.has_bias,
            "HAS_ROWS": self.has_rows,
            "PAPER": self.paper,
            "num_warps": warps,
            "num_stages": 1 if self.item == 4 else 2,  # float32 leaves no shared memory to read ahead
        }


def _hopper(device: torch.device) -> bool:
    """Whether the GPU's matrix units take transposed tiles (compute capability 9); the interpreter tests them too."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9


def block_sizes(kind: str, group: int, width: int, rows: int, keys: int, turned: bool) -> tuple[int, int, int]:
    """Rows, columns and warps of a program, as measured on an H200 for 6 heads of 64 channels, scaled for others."""
    high, wide = ((16, 64) if turned else (32, 32)) if kind == "query" else (64, 32)
    if group == 1:
        high, wide = 64, 64
    kept = group * width * (wide if kind == "key" else high)
    while kind in ("query", "key") and kept > 16384 and max(high, wide) > 16:  # gradients stay in registers
        high, wide = (max(16, high // 2), wide) if kind == "query" else (high, max(16, wide // 2))
        if (kind == "query" and high == 16) or (kind == "key" and wide == 16):
            break
        kept //= 2
    while group * high * wide > 16384 and high > 16:  # and so do the heads' tiles
        high //= 2
    high = min(high, padded(rows))
    wide = min(wide, padded(keys))
    warps = 4 if group * (high * wide + (width * max(high, wide) if kind in ("query", "key") else 0)) <= 40960 else 8
    return high, wide, warps


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
