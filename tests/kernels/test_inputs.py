"""What the loss and the statistics do with unusual inputs, in every backend: they work, or say in a sentence why not.

`test_backends.py` runs this file a second time, in a process in which Triton interprets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.tiny import build
from torch import Tensor

import vitfocus as vf
from vitfocus.kernels.attention import Observation
from vitfocus.kernels.backends import backend, interpreting
from vitfocus.kernels.context.op import share_mean
from vitfocus.kernels.diversity.op import diversity
from vitfocus.kernels.pooling.op import mix_by_matrix, mix_dilated, pool_tokens, predict_by_product, predict_hidden
from vitfocus.kernels.statistics.op import statistics
from vitfocus.kernels.statistics.reference import Numbers, map_statistics

NAMES = ["reference", "chunked"] + ["triton"] * interpreting()
each = pytest.mark.parametrize("name", NAMES)
loss = partial(diversity, scale=0.3, threshold=1.0)


def tokens(batch: int = 2, heads: int = 2, queries: int = 9, keys: int = 9, width: int = 16) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(batch, heads, count, width, generator=draw) for count in (queries, keys))  # type: ignore[return-value]


@each
@pytest.mark.parametrize("bias", [(3, 2, 9, 9), (4, 2, 9, 9), (1, 2, 2, 9, 9), (8, 9), (9, 10), (2, 1, 9)])
def test_a_bias_that_does_not_fit_is_refused(name: str, bias: tuple[int, ...]) -> None:
    query, key = tokens(heads=3)
    with backend(name):
        for function in (loss, lambda q, k, bias: statistics(Observation(query=q, key=k, bias=bias))):
            with pytest.raises(vf.VitfocusError, match="does not fit"):
                function(query, key, bias=torch.zeros(bias))


@each
@pytest.mark.parametrize("heads", ["mean", "each"])
@pytest.mark.parametrize("variant", ["official", "paper"])
def test_rows_that_attend_to_a_class_token_alone(name: str, variant: Any, heads: Any) -> None:
    """What is left of such a row is too short for a gradient; the other rows have theirs."""
    query, key = tokens(heads=1)
    key[:, :, 0] = 5.0
    for strength in (0.1, 0.5, 0.6, 0.8, 1.2):  # a logit of the class token of 8 to 96
        query[:, :, 1::2] = strength
        results = []
        for dtype in (torch.float32, torch.float64):
            given = [one.to(dtype, copy=True).requires_grad_() for one in (query, key)]
            with backend("reference" if dtype == torch.float64 else name):
                made = diversity(*given, scale=1.0, first=1, threshold=0.0, variant=variant, heads=heads)
            results.append((made, *torch.autograd.grad(made, given)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-5)
        assert (results[0][1][:, :, 1::2].abs().max() > 1e-6) == (strength == 0.1)


REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "boolean bias": lambda q, k: loss(q, k, bias=torch.ones(9, 9, dtype=torch.bool)),
    "boolean rows": lambda q, k: loss(q, k, rows=torch.ones(9, dtype=torch.bool)),
    "rows of fractions": lambda q, k: loss(q, k, rows=torch.ones(2)),
    "rows of two axes": lambda q, k: loss(q, k, rows=torch.ones(2, 2, dtype=torch.int64)),
    "widths": lambda q, k: loss(q, k[..., :8]),
    "heads": lambda q, k: loss(q, torch.cat([k, k[:, :1]], dim=1)),
    "three axes": lambda q, k: loss(q[0], k[0]),
    "first": lambda q, k: loss(q, k, first=-1),
    "variant": lambda q, k: loss(q, k, variant="other"),  # type: ignore[arg-type]
    "no keys": lambda q, k: statistics(Observation(query=q, key=k[:, :, :0])).entropy,
    "no queries": lambda q, k: statistics(Observation(query=q[:, :, :0], key=k)).entropy,
    "other batch": lambda q, k: statistics(Observation(query=q, key=k), Observation(query=q[:1], key=k[:1])).entropy,
    "other keys": lambda q, k: statistics(Observation(query=q, key=k), Observation(query=q, key=k[:, :, :5])).entropy,
}


@each
@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_meaning_is_refused_in_a_sentence(name: str, what: str) -> None:
    with backend(name), pytest.raises(vf.VitfocusError):
        REFUSED[what](*tokens())


@each
@pytest.mark.parametrize(
    "sizes",
    [{"batch": 0}, {"heads": 0}, {"queries": 0}, {"keys": 0}, {"queries": 0, "keys": 0}, {"first": 9}, {"first": 12}],
    ids=str,
)
def test_the_loss_of_nothing_is_0(name: str, sizes: dict[str, int]) -> None:
    first = sizes.get("first", 0)
    lengths = {name: length for name, length in sizes.items() if name != "first"}
    query, key = (one.half() + 3000 for one in tokens(**lengths))  # whose sum overflows
    bias = torch.zeros(query.shape[2], key.shape[2], dtype=torch.float16)
    given = [one.requires_grad_() for one in (query, key, bias)]
    with backend(name):
        found = loss(query, key, bias=bias, first=first)
        gradients = torch.autograd.grad(found, given)
    assert found.item() == 0 and found.dtype == torch.float32
    assert all(one.shape == two.shape and not one.any() for one, two in zip(gradients, given, strict=True))


@each
@pytest.mark.parametrize("what", ["query", "key", "bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 8])
def test_nothing_that_is_not_a_number_is_hidden(name: str, what: str, value: float, place: int) -> None:
    query, key = tokens()
    given = {"query": query.abs(), "key": key.clone(), "bias": torch.zeros(1, 2, 9, 9)}
    if value == float("inf"):  # so that some logits are inf, or inf - inf
        given["key"] = key.abs()
    given[what][0, 1, place, 1 % given[what].shape[3]] = value
    rows = torch.tensor([8, 3, 0])
    for variant, heads, some in (("official", "mean", None), ("paper", "mean", rows), ("paper", "each", None)):
        with backend(name):
            assert loss(**given, variant=variant, heads=heads, rows=some).isnan()
    seen = Observation(**given, scale=0.3)
    clean = Observation(query=query, key=key, scale=0.3)
    with backend(name):
        found, against = statistics(seen), statistics(clean, seen).products
    assert found.entropy[0, 1].isnan().any() and found.entropy[0, 0].isfinite().all()
    named = Numbers(*found.numbers[:, 0])
    for reading in ("entropy", "squares", "top", "effective"):
        assert getattr(named, reading)[1].isnan(), reading
    for reading in ("joint", "official", "paper"):
        assert getattr(named, reading)[0].isnan(), reading
    assert against is not None and against[0, 0, 1].isnan() and against[2, 0, 1].isnan() and against[1].isfinite().all()
    if what != "bias":  # which both images share
        assert found.numbers[:, 1].isfinite().all() and found.entropy[1].isfinite().all()


@each
def test_infinite_logits_are_not_taken_for_a_mask(name: str) -> None:
    query, key = tokens()
    query[0, 0, 2] = float("-inf")
    with backend(name):
        assert loss(query, key.abs()).isnan()
        assert statistics(Observation(query=query, key=key.abs())).entropy[0, 0, 2].isnan()


@each
def test_a_masked_row_attends_to_nothing(name: str) -> None:
    query, key = tokens()
    bias = torch.zeros(9, 9).index_fill(0, torch.tensor(2), float("-inf"))
    maps = (query * 0.3 @ key.mT).softmax(-1)
    maps[:, :, 2] = 0
    with backend(name):
        found = statistics(Observation(query=query, key=key, scale=0.3, bias=bias))
    expected = map_statistics(maps)
    torch.testing.assert_close(found.entropy, expected.entropy)
    torch.testing.assert_close(found.numbers, expected.numbers, rtol=1e-4, atol=1e-5)


@each
def test_pairs_may_differ_in_scale_width_type_and_form(name: str) -> None:
    query, key = tokens()
    one = Observation(query=query, key=key, scale=0.3)
    others = [
        Observation(query=query, key=key, scale=1.5),
        Observation(query=query[..., :8], key=key[..., :8], scale=0.3),
        Observation(query=query.double(), key=key.double(), scale=0.3),
        Observation(query=query, key=key[:, :1], scale=0.3),
        Observation(map=(query @ key.mT).softmax(-1)),
        Observation(query=query.mT.contiguous().mT, key=key.repeat_interleave(2, 3)[..., ::2], scale=0.3),
    ]
    if name == "triton":  # which, if forced, takes no float64
        del others[2]
    for first, second in [(one, other) for other in others] + [(other, one) for other in others]:
        expected = map_statistics(first.attention(), second.attention()).products
        with backend(name):
            found = statistics(first, second).products
        assert found is not None and expected is not None
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-4, atol=1e-5)


@each
def test_lazy_negation_counts(name: str) -> None:
    query, key = tokens()
    lazy, plain = torch._neg_view(query), -query
    with backend(name):
        assert torch.equal(loss(lazy, key), loss(plain, key))
        found, expected = (statistics(Observation(query=one, key=key)).numbers for one in (lazy, plain))
    assert torch.equal(found, expected)


@each
def test_transforms_of_functions_are_right(name: str) -> None:
    """They see plain torch operations; custom operators once had a forward-mode derivative of 0."""
    (query, key), results = tokens(), []
    for one in (name, "reference"):
        with backend(one):
            slope = torch.func.grad(lambda q: loss(q, key))(query)
            _, forward = torch.func.jvp(lambda q: loss(q, key), (query,), (key,))
            mapped = torch.func.vmap(loss)(torch.stack([query, key]), torch.stack([key, key]))
            with torch.autograd.forward_ad.dual_level():
                dual = loss(torch.autograd.forward_ad.make_dual(query, key), key)
                tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
        results.append((slope, forward, mapped, tangent))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close((results[0][0] * key).sum(), results[0][1])


@each
@pytest.mark.parametrize("wanted", range(3))
def test_a_gradient_of_one_input_alone(name: str, wanted: int) -> None:
    """Also its own derivative, which once was lost without an error."""
    results = []
    for one in (name, "reference"):
        given = [*tokens(), torch.zeros(1, 2, 9, 9)]
        given[wanted].requires_grad_()
        with backend(one):
            (slope,) = torch.autograd.grad(loss(*given[:2], bias=given[2]), given[wanted], create_graph=True)
            (second,) = torch.autograd.grad(slope.square().sum(), given[wanted])
        assert second.norm() > 0
        results.append((slope, second))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)


@each
def test_autocast_and_inference_mode_change_nothing(name: str) -> None:
    query, key = tokens()
    with backend(name):
        expected = loss(query, key)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss(query, key), expected)
        with torch.inference_mode():
            assert torch.equal(loss(query, key), expected)
            assert statistics(Observation(query=query, key=key)).numbers.isfinite().all()
        learning = Observation(query=query.requires_grad_(), key=key)
        assert not statistics(learning).numbers.requires_grad


@pytest.mark.skipif(interpreting(), reason="is run where Triton does not interpret")
@pytest.mark.parametrize("default", [torch.float64, torch.float16, "meta"], ids=str)
def test_plain_torch_defaults_are_not_taken(default: Any) -> None:
    """A diagnosis, and a step with the loss, under another default dtype or device."""
    model, images = build("vit")
    vf.treat_(model, "adl(variant=paper,threshold=1.0,rows=9)+tap+cbs")
    expected = vf.diagnose(model, images, against=images.flip(-1)).rows
    try:
        if default == "meta":
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        rows = vf.diagnose(model, images, against=images.flip(-1)).rows
        model.train()(images)
        found = vf.auxiliary_loss(model)
        assert found.dtype == torch.float32 and found.device.type == "cpu" and found.requires_grad
        assert vf.auxiliary_loss(model.eval()).dtype == torch.float32
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for row, other in zip(rows, expected, strict=True):
        numbers = {key: value for key, value in other.items() if isinstance(value, float)}
        assert {key: row[key] for key in numbers} == pytest.approx(numbers, rel=1e-6)


@pytest.mark.skipif(interpreting(), reason="is run where Triton does not interpret")
def test_plain_torch_pooling_hides_nothing() -> None:
    check_pooling_of_nan(predict_by_product, lambda x, hidden, second: mix_by_matrix(x, hidden.softmax(dim=1)))


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1 from the start")
def test_lazy_negation_of_tokens_and_of_gradients_counts() -> None:
    image, first, second = torch.randn(2, 13, 8), torch.randn(3, 8, 3, 3), torch.randn(3, 3, 3, 3)
    norm = (torch.ones(3), torch.zeros(3), 1e-5)
    functions: list[Callable[[Tensor], Tensor]] = [
        share_mean,
        lambda x: predict_hidden(x, first, (3, 4)),
        lambda x: mix_dilated(x, torch.ones(2, 3, 3, 4), second),
        lambda x: pool_tokens(x, first, norm, second, (3, 4))[0],
    ]
    for function in functions:
        results = []
        for lazy in (True, False):
            given = torch._neg_view(image) if lazy else -image
            made = function(given.requires_grad_())
            slope = torch.arange(float(made.numel())).view(made.shape)
            (gradient,) = torch.autograd.grad(made, given, torch._neg_view(slope) if lazy else -slope)
            results.append((made, gradient))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1 from the start")
def test_pooling_and_context_hide_nothing() -> None:
    check_pooling_of_nan(predict_hidden, mix_dilated)
    spoilt = torch.zeros(2, 5, 8)
    spoilt[0, 4, 2] = float("nan")
    for scale in (None, torch.ones(8)):
        found = share_mean(spoilt, scale)
        assert found[0, :, 2].isnan().all() and found[1].isfinite().all() and found[0, :, 3].isfinite().all()


def check_pooling_of_nan(predict: Any, mix: Any) -> None:
    """The token, its neighbours and all that they pool are not numbers; other images are."""
    image, first, second = torch.randn(2, 13, 8), torch.randn(3, 8, 3, 3), torch.randn(3, 3, 3, 3)
    image[0, 6, 2] = float("nan")
    found = mix(image, predict(image, first, (3, 4)), second)
    assert found[0, 6].isnan().all() and found[0, 1:].isnan().any(dim=-1).all() and found[1].isfinite().all()
