"""Every reading against a naive computation in numpy, and in tiles against its definition on whole maps."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import timm
import torch
from helpers.naive_readings import naive_row
from helpers.tiny import build
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import vitfocus as vf
import vitfocus.attention.layer_readings as layer_module
import vitfocus.attention.readings as readings_module
from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.attention.findings import findings
from vitfocus.attention.layer_readings import Geometry, LayerReadings, NormReadings, Quantiles, layer_rows
from vitfocus.attention.readings import Chart, Reading, Threshold
from vitfocus.kernels.attention import Observation
from vitfocus.kernels.backends import backend
from vitfocus.kernels.statistics.reference import (
    effective_tokens,
    head_similarity,
    map_statistics,
    overfocus,
    received,
    relative_distance,
    row_diversity,
    row_entropy,
    softmax_gradient,
    stability,
)
from vitfocus.report.attention import reading_chart


def random_maps(*shape: int, sharpness: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(*shape, generator=generator)).softmax(dim=-1)


def explicit_row(maps: torch.Tensor, geometry: Geometry) -> dict[str, float]:
    """A layer's row from the library's pure functions."""
    entropy, got = row_entropy(maps), received(maps)
    row = {
        "entropy": entropy.mean(),
        "entropy_p15": entropy.quantile(0.15),
        "entropy_p85": entropy.quantile(0.85),
        "gradient": softmax_gradient(maps).mean(),
        "overfocus": overfocus(got).mean(),
        "effective_tokens": effective_tokens(got).mean(),
        "diversity_official": row_diversity(maps, "official"),
        "diversity_paper": row_diversity(maps, "paper"),
    }
    if maps.shape[1] > 1:
        row["head_similarity"] = head_similarity(maps).mean()
    if geometry.class_token:
        row["entropy_cls"] = entropy[..., 0].mean()
    if geometry.grids is not None:
        row["distance"] = relative_distance(maps, geometry.query_grid, geometry.key_grid, geometry.prefix_tokens).mean()
    return {key: float(value) for key, value in row.items()}


GEOMETRIES = {
    "class token": Geometry(13, 13, 1, True, (3, 4), (3, 4)),
    "two prefix tokens": Geometry(17, 17, 2, True, (5, 3), (5, 3)),
    "reduced keys": Geometry(24, 6, 0, False, (6, 4), (3, 2)),
    "a single row": Geometry(7, 7, 0, False, (1, 7), (1, 7)),
    "no place": Geometry(11, 11, 1, False, (2, 2), (2, 2)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("heads", [1, 3])
def test_pure_functions_equal_naive_numpy(name: str, heads: int) -> None:
    geometry = GEOMETRIES[name]
    maps = random_maps(2, heads, geometry.queries, geometry.keys)
    maps[0, 0, 0] = torch.eye(geometry.keys)[1]  # exact zeros: 0 log 0 is 0
    naive = naive_row(maps.numpy(), geometry)
    assert explicit_row(maps, geometry) == pytest.approx({k: naive[k] for k in naive if k != "entropy_bound"}, rel=1e-5)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("budget", [1, 40, 1 << 17])
def test_streaming_equals_explicit(name: str, budget: int) -> None:
    geometry = GEOMETRIES[name]
    maps = random_maps(5, 3, geometry.queries, geometry.keys)
    other = random_maps(5, 3, geometry.queries, geometry.keys, seed=1)
    layer = LayerReadings(token_attention=True, against=True, budget=budget)
    stabilities = [
        layer.observe(Observation(logits=torch.cat([maps[images], other[images]]).log()), geometry)
        for images in (slice(0, 2), slice(2, 5))  # two batches, each clean then corrupted
    ]
    row = layer_rows([layer])[0]
    assert row.pop("entropy_bound") == pytest.approx(np.log(geometry.keys))
    assert row.pop("stability") == pytest.approx(float(stability(maps, other).mean()), rel=1e-5)
    assert row == pytest.approx(explicit_row(maps, geometry), rel=1e-4)
    torch.testing.assert_close(torch.cat(stabilities), stability(maps, other))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias_shape", [None, (1, 1, 1, 13), (4, 1, 13, 13), (1, 3, 13, 13), (4, 3, 13, 13)])
def test_streaming_from_queries_and_keys(dtype: torch.dtype, bias_shape: tuple[int, ...] | None) -> None:
    geometry = GEOMETRIES["class token"]
    generator = torch.Generator().manual_seed(0)
    query, key = (2 * torch.randn(4, 3, 13, 8, generator=generator).to(dtype) for _ in range(2))
    bias = None
    if bias_shape:
        bias = torch.randn(bias_shape, generator=generator).to(dtype)
        bias[..., -3:] = float("-inf")  # a padding mask
    logits = query.double() * 0.35 @ key.double().mT + (0 if bias is None else bias.double())
    layer = LayerReadings(token_attention=True, budget=100)
    layer.observe(Observation(query=query, key=key, scale=0.35, bias=bias), geometry)
    row = layer_rows([layer])[0]
    del row["entropy_bound"]
    assert row == pytest.approx(explicit_row(logits.softmax(dim=-1), geometry), rel=1e-4)


@pytest.mark.parametrize("given", ["logits", "map"])
def test_streaming_from_what_the_model_made(given: str) -> None:
    geometry = GEOMETRIES["class token"]
    maps = random_maps(2, 3, 13, 13)
    layer = LayerReadings(token_attention=True)
    layer.observe(Observation(**{given: maps.log() if given == "logits" else maps}), geometry)
    row = layer_rows([layer])[0]
    del row["entropy_bound"]
    assert row == pytest.approx(explicit_row(maps, geometry), rel=1e-4)


def test_large_logits_keep_their_precision() -> None:
    """Entropy from log-sum-exp minus a mean would lose four digits here; from log-softmax it loses none."""
    query = torch.zeros(1, 1, 1, 2)
    query[..., 0] = 3000.0
    key = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.999, 0.0], [0.5, 0.0]]]])
    layer = LayerReadings(token_attention=False)
    layer.observe(Observation(query=query, key=key), Geometry(1, 4))
    exact = row_entropy((query.double() @ key.double().mT).softmax(dim=-1))
    assert layer_rows([layer])[0]["entropy"] == pytest.approx(float(exact), rel=1e-3)


def test_entries_at_the_threshold_count_in_the_papers_form_only() -> None:
    maps = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).expand(1, 1, 4, 4)  # 2/K is 0.5
    layer = LayerReadings(token_attention=True)
    layer.observe(Observation(map=maps), Geometry(4, 4, query_grid=(2, 2), key_grid=(2, 2)))
    row = layer_rows([layer])[0]
    assert (row["diversity_official"], row["diversity_paper"]) == (0.0, 1.0)
    assert (float(row_diversity(maps, "official")), float(row_diversity(maps, "paper"))) == (0.0, 1.0)


def test_uniform_attention_has_the_values_theory_says() -> None:
    layer = LayerReadings(token_attention=True)
    layer.observe(
        Observation(query=torch.zeros(2, 3, 40, 4), key=torch.randn(2, 3, 40, 4)),
        Geometry(40, 40, query_grid=(5, 8), key_grid=(5, 8)),
    )
    row = layer_rows([layer])[0]
    along = {n: np.mean([abs(i - j) / (n - 1) for i, j in itertools.product(range(n), repeat=2)]) for n in (5, 8)}
    expected = {
        "entropy": np.log(40),
        "gradient": 1 - 1 / 40,
        "overfocus": 0.05,
        "effective_tokens": 40,
        "head_similarity": 1,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert row["distance"] == pytest.approx(along[5] + along[8], rel=1e-5)
    assert row["diversity_official"] == row["diversity_paper"] == 0  # nothing exceeds 2/K


def test_quantiles_stay_close_once_folded_into_a_histogram() -> None:
    values = torch.rand(50_000, generator=torch.Generator().manual_seed(0)) * 5
    exact, folded = Quantiles(), Quantiles(exact=1000)
    for part in values.split(7000):
        exact.add(part)
        folded.add(part)
    assert folded.histogram is not None and not folded.parts
    assert folded.quantiles(0.15, 0.85) == pytest.approx(exact.quantiles(0.15, 0.85), rel=2e-4)


def test_quantiles_of_zeros_below_zero_by_rounding() -> None:
    folded = Quantiles(exact=10)
    folded.add(torch.full((1000,), -1e-7))
    assert folded.histogram is not None
    assert folded.quantiles(0.15, 0.85).tolist() == [0.0, 0.0]


def test_a_histogram_counts_beyond_what_32_bits_count() -> None:
    folded = Quantiles(exact=1)
    values = torch.tensor([1.0, 2.0, 3.0]).repeat(1000)
    folded.add(values)
    assert folded.histogram is not None
    folded.histogram.memory *= (2**31 - 1) // 1000  # as if so many had been added
    folded.histogram.total *= (2**31 - 1) // 1000
    before = int(folded.histogram.counts().sum())
    folded.add(values)
    assert folded.histogram.counts().max() == (2**31 - 1) // 1000 * 1000 + 1000 > 2**31 - 1
    assert int(folded.histogram.counts().sum()) == before + 3000


class LargestTensor(TorchDispatchMode):
    """Notes the most numbers that any tensor made under it has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return output


@pytest.mark.parametrize("against", [False, True])
def test_no_tensor_grows_with_the_square_of_the_tokens(against: bool) -> None:
    largest = {}
    for side in (16, 32, 48):
        tokens = side * side
        query = torch.randn(2, 2, tokens, 8)
        layer = LayerReadings(token_attention=True, against=against, budget=1 << 14)
        with LargestTensor() as watch:
            layer.observe(
                Observation(query=query, key=query),
                Geometry(tokens, tokens, query_grid=(side, side), key_grid=(side, side)),
            )
        largest[tokens] = watch.numbers
    assert largest[2304] <= max(1 << 14, 2 * 2 * 2304 * 8) < 2304**2


class Launches(TorchDispatchMode):
    """Counts what would be launched on a GPU: every operation but views, allocations and questions about types."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and not any(name in str(func) for name in ("empty", "promote_types"))
        return func(*args, **(kwargs or {}))


def kept_by(thing: object, seen: dict[int, int]) -> dict[int, int]:
    """The memory of every tensor that is reachable from an object: address to bytes."""
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, list | tuple):
        for one in thing:
            kept_by(one, seen)
    elif isinstance(thing, dict):
        kept_by(list(thing.values()), seen)
    elif type(thing).__module__.startswith("vitfocus."):
        kept_by(list(getattr(thing, "__dict__", {}).values()), seen)
    return seen


def test_readings_of_finished_sums_launch_little_and_keep_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host's time goes into launches, and what readings keep stands beside the model's own memory."""
    images, heads, side = 16, 3, 8
    tokens = side * side + 1
    query, key = torch.randn(2, images, heads, tokens, 8, generator=torch.Generator().manual_seed(0)).unbind()
    seen, geometry = Observation(query=query, key=key), Geometry(tokens, tokens, 1, True, (side, side), (side, side))
    layer = LayerReadings(token_attention=True)
    with backend("reference"):
        made = layer_module.statistics(seen)
        monkeypatch.setattr(layer_module, "statistics", lambda *args, **kwargs: made)
        with Launches() as launches:
            layer.observe(seen, geometry)
        assert launches.count == 0
        # One number a row, for the quantiles; and a few for each head of each image.
        by_row, by_head = 4 * images * heads * tokens, 4 * images * heads
        with Launches() as launches:
            layer_module.add_up([layer, layer])
        assert launches.count <= 2
        assert sum(kept_by(layer, {}).values()) <= by_row + 12 * by_head
        layer.entropies.exact = 1
        for _ in range(100):
            layer.observe(seen, geometry)
    histogram = 4 * Quantiles.BINS
    assert sum(kept_by(layer, {}).values()) <= histogram + 12 * 8 + 12 * by_head


@pytest.mark.parametrize("against", [False, True])
def test_layers_added_up_together_equal_layers_alone(against: bool) -> None:
    """Also those of other shapes, those that saw one batch fewer, and those that saw two between."""
    shapes = [(4, 3, 13, 13), (4, 3, 13, 13), (4, 2, 13, 13), (4, 3, 13, 13)]
    alone, together = ([LayerReadings(True, against) for _ in shapes] for _ in range(2))
    for batch in range(3):
        for number, (one, other, shape) in enumerate(zip(alone, together, shapes, strict=True)):
            for time in range(2 if number == 3 else batch > 0 or number != 1):
                seen = Observation(map=random_maps(*shape, seed=100 * batch + 10 * number + time))
                for layer in (one, other):
                    layer.observe(seen, GEOMETRIES["class token"])
            layer_module.add_up([one])
        layer_module.add_up(together)
    assert layer_rows(together) == layer_rows(alone)


@pytest.mark.parametrize("against", [False, True])
def test_norms_added_up_together_equal_norms_alone(against: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = 2 if against else 1
    together, alone = NormReadings(pairs), [NormReadings(pairs) for _ in range(3)]
    blocks: Any = [SimpleNamespace(depth=depth) for depth in range(3)]
    for batch, sides in enumerate([(4, 5), (4, 5), (6, 3)]):
        for block, one in zip(blocks, alone, strict=True):
            shape = (2 * (batch + 1), *sides) if block.depth < 2 else (2, 3, 3)
            norms = torch.rand(shape, generator=generator)
            norms[0, 1, block.depth] *= 40
            together(block, norms), one(block, norms)
            one.add_up()
        together.add_up()
    rows, places = together.finish()
    for depth, one in enumerate(alone):
        expected, expected_places = one.finish()
        assert rows[depth] == pytest.approx(expected[depth]) and places[depth] == expected_places[depth]
        assert set(rows[depth]) == {"high_norm", "norm_ratio"} and rows[depth]["high_norm"] > 0


def test_a_diagnosis_launches_little_per_layer() -> None:
    """Beside the model and the statistics: medians and sums are computed once per batch, for all layers."""
    made: dict[tuple[int, ...], Any] = {}

    def statistics(seen: Observation, *args: Any, **kwargs: Any) -> Any:
        if seen.shape not in made:
            made[seen.shape] = map_statistics(torch.full(seen.shape, 1 / seen.shape[3]))
        return made[seen.shape]

    def launches(depth: int, batches: int) -> int:
        model = timm.create_model("vit_tiny_patch16_224", depth=depth, img_size=64, num_classes=0).eval()
        images = torch.randn(2, 3, 64, 64)
        counts = []
        for call in (lambda: [model(images) for _ in range(batches)], lambda: vf.diagnose(model, [images] * batches)):
            with torch.no_grad(), Launches() as seen:
                call()
            counts.append(seen.count)
        return counts[1] - counts[0]

    with patch.object(layer_module, "statistics", statistics):
        launches(1, 1)  # what is computed once
        few, many = (launches(depth, 3) - launches(depth, 2) for depth in (2, 6))
    assert many - few <= 4  # the norms of the tokens, once per layer
    assert few <= 30


def test_adl_official_equals_the_released_code(shared: Path) -> None:
    golden = load_file(shared / "golden/attention/adl.safetensors")
    values = []
    for depth in (0, 1):
        layer = LayerReadings(token_attention=True, budget=500)
        layer.observe(Observation(query=golden[f"q{depth}"], key=golden[f"k{depth}"], scale=0.25), Geometry(37, 37))
        values.append(layer_rows([layer])[0]["diversity_official"])
    assert sum(values) / (2 + 1e-6) == pytest.approx(float(golden["official.tau2.loss"]), rel=1e-5)


def test_a_new_reading_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number, table column, comparison, finding, figure and report chart follow from the record."""
    peak = Reading(
        "peak",
        heading="peak",
        format=".3f",
        label="the largest weight of a row",
        rows=lambda attention: attention.amax(dim=-1),
        thresholds=(Threshold("peaked", 0.5, "the largest weight of a row is {} on average."),),
        chart=Chart("Peak", "largest weight of a row", "How much one token receives.", low=0.0, figure="peak"),
    )
    monkeypatch.setitem(readings_module.READINGS, "peak", peak)
    model, images = build("vit")
    for name in ("chunked", "reference"):
        with backend(name):
            found = vf.diagnose(model, images, against=images.flip(-1))
        maps = vf.attention_maps(model, images, layers=None)
        for row, layer in zip(found.rows, maps, strict=True):
            assert row["peak"] == pytest.approx(float(layer.amax(dim=-1).mean()), rel=1e-5)
    assert "peak" in found.table().columns and "peak" in found.plots()
    assert found.plot("peak").axes[0].get_ylabel() == "largest weight of a row"
    assert any("the largest weight of a row" in sentence for sentence in found.compare(found).findings)
    assert "peak" in found.compare(found).table().columns
    sharp = [row | {"peak": 0.9} for row in found.rows]
    assert any("the largest weight of a row is 0.90" in sentence for sentence in findings(sharp))
    assert found.to_dict()["thresholds"]["peaked"] == 0.5
    assert "largest weight of a row" in reading_chart("peak", {"model": found}, {"model": 0})


@pytest.mark.parametrize(
    "family", ["vit", "swin", "pvt_v2", "mixer", "xcit", "mvit", "maxvit", "cait", "fan", "twins", "volo"]
)
def test_high_norm_tokens(family: str) -> None:
    """Two patches of the first image are blown up behind a block: they are found there, and where they lie."""
    model, images = build(family)
    block = next(block for block in vf.anatomy(model) if block.attention_kind != "class")
    rows, columns = block.grid(tuple(images.shape[-2:]))
    places = [(0, 1), (rows - 1, columns - 1)]

    def blow_up(module: Any, args: Any, output: Any) -> Any:
        tokens = output[0] if isinstance(output, tuple) else output
        flat = tokens.flatten(2).mT if block.layout == "BCHW" else tokens.flatten(1, -2)
        for row, column in places:
            flat[0, row * columns + column - rows * columns] *= 50.0
        return (tokens, *output[1:]) if isinstance(output, tuple) else output

    handle = block.host.register_forward_hook(blow_up)
    found = vf.diagnose(model, images)
    handle.remove()
    assert all("high_norm" in row for row in found.rows if row["attention_kind"] != "class")
    row = next(row for row in found.rows if row["name"] == block.name)
    share = len(places) / (2 * rows * columns)
    assert row["high_norm"] == pytest.approx(share) and row["norm_ratio"] > 5
    where = torch.tensor(found.high_norm_places[block.depth])
    assert where.nonzero().tolist() == [list(place) for place in places] and where[0, 1] == 0.5
    assert "high norm" in found.table().columns and Diagnosis.from_dict(found.to_dict()) == found
    assert vf.diagnose(model, images).high_norm_places.get(block.depth) is None
