"""The first screen of a report: the result in a few sentences, the main figures, and the next steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.attention.findings import uniform_note
from vitfocus.attention.readings import Chart, charts
from vitfocus.core.metrics import METRICS
from vitfocus.core.modules import insertion_sentence, insertions_sentence
from vitfocus.core.tables import counted
from vitfocus.report.attention import group_diagnoses, reading_chart
from vitfocus.report.charts import dot_chart
from vitfocus.report.comparison import Estimate, MetricRow, SharedTest, key_rows
from vitfocus.report.models import training_charts
from vitfocus.report.page import Page
from vitfocus.report.runs import ReportModel, short_path
from vitfocus.report.scores import difference_chart, severity_chart

#: The readings of attention in the summary, and at most this many figures.
_READINGS = ("stability", "overfocus", "entropy")
_FIGURES = 3


def add_summary(
    page: Page,
    models: Sequence[ReportModel],
    tests: Sequence[SharedTest],
    rows: Sequence[MetricRow],
    colours: Mapping[str, int],
) -> None:
    """The result, at most three figures, and the next steps."""
    page.section("Result")
    if sentence := insertions_sentence(insertions(models)):
        page.text(sentence, lead=True)
    sentences = list(_result(models, rows))
    if not sentences or len(models) == 1:
        sentences += list(_findings(models))
    if len(models) > 3:
        page.points(sentences)
    else:
        for sentence in sentences:
            page.text(sentence, lead=True)
    if sentence := _attention(models):
        page.text(sentence)
    page.figures(*list(_figures(models, tests, rows, colours))[:_FIGURES], size="small")
    if steps := list(_next_steps(models, tests, rows)):
        page.heading("Next steps")
        page.points(steps)


def insertions(models: Sequence[ReportModel]) -> dict[str, str]:
    """A sentence for each model whose treatments were inserted after its weights were last trained."""
    return {one.name: insertion_sentence(one.inserted, one.name) for one in models if one.inserted}


def _result(models: Sequence[ReportModel], rows: Sequence[MetricRow]) -> Iterator[str]:
    main = key_rows(rows)
    compared = [row for row in main if row.differences]
    for row in compared:
        yield from row.sentences()
    if compared or not rows:
        return
    if len(models) > 1:
        yield "These models have no evaluation in common, so none is called better than another."
    for model in models:
        known = [(row, row.values[model.name]) for row in main if model.name in row.values]
        known = known or [(row, row.values[model.name]) for row in rows if model.name in row.values][:1]
        parts = [f"{row.measure} {value.sentence(row.unit)} ({row.test})" for row, value in known]
        if parts:
            yield f"{model.name}: {'; '.join(parts)}."


def _findings(models: Sequence[ReportModel]) -> Iterator[str]:
    """The first findings of each model's first diagnosis."""
    for model in models:
        for diagnosis in model.diagnoses[:1]:
            prefix = f"{model.name}: " if len(models) > 1 else ""
            for finding in diagnosis.explained[: 2 if len(models) == 1 else 1]:
                yield f"{prefix}{finding.read} {finding.reference}".rstrip()


def _attention(models: Sequence[ReportModel]) -> str:
    """The means over the layers of the main readings, and which models attend nearly uniformly."""
    parts, note = [], ""
    for diagnoses in group_diagnoses(models)[:1]:
        for key, reading in _summary_charts(diagnoses).items():
            means = []
            for name, diagnosis in diagnoses.items():
                values = [reading.factor * row[key] for row in diagnosis.rows if key in row]
                if values:
                    number = f"{fmean(values):.3g} {reading.unit}".rstrip()
                    means.append(f"{number} ({name})" if len(models) > 1 else number)
            parts.append(f"{reading.title.lower()} {', '.join(means)}")
        note = uniform_note({name: diagnosis.rows for name, diagnosis in diagnoses.items()})
    return f"Attention, mean over the layers: {'; '.join(parts)}. {note}".rstrip() if parts else ""


def _summary_charts(diagnoses: Mapping[str, Diagnosis]) -> dict[str, Chart]:
    keys = {key for diagnosis in diagnoses.values() for row in diagnosis.rows for key in row}
    return {key: charts()[key] for key in _READINGS if key in keys}


def _figures(
    models: Sequence[ReportModel], tests: Sequence[SharedTest], rows: Sequence[MetricRow], colours: Mapping[str, int]
) -> Iterator[tuple[str, str, str]]:
    """Figures as (name, SVG, caption), most important first."""
    if (chart := _improvements(rows, tests, colours)) is not None:
        yield "improvements", chart, "Differences with 95 % confidence intervals; right of the dashed line is better."
    for test in tests:
        if (chart := severity_chart(test, colours)) is not None:
            yield (
                f"{test.name} by severity",
                chart,
                f"{test.name}, mean over the corruptions measured at every severity; 1 is the mildest.",
            )
            break
    for diagnoses in group_diagnoses(models)[:1]:
        for key, reading in _summary_charts(diagnoses).items():
            chart = reading_chart(key, diagnoses, colours)
            yield f"{reading.title} by depth, summary", chart, reading.meaning.partition(". ")[0].rstrip(".") + "."
    for test in tests:
        for name in list(test.scores)[1:2]:
            if (chart := difference_chart(test, name)) is not None:
                yield f"{test.name} difference, summary", chart, "Blue is better, orange is worse."
    yield from training_charts(models, colours)[:1]


def _improvements(rows: Sequence[MetricRow], tests: Sequence[SharedTest], colours: Mapping[str, int]) -> str | None:
    """The differences from the first model, with signs such that positive is better; None if there are none."""
    evaluations = {test.name for test in tests}
    shown = [row for row in rows if row.headline and row.differences and (row.test in evaluations or not tests)]
    drawn = []
    for row in shown:
        values = {}
        for name, difference in row.differences.items() if row.first == shown[0].first else ():
            if difference.interval is not None and name not in row.not_judged:
                low, high = difference.interval
                interval = (low, high) if row.higher_is_better else (-high, -low)
                values[name] = Estimate(difference.number if row.higher_is_better else -difference.number, interval)
        label = f"{row.test}: " if len({one.test for one in shown}) > 1 else ""
        label += METRICS[row.key].short if row.key in METRICS else row.measure
        if values:
            drawn.append((label, values))
    if not drawn:
        return None
    return dot_chart(f"Improvement over {shown[0].first}", drawn[:8], colours, "improvement (points)", level=0.0)


def _next_steps(models: Sequence[ReportModel], tests: Sequence[SharedTest], rows: Sequence[MetricRow]) -> Iterator[str]:
    trained = [(model, short_path(model.training.folder)) for model in models if model.training is not None]
    for model, folder in trained:
        if model.training is not None and not model.training.finished:
            yield (
                f"Finish the training of {model.name}: "
                f"`vitfocus train {folder}/config.toml --out {folder} --resume auto`"
            )
    for model in models:
        if model.inserted:
            yield f"Train {model.name} with its treatments before judging them."
    if len(trained) > 1 and any(row.differences for row in rows):
        folder = trained[-1][1]
        yield (
            "Train more seeds before relying on a small difference. Each model is one training run, and the intervals "
            f"do not cover the effect of another seed: `vitfocus train {folder}/config.toml engine.seed=1 --out "
            f"{folder}-seed1`"
        )
    unclear = [row for row in key_rows(rows) if any(d.interval and not d.significant for d in row.differences.values())]
    for test in tests:
        if any(row.test == test.name for row in unclear):
            images = counted(next(iter(test.scores.values())).images, "image")
            yield f"Evaluate on more images for narrower intervals: {test.name} was measured on {images}."
    if all(test.name.partition(", ")[0] == "clean" for test in tests):
        yield "Measure robustness: `vitfocus evaluate MODEL --suite imagenet-c --data DIR --out DIR`"
    if not any(model.diagnoses for model in models):
        yield "See what attention does: `vitfocus diagnose MODEL --against gaussian_noise/3 --out DIR`"
    if len(models) == 1:
        yield "Compare with another model, treated or untreated: `vitfocus report RUN RUN --out report.html`"
