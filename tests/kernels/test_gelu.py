"""The faster GELU against float64."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vitfocus.kernels.gelu import gelu


def every_bfloat16() -> torch.Tensor:
    """All finite numbers below 1,000 in magnitude."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite() & (values.abs() < 1000)]


def test_float32_is_within_a_few_units_of_the_last_digit_of_one() -> None:
    values = torch.linspace(-20, 20, 100_001, requires_grad=True)
    exact = values.detach().double().requires_grad_()
    got, wanted = gelu(values), F.gelu(exact)
    assert (got - wanted).abs().max() < 5e-7
    slope, expected = (torch.autograd.grad(made.sum(), given)[0] for made, given in ((got, values), (wanted, exact)))
    assert (slope - expected).abs().max() < 5e-7


def test_every_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    """To one of the two neighbours of the exact value, as torch's own GELU is, and mostly to the same."""
    values = every_bfloat16().requires_grad_()
    got, torchs = gelu(values), F.gelu(values)
    exact = F.gelu(values.detach().double())
    assert got.dtype == torch.bfloat16
    near = values.detach() > -3  # beyond, both are differences of nearly equal numbers
    unit = exact.abs() * 2**-7 + 1e-38
    assert bool(((got - exact).abs() <= unit)[near].all())
    assert (got - exact).abs().max() < 2e-2 * exact.abs().max()
    assert (got == torchs)[near].float().mean() > 0.98
    slopes = [torch.autograd.grad(made.sum(), values)[0] for made in (got, torchs)]
    assert (slopes[0].double() - slopes[1].double()).abs().max() < 1e-2


def test_extreme_values_stay_finite() -> None:
    values = torch.tensor([-1e30, -100.0, -0.0, 0.0, 100.0, 1e30], requires_grad=True)
    made = gelu(values)
    torch.testing.assert_close(made, F.gelu(values))
    (slope,) = torch.autograd.grad(made.sum(), values)
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.0, 0.5, 0.5, 1.0, 1.0]))
