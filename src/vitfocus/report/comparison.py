"""Comparison of models: every metric of every evaluation, with confidence intervals and differences.

Only models that were evaluated with the same protocol on the same images are compared. Comparisons are paired if the
results of single images were saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vitfocus.core.metrics import METRICS, Metric
from vitfocus.core.statistics import Array, paired_difference, wilson_interval
from vitfocus.core.tables import counted
from vitfocus.corruptions import CORRUPTIONS
from vitfocus.report.runs import ReportModel
from vitfocus.robustness.metrics import ALEXNET_FLIPS, mce_shares
from vitfocus.robustness.results import Scores
from vitfocus.robustness.run_folder import MAY_DIFFER, Columns, differences
from vitfocus.tasks import items_of

Interval = tuple[float, float]

#: The metrics shown for single conditions of a suite.
CONDITION_METRICS = ("top1", "miou", "accuracy", "flip_probability")
#: The metrics of a summary, in order of preference: one under corruption, one on clean data.
CORRUPTED_METRICS = ("mce", "mean_error", "miou_corrupted", "mfr")
CLEAN_METRICS = ("top1", "miou", "box_ap", "accuracy")
#: Keys of metrics.jsonl that are not metrics.
_NOT_METRICS = frozenset({"kind", "step", "epoch", "loss"})


@dataclass(frozen=True)
class Estimate:
    """A measured number and its 95 % confidence interval, if known."""

    number: float
    interval: Interval | None = None

    def text(self, form: str = "z.2f") -> str:
        """The number and its interval in brackets.

        >>> Estimate(81.25, (80.0, 82.5)).text("z.1f"), Estimate(-0.0).text("+z.1f")
        ('81.2 [80.0, 82.5]', '+0.0')
        """
        ends = f" [{self.interval[0]:{form}}, {self.interval[1]:{form}}]" if self.interval is not None else ""
        return f"{self.number:{form}}{ends}"

    def sentence(self, unit: str, sign: str = "") -> str:
        """The number with its unit and interval, for a sentence; the sign "+" is for differences.

        >>> Estimate(81.25, (80.0, 82.5)).sentence("%")
        '81.2 %, 95 % interval 80.0 to 82.5'
        """
        form = f"{sign}z.1f"
        ends = f", 95 % interval {self.interval[0]:{form}} to {self.interval[1]:{form}}" if self.interval else ""
        return f"{self.number:{form}} {unit}{ends}"


@dataclass(frozen=True)
class Difference(Estimate):
    """A model's number minus the first model's; `paired` if both were measured on the same images, image by image."""

    paired: bool = False

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True)
class MetricRow:
    """One metric of one evaluation, by model; `differences` are to the first model that has it.

    `key` is the metric's key in `METRICS`. `not_judged` says why the difference of a model is not judged.
    """

    test: str
    measure: str
    unit: str
    higher_is_better: bool
    values: dict[str, Estimate]
    differences: dict[str, Difference] = field(default_factory=dict)
    headline: bool = True
    not_judged: Mapping[str, str] = field(default_factory=dict)
    key: str = ""

    @property
    def first(self) -> str:
        """The model that the others are compared with."""
        return next(iter(self.values))

    def judgement(self, name: str) -> str:
        """`better` or `worse` than the first model if the difference is significant and may be judged, else empty."""
        difference = self.differences.get(name)
        if difference is None or not difference.significant or name in self.not_judged:
            return ""
        return "better" if (difference.number > 0) == self.higher_is_better else "worse"

    def sentences(self) -> Iterator[str]:
        """One sentence per difference."""
        for name, difference in self.differences.items():
            where = f"in {self.measure} ({self.test})"
            if judgement := self.judgement(name):
                said = f"{name} is {judgement} than {self.first} {where}"
            elif name in self.not_judged:
                said = f"{name} against {self.first} {where}, not judged because {self.not_judged[name]}"
            elif difference.interval is None:
                said = f"{name} against {self.first} {where}, without a confidence interval"
            else:
                said = f"No significant difference between {name} and {self.first} {where}"
            numbers = f"{self.values[name].number:z.1f} against {self.values[self.first].number:z.1f} {self.unit}"
            yield f"{said}: {numbers} ({difference.sentence('points', '+')})."


@dataclass(frozen=True)
class SharedTest:
    """A suite with one protocol, and the scores of every model that was evaluated with it."""

    name: str
    scores: dict[str, Scores]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The protocol that all scores share."""
        return next(iter(self.scores.values())).fingerprint

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """Each model's summary."""
        return {name: next(iter(scores.models.values())) for name, scores in self.scores.items()}


def find_tests(models: Sequence[ReportModel]) -> list[SharedTest]:
    """The evaluations, grouped by protocol; a suite that was run with two protocols gives two tests."""
    found: list[SharedTest] = []
    for model in models:
        for scores in model.scores:
            for test in found:
                if model.name not in test.scores and not differences(test.fingerprint, scores.fingerprint, MAY_DIFFER):
                    test.scores[model.name] = scores
                    break
            else:
                found.append(SharedTest(scores.suite, {model.name: scores}))
    suites = [test.name for test in found]
    return [
        replace(test, name=f"{test.name}, protocol {suites[: index + 1].count(test.name)}")
        if suites.count(test.name) > 1
        else test
        for index, test in enumerate(found)
    ]


def compare_models(models: Sequence[ReportModel], tests: Sequence[SharedTest]) -> list[MetricRow]:
    """Every metric of every test, and the metrics at the end of training.

    A model whose treatments were inserted after its weights were last trained is not judged.
    """
    inserted = {model.name: model.inserted for model in models if model.inserted}
    rows = []
    for row in (*(row for test in tests for row in _test_rows(test)), *_training_rows(models)):
        specs = {name: inserted.get(name) or inserted.get(row.first) for name in row.differences}
        reasons = {n: f"{spec} was inserted after the weights were last trained" for n, spec in specs.items() if spec}
        rows.append(replace(row, not_judged={**row.not_judged, **reasons}))
    return rows


def key_rows(rows: Sequence[MetricRow]) -> list[MetricRow]:
    """The most important rows: for each compared model one about robustness and one about clean data."""
    headlines = [row for row in rows if row.headline]
    found = []
    for keys in (CORRUPTED_METRICS, CLEAN_METRICS):
        known = [row for key in keys for row in headlines if row.key == key]
        compared: set[str] = set()
        for row in known:
            if not row.differences.keys() <= compared:
                found.append(row)
                compared |= row.differences.keys()
        if not compared:
            found += known[:1]
    return found


def detail_sentences(rows: Sequence[MetricRow]) -> Iterator[str]:
    """The significant differences of rows that are not headlines: one sentence per test and model."""
    found: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for row in rows:
        for name, difference in row.differences.items():
            if not row.headline and (judgement := row.judgement(name)):
                judged = found.setdefault((row.test, name, row.first), {})
                judged.setdefault(judgement, []).append(f"{row.measure} ({difference.number:+z.1f} points)")
    for (test, name, first), judged in found.items():
        said = "; ".join(f"{judgement} in {', '.join(judged[judgement])}" for judgement in sorted(judged))
        yield f"{test}, other metrics: {name} against {first} is {said}."


def read_estimate(summary: Mapping[str, Any], key: str) -> Estimate:
    """A metric of a summary with its interval."""
    ends = summary.get("flip_interval" if key == "flip_probability" else f"{key}_interval")
    return Estimate(float(summary[key]), (float(ends[0]), float(ends[1])) if ends else None)


def _test_rows(test: SharedTest) -> Iterator[MetricRow]:
    summaries = test.summaries
    corrupted = any("corruptions" in summary for summary in summaries.values())
    for key, metric in METRICS.items():
        if metric.rank != "context" and any(key in summary for summary in summaries.values()):
            label = f"clean {metric.title}" if corrupted and key in ("top1", "top5", "ece") else metric.title
            row = _row(test, label, metric, key, summaries, None, metric.rank == "headline")
            yield replace(row, not_judged=_contradicted_by_mce(row, summaries)) if key == "relative_mce" else row
    if corrupted:
        return
    conditions = dict.fromkeys(name for summary in summaries.values() for name in summary.get("cells", ()))
    for condition in conditions if len(conditions) > 1 else ():
        for key in CONDITION_METRICS:
            found = {name: summary.get("cells", {}).get(condition, {}) for name, summary in summaries.items()}
            if any(key in one for one in found.values()):
                label = f"{condition}: {METRICS[key].title}"
                yield _row(test, label, METRICS[key], key, found, condition, key == "top1" and len(conditions) <= 3)


def _row(
    test: SharedTest,
    label: str,
    metric: Metric,
    key: str,
    summaries: Mapping[str, Mapping[str, Any]],
    condition: str | None,
    headline: bool,
) -> MetricRow:
    values = {name: read_estimate(summary, key) for name, summary in summaries.items() if key in summary}
    by_image = {name: _values_by_image(test.scores[name], key, condition) for name in values}
    first = next(iter(values))
    compared = {}
    for name in list(values)[1:]:
        number = values[name].number - values[first].number
        one, two = by_image[first], by_image[name]
        if one is None or two is None or len(one) != len(two):
            compared[name] = Difference(number)
        else:
            found = paired_difference(one, two)
            compared[name] = Difference(number, (100 * found.low, 100 * found.high), True)
    return MetricRow(test.name, label, metric.unit, metric.higher_is_better, values, compared, headline, key=key)


def _contradicted_by_mce(row: MetricRow, summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Models whose relative mCE and mCE differ from the first model's in opposite directions.

    Relative mCE is the error beyond the clean error, so a model can lower it merely by being worse on clean images.
    """
    mce = {name: float(summaries[name]["mce"]) for name in row.values if "mce" in summaries[name]}
    return {
        name: "mCE differs in the opposite direction"
        for name, difference in row.differences.items()
        if name in mce and row.first in mce and difference.number * (mce[name] - mce[row.first]) < 0
    }


def _values_by_image(scores: Scores, key: str, condition: str | None) -> Array | None:
    """Each image's contribution to a metric that is a mean over images; None if it is not, or was not saved."""
    model = next(iter(scores.models))
    conditions: dict[str, Columns] = {name: columns[model] for name, columns in scores.samples.items()}
    if not conditions:
        return None
    if key in ("mean_error", "mce", "relative_mce"):
        every = all(f"{name}/{severity}" in conditions for name in CORRUPTIONS for severity in range(1, 6))
        known = every and (key != "relative_mce" or "clean" in conditions)
        return mce_shares(conditions, {"mean_error": None, "mce": False, "relative_mce": True}[key]) if known else None
    if key == "mfr":
        if not all("flip" in conditions.get(name, {}) for name in ALEXNET_FLIPS):
            return None
        shares: Array = np.mean([conditions[name]["flip"] / ALEXNET_FLIPS[name] for name in ALEXNET_FLIPS], axis=0)
        return shares
    only = next(iter(conditions.values())) if len(conditions) == 1 else None
    columns = conditions.get(condition or "clean") or only
    column = "flip" if key == "flip_probability" else key
    return np.asarray(columns[column], np.float64) if columns is not None and column in columns else None


def _training_rows(models: Sequence[ReportModel]) -> Iterator[MetricRow]:
    """The metrics at the end of training, for runs validated on the same data."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for model in models:
        results = model.training.results if model.training is not None else {}
        if results.get("last") and results.get("val_images"):
            data = str((results.get("data_sha256") or {}).get("val") or model.name)
            groups.setdefault(data, {})[model.name] = results
    for runs in groups.values():
        first = next(iter(runs.values()))
        count, items = int(first["val_images"]), items_of(str(first.get("task"))).removesuffix("s")
        for key in dict.fromkeys(key for results in runs.values() for key in results["last"]):
            shares = {name: results["last"].get(key) for name, results in runs.items()}
            known = {name: float(share) for name, share in shares.items() if isinstance(share, int | float)}
            if key in _NOT_METRICS or key.endswith("_raw") or not all(0 <= share <= 1 for share in known.values()):
                continue
            # Only the interval of a share of images follows from their number.
            values = {}
            for name, share in known.items():
                low, high = wilson_interval(share, count)
                values[name] = Estimate(100 * share, (100 * low, 100 * high) if key in ("top1", "top5") else None)
            yield _training_row(f"end of training, {counted(count, items)}", key, values)


def _training_row(test: str, key: str, values: dict[str, Estimate]) -> MetricRow:
    first = next(iter(values))
    compared = {
        name: Difference(values[name].number - values[first].number, _newcombe(values[first], values[name]))
        for name in list(values)[1:]
    }
    metric = METRICS.get(key, Metric(key, key, rank="detail"))
    headline = metric.rank == "headline"
    return MetricRow(test, metric.title, metric.unit, metric.higher_is_better, values, compared, headline, key=key)


def _newcombe(first: Estimate, second: Estimate) -> Interval | None:
    """Newcombe's interval of the difference of two shares of unpaired images; wider than a paired one."""
    if first.interval is None or second.interval is None:
        return None
    number = second.number - first.number
    down = math.hypot(second.number - second.interval[0], first.interval[1] - first.number)
    up = math.hypot(second.interval[1] - second.number, first.number - first.interval[0])
    return number - down, number + up
