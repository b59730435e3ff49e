"""The diversification loss in plain torch, one chunk of images or rows at a time: memory linear in the tokens.

A chunk is whole rows of some images' maps, as many as fit in caches. One pass over the rows gives the loss. The loss
is a scalar, so its gradient is computed in the forward pass, up to the factor that the backward pass multiplies with:
from the same rows if an image's map is small enough to be kept, else from recomputed rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitfocus.kernels.backends import differentiable_gradients, wants_second_derivative
from vitfocus.kernels.diversity.reference import SHORTEST, row_similarity
from vitfocus.kernels.inputs import outside_autocast

#: Elements per chunk of maps: what fits in a core's caches; a GPU without Triton needs more to be busy.
CPU_CHUNK, GPU_CHUNK = 1 << 19, 1 << 24

#: Elements per chunk that spans several images, on a CPU: what fits in its fastest caches.
IMAGES_CHUNK = 3 << 17

#: The fewest rows per chunk: with fewer, accumulating the keys' gradient costs more than computing it.
LEAST_ROWS = 128

#: Maps of one image with up to this many elements are kept for the gradient, not recomputed: 16 MB in float32. Twice
#: LEAST_ROWS rows of any length are kept too.
KEPT_CHUNK = 1 << 22


class LossOptions(NamedTuple):
    """The options of the loss, needed in both passes."""

    scale: float
    first: int
    average_heads: bool
    paper: bool
    threshold: float

    def bound(self, keys: int) -> float:
        """The threshold of an entry, τ / N."""
        return self.threshold / (keys - self.first)


class Gradients(NamedTuple):
    """The loss's gradient with respect to the compared queries (B, H, R, D), keys and bias; empty where not needed."""

    query: Tensor
    key: Tensor
    bias: Tensor


def empty_like_tokens(tokens: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty (B, H, N, D) with the memory layout (B, N, H, D), as projections produce and consume it."""
    batch, heads, count, width = tokens.shape
    return tokens.new_empty((batch, count, heads, width), dtype=dtype).transpose(1, 2)


def on_whole_maps(query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, options: LossOptions) -> Tensor:
    """The loss from whole maps, as `row_similarity` defines it."""
    pick = slice(options.first, None) if rows is None else rows
    wide = torch.promote_types(query.dtype, torch.float32)
    with outside_autocast(query.device):
        scores = query[:, :, pick].to(wide) * options.scale @ key.to(wide).mT
    if bias is not None:
        scores = scores + (bias if bias.shape[-2] == 1 else bias[..., pick, :]).to(wide)
    # As an operator, because torch.compile does not trace the function of that name.
    maps = scores.softmax(dim=-1) if bias is None else torch.ops.aten._safe_softmax(scores, -1)
    return row_similarity(
        maps[..., options.first :],
        variant="paper" if options.paper else "official",
        heads="mean" if options.average_heads else "each",
        threshold=options.threshold,
    )


def forward(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    options: LossOptions,
    wants_gradient: bool,
    wants_bias: bool,
) -> tuple[Tensor, Gradients]:
    """The loss and its gradients."""
    maps = Maps(query, key, bias, rows, options)
    made = empty_gradients(query, key, bias, maps.count, wants_gradient, wants_bias)
    made.bias.zero_()
    losses = query.new_empty(maps.batch * maps.groups, dtype=maps.wide)
    for images in maps.images():
        mine = slice(images.start * maps.groups, images.stop * maps.groups)
        losses[mine] = _Images(maps, images, made if wants_gradient else None, wants_bias).loss()
    return losses.mean(), made


def empty_gradients(
    query: Tensor, key: Tensor, bias: Tensor | None, count: int, wants: bool, wants_bias: bool
) -> Gradients:
    """Empty gradients for `count` rows, in float32 or wider, because they are scaled later."""
    batch, heads, keys, width = key.shape
    like = query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32))
    return Gradients(
        like.new_empty((batch, heads, count, width) if wants else 0),
        like.new_empty((batch, heads, keys, width) if wants else 0),
        like.new_empty(bias.shape if bias is not None and wants_bias else 0),
    )


class Maps:
    """Sizes of all maps, and how they are cut into chunks."""

    def __init__(
        self, query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, options: LossOptions
    ) -> None:
        self.wide = torch.promote_types(query.dtype, torch.float32)
        self.query, self.key, self.bias, self.rows, self.options = query, key, bias, rows, options
        self.batch, self.heads, self.keys = query.shape[0], query.shape[1], key.shape[2]
        self.count = len(rows) if rows is not None else query.shape[2] - options.first
        self.groups = 1 if options.average_heads else self.heads
        bound = torch.tensor(options.bound(self.keys), dtype=self.wide, device="cpu")
        # x ≥ bound is x > the float just below the bound.
        below = torch.nextafter(bound, torch.zeros_like(bound)) if options.paper else bound
        self.bound, self.below = float(bound), float(below)
        self.budget = CPU_CHUNK if query.device.type == "cpu" else GPU_CHUNK

    def images(self) -> Iterator[slice]:
        """Chunks of images, of nearly the same size."""
        budget = min(self.budget, IMAGES_CHUNK) if self.query.device.type == "cpu" else self.budget
        chunks = -(-self.batch // max(1, budget // (self.heads * self.count * self.keys)))
        at_once = -(-self.batch // chunks)
        for start in range(0, self.batch, at_once):
            yield slice(start, min(start + at_once, self.batch))

    def parts(self) -> list[slice]:
        """Chunks of rows; one if a whole map is small enough."""
        at_once = max(LEAST_ROWS, self.budget // (self.heads * self.keys))
        return [slice(start, min(start + at_once, self.count)) for start in range(0, self.count, at_once)]

    def pick(self, tensor: Tensor) -> Tensor:
        """The compared rows of (b, H, Q, ·)."""
        return tensor[:, :, self.options.first :] if self.rows is None else tensor.index_select(2, self.rows)


class Compared(ABC):
    """The compared rows of `count` maps: each is the mean of an image's heads, or one head's own.

    The rows come in `parts`. If `learns`, there is a gradient; if the rows `stay`, they are kept for it.
    """

    def __init__(self, maps: Maps, count: int, parts: list[slice], learns: bool, stay: bool = True) -> None:
        self.maps, self.options, self.count, self.parts = maps, maps.options, count, parts
        self.learns, self.stay = learns, stay

    @abstractmethod
    def rows(self, part: slice) -> Tensor:
        """Some compared rows, (m, r, K)."""

    @abstractmethod
    def take(self, slope: Tensor, part: slice) -> None:
        """Use the gradient of the loss with respect to some compared rows; unless they stay, the last ones made."""

    def loss(self) -> Tensor:
        """The loss of each map."""
        maps = self.maps
        like = maps.query.new_empty(0, dtype=maps.wide)
        sums, units = (like.new_zeros(self.count, maps.keys) for _ in range(2))
        unit = like.new_empty(self.count, maps.count)
        waiting = []
        for part in self.parts:
            rows, kept = self._rows(part)
            unit[:, part] = _inverse_length(kept)
            sums += (kept if self.options.paper else rows).sum(dim=1)
            units += torch.bmm(unit[:, None, part], kept)[:, 0]
            if self.learns and self.stay:
                waiting.append((rows, kept))
            del rows, kept  # free them before the next ones are computed
        average = sums / maps.count
        if not self.options.paper:
            average = torch.threshold(average, maps.bound, 0)
            if self.options.first:
                average[:, : self.options.first] = 0
        one_over = _inverse_length(average)[:, None]
        cosine = (units * average).sum(dim=-1, keepdim=True)
        if self.learns:
            share = one_over / (maps.batch * maps.count * maps.heads)
            slopes = (units - cosine * one_over.square() * average) * (share / maps.count)
            if not self.options.paper:
                slopes *= average > 0
            for index, part in enumerate(self.parts):
                rows, kept = waiting[index] if waiting else self._rows(part)
                self.take(self._slope(rows, kept, average, slopes, unit[:, part], share), part)
                del rows, kept
        return (cosine * one_over)[:, 0] / maps.count

    def _rows(self, part: slice) -> tuple[Tensor, Tensor]:
        """Some rows, and these with entries that do not pass the threshold set to 0."""
        rows = self.rows(part)
        kept = torch.threshold(rows, self.maps.below, 0)
        if self.options.first:
            kept[..., : self.options.first] = 0
        return rows, kept

    def _slope(
        self, rows: Tensor, kept: Tensor, average: Tensor, slopes: Tensor, unit: Tensor, share: Tensor
    ) -> Tensor:
        """The gradient of the loss with respect to some rows, (m, r, K)."""
        options, below = self.options, self.maps.below
        towards = unit * share
        along = towards * torch.bmm(kept, average[..., None])[..., 0] * unit.square()
        slope = towards[..., None] * average[:, None]
        slope.addcmul_(rows, along[..., None], value=-1)
        if options.paper:
            slope += slopes[:, None]
        slope = torch.ops.aten.threshold_backward(slope, rows, below)
        if not options.paper:
            slope += slopes[:, None]
        if options.first:
            slope[..., : options.first] = 0
        return slope


class _Images(Compared):
    """Maps of some images, from queries and keys; gradients go to `made`, where it is given."""

    def __init__(self, maps: Maps, images: slice, made: Gradients | None, wants_bias: bool) -> None:
        pairs = (images.stop - images.start) * maps.heads
        stay = pairs * maps.keys * maps.count <= max(KEPT_CHUNK, pairs * maps.keys * 2 * LEAST_ROWS)
        super().__init__(maps, (images.stop - images.start) * maps.groups, maps.parts(), made is not None, stay)
        self.images, self.made, self.wants_bias = images, made, wants_bias
        self.query = (maps.pick(maps.query[images]).to(maps.wide) * self.options.scale).contiguous()
        self.key = maps.key[images].to(maps.wide).contiguous()
        self.bias: Tensor | None = None
        if maps.bias is not None:
            bias = maps.bias if maps.bias.shape[0] == 1 else maps.bias[images]
            self.bias = bias if bias.shape[2] == 1 else maps.pick(bias)
        self.attention: dict[int, Tensor] = {}  # by the first row

    def rows(self, part: slice) -> Tensor:
        """Some compared rows, (m, r, K)."""
        if not self.stay:
            self.attention.clear()
        scores = _products(self.query[:, :, part], self.key.mT)
        if self.bias is None:
            attention = scores.softmax(dim=-1)
        else:
            scores += self.bias if self.bias.shape[2] == 1 else self.bias[:, :, part]
            attention = torch._safe_softmax(scores, dim=-1)  # a row with every key masked is 0
        if self.learns:
            self.attention[part.start] = attention
        return attention.mean(dim=1) if self.options.average_heads else attention.flatten(0, 1)

    def take(self, slope: Tensor, part: slice) -> None:
        """Add the gradients of queries, keys and bias."""
        maps, made = self.maps, self.made
        assert made is not None
        attention = self.attention.pop(part.start)
        by_head = slope.unsqueeze(1) if self.options.average_heads else slope.unflatten(0, (-1, maps.heads))
        slope = attention * by_head
        slope.addcmul_(attention, slope.sum(dim=-1, keepdim=True), value=-1)
        torch.mul(_products(slope, self.key), self.options.scale, out=made.query[self.images, :, part])
        keys = _products(slope.mT, self.query[:, :, part])
        made.key[self.images] = keys if part.start == 0 else made.key[self.images] + keys
        if self.wants_bias:
            _add_bias(made.bias, slope, self.images, maps.rows, part, self.options.first)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """(b, H, ·, ·) matrices, multiplied."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])


def _add_bias(total: Tensor, slope: Tensor, images: slice, rows: Tensor | None, part: slice, first: int) -> None:
    """Add the gradient of a chunk's logits to that of the bias, summed over the axes it was broadcast along."""
    for axis in range(4):
        if total.shape[axis] == 1 and slope.shape[axis] > 1:
            slope = slope.sum(dim=axis, keepdim=True)
    mine = total if total.shape[0] == 1 else total[images]
    if total.shape[2] == 1:
        mine += slope
    elif rows is not None:
        mine.index_add_(2, rows[part], slope)
    else:
        mine[:, :, first + part.start : first + part.stop] += slope


def _inverse_length(rows: Tensor) -> Tensor:
    """1 / ‖row‖, and 0 for rows that count as empty."""
    lengths = torch.linalg.vector_norm(rows, dim=-1)
    return torch.where(lengths < SHORTEST / rows.shape[-1], 0.0, lengths.reciprocal())


def diversity_in_chunks(
    query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, options: LossOptions
) -> Tensor:
    """The loss of queries (B, H, Q, D) and keys (B, H, K, D), `bias` of four axes; with gradients if needed.

    >>> query, key = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64, requires_grad=True).unbind()
    >>> float(diversity_in_chunks(query, key, None, None, LossOptions(1.0, 0, True, True, 2.0))) <= 1
    True
    """
    learning = torch.is_grad_enabled()
    wants_bias = learning and bias is not None and bias.requires_grad
    wants = wants_bias or (learning and (query.requires_grad or key.requires_grad))
    with outside_autocast(query.device):
        loss: Tensor = _operator(query, key, bias, rows, *options, wants, wants_bias)[0]
    return loss


@torch.library.custom_op("vitfocus::diversity_in_chunks", mutates_args=())
def _operator(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    scale: float,
    first: int,
    average_heads: bool,
    paper: bool,
    threshold: float,
    wants: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradients with respect to queries, keys and bias."""
    options = LossOptions(scale, first, average_heads, paper, threshold)
    loss, made = forward(query, key, bias, rows, options, wants, wants_bias)
    return loss, *made


@_operator.register_fake
def _(query: Tensor, key: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = query.new_empty((), dtype=torch.promote_types(query.dtype, torch.float32))
    rows, _, first, *_ = rest
    count = query.shape[2] - first if rows is None else rows.shape[0]
    return loss, *empty_gradients(query, key, bias, count, *rest[-2:])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, bias, rows, *ctx.options = inputs[:9]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, bias, rows, *output[1:])


def _gradient(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * 11
    query, key, bias, rows, *made = ctx.saved_tensors
    options = LossOptions(*ctx.options)
    if wants_second_derivative():
        whole = partial(on_whole_maps, rows=rows, options=options)
        return *differentiable_gradients(whole, (query, key, bias), gradient), *(None,) * 8
    scaled: list[Any] = [
        (one * gradient).to(given.dtype) if needed else None
        for one, given, needed in zip(made, (query, key, bias), ctx.needs_input_grad, strict=False)
    ]
    if scaled[0] is not None and rows is not None:
        batch, heads, _, width = scaled[0].shape
        scaled[0] = scaled[0].new_zeros(batch, heads, query.shape[2], width).index_copy(2, rows, scaled[0])
    elif scaled[0] is not None and options.first:
        scaled[0] = torch.nn.functional.pad(scaled[0], (0, 0, options.first, 0))
    return *scaled, *(None,) * 8


_operator.register_autograd(_gradient, setup_context=_setup)
