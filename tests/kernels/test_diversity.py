"""The loss in chunks against float64, and models that train by it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from helpers.kernel_cases import Attention, check_attention, explicit
from helpers.tiny import build
from torch import Tensor, nn
from torch.nn import functional as F

import vitfocus as vf
from vitfocus.kernels.backends import backend
from vitfocus.kernels.diversity import chunked as diversity_chunked
from vitfocus.kernels.diversity.op import diversity

HALF, BRAIN, DOUBLE = torch.float16, torch.bfloat16, torch.float64
FORMS = [(variant, heads) for variant in ("official", "paper") for heads in ("mean", "each")]
CASES = [
    *(
        Attention(f"{variant}-{heads}-{count}", (3, 2, count, 16), variant=variant, heads=heads, silent=count == 1)
        for variant, heads in FORMS
        for count in (1, 7, 50, 197)
    ),
    *(Attention(f"double-{v}-{h}", (3, 2, 49, 24), variant=v, heads=h, first=1, dtype=DOUBLE) for v, h in FORMS),
    *(
        Attention(f"{dtype}-{h}", (2, 3, 50, 48), heads=h, dtype=dtype)
        for dtype in (HALF, BRAIN)
        for h in ("mean", "each")
    ),
    Attention("more-keys", (2, 2, 20, 16), keys=50),
    Attention("fewer-keys", (2, 2, 50, 16), keys=7, variant="paper"),
    Attention("sampled", rows=11),
    Attention("sampled-patches", rows=11, first=2, heads="each", variant="paper"),
    Attention("patches", first=5),
    Attention("bias-per-image", (3, 2, 23, 16), bias=(3, 2, 23, 23)),
    Attention("bias-of-all-images", (3, 2, 23, 16), bias=(1, 2, 23, 23), variant="paper", heads="each"),
    Attention("bias-of-all-heads", (3, 2, 23, 16), bias=(3, 1, 23, 23), first=1),
    Attention("bias-by-key", (3, 2, 23, 16), bias=(3, 1, 1, 23), masked=0.3),
    Attention("bias-by-query", (3, 2, 23, 16), bias=(1, 1, 23, 1)),
    Attention("bias-of-two-axes", (3, 2, 23, 16), bias=(23, 23), rows=9),
    Attention("masked", (2, 2, 37, 16), bias=(2, 2, 37, 37), masked=0.5),
    Attention("masked-rows", (2, 2, 7, 16), bias=(2, 2, 7, 7), masked=0.8, variant="paper"),
    Attention("extreme", spread=25.0),
    Attention("far-below-zero", (2, 2, 23, 16), bias=(2, 2, 23, 23), level=-200.0),
    Attention("nothing-above", threshold=60.0, silent=True),
]


@pytest.mark.parametrize("cut", ["whole", "cut and kept", "cut and made again"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_chunks_give_the_loss_and_its_gradients(case: Attention, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if cut != "whole":
        monkeypatch.setattr(diversity_chunked, "CPU_CHUNK", 150)
        monkeypatch.setattr(diversity_chunked, "LEAST_ROWS", 1)
        monkeypatch.setattr(diversity_chunked, "KEPT_CHUNK", 1 << 20 if cut == "cut and kept" else 0)
    with backend("chunked"):
        check_attention(case, seed=len(case.name))


@pytest.mark.parametrize("case", [c for c in CASES if "bias" in c.name or "mask" in c.name], ids=lambda c: c.name)
def test_the_whole_map_form_of_the_function_says_the_same(case: Attention) -> None:
    with backend("reference"):
        check_attention(case, seed=len(case.name))


@pytest.mark.parametrize("name", ["reference", "chunked"])
@pytest.mark.parametrize(("variant", "heads"), FORMS)
def test_gradcheck(name: str, variant: Any, heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diversity_chunked, "CPU_CHUNK", 30)
    monkeypatch.setattr(diversity_chunked, "LEAST_ROWS", 1)
    case = Attention("gradcheck", (2, 2, 5, 3), bias=(1, 2, 5, 5), dtype=DOUBLE)
    inputs = case.inputs(1)[:3]

    def loss(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"variant": variant, "heads": heads, "threshold": 1.05, "first": 1}
        return diversity(query, key, scale=0.7, bias=bias, **options)

    with backend(name):
        assert loss(*inputs) > 0.1
        assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("rows", [None, 3])
def test_the_gradient_can_be_differentiated(rows: int | None) -> None:
    """From whole maps, as the gradient of a chunk is computed without a graph."""
    query, key, bias, options = Attention("twice", (1, 2, 7, 16), bias=(1, 2, 7, 7), rows=rows).inputs(0)
    given, results = (query, key, bias), []
    for name in ("chunked", "reference"):
        with backend(name):
            loss = diversity(query, key, scale=0.3, bias=bias, **options)
            slopes = torch.autograd.grad(loss, given, create_graph=True)
            results.append(torch.autograd.grad(sum(one.square().sum() for one in slopes), given))
    for one, other in zip(*results, strict=True):
        assert other.norm() > 0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_a_query_that_is_not_a_number_is_not_hidden(name: str) -> None:
    query, key, _, options = Attention("nan", (2, 2, 23, 16)).inputs(0)
    spoilt = query.detach().clone()
    spoilt[1, 0, 3, 2] = float("nan")
    with backend(name):
        assert diversity(spoilt, key, scale=0.3, **options).isnan()
        assert diversity(spoilt[:1], key[:1], scale=0.3, **options).isfinite()


def test_operator_keeps_the_rules_of_custom_operators() -> None:
    query, key, bias, _ = Attention("rules", (2, 2, 7, 4), bias=(1, 2, 7, 7)).inputs(0)
    rows = torch.tensor([3, 1, 6])
    operator = torch.ops.vitfocus.diversity_in_chunks.default
    torch.library.opcheck(operator, (query, key, bias, rows, 0.5, 1, True, True, 1.0, True, True))
    torch.library.opcheck(operator, (query, key, None, None, 0.5, 1, False, False, 1.0, True, False))
    torch.library.opcheck(operator, (query.detach(), key.detach(), None, None, 0.5, 0, True, False, 1.0, False, False))


def peak_bytes(count: int) -> int:
    """Most bytes that the loss and its gradients held at a time, inputs not counted."""
    query, key = (torch.randn(1, 2, count, 8, requires_grad=True) for _ in range(2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        diversity(query, key, scale=0.3).backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_memory_is_linear_in_the_tokens() -> None:
    small, large = peak_bytes(1500), peak_bytes(3000)
    assert 3000 * 16 * 2 * 4 < large < 2 * small, (small, large)
    assert large < 0.25 * (3000 * 3000 * 2 * 4), "no more than a part of the maps may exist at a time"


def test_no_gradient_is_made_where_none_is_wanted() -> None:
    query, key, bias, _ = Attention("wants", bias=(50, 50)).inputs(0)
    assert not diversity(query.detach(), key.detach(), scale=1.0, bias=bias.detach()).requires_grad
    with torch.no_grad():
        assert not diversity(query, key, scale=1.0).requires_grad
    place = diversity_chunked.LossOptions(1.0, 0, True, False, 2.0)
    _, made = diversity_chunked.forward(query, key, None, None, place, False, False)
    assert [one.numel() for one in made] == [0, 0, 0]
    only = torch.autograd.grad(diversity(query.detach(), key, scale=1.0, threshold=1.0), key)[0]
    both = torch.autograd.grad(diversity(query, key, scale=1.0, threshold=1.0), (query, key))[1]
    assert torch.equal(only, both) and only.abs().sum() > 0


@pytest.mark.parametrize("rows", [None, 9])
def test_repeats_bit_by_bit_and_scales_with_the_gradient_given(rows: int | None) -> None:
    query, key, _, options = Attention("again", (3, 2, 50, 16), rows=rows).inputs(3)
    loss = diversity(query, key, scale=0.3, **options)
    again = diversity(query, key, scale=0.3, **options)
    assert torch.equal(loss, again)
    runs = [torch.autograd.grad(one, (query, key), retain_graph=True) for one in (loss, again, loss)]
    for query_gradient, key_gradient in runs[1:]:
        assert torch.equal(query_gradient, runs[0][0]) and torch.equal(key_gradient, runs[0][1])
    doubled = torch.autograd.grad(loss, (query, key), torch.tensor(2.0))
    assert torch.equal(doubled[0], 2 * runs[0][0])


def small_vit() -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **options)
    return vf.treat_(model, "tap(branches=3)+adl(threshold=1.0,weight=0.5)").train()


def train(model: nn.Module, step: Any, steps: int, lr: float = 0.05) -> list[float]:
    """The losses of some steps on one fixed batch."""
    draw = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    images = torch.randn(16, 3, 32, 32, generator=draw, dtype=dtype)
    labels = torch.randint(0, 5, (16,), generator=draw)
    optimiser = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(step(images), labels) + vf.auxiliary_loss(model)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def test_two_hundred_steps_by_whole_maps_and_by_chunks_are_one_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where no rounding carries an entry across the threshold, at which the gradient jumps."""
    monkeypatch.setattr(diversity_chunked, "CPU_CHUNK", 1 << 10)
    monkeypatch.setattr(diversity_chunked, "LEAST_ROWS", 1)
    curves = {}
    for name in ("reference", "auto"):
        model = small_vit().double()
        with backend(name):
            curves[name] = torch.tensor(train(model, model, 200))
    torch.testing.assert_close(curves["auto"], curves["reference"], rtol=1e-6, atol=0)
    assert curves["auto"][-1] < 0.7 * curves["auto"][0]


def test_compiled_training_is_eager_training() -> None:
    """Compiled code computes attention and the loss apart."""
    eager, other = small_vit().double(), small_vit().double()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    assert train(eager, eager, 4) == pytest.approx(train(other, compiled, 4), rel=1e-9)
    for mine, theirs in zip(eager.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("spec", ["cb", "tap", "adl(variant=paper,threshold=1.0)"])
@pytest.mark.parametrize("treated_first", [False, True])
def test_compiled_code_of_a_plain_model_is_not_run_for_a_treated_one(spec: str, treated_first: bool) -> None:
    """Dynamo's default is to ignore hooks in its guards, so that either model would run what the other compiled."""
    (plain, images), (treated, _) = build("vit", depth=1), build("vit", depth=1)
    vf.treat_(treated.train(), spec)
    plain.train()
    expected, plain_expected = treated(images), plain(images)
    loss = vf.auxiliary_loss(treated).detach()
    fast, plain_fast = (torch.compile(one, backend="aot_eager") for one in (treated, plain))
    for model in (fast, plain_fast) if treated_first else (plain_fast, fast):
        wanted = expected if model is fast else plain_expected
        torch.testing.assert_close(model(images), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(vf.auxiliary_loss(treated).detach(), loss)
    assert (loss > 0.1) if spec.startswith("adl") else (expected - plain_expected).abs().max() > 1e-3


def test_copies_and_checkpoints_and_autocast() -> None:
    model, images = build("vit")
    vf.treat_(model, "adl(variant=paper,threshold=1.0)+tap").train()
    model(images)
    exact = vf.auxiliary_loss(model)
    twin = copy.deepcopy(model)
    assert vf.auxiliary_loss(twin).item() == 0
    twin.set_grad_checkpointing(True)
    with torch.autocast("cpu", BRAIN):
        twin(images)
    rough = vf.auxiliary_loss(twin)
    assert rough.dtype == torch.float32 and rough.item() == pytest.approx(exact.item(), rel=0.02)
    for one, loss in ((model, exact), (twin, rough)):
        one.zero_grad()
        loss.backward()
    mine, theirs = (one.blocks[1].attn.qkv.weight.grad for one in (model, twin))
    assert F.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) > 0.95


def test_explicit_form_is_the_function_on_whole_maps() -> None:
    """The tests' own yardstick, against the plainest case."""
    query, key, _, options = Attention("yardstick", dtype=DOUBLE).inputs(0)
    with backend("reference"):
        torch.testing.assert_close(
            diversity(query, key, scale=0.4, **options), explicit(query, key, None, 0.4, options)
        )


@pytest.mark.parametrize("variant", ["official", "paper"])
def test_a_threshold_of_zero_keeps_every_entry(variant: Any) -> None:
    """The cosine of each row with the mean row, by hand."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    maps = (query @ key.transpose(-1, -2)).softmax(-1).mean(1)
    expected = torch.nn.functional.cosine_similarity(maps, maps.mean(1, keepdim=True), dim=-1).mean()
    found = diversity(query, key, scale=1.0, threshold=0.0, variant=variant, heads="mean")
    torch.testing.assert_close(found, expected)
    assert vf.AttentionDiversification(threshold=0).threshold == 0
