"""Who is better, by how much: every headline number of every test, with intervals and differences.

A test is a suite under one protocol on one set of images. Only models that took the same test are compared, image by
image where the outcomes of single images were kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vitfocus.core.statistics import wilson_interval
from vitfocus.core.tables import counted
from vitfocus.corruptions import CORRUPTIONS
from vitfocus.report.subjects import Subject, scores_name
from vitfocus.robustness.fingerprint import FREE, differences
from vitfocus.robustness.plan import Columns
from vitfocus.robustness.references import ALEXNET_FLIPS
from vitfocus.robustness.results import Scores
from vitfocus.robustness.scores import Array, paired_difference
from vitfocus.robustness.summaries import mce_shares

Interval = tuple[float, float]

#: Key of a summary: what it is called, its unit, and whether more is better.
MEASURES: dict[str, tuple[str, str, bool]] = {
    "top1": ("top-1 accuracy", "%", True),
    "top5": ("top-5 accuracy", "%", True),
    "miou": ("mIoU", "%", True),
    "miou_corrupted": ("mean mIoU over the corruptions", "%", True),
    "macc": ("mean class accuracy", "%", True),
    "aacc": ("pixel accuracy", "%", True),
    "box_ap": ("box AP", "%", True),
    "box_ap50": ("box AP50", "%", True),
    "box_ap75": ("box AP75", "%", True),
    "mask_ap": ("mask AP", "%", True),
    "mask_ap50": ("mask AP50", "%", True),
    "mask_ap75": ("mask AP75", "%", True),
    "accuracy": ("accuracy", "%", True),
    "mean_error": ("mean error over the corruptions", "%", False),
    "mce": ("mCE", "% of AlexNet's", False),
    "relative_mce": ("relative mCE", "% of AlexNet's", False),
    "mfr": ("mean flip rate", "% of AlexNet's", False),
    "flip_probability": ("flip probability", "%", False),
    "ece": ("calibration error (ECE)", "%", False),
}


#: Measures that do not make a headline, and those that the single conditions of a suite are shown by.
DETAILS = frozenset({"top5", "ece", "macc", "aacc", "box_ap50", "box_ap75", "mask_ap50", "mask_ap75"})
BY_CONDITION = ("top1", "miou", "accuracy", "flip_probability")


@dataclass(frozen=True)
class Value:
    """A measured number and its 95 % interval, if one is known."""

    number: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Difference:
    """One model's number less the first model's, its 95 % interval if known, and whether images were paired."""

    number: float
    interval: Interval | None
    paired: bool

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True)
class Row:
    """One number of one test, by model; `differences` are to the first model that has it."""

    test: str
    measure: str
    unit: str
    more_is_better: bool
    values: dict[str, Value]
    differences: dict[str, Difference] = field(default_factory=dict)
    headline: bool = True
    unjudged: Mapping[str, str] = field(default_factory=dict)  # models, and why they are not judged

    @property
    def first(self) -> str:
        """The model that the others are compared with."""
        return next(iter(self.values))

    def verdict(self, name: str) -> str:
        """`better` or `worse` than the first model where the difference is clear and means it, else nothing."""
        difference = self.differences.get(name)
        if difference is None or not difference.clear or name in self.unjudged:
            return ""
        return "better" if (difference.number > 0) == self.more_is_better else "worse"

    def sentences(self) -> Iterator[str]:
        """What the differences say, in words."""
        base = self.values[self.first].number
        for name, difference in self.differences.items():
            numbers = f"{self.values[name].number:z.1f} against {base:z.1f} {self.unit}"
            by = f"{difference.number:+z.1f} points"
            if difference.interval is not None:
                by += f" [{difference.interval[0]:+z.1f}, {difference.interval[1]:+z.1f}]"
            if verdict := self.verdict(name):
                judged = f"{name} is {verdict} than {self.first}"
            elif name in self.unjudged:
                judged = f"{name} against {self.first}, not judged, as {self.unjudged[name]}"
            elif difference.interval is None:
                judged = f"{name} against {self.first}, without an interval"
            else:
                judged = f"no clear difference between {name} and {self.first}"
            yield f"{self.test}, {self.measure}: {judged}: {numbers}, {by}."


@dataclass(frozen=True)
class Test:
    """A suite under one protocol, and the scores of every model that took it."""

    name: str
    scores: dict[str, Scores]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The protocol, which all of them share."""
        return next(iter(self.scores.values())).fingerprint


def tests(subjects: Sequence[Subject]) -> list[Test]:
    """The tests that were taken; one suite by two protocols is two tests."""
    found: list[Test] = []
    for subject in subjects:
        for scores in subject.scores:
            for test in found:
                if subject.name not in test.scores and not differences(test.fingerprint, scores.fingerprint, FREE):
                    test.scores[subject.name] = scores
                    break
            else:
                found.append(Test(scores.suite, {subject.name: scores}))
    counts = {test.name: sum(other.name == test.name for other in found) for test in found}
    numbers: dict[str, int] = {}
    named = []
    for test in found:
        numbers[test.name] = numbers.get(test.name, 0) + 1
        name = f"{test.name} (protocol {numbers[test.name]})" if counts[test.name] > 1 else test.name
        named.append(Test(name, test.scores))
    return named


def rows(subjects: Sequence[Subject], taken: Sequence[Test]) -> list[Row]:
    """Every number of every test, and the accuracy at the end of training."""
    found = [row for test in taken for row in _rows_of(test)]
    since = {subject.name: subject.inserted for subject in subjects if subject.inserted}
    return [_without_insertions(row, since) for row in (*found, *_training_rows(subjects))]


def _without_insertions(row: Row, since: Mapping[str, str]) -> Row:
    """The same row without a verdict on models whose treatments were inserted after their weights were trained."""
    why = "{} was inserted after the weights were last trained"
    judged = {name: since.get(name) or since.get(row.first) for name in row.differences}
    return replace(row, unjudged={**row.unjudged, **{n: why.format(specs) for n, specs in judged.items() if specs}})


def _rows_of(test: Test) -> Iterator[Row]:
    summaries = {name: scores.models[scores_name(scores)] for name, scores in test.scores.items()}
    samples = {
        name: {cell: columns[scores_name(scores)] for cell, columns in scores.samples.items()}
        for name, scores in test.scores.items()
    }
    corrupted = any("corruptions" in summary for summary in summaries.values())
    for key, (measure, unit, more) in MEASURES.items():
        if any(key in summary for summary in summaries.values()):
            label = f"clean {measure}" if corrupted and key in ("top1", "top5", "ece") else measure
            row = _row(test.name, label, unit, more, summaries, samples, key, None, key not in DETAILS)
            yield replace(row, unjudged=_contradicted(row, summaries)) if key == "relative_mce" else row
    if corrupted:
        return
    cells = [cell for summary in summaries.values() for cell in summary.get("cells", ())]
    for cell in dict.fromkeys(cells) if len(set(cells)) > 1 else ():
        for key in BY_CONDITION:
            of_cell = {name: summary.get("cells", {}).get(cell, {}) for name, summary in summaries.items()}
            if any(key in found for found in of_cell.values()):
                measure, unit, more = MEASURES[key]
                headline = key == "top1" and len(set(cells)) <= 3
                yield _row(test.name, f"{cell}: {measure}", unit, more, of_cell, samples, key, cell, headline)


def _row(
    test: str,
    label: str,
    unit: str,
    more: bool,
    summaries: Mapping[str, Mapping[str, Any]],
    samples: Mapping[str, dict[str, Columns]],
    key: str,
    cell: str | None,
    headline: bool,
) -> Row:
    values = {name: _value(summary, key) for name, summary in summaries.items() if key in summary}
    shares = {name: _by_image(samples[name], key, cell) for name in values}
    first = next(iter(values))
    compared = {}
    for name in list(values)[1:]:
        number = values[name].number - values[first].number
        one, two = shares[first], shares[name]
        if one is None or two is None or len(one) != len(two):
            compared[name] = Difference(number, None, False)
        else:
            found = paired_difference(one, two)
            compared[name] = Difference(number, (100 * found.low, 100 * found.high), True)
    return Row(test, label, unit, more, values, compared, headline)


def _contradicted(row: Row, summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Models whose relative mCE and mCE differ from the first model's in opposite directions.

    Relative mCE is the error beyond the clean error, so a model can lower it merely by being worse on clean images.
    """
    mce = {name: float(summaries[name]["mce"]) for name in row.values if "mce" in summaries[name]}
    return {
        name: "mCE points the other way"
        for name, difference in row.differences.items()
        if name in mce and row.first in mce and difference.number * (mce[name] - mce[row.first]) < 0
    }


def details(rows: Sequence[Row]) -> Iterator[str]:
    """The clear differences of rows that are no headlines: a sentence for every test and model."""
    found: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for row in rows:
        for name, difference in row.differences.items():
            if not row.headline and (verdict := row.verdict(name)):
                judged = found.setdefault((row.test, name, row.first), {})
                judged.setdefault(verdict, []).append(f"{row.measure} ({difference.number:+z.1f} points)")
    for (test, name, first), judged in found.items():
        said = "; ".join(f"{verdict} in {', '.join(judged[verdict])}" for verdict in sorted(judged))
        yield f"{test}, in detail: against {first}, {name} is {said}."


def _value(summary: Mapping[str, Any], key: str) -> Value:
    low_high = summary.get("flip_interval" if key == "flip_probability" else f"{key}_interval")
    return Value(float(summary[key]), (float(low_high[0]), float(low_high[1])) if low_high else None)


def _by_image(cells: Mapping[str, Columns], key: str, cell: str | None) -> Array | None:
    """Each image's own share of a number, whose mean is the number; None where it is no mean over images."""
    if not cells:
        return None
    every = all(f"{name}/{severity}" in cells for name in CORRUPTIONS for severity in range(1, 6))
    if key in ("mean_error", "mce", "relative_mce"):
        known = every and (key != "relative_mce" or "clean" in cells)
        return mce_shares(cells, {"mean_error": None, "mce": False, "relative_mce": True}[key]) if known else None
    if key == "mfr":
        if not all("flip" in cells.get(name, {}) for name in ALEXNET_FLIPS):
            return None
        shares: Array = np.mean([cells[name]["flip"] / ALEXNET_FLIPS[name] for name in ALEXNET_FLIPS], axis=0)
        return shares
    chosen = cells.get(cell or "clean") or (next(iter(cells.values())) if len(cells) == 1 else None)
    column = {"flip_probability": "flip"}.get(key, key)
    return np.asarray(chosen[column], np.float64) if chosen is not None and column in chosen else None


def _training_rows(subjects: Sequence[Subject]) -> Iterator[Row]:
    """The scores at the end of training, for runs that were validated on the same data."""
    groups: dict[str, list[Subject]] = {}
    for subject in subjects:
        results = subject.training.results if subject.training is not None else {}
        if results.get("last") and results.get("val_images"):
            key = str((results.get("data_sha256") or {}).get("val") or subject.name)
            groups.setdefault(key, []).append(subject)
    for members in groups.values():
        runs = {one.name: one.training.results for one in members if one.training is not None}
        count = int(next(iter(runs.values()))["val_images"])
        for key in dict.fromkeys(key for results in runs.values() for key in results["last"]):
            shares = {name: results["last"].get(key) for name, results in runs.items()}
            known = {name: float(share) for name, share in shares.items() if isinstance(share, int | float)}
            if key in _NO_SHARES or key.endswith("_raw") or not all(0 <= share <= 1 for share in known.values()):
                continue
            # Only a share of single images has an interval that follows from their number.
            of_images = key in ("top1", "top5")
            values = {
                n: Value(100 * share, _percent(wilson_interval(share, count)) if of_images else None)
                for n, share in known.items()
            }
            yield _training_row(f"end of training ({counted(count, 'image')})", key, values)


_NO_SHARES = frozenset({"kind", "step", "epoch", "loss"})


def _training_row(test: str, key: str, values: dict[str, Value]) -> Row:
    first = next(iter(values))
    compared = {
        name: Difference(values[name].number - values[first].number, _apart(values[first], values[name]), False)
        for name in list(values)[1:]
    }
    measure, unit, more = MEASURES.get(key, (key, "%", True))
    return Row(test, measure, unit, more, values, compared, headline=key in MEASURES and key not in DETAILS)


def _percent(interval: Interval) -> Interval:
    return 100 * interval[0], 100 * interval[1]


def _apart(first: Value, second: Value) -> Interval | None:
    """Newcombe's interval of a difference of two shares whose images were not paired: wider than a paired one."""
    if first.interval is None or second.interval is None:
        return None
    number = second.number - first.number
    down = math.hypot(second.number - second.interval[0], first.interval[1] - first.number)
    up = math.hypot(second.interval[1] - second.number, first.number - first.interval[0])
    return number - down, number + up
