"""Attention and the diversification loss as one operation, in Triton's interpreter: see test_interpreted.py."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import timm
import torch
from helpers.kernel_cases import Attention, check_attention, check_joined, joined
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vitfocus as vf
from vitfocus.attention.capture import ObservedForward
from vitfocus.kernels.attention import Observation
from vitfocus.kernels.backends import backend, has_triton
from vitfocus.kernels.diversity import op as diversity_op
from vitfocus.kernels.diversity import with_attention
from vitfocus.kernels.diversity.op import diversity
from vitfocus.kernels.diversity.reference import row_similarity
from vitfocus.kernels.diversity.with_attention import attention_with_diversity

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
]

HALF = torch.float16


@pytest.fixture(autouse=True)
def heads_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diversity_op, "BUSY", 1)
    monkeypatch.setattr(with_attention, "LEAST_CHANNELS", 16)  # narrow heads take less time here


JOINED = [
    Attention("plain", (1, 3, 197, 32), dtype=HALF),
    Attention("paper", (1, 2, 197, 64), variant="paper", dtype=HALF),
    Attention("two-images", (2, 2, 130, 16), dtype=HALF),
    Attention("two-images-paper", (2, 2, 130, 48), variant="paper", dtype=HALF),
    Attention("few", (1, 2, 129, 16), dtype=HALF),
    Attention("most", (1, 2, 256, 16), dtype=HALF),
    Attention("patches", (2, 2, 150, 16), first=1, dtype=HALF),
    Attention("registers", (1, 2, 144, 16), first=5, variant="paper", dtype=HALF),
    Attention("all-kept", (1, 2, 133, 16), threshold=0.0, dtype=HALF),
    Attention("extreme", (1, 2, 130, 16), spread=25.0, dtype=HALF),
]


@pytest.mark.parametrize("case", JOINED, ids=lambda case: case.name)
def test_output_loss_and_gradients(case: Attention) -> None:
    with backend("triton"):
        check_joined(case, seed=len(case.name))


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "again"])
@pytest.mark.parametrize("case", JOINED[2::2], ids=lambda case: case.name)
def test_one_program_for_each_map(case: Attention, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two tiles of the map at a time, and no launch between the map and its gradient."""
    monkeypatch.setattr(diversity_op, "WIDE", (32, 16, 4, 2))
    monkeypatch.setattr(diversity_op, "BY_MAP", (16, 4, 2))
    monkeypatch.setattr(diversity_op, "KEPT_OVER_QUERIES", 100 if kept else 0)
    monkeypatch.setattr(with_attention, "PASSES", ((True, False, 32, 4, 2, 2), (False, True, 64, 4, 2, 0)))
    monkeypatch.setattr(diversity_op._Launch, "gradient_pass", None)
    with backend("triton"):
        check_joined(case, seed=len(case.name))
        query, key, _, options = joined(case, len(case.name))
        check_attention(case, seed=len(case.name))
        check_attention(replace(case, rows=10), seed=len(case.name))
        losses = [diversity(q, k, scale=0.3, **options) for q, k in ((query, key), (query.detach(), key.detach()))]
    assert torch.equal(*losses)


@pytest.mark.parametrize("part", ["output", "loss", "one value"])
def test_either_gradient_may_be_absent(part: str) -> None:
    """As when a model is trained without the loss, or attention is trained on nothing else."""
    case = Attention("part", (1, 2, 130, 16), dtype=HALF)
    query, key, value, options = joined(case, 0)
    with backend("triton"):
        made = attention_with_diversity(query, key, value, scale=case.scale, **options)
    assert made is not None
    exact = [one.detach().double().requires_grad_() for one in (query, key, value)]
    scores = exact[0] @ exact[1].mT * case.scale
    out, maps = scores.softmax(-1) @ exact[2], scores.softmax(-1)
    loss = row_similarity(maps, threshold=case.threshold)
    picks: dict[str, Any] = {
        "output": lambda out, loss: out.sum(),
        "loss": lambda out, loss: loss * 1024,
        "one value": lambda out, loss: out[0, 1, 3, 5],
    }
    pick = picks[part]
    got = torch.autograd.grad(pick(*made), (query, key, value))
    wanted = torch.autograd.grad(pick(out, loss), exact, allow_unused=True, materialize_grads=True)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=4e-3, atol=4e-3 * float(theirs.abs().max()) + 1e-6)


def test_it_repeats_bit_by_bit() -> None:
    query, key, value, options = joined(Attention("again", (1, 2, 130, 16), dtype=HALF), 3)
    runs = []
    with backend("triton"):
        for _ in range(2):
            made = attention_with_diversity(query, key, value, scale=0.3, **options)
            assert made is not None
            runs.append((*made, *torch.autograd.grad(made[0].square().sum() + made[1], (query, key, value))))
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


@pytest.mark.parametrize("learning", [(0, 1, 2), (2,)], ids=["all", "values"])
def test_the_gradient_can_be_differentiated(learning: tuple[int, ...]) -> None:
    """From whole maps, as no kernel computes second derivatives. The loss does not depend on the values."""
    *tensors, options = joined(Attention("twice", (1, 2, 130, 16), dtype=HALF), 0)
    given = [one.detach().requires_grad_(place in learning) for place, one in enumerate(tensors)]
    exact = [one.detach().double().requires_grad_() for one in tensors]

    def twice(given: list[Tensor], out: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
        given = [given[place] for place in learning]
        slopes = torch.autograd.grad(out.square().sum() + loss * 100, given, create_graph=True)
        return torch.autograd.grad(sum(one.double().square().sum() for one in slopes), given)

    with backend("triton"):
        made = attention_with_diversity(*given, scale=0.3, **options)
        assert made is not None
        got = twice(given, *made)
    maps = (exact[0] @ exact[1].mT * 0.3).softmax(-1)
    wanted = twice(exact, maps @ exact[2], row_similarity(maps, threshold=1.5))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


def test_a_projection_gets_its_gradient_whole() -> None:
    """The same numbers, in the memory layout of the projection's output; also what is differentiated twice."""
    query, key, value, options = joined(Attention("whole", (2, 2, 130, 16), dtype=HALF), 0)
    whole = torch.stack((query, key, value)).detach().permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)
    results = []
    for given in ((query, key, value), (whole.requires_grad_(),)):
        parts = given[0].unbind() if len(given) == 1 else given
        with backend("triton"):
            made = attention_with_diversity(*parts, scale=0.3, whole=whole if len(given) == 1 else None, **options)
        assert made is not None
        target = made[0].square().sum() + made[1] * 100
        slopes = torch.autograd.grad(target, given, retain_graph=True)
        again = torch.autograd.grad(target, given, create_graph=True)
        twice = torch.autograd.grad(sum(one.double().square().sum() for one in again), given)
        results.append((*made, slopes[0] if len(given) == 1 else torch.stack(slopes), torch.stack(twice).squeeze(0)))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    assert results[1][2].permute(1, 3, 0, 2, 4).is_contiguous()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_projection_is_known_only_if_its_first_axis_was_unbound(axis: int) -> None:
    """With three images of three heads, what was unbound along another axis has the same shape."""
    wholes = []

    class Observer:
        wants_attention = True

        def attend(self, seen: Observation, value: Tensor, whole: Tensor | None) -> None:
            wholes.append(whole)

        def __call__(self, seen: Observation) -> None: ...

    class Attending(nn.Module):
        def forward(self, whole: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*whole.unbind(axis))

    whole = torch.randn(3, 3, 3, 5, 16)
    with backend("triton"):
        ObservedForward(Attending(), "sdpa", Observer())(whole)
    assert wholes == [whole if axis == 0 else None]


def test_what_does_not_fit_is_computed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(count: int = 130, width: int = 16, number: int = 2, dtype: torch.dtype = HALF, **options: Any) -> bool:
        tensors = torch.randn(3, 1, number, count, width, dtype=dtype).unbind()
        with backend("triton"):
            return attention_with_diversity(*tensors, scale=1.0, **options) is not None

    assert made() and made(256) and made(variant="paper") and made(first=129)
    assert not (made(128) or made(257) or made(width=24) or made(width=80) or made(dtype=torch.float32))
    assert not (made(number=1) or made(heads="each") or made(first=130))
    query, key, value = torch.randn(3, 1, 2, 130, 16, dtype=HALF).unbind()
    with backend("triton"):
        for other in (
            (query, key[:, :, 1:], value[:, :, 1:]),
            (query, key, value[..., :8]),
            (query, key, value.float()),
        ):
            assert attention_with_diversity(*other, scale=1.0) is None
    monkeypatch.setattr(diversity_op, "BUSY", 264)
    assert not made()


def small_vit(spec: str) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"img_size": 48, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **options).half().train()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(8)  # so that some keys are attended to more
    return vf.treat_(model, spec)


def step(model: nn.Module, weight: float = 30.0) -> list[Tensor]:
    """Output, loss and gradients of a step."""
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0)).half()
    output = model(images)
    loss = vf.auxiliary_loss(model)
    model.zero_grad()
    (output.float().square().mean() + weight * loss).backward()
    return [output, loss, *(one.grad for one in model.parameters() if one.grad is not None)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many heads' gradients each backward pass of attention and loss computed."""
    made: list[int] = []
    original = with_attention.launch_gradients

    def spy(*args: Any) -> Any:
        made.append(args[2].shape[:2].numel())
        return original(*args)

    monkeypatch.setattr(with_attention, "launch_gradients", spy)
    return made


@pytest.mark.parametrize(
    "spec", ["adl(threshold=0.5,layers=all)", "adl(threshold=0.0,variant=paper,tokens=patch,layers=all,weight=0.5)"]
)
def test_a_treated_model_is_the_same(spec: str, calls: list[int]) -> None:
    with backend("triton"):
        got = step(small_vit(spec))
    assert calls == [4, 4] and bool(got[1] > 0)
    wanted = step(small_vit(spec))
    assert len(calls) == 2 and len(got) == len(wanted)
    torch.testing.assert_close(got[1], wanted[1], rtol=2e-3, atol=0)
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine - theirs).float().norm() <= 1e-2 * theirs.float().norm() + 1e-6


def test_a_checkpointed_model_is_the_same(calls: list[int]) -> None:
    with backend("triton"):
        wanted = step(small_vit("adl(threshold=0.5,layers=all)"))
        model = small_vit("adl(threshold=0.5,layers=all)")
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        got = step(model)
    assert calls == [4] * 4
    assert all(torch.equal(one, two) for one, two in zip(got, wanted, strict=True))


@pytest.mark.parametrize("spec", ["adl(rows=20)", "adl(heads=each)"])
def test_other_options_of_a_model_are_computed_apart(spec: str, calls: list[int]) -> None:
    with backend("triton"):
        step(small_vit(spec))
    assert not calls


def test_a_model_without_gradients(calls: list[int]) -> None:
    model = small_vit("adl(threshold=0.5,layers=all)")
    with backend("triton"), torch.no_grad():
        images = torch.randn(2, 3, 48, 48).half()
        model(images)
        loss = vf.auxiliary_loss(model)
        assert 0 < float(loss) <= 1 and not loss.requires_grad
        model.eval()
        model(images)
        assert float(vf.auxiliary_loss(model)) == 0
    assert not calls
