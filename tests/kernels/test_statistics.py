"""Statistics of attention: the reference, in tiles, by Triton's kernels, and the readings that use them.

Triton's interpreter must be chosen before triton is imported, so one test runs the others again in a process where it
is. It multiplies matrices of bfloat16 as if they were integers, so those are left to the GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.naive_readings import naive_row
from helpers.tiny import build
from torch import Tensor

import vitfocus as vf
from vitfocus.attention.layer_readings import Geometry, LayerReadings, layer_rows
from vitfocus.kernels.attention import Observation
from vitfocus.kernels.backends import backend, has_triton, interpreting
from vitfocus.kernels.statistics import op as module
from vitfocus.kernels.statistics.op import Histogram, statistics
from vitfocus.kernels.statistics.reference import Grids, Numbers, Statistics, map_statistics, stability

interpreted = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1 from the start")


def on_a_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test))


@dataclass(frozen=True)
class Case:
    """One attention: (B, H, Q, D), the number of keys, grids, and the shape of a bias with a mask."""

    name: str
    shape: tuple[int, int, int, int]
    keys: int | None = None
    grids: Grids | None = None
    bias: tuple[int, ...] | None = None
    spread: float = 2.0
    dtype: torch.dtype = torch.float32
    tolerance: float = 5e-6

    def inputs(self, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(seed)
        batch, heads, queries, width = self.shape
        # As a projection makes them: heads beside each other, not contiguous once split.
        query, key = (
            torch.randn(batch, count, heads, width, generator=generator).transpose(1, 2)
            for count in (queries, self.keys or queries)
        )
        bias = None
        if self.bias is not None:
            bias = torch.randn(self.bias, generator=generator)
            bias[..., -2:] = float("-inf")
        made = (self.spread * query, key, bias)
        return tuple(one.to(device, self.dtype) if one is not None else None for one in made)  # type: ignore[return-value]

    def observation(self, seed: int = 0, device: str = "cpu") -> Observation:
        query, key, bias = self.inputs(seed, device)
        return Observation(query=query, key=key, scale=self.scale, bias=bias)

    @property
    def scale(self) -> float:
        return self.shape[3] ** -0.5


CASES = [
    Case("one token", (2, 2, 1, 16)),
    Case("7 tokens", (2, 3, 7, 8), grids=Grids((1, 7), (1, 7))),
    Case("49 tokens", (2, 1, 49, 16), grids=Grids((7, 7), (7, 7))),
    Case("50 tokens", (1, 2, 50, 24), grids=Grids((7, 7), (7, 7), 1)),
    Case("87 tokens", (1, 2, 87, 16), grids=Grids((17, 5), (17, 5), 2)),
    Case("fewer keys", (2, 2, 70, 16), 6, Grids((10, 7), (3, 2))),
    Case("more keys", (1, 2, 9, 128), 70),
    Case("bias of an image", (2, 3, 13, 16), bias=(2, 3, 13, 13)),
    Case("bias of all images", (3, 2, 13, 16), bias=(1, 2, 13, 13)),
    Case("bias by key", (2, 2, 13, 16), bias=(2, 1, 1, 13)),
    Case("sharp", (1, 2, 50, 16), spread=40.0, tolerance=2e-4),
    Case("half precision", (2, 2, 20, 16), bias=(1, 1, 20, 20), dtype=torch.float16),
    Case("half precision, a whole tile", (2, 3, 83, 64), grids=Grids((9, 9), (9, 9), 2), dtype=torch.float16),
    Case("half precision, a whole tile and a bias", (1, 2, 83, 64), bias=(1, 2, 83, 83), dtype=torch.float16),
    Case("a wide head", (2, 1, 20, 192)),
    Case("many heads", (1, 24, 9, 16), grids=Grids((3, 3), (3, 3))),
]
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(params=[1 << 31, 0], ids=["one loop", "two loops"])
def loops(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the dense passes, whatever the number of keys."""
    monkeypatch.setattr("vitfocus.kernels.statistics.triton.ONE_LOOP_KEYS", request.param)


in_both_forms = pytest.mark.usefixtures("loops")


def exact_maps(seen: Observation) -> Tensor:
    assert seen.query is not None and seen.key is not None
    scores = seen.query.double() @ seen.key.double().mT * seen.scale
    return (scores if seen.bias is None else scores + seen.bias.double()).softmax(dim=-1)


def assert_near(found: Statistics, exact: Statistics, tolerance: float) -> None:
    names = ("rows", *Numbers._fields)
    for name, one, other in zip(names, (found[0], *found[1]), (exact[0], *exact[1]), strict=True):
        assert one.shape == other.shape, name
        error = (one.double() - other).abs().max() / other.abs().max().clamp_min(0.1)
        assert error <= tolerance, (name, float(error))


def check(case: Case, device: str = "cpu", budget: int | None = None) -> None:
    """The chosen backend against the definitions on exact maps."""
    seen, other = case.observation(device=device), case.observation(seed=1, device=device)
    maps, others = exact_maps(seen), exact_maps(other)
    for top in (1, 1 + seen.shape[3] // 4, seen.shape[3]):
        found = statistics(seen, grids=case.grids, top=top, budget=budget)
        assert_near(found, map_statistics(maps, grids=case.grids, top=top), case.tolerance)
    products = statistics(seen, other, budget=budget).products
    assert products is not None
    both, one, two = products
    cosines = (both / (one * two).sqrt()).double()
    torch.testing.assert_close(cosines, stability(maps, others), rtol=0, atol=10 * case.tolerance)


@by_name
def test_in_tiles(case: Case) -> None:
    with backend("chunked"):
        check(case, budget=200)


@by_name
def test_by_the_reference(case: Case) -> None:
    with backend("reference"):
        check(case)


@interpreted
@in_both_forms
@by_name
def test_interpreted_kernels(case: Case) -> None:
    with backend("triton"):
        check(case)


@interpreted
@pytest.mark.parametrize("number", [1, 5, 12, 13, 14], ids=lambda number: CASES[number].name)
def test_interpreted_one_loop_and_two_are_equal(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, of one tile and several, with a bias and without; in half precision with tiles described too."""
    from vitfocus.kernels.statistics import triton as kernels

    case, found = CASES[number], []
    for most, described in ((1 << 31, False), (0, False), (1 << 31, True), (0, True)):
        monkeypatch.setattr(kernels, "ONE_LOOP_KEYS", most)
        monkeypatch.setattr(kernels, "TMA", described)
        with backend("triton"):
            found.append(statistics(case.observation(), grids=case.grids, top=2))
    for one in found[1:]:
        assert torch.equal(found[0].entropy, one.entropy) and torch.equal(found[0].numbers, one.numbers)


@interpreted
@pytest.mark.parametrize(("tokens", "channels"), [(1, 5), (50, 384), (7, 1300)])
def test_interpreted_norms_of_tokens(tokens: int, channels: int) -> None:
    from vitfocus.kernels.statistics.triton import token_norms

    patches = torch.randn(3, tokens + 2, channels).half()[:, 2:]  # after two prefix tokens
    torch.testing.assert_close(token_norms(patches), torch.linalg.vector_norm(patches.float(), dim=-1))


@interpreted
def test_interpreted_normalisers_may_be_given() -> None:
    case = CASES[3]
    seen = case.observation()
    given = replace(seen, lse=seen.scores().logsumexp(dim=-1))
    with backend("triton"):
        found = statistics(given, given, grids=case.grids)
    assert_near(found, map_statistics(exact_maps(seen), grids=case.grids), case.tolerance)
    assert found.products is not None
    torch.testing.assert_close(found.products[0], Numbers(*found.numbers).squares)


@interpreted
def test_interpreted_wide_heads_are_computed_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_launch", None)  # calling it would raise
    with backend("triton"):
        check(Case("", (1, 2, 5, 260)))


@interpreted
def test_interpreted_operators_keep_their_promises() -> None:
    query, key, bias = CASES[7].inputs()
    torch.library.opcheck(module._statistics, (query, key, bias, None, 0.25, [], 2.0, 3))
    torch.library.opcheck(module._pair_products, (query, key, bias, None, query, key, bias, None, 0.25))


GEOMETRIES = {
    "class token": Geometry(13, 13, 1, True, (3, 4), (3, 4)),
    "two prefix tokens": Geometry(17, 17, 2, True, (5, 3), (5, 3)),
    "reduced keys": Geometry(24, 6, 0, False, (6, 4), (3, 2)),
    "no place": Geometry(11, 11, 1, False, (2, 2), (2, 2)),
}


def layer(geometry: Geometry, name: str, device: str = "cpu") -> tuple[dict[str, float], Tensor]:
    """A layer's row and stabilities from two batches, by that backend."""
    readings = LayerReadings(token_attention=True, against=True)
    case = Case("", (6, 3, geometry.queries, 8), geometry.keys, bias=(1, 3, geometry.queries, geometry.keys))
    with backend(name):
        stabilities = [readings.observe(case.observation(seed, device), geometry) for seed in (0, 1)]
    return layer_rows([readings])[0], torch.cat([one.cpu() for one in stabilities if one is not None])


def check_layer(name: str, backend_name: str, device: str = "cpu") -> None:
    geometry = GEOMETRIES[name]
    row, stabilities = layer(geometry, backend_name, device)
    expected, expected_stabilities = layer(geometry, "chunked")
    assert row == pytest.approx(expected, rel=2e-5)
    torch.testing.assert_close(stabilities, expected_stabilities)
    case = Case("", (6, 3, geometry.queries, 8), geometry.keys, bias=(1, 3, geometry.queries, geometry.keys))
    maps = torch.cat([exact_maps(case.observation(seed))[:3] for seed in (0, 1)])
    naive = naive_row(maps.numpy(), geometry)
    assert {key: row[key] for key in naive} == pytest.approx(naive, rel=2e-5)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_readings_by_the_reference_equal_the_tiles(name: str) -> None:
    check_layer(name, "reference")


@interpreted
@pytest.mark.parametrize("name", GEOMETRIES)
def test_interpreted_readings_equal_the_tiles(name: str) -> None:
    check_layer(name, "triton")


@interpreted
def test_interpreted_entries_at_the_threshold_count_in_the_papers_form_only() -> None:
    """Two of four keys get one half each, and 2/K is one half."""
    query, key = torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 4, 16)
    bias = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf]).expand(1, 1, 4, 4)
    with backend("triton"):
        found = statistics(Observation(query=query, key=key, bias=bias))
    numbers = Numbers(*found.numbers)
    assert numbers.official.item() == 0.0
    assert numbers.paper.item() == pytest.approx(1.0) and numbers.effective.item() == pytest.approx(2.0)


@interpreted
@in_both_forms
@pytest.mark.parametrize("rows", [{"BM": 16, "BN": 32}, {"BM": 32, "BN": 16}])
def test_interpreted_passes_with_tiles_of_their_own(rows: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The column pass may read more rows than the row pass owns; memory that nobody wrote is NaN here."""
    from vitfocus.kernels.statistics import triton as kernels

    made = kernels.block_settings
    monkeypatch.setattr(
        kernels, "block_settings", lambda kind, *rest: made(kind, *rest) | (rows if kind == "rows" else {})
    )
    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        for count, side in ((65, 8), (17, 4)):
            grids = Grids((side, side), (side, side), 1)
            with backend("triton"):
                check(Case("", (2, 3, count, 16), None, grids, dtype=torch.float16))
    finally:
        torch.use_deterministic_algorithms(False)


def test_one_bin_counts_beyond_what_single_precision_counts() -> None:
    """As of uniform attention, whose rows have one entropy."""
    histogram = Histogram(-1.0, 15.0, 16, torch.device("cpu"))
    histogram.add(torch.zeros(1).expand((1 << 24) + 1000))
    assert int(histogram.counts().sum()) == (1 << 24) + 1000


def check_counts(device: str, spread: float) -> None:
    """Also of values that are not a number or out of range, of 64 bits, of few bins, and if the backend changes."""
    values = 3 + spread * torch.randn(10_007, generator=torch.Generator().manual_seed(0))
    values[:5] = torch.tensor([torch.nan, torch.inf, -torch.inf, -1.0, 15.0])
    for bins, wide in ((1 << 18, False), (1 << 18, True), (100, False)):
        counts = []
        for first, then in (("chunked", "triton"), ("triton", "chunked")):
            with backend(first):
                histogram = Histogram(-1.0, 15.0, bins, torch.device(device))
                histogram.MOST = 10 if wide else histogram.MOST
                histogram.add(values[:6000].to(device))
            with backend(then):
                histogram.add(values[6000:].to(device))
            counts.append(histogram.counts().cpu())
        expected, found = counts
        assert found.dtype == (torch.int64 if wide else torch.int32)
        if bins == 100:  # a value may be rounded to the neighbouring bin
            assert found.sum() == expected.sum()
            assert (found.cumsum(0) - expected.cumsum(0)).abs().max() <= 1
        else:
            assert torch.equal(found, expected)


@interpreted
@pytest.mark.parametrize("spread", [3.0, 1e-4])
def test_interpreted_counts_equal_torchs_histogram(spread: float) -> None:
    check_counts("cpu", spread)


@on_a_gpu
@pytest.mark.parametrize("spread", [3.0, 1e-4])
def test_gpu_counts_equal_torchs_histogram(spread: float) -> None:
    check_counts("cuda", spread)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, float)}


@interpreted
@pytest.mark.parametrize("name", ["vit_registers", "swin", "pvt_v2"])
def test_interpreted_diagnosis(name: str) -> None:
    """A whole model, windows with a relative bias and a mask included, or keys fewer than queries."""
    model, images = build(name)
    images, found = images[:1], {}
    for one in ("chunked", "triton"):
        with backend(one):
            found[one] = vf.diagnose(model, images, against=images.flip(-1))
    for row, other in zip(found["triton"].rows, found["chunked"].rows, strict=True):
        assert numbers(row) == pytest.approx(numbers(other), rel=1e-4)


@pytest.mark.skipif(not has_triton() or interpreting(), reason="Triton is not installed, or this is that process")
def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-k", "interpreted", "-p", "no:cacheprovider", "-n", "0"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout


@on_a_gpu
@in_both_forms
@by_name
def test_gpu_kernels(case: Case) -> None:
    check(case, "cuda")


@on_a_gpu
@in_both_forms
@pytest.mark.parametrize("side", [14, 28, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_kernels_at_size(side: int, dtype: torch.dtype) -> None:
    check(Case("", (2, 6, side * side + 1, 64), None, Grids((side, side), (side, side), 1), dtype=dtype), "cuda")


@on_a_gpu
@in_both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_kernels_of_deit_s_at_odd_sizes(dtype: torch.dtype) -> None:
    check(Case("", (3, 6, 211, 64), None, Grids((15, 14), (15, 14), 1), dtype=dtype), "cuda")
    check(Case("", (3, 6, 211, 64), 103, bias=(1, 6, 211, 103), dtype=dtype), "cuda")


@on_a_gpu
@pytest.mark.parametrize("name", GEOMETRIES)
def test_gpu_readings_equal_the_tile_pass(name: str) -> None:
    check_layer(name, "auto", "cuda")


@on_a_gpu
@in_both_forms
def test_gpu_repeats_bit_by_bit_and_waits_for_nothing() -> None:
    case = Case("", (4, 6, 1025, 64), None, Grids((32, 32), (32, 32), 1), dtype=torch.bfloat16)
    seen = case.observation(device="cuda")
    one, two = (statistics(seen, seen, grids=case.grids) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    readings = LayerReadings(token_attention=True, against=True)
    geometry = Geometry(1025, 1025, 1, True, (32, 32), (32, 32))
    readings.observe(seen, geometry)
    torch.cuda.synchronize()
    before = torch.cuda.max_memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        readings.observe(seen, geometry)
        readings.totals()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 4 * 6 * 1025 * 1025  # nothing of a map's size


@on_a_gpu
@pytest.mark.parametrize("name", ["vit", "swin"])
def test_gpu_diagnosis_equals_the_tile_pass(name: str) -> None:
    model, images = build(name)
    model, images = model.cuda(), images.cuda()
    found = {}
    for one in ("chunked", "triton"):
        with backend(one):
            found[one] = vf.diagnose(model, images, against=images.flip(-1))
    for row, other in zip(found["triton"].rows, found["chunked"].rows, strict=True):
        assert numbers(row) == pytest.approx(numbers(other), rel=1e-3)
