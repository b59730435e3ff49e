"""TAP's pooling and Context Broadcasting by the Triton kernels, in Triton's interpreter: see test_interpreted.py."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from helpers.kernel_cases import (
    Pooling,
    check_context,
    check_pooling,
    check_pooling_with_norm,
    compare,
    pool_exactly,
    pooling_inputs,
)
from torch.nn import functional as F

import vitfocus as vf
from vitfocus.anatomy import GridRule
from vitfocus.kernels.backends import backend, has_triton
from vitfocus.kernels.context.op import share_mean
from vitfocus.kernels.pooling.op import mix_dilated, pool_tokens, predict_hidden
from vitfocus.kernels.pooling.reference import dilated_mean, mix_poolings
from vitfocus.treatments.token_aware_pooling import DilationPredictor, TokenAwarePooling

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
]

HALF = torch.float16

POOLING = [
    *(Pooling(f"branches-{count}", grid=(3, 4), branches=count, batch=1) for count in range(1, 8)),
    Pooling("branches-8", grid=(8, 3), branches=8, batch=1, prefix=0),
    Pooling("one-patch", grid=(1, 1), prefix=0),
    Pooling("seven", grid=(1, 7)),
    Pooling("column", grid=(7, 1), prefix=2, batch=1),
    Pooling("square-49", grid=(7, 7), prefix=0, channels=16, branches=3, batch=1),
    Pooling("square-50", grid=(7, 7), channels=40, branches=2),
    Pooling("registers", grid=(3, 4), prefix=5, channels=200, batch=1),
    Pooling("wide", grid=(2, 66), channels=8, batch=1, branches=2),
    Pooling("parted", grid=(2, 80), channels=16, batch=1, branches=4),
    Pooling("fp16", grid=(5, 3), dtype=HALF, batch=1),
    Pooling("rectangles", grid=(14, 15), channels=16, dtype=HALF, batch=1),
]


@pytest.mark.parametrize("case", POOLING, ids=lambda case: case.name)
def test_pooling(case: Pooling) -> None:
    check_pooling(case, seed=len(case.name))
    if case.name != "one-patch":  # a norm cannot learn from one value
        check_pooling_with_norm(case, seed=len(case.name))


@pytest.mark.parametrize("branches", [3, 4, 8])
def test_pooling_sums_in_several_steps(branches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitfocus.kernels.pooling import predictor

    monkeypatch.setattr(predictor, "SUMS", (16, 3, 1))
    case = Pooling("steps", (5, 7), branches=branches, batch=4)
    check_pooling(case, seed=branches)
    check_pooling_with_norm(case, seed=branches)


def test_pooling_repeats_bit_by_bit() -> None:
    (tokens, first, second, gamma, beta), slope = pooling_inputs(Pooling("again", (9, 20), batch=3), 0, "cpu")
    runs = []
    for _ in range(2):
        made = pool_tokens(tokens, first, (gamma, beta, 1e-5), second, (9, 20))
        runs.append((*made, *torch.autograd.grad(made[0], (tokens, first, second, gamma, beta), slope)))
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


@pytest.mark.parametrize("what", ["plain", "average", "hooked", "evaluated", "paused", "no statistics", "one value"])
def test_the_predictors_norm_does_what_the_module_would(what: str) -> None:
    """Outputs, gradients and running statistics; a norm that does more than to normalise by the batch is called."""
    results = []
    for name in ("triton", "reference"):
        torch.manual_seed(0)
        grid = (1, 1) if what == "one value" else (4, 4)
        module = DilationPredictor(TokenAwarePooling(), 16, "BHWC", 0, GridRule(()), None)
        norm, seen = module.proj[1], []
        norm.momentum = None if what == "average" else 0.3
        if what == "hooked":
            norm.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        norm.track_running_stats = what != "paused"
        if what == "no statistics":
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
        module.train(what != "evaluated")
        tokens = torch.randn(1 if what == "one value" else 3, *grid, 16, requires_grad=True)
        with backend(name):
            pooled = module(tokens)
            gradients = torch.autograd.grad(pooled.square().sum(), (tokens, *module.parameters()))
        assert len(seen) == (what == "hooked")
        results.append((pooled, *gradients, *module.buffers()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_a_predictor_in_half_precision(training: bool) -> None:
    results = []
    for name in ("triton", "reference"):
        torch.manual_seed(0)
        module = DilationPredictor(TokenAwarePooling(), 16, "BHWC", 0, GridRule(()), None).half().train(training)
        tokens = torch.randn(3, 4, 4, 16, dtype=HALF, requires_grad=True)
        with backend(name):
            pooled = module(tokens)
        results.append((pooled, *torch.autograd.grad(pooled.float().square().sum(), (tokens, *module.parameters()))))
    for one, other in zip(*results, strict=True):
        assert one.dtype == HALF
        compare("half", one, other.double(), 5e-3)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("count", "channels"), [(1, 5), (7, 33), (50, 40), (700, 8)])
def test_context(count: int, channels: int, scaled: bool) -> None:
    check_context((2, count, channels), scaled)


def test_the_poolings_gradient_can_be_differentiated() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 13, 8), (3, 8, 3, 3), (3, 3, 3, 3))
    # Small weights: where softmax saturates, float32 itself has few digits of a second derivative.
    given = [(0.3 * torch.randn(shape, generator=draw)).requires_grad_() for shape in shapes]
    exact = [one.detach().double().requires_grad_() for one in given]

    def pool(tokens: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return mix_dilated(tokens, predict_hidden(tokens, first, (3, 4)), second)

    def plain(tokens: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        image = tokens[:, 1:].mT.unflatten(2, (3, 4))
        weights = F.conv2d(F.conv2d(image, first, padding=1), second, padding=1).softmax(1)
        return torch.cat((tokens[:, :1], mix_poolings(image, weights, dilated_mean).flatten(2).mT), dim=1)

    for made, wanted in zip(twice(pool, given), twice(plain, exact), strict=True):
        compare("second derivative", made, wanted, 1e-4)


def test_the_gradient_of_the_pooling_with_a_norm_can_be_differentiated() -> None:
    case = Pooling("twice", (3, 4), branches=3, channels=8)
    given = [(0.3 * one.detach()).requires_grad_() for one in pooling_inputs(case, 0, "cpu")[0]]
    exact = [one.detach().double().requires_grad_() for one in given]

    def pool(tokens: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *norm: torch.Tensor) -> torch.Tensor:
        return pool_tokens(tokens, first, (norm[0], norm[1], 1e-3), second, (3, 4))[0]

    for made, wanted in zip(twice(pool, given), twice(lambda *x: pool_exactly(list(x), case), exact), strict=True):
        compare("second derivative", made, wanted, 1e-3)


def twice(function: Any, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The gradient of the squared length of a gradient."""
    slopes = torch.autograd.grad(function(*given).square().sum(), given, create_graph=True)
    return torch.autograd.grad(sum(one.square().sum() for one in slopes), given)


def test_a_shared_mean_can_be_differentiated_twice_or_says_no() -> None:
    tokens = torch.randn(2, 7, 8, requires_grad=True)
    expected = twice(lambda x: 0.5 * x + 0.5 * x.mean(dim=1, keepdim=True), [tokens])
    compare("second derivative", twice(share_mean, [tokens])[0], expected[0], 1e-5)
    with pytest.raises(vf.VitfocusError, match="second derivative"):
        twice(share_mean, [tokens, torch.ones(8, requires_grad=True)])
