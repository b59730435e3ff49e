"""`Scores`, the result of `evaluate`: tables, saving and loading, and comparison of two models."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vitfocus.core.arguments import checked
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.files import DAMAGED, open_file
from vitfocus.core.metrics import METRICS
from vitfocus.core.modules import insertion_sentence, insertions_sentence
from vitfocus.core.records import Count, OpenDict, read_json
from vitfocus.core.statistics import mcnemar, paired_difference
from vitfocus.core.tables import Table, counted
from vitfocus.corruptions import CORRUPTIONS
from vitfocus.robustness.metrics import Summary, mce_shares
from vitfocus.robustness.run_folder import MAY_DIFFER, RESULTS, SAMPLES, Columns, RunFolder, differences

Samples = dict[str, dict[str, Columns]]  # condition -> model -> columns


class ConditionScores(OpenDict):
    """The numbers of one condition, with their intervals."""

    numbers = True

    class fields(msgspec.Struct):  # noqa: D106
        severities: dict[int, float] = {}
        repeats: list[float] = []


class CorruptionScores(OpenDict):
    """The numbers of one corruption, over its severities."""

    numbers = True

    class fields(msgspec.Struct):  # noqa: D106
        error: float


class ModelSummary(OpenDict):
    """The entry of one model in results.json."""

    numbers = True

    class fields(msgspec.Struct):  # noqa: D106
        cells: dict[str, ConditionScores]
        corruptions: dict[str, CorruptionScores] = {}
        classes: dict[str, float | None] = {}


class _ModelFingerprint(OpenDict):
    class fields(msgspec.Struct):
        digest: str | None = None
        treatments: str = ""
        inserted: str = ""
        parameters: Count = 0


class _DataFingerprint(OpenDict):
    class fields(msgspec.Struct):
        digest: str | None = None


class Fingerprint(OpenDict):
    """How the numbers were measured."""

    class fields(msgspec.Struct):  # noqa: D106
        models: dict[str, _ModelFingerprint] = {}
        data: _DataFingerprint = msgspec.field(default_factory=_DataFingerprint)
        protocol: dict[str, Any] = {}


class Results(msgspec.Struct):
    """results.json."""

    suite: str
    images: Count
    models: dict[str, ModelSummary]
    notes: list[str]
    fingerprint: Fingerprint


@dataclass(frozen=True, eq=False, repr=False)
class Scores:
    """What `evaluate` measured, in percent. With one model, `scores["mce"]` is its number.

    Attributes:
        suite: The name of the suite.
        images: The number of images.
        models: For each model its summary: headline numbers (`top1`, `mce`..., each with `_interval`, its bootstrap
            95 % interval), `cells` (every condition) and, for corruptions, `corruptions`.
        notes: Sentences about what the numbers do not cover.
        fingerprint: How they were measured: data, models, protocol, versions.
        samples: The outcome of every image: condition -> model -> columns.

    Example:
        >>> scores = Scores("clean", 100, {"vit": {"top1": 75.0, "cells": {}}})
        >>> scores, scores["top1"], scores["vit"]["top1"]
        (<Scores on clean: 100 images, vit top-1 75.0>, 75.0, 75.0)
    """

    suite: str
    images: int
    models: dict[str, Summary]
    notes: tuple[str, ...] = ()
    fingerprint: dict[str, Any] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        if key in self.models:
            return self.models[key]
        if len(self.models) > 1:
            raise VitfocusError(f"There are {len(self.models)} models; first select one: {', '.join(self.models)}.")
        summary = next(iter(self.models.values()))
        for place in (summary, summary["cells"], summary.get("corruptions", {})):
            if key in place:
                return place[key]
        raise VitfocusError(f"The suite {self.suite} gave no {key!r}: {nearest(key, [*summary, *summary['cells']])}")

    @property
    def insertions(self) -> dict[str, str]:
        """A sentence for each model whose treatments were inserted after its weights were last trained."""
        described = self.fingerprint.get("models", {})
        since = {name: described.get(name, {}).get("inserted", "") for name in self.models}
        return {name: insertion_sentence(specs, name) for name, specs in since.items() if specs}

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data.

        Returns:
            Everything except the samples: the content of results.json.
        """
        head = {"suite": self.suite, "images": self.images, "models": self.models, "notes": list(self.notes)}
        return {**head, "insertions": self.insertions, "fingerprint": self.fingerprint}

    def table(self) -> Table:
        """Format the scores as a table.

        Returns:
            A table to print, with one row per condition and one column per model, followed by the headline numbers.
        """
        summaries = list(self.models.values())
        columns = [_by_condition(summary)[1] for summary in summaries]
        rows = [[name, *(column.get(name, "–") for column in columns)] for name in columns[0]]
        for key, metric in METRICS.items():
            if any(key in summary for summary in summaries):
                of_clean = "corruptions" in summaries[0] and key in ("top1", "top5", "error", "ece")
                rows.append(["clean " * of_clean + metric.short, *(_with_interval(one, key) for one in summaries)])
        how = ", with bootstrap 95 % intervals" if self.samples else ""
        caption = f"In percent{how}. " + " ".join(filter(None, (*self.notes, insertions_sentence(self.insertions))))
        title = f"{self.suite}: {counted(self.images, 'image')}"
        return Table(title, [_by_condition(summaries[0])[0], *self.models], rows, caption)

    def __repr__(self) -> str:
        headlines = []
        for name, summary in self.models.items():
            main = [f" {METRICS[key].short} {summary[key]:.1f}" for key in METRICS if key in summary][:1]
            headlines.append("".join([name, *main]))
        return f"<Scores on {self.suite}: {counted(self.images, 'image')}, {', '.join(headlines)}>"

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        """Displayed by notebooks."""
        return self.table()._repr_html_()

    def compare(self, first: str, second: str) -> Comparison:
        """Compare two of the models on the same images.

        Args:
            first: The name of the baseline.
            second: The name of the other model.

        Returns:
            The differences per condition, with paired intervals and McNemar's test.

        Raises:
            VitfocusError: There is no such model, or it has no outcomes of single images.
        """
        return compare(self.only(first), self.only(second))

    def only(self, model: str) -> Scores:
        """Select one model.

        Args:
            model: Its name.

        Returns:
            The scores of this model, with a note if its outcomes per image are missing.

        Raises:
            VitfocusError: There is no such model.
        """
        if model not in self.models:
            raise VitfocusError(f"There is no model {model!r} in these scores: {nearest(model, self.models)}")
        fingerprint = {**self.fingerprint, "models": {model: self.fingerprint.get("models", {}).get(model, {})}}
        samples, notes = {}, self.notes
        if all(model in columns for columns in self.samples.values()):
            samples = {condition: {model: columns[model]} for condition, columns in self.samples.items()}
        else:
            others = dict.fromkeys(name for columns in self.samples.values() for name in columns)
            notes += (
                f"{SAMPLES} lacks outcomes of {model} (it has {', '.join(others)}), so {model} is not compared image "
                "by image.",
            )
        return Scores(self.suite, self.images, {model: self.models[model]}, notes, fingerprint, samples)

    @checked
    def save(self, folder: str | Path) -> Path:
        """Save as results.json and samples.npz.

        Args:
            folder: The folder, created if needed.

        Returns:
            The folder.

        Raises:
            VitfocusError: The files cannot be written; those of an earlier save are kept.
        """
        RunFolder(folder).finish(self.to_dict(), flatten(self.samples))
        return Path(folder)


def load_scores(folder: str | Path) -> Scores:
    """Read the scores of a finished run.

    Args:
        folder: The folder that `evaluate(out=...)` or `Scores.save` wrote.

    Returns:
        The scores; without the outcomes of single images if only results.json was kept.

    Raises:
        VitfocusError: If the folder is not a finished run, or one of its files is damaged.

    Example:
        >>> import tempfile
        >>> scores = Scores("clean", 100, {"vit": {"top1": 75.0, "cells": {}}})
        >>> load_scores(scores.save(tempfile.mkdtemp()))["top1"]
        75.0
    """
    folder = Path(folder)
    missing = f"{folder} is not a finished run"
    results = read_json(folder / RESULTS, Results, writer="vitfocus evaluate", missing=missing)
    if not results.models:
        raise VitfocusError(f"{folder / RESULTS} holds the results of no model.")
    samples: Samples = {}
    if (folder / SAMPLES).exists():
        try:
            with open_file(folder / SAMPLES) as file, np.load(file) as stored:
                columns = {name: stored[name] for name in stored.files}
                if wrong := [name for name, values in columns.items() if values.dtype.kind not in "biuf"]:
                    raise ValueError(f"{wrong[0][:100]!r} does not hold numbers")
                samples = unflatten(columns)
        except DAMAGED as error:
            raise VitfocusError(f"{folder / SAMPLES} cannot be read: {error}.") from None
    models: dict[str, Summary] = {**results.models}
    return Scores(results.suite, results.images, models, tuple(results.notes), results.fingerprint, samples)


@dataclass(frozen=True, repr=False)
class Comparison:
    """The differences between two models on the same images, in percent.

    Attributes:
        suite: The name of the suite.
        first: The name of the baseline.
        second: The name of the other model.
        rows: One dict per condition: both numbers, second minus first with its paired 95 % interval, McNemar's p.
        differing: Differences between the protocols; empty unless the comparison was forced.
        insertions: A sentence for each model whose treatments were inserted after its weights were last trained.
    """

    suite: str
    first: str
    second: str
    rows: list[dict[str, Any]]
    differing: tuple[str, ...] = ()
    insertions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data.

        Returns:
            The attributes as JSON-serialisable values.
        """
        return {**vars(self), "differing": list(self.differing)}

    def table(self) -> Table:
        """Format the comparison as a table.

        Returns:
            A table to print, with one row per condition.
        """
        rows = [
            [
                row["name"],
                f"{row['first']:.2f}",
                f"{row['second']:.2f}",
                f"{row['difference']:+.2f} [{row['interval'][0]:+.2f}, {row['interval'][1]:+.2f}]",
                f"{row['p_value']:.2g}" if "p_value" in row else "–",
            ]
            for row in self.rows
        ]
        how = (
            "Top-1 unless named otherwise; differences with paired bootstrap 95 % intervals; p by McNemar's exact test."
        )
        forced = f"Forced: the protocols differ in {'; '.join(self.differing)}." if self.differing else ""
        caption = " ".join(filter(None, (how, forced, insertions_sentence(self.insertions))))
        columns = ["condition", self.first, self.second, "difference", "p"]
        return Table(f"{self.suite}: {self.second} against {self.first}", columns, rows, caption)

    def __repr__(self) -> str:
        return f"<Comparison on {self.suite}: {self.second} against {self.first}, {counted(len(self.rows), 'row')}>"

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        """Displayed by notebooks."""
        return self.table()._repr_html_()


def compare(first: Scores | str | Path, second: Scores | str | Path, force: bool = False, seed: int = 0) -> Comparison:
    """Compare the results of two models image by image.

    Args:
        first: The scores of one model, or the folder of its run.
        second: Those of the other.
        force: Compare runs whose protocols differ; they must still contain the same images.
        seed: Seed of the bootstrap.

    Returns:
        The differences per condition, with paired intervals and McNemar's test.

    Raises:
        VitfocusError: If a run has several models or no outcomes of single images, or if the protocols differ.

    Example:
        >>> outcomes = {"plain": np.array([True, False, False, True]), "treated": np.array([True, True, False, True])}
        >>> runs = [
        ...     Scores("clean", 4, {name: {"cells": {}}}, samples={"clean": {name: {"top1": right}}})
        ...     for name, right in outcomes.items()
        ... ]
        >>> compare(*runs).rows[0]["difference"]
        25.0
    """
    one, two = (scores if isinstance(scores, Scores) else load_scores(scores) for scores in (first, second))
    for models in (one.models, two.models):
        if len(models) != 1:
            raise VitfocusError(f"A run has {len(models)} models: select one with .only(name): {', '.join(models)}.")
    differing = differences(one.fingerprint, two.fingerprint, MAY_DIFFER)
    if differing and not force:
        raise VitfocusError(
            "These runs used different protocols, so their numbers are not comparable (the option force compares them "
            f"anyway); they differ in {'; '.join(differing)}."
        )
    names = [next(iter(scores.models)) for scores in (one, two)]
    outcomes = []
    for scores, name in zip((one, two), names, strict=True):
        outcomes.append({c: columns[name] for c, columns in scores.samples.items() if name in columns})
        if not outcomes[-1]:
            raise VitfocusError(f"The run of {name} has no outcomes of single images to compare: evaluate it again.")
    shared = [condition for condition in outcomes[0] if condition in outcomes[1]]
    if not shared:
        raise VitfocusError("These runs have no condition in common, so there is nothing to compare.")
    rows = [_row(condition, outcomes[0][condition], outcomes[1][condition], seed) for condition in shared]
    complete = all(f"{c}/{s}" in shared for c in CORRUPTIONS for s in range(1, 6))
    if complete and "mce" in one.models[names[0]] and all("p_value" in row for row in rows):
        rows.append(_scored("mCE", mce_shares(outcomes[0]), mce_shares(outcomes[1]), seed))
    sentences = [scores.insertions.get(name) for scores, name in zip((one, two), names, strict=True)]
    if names[0] == names[1]:
        names = [f"{names[0]} (first)", f"{names[1]} (second)"]
    insertions = {name: sentence for name, sentence in zip(names, sentences, strict=True) if sentence}
    return Comparison(one.suite, names[0], names[1], rows, tuple(differing), insertions)


def _row(condition: str, first: Columns, second: Columns, seed: int) -> dict[str, Any]:
    kind = next((kind for kind in ("top1", "flip", "accuracy") if kind in first and kind in second), None)
    if kind is None:
        raise VitfocusError(f"The runs have no outcomes of {condition} in common: evaluate both models again.")
    row = _scored(condition, first[kind], second[kind], seed)
    if kind != "top1":
        return row
    test = mcnemar(first["top1"], second["top1"])
    return {**row, "only_first": test.only_first, "only_second": test.only_second, "p_value": test.p_value}


def _scored(name: str, first: Any, second: Any, seed: int) -> dict[str, Any]:
    difference = paired_difference(first, second, seed)
    return {
        "name": name,
        "first": 100 * float(first.mean()),
        "second": 100 * float(second.mean()),
        "difference": 100 * difference.mean,
        "interval": [100 * difference.low, 100 * difference.high],
    }


def flatten(samples: Samples) -> Columns:
    """Samples as one level of arrays, for a file."""
    return {
        f"{condition}|{model}|{name}": values
        for condition, models in samples.items()
        for model, columns in models.items()
        for name, values in columns.items()
    }


def unflatten(columns: Columns) -> Samples:
    """The inverse of `flatten`."""
    samples: Samples = {}
    for key, values in columns.items():
        condition, _, rest = key.partition("|")
        model, _, name = rest.rpartition("|")  # a model's name may contain "|"
        samples.setdefault(condition, {}).setdefault(model, {})[name] = values
    return samples


def _by_condition(summary: Summary) -> tuple[str, dict[str, str]]:
    """The table of one model: its heading, and the text of each condition, corruption or class."""
    conditions = summary["cells"]
    if "corruptions" in summary:
        rows = summary["corruptions"]
        texts = {name: f"{row['error']:.1f}" for name, row in rows.items()}
        relative = {name: f"{texts[name]} ({row['ce']:.1f})" for name, row in rows.items() if "ce" in row}
        return "error (CE) by corruption" if relative else "error", texts | relative
    if len(conditions) < 2:
        classes = summary.get("classes", {})
        return "IoU by class" * bool(classes), {n: "–" if v is None else f"{v:.2f}" for n, v in classes.items()}
    if any("flip_probability" in row for row in conditions.values()):
        texts = {n: f"{row['flip_probability']:.2f} ({row['top5_distance']:.2f})" for n, row in conditions.items()}
        return "flip probability (top-5 distance)", texts
    key = next((key for key in ("miou", "accuracy") if any(key in row for row in conditions.values())), "top1")
    return METRICS[key].short, {name: _with_interval(row, key) for name, row in conditions.items()}


def _with_interval(summary: Summary, key: str) -> str:
    if key not in summary:
        return "–"
    text = f"{summary[key]:.2f}"
    if f"{key}_interval" in summary:
        low, high = summary[f"{key}_interval"]
        text += f" [{low:.2f}, {high:.2f}]"
    return text
