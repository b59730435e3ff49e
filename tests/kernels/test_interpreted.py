"""The Triton kernels in Triton's interpreter, on the CPU: forward and backward against float64.

The interpreter must be chosen before triton is imported, so `test_backends.py` runs this file in a process of its own.
It multiplies matrices of bfloat16 as if they were integers, so those are left to the GPU's tests.
"""

from __future__ import annotations

import mmap
import os

import pytest
import timm
import torch
from helpers.kernel_cases import (
    Attention,
    Pooling,
    check_attention,
    compare,
    explicit,
    pooling_inputs,
)

import vitfocus as vf
from vitfocus.kernels.attention import Observation
from vitfocus.kernels.backends import backend, has_triton
from vitfocus.kernels.context.op import share_mean
from vitfocus.kernels.diversity.chunked import LossOptions
from vitfocus.kernels.diversity.op import diversity
from vitfocus.kernels.diversity.reference import row_similarity
from vitfocus.kernels.pooling.op import mix_dilated, pool_tokens, predict_hidden
from vitfocus.kernels.statistics.op import statistics
from vitfocus.kernels.statistics.reference import map_statistics

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
]

HALF = torch.float16
FORMS = [(variant, heads) for variant in ("official", "paper") for heads in ("mean", "each")]
ATTENTION = [
    *(
        Attention(f"{variant}-{heads}-{count}", (2, 2, count, 16), variant=variant, heads=heads, silent=count == 1)
        for variant, heads in FORMS
        for count in (1, 7, 49, 50)
    ),
    Attention("one-token-above", (2, 2, 1, 16), threshold=0.5),
    *(Attention(f"width-{width}", (1, 2, 23, width), variant="paper") for width in (24, 48, 128)),
    Attention("three-heads", (1, 3, 50, 32)),
    Attention("more-keys", (2, 2, 20, 16), keys=50),
    Attention("fewer-keys", (2, 2, 50, 16), keys=7, variant="paper"),
    Attention("sampled", rows=11),
    Attention("sampled-patches", rows=11, first=2, heads="each", variant="paper"),
    Attention("patches", first=1),
    Attention("patches-each", first=5, heads="each"),
    Attention("bias-per-image", (2, 2, 23, 16), bias=(2, 2, 23, 23)),
    Attention("bias-of-all-images", (3, 2, 23, 16), bias=(1, 2, 23, 23), variant="paper", heads="each"),
    Attention("bias-of-all-heads", (2, 2, 23, 16), bias=(2, 1, 23, 23), first=1),
    Attention("bias-by-key", (2, 2, 23, 16), bias=(2, 1, 1, 23), masked=0.3),
    Attention("bias-by-row", (2, 2, 23, 16), bias=(1, 2, 23, 1)),
    Attention("bias-of-two-axes", (2, 2, 23, 16), bias=(23, 23), rows=9),
    Attention("masked", (2, 2, 37, 16), bias=(2, 2, 37, 37), masked=0.5),
    Attention("masked-rows", (2, 2, 7, 16), bias=(2, 2, 7, 7), masked=0.8, variant="paper"),
    Attention("extreme", spread=25.0),
    Attention("extreme-each", spread=25.0, heads="each", variant="paper"),
    Attention("far-below-zero", (2, 2, 23, 16), bias=(2, 2, 23, 23), level=-200.0),
    Attention("far-above-zero", (2, 2, 23, 16), bias=(2, 2, 23, 23), level=200.0),
    Attention("half-below-zero", (2, 2, 23, 16), bias=(2, 2, 23, 23), level=-30.0, dtype=HALF),
    *(Attention(f"half-{v}-{h}", (2, 2, 49, 32), variant=v, heads=h, dtype=HALF) for v, h in FORMS),
    *(Attention(f"turned-{v}", (1, 3, 83, 64), variant=v, dtype=HALF) for v in ("official", "paper")),
    Attention("turned-sampled", (2, 2, 83, 64), rows=11, first=2, dtype=HALF),
    Attention("turned-bias", (1, 2, 37, 48), keys=23, bias=(1, 2, 37, 23), masked=0.3, dtype=HALF),
    Attention("many-heads", (1, 9, 23, 64), dtype=HALF),
    Attention("tight", (1, 16, 23, 64)),
    Attention("one-wide-head", (1, 1, 83, 192)),
    Attention("nothing-above", threshold=30.0, silent=True),
]


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_diversity(case: Attention) -> None:
    with backend("triton"):
        check_attention(case, seed=len(case.name))


@pytest.fixture(params=[True, False], ids=["whole", "passes"])
def whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Small maps in one launch and, as larger ones are, in several."""
    from vitfocus.kernels.diversity import op as diversity_op

    monkeypatch.setattr(diversity_op, "WHOLE", diversity_op.WHOLE if request.param else 0)
    return bool(request.param)


SEVERAL = [case for case in ATTENTION if case.heads == "mean" and case.shape[1] > 1 and case.shape[3] <= 64]


@pytest.mark.parametrize("case", SEVERAL, ids=lambda case: case.name)
def test_small_maps_in_several_launches(case: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitfocus.kernels.diversity import op as diversity_op

    monkeypatch.setattr(diversity_op, "WHOLE", 0)
    with backend("triton"):
        check_attention(case, seed=len(case.name))


WHOLE = [
    *(
        Attention(f"{variant}-{count}", (2, 3, count, 16), variant=variant, silent=count == 1)
        for variant in ("official", "paper")
        for count in (1, 7, 49, 65, 128)
    ),
    *(Attention(f"half-{v}", (2, 3, 65, 64), variant=v, dtype=HALF) for v in ("official", "paper")),
    *(Attention(f"half-first-{first}", (1, 2, 50, 32), first=first, dtype=HALF) for first in (1, 5)),
    *(Attention(f"no-threshold-{v}", (1, 2, 50, 24), variant=v, first=1, threshold=0.0) for v in ("official", "paper")),
    Attention("sampled", (2, 2, 128, 16), rows=60, first=1, variant="paper", dtype=HALF),
    Attention("fewer-keys", (2, 2, 100, 16), keys=20),
    Attention("more-keys", (2, 2, 20, 48), keys=128, dtype=HALF),
    *(Attention(f"silent-{count}", (2, 2, count, 16), threshold=66.0, silent=True) for count in (50, 65)),
    *(Attention(f"beside-33-{v}", (2, 2, 33, 16), variant=v, dtype=HALF) for v in ("official", "paper")),
    *(Attention(f"beside-no-threshold-{v}", (1, 2, 65, 16), variant=v, threshold=0.0) for v in ("official", "paper")),
    Attention("beside-extreme", (1, 2, 65, 16), spread=25.0, dtype=HALF),
]


@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
@pytest.mark.parametrize("given", [False, True], ids=["", "normalisers"])
@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_maps_in_registers(case: Attention, given: bool, joint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but this kernel and those of the gradients of queries and keys is launched."""
    from vitfocus.kernels.diversity import op as diversity_op

    if joint and case.dtype != HALF:
        return  # only tiles in half precision hold all columns
    monkeypatch.setattr(diversity_op, "BUSY", 1 if joint else diversity_op.BUSY)
    monkeypatch.setattr(diversity_op._Launch, "gradient_pass", None)
    for name in ("launch_mean_pass", "launch_unit_pass"):
        monkeypatch.setattr(f"vitfocus.kernels.diversity.triton.{name}", None)
    with backend("triton"):
        check_attention(case, seed=len(case.name), given=given)
        query, key, _, options = case.inputs(len(case.name))
        losses = [diversity(q, k, scale=0.3, **options) for q, k in ((query, key), (query.detach(), key.detach()))]
    assert torch.equal(*losses), "gradients that are not wanted are not computed"


@pytest.mark.parametrize("up", [False, True], ids=["down", "up"])
@pytest.mark.parametrize("variant", ["official", "paper"])
@pytest.mark.usefixtures("whole")
def test_rounding_carries_no_entry_across_the_threshold(variant: str, up: bool) -> None:
    """The stored map is float16: a threshold between an entry and what it rounds to must still tell them apart."""
    case = Attention("between", (1, 3, 20, 16), variant=variant, dtype=HALF)
    query, key, _, options = case.inputs(0)
    exact = (query.detach().double() @ key.detach().double().mT * case.scale).softmax(-1).mean(1) * 20
    rounded = exact.half().double()
    between = torch.where((rounded > exact) == up, (exact + rounded) / 2, 0.0)
    change, options["threshold"] = 0.0, 0.0
    for threshold in between[between > 1].tolist():  # where it matters most
        losses = [
            row_similarity(one[:, None], variant=variant, threshold=threshold) for one in (exact / 20, rounded / 20)
        ]
        change, options["threshold"] = max(
            (change, options["threshold"]), (float(abs(losses[0] - losses[1])), threshold)
        )
    assert change > 1e-3, "a case that shows nothing"
    expected = explicit(query, key, None, case.scale, options)
    with backend("triton"):
        compare("loss", diversity(query, key, scale=case.scale, **options), expected, 5e-5)


def test_logits_are_as_extreme_as_they_should_be() -> None:
    case = next(case for case in ATTENTION if case.name == "extreme")
    query, key, *_ = case.inputs(len(case.name))
    assert (query @ key.mT).abs().max() * case.scale > 80


@pytest.mark.usefixtures("whole")
def test_diversity_repeats_bit_by_bit() -> None:
    query, key, _, options = Attention("again").inputs(3)
    with backend("triton"):
        runs = []
        for _ in range(2):
            loss = diversity(query, key, scale=0.3, **options)
            runs.append((loss, *torch.autograd.grad(loss, (query, key))))
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


JOINT = [
    *(Attention(f"joint-{v}-{h}", (2, 2, 49, 32), variant=v, heads=h, dtype=HALF) for v, h in FORMS),
    Attention("joint-sampled", (2, 2, 50, 64), rows=11, first=2, dtype=HALF),
    Attention("joint-bias", (1, 2, 37, 48), keys=23, bias=(1, 2, 37, 23), masked=0.3, dtype=HALF),
    # More images than are summed at once, of sizes that are no multiples of a tile.
    *(
        Attention(f"joint-bias-{v}-{h}", (5, 2, 19, 16), bias=(1, 2, 19, 19), variant=v, heads=h, dtype=HALF)
        for v, h in FORMS
    ),
    Attention("joint-bias-of-images", (3, 2, 19, 16), bias=(3, 1, 19, 19), rows=13, dtype=HALF),
    Attention("joint-bias-by-key", (5, 3, 35, 16), bias=(1, 1, 1, 35), first=1, dtype=HALF),
]


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("case", JOINT, ids=lambda case: case.name)
def test_both_gradients_at_once(case: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitfocus.kernels.diversity import op as diversity_op

    monkeypatch.setattr(diversity_op, "BUSY", 1)  # as if there were heads enough
    check_attention(case, seed=len(case.name))


@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
@pytest.mark.parametrize("kept", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("variant", ["official", "paper"])
def test_some_maps_are_kept_and_the_others_computed_again(
    variant: str, kept: int, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ones changes no bit."""
    from vitfocus.kernels.diversity import op as diversity_op

    monkeypatch.setattr(diversity_op, "BUSY", 1 if joint else diversity_op.BUSY)
    monkeypatch.setattr(diversity_op, "WHOLE", 0)
    case = Attention("kept", (5, 2, 23, 16), bias=(1, 2, 23, 23), variant=variant, first=1, rows=19, dtype=HALF)
    check_attention(case, seed=1)
    query, key, bias, options = case.inputs(1)
    results = []
    for number in (5, kept):
        monkeypatch.setattr(diversity_op._Launch, "kept", number)
        loss = diversity(query, key, scale=case.scale, bias=bias, **options)
        results.append((loss, *torch.autograd.grad(loss, (query, key, bias))))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
@pytest.mark.parametrize("variant", ["official", "paper"])
def test_gradients_of_maps_in_registers_are_kept_or_computed_again(
    variant: str, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many channels as keep them, and with fewer; which changes no bit."""
    from vitfocus.kernels.diversity import op as diversity_op

    monkeypatch.setattr(diversity_op, "BUSY", 1 if joint else diversity_op.BUSY)
    case = Attention("again", (5, 3, 50, 64), variant=variant, first=1, dtype=HALF)
    check_attention(case, seed=1)
    query, key, _, options = case.inputs(1)
    results = []
    for share in (diversity_op.KEPT_PERCENT, 0):
        monkeypatch.setattr(diversity_op, "KEPT_PERCENT", share)
        _, _, _, slope = diversity_op.launch_forward(
            query, key, None, None, None, LossOptions(case.scale, 1, True, variant == "paper", 1.5)
        )
        assert slope.shape[0] == (5 if share else 0)
        loss = diversity(query, key, scale=case.scale, **options)
        results.append((loss, *torch.autograd.grad(loss, (query, key))))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    "case",
    [
        Attention("unwritten", (2, 2, 7, 16)),
        Attention("unwritten-sampled", (2, 2, 50, 32), rows=11, first=2, dtype=HALF),
        Attention("unwritten-bias", (1, 2, 37, 48), keys=23, bias=(1, 1, 1, 23), dtype=HALF),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
def test_nothing_is_read_that_was_not_written(case: Attention, joint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are longer than what they hold; here all that is not written is not a number."""
    from vitfocus.kernels.diversity import op as diversity_op

    monkeypatch.setattr(diversity_op, "BUSY", 1 if joint else diversity_op.BUSY)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        check_attention(case, seed=1)
        query, key, bias, _ = case.inputs(1)
        seen = Observation(query=query.detach(), key=key.detach(), scale=0.3, bias=bias)
        with backend("triton"):
            assert statistics(seen.detach()).numbers.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("rows", [None, 20])
@pytest.mark.parametrize("heads", ["mean", "each"])
@pytest.mark.parametrize("bias", [(2, 2, 50, 50), (1, 1, 1, 50)], ids=["bias", "key-bias"])
def test_rows_in_chunks_and_columns_in_parts(
    bias: tuple[int, ...], heads: str, rows: int | None, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maps too large to exist at once, many blocks of rows, and columns shared out among programs."""
    from vitfocus.kernels.diversity import op as diversity_op

    monkeypatch.setattr(diversity_op, "row_tiles", lambda *_: (16, 16, 1))
    monkeypatch.setattr(diversity_op, "LEAST_MAP", 1)
    monkeypatch.setattr(diversity_op, "MAP_OVER_QUERIES", 1)
    monkeypatch.setattr(diversity_op._Launch, "parts", lambda *_: 3)
    check_attention(Attention("parts", (2, 2, 50, 16), heads=heads, rows=rows, first=first, bias=bias))


def test_wider_heads_than_fit_are_left_to_the_pass_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitfocus.kernels.diversity import op as module

    monkeypatch.setattr(module, "_Diversity", None)
    check_attention(Attention("too large", (1, 2, 7, 300), threshold=1.0))


def test_the_gradient_can_be_differentiated() -> None:
    """From whole maps, as no kernel computes second derivatives."""
    query, key, bias, options = Attention("twice", (1, 2, 7, 16), bias=(1, 2, 7, 7)).inputs(0)
    given, results = (query, key, bias), []
    for name in ("triton", "reference"):
        with backend(name):
            loss = diversity(query, key, scale=0.3, bias=bias, **options)
            slopes = torch.autograd.grad(loss, given, create_graph=True)
            results.append(torch.autograd.grad(sum(one.square().sum() for one in slopes), given))
    for one, other in zip(*results, strict=True):
        assert other.norm() > 0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("whole")
def test_a_query_that_is_not_a_number_is_not_hidden() -> None:
    query, key, _, options = Attention("nan", (2, 2, 23, 16)).inputs(0)
    spoilt = query.detach().clone()
    spoilt[1, 0, 3, 2] = float("nan")
    with backend("triton"):
        assert diversity(spoilt, key, scale=0.3, **options).isnan()
        assert diversity(spoilt[:1], key[:1], scale=0.3, **options).isfinite()
        found = statistics(Observation(query=spoilt, key=key.detach(), scale=0.3))
    assert found.entropy[1, 0, 3].isnan() and found.entropy[0].isfinite().all()
    assert found.numbers[:, 1, 0].isnan().sum() >= 5 and found.numbers[:, 0].isfinite().all()


@pytest.mark.parametrize("shape", [(9, 9), (2, 9, 9), (1, 2, 9, 9)], ids=lambda shape: f"{len(shape)}-axes")
@pytest.mark.parametrize("sides", ["clean", "corrupted", "both"])
def test_statistics_of_maps_with_a_bias(sides: str, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, other = torch.randn(3, 2, 2, 9, 16, generator=draw).unbind()
    bias = 2 * torch.randn(shape, generator=draw)
    clean = Observation(query=query, key=key, scale=0.3, bias=bias if sides != "corrupted" else None)
    corrupted = Observation(query=other, key=key, scale=0.3, bias=bias if sides != "clean" else None)
    expected = map_statistics(clean.attention(), corrupted.attention())
    for name in ("triton", "chunked"):
        with backend(name):
            found = statistics(clean, corrupted)
        assert found.products is not None and expected.products is not None
        compare(name, found.products, expected.products, 1e-5)
        compare(name, found.numbers, expected.numbers, 1e-4)


def test_statistics_of_no_images() -> None:
    seen = Observation(query=torch.zeros(0, 2, 7, 16), key=torch.zeros(0, 2, 7, 16))
    for name in ("triton", "chunked", "reference"):
        with backend(name):
            assert statistics(seen).entropy.shape == (0, 2, 7)


@pytest.mark.parametrize("shared", ["heads", "images", "none"])
@pytest.mark.parametrize("dtypes", [(HALF, torch.float32), (torch.float32, HALF)], ids=["half-query", "half-key"])
def test_keys_may_be_shared_and_of_another_type(shared: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """As attention itself takes them: heads that share keys have one head of them, and autocast evens out types."""
    query, key, _, options = Attention("shared", (2, 3, 7, 16)).inputs(1)
    few = {"heads": key[:, :1], "images": key[:1], "none": key}[shared].detach()
    given = [query.detach().to(dtypes[0]).requires_grad_(), few.to(dtypes[1]).requires_grad_()]
    exact = [one.detach().double().requires_grad_() for one in given]
    with backend("triton"):
        got = diversity(*given, scale=0.3, **options)
        numbers = statistics(Observation(query=given[0].detach(), key=given[1].detach(), scale=0.3)).numbers
    maps = (exact[0] * 0.3 @ exact[1].mT).softmax(-1)
    expected = explicit(exact[0], exact[1].expand(2, 3, -1, -1), None, 0.3, options)
    compare("loss", got, expected, 2e-5)
    for mine, theirs in zip(torch.autograd.grad(got, given), torch.autograd.grad(expected, exact), strict=True):
        compare("gradient", mine, theirs, 4e-3)
    compare("statistics", numbers, map_statistics(maps.detach()).numbers, 1e-4)


def test_what_lies_apart_is_read_where_it_lies() -> None:
    """Rows, a scale, a norm and gradients that are every second number of something longer."""
    query, key, _, options = Attention("apart", (2, 2, 50, 16)).inputs(2)
    rows = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:40:2]
    options |= {"rows": rows, "variant": "paper"}
    with backend("triton"):
        compare("loss", diversity(query, key, scale=0.3, **options), explicit(query, key, None, 0.3, options), 1e-5)
    tokens, scale = torch.randn(2, 5, 16)[..., ::2], torch.randn(16)[::2]
    expected = tokens + scale * tokens.mean(dim=1, keepdim=True)
    torch.testing.assert_close(share_mean(tokens, scale), expected)
    (image, first, second, *norm), _ = pooling_inputs(Pooling("apart", (3, 4), branches=3, channels=8), 0, "cpu")
    apart = [one.repeat_interleave(2)[::2] for one in norm]
    pooled, plain = (pool_tokens(image, first, (*affine, 1e-5), second, (3, 4))[0] for affine in (apart, norm))
    assert torch.equal(pooled, plain)


@pytest.mark.parametrize("name", ["triton", "chunked"])
def test_a_loss_scale_saves_gradients_that_half_precision_cannot_hold(name: str) -> None:
    """It comes with the gradient that arrives, and must take effect before anything is rounded."""
    query, key, _, options = Attention("scaled", (2, 2, 23, 16), dtype=HALF).inputs(6)
    exact = [one.detach().double().requires_grad_() for one in (query, key)]
    weight, loss_scale = 2.0**-14, 2.0**16
    correct = torch.autograd.grad(explicit(*exact, None, 0.3, options) * weight, exact)
    for scale in (1.0, loss_scale):
        with backend(name):
            loss = diversity(query, key, scale=0.3, **options) * weight * scale
            made = torch.autograd.grad(loss, (query, key))
        for mine, theirs in zip(made, correct, strict=True):
            error = float((mine.double() / scale - theirs).norm() / theirs.norm())
            assert error > 0.1 if scale == 1 else error < 4e-3


def test_the_default_dtype_is_not_taken() -> None:
    query, key, _, options = Attention("default", (2, 2, 23, 16), variant="paper").inputs(4)
    seen = Observation(query=query.detach(), key=key.detach(), scale=0.3)
    results = []
    try:
        for dtype in (torch.float32, torch.float64, torch.float16):
            torch.set_default_dtype(dtype)
            with backend("triton"):
                loss = diversity(query, key, scale=0.3, **options)
                results.append((loss, *torch.autograd.grad(loss, (query, key)), statistics(seen).numbers))
    finally:
        torch.set_default_dtype(torch.float32)
    for run in results[1:]:
        assert all(one.dtype == two.dtype and torch.equal(one, two) for one, two in zip(results[0], run, strict=True))


def test_tokens_more_than_two_billion_numbers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a huge batch whose first axis is the sequence: offsets take 64 bits."""
    from triton.runtime import interpreter

    # It copies whole storages back, which here are the same and have 5 GB.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    apart, tokens = 1 << 29, 5
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux's MAP_NORESERVE: only pages written to take memory
    space = mmap.mmap(-1, 2 * apart * tokens, flags=flags)
    whole = torch.frombuffer(space, dtype=HALF)
    near, key, _, options = Attention("apart", (1, 2, tokens, 16), dtype=HALF, threshold=1.0).inputs(0)
    far = whole.as_strided(near.shape, (32, 16, apart, 1)).copy_(near.detach()).requires_grad_()
    results = []
    for query in (near, far):
        with backend("triton"):
            loss = diversity(query, key, scale=0.3, **options)
            entropy = statistics(Observation(query=query.detach(), key=key.detach(), scale=0.3)).entropy
            results.append((loss, *torch.autograd.grad(loss, (query, key)), entropy))
    assert results[0][0] > 0.1
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_no_images_at_all() -> None:
    """The last process's share of a small batch may be empty."""
    query = torch.zeros(0, 2, 7, 16, requires_grad=True)
    for name in ("triton", "chunked", "reference"):
        with backend(name):
            loss = diversity(query, query, scale=0.3)
            loss.backward()
            assert loss == 0 and query.grad is not None and query.grad.shape == query.shape
            full = torch.randn(2, 2, 7, 16, requires_grad=True)
            loss = diversity(full, full, scale=0.3, rows=torch.zeros(0, dtype=torch.int64))
            loss.backward()
            assert loss == 0 and full.grad is not None and not full.grad.any()
    assert share_mean(torch.zeros(0, 5, 8)).shape == (0, 5, 8)
    tokens, first = torch.zeros(0, 5, 8, requires_grad=True), torch.zeros(3, 8, 3, 3, requires_grad=True)
    mixed = mix_dilated(tokens, predict_hidden(tokens, first, (2, 2)), torch.zeros(3, 3, 3, 3))
    assert mixed.shape == (0, 5, 8)
    slopes = torch.autograd.grad(mixed.sum(), (tokens, first))
    assert slopes[0].shape == (0, 5, 8) and not slopes[1].any()


@pytest.mark.usefixtures("whole")
def test_given_normalisers_change_nothing() -> None:
    query, key, _, options = Attention("given", (2, 2, 50, 16)).inputs(5)
    lse = (query.detach() * 0.25 @ key.detach().mT).logsumexp(-1)
    results = []
    for given in (None, lse):
        loss = diversity(query, key, scale=0.25, lse=given, **options)
        results.append((loss, *torch.autograd.grad(loss, (query, key))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("spec", ["cb", "cbs", "tap(branches=3)", "adl(variant=paper,threshold=1.0,rows=9)"])
def test_a_model_by_kernels_is_the_model_by_equations(spec: str) -> None:
    """Output, loss and gradients."""
    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 3}
    model = vf.treat_(timm.create_model("vit_tiny_patch16_224", **options), spec).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "context_scale" in name:
                weight.normal_()
    images, results = torch.randn(2, 3, 16, 16), {}
    for name in ("reference", "triton"):
        with backend(name):
            torch.manual_seed(1)
            output = model(images)
            loss = output.square().mean() + vf.auxiliary_loss(model)
            results[name] = (output, loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    for one, other in zip(*results.values(), strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
