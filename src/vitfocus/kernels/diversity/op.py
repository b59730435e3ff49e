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
#: Up to this many rows and keys, a program keeps a map in registers; with a bias up to half, or they would not suffice.
WHOLE = 128
#: The warps of that program, up to 64 x 64 and beyond.
WHOLE_WARPS = (4, 8)
#: Rows, columns, warps and stages of tiles in half precision, up to 64 channels, as benchmarks/kernel_tiles.py found.
TILES = {"mean": (64, 64, 4, 3), "query": (64, 32, 4, 4), "key": (64, 64, 4, 3), "joint": (32, JOINT_KEYS, 8, 3)}
#: Rows and columns of tiles of the mean map, which take four warps.
MAP_TILES = {"unit": (16, 128), "gradient": (16, 256)}
#: Rows, columns of each of two tiles, warps and stages of `wide_mean_pass`, up to JOINT_KEYS and beyond.
WIDE = ((64, 32, 4, 3), (64, 64, 4, 3))
#: Bytes of shared memory for a joint tile with 256 keys and a bias, plus a margin.
JOINT_SPACE = 140 * 1024
#: Bytes of mean maps that exist at a time: at least the first, and at most the second times those of the queries.
LEAST_MAP, MAP_OVER_QUERIES = 1 << 24, 4
#: Bytes of mean maps that are kept for the backward pass, in percent of those of the queries.
KEPT_PERCENT = 75


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
    wants = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (query, key, bias))
    given = (query, key, bias, rows, lse)
    if not torch.compiler.is_compiling() and type(query) is Tensor:
        like = (query.shape, key.shape, query.dtype, None if bias is None else bias.shape, rows is None, lse is None)
        compile_together(query.device, (like, options, wants), partial(_launch_all, *given, options, wants))
    made: Tensor = _Diversity.apply(*given, wants, *options)
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
        wants: bool,
        scale: float,
        first: int,
        average_heads: bool,
        paper: bool,
        threshold: float,
    ) -> Tensor:
        ctx.options = (scale, first, average_heads, paper, threshold)
        ctx.wants_bias = bias is not None and bias.requires_grad
        loss, *saved = launch_forward(query, key, bias, rows, lse, LossOptions(*ctx.options), wants)
        ctx.save_for_backward(query, key, bias, rows, *saved)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, bias, rows, *saved = ctx.saved_tensors
        options = LossOptions(*ctx.options)
        if wants_second_derivative():
            whole = partial(on_whole_maps, rows=rows, options=options)
            return *differentiable_gradients(whole, (query, key, bias), gradient), *(None,) * 8
        made = launch_backward(gradient, query, key, bias, rows, options, tuple(saved), ctx.wants_bias)
        return (*made, *(None,) * 8)


def _launch_all(
    query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, lse: Tensor | None, options: LossOptions,
    wants: bool,
) -> None:  # fmt: skip
    """Run both passes, to collect the kernels that they launch."""
    loss, *saved = launch_forward(query, key, bias, rows, lse, options, wants)
    if wants:
        learns = bias is not None and bias.requires_grad
        launch_backward(loss, query, key, bias, rows, options, tuple(saved), learns)


@on_device_of_first
def launch_forward(
    query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, lse: Tensor | None, options: LossOptions,
    wants: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The loss, then what the backward pass needs: normalisers, column averages and slopes, norms of the averages, two
    vectors by row if maps are of single heads, bounds of the gradient, squares of the rows, mean maps.

    Only so many of the mean maps over heads, from the first on, as `kept` says. Of maps in registers: normalisers,
    bounds and the gradient with respect to the maps, if all are kept and gradients are wanted (`wants`).
    """
    from vitfocus.kernels.diversity import triton as kernels
    from vitfocus.kernels.tiles import lower_norms, normalisers

    launch = _Launch(query, key, bias, rows, options)
    if launch.whole:
        losses, *made = launch.whole_pass(lse, wants and launch.kept == launch.maps)
        return losses.mean(), *made
    maps, count, span, empty = launch.maps, launch.count, launch.span, launch.empty
    lse = normalisers(query, key, bias, options.scale) if lse is None else lse.contiguous()
    inputs = launch.inputs(lower_norms(lse, rows, launch.count, launch.first, math.log2(launch.keys)))
    blocks, columns, kept = launch.blocks, launch.settings("columns"), launch.kept
    sums, squares = empty(maps, blocks, span), empty(launch.parts, maps, launch.reach)
    units = empty(maps, blocks, span)
    average, slopes, lengths, losses, bounds = (empty(maps, span), empty(maps, span), *(empty(maps) for _ in range(3)))
    towards, along = (launch.by_row() if launch.alone else empty(0) for _ in range(2))
    mean_map = launch.empty_map(0, 0)
    for begin, end in launch.chunks():
        mean_map = launch.empty_map(maps, 0 if launch.alone else end - begin)
        kernels.launch_mean_pass(launch, inputs, mean_map, sums, squares, begin, end)
        if not launch.alone:
            kernels.launch_unit_pass(launch, MAP_TILES["unit"], mean_map, squares, sums, units, begin, end)
        # In a launch of their own, too few maps to fill the GPU would take longer than this copy.
        mean_map = mean_map if kept == maps else mean_map[:kept].clone()
    kernels.column_pass[(maps,)](sums, average, lengths, launch.bound, blocks, launch.keys, span, count, **columns)
    if launch.alone:
        kernels.launch_unit_pass_alone(launch, inputs, average, lengths, squares, towards, along, units)
    kernels.slope_pass[(maps,)](
        units, average, lengths, squares, slopes, losses, bounds, blocks, launch.keys, span, count, launch.reach, maps,
        launch.parts, **columns,
    )  # fmt: skip
    return losses.mean(), inputs[2], average, slopes, lengths, towards, along, bounds, squares, mean_map


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
    from vitfocus.kernels.diversity import gradients as kernels

    launch = _Launch(query, key, bias, rows, options)
    maps, count, group = launch.maps, launch.count, launch.group
    if launch.whole:
        norms, bounds, slope = saved
        if slope.shape[0] == 0:
            _, norms, bounds, slope = launch.whole_pass(None, True)
        average = slopes = towards = along = norms  # stand in for what is read for maps of single heads
    else:
        norms, average, slopes, lengths, towards, along, bounds, squares, mean_map = saved
    inputs, chunks = launch.inputs(norms), launch.chunks()
    mine, theirs = (launch.settings(kind) | {"ALONE": launch.alone} for kind in ("query", "key"))
    inner, share = torch.empty_like(norms), 1 / (maps * count * group)
    query_gradient, key_gradient = empty_like_tokens(query), empty_like_tokens(key)
    if count != launch.queries:
        query_gradient.zero_()
    key_sum = key_gradient if len(chunks) == 1 else empty_like_tokens(key, torch.float32)
    bias_sum = None
    if bias is not None and wants_bias and (bias.shape[3] > 1 or launch.keys == 1):
        sizes = (launch.batch, launch.queries, launch.keys)
        bias_sum = kernels.BiasSum(bias, sizes, mine | {"JOINT": launch.joint}, LEAST_MAP)
    if bias_sum is not None or mine["BM"] % theirs["BM"]:
        inner.zero_()  # blocks of rows may extend past those that are written
    for begin, end in chunks:
        if not launch.whole:
            slope = launch.gradient_pass(inputs, mean_map, average, lengths, slopes, squares, bounds, begin, end)
        given = (*inputs, slope, average, slopes, towards, along, bounds, inner, gradient)
        rest = (share, *launch.numbers, begin, end)
        if launch.joint:
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
        del given, slope  # so that the next chunk's map reuses this memory
    if len(chunks) > 1:
        key_gradient.copy_(key_sum)
    if bias is None or not wants_bias:
        return query_gradient, key_gradient, None
    # Adding a constant to all logits of a row does not change attention.
    return query_gradient, key_gradient, bias_sum.total() if bias_sum is not None else torch.zeros_like(bias)


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

    def empty_map(self, maps: int, rows: int) -> Tensor:
        """Space for so many maps and rows of them; a single head's map is never stored or rounded."""
        wide = self.alone or self.item == 4 or self.keys > 65504  # K·a, up to K, would overflow float16
        dtype = torch.float32 if wide else torch.float16
        return torch.empty(maps, rows, self.stride, dtype=dtype, device=self.query.device)

    def empty_slope(self, maps: int, rows: int) -> Tensor:
        """Space for the gradient with respect to so many maps, as the kernels for queries and keys read it."""
        made = self.empty_map(0 if self.joint else maps, rows)
        return made.new_empty(maps, self.stride, _ceil_div(rows, 16) * 16) if self.joint else made

    def chunks(self) -> list[tuple[int, int]]:
        """Start and end of each chunk of rows whose mean maps exist at the same time, in multiples of a block."""
        if self.alone:
            return [(0, self.count)]
        block = max(self.settings(kind)["BM"] for kind in ("wide" if self.wide else "mean", "query", "key"))
        most = max(LEAST_MAP, MAP_OVER_QUERIES * self.batch * self.heads * self.queries * self.width * self.item)
        rows = min(most // (self.maps * self.item), 2**31 - 1) // self.stride
        rows = max(1, rows // block) * block
        return [(begin, min(begin + rows, self.count)) for begin in range(0, self.count, rows)]

    @property
    def kept(self) -> int:
        """How many maps are kept for the backward pass, the first ones of the batch; it computes the others again.

        Compiled code keeps all or none: the memory of a step there grew as if a copy of some maps kept them all.
        """
        if self.alone or len(self.chunks()) > 1:
            return 0
        most = KEPT_PERCENT * self.batch * self.heads * self.queries * self.width // 100
        some = min(self.maps, most // (self.count * self.stride))
        return 0 if torch.compiler.is_compiling() and some < self.maps else some

    @property
    def rows_each(self) -> int:
        """Rows per program where columns are summed."""
        if self.alone:
            return int(self.settings("mean")["BM"])
        return 64 if self.keys <= JOINT_KEYS else 256

    @property
    def blocks(self) -> int:
        """Blocks of rows of a map for which there are column sums."""
        return sum(_ceil_div(end - begin, self.rows_each) for begin, end in self.chunks())

    @property
    def parts(self) -> int:
        """How many programs share the columns: one for two tiles, or if there are too few blocks of rows."""
        settings, (begin, end) = self.settings("wide" if self.wide else "mean"), self.chunks()[0]
        if self.once:
            return _ceil_div(self.stride, 2 * settings["BN"])
        programs = _ceil_div(end - begin, settings["BM"]) * self.maps
        return max(1, min(_ceil_div(self.keys, 2 * settings["BN"]), 2 * BUSY // programs))

    @property
    def whole(self) -> bool:
        """Whether one program takes a map of all heads, with its loss and gradient."""
        most = WHOLE if self.bias is None else WHOLE // 2
        return not self.alone and max(self.count, self.keys) <= most and self.width <= 64 and len(self.chunks()) == 1

    def whole_pass(self, lse: Tensor | None, wants: bool) -> tuple[Tensor, ...]:
        """Losses, normalisers, bounds and, if it is wanted, the gradient with respect to the maps."""
        from vitfocus.kernels.diversity.whole import whole_pass

        losses, bounds, norms = (
            self.empty(self.maps),
            self.empty(self.maps),
            self.empty(*self.query.shape[:2], self.reach),
        )
        slope = self.empty_slope(self.maps if wants else 0, self.count)
        whole_pass[(self.maps,)](
            *self.inputs(self.query if lse is None else lse.contiguous()), norms, losses, bounds, slope, *self.numbers,
            self.queries, math.log2(self.keys), **self.settings("whole"), HAS_LSE=lse is not None, WANTS_SLOPE=wants,
            TURNED=self.joint,
        )  # fmt: skip
        return losses, norms, bounds, slope

    def gradient_pass(
        self, inputs: tuple[Tensor, ...], mean_map: Tensor, average: Tensor, lengths: Tensor, slopes: Tensor,
        squares: Tensor, bounds: Tensor, begin: int, end: int,
    ) -> Tensor:  # fmt: skip
        """The gradient with respect to these rows of the mean maps, of which those not kept are computed again."""
        from vitfocus.kernels.diversity import triton as kernels

        if self.alone:
            return mean_map
        kept, (high, wide) = mean_map.shape[0], MAP_TILES["gradient"]
        settings = {"BR": high, "BK": min(wide, power_of_two(self.stride)), "PAPER": self.paper, "num_warps": 4}
        made = self.empty_slope(self.maps, end - begin)
        again = made
        if kept < self.maps:
            again = self.empty_map(self.maps, end - begin) if self.joint else made
            kernels.launch_mean_pass(self, inputs, again, squares, torch.empty_like(squares), begin, end, kept)
        for source, skip, number in ((mean_map, 0, kept), (again, kept, self.maps - kept)):
            if number:
                kernels.gradient_pass[(_ceil_div(end - begin, high) * number,)](
                    source, made, average, lengths, slopes, squares, bounds, self.bound, self.stride, self.span,
                    self.reach, begin, end, self.maps, self.parts, skip, **settings, TURNED=self.joint,
                )  # fmt: skip
        return made

    @property
    def wide(self) -> bool:
        """Whether a program of the mean map has two tiles at a time."""
        return not self.alone and self.item == 2 and self.width <= 64 and self.bias is None

    @property
    def once(self) -> bool:
        """Whether it has no others: of few columns, there are few sums of squares by row to add up."""
        return self.wide and self.keys <= JOINT_KEYS

    @property
    def joint(self) -> bool:
        """Whether one program takes all columns of a head, for both gradients."""
        fills = 2 * self.batch * self.heads >= BUSY
        fits = self.keys <= JOINT_KEYS and self.item == 2 and self.width <= 64 and self.space >= JOINT_SPACE
        return fills and fits and len(self.chunks()) == 1

    def settings(self, kind: str) -> dict[str, Any]:
        """Block sizes and the other compile-time arguments of the kernels."""
        if kind == "columns":
            width = min(1024, power_of_two(self.keys))
            return {"PAPER": self.paper, "BK": width, "BR": min(8, power_of_two(self.blocks)),
                    "num_warps": 8 if width > 256 else 4}  # fmt: skip
        if kind == "wide":
            rows, columns, warps, stages = WIDE[int(self.keys > JOINT_KEYS)]
            tile = {"BM": min(rows, padded(self.count)), "BN": min(columns, padded(self.keys))}
            return self._form() | tile | {"num_warps": warps, "num_stages": stages}
        rows, columns, stages = row_tiles(self.width, self.item, self.count, self.keys, self.space)
        warps = 4
        more = {}
        if kind == "whole":
            rows, columns, stages = padded(self.count), padded(self.keys), 2 if self.item == 2 else 1
            square = self.bias is None and self.rows is None and self.first == 0 and self.count == self.keys
            more["EXTRA"] = square and 32 <= rows // 2 == self.keys - 1
            if more["EXTRA"]:
                rows, columns = rows // 2, columns // 2
            warps = WHOLE_WARPS[0] if rows * columns <= 4096 else WHOLE_WARPS[1]
        elif kind == "joint" or (self.item == 2 and self.width <= 64):
            most_rows, most_columns, warps, stages = TILES[kind]
            rows, columns = min(most_rows, padded(self.count)), min(most_columns, padded(self.keys))
            if rows * columns <= most_rows * most_columns // 2:
                warps = 4
            if kind == "joint" and self.bias is not None:
                stages -= 1  # a tile of the bias takes the space
        elif kind == "key" and rows > columns:  # products are faster if the side kept by the program is longer
            rows, columns = min(columns, padded(self.count)), min(rows, padded(self.keys))
        return self._form() | {"BM": rows, "BN": columns, "num_warps": warps, "num_stages": stages, **more}

    def _form(self) -> dict[str, Any]:
        """What is compiled into all kernels that read queries and keys."""
        given = {"HAS_BIAS": self.bias is not None, "HAS_ROWS": self.rows is not None, "PAPER": self.paper}
        return {"D": self.width, "DP": padded(self.width), **given}


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
