"""The Attention Diversification Loss from queries and keys, without keeping a map, with its gradient.

`diversity` chooses the backend: Triton on a GPU, chunks elsewhere, the reference on whole maps that fit a cache.
torch.compile traces into the launches. docs/kernels.md derives both passes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.kernels.attention import matched
from vitfocus.kernels.backends import (
    chosen,
    compile_together,
    differentiable_gradients,
    forced,
    on_device_of_first,
    wants_second_derivative,
)
from vitfocus.kernels.diversity.chunked import (
    LossOptions,
    diversity_in_chunks,
    empty_like_tokens,
    on_whole_maps,
)
from vitfocus.kernels.diversity.reference import Heads, Variant
from vitfocus.kernels.inputs import readable, with_four_axes
from vitfocus.kernels.shared_memory import MOST_CHANNELS, available, padded, power_of_two, row_tiles

#: Maps up to this many elements stay in a core's caches, and chunks are no faster than whole maps.
SMALL = 1 << 18
#: The number of programs that keep a large GPU busy.
BUSY = 264
#: Up to this many keys, one program computes both gradients of a head, if there are enough heads to fill half a GPU.
JOINT_KEYS = 256
#: Rows, columns and stages of tiles in half precision, up to 64 channels, as benchmarks/kernel_tiles.py found.
TILES = {"mean": (64, 64, 3), "query": (64, 32, 3), "key": (32, 64, 3), "joint": (32, JOINT_KEYS, 2)}
#: Bytes of shared memory for a joint tile with 256 keys and a bias, plus a margin.
JOINT_SPACE = 140 * 1024
#: Bytes of mean maps that exist at a time: at least the first, and at most the second times those of the queries.
LEAST_MAP, MAP_OVER_QUERIES = 1 << 24, 4


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

    `bias` is broadcastable to (B, H, Q, K). `rows` (R,) picks distinct query rows; the first `first` keys (and, if no
    rows are picked, queries) are left out. `lse` (B, H, Q) are the softmax's normalisers, if already known;
    the gradient is that of a softmax in either case. A row with every key masked by -inf counts as
    empty; without any image or row the loss is 0.

    >>> q, k = torch.randn(2, 2, 3, 5, 8).unbind()
    >>> from vitfocus.kernels.diversity.reference import row_similarity
    >>> whole = row_similarity((q @ k.mT).softmax(-1), variant="paper")
    >>> torch.allclose(diversity(q, k, scale=1.0, variant="paper"), whole)
    True
    """
    query, key = matched(query, key)
    bias = with_four_axes(bias, (*query.shape[:3], key.shape[2]))
    rows = _row_numbers(rows) if rows is not None else None
    if first < 0 or variant not in ("official", "paper") or heads not in ("mean", "each"):
        raise VitfocusError(f"There is no loss with first={first}, variant={variant!r} and heads={heads!r}.")
    name = chosen(query, key, bias)
    count = query.shape[2] - first if rows is None else rows.shape[0]
    if query.shape[0] * query.shape[1] == 0 or count <= 0 or key.shape[2] <= first:
        nothing = query[:0].sum() + key[:0].sum() + (0 if bias is None else bias[:0].sum())
        return nothing.to(torch.promote_types(query.dtype, torch.float32))
    if name == "triton" and query.shape[3] > MOST_CHANNELS:
        name = "chunked"
    if name == "chunked" and forced() == "auto" and query.shape[:3].numel() * key.shape[2] <= SMALL:
        name = "reference"
    options = LossOptions(scale, first, heads == "mean", variant == "paper", threshold)
    if name == "reference":
        return on_whole_maps(query, key, bias, rows, options)
    if name == "chunked":
        return diversity_in_chunks(query, key, bias, rows, options)
    query, key = readable(query), readable(key)
    if not torch.compiler.is_compiling() and type(query) is Tensor:
        like = (query.shape, key.shape, query.dtype, bias if bias is None else bias.shape, rows is None, lse is None)
        compile_together(query.device, (like, options), partial(_launch_all, query, key, bias, rows, lse, options))
    made: Tensor = _Diversity.apply(query, key, bias, rows, lse, *options)
    return made


def _row_numbers(rows: Tensor) -> Tensor:
    """Numbers of rows in int64, in which the kernels and torch index."""
    if rows.ndim != 1 or rows.dtype not in (torch.int64, torch.int32):
        raise VitfocusError(
            f"rows takes the numbers of the rows, int64 of shape (R,), and was given {rows.dtype} of shape "
            f"{tuple(rows.shape)}."
        )
    return rows.long()


class _Diversity(torch.autograd.Function):
    """The loss by the Triton kernels."""

    @staticmethod
    def forward(
        ctx: Any,
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
    ) -> Tensor:
        ctx.options = (scale, first, average_heads, paper, threshold)
        ctx.wants_bias = bias is not None and bias.requires_grad
        loss, *saved = launch_forward(query, key, bias, rows, lse, LossOptions(*ctx.options))
        ctx.save_for_backward(query, key, bias, rows, *saved)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, bias, rows, *saved = ctx.saved_tensors
        options = LossOptions(*ctx.options)
        if wants_second_derivative():
            whole = partial(on_whole_maps, rows=rows, options=options)
            return *differentiable_gradients(whole, (query, key, bias), gradient), *(None,) * 7
        made = launch_backward(gradient, query, key, bias, rows, options, tuple(saved), ctx.wants_bias)
        return (*made, *(None,) * 7)


def _launch_all(
    query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, lse: Tensor | None, options: LossOptions
) -> None:
    """Run both passes, to collect the kernels that they launch."""
    loss, *saved = launch_forward(query, key, bias, rows, lse, options)
    if query.requires_grad or key.requires_grad:
        learns = bias is not None and bias.requires_grad
        launch_backward(loss, query, key, bias, rows, options, tuple(saved), learns)


@on_device_of_first
def launch_forward(
    query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, lse: Tensor | None, options: LossOptions
) -> tuple[Tensor, ...]:
    """The loss, then what the backward pass needs: normalisers, column averages and slopes, norms of the averages, two
    vectors by row, a map.

    The mean map over heads is kept if it is smaller than the queries, else empty. If it is computed in chunks, the
    vectors by row are left to the backward pass, which recomputes the chunks.
    """
    from vitfocus.kernels.diversity import triton as kernels
    from vitfocus.kernels.tiles import lower_norms, normalisers

    launch = _Launch(query, key, bias, rows, options)
    maps, count, span, empty = launch.maps, launch.count, launch.span, launch.empty
    lse = normalisers(query, key, bias, options.scale) if lse is None else lse.contiguous()
    inputs = launch.inputs(lower_norms(lse, rows, launch.count, launch.first, math.log2(launch.keys)))
    blocks, chunks, columns = launch.blocks, launch.chunks(), launch.settings("columns")
    at_once = len(chunks) == 1
    sums, squares = empty(maps, blocks, span), empty(launch.parts, maps, launch.reach)
    average, slopes, lengths, losses = empty(maps, span), empty(maps, span), empty(maps), empty(maps)
    towards, along = launch.by_row(), launch.by_row()
    mean_map = launch.empty_map(0)
    if at_once:
        units = sums  # last read before this is written
    else:
        units = empty(maps, blocks, span)
        average.zero_()
        lengths.zero_()
    for begin, end in chunks:
        mean_map = launch.empty_map(0 if launch.alone else end - begin)
        launch.mean_pass(inputs, mean_map, sums, squares, begin, end)
        if at_once:
            kernels.column_pass[(maps,)](
                sums, average, lengths, launch.bound, blocks, launch.keys, span, count, **columns
            )
        launch.unit_pass(inputs, mean_map, average, lengths, squares, towards, along, units, begin, end)
        if not at_once or launch.keys > launch.group * launch.width:
            mean_map = launch.empty_map(0)
    if not at_once:
        kernels.column_pass[(maps,)](sums, average, lengths, launch.bound, blocks, launch.keys, span, count, **columns)
    kernels.slope_pass[(maps,)](units, average, lengths, slopes, losses, blocks, launch.keys, span, count, **columns)
    return losses.mean(), inputs[2], average, slopes, lengths, towards, along, mean_map


@on_device_of_first
def launch_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    options: LossOptions,
    saved: tuple[Tensor, ...],
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys and bias, from what the forward pass saved."""
    from vitfocus.kernels.diversity import triton as kernels

    launch = _Launch(query, key, bias, rows, options)
    maps, count, group = launch.maps, launch.count, launch.group
    norms, average, slopes, lengths, towards, along, mean_map = saved
    inputs, chunks = launch.inputs(norms), launch.chunks()
    mine, theirs = (launch.settings(kind) | {"ALONE": launch.alone} for kind in ("query", "key"))
    inner, share = torch.empty_like(norms), 1 / (maps * count * group)
    query_gradient, key_gradient = empty_like_tokens(query), empty_like_tokens(key)
    if count != launch.queries:
        query_gradient.zero_()
    key_sum = key_gradient if len(chunks) == 1 else empty_like_tokens(key, torch.float32)
    bias_sum = None
    if bias is not None and wants_bias and (bias.shape[3] > 1 or launch.keys == 1):
        bias_sum = _BiasSum(bias, launch, mine)
        inner.zero_()  # the bias kernel's blocks of rows may extend past those that are written
    for begin, end in chunks:
        if not launch.alone and not mean_map.shape[1]:
            mean_map = launch.empty_map(end - begin)
            sums, squares = (
                launch.empty(maps, launch.blocks, launch.span),
                launch.empty(launch.parts, maps, launch.reach),
            )
            launch.mean_pass(inputs, mean_map, sums, squares, begin, end)
            if len(chunks) > 1:
                launch.unit_pass(inputs, mean_map, average, lengths, squares, towards, along, sums, begin, end)
        given = (*inputs, mean_map, average, slopes, towards, along, inner, gradient)
        rest = (share, *launch.numbers, begin, end)
        if launch.joint and len(chunks) == 1:
            kernels.joint_gradient[(group * maps,)](
                *given, query_gradient, key_gradient, *rest, *query_gradient.stride()[:3], *key_gradient.stride()[:3],
                **launch.settings("joint"), ALONE=launch.alone,
            )  # fmt: skip
        else:
            kernels.query_gradient[(group * _ceil_div(end - begin, mine["BM"]) * maps,)](
                *given, query_gradient, *rest, *query_gradient.stride()[:3], **mine
            )
            kernels.key_gradient[(group * _ceil_div(launch.keys, theirs["BN"]) * maps,)](
                *given, key_sum, *rest, *key_sum.stride()[:3], **theirs
            )
        if bias_sum is not None:
            bias_sum.add(given, rest, begin, end)
        mean_map = launch.empty_map(0)
        del given  # so that the next chunk's map reuses this memory
    if len(chunks) > 1:
        key_gradient.copy_(key_sum)
    if bias is None or not wants_bias:
        return query_gradient, key_gradient, None
    # Adding a constant to all logits of a row does not change attention.
    return query_gradient, key_gradient, bias_sum.total() if bias_sum is not None else torch.zeros_like(bias)


class _BiasSum:
    """The gradient of a bias: per image if the bias is; else summed over images in parts, to occupy many SMs.

    Nothing is larger than the bias in float32, or a few megabytes: heads and rows that share a bias are summed at once.
    """

    def __init__(self, bias: Tensor, launch: _Launch, settings: dict[str, Any]) -> None:
        self.bias, self.launch, self.settings = bias, launch, settings
        self.by_row = bias.shape[2] > 1 or launch.queries == 1
        shape = (bias.shape[1], launch.queries if self.by_row else 1, launch.keys)
        most = max(1, LEAST_MAP // (4 * math.prod(shape)))
        self.at_once = 1 if bias.shape[0] > 1 else _ceil_div(launch.batch, min(64, most, launch.batch))
        parts = _ceil_div(launch.batch, self.at_once)
        self.sums = torch.zeros(parts, *shape, dtype=torch.float32, device=bias.device)

    def add(self, given: tuple[Any, ...], rest: tuple[Any, ...], begin: int, end: int) -> None:
        from vitfocus.kernels.diversity import triton as kernels

        launch, settings = self.launch, self.settings
        row_blocks = _ceil_div(end - begin, settings["BM"]) if self.by_row else 1
        tiles = row_blocks * _ceil_div(launch.keys, settings["BN"])
        parts, heads = self.sums.shape[:2]
        kernels.bias_gradient[(tiles * heads * parts,)](
            *given, self.sums, *rest, launch.queries, launch.batch, self.at_once, heads, **settings, BY_ROW=self.by_row
        )

    def total(self) -> Tensor:
        sums = self.sums
        for axis in range(4):
            if self.bias.shape[axis] == 1 and sums.shape[axis] > 1:
                sums = sums.sum(dim=axis, keepdim=True)
        return sums.expand(self.bias.shape).to(self.bias.dtype)


class _Launch:
    """The sizes of a call, and the kernel arguments derived from them."""

    def __init__(
        self, query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, options: LossOptions
    ) -> None:
        from vitfocus.kernels.tiles import REACH, strides

        self.batch, self.heads, self.queries, self.width = query.shape
        self.query, self.key, self.bias, self.rows = query, key, bias, rows
        self.keys = key.shape[2]
        self.count = self.queries - options.first if rows is None else rows.shape[0]
        self.group = self.heads if options.average_heads else 1
        self.alone = self.group == 1
        self.maps = self.batch * self.heads // self.group
        self.bound = options.bound(self.keys) * self.keys
        self.stride = _ceil_div(self.keys, 16) * 16
        self.paper, self.item, self.space = options.paper, query.element_size(), available(query.device)
        # Vectors by row and by column are padded, so that kernels load them without a bounds mask.
        self.first, self.reach, self.span = options.first, _ceil_div(self.count, REACH) * REACH, self._span()
        sizes = (self.heads, self.group, self.keys, self.count, options.first)
        spaces = (self.stride, self.span, self.reach)
        self.numbers = (options.scale, self.bound, *sizes, *strides(query, key, bias), *spaces)

    def _span(self) -> int:
        return _ceil_div(self.keys, 128) * 128 if self.keys > JOINT_KEYS else max(128, power_of_two(self.keys))

    def inputs(self, norms: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, normalisers, bias and rows; queries stand in for absent ones."""
        bias = self.bias if self.bias is not None else self.query
        rows = self.rows.contiguous() if self.rows is not None else self.query
        return self.query, self.key, norms, bias, rows

    def empty(self, *shape: int) -> Tensor:
        """An empty float32 tensor."""
        return torch.empty(shape, dtype=torch.float32, device=self.query.device)

    def by_row(self) -> Tensor:
        """One value per row of each map; 0 where the backward pass reads rows that `unit_pass` does not write."""
        longest = max(self.settings(kind)["BM"] for kind in ("query", "key", "joint"))
        made = self.empty(self.maps, self.reach)
        return made if self.settings("mean")["BM"] % longest == 0 else made.zero_()

    def empty_map(self, rows: int) -> Tensor:
        """Space for `rows` rows of each map; a single head's map is never stored or rounded."""
        wide = self.alone or self.item == 4 or self.keys > 65504  # K·a, up to K, would overflow float16
        dtype = torch.float32 if wide else torch.float16
        return torch.empty(self.maps, rows, self.stride, dtype=dtype, device=self.query.device)

    def chunks(self) -> list[tuple[int, int]]:
        """Start and end of each chunk of rows whose mean maps exist at the same time, in multiples of a block."""
        if self.alone:
            return [(0, self.count)]
        block = self.settings("mean")["BM"]
        most = max(LEAST_MAP, MAP_OVER_QUERIES * self.batch * self.heads * self.queries * self.width * self.item)
        rows = min(most // (self.maps * self.item), 2**31 - 1) // self.stride
        rows = max(1, rows // block) * block
        return [(begin, min(begin + rows, self.count)) for begin in range(0, self.count, rows)]

    @property
    def blocks(self) -> int:
        """Blocks of rows of a map."""
        return _ceil_div(self.count, self.settings("mean")["BM"])

    @property
    def parts(self) -> int:
        """How many programs share the columns, if there are too few blocks of rows."""
        settings, (begin, end) = self.settings("mean"), self.chunks()[0]
        programs = _ceil_div(end - begin, settings["BM"]) * self.maps
        return max(1, min(_ceil_div(self.keys, 2 * settings["BN"]), 2 * BUSY // programs))

    def mean_pass(
        self, inputs: tuple[Tensor, ...], mean_map: Tensor, sums: Tensor, squares: Tensor, begin: int, end: int
    ) -> None:
        """Launch the pass over these rows."""
        from vitfocus.kernels.diversity import triton as kernels

        settings = self.settings("mean")
        kernels.mean_pass[(_ceil_div(end - begin, settings["BM"]) * self.parts * self.maps,)](
            *inputs, mean_map, sums, squares, *self.numbers, begin, end, self.maps, self.parts, **settings,
            STORED=not self.alone,
        )  # fmt: skip

    def unit_pass(self, inputs: tuple[Tensor, ...], *rest: Any) -> None:
        """Launch the pass over these rows."""
        from vitfocus.kernels.diversity import triton as kernels

        settings, (*tensors, begin, end) = self.settings("mean"), rest
        kernels.unit_pass[(_ceil_div(end - begin, settings["BM"]) * self.maps,)](
            *inputs, *tensors, *self.numbers, begin, end, self.maps, self.parts, **settings,
            STORED=not self.alone,
        )  # fmt: skip

    @property
    def joint(self) -> bool:
        """Whether one program takes all columns of a head, for both gradients."""
        fills = 2 * self.batch * self.heads >= BUSY
        fits = self.keys <= JOINT_KEYS and self.item == 2 and self.width <= 64 and self.space >= JOINT_SPACE
        return fills and fits

    def settings(self, kind: str) -> dict[str, Any]:
        """Block sizes and the other compile-time arguments of the kernels."""
        if kind == "columns":
            width = min(1024, power_of_two(self.keys))
            return {"PAPER": self.paper, "BK": width, "BR": min(8, power_of_two(self.blocks)),
                    "num_warps": 8 if width > 256 else 4}  # fmt: skip
        rows, columns, stages = row_tiles(self.width, self.item, self.count, self.keys, self.space)
        if kind == "joint" or (self.item == 2 and self.width <= 64):
            most_rows, most_columns, stages = TILES[kind]
            rows, columns = min(most_rows, padded(self.count)), min(most_columns, padded(self.keys))
        elif kind == "key" and rows > columns:  # products are faster if the side kept by the program is longer
            rows, columns = min(columns, padded(self.count)), min(rows, padded(self.keys))
        return {
            "D": self.width,
            "DP": padded(self.width),
            "BM": rows,
            "BN": columns,
            "HAS_BIAS": self.bias is not None,
            "HAS_ROWS": self.rows is not None,
            "PAPER": self.paper,
            "num_warps": 8 if kind == "joint" and columns > 128 else 4,
            "num_stages": stages,
        }


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
