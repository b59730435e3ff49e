"""Attention and the diversification loss as one operation in plain torch, against float64 and against both apart."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import timm
import torch
from helpers.kernel_cases import Attention, check_joined, joined
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vitfocus as vf
from vitfocus.kernels.backends import backend
from vitfocus.kernels.diversity import with_attention_chunked as in_chunks
from vitfocus.kernels.diversity.reference import row_similarity
from vitfocus.kernels.diversity.with_attention import attention_with_diversity

DOUBLE = torch.float64
SHAPE = (2, 3, 50, 16)

CASES = [
    Attention("demo", (3, 4, 65, 16)),
    Attention("demo-paper", (3, 4, 65, 16), variant="paper"),
    Attention("double", (3, 2, 49, 24), dtype=DOUBLE),
    Attention("double-paper", (3, 2, 49, 24), variant="paper", first=1, dtype=DOUBLE),
    Attention("one-head", (2, 1, 37, 36)),
    Attention("few", (2, 2, 3, 8), threshold=0.5),
    Attention("most", (1, 2, 35, 16)),
    Attention("patches", SHAPE, first=1),
    Attention("registers", SHAPE, first=5, variant="paper"),
    Attention("all-kept", SHAPE, threshold=0.0),
    Attention("extreme", SHAPE, spread=25.0),
]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_loss_and_gradients(case: Attention, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if cut:
        monkeypatch.setattr(in_chunks, "IMAGES_CHUNK", 2 * case.shape[2] ** 2)
    check_joined(case, seed=len(case.name))


@pytest.mark.parametrize("part", ["output", "loss", "one value"])
def test_either_gradient_may_be_absent(part: str) -> None:
    """As when a model is trained without the loss, or attention is trained on nothing else."""
    picks: dict[str, Any] = {
        "output": lambda out, loss: out.sum(),
        "loss": lambda out, loss: loss,
        "one value": lambda out, loss: out[0, 1, 3, 5],
    }
    pick = picks[part]
    query, key, value, options = joined(Attention("part", SHAPE, dtype=DOUBLE), 0)
    made = attention_with_diversity(query, key, value, scale=0.3, **options)
    assert made is not None
    got = torch.autograd.grad(pick(*made), (query, key, value))
    maps = (query @ key.mT * 0.3).softmax(-1)
    expected = pick(maps @ value, row_similarity(maps, threshold=1.5))
    wanted = torch.autograd.grad(expected, (query, key, value), allow_unused=True, materialize_grads=True)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("whole", [False, True])
def test_gradcheck_and_second_derivatives(whole: bool) -> None:
    query, key, value, options = joined(Attention("gradcheck", (2, 2, 5, 3), threshold=1.05, dtype=DOUBLE), 1)
    given = (torch.stack((query, key, value)).detach().requires_grad_(),) if whole else (query, key, value)

    def both(*given: Tensor) -> tuple[Tensor, Tensor]:
        parts = given[0].unbind() if whole else given
        made = attention_with_diversity(*parts, scale=0.7, whole=given[0] if whole else None, **options)
        assert made is not None and made[1] > 0.1
        return made

    assert torch.autograd.gradcheck(both, given)
    assert torch.autograd.gradgradcheck(both, given)


def test_it_repeats_bit_by_bit_and_its_output_is_that_of_torch() -> None:
    query, key, value, options = joined(Attention("again", SHAPE), 3)
    runs = []
    for _ in range(2):
        made = attention_with_diversity(query, key, value, scale=0.3, **options)
        assert made is not None
        runs.append((*made, *torch.autograd.grad(made[0].square().sum() + made[1], (query, key, value))))
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))
    assert torch.equal(runs[0][0], F.scaled_dot_product_attention(query, key, value, scale=0.3))


def test_a_projection_gets_its_gradient_whole() -> None:
    """In the memory layout of the projection's output, so that nothing has to be copied."""
    query, key, value, options = joined(Attention("whole", SHAPE), 0)
    whole = torch.stack((query, key, value)).detach().permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)
    results = []
    for given in ((query, key, value), (whole.requires_grad_(),)):
        parts = given[0].unbind() if len(given) == 1 else given
        made = attention_with_diversity(*parts, scale=0.3, whole=whole if len(given) == 1 else None, **options)
        assert made is not None
        slopes = torch.autograd.grad(made[0].square().sum() + made[1] * 100, given)
        results.append((*made, slopes[0] if len(given) == 1 else torch.stack(slopes)))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    assert results[1][2].permute(1, 3, 0, 2, 4).is_contiguous()


def test_what_does_not_fit_is_computed_apart() -> None:
    def made(count: int = 17, width: int = 8, dtype: torch.dtype = torch.float32, **options: Any) -> bool:
        tensors = torch.randn(3, 1, 2, count, width, dtype=dtype).unbind()
        return attention_with_diversity(*tensors, scale=1.0, **options) is not None

    assert made() and made(dtype=DOUBLE) and made(variant="paper") and made(first=16)
    assert not (made(18) or made(dtype=torch.bfloat16) or made(heads="each") or made(first=17))
    query, key, value = torch.randn(3, 1, 2, 9, 8).unbind()
    for other in ((query, key[:, :, 1:], value[:, :, 1:]), (query, key, value[..., :4]), (query, key, value.double())):
        assert attention_with_diversity(*other, scale=1.0) is None
    with backend("reference"):
        assert not made()


def test_no_map_of_a_head_is_kept() -> None:
    query, key, value = (one.detach() for one in joined(Attention("kept", SHAPE), 0)[:3])
    options = in_chunks.LossOptions(0.3, 0, True, False, 1.5)
    out, loss, _, slopes = in_chunks.forward(query, key, value, options, True)
    assert out.shape == query.shape and slopes.shape == (2, 50, 50)
    alone = in_chunks.forward(query, key, value, options, False)
    assert torch.equal(alone[0], out) and torch.equal(alone[1], loss) and alone[3].numel() == 0


def small_vit(spec: str = "adl(threshold=1.0)", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return vf.treat_(timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes, **options).train(), spec)


def step(model: nn.Module) -> list[Tensor]:
    """Output, loss and gradients of a step."""
    torch.manual_seed(1)
    output = model(torch.randn(4, 3, 32, 32))
    loss = vf.auxiliary_loss(model)
    model.zero_grad()
    (output.float().square().mean() + 3 * loss).backward()
    return [output, loss, *(one.grad for one in model.parameters() if one.grad is not None)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images in each backward pass of attention and loss."""
    made: list[int] = []
    original = in_chunks.gradients

    def spy(*args: Any) -> Any:
        made.append(len(args[0]))
        return original(*args)

    monkeypatch.setattr(in_chunks, "gradients", spy)
    return made


@pytest.mark.parametrize("spec", ["adl(threshold=1.0)", "adl(threshold=0.0,variant=paper,tokens=patch,weight=0.5)"])
def test_a_treated_model_is_the_same(spec: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    got = step(small_vit(spec))
    assert calls == [4, 4] and got[1] > 0.1
    monkeypatch.setattr(in_chunks, "KEPT_OVER_QUERIES", 0)
    wanted = step(small_vit(spec))
    assert len(calls) == 2 and torch.equal(got[0], wanted[0]) and len(got) == len(wanted)
    for mine, theirs in zip(got[1:], wanted[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_checkpointed_model_is_the_same(calls: list[int]) -> None:
    wanted = step(small_vit())
    model = small_vit()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    got = step(model)
    assert calls == [4] * 4
    assert all(torch.equal(one, two) for one, two in zip(got, wanted, strict=True))


@pytest.mark.parametrize("spec", ["adl(threshold=1.0,rows=9)", "adl(threshold=1.0,heads=each)"])
def test_other_options_of_a_model_are_computed_apart(spec: str, calls: list[int]) -> None:
    step(small_vit(spec))
    assert not calls


def test_dropout_in_attention_is_that_of_the_model(calls: list[int]) -> None:
    treated, plain = small_vit(attn_drop_rate=0.5), vf.untreat_(small_vit(attn_drop_rate=0.5))
    assert torch.equal(step(treated)[0], step(plain)[0]) and not calls


def test_autocast_rounds_as_in_the_model(calls: list[int]) -> None:
    """Attention of single-precision queries, as a norm of queries makes them, is computed in bfloat16."""
    treated, plain = small_vit(qk_norm=True), vf.untreat_(small_vit(qk_norm=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step(treated)[0], step(plain)[0])
    assert not calls


def test_a_model_without_gradients(calls: list[int]) -> None:
    model = small_vit()
    with torch.no_grad():
        model(torch.randn(2, 3, 32, 32))
        loss = vf.auxiliary_loss(model)
        assert 0 < float(loss) <= 1 and not loss.requires_grad
    assert not calls
