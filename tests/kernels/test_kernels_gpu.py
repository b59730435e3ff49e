"""The kernels on a GPU: every size, dtype and option against float64; compiled, captured, chosen unasked, learning."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from helpers.kernel_cases import (
    Attention,
    Pooling,
    check_attention,
    check_context,
    check_joined,
    check_pooling,
    check_pooling_with_norm,
    check_short_attention,
)
from torch import Tensor, nn
from torch.nn import functional as F

import vitfocus as vf
from vitfocus.kernels.attention import attention_with_normalisers, keeps_normalisers
from vitfocus.kernels.backends import backend, has_triton
from vitfocus.kernels.diversity.op import diversity
from vitfocus.kernels.pooling.op import mix_dilated, predict_hidden

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMS = [("paper", "mean"), ("official", "each"), ("paper", "each")]
SIZES = (1, 7, 49, 50, 197, 785, 1025)
#: Few distinct widths and numbers of heads, for each set is compiled.
ATTENTION = [
    *(
        Attention(f"{name}-{count}", (2, 3, count, 64), dtype=dtype, silent=count == 1)
        for name, dtype in DTYPES.items()
        for count in SIZES
    ),
    *(
        Attention(f"{variant}-{heads}-{count}", (2, 3, count, 64), variant=variant, heads=heads, dtype=torch.bfloat16)
        for variant, heads in (("paper", "mean"), ("official", "each"), ("paper", "each"))
        for count in (50, 785)
    ),
    *(
        Attention(f"width-{width}-{name}", (1, 2, 197, width), dtype=DTYPES[name])
        for width in (16, 48, 128)
        for name in ("fp32", "bf16")
    ),
    *(Attention(f"deit-s-{name}", (4, 6, 197, 64), dtype=dtype) for name, dtype in DTYPES.items()),
    *(Attention(f"deit-s-{v}-{h}", (4, 6, 197, 64), variant=v, heads=h, dtype=torch.bfloat16) for v, h in FORMS),
    *(Attention(f"deit-s-odd-{v}-{h}", (3, 6, 211, 64), variant=v, heads=h, dtype=torch.float16) for v, h in FORMS),
    *(Attention(f"deit-s-odd-{name}", (3, 6, 211, 64), dtype=dtype) for name, dtype in DTYPES.items()),
    *(Attention(f"eight-of-{width}", (2, 8, 197, width), dtype=torch.float16) for width in (96, 128, 256)),
    # Heads enough for one program per head to compute both gradients.
    *(Attention(f"joint-{v}-{h}", (48, 6, 197, 64), variant=v, heads=h, dtype=torch.bfloat16) for v, h in FORMS),
    *(Attention(f"joint-{count}", (48, 6, count, 64), dtype=torch.float16) for count in (49, 65, 197, 256)),
    Attention("joint-sampled", (48, 6, 197, 32), rows=50, first=1, dtype=torch.bfloat16),
    Attention("twenty-four-heads", (1, 24, 49, 32), dtype=torch.bfloat16),
    Attention("many-heads", (1, 12, 197, 64), dtype=torch.bfloat16),
    Attention("many-heads-fp32", (1, 12, 197, 64)),
    Attention("more-heads", (1, 16, 197, 64), dtype=torch.bfloat16),
    Attention("more-than-fit", (1, 16, 50, 80)),
    Attention("one-wide-head", (2, 1, 65, 192)),
    Attention("more-keys", (2, 3, 49, 64), keys=785),
    Attention("fewer-keys", (2, 3, 785, 64), keys=49),
    Attention("sampled", (2, 3, 1025, 64), rows=256),
    Attention("sampled-patches", (2, 3, 1025, 64), rows=256, first=1, dtype=torch.bfloat16),
    Attention("patches", (2, 3, 197, 64), first=5),
    Attention("bias-per-image", (2, 3, 50, 64), bias=(2, 3, 50, 50)),
    Attention("bias-of-all-images", (70, 3, 49, 64), bias=(1, 3, 49, 49)),
    Attention("bias-by-key", (2, 3, 197, 64), bias=(2, 1, 1, 197), masked=0.3),
    Attention("masked", (2, 3, 197, 64), bias=(2, 3, 197, 197), masked=0.5),
    Attention("masked-half", (2, 3, 197, 64), bias=(2, 3, 197, 197), masked=0.5, dtype=torch.float16),
    Attention("masked-rows", (2, 3, 7, 64), bias=(2, 3, 7, 7), masked=0.8),
    *(Attention(f"extreme-{name}", (2, 3, 197, 64), spread=25.0, dtype=dtype) for name, dtype in DTYPES.items()),
    Attention("far-below-zero", (2, 3, 50, 64), bias=(2, 3, 50, 50), level=-200.0),
    Attention("half-below-zero", (2, 3, 50, 64), bias=(2, 3, 50, 50), level=-30.0, dtype=torch.float16),
]


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_diversity(case: Attention) -> None:
    with backend("triton"):
        check_attention(case, seed=len(case.name), device="cuda")


JOINED = [
    *(
        Attention(f"{v}-{name}-{count}", (24, 6, count, 64), variant=v, dtype=DTYPES[name])
        for v in ("official", "paper")
        for name in ("bf16", "fp16")
        for count in (197, 211)
    ),
    *(Attention(f"keys-{count}", (24, 6, count, 64), dtype=torch.bfloat16) for count in (129, 144, 256)),
    Attention("deit-ti", (48, 3, 197, 64), dtype=torch.bfloat16),
    *(Attention(f"width-{width}", (48, 4, 197, width), dtype=torch.float16) for width in (32, 48)),
    *(Attention(f"patches-{first}", (24, 6, 197, 64), first=first, dtype=torch.bfloat16) for first in (1, 5)),
    Attention("extreme", (24, 6, 197, 64), spread=25.0, dtype=torch.bfloat16),
    *(Attention(f"short-{v}-65", (48, 6, 65, 64), variant=v, dtype=torch.bfloat16) for v in ("official", "paper")),
    *(Attention(f"short-{count}", (48, 3, count, 64), dtype=torch.float16) for count in (7, 33, 50, 64, 66, 128)),
    *(Attention(f"short-patches-{count}", (48, 6, count, 32), first=1, dtype=torch.bfloat16) for count in (65, 128)),
]


@pytest.mark.parametrize("case", JOINED, ids=lambda case: case.name)
def test_attention_with_diversity(case: Attention) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("attention and loss are computed apart here")
    with backend("triton"):
        check_joined(case, seed=len(case.name), device="cuda")


POOLING = [
    *(Pooling(f"{name}-branches-4", (14, 14), channels=192, dtype=dtype) for name, dtype in DTYPES.items()),
    *(Pooling(f"branches-{count}", (14, 9), branches=count, channels=192) for count in (1, 2, 3, 5, 6, 7, 8)),
    *(Pooling(f"grid-{side}", (side, side), channels=192, batch=1, dtype=torch.bfloat16) for side in (1, 7, 28, 32)),
    *(Pooling(f"deit-s-{name}", (14, 14), channels=384, dtype=dtype) for name, dtype in DTYPES.items()),
    Pooling("deit-s-odd", (15, 13), channels=384, dtype=torch.bfloat16),
    Pooling("row", (1, 7), prefix=0, channels=192),
    Pooling("wide", (3, 130), prefix=5, channels=200),
]


@pytest.mark.parametrize("case", POOLING, ids=lambda case: case.name)
def test_pooling(case: Pooling) -> None:
    check_pooling(case, seed=len(case.name), device="cuda")
    if case.batch * case.grid[0] * case.grid[1] > 1:  # torch's batch norm needs more than one value per channel
        check_pooling_with_norm(case, seed=len(case.name), device="cuda")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("scaled", [False, True], ids=["mean", "scaled"])
@pytest.mark.parametrize("count", SIZES)
def test_context(count: int, scaled: bool, dtype: torch.dtype) -> None:
    check_context((3, count, 200), scaled, dtype, "cuda")
    check_context((3, count, 384), scaled, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("count", "width"),
    [(1, 32), (7, 32), (33, 64), (50, 64), (64, 40), (65, 32), (65, 64), (66, 64), (128, 48), (128, 64)],
)
def test_short_attention(count: int, width: int, dtype: torch.dtype) -> None:
    check_short_attention(count, width, dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_torchs_attention_tells_its_normalisers(dtype: torch.dtype) -> None:
    query, key, value = torch.randn(3, 2, 3, 197, 64, device="cuda", dtype=dtype).unbind()
    if not keeps_normalisers(query, key, value, 0.125):
        pytest.skip("torch does not prefer cuDNN's attention here")
    made = attention_with_normalisers(query, key, value, scale=0.125)
    torch.testing.assert_close(made[0], F.scaled_dot_product_attention(query, key, value), rtol=0, atol=0)
    exact = (query.double() * 0.125 @ key.double().mT).logsumexp(-1)
    torch.testing.assert_close(made[1].double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [None, 100])
def test_diversity_repeats_bit_by_bit(rows: int | None) -> None:
    case = Attention("again", (4, 3, 785, 64), dtype=torch.bfloat16, rows=rows)
    query, key, _, options = case.inputs(3, "cuda")
    runs = []
    for _ in range(3):
        loss = diversity(query, key, scale=case.scale, **options)
        runs.append((loss, *torch.autograd.grad(loss, (query, key))))
    for run in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], run, strict=True))


def test_memory_is_linear_in_the_tokens() -> None:
    peaks = []
    for count in (2048, 4096):
        query, key, _, options = Attention("memory", (1, 3, count, 64), dtype=torch.bfloat16).inputs(0, "cuda")
        torch.autograd.grad(diversity(query, key, scale=0.1, **options), (query, key))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(diversity(query, key, scale=0.1, **options), (query, key))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del query, key
    assert peaks[1] < 4096 * 4096 * 2, "less than one head's map in bf16"
    assert peaks[1] < 4.5 * peaks[0]


def small_vit(spec: str = "tap(branches=3)+adl(threshold=1.0,weight=0.5)") -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 3, "num_heads": 3}
    return vf.treat_(timm.create_model("vit_tiny_patch16_224", num_classes=5, **options), spec).train().cuda()


def train(model: nn.Module, step: Any, steps: int, dtype: torch.dtype | None = None) -> Tensor:
    """The losses of some steps on one fixed batch."""
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(16, 3, 32, 32, generator=draw).cuda()
    labels = torch.randint(0, 5, (16,), generator=draw).cuda()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4)  # plain descent is chaotic here: 1e-6 grows to 1
    losses = []
    for _ in range(steps):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            output = step(images)
        loss = F.cross_entropy(output.float(), labels) + vf.auxiliary_loss(model)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach().clone())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_hundred_steps_by_whole_maps_and_by_kernels_are_one_curve(dtype: torch.dtype | None) -> None:
    """Near, not equal: rounding carries an entry across the threshold now and then, where the gradient jumps."""
    curves = {}
    for name in ("reference", "auto"):
        with backend(name):
            model = small_vit()
            curves[name] = train(model, model, 200, dtype)
    near = 0.02 if dtype is None else 0.05
    torch.testing.assert_close(curves["auto"], curves["reference"], rtol=near, atol=near)
    torch.testing.assert_close(curves["auto"].mean(), curves["reference"].mean(), rtol=near / 4, atol=0)
    assert curves["auto"][-1] < 0.7 * curves["auto"][0]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_is_eager_training(mode: str) -> None:
    eager, other = small_vit(), small_vit()
    compiled = torch.compile(other, fullgraph=True, mode=mode)
    expected, got = train(eager, eager, 8), train(other, compiled, 8)
    torch.testing.assert_close(got, expected, rtol=5e-3, atol=1e-3)
    assert got[-1] != got[0]


def treated_step(
    family: str, name: str, how: str = "eager", dtype: torch.dtype | None = torch.bfloat16
) -> tuple[Tensor, dict[str, Tensor], set[str]]:
    """The loss and gradients of the third step of two blocks, compiled as `how` says, and the kernels it ran."""
    torch.manual_seed(0)
    images = torch.randn(48, 3, 224, 224, generator=torch.Generator().manual_seed(1)).cuda()
    model = timm.create_model(family, depth=2, num_classes=5).train().cuda()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(8)  # so that some keys are attended to more
    vf.treat_(model, "adl(threshold=0.0,layers=all)")
    with backend(name):
        step: Any = model
        if how == "blocks":
            for block in model.blocks:
                block.compile(fullgraph=True)
        elif how != "eager":
            step = torch.compile(model, fullgraph=True, mode=None if how == "model" else how)
        for _ in range(3):
            model.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as kernels:
                with torch.autocast("cuda", dtype, enabled=dtype is not None):
                    output = step(images)
                loss, target = vf.auxiliary_loss(model), output.detach().float().softmax(1).roll(1, 1)
                (F.cross_entropy(output.float(), target) + 10 * loss).backward()
                torch.cuda.synchronize()
        gradients = {key: one.grad.double() for key, one in model.named_parameters() if one.grad is not None}
        return loss.detach().clone(), gradients, {event.key for event in kernels.key_averages()}


@pytest.mark.parametrize("how", ["eager", "model", "blocks", "reduce-overhead"])
@pytest.mark.parametrize("family", ["deit_small_patch16_224", "deit_tiny_patch16_224"])
def test_attention_and_loss_are_one_operation_in_a_model(family: str, how: str) -> None:
    """Eager and compiled. In bf16, whose rounding depends on the compiler, a step is as near to fp32 as with chunks."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("attention and loss are computed apart here")
    _, exact, _ = treated_step(family, "chunked", dtype=None)
    loss, chunked, apart = treated_step(family, "chunked")
    got, made, together = treated_step(family, "auto", how)
    assert "attention_gradient" in together and "attention_gradient" not in apart
    torch.testing.assert_close(got, loss, rtol=2e-3, atol=0)
    for key, wanted in exact.items():
        error, usual = ((one[key] - wanted).norm() / wanted.norm() for one in (made, chunked))
        assert error <= 1.5 * usual + 0.01, key


def test_a_whole_step_is_captured_and_replayed() -> None:
    query, key, bias, options = Attention("graph", (2, 3, 197, 64), bias=(1, 3, 197, 197)).inputs(0, "cuda")
    tokens = torch.randn(2, 197, 192, device="cuda", requires_grad=True)
    first = torch.randn(4, 192, 3, 3, device="cuda", requires_grad=True)
    second = torch.randn(4, 4, 3, 3, device="cuda", requires_grad=True)
    inputs = (query, key, bias, tokens, first, second)

    def work() -> tuple[Tensor, ...]:
        loss = (
            diversity(query, key, scale=0.2, bias=bias, **options)
            + mix_dilated(tokens, predict_hidden(tokens, first, (14, 14)), second).square().mean()
        )
        return loss, *torch.autograd.grad(loss, inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    draw = torch.Generator("cuda").manual_seed(5)
    with torch.no_grad():
        for one in inputs:
            one.normal_(generator=draw)
    graph.replay()
    for got, expected in zip(captured, work(), strict=True):
        assert torch.equal(got, expected)


def test_kernels_are_chosen_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitfocus.kernels.diversity import op as diversity_op
    from vitfocus.kernels.pooling import mixing

    calls = []
    for module, name in ((diversity_op, "launch_forward"), (diversity_op, "launch_backward"), (mixing, "mix_tokens")):
        original = getattr(module, name)

        def spy(*args: Any, _original: Any = original, _label: Any = (module.__name__, name)) -> Any:
            calls.append(_label)
            return _original(*args)

        monkeypatch.setattr(module, name, spy)
    model = small_vit()
    train(model, model, 1, torch.bfloat16)
    assert len(set(calls)) == 3
    calls.clear()
    with backend("chunked"):
        train(model, model, 1)
    assert not calls
    doubled = torch.randn(1, 2, 9, 16, device="cuda", dtype=torch.float64, requires_grad=True)
    diversity(doubled, doubled, scale=0.3).backward()
    assert not calls and doubled.grad is not None


def test_chunks_on_the_gpu_say_the_same() -> None:
    with backend("chunked"):
        check_attention(Attention("chunks", (2, 3, 785, 64), first=1), device="cuda")
        check_attention(Attention("chunked-rows", (2, 3, 785, 64), rows=200, bias=(2, 3, 785, 785)), device="cuda")


@pytest.mark.parametrize("family", ["swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
def test_a_learned_bias_learns_from_the_loss(family: str) -> None:
    """Relative position biases: their gradient by the kernels and by whole maps."""
    grads = []
    for name in ("auto", "reference"):
        torch.manual_seed(0)
        options: dict[str, Any] = {"depths": (1, 1), "num_heads": (3, 3)} if "swin" in family else {"depth": 1}
        model = timm.create_model(family, img_size=112, num_classes=5, embed_dim=48, drop_path_rate=0.0, **options)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "relative_position" in key:
                    parameter.normal_()
        vf.treat_(model.train().cuda(), "adl(threshold=1.0,variant=paper)")
        with backend(name):
            model(torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(0)).cuda())
            vf.auxiliary_loss(model).backward()
        grads.append(
            [p.grad for key, p in model.named_parameters() if "relative_position" in key and p.grad is not None]
        )
    assert grads[0] and len(grads[0]) == len(grads[1])
    for mine, theirs in zip(*grads, strict=True):
        assert theirs.norm() > 0 and (mine - theirs).norm() < 1e-2 * theirs.norm()
