"""Scores against independent computations: the papers' formulas written anew, SciPy, and naive loops."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch

from vitfocus.core import statistics
from vitfocus.core.errors import VitfocusError
from vitfocus.core.statistics import repeat_interval
from vitfocus.corruptions import CORRUPTIONS
from vitfocus.robustness import metrics
from vitfocus.robustness.metrics import (
    ALEXNET_CLEAN_ERROR,
    ALEXNET_ERRORS,
    ALEXNET_FLIPS,
    corruption_summary,
    flip_share,
    perturbation_summary,
    top5_distance,
)
from vitfocus.robustness.suites.segmentation import NOISES, add_noise


def test_alexnet_itself_scores_exactly_100() -> None:
    for name, errors in ALEXNET_ERRORS.items():
        assert metrics.corruption_error(name, errors) == 100
        assert metrics.corruption_error(name, errors, ALEXNET_CLEAN_ERROR) == 100
    assert len(CORRUPTIONS) == 15 and len(ALEXNET_ERRORS) == 19 and len(ALEXNET_FLIPS) == 10


def test_alexnet_means_are_the_published_ones() -> None:
    means = {name: np.mean(errors) for name, errors in ALEXNET_ERRORS.items()}
    assert means["gaussian_noise"] == pytest.approx(0.886428)
    assert means["jpeg_compression"] == pytest.approx(0.606500)
    assert np.mean([means[name] for name in CORRUPTIONS]) == pytest.approx(0.788993, abs=1e-6)
    assert np.mean(list(means.values())) == pytest.approx(0.781219, abs=1e-6)


def test_ce_divides_the_sums_over_severities() -> None:
    for name in CORRUPTIONS:
        errors = np.random.default_rng(3).uniform(0.2, 0.9, 5)
        by_mean = (errors / np.mean(ALEXNET_ERRORS[name])).mean()
        by_severity = (errors / ALEXNET_ERRORS[name]).mean()
        ours = metrics.corruption_error(name, errors)
        assert ours == pytest.approx(100 * errors.sum() / sum(ALEXNET_ERRORS[name])) == pytest.approx(100 * by_mean)
        assert abs(ours - 100 * by_severity) > 0.01


def test_mce_of_samples_is_the_mean_of_the_images_shares() -> None:
    generator = np.random.default_rng(0)
    names = ["clean", *(f"{name}/{severity}" for name in CORRUPTIONS for severity in range(1, 6))]
    outcomes = {
        name: {
            "top1": generator.random(40) < 0.5,
            "top5": generator.random(40) < 0.7,
            "confidence": generator.random(40),
        }
        for name in names
    }
    summary = corruption_summary(outcomes, seed=0)
    rows = [summary["corruptions"][name] for name in CORRUPTIONS]
    assert summary["mce"] == pytest.approx(np.mean([row["ce"] for row in rows]))
    assert summary["relative_mce"] == pytest.approx(np.mean([row["relative_ce"] for row in rows]))
    assert summary["mean_error"] == pytest.approx(np.mean([row["error"] for row in rows]))

    # 45 clean images for the 40 of each corruption
    outcomes["clean"] = {name: np.tile(column[:9], 5) for name, column in outcomes["clean"].items()}
    other = corruption_summary(outcomes, 0)
    clean, names = 1 - outcomes["clean"]["top1"].mean(), list(CORRUPTIONS)
    errors = {name: [1 - outcomes[f"{name}/{s}"]["top1"].mean() for s in range(1, 6)] for name in names}
    parts = [(sum(errors[n]) - 5 * clean) / (sum(ALEXNET_ERRORS[n]) - 5 * ALEXNET_CLEAN_ERROR) for n in names]
    low, high = other["relative_mce_interval"]
    assert low < other["relative_mce"] < high and other["relative_mce"] == pytest.approx(100 * np.mean(parts))
    low, high = summary["mce_interval"]
    assert low < summary["mce"] < high
    del outcomes["fog/4"]
    partial = corruption_summary(outcomes, seed=0)
    assert "mce" not in partial and "ce" not in partial["corruptions"]["fog"] and "ce" in partial["corruptions"]["snow"]


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_equals_a_loop(bins: int) -> None:
    generator = np.random.default_rng(bins)
    confidence = generator.random(200)
    hit = generator.random(len(confidence)) < confidence
    total = 0.0
    for low in np.arange(bins) / bins:
        inside = (confidence > low) & (confidence <= low + 1 / bins)
        if inside.any():
            total += abs(confidence[inside].mean() - hit[inside].mean()) * inside.mean()
    assert metrics.calibration_error(confidence, hit, bins) == pytest.approx(total)
    assert metrics.calibration_error(np.array([0.0, 1.0]), np.array([False, True]), bins) == pytest.approx(0)


@pytest.mark.parametrize(("one", "two"), [(0, 0), (1, 0), (7, 2), (40, 40), (2100, 2000), (9000, 8000)])
def test_mcnemar_equals_scipys_binomial_test(one: int, two: int) -> None:
    first = np.array([1] * one + [0] * two + [1] * 10 + [0] * 5)
    second = np.array([0] * one + [1] * two + [1] * 10 + [0] * 5)
    result = statistics.mcnemar(first, second)
    expected = scipy.stats.binomtest(one, one + two).pvalue if one + two else 1.0
    assert (result.only_first, result.only_second) == (one, two)
    assert result.p_value == pytest.approx(expected, rel=1e-6, abs=1e-14)


def test_bootstrap_interval_agrees_with_scipy_and_is_seeded() -> None:
    values = np.random.default_rng(1).gamma(2.0, size=300)
    ours = statistics.mean_interval(values, seed=5)
    theirs = scipy.stats.bootstrap((values,), np.mean, method="percentile", n_resamples=2000, rng=0).confidence_interval
    assert np.allclose(ours, theirs, atol=0.25 * (theirs.high - theirs.low))
    assert ours == statistics.mean_interval(values, seed=5) != statistics.mean_interval(values, seed=6)
    shares = (np.arange(1000) < 700).astype(float)
    low, high = statistics.mean_interval(shares)
    spread = 1.96 * (0.7 * 0.3 / 1000) ** 0.5
    assert low == pytest.approx(0.7 - spread, abs=0.006) and high == pytest.approx(0.7 + spread, abs=0.006)


def test_paired_difference_is_sharper_than_two_intervals() -> None:
    first = np.random.default_rng(0).random(500) < 0.5
    second = first | (np.arange(500) < 20)
    difference = statistics.paired_difference(first, second)
    assert difference.low > 0 and difference.mean == pytest.approx(second.mean() - first.mean())
    with pytest.raises(VitfocusError, match="got 500 and 3"):
        statistics.paired_difference(first, [1, 2, 3])


def naive_stability(logits: np.ndarray, noise: bool, step: int) -> tuple[float, float]:
    """The released evaluation of ImageNet-P, written from its description: whole rankings, one video."""
    ranks = [scipy.stats.rankdata(-frame, method="ordinal").astype(int) for frame in logits]
    steps = np.minimum(np.arange(logits.shape[1]), 5)  # 0 1 2 3 4 5 5 5 ...
    flips, distances = [], []
    for phase in range(step):
        before = phase
        for after in range(phase + step, len(logits), step):
            flips.append(logits[before].argmax() != logits[after].argmax())
            moved = ranks[after][np.argsort(ranks[before])]
            distances.append(np.abs(steps[:5] - steps[moved - 1][:5]).sum())
            before = before if noise else after
    return float(np.mean(flips)), float(np.mean(distances))


@pytest.mark.parametrize(("noise", "stride"), [(True, 1), (False, 1), (False, 2), (False, 3)])
def test_flips_and_top5_distances_equal_the_released_rule(noise: bool, stride: int) -> None:
    logits = np.random.default_rng(stride).normal(size=(4, 31, 12)).cumsum(axis=1)
    ranking = torch.from_numpy(logits).topk(5, dim=2).indices
    expected = np.array([naive_stability(video, noise, stride) for video in logits])
    assert np.allclose(flip_share(ranking, noise, stride), expected[:, 0])
    assert np.allclose(top5_distance(ranking, noise, stride), expected[:, 1])


def test_mfr_of_samples_and_mt5d_only_with_a_reference() -> None:
    distances = {"top5_distance": np.full(5, 2.0)}
    outcomes = {name: {"flip": np.full(5, flip), **distances} for name, flip in ALEXNET_FLIPS.items()}
    summary = perturbation_summary(outcomes, seed=0)
    assert summary["mfr"] == pytest.approx(100, abs=1e-9) and "mt5d" not in summary
    assert perturbation_summary(outcomes, seed=0, t5d=dict.fromkeys(ALEXNET_FLIPS, 4.0))["mt5d"] == pytest.approx(50)
    assert "mfr" not in perturbation_summary(outcomes, seed=0, difficulty=2)


def test_segmentation_noise_has_the_stated_moments_and_belongs_to_the_image() -> None:
    images = torch.full((2, 3, 200, 200), 120, dtype=torch.uint8)
    for name, spread in (("shot", 120**0.5), ("gaussian/5", 5), ("gaussian/10", 10)):
        noisy = add_noise(images, name, ids=[7, 8])
        assert noisy.float().mean() == pytest.approx(120, abs=0.2)
        assert noisy.float().std() == pytest.approx(spread, rel=0.02)
        assert torch.equal(noisy[1:], add_noise(images[1:], name, ids=[8]))
    grain = torch.randint(256, (1, 3, 20, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for sigma in (1, 2):
        blurred = scipy.ndimage.gaussian_filter(grain.double().numpy(), (0, 0, sigma, sigma), mode="nearest")
        assert np.abs(add_noise(grain, f"blur/{sigma}").numpy() - blurred).max() < 0.51
    values = [1.0, 4.0, 2.0, 8.0, 5.0]
    half = scipy.stats.t.interval(0.95, 4, loc=np.mean(values), scale=scipy.stats.sem(values))[1] - np.mean(values)
    assert repeat_interval(values) == (4.0, pytest.approx(half, rel=1e-3)) and len(NOISES) == 5
