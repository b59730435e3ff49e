"""Random calls of the diversification loss and of the statistics, and their results from whole maps in float64.

A seed gives everything about a call: shapes, options, each tensor's memory layout, and which of them need a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from helpers.kernel_cases import TOLERANCES, explicit
from vitfocus.kernels.attention import Observation
from vitfocus.kernels.diversity.op import diversity
from vitfocus.kernels.statistics.op import statistics
from vitfocus.kernels.statistics.reference import Grids, Numbers, map_statistics, top_tokens


@dataclass
class Call:
    """One attention (B, H, Q, D) and (B, H, K, D), the bias as it is given, and the options of the loss."""

    query: Tensor
    key: Tensor
    bias: Tensor | None
    scale: float
    options: dict[str, Any]
    lse: Tensor | None
    grids: Grids | None

    def __str__(self) -> str:
        shapes = [tuple(one.shape) for one in (self.query, self.key, self.bias) if one is not None]
        needed = [one.requires_grad for one in (self.query, self.key, self.bias) if one is not None]
        rows = self.options["rows"]
        options = self.options | {"rows": rows if rows is None else len(rows)}
        return f"{shapes} {needed} {self.query.dtype} {options} lse={self.lse is not None}"

    def to(self, device: str) -> Call:
        """The same call on a device, with the memory layouts of its tensors."""
        query, key, bias, lse, rows = (
            None if one is None else one.detach().to(device).requires_grad_(one.requires_grad)
            for one in (self.query, self.key, self.bias, self.lse, self.options["rows"])
        )
        assert query is not None and key is not None
        return Call(query, key, bias, self.scale, self.options | {"rows": rows}, lse, self.grids)

    @property
    def exact_logits(self) -> Tensor:
        scores = self.query.detach().double() @ self.key.detach().double().mT * self.scale
        return scores if self.bias is None else scores + self.bias.detach().double()


def random_call(seed: int, dtype: torch.dtype, most: int = 40, maps: int = 18) -> Call:
    """The call of that seed, with at most `most` queries and keys, and so many heads in all images."""
    pick, draw = Random(seed), torch.Generator().manual_seed(seed)
    batch = min(pick.choice([1, 2, 2, 3]), maps)
    heads = min(pick.choice([1, 2, 3, 4, 6]), max(1, maps // batch))
    width = pick.choice([1, 3, 8, 16, 17, 24, 32, 33])
    queries = pick.choice([1, 2, 7, pick.randint(1, most), pick.randint(1, most)])
    keys = queries if pick.random() < 0.6 else pick.randint(1, most)
    grids = None
    if pick.random() < 0.3:
        rows, columns, prefix = pick.randint(1, 5), pick.randint(1, 5), pick.randint(0, 2)
        queries = keys = rows * columns + prefix
        grids = Grids((rows, columns), (rows, columns), prefix)
    query = _laid_out(torch.randn(batch, heads, queries, width, generator=draw) + pick.choice([0.0, 1.0]), dtype, pick)
    few = (pick.choice([1, batch]), pick.choice([1, heads])) if pick.random() < 0.2 else (batch, heads)
    key = _laid_out(torch.randn(*few, keys, width, generator=draw), dtype, pick)
    bias = _bias((batch, heads, queries, keys), dtype, pick, draw) if pick.random() < 0.6 else None
    first = pick.choice([0, 0, 0, 1, 2])
    first = first if first < min(queries, keys) else 0
    some = None
    if pick.random() < 0.4:
        order = torch.randperm(queries - first, generator=draw) + first
        some = order[: pick.randint(1, len(order))].to(pick.choice([torch.int64, torch.int32]))
    options = {
        "variant": pick.choice(["official", "paper"]),
        "heads": pick.choice(["mean", "each"]),
        "threshold": pick.choice([0.0, 0.5, 1.03, 1.5, 2.0, 3.1]),
        "first": first,
        "rows": some,
    }
    given = [one for one in (query, key, bias) if one is not None]
    for one in given:
        one.requires_grad_(pick.random() < 0.7)
    if not any(one.requires_grad for one in given):
        query.requires_grad_()
    call = Call(query, key, bias, pick.choice([0.5, 1.0, 2.0, -1.0]) * width**-0.5, options, None, grids)
    lse = call.exact_logits.logsumexp(-1)
    if pick.random() < 0.3 and lse.isfinite().all():
        call.lse = lse.float()
    return call


def _laid_out(values: Tensor, dtype: torch.dtype, pick: Random) -> Tensor:
    """The same values as a leaf of another memory layout."""
    values, layout = values.to(dtype), pick.choice(["plain", "by token", "every second", "transposed", "in a slice"])
    if layout == "by token":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every second":
        return values.repeat_interleave(2, dim=3)[..., ::2]
    if layout == "transposed":
        return values.mT.contiguous().mT
    if layout == "in a slice":
        return torch.nn.functional.pad(values, (3, 2, 1, 4))[:, :, 1 : 1 + values.shape[2], 3 : 3 + values.shape[3]]
    return values


def _bias(shape: tuple[int, int, int, int], dtype: torch.dtype, pick: Random, draw: torch.Generator) -> Tensor:
    """A bias that is broadcast along some of the axes, with or without masked entries, rows and columns."""
    kept = [length if pick.random() < 0.6 else 1 for length in shape][pick.choice([0, 0, 0, 1, 2]) :]
    bias = torch.randn(kept, generator=draw) * pick.choice([0.3, 2.0]) + pick.choice([0.0, -50.0])
    if pick.random() < 0.4:
        bias.masked_fill_(torch.rand(kept, generator=draw) < pick.choice([0.1, 0.7]), float("-inf"))
    return (bias.mT.contiguous().mT if pick.random() < 0.3 else bias).to(dtype)


def has_entry_at_threshold(call: Call) -> bool:
    """Whether an entry of the map is within 1e-6 of a threshold: where a row attends to one key alone, say."""
    if call.options["threshold"] == 0:  # which nothing is below
        return False
    maps = call.exact_logits.softmax(-1)
    maps = maps.mean(1, keepdim=True) if call.options["heads"] == "mean" else maps
    return bool((maps * maps.shape[3] - call.options["threshold"]).abs().min() < 1e-6)


def check_loss(call: Call) -> None:
    """The loss and its gradients of the chosen backend."""
    given = [one for one in (call.query, call.key, call.bias) if one is not None]
    exact = [one.detach().double().requires_grad_(one.requires_grad) for one in given]
    widened = exact[1].expand(*call.query.shape[:2], -1, -1)
    bias = exact[2] if call.bias is not None else None
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
    expected = explicit(exact[0], widened, bias, call.scale, call.options)
    got = diversity(call.query, call.key, scale=call.scale, bias=call.bias, lse=call.lse, **call.options)
    near, near_gradient = TOLERANCES[call.query.dtype]
    if call.query.dtype != torch.float64 and has_entry_at_threshold(call):
        return  # rounding may carry it across, where loss and gradient jump
    assert got.dtype == torch.promote_types(call.query.dtype, torch.float32)
    assert abs(got.item() - expected.item()) <= near * expected.item() + 1e-7, (got.item(), expected.item())
    factor = 1024.0
    wanted = [one for one in given if one.requires_grad]
    gradients = torch.autograd.grad(got * factor, wanted)
    correct = torch.autograd.grad(expected * factor, [one for one in exact if one.requires_grad])
    size = factor * abs(call.scale) * float(exact[0].detach().norm() + exact[1].detach().norm() + 1)
    for one, mine, theirs in zip(wanted, gradients, correct, strict=True):
        assert mine.dtype == one.dtype and mine.shape == one.shape
        error = float((mine.double() - theirs).norm())
        # Where the exact gradient is nearly 0 only rounding errors remain.
        assert error <= near_gradient * float(theirs.norm()) + 2e-7 * size, (error, float(theirs.norm()))


def check_statistics(call: Call, tolerance: float = 2e-5) -> None:
    """The statistics of the chosen backend; a row with every key masked attends to nothing."""
    scores = call.exact_logits
    hidden = scores.isneginf().all(-1, keepdim=True)
    maps = scores.masked_fill(hidden, 0).softmax(-1) * ~hidden
    if maps.sum(dim=(2, 3)).min() == 0:  # shares of nothing are not a number
        return
    expected = map_statistics(maps, maps, grids=call.grids, threshold=call.options["threshold"])
    seen = Observation(query=call.query, key=call.key, scale=call.scale, bias=call.bias, lse=call.lse)
    made = statistics(seen, seen, grids=call.grids, threshold=call.options["threshold"], top=top_tokens(maps.shape[3]))
    assert made.products is not None and expected.products is not None
    names = ("rows", "products", *Numbers._fields)
    found = (made.entropy, made.products, *made.numbers)
    for name, one, other in zip(names, found, (expected.entropy, expected.products, *expected.numbers), strict=True):
        error = float((one.double() - other).abs().max() / other.abs().max().clamp_min(0.1))
        assert one.shape == other.shape and error <= tolerance, (name, error)
