"""The CIFAR-100 study's page and README, from drawn results: numbers, verdicts, gaps, escaped strings."""

from __future__ import annotations

import doctest
import json
import math
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions import CORRUPTIONS

STUDY = Path(__file__).parents[2] / "studies" / "cifar100"
sys.path.insert(0, str(STUDY))

import report  # noqa: E402
from reporting import claims, gathered, intervals, outcomes, readme, words  # noqa: E402
from reporting.sections import circumstances  # noqa: E402

DEPTH = 4
#: What each arm adds to plain: accuracy, corruption error, upper entropy, diagonal, stability, head similarity.
EFFECTS = {
    "cb-upper": (0.9, -0.5, -0.3, 0.0, 0.0, 0.0),
    "tap": (0.3, -1.0, 0.0, 0.01, 0.02, -0.02),
    "adl": (-0.1, -1.5, -0.1, 0.2, 0.1, -0.2),
    "tap-adl": (0.2, -2.2, -0.1, 0.15, 0.12, -0.25),
}


def drawn_run(group: str, arm: str, seed: int, rng: np.random.Generator) -> dict[str, Any]:
    """A run as the study writes it, with noise about the arm's effect."""
    gain, error, entropy, diagonal, stability, heads = EFFECTS.get(arm, (0.0,) * 6)
    base = {"vit-ti": 66.0, "vit-s": 72.0}.get(group, 60.0) + 0.2 * seed
    errors = {name: 45 + error + i % 5 + rng.normal(0, 0.2) for i, name in enumerate(CORRUPTIONS)}

    def layers(start: float, slope: float, upper: float = 0.0) -> list[float]:
        return [start + slope * i + upper * (i >= DEPTH // 2) + rng.normal(0, 0.01) for i in range(DEPTH)]

    run: dict[str, Any] = {
        "group": group,
        "arm": arm,
        "spec": f"deit_tiny_patch16_224+{arm}",
        "seed": seed,
        "epochs": 40,
        "parameters": 5_400_000,
        "recipe": {
            "model": {"spec": arm, "arguments": {"patch_size": 4}},
            "data": {"source": "arrays", "size": 32, "root": "cifar100"},
            "optimiser": {"lr": 0.001},
            "engine": {"seed": seed},
        },
        "train": {"seconds": 120.0, "images_per_second": 20_000.0, "final_loss": 2.1},
        "clean": {"accuracy": base + gain + rng.normal(0, 0.15), "top5": base + 20 + gain},
        "corruption": {"mean_error": float(np.mean(list(errors.values()))), "by_corruption": errors},
        "fgsm": {f"{eps}/255": 30.0 / eps + gain + rng.normal(0, 0.3) for eps in (1, 2)},
        "occlusion": {name: 50 + gain + rng.normal(0, 0.3) for name in ("centre/112", "drop/98")},
        "reading": {
            "entropy": layers(2.0, 0.3, entropy),
            "distance": layers(0.4, 0.02),
            "overfocus": layers(0.1, 0.03),
            "head_similarity": layers(0.5 + heads, 0.02),
            "diagonal": layers(0.05 + diagonal, 0.0),
        },
        "stability": {
            name: {"mean": 0.7 + stability + rng.normal(0, 0.01), "by_layer": layers(0.9 + stability, -0.1)}
            for name in ("gaussian_noise", "fog")
        },
        "protocol": {"test_images": 10_000, "reading_images": 1_000},
        "device": "NVIDIA <b>H200",
        "versions": {"torch": "2.11.0", "vitfocus": "0.1.0"},
        "finished": f"2026-11-15T17:0{seed}:00+00:00",
    }
    if group == "fine-tune":
        del run["reading"], run["stability"], run["fgsm"], run["occlusion"]
        run["insertion"] = {
            "largest_logit_change": 0.001 if "tap" in arm else 0.0,
            "decisions_changed": 0,
            "images": 256,
        }
    return run


def put(folder: Path, place: str, content: Any) -> None:
    path = folder / f"{place}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def draw_results(folder: Path, keep: Callable[[str, str, int], bool] = lambda *_: True, once: bool = True) -> Path:
    """A whole study's results; `keep` says which runs are finished, `once` whether what is measured once is there."""
    for group, arms in report.PLAN.items():
        for arm in arms:
            for seed in (0, 1, 2):
                if keep(group, arm, seed):
                    rng = np.random.default_rng([len(group), *arm.encode(), seed])
                    put(folder, f"{group}/{arm}/seed{seed}", drawn_run(group, arm, seed, rng))
    if once:
        for i, name in enumerate(("shipped", "fast")):
            overrides = {"lr": "1e-3", "batch": "512"}
            record = {
                "candidate": name,
                "overrides": overrides,
                "validation_accuracy": 60.0 + i,
                "epochs": 40,
                "seed": 0,
            }
            put(folder, f"selection/{name}", record)
        cost = {arm: {"ms": 10.0 + i, "ratio": 1 + 0.1 * i} for i, arm in enumerate(report.PLAN["vit-ti"])}
        put(folder, "cost", {"vit-ti": cost, "device": "NVIDIA H200"})
        put(folder, "diagnosis", drawn_diagnosis())
    put(folder, "checkpoint/config", {"architecture": "not a result"})
    return folder


def drawn_diagnosis() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    depth = 12
    entropy = [3.5 + 0.1 * i for i in range(depth)]
    reading = {"entropy": entropy, "entropy_bound": [math.log(197)] * depth, "entropy_cls": [e - 0.3 for e in entropy]}
    reading |= {"entropy_p15": [e - 0.5 for e in entropy], "entropy_p85": [e + 0.5 for e in entropy]}
    reading |= {"overfocus": [0.1 + 0.02 * i for i in range(depth)], "head_similarity": [0.5] * depth}
    reading |= {"distance": [0.4] * depth, "gradient": [0.9] * depth, "diagonal": [0.03] * depth}
    stability = {name: {"mean": rng.uniform(0.5, 0.9), "by_layer": [0.8] * depth} for name in CORRUPTIONS}
    return {
        "model": "deit_tiny_patch16_224",
        "images": 1000,
        "reading": reading,
        "findings": ["Layer 3 looks <everywhere>."],
        "stability": stability,
        "stability_severity": 3,
        "families": {
            name: {"mean": 0.7 + 0.05 * i, "by_layer": [0.95 - 0.03 * j - 0.02 * i for j in range(depth)]}
            for i, name in enumerate(("noise", "blur", "weather", "digital"))
        },
        "corruption": {
            "mce": 70.12,
            "mce_interval": [68.5, 71.75],
            "mean_error": 55.0,
            "by_corruption": dict.fromkeys(CORRUPTIONS, 55.0),
            "ce": dict.fromkeys(CORRUPTIONS, 70.0),
            "notes": ["Frost is drawn."],
        },
        "clean": {"accuracy": 72.3, "top1_interval": [69.4, 75.1], "top5": 91.0},
        "occlusion": {"centre/112": {"accuracy": 60.0, "interval": [57.0, 63.0]}},
        "fgsm": {"1/255": {"accuracy": 22.0, "interval": [19.5, 24.7]}},
    }


class Tables(HTMLParser):
    """The cells of every table of a page, by the name under which it is read aloud."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.rows: list[list[str]] | None = None
        self.inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if named.get("role") == "region":
            self.rows = self.tables.setdefault(str(named["aria-label"]), [])
        elif tag == "tr" and self.rows is not None:
            self.rows.append([])
        elif tag in ("td", "th") and self.rows is not None:
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.inside = False
        if tag == "table":
            self.rows = None

    def handle_data(self, data: str) -> None:
        if self.inside and self.rows is not None:
            self.rows[-1][-1] += data.replace("\u00a0", " ")


def tables(path: Path) -> dict[str, list[list[str]]]:
    return Tables(path.read_text(encoding="utf-8")).tables


def column(rows: list[list[str]], heading: str, arm: str) -> str:
    place = rows[0].index(heading)
    return next(row[place] for row in rows[1:] if row[0] == arm)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_results(tmp_path_factory.mktemp("study") / "results")


@pytest.fixture(scope="module")
def page(results: Path) -> Path:
    return report.write(results)


def test_t_distribution_and_holm_agree_with_scipy() -> None:
    for freedom in (1, 2, 3, 4, 7, 30):
        assert intervals.quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
        for t in (0.1, 1.0, 5.0):
            assert intervals.within(t, freedom) == pytest.approx(1 - 2 * stats.t.sf(t, freedom), abs=1e-12)
    values = [0.3, -0.1, 0.9, 0.4]
    test = stats.ttest_1samp(values, 0.0)
    found = intervals.estimate(values)
    assert found.interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert found.p_value == pytest.approx(test.pvalue)
    assert intervals.holm([0.001, 0.02, 0.04, 0.2]) == [True, False, False, False]  # 0.02 > 0.05 / 3


def test_pooled_model_agrees_with_least_squares_and_power_with_the_noncentral_t() -> None:
    rng = np.random.default_rng(3)
    table = rng.normal(80, 1, (5, 3)) + rng.normal(0, 1, 3)
    rows = [(arm, seed) for arm in range(5) for seed in range(3)]
    design = np.array(
        [[1.0, *(arm == i for i in range(1, 5)), *(seed == i for i in range(1, 3))] for arm, seed in rows]
    )
    solution, residual, *_ = np.linalg.lstsq(design, table.ravel(), rcond=None)
    covariance = residual[0] / 8 * np.linalg.inv(design.T @ design)
    found = intervals.pooled({str(arm): list(table[arm]) for arm in range(5)}, "0")
    assert list(found) == ["1", "2", "3", "4"]
    for arm in range(1, 5):
        half = stats.t.ppf(0.975, 8) * covariance[arm, arm] ** 0.5
        assert found[str(arm)].mean == pytest.approx(solution[arm])
        assert found[str(arm)].interval == pytest.approx((solution[arm] - half, solution[arm] + half))
    for effect, spread, count in ((0.7, 0.68, 3), (0.7, 0.2, 3), (-1.2, 0.7, 5), (0.0, 1.0, 2)):
        shift, bound = effect / spread * count**0.5, stats.t.ppf(0.975, count - 1)
        expected = stats.nct.sf(bound, count - 1, shift) + stats.nct.cdf(-bound, count - 1, shift)
        assert intervals.power(effect, spread, count) == pytest.approx(expected, abs=1e-5)


def test_doctests_of_the_reporting() -> None:
    for module in (intervals, outcomes, claims, words, readme):
        found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
        assert found.attempted and not found.failed, module.__name__


def test_tables_show_what_scipy_computes_from_the_files(results: Path, page: Path) -> None:
    def numbers(arm: str, *path: str) -> np.ndarray:
        found = []
        for file in sorted((results / "vit-ti" / arm).glob("*.json")):
            value: Any = json.loads(file.read_text())
            for key in path:
                value = value[key]
            found.append(np.mean(value))
        return np.array(found)

    def shown(values: np.ndarray, digits: int, sign: str = "") -> str:
        ends = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        texts = [f"{value:{sign}.{digits}f}".replace("-", "−") for value in (values.mean(), *ends)]
        return f"{texts[0]} [{texts[1]}, {texts[2]}]"

    every = tables(page)
    means, apart = every["ViT-Ti accuracy and robustness"], every["ViT-Ti: differences to plain, in points"]
    readings, by_corruption = every["ViT-Ti readings"], every["ViT-Ti: error by corruption"]
    for arm, label in (("plain", "plain"), ("cb-upper", "CB, upper half"), ("tap-adl", "TAP + ADL")):
        assert column(means, "accuracy (%)", label) == shown(numbers(arm, "clean", "accuracy"), 2)
        assert column(means, "corruption error (%)", label) == shown(numbers(arm, "corruption", "mean_error"), 2)
        assert column(means, "FGSM 2/255 (%)", label) == shown(numbers(arm, "fgsm", "2/255"), 2)
        hidden = [numbers(arm, "occlusion", name) for name in ("drop/98", "centre/112")]
        assert column(means, "occlusion: drop/98 (%)", label) == shown(hidden[0], 2)
        assert column(means, "occlusion, mean (%)", label) == shown(sum(hidden) / 2, 2)
        assert column(by_corruption, "fog (%)", label) == shown(numbers(arm, "corruption", "by_corruption", "fog"), 2)
        assert column(readings, "entropy (nats)", label) == shown(numbers(arm, "reading", "entropy"), 3)
        noise = numbers(arm, "stability", "gaussian_noise", "mean")
        assert column(readings, "stability under noise (cosine)", label) == shown(noise, 3)
    gap = numbers("tap-adl", "clean", "accuracy") - numbers("plain", "clean", "accuracy")
    assert column(apart, "accuracy (%)", "TAP + ADL") == shown(gap, 2, "+")
    assert "plain" not in [row[0] for row in apart]


def test_claims_table_has_the_paired_difference_and_the_verdict(results: Path, page: Path) -> None:
    rows = tables(page)["claims"]
    assert len(rows) - 1 == len(claims.claims())

    def of(*arms: str, group: str = "vit-ti") -> list[np.ndarray]:
        return [
            np.array(
                [
                    json.loads((results / group / arm / f"seed{s}.json").read_text())["clean"]["accuracy"]
                    for s in range(3)
                ]
            )
            for arm in arms
        ]

    first = dict(zip(rows[0], rows[1], strict=True))
    assert (first["claim"], first["comparison"]) == ("CB raises accuracy", "ViT-Ti: CB, upper half − plain (3 seeds)")
    treated, plain = of("cb-upper", "plain")
    low, high = stats.ttest_rel(treated, plain).confidence_interval(0.95)
    assert first["difference"] == f"{(treated - plain).mean():+.2f} [{low:+.2f}, {high:+.2f}]".replace("-", "−")
    assert first["numbers"] == f"accuracy (%) ↑ {treated.mean():.2f} − {plain.mean():.2f}"
    assert low > 0 and first["verdict"].startswith("✓ supported")
    heads = next(dict(zip(rows[0], row, strict=True)) for row in rows if "with 1 head − with 12 heads" in row[2])
    few, few_plain, many, many_plain = of("cb-upper-1", "plain-1", "cb-upper-12", "plain-12", group="heads")
    gains = (few - few_plain) - (many - many_plain)
    assert heads["difference"].startswith(f"{gains.mean():+.2f}".replace("-", "−"))
    adl = next(dict(zip(rows[0], row, strict=True)) for row in rows if row[0] == "ADL lowers the similarity of heads")
    assert adl["verdict"].startswith("✓ supported") and re.match(r"−0\.(19|20|21)", adl["difference"])


@pytest.mark.parametrize(
    ("values", "sign", "expected"),
    [
        ((1.0, 1.0, 1.0), 1, "supported"),
        ((1.0, 1.0, 1.0), -1, "not supported"),
        ((-2.0, -2.1, -1.9), -1, "supported"),
        ((-2.0, -2.1, -1.9), 1, "not supported"),
        ((0.0, 0.0, 0.0), 1, "undecided"),  # an interval that ends at zero decides nothing
        ((5.0,), 1, "undecided"),  # nor does a single seed, whatever it says
        ((1.0, -0.5, 0.8), 1, "undecided"),
    ],
)
def test_verdicts_at_the_edges(values: tuple[float, ...], sign: int, expected: str) -> None:
    assert claims.verdict(intervals.estimate(values), sign) == expected
    assert claims.verdict(None, sign) == "undecided"
    touching = intervals.Estimate((1.0, 2.0), 1.5, (0.0, 3.0))
    assert claims.verdict(touching, 1) == claims.verdict(touching, -1) == "undecided"


def test_every_claim_names_planned_arms_and_a_measured_number() -> None:
    for claim in claims.claims():
        assert all(arm in report.PLAN[group] for _, group, arm in claim.terms)
        assert claim.outcome.take(drawn_run("vit-ti", "adl", 0, np.random.default_rng(0))) is not None


def test_incomplete_study_says_how_far_it_went(tmp_path: Path) -> None:
    def keep(group: str, arm: str, seed: int) -> bool:
        return group == "vit-ti" and (seed == 0 or (seed == 1 and arm in ("plain", "cb-upper", "adl")))

    path = report.write(draw_results(tmp_path / "results", keep, once=False))
    text, every = path.read_text(encoding="utf-8"), tables(path)
    planned = sum(3 * len(arms) for arms in report.PLAN.values())
    assert f"16 of {planned} planned runs are finished (ViT-Ti 16 of 39; ViT-S 0 of 15;" in text
    assert ["ViT-Ti", "16", "39", "1 to 2", "40"] in every["how far it went"]
    rows = every["ViT-Ti accuracy and robustness"]
    assert re.fullmatch(r"\d+\.\d\d", column(rows, "accuracy (%)", "TAP")), "one seed has no interval"
    assert re.fullmatch(r"\d+\.\d\d \[.*\]", column(rows, "accuracy (%)", "ADL official"))
    judged = {row[2]: row for row in every["claims"][1:]}
    assert judged["ViT-Ti: TAP − plain (1 seed)"][1] == "○ undecided"
    absent = judged["ViT-S: CB, upper half − plain (not run)"]
    assert absent[1] == "○ undecided" and absent[4] == ""
    assert "Not finished: ViT-S (no run)." in text
    assert "Not finished: ViT-Ti, seed 2 of plain; CB, upper half; ADL official." in text
    assert "Fine-tuning a trained model" not in text and "Cost of a training step" not in text


@pytest.mark.parametrize("part", ["selection", "cost", "diagnosis", "fine-tune", "heads", "vit-s", "vit-ti"])
def test_each_part_may_be_all_there_is(part: str, results: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    for path in results.rglob("*.json"):
        if path.relative_to(results).parts[0].removesuffix(".json") == part:
            put(folder, str(path.relative_to(results).with_suffix("")), json.loads(path.read_text()))
    html = report.write(folder).read_text(encoding="utf-8")
    shown = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert "In short" in shown and "nan" not in shown.lower()


def test_runs_with_missing_or_odd_numbers_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bare = {key: drawn_run("vit-ti", "plain", 0, rng)[key] for key in ("group", "arm", "seed")}
    put(tmp_path, "vit-ti/plain/seed0", bare)
    diverged = drawn_run("vit-ti", "tap", 0, rng)
    diverged["clean"]["accuracy"] = math.nan
    diverged["reading"]["entropy"][1] = None
    put(tmp_path, "vit-ti/tap/seed0", diverged)
    put(tmp_path, "vit-ti/unheard-of/seed5", drawn_run("vit-ti", "unheard-of", 5, rng))
    rows = tables(report.write(tmp_path))["ViT-Ti accuracy and robustness"]
    assert column(rows, "accuracy (%)", "plain") == column(rows, "accuracy (%)", "TAP") == ""
    assert column(rows, "accuracy (%)", "unheard-of")


def test_strings_from_files_are_escaped_and_figures_are_whole(page: Path, tmp_path: Path) -> None:
    html = page.read_text(encoding="utf-8")
    assert "<b>H200" not in html and "&lt;b&gt;H200" in html and "&lt;everywhere&gt;" in html
    assert not re.search(r'(src|href)="(?!#)', html), "the page loads nothing"
    figures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(figures) > 20
    for figure in figures:
        ElementTree.fromstring(figure)
    evil = drawn_run("vit-ti", "<script>alert(1)</script>", 0, np.random.default_rng(0))
    evil["recipe"]["model"]["spec"] = '"><img src=x>'
    put(tmp_path, "results/vit-ti/evil/seed0", evil)
    (tmp_path / "README.md").write_text(f"{readme.BEGIN}\n{readme.END}\n", encoding="utf-8")
    html = report.write(tmp_path / "results").read_text(encoding="utf-8")
    assert "<script>alert" not in html and "<img src=x>" not in html
    assert "<script>" not in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_pictures_stand_alone_and_the_readme_shows_them(results: Path, page: Path) -> None:
    for name in ("differences.svg", "diagnosis.svg"):
        svg = (results / name).read_text(encoding="utf-8")
        root = ElementTree.fromstring(svg)
        assert float(root.attrib["width"]) > 900 and len(list(root.iter("{http://www.w3.org/2000/svg}g"))) > 2
        assert (
            "--c0:" in svg and "prefers-color-scheme:dark" in svg and "http" not in svg.replace("http://www.w3.org", "")
        )
    (results.parent / "README.md").write_text(f"{readme.BEGIN}\n{readme.END}\n", encoding="utf-8")
    report.write(results)
    text = (results.parent / "README.md").read_text(encoding="utf-8")
    (results.parent / "README.md").unlink()
    for picture in re.findall(r"!\[.+?\]\((.+?)\)", text):
        assert (results.parent / picture).is_file()
    assert text.count("![") == 2


def test_diagnosis_quotes_the_paper_beside_our_numbers(page: Path) -> None:
    html, every = page.read_text(encoding="utf-8"), tables(page)
    assert "no study of CIFAR-100" not in html
    assert ["mCE, ImageNet-C (generated)", "% of AlexNet's", "70.12 [68.50, 71.75]"] in every["DeiT-Ti scores"]
    assert "average entropy of as much as 4.4 nats" in html and "Mean over the layers: 4.05 nats" in html
    assert ["accuracy, FGSM 1/255", "%", "22.00 [19.50, 24.70]"] in every["DeiT-Ti scores"]


def test_readme_keeps_what_people_wrote(results: Path, tmp_path: Path) -> None:
    study, plan = gathered.gather(results, report.PLAN), report.PLAN
    path = tmp_path / "README.md"
    assert not readme.update_readme(path, study, plan, 3)
    path.write_text("Only words.\n", encoding="utf-8")
    assert not readme.update_readme(path, study, plan, 3) and path.read_text(encoding="utf-8") == "Only words.\n"
    path.write_text(f"# Mine\n\n{readme.BEGIN}\nobsolete\n{readme.END}\n\nAlso mine.\n", encoding="utf-8")
    assert readme.update_readme(path, study, plan, 3)
    once = path.read_text(encoding="utf-8")
    assert readme.update_readme(path, study, plan, 3) and path.read_text(encoding="utf-8") == once
    assert once.startswith("# Mine\n\n") and once.endswith("\n\nAlso mine.\n") and "obsolete" not in once
    lines = [line for line in once.splitlines() if line.startswith("|")]
    widths = {line.replace("\\|", "").count("|") for line in lines if line.startswith("| CB raises accuracy")}
    assert widths == {7} and "| plain | 3 | 66." in once


def test_the_committed_readme_has_a_place_for_the_tables() -> None:
    text = (STUDY / "README.md").read_text(encoding="utf-8")
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1


def test_the_committed_readme_shows_the_committed_results() -> None:
    text = (STUDY / "README.md").read_text(encoding="utf-8")
    written = text.partition(readme.BEGIN)[2].partition(readme.END)[0]
    study = gathered.gather(STUDY / "results", report.PLAN)
    pictures = [(name, title) for title, name in re.findall(r"!\[(.+?)\]\(results/(.+?)\)", written)]
    assert written.strip() == readme.generated(study, report.PLAN, 3, pictures)


def test_toy_runs_are_not_taken_for_the_study(tmp_path: Path) -> None:
    run = drawn_run("vit-ti", "plain", 0, np.random.default_rng(0))
    run["recipe"]["data"]["source"], run["protocol"]["test_images"] = "shapes", 64
    put(tmp_path, "vit-ti/plain/seed0", run)
    html = report.write(tmp_path).read_text(encoding="utf-8")
    assert "no study of CIFAR-100: their data are shapes" in html and "measured on 64 test images only" in html


def test_unlike_recipes_are_pointed_out(tmp_path: Path) -> None:
    folder = draw_results(tmp_path, lambda group, arm, seed: group == "vit-ti" and seed == 0, once=False)
    study = gathered.gather(folder, report.PLAN)
    assert circumstances.differing_keys(study.all_runs("vit-ti")) == []
    other = json.loads((folder / "vit-ti/tap/seed0.json").read_text())
    other["recipe"]["optimiser"]["lr"], other["epochs"] = 0.002, 20
    put(folder, "vit-ti/tap/seed0", other)
    html = report.write(folder).read_text(encoding="utf-8")
    assert "differ in more than arm and seed: optimiser.lr, epochs" in html


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "There are no results in"),
        ({"vit-ti/plain/seed0": "half a fi"}, "is not JSON"),
        ({"vit-ti/plain/seed0": "{}"}, "names no group, arm and seed"),
        ({"vit-ti/plain/seed0": '{"group": "vit-ti", "arm": "plain", "seed": 0}',
          "vit-ti/plain/seed1": '{"group": "vit-ti", "arm": "plain", "seed": 0}'}, "repeats seed 0"),
    ],
)  # fmt: skip
def test_unreadable_results_give_one_sentence(files: dict[str, str], said: str, tmp_path: Path) -> None:
    for place, content in files.items():
        path = tmp_path / f"{place}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    with pytest.raises(VitfocusError, match=said) as caught:
        report.write(tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "report.html").exists()
