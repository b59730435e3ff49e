"""A trained DeiT-Ti on photographs: readings by depth beside the paper's, stability, ImageNet-C, occlusion, FGSM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from reporting.gathered import Study
from reporting.outcomes import at, by_layer
from vitfocus.attention.readings import columns as table_columns
from vitfocus.kernels.statistics.reference import uniform_overfocus
from vitfocus.report.charts import Line, Reference, dot_chart, line_chart
from vitfocus.report.comparison import Estimate
from vitfocus.report.page import Cell, Page

#: Context Broadcasting, section 3.1 with Figure 4: ViT-S and ViT-B; the height that the text states.
PAPER_ENTROPY = 4.4
FIGURE_4 = (
    "The paper's Figure 4 shows the same reading of ViT-S and ViT-B on ImageNet-1k. Its text gives two numbers for "
    "both models together: an average entropy of as much as 4.4 nats, under the bound of log 197 ≈ 5.3 (CB, section "
    "3.1); its curves by layer are not given as numbers."
)
PROTOCOL = (
    "mCE is the mean over 15 corruptions of the error divided by AlexNet's published error. The images here are a "
    "sample of photographs corrupted by vitfocus, not the 50,000 distributed JPEG files of each cell of ImageNet-C, so "
    "published figures are of another protocol. For orientation alone: on those files the much larger DeiT-B has 48.5 "
    "(TAP & ADL, Table 5); on the whole validation set ViT-Ti has an accuracy of 72.2 % (CB, Table 5). Intervals are "
    "over images."
)


def add_diagnosis(page: Page, study: Study) -> None:
    """The section, as far as diagnosis.json goes."""
    found = study.diagnosis
    if not found:
        return
    page.section("A trained DeiT-Ti on photographs")
    count = at("images")(found)
    images = f", on {count:,.0f} ImageNet photographs" if count else ""
    page.text(f"{found.get('model', 'The model')} as trained on ImageNet, untreated{images}.")
    charts = [*entropy_chart(found), *family_chart(found), *_others(found)]
    if charts:
        page.figures(*charts)
    if isinstance(found.get("findings"), list) and found["findings"]:
        page.heading("What stands out")
        page.points([str(sentence) for sentence in found["findings"]])
    _scores(page, found)
    _corruptions(page, found)
    _layers(page, found)


def _points(values: Sequence[float], factor: float = 1.0) -> list[tuple[float, float]]:
    return [(float(i), factor * value) for i, value in enumerate(values)]


def entropy_chart(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Entropy by depth beside the paper's height and the bound, as `Page.figures` takes it; empty without readings."""
    entropy = by_layer(found, "reading", "entropy")
    if not entropy:
        return []
    low, high = (by_layer(found, "reading", f"entropy_{end}") for end in ("p15", "p85"))
    bounds = by_layer(found, "reading", "entropy_bound")
    band = [(float(i), *ends) for i, ends in enumerate(zip(low, high, strict=True))] if len(low) == len(high) else []
    lines = [Line("DeiT-Ti", _points(entropy), 0, band)]
    if of_class := by_layer(found, "reading", "entropy_cls"):
        lines.append(Line("DeiT-Ti: class token", _points(of_class), 0, dashed=True))
    quoted = [(float(i), PAPER_ENTROPY) for i in range(len(entropy))]
    lines.append(Line(f"ViT-S/B in the paper: as high as {PAPER_ENTROPY}", quoted, 1, dashed=True))
    references = [Reference("bound: all tokens alike", _points(bounds))] if bounds else []
    chart = line_chart("Entropy by depth", lines, _DEPTH, "entropy (nats)", references, (0.0, None), True)
    said = f"Mean over the layers: {fmean(entropy):.2f} nats; the highest layer: {max(entropy):.2f}. {FIGURE_4}"
    band_said = " The band holds the 15th to 85th percentile of rows." if band else ""
    return [("DeiT-Ti entropy by depth", chart, said + band_said)]


_DEPTH = "layer (0 is the first)"


def family_chart(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Stability by depth, a line a family of corruptions, as `Page.figures` takes it; empty without them."""
    families = found.get("families")
    if not isinstance(families, Mapping):
        return []
    lines = [
        Line(str(name), _points(layers), index)
        for index, name in enumerate(families)
        if (layers := by_layer(families, name, "by_layer"))
    ]
    if not lines:
        return []
    chart = line_chart(
        "Stability by family of corruptions", lines, _DEPTH, "cosine of clean and corrupted maps", (), (None, 1.0), True
    )
    means = {name: mean for name in families if (mean := at(name, "mean")(families)) is not None}
    severity = at("stability_severity")(found)
    at_severity = f" at severity {severity:g}" if severity is not None else ""
    said = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    return [("DeiT-Ti stability by family", chart, f"Means over the layers{at_severity}: {said}.")]


def _others(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    drawn = []
    overfocus = by_layer(found, "reading", "overfocus")
    if overfocus:
        bounds = by_layer(found, "reading", "entropy_bound")
        alike = 100 * uniform_overfocus(round(math.exp(bounds[0]))) if bounds else 5.0
        line = Line("DeiT-Ti", _points(overfocus, 100.0), 0)
        level = Reference(f"all tokens alike ({alike:.3g} %)", level=alike)
        chart = line_chart(
            "Overfocus by depth", [line], _DEPTH, "received by the top 5 % of tokens (%)", [level], (0.0, None), True
        )
        drawn.append(("DeiT-Ti overfocus by depth", chart, f"Mean over the layers: {100 * fmean(overfocus):.1f} %."))
    heads = by_layer(found, "reading", "head_similarity")
    own = by_layer(found, "reading", "diagonal")
    lines = [
        Line(name, _points(values), i)
        for i, (name, values) in enumerate((("head similarity", heads), ("diagonal share", own)))
        if values
    ]
    if lines:
        chart = line_chart("Heads and diagonal by depth", lines, _DEPTH, "cosine, share", (), (0.0, None), True)
        said = "FAN-B-Hybrid has a head similarity of 0.63, and 0.27 with TAP and ADL (TAP & ADL, section 4.1.2)."
        drawn.append(("DeiT-Ti heads and diagonal by depth", chart, said))
    return drawn


def _interval(found: Mapping[str, Any], *path: str) -> tuple[float, float] | None:
    ends = by_layer(found, *path)
    return (ends[0], ends[1]) if len(ends) == 2 else None


def _scores(page: Page, found: Mapping[str, Any]) -> None:
    """Clean accuracy, mCE, occlusion and FGSM with intervals over images."""
    values: list[tuple[str, str, float | None, tuple[float, float] | None]] = [
        ("clean accuracy", "%", at("clean", "accuracy")(found), _interval(found, "clean", "top1_interval")),
        ("top-5 accuracy", "%", at("clean", "top5")(found), _interval(found, "clean", "top5_interval")),
    ]
    for key, name, unit in (
        ("mce", "mCE, ImageNet-C (generated)", "% of AlexNet's"),
        ("relative_mce", "relative mCE, ImageNet-C (generated)", "% of AlexNet's"),
        ("mean_error", "mean error, ImageNet-C (generated)", "%"),
    ):
        values.append((name, unit, at("corruption", key)(found), _interval(found, "corruption", f"{key}_interval")))
    for suite in ("occlusion", "fgsm"):
        for name in found.get(suite) or {}:
            shown = f"accuracy, {'FGSM' if suite == 'fgsm' else suite} {name}"
            values.append((shown, "%", at(suite, name, "accuracy")(found), _interval(found, suite, name, "interval")))
    rows = [
        [name, unit, Cell(_written(number, interval), number)]
        for name, unit, number, interval in values
        if number is not None
    ]
    if rows:
        page.heading("Accuracy and robustness")
        page.table("DeiT-Ti scores", ["number", "unit", "value and 95 % interval"], rows)
        page.text(PROTOCOL)
        page.points([str(note) for note in (found.get("corruption") or {}).get("notes") or []])


def _written(number: float, interval: tuple[float, float] | None) -> str:
    return f"{number:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _corruptions(page: Page, found: Mapping[str, Any]) -> None:
    """Error and stability by corruption."""
    errors = (found.get("corruption") or {}).get("by_corruption") or {}
    names = dict.fromkeys([*errors, *(found.get("stability") or {})])
    rows: list[list[Any]] = []
    stable: list[tuple[str, Mapping[str, Estimate]]] = []
    for name in names:
        error, relative = at("corruption", "by_corruption", name)(found), at("corruption", "ce", name)(found)
        mean = at("stability", name, "mean")(found)
        cells = ((error, 2), (relative, 2), (mean, 3))
        shown = [Cell(f"{value:.{digits}f}", value) if value is not None else None for value, digits in cells]
        rows.append([name.replace("_", " "), *shown])
        if mean is not None:
            stable.append((name.replace("_", " "), {"DeiT-Ti": Estimate(mean)}))
    if stable:
        title = "Stability of attention by corruption"
        chart = dot_chart(title, stable, {"DeiT-Ti": 0}, "cosine of clean and corrupted maps, mean over layers")
        page.figures(("DeiT-Ti stability by corruption", chart, ""), size="single")
    if rows:
        headings = ["corruption", "error (%)", "of AlexNet's (%)", "stability (cosine)"]
        page.table("DeiT-Ti by corruption", headings, rows, folded=True)


def _layers(page: Page, found: Mapping[str, Any]) -> None:
    shown = table_columns()
    keys = [*(key for key in shown if by_layer(found, "reading", key)), "diagonal"]
    columns = {key: by_layer(found, "reading", key) for key in keys if by_layer(found, "reading", key)}
    if columns:
        depth = min(len(values) for values in columns.values())
        headings = ["layer", *(shown[key][0] if key in shown else key for key in columns)]
        rows = [[i, *(Cell(f"{values[i]:.3f}", values[i]) for values in columns.values())] for i in range(depth)]
        page.table("DeiT-Ti: every layer", headings, rows, folded=True)
