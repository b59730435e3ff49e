"""Inputs for the kernels, expected results computed in float64 from whole maps, and tolerances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.kernels.context.op import share_mean
from vitfocus.kernels.context.reference import broadcast_mean, broadcast_scaled, token_mean
from vitfocus.kernels.diversity.op import diversity
from vitfocus.kernels.diversity.reference import row_similarity
from vitfocus.kernels.diversity.with_attention import attention_with_diversity
from vitfocus.kernels.pooling.op import mix_dilated, pool_tokens, predict_hidden
from vitfocus.kernels.pooling.reference import dilated_mean, mix_poolings
from vitfocus.kernels.short_attention.op import launch_forward, short_attention

#: Largest relative error of (loss or output, gradients), by the dtype of the inputs. Sums are in float32 everywhere;
#: operands of matrix products, and outputs, have the inputs' precision. For half types the heads' mean map is
#: rounded to float16, by up to 2⁻¹¹ = 5e-4 of each entry, which averages out in the loss: to 2e-5 of it in maps of 7
#: rows, less in larger ones. Attention in bfloat16, by plain torch, is off by 3e-5 to 2e-3.
TOLERANCES = {
    torch.float64: (1e-12, 1e-10),
    torch.float32: (1e-5, 2e-4),
    torch.float16: (5e-5, 4e-3),
    torch.bfloat16: (5e-5, 3e-2),
}


@dataclass(frozen=True)
class Attention:
    """One call of the diversification loss; `name` is the test's, `silent` says that the loss is 0."""

    name: str
    shape: tuple[int, int, int, int] = (2, 2, 50, 16)
    keys: int | None = None
    bias: tuple[int, ...] | None = None
    masked: float = 0.0
    spread: float = 1.5
    level: float = 0.0
    rows: int | None = None
    first: int = 0
    variant: str = "official"
    heads: str = "mean"
    threshold: float = 1.5
    dtype: torch.dtype = torch.float32
    silent: bool = False

    def inputs(self, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Queries and keys in the memory layout of a projection's output, bias, and options."""
        draw = torch.Generator().manual_seed(seed)
        batch, heads, queries, width = self.shape
        keys = self.keys or queries

        def tokens(count: int, shift: float) -> Tensor:
            made = torch.randn(batch, count, heads, width, generator=draw).transpose(1, 2) + shift
            return made.to(device, self.dtype).requires_grad_()

        # Queries with a common component attend to the same keys, so some columns are above the threshold.
        query, key, bias = tokens(queries, 1.0), tokens(keys, 0.0), None
        if self.bias is not None:
            made = torch.randn(self.bias, generator=draw) + self.level
            hidden = torch.rand(self.bias, generator=draw) < self.masked
            bias = made.masked_fill(hidden, float("-inf")).to(device, self.dtype).requires_grad_()
        rows = torch.randperm(queries - self.first, generator=draw)[: self.rows].to(device) + self.first
        options = {"variant": self.variant, "heads": self.heads, "threshold": self.threshold, "first": self.first}
        return query, key, bias, {"rows": rows if self.rows else None, **options}

    @property
    def scale(self) -> float:
        """The scale that gives logits the wanted spread."""
        return self.spread * self.shape[-1] ** -0.5


def explicit(query: Tensor, key: Tensor, bias: Tensor | None, scale: float, options: dict[str, Any]) -> Tensor:
    """The loss from whole maps in float64, written without the code under test."""
    form, first = dict(options), options["first"]
    rows = form.pop("rows")
    del form["first"]
    scores = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.double()) * scale
    if bias is not None:
        scores = scores + bias.double()
    hidden = scores.isneginf().all(-1, keepdim=True)
    maps = scores.masked_fill(hidden, 0).softmax(-1) * ~hidden
    maps = maps[:, :, torch.arange(first, maps.shape[2], device=maps.device) if rows is None else rows, first:]
    return row_similarity(maps, **form)


def clear_seed(case: Attention, seed: int) -> int:
    """The first seed from this one on that leaves no column's mean within 1e-4 of the threshold.

    There the gradient jumps, and rounding the map to float16 may carry the mean across.
    """
    rounded = case.dtype in (torch.float16, torch.bfloat16) and case.heads == "mean"
    while rounded and case.variant == "official" and case.threshold and case.bias is None:
        query, key, _, options = case.inputs(seed)
        maps = (query.detach().double() @ key.detach().double().mT * case.scale).softmax(-1).mean(1)
        rows = options["rows"] if options["rows"] is not None else slice(case.first, None)
        columns = maps[:, rows, case.first :].mean(1)
        if (columns * columns.shape[1] / case.threshold - 1).abs().min() > 1e-4:
            break
        seed += 100
    return seed


def check_attention(case: Attention, seed: int = 0, device: str = "cpu", given: bool = False) -> None:
    """Loss and gradients of the chosen backend against `explicit`; the loss is scaled, as for half precision.

    With `given`, the softmax's normalisers are given, of logits without a bias.
    """
    seed = clear_seed(case, seed)
    query, key, bias, options = case.inputs(seed, device)
    wanted = [one for one in (query, key, bias) if one is not None]
    exact = [one.detach().double().requires_grad_() for one in wanted]
    expected = explicit(exact[0], exact[1], exact[2] if bias is not None else None, case.scale, options)
    assert (expected < 1e-3) == case.silent, "a case that shows nothing"
    lse = (exact[0] @ exact[1].mT * case.scale).logsumexp(-1).detach().float() if given else None
    got = diversity(query, key, scale=case.scale, bias=bias, lse=lse, **options)
    near, near_gradient = TOLERANCES[case.dtype]
    compare("loss", got, expected, near)
    factor = 1024.0
    gradients = torch.autograd.grad(got * factor, wanted)
    correct = torch.autograd.grad(expected * factor, exact)
    # Where the true gradient is nearly 0 (a map of one key, a saturated softmax), only rounding errors remain.
    size = factor * case.scale * float(query.detach().double().norm() + key.detach().double().norm())
    for name, mine, theirs in zip(("query", "key", "bias"), gradients, correct, strict=False):
        assert mine.dtype == query.dtype and mine.shape == theirs.shape
        compare(f"{name}'s gradient", mine, theirs, near_gradient, at_least=1e-7 * size)


def joined(case: Attention, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Queries, keys and values of one projection, and the options of `attention_with_diversity`."""
    query, key, _, options = case.inputs(seed, device)
    value = torch.randn(query.mT.shape, generator=torch.Generator().manual_seed(seed)).mT.to(device, case.dtype)
    packed = torch.stack((query.detach(), key.detach(), value)).permute(1, 3, 0, 2, 4).contiguous()
    leaves = [one.requires_grad_() for one in packed.permute(2, 0, 3, 1, 4).unbind()]
    del options["rows"]
    return leaves[0], leaves[1], leaves[2], options


def check_joined(case: Attention, seed: int = 0, device: str = "cpu") -> None:
    """Output, loss and gradients of attention and loss as one operation against float64."""
    seed = clear_seed(case, seed)
    given = joined(case, seed, device)
    tensors, options = given[:3], given[3]
    exact = [one.detach().double().requires_grad_() for one in tensors]
    expected = explicit(exact[0], exact[1], None, case.scale, {**options, "rows": None})
    wanted = (exact[0] @ exact[1].mT * case.scale).softmax(-1) @ exact[2]
    made = attention_with_diversity(*tensors, scale=case.scale, **options)
    assert made is not None, "computed apart"
    near, near_gradient = TOLERANCES[case.dtype]
    compare("output", made[0], wanted, near_gradient)
    compare("loss", made[1], expected, near)
    # Gradients of about the same size from both, so that neither hides the other.
    draw = torch.Generator().manual_seed(seed)
    incoming = torch.randn(wanted.mT.shape, generator=draw).mT.to(device, case.dtype)
    alone = [
        torch.autograd.grad(one, exact[0], retain_graph=True)[0].norm() for one in ((wanted * incoming).sum(), expected)
    ]
    factor = float(alone[0] / alone[1])
    got = torch.autograd.grad((made[0] * incoming).sum() + made[1] * factor, tensors)
    correct = torch.autograd.grad((wanted * incoming.double()).sum() + expected * factor, exact)
    for name, mine, theirs in zip(("query", "key", "value"), got, correct, strict=True):
        assert mine.dtype == case.dtype and mine.shape == theirs.shape
        compare(f"{name}'s gradient", mine, theirs, near_gradient)


def compare(name: str, got: Tensor, expected: Tensor, tolerance: float, at_least: float = 1e-7) -> None:
    """Relative error of the whole tensor, by its norm."""
    assert got.isfinite().all(), f"{name} is not finite"
    error, size = float((got.detach().double() - expected.detach()).norm()), float(expected.detach().norm())
    assert error <= tolerance * size + at_least, f"{name}: off by {error:.3g}, of {size:.3g}"


@dataclass(frozen=True)
class Pooling:
    """One call of TAP's mixing."""

    name: str
    grid: tuple[int, int] = (5, 7)
    branches: int = 4
    prefix: int = 1
    channels: int = 24
    batch: int = 2
    dtype: torch.dtype = torch.float32


def check_pooling(case: Pooling, seed: int = 0, device: str = "cpu") -> None:
    """Both halves of the pooling, without a norm between them, and all gradients, against the reference in float64."""
    given, slope = pooling_inputs(case, seed, device)
    tokens, first, second = given[:3]
    exact = [one.detach().double().requires_grad_() for one in given[:3]]
    expected = pool_exactly(exact, case)
    got = mix_dilated(tokens, predict_hidden(tokens, first, case.grid), second)
    assert torch.equal(got[:, : case.prefix], tokens[:, : case.prefix])
    near = POOLING_TOLERANCES[case.dtype]
    gradients = torch.autograd.grad(got, given[:3], slope)
    correct = torch.autograd.grad(expected, exact, slope.double())
    names = ("output", "tokens' gradient", "first convolution's gradient", "second convolution's gradient")
    for name, mine, theirs in zip(names, (got, *gradients), (expected, *correct), strict=True):
        compare(name, mine, theirs, near, at_least=1e-5)


def check_pooling_with_norm(case: Pooling, seed: int = 0, device: str = "cpu") -> None:
    """The whole pooling with its batch norm, its statistics and all gradients, against the reference in float64."""
    given, slope = pooling_inputs(case, seed, device)
    tokens, first, second, gamma, beta = given
    exact = [one.detach().double().requires_grad_() for one in given]
    expected = pool_exactly(exact, case)
    got, statistics = pool_tokens(tokens, first, (gamma, beta, 1e-3), second, case.grid)
    assert torch.equal(got[:, : case.prefix], tokens[:, : case.prefix])
    hidden = F.conv2d(exact[0][:, case.prefix :].mT.unflatten(2, case.grid), exact[1], padding=1)
    near = POOLING_TOLERANCES[case.dtype]
    compare("mean", statistics[0], hidden.mean((0, 2, 3)), near, at_least=1e-2 * near)
    compare("variance", statistics[1], hidden.var((0, 2, 3), correction=0), near, at_least=1e-6)
    gradients = torch.autograd.grad(got, given, slope)
    correct = torch.autograd.grad(expected, exact, slope.double())
    names = ("output", "tokens' gradient", "first's gradient", "second's gradient", "gamma's", "beta's")
    for name, mine, theirs in zip(names, (got, *gradients), (expected, *correct), strict=True):
        assert mine.dtype == (case.dtype if name in names[:2] else torch.float32)
        compare(name, mine, theirs, 2 * near, at_least=1e-5 + near * float(slope.norm()) / 100)


#: Largest relative error of the pooling and of its gradients.
POOLING_TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def pooling_inputs(case: Pooling, seed: int, device: str) -> tuple[list[Tensor], Tensor]:
    """Tokens, both convolutions, and the norm's weight and bias; and a gradient of the output."""
    draw = torch.Generator().manual_seed(seed)
    count, branches, channels = case.prefix + case.grid[0] * case.grid[1], case.branches, case.channels

    def made(*shape: int, spread: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=draw) * spread

    tokens = made(case.batch, count, channels).to(device, case.dtype)
    first = made(branches, channels, 3, 3, spread=(9 * channels) ** -0.5).to(device, case.dtype).float()
    second = made(branches, branches, 3, 3).to(device)
    slope = made(case.batch, count, channels).to(device, case.dtype)
    norm = [(1 + made(branches, spread=0.2)).to(device), made(branches).to(device)]
    return [one.requires_grad_() for one in (tokens, first, second, *norm)], slope


def pool_exactly(exact: list[Tensor], case: Pooling) -> Tensor:
    """The reference, with a batch norm if its weight and bias are given."""
    image = exact[0][:, case.prefix :].mT.unflatten(2, case.grid)
    hidden = F.conv2d(image, exact[1], padding=1)
    if len(exact) > 3:
        hidden = F.batch_norm(hidden, None, None, exact[3], exact[4], training=True, eps=1e-3)
    mixed = mix_poolings(image, F.conv2d(hidden, exact[2], padding=1).softmax(1), dilated_mean).flatten(2).mT
    return torch.cat((exact[0][:, : case.prefix], mixed), dim=1)


def check_context(
    shape: tuple[int, int, int], scaled: bool, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> None:
    """`share_mean` and its gradients against the reference in float64."""
    draw = torch.Generator().manual_seed(sum(shape))
    tokens = torch.randn(shape, generator=draw).to(device, dtype).requires_grad_()
    scale = torch.randn(shape[2], generator=draw).to(device).requires_grad_() if scaled else None
    slope = torch.randn(shape, generator=draw).to(device, dtype)
    given = [one for one in (tokens, scale) if one is not None]
    exact = [one.detach().double().requires_grad_() for one in given]
    mean = token_mean(exact[0], (1,))
    expected = broadcast_scaled(exact[0], mean, exact[1]) if scaled else broadcast_mean(exact[0], mean)
    got = share_mean(tokens, scale)
    near = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    results = (got, *torch.autograd.grad(got, given, slope))
    correct = (expected, *torch.autograd.grad(expected, exact, slope.double()))
    for name, mine, theirs in zip(("output", "tokens' gradient", "scale's gradient"), results, correct, strict=False):
        compare(name, mine, theirs, near, at_least=1e-5)


def check_short_attention(
    count: int, width: int = 16, dtype: torch.dtype = torch.float32, spread: float = 1.5, device: str = "cpu"
) -> None:
    """Output, normalisers and gradients of attention among few tokens, packed and apart, against float64."""
    draw = torch.Generator().manual_seed(count + width)
    made = torch.randn(2, count, 3, 3, width, generator=draw) * spread
    whole = made.to(device, dtype).permute(2, 0, 3, 1, 4).requires_grad_()
    # Every second number of something longer, as a gradient may lie.
    gradient = torch.randn(2, 3, count, 2 * width, generator=draw).to(device, dtype)[..., ::2]
    scale = width**-0.5
    exact = whole.detach().double().requires_grad_()
    logits = exact[0] @ exact[1].mT * scale
    expected = logits.softmax(-1) @ exact[2]
    (wanted,) = torch.autograd.grad(expected, exact, gradient.double())
    near, near_gradient = {torch.float32: (2e-6, 2e-5), torch.float16: (1e-3, 2e-3)}.get(dtype, (6e-3, 1.2e-2))
    out = short_attention(*whole.unbind(), scale=scale, whole=whole)
    (slopes,) = torch.autograd.grad(out, whole, gradient)
    assert slopes.stride() == whole.stride() and slopes.dtype == out.dtype == dtype
    compare("output", out, expected, near)
    _, lse = launch_forward(*whole.detach().unbind(), scale)
    compare("normalisers", lse, logits.logsumexp(-1), 1e-4 if dtype != torch.float32 else 1e-6)
    parts = [one.detach().contiguous().requires_grad_() for one in whole]
    same = short_attention(*parts, scale=scale)
    assert torch.equal(same, out)
    # Where the true gradient is 0, as for one token, only rounding is left of it.
    size = (1e-7 if dtype == torch.float32 else 1e-3) * float(gradient.double().norm())
    apart = torch.autograd.grad(same, parts, gradient)
    for name, mine, other, theirs in zip("qkv", slopes, apart, wanted, strict=True):
        assert torch.equal(mine, other), "the same kernel wherever the numbers lie"
        compare(f"the gradient of {name}", mine, theirs, near_gradient, at_least=size)
