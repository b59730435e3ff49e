"""Launching the diversification loss's kernels: block sizes, buffers, order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from vitfocus.kernels.diversity import triton as kernels
from vitfocus.kernels.diversity.chunked import Place, empty_like_tokens
from vitfocus.kernels.launch_device import on_its_device
from vitfocus.kernels.shared_memory import padded, room, shrink
from vitfocus.kernels.tiles import log_sum_exp

#: Programs that keep a large GPU busy, and partial sums that one program adds up by itself.
BUSY, MANY_BLOCKS = 264, 32
#: Heads of a map whose tiles stay in registers in full precision, as the compiler reports for an H200.
FEW_HEADS = 8


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass."""

    lse: Tensor
    average: Tensor
    slopes: Tensor
    towards: Tensor
    along: Tensor
    inner: Tensor


@on_its_device
def forward(
    query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, lse: Tensor | None, where: Place
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss and what `backward` needs, as the operator returns them; normalisers only where none are given."""
    shape = _Shape(query, key, bias, rows, where)
    norms = normalisers(query, key, bias, where.scale) if lse is None else lse.contiguous()
    inputs = (query, key, norms, shape.bias, shape.rows)
    maps, group, count, keys = shape.maps, shape.group, shape.count, shape.keys
    floats: Any = {"dtype": torch.float32, "device": query.device}
    blocks, settings = shape.row_blocks("row")
    parts = shape.parts(blocks, settings)
    sums = torch.empty(maps, blocks, keys, **floats)
    squares, overlaps = torch.empty(parts, maps, count, **floats), torch.empty(parts, maps, group, count, **floats)
    kernels.row_pass[blocks * parts * maps,](
        *inputs, sums, squares, overlaps, where.scale, shape.bound, *shape.sizes, maps, parts, *shape.strides,
        **settings,
    )  # fmt: skip
    squares, overlaps, sums = _added(squares, 0), _added(overlaps, 0), _added(sums, 1, MANY_BLOCKS)
    average, column_slopes = torch.empty(maps, keys, **floats), torch.empty(maps, keys, **floats)
    weights, slopes = torch.empty(2, maps, keys, **floats).unbind()
    kept = torch.empty(maps, keys, dtype=torch.int32, device=query.device)
    counts = torch.empty(maps, dtype=torch.int32, device=query.device)
    lengths, losses = torch.empty(2, maps, **floats).unbind()
    width = min(1024, triton.next_power_of_2(keys))
    kernels.column_pass[maps,](
        sums, average, column_slopes, kept, weights, counts, lengths, shape.bound, sums.shape[1], keys, count, BK=width,
        PAPER=where.paper,
    )  # fmt: skip
    dots, towards, along = (torch.empty(maps, count, **floats) for _ in range(3))
    head_dots, inner = torch.empty(maps, group, count, **floats), torch.empty(maps, group, count, **floats)
    units = torch.empty(maps, blocks, keys, **floats)
    kernels.dot_pass[blocks * maps,](
        *inputs, kept, weights, counts, squares, dots, head_dots, units, where.scale, shape.bound, *shape.sizes,
        *shape.strides, **settings,
    )  # fmt: skip
    units = _added(units, 1, MANY_BLOCKS)
    kernels.slope_column_pass[maps,](
        units, kept, weights, counts, lengths, slopes, column_slopes, losses, units.shape[1], keys, count, BK=width
    )
    kernels.slope_pass[blocks * maps,](
        *inputs, kept, slopes, counts, lengths, squares, dots, overlaps, head_dots, towards, along, inner, where.scale,
        shape.bound, *shape.sizes, *shape.strides, **settings,
    )  # fmt: skip
    own_norms = norms if lse is None else norms.new_empty(0)
    return losses.mean(), own_norms, average, column_slopes, towards, along, inner


def _added(parts: Tensor, axis: int, most: int = 1) -> Tensor:
    """Partial sums added up where they are more than so many; the axis stays, with a length of one, if `most` > 1."""
    if parts.shape[axis] > most:
        return parts.sum(dim=axis, keepdim=most > 1)
    return parts if most > 1 else parts.squeeze(axis)


@on_its_device
def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    where: Place,
    saved: Saved,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and bias."""
    shape = _Shape(query, key, bias, rows, where)
    vectors = (saved.average, saved.slopes, saved.towards, saved.along, saved.inner, gradient)
    inputs = (query, key, saved.lse.contiguous(), shape.bias, shape.rows, *vectors)
    share = 1 / (shape.maps * shape.count)
    key_gradient = empty_like_tokens(key)
    settings = shape.settings("key")
    kernels.key_gradient[triton.cdiv(shape.keys, settings["BN"]) * shape.maps,](
        *inputs, key_gradient, share, where.scale, shape.bound, *shape.sizes, *shape.strides, key_gradient.stride(),
        **settings, NARROW=shape.narrow,
    )  # fmt: skip
    query_gradient = _query_gradient(shape, inputs, query, rows, where, share)
    if bias is None or not wants_bias:
        return query_gradient, key_gradient, query.new_empty(0)
    return query_gradient, key_gradient, _bias_gradient(shape, inputs, bias, where, share)


def _query_gradient(
    shape: _Shape, inputs: tuple[Any, ...], query: Tensor, rows: Tensor | None, where: Place, share: float
) -> Tensor:
    """Straight into its place; or where there are few rows, parts of the columns side by side, and then their sum."""
    made = empty_like_tokens(query)
    if shape.count != query.shape[2]:
        made.zero_()
    blocks, settings = shape.row_blocks("query")
    parts = shape.parts(blocks, settings)
    out = made
    if parts > 1:
        out = torch.empty(parts * shape.batch, shape.heads, shape.count, shape.width, device=query.device)
    kernels.query_gradient[blocks * parts * shape.maps,](
        *inputs, out, share, where.scale, shape.bound, *shape.sizes, parts, *shape.strides, out.stride(), **settings,
        PARTS=parts > 1, NARROW=shape.narrow, TURNED=shape.turned,
    )  # fmt: skip
    if parts > 1:
        summed = out.unflatten(0, (parts, shape.batch)).sum(dim=0).to(query.dtype)
        if rows is None:
            made[:, :, where.first :] = summed
        else:
            made.index_copy_(2, rows, summed)
    return made


def _bias_gradient(shape: _Shape, inputs: tuple[Any, ...], bias: Tensor, where: Place, share: float) -> Tensor:
    """By image where the bias has images of its own; else summed, some images at a time so that many cores work."""
    batch, heads, queries, keys = shape.batch, shape.heads, shape.queries, shape.keys
    at_once = 1 if bias.shape[0] > 1 else max(1, triton.cdiv(batch, 64))
    chunks = triton.cdiv(batch, at_once)
    partial = torch.zeros(chunks, heads, queries, keys, dtype=torch.float32, device=bias.device)
    blocks, settings = shape.row_blocks("row")
    grid = (blocks * triton.cdiv(keys, settings["BN"]) * chunks * (heads // shape.group),)
    kernels.bias_gradient[grid](
        *inputs, partial, share, where.scale, shape.bound, *shape.sizes, batch, at_once, *shape.strides,
        partial.stride(), **settings, NARROW=shape.narrow,
    )  # fmt: skip
    for axis in range(4):
        if bias.shape[axis] == 1 and partial.shape[axis] > 1:
            partial = partial.sum(dim=axis, keepdim=True)
    return partial.to(bias.dtype)


def normalisers(query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """log Σ exp of every row's logits, (B, H, Q)."""
    batch, heads, queries, width = query.shape
    out = torch.empty(batch, heads, queries, dtype=torch.float32, device=query.device)
    spread = bias.expand(batch, heads, queries, key.shape[2]).stride() if bias is not None else (0, 0, 0, 0)
    item = query.element_size()
    rows, columns = shrink("row", 1, width, item, 64 if queries > 32 else 16, 64, room(query.device))
    log_sum_exp[batch * heads, triton.cdiv(queries, rows)](
        query, key, bias if bias is not None else query, out, scale, heads, queries, key.shape[2], query.stride(),
        key.stride(), spread, D=width, DP=padded(width), BM=rows, BN=columns, HAS_BIAS=bias is not None,
        num_warps=4, num_stages=1 if item == 4 else 3,
    )  # fmt: skip
    return out


class _Shape:
    """The sizes of a call, and the block sizes that fit them."""

    def __init__(self, query: Tensor, key: Tensor, bias: Tensor | None, rows: Tensor | None, where: Place) -> None:
        self.batch, self.heads, self.queries, self.width = query.shape
        self.keys = key.shape[2]
        self.count = self.queries - where.first if rows is None else len(rows)
        self.group = self.heads if where.average_heads else 1
        self.maps = self.batch * self.heads // self.group
        self.bound = where.bound(self.keys)
        self.paper, self.has_bias, self.has_rows = where.paper, bias is not None, rows is not None
        self.bias: Tensor = bias if bias is not None else query
        self.rows: Tensor = rows.contiguous() if rows is not None else query
        spread = (self.batch, self.heads, self.queries, self.keys)
        bias_strides = bias.expand(spread).stride() if bias is not None else (0, 0, 0, 0)
        self.strides = (query.stride(), key.stride(), bias_strides)
        self.sizes = (self.heads, self.queries, self.keys, self.count, where.first)
        self.item, self.room = query.element_size(), room(query.device)
        self.narrow = self.group > FEW_HEADS  # the tiles of more would not stay in registers
        few = self.group > 1 and self.group * self.width <= FEW_HEADS * 64
        self.turned = few and self.width > 32 and query.element_size() == 2 and _hopper(query.device)

    def row_blocks(self, kind: str) -> tuple[int, dict[str, Any]]:
        """How many blocks of rows there are, and the kernel's settings."""
        settings = self.settings(kind)
        return triton.cdiv(self.count, settings["BM"]), settings

    def parts(self, blocks: int, settings: dict[str, Any]) -> int:
        """Parts of the columns that go to programs of their own, where blocks of rows alone are too few."""
        programs = blocks * self.maps
        if 2 * programs > BUSY:
            return 1
        return max(1, min(triton.cdiv(self.keys, 4 * settings["BN"]), BUSY // programs))

    def settings(self, kind: str) -> dict[str, Any]:
        """Block sizes: the tiles of all heads, and their gradients, are to stay in registers."""
        wide = padded(self.width)
        rows, columns, warps = block_sizes(kind, self.group, wide, self.count, self.keys, self.turned)
        rows, columns = shrink(kind, self.group, self.width, self.item, rows, columns, self.room)
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
            "num_stages": 1 if self.item == 4 else 2,  # float32 leaves no room to read ahead
        }


def _hopper(device: torch.device) -> bool:
    """Whether this is the kind of GPU whose matrix units take turned tiles; the interpreter tries them as well."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9


def block_sizes(kind: str, group: int, width: int, rows: int, keys: int, turned: bool) -> tuple[int, int, int]:
    """Rows, columns and warps of a program, as measured on an H200 for 6 heads of 64 channels, and so on from there."""
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
    high = min(high, max(16, triton.next_power_of_2(rows)))
    wide = min(wide, max(16, triton.next_power_of_2(keys)))
    warps = 4 if group * (high * wide + (width * max(high, wide) if kind in ("query", "key") else 0)) <= 40960 else 8
    return high, wide, warps
