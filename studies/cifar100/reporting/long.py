"""The page of the long study: how far it went, comparisons, all measures by arm, gain by epoch, attention by depth.

`write_report` writes report.md and SVG files into the folder of results. It shows what is finished and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from reporting.intervals import estimate
from reporting.pictures import beside
from reporting.readme import table
from vitfocus.core.files import write_text
from vitfocus.report.charts import Line, Reference, line_chart
from vitfocus.train.log import collapsed_layers

Result = Mapping[str, Any]
Results = Mapping[tuple[str, str, int], Result]

TITLES = {
    "vit-s": "ViT-S/4 on CIFAR-100",
    "vit-ti": "ViT-Ti/4 on CIFAR-100",
    "fine-tune": "DeiT-Ti fine-tuned on CIFAR-100 at 224 px",
    "camvid": "UperNet with DeiT-Ti on CamVid",
    "collapse": "ViT-S/4 with AdamW at 1e-3: which arms train",
}
#: Heading of a column, and what it shows of a result; a column that no result has is left out.
MEASURES: dict[str, Callable[[Result], float]] = {
    "accuracy (%)": lambda one: one["clean"]["accuracy"],
    "mIoU (%)": lambda one: one["clean"]["miou"],
    "corruption error (%)": lambda one: one["corruption"]["mean_error"],
    "kept under corruption (% of clean)": lambda one: one["kept"],
    "FGSM 1/255 (%)": lambda one: one["fgsm"]["1/255"],
    "occlusion, mean (%)": lambda one: fmean(one["occlusion"].values()),
    "calibration error (%)": lambda one: one["clean"]["ece"],
}
#: At how many points of training attention is shown.
POINTS = 5


class Planned(Protocol):
    """What this page needs to know of a planned run."""

    @property
    def group(self) -> str: ...
    @property
    def arm(self) -> str: ...
    @property
    def seed(self) -> int: ...


def write_report(folder: Path, runs: Sequence[Planned], found: Results, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write report.md and its figures.

    Args:
        folder: The folder of results.
        runs: All planned runs.
        found: The finished ones, by group, arm and seed.
        rows: The analysed comparisons of `tiers.analyse`.

    Returns:
        The path of report.md.
    """
    parts = ["# The long study", how_far(runs, found), "## Comparisons", comparisons(rows)]
    for group in dict.fromkeys(run.group for run in runs):
        arms = list(dict.fromkeys(run.arm for run in runs if run.group == group))
        here = {arm: [one for (g, a, _), one in sorted(found.items()) if (g, a) == (group, arm)] for arm in arms}
        here = {arm: results for arm, results in here.items() if results}
        if not here:
            continue
        parts += [f"## {TITLES.get(group, group)}", measures(here)]
        figures = [("training", "Learning curves and gain over plain", curves(group, here))]
        figures += [("attention", "Entropy of attention by depth during training", attention(here))]
        if group == "collapse":
            parts.append(collapse(here))
        for kind, title, charts in figures:
            if charts:
                name = f"{group}-{kind}.svg"
                write_text(folder / name, beside(charts, f"{TITLES.get(group, group)}: {title.lower()}"))
                parts.append(f"![{title}]({name})")
    path = folder / "report.md"
    write_text(path, "\n\n".join(parts) + "\n")
    return path


def how_far(runs: Sequence[Planned], found: Results) -> str:
    """A sentence on the finished runs of each group."""
    groups = []
    for group in dict.fromkeys(run.group for run in runs):
        planned = [(run.group, run.arm, run.seed) for run in runs if run.group == group]
        groups.append(f"{TITLES.get(group, group)}: {sum(key in found for key in planned)} of {len(planned)}")
    return "Finished runs. " + "; ".join(groups) + ". `tiers.py report` writes this page from the result files."


def comparisons(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every comparison with its baseline and interval."""
    body = []
    for row in rows:
        effect = plain = ""
        if "difference" in row:
            low, high = row["interval"]
            effect, plain = f"{row['difference']:+.2f} [{low:+.2f}, {high:+.2f}]", f"{row['plain']:.2f}"
        body.append([row["claim"], row["group"], plain, effect, str(row["seeds"]), row["outcome"]])
    return table(["claim", "group", "plain", "difference [95 % interval]", "seeds", "outcome"], body)


def measures(arms: Mapping[str, Sequence[Result]]) -> str:
    """All measures of the arms of a group: means over seeds with 95 % intervals."""

    def value(read: Callable[[Result], float], results: Sequence[Result]) -> str:
        try:
            found = estimate(read(one) for one in results)
        except KeyError:
            return ""
        between = f" [{found.interval[0]:.2f}, {found.interval[1]:.2f}]" if found.interval else ""
        return f"{found.mean:.2f}{between}"

    columns = {name: [value(read, results) for results in arms.values()] for name, read in MEASURES.items()}
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    body = [
        [arm, str(len(results)), *(cells[i] for cells in shown.values())]
        for i, (arm, results) in enumerate(arms.items())
    ]
    return table(["arm", "seeds", *shown], body)


def curves(group: str, arms: Mapping[str, Sequence[Result]]) -> list[str]:
    """Validation score by epoch, and each arm's gain over plain on the seeds that both have."""
    score = "mIoU" if group == "camvid" else "accuracy"
    lines, gains = [], []
    plain = {one["seed"]: _curve(one) for one in arms.get("plain", ())}
    for colour, (arm, results) in enumerate(arms.items()):
        own = {one["seed"]: _curve(one) for one in results}
        lines.append(Line(arm, _mean(list(own.values())), colour, marked=False))
        shared = [
            {epoch: value - plain[seed][epoch] for epoch, value in curve.items() if epoch in plain[seed]}
            for seed, curve in own.items()
            if seed in plain
        ]
        if arm != "plain" and shared and _mean(shared):
            gains.append(Line(arm, _mean(shared), colour, marked=False))
    charts = [line_chart("Learning curves", lines, "epoch", f"{score} (%)")] if any(one.points for one in lines) else []
    if gains:
        level = [Reference("plain", level=0.0)]
        charts.append(line_chart("Gain over plain at the same epoch", gains, "epoch", "points", references=level))
    return charts


def _curve(result: Result) -> dict[float, float]:
    return {row["epoch"]: row.get("top1", row.get("miou")) for row in result["curve"]}


def _mean(curves: Sequence[Mapping[float, float]]) -> list[tuple[float, float]]:
    """The mean of curves at the epochs that all have."""
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return [(epoch, fmean(curve[epoch] for curve in curves)) for epoch in sorted(common)]


def attention(arms: Mapping[str, Sequence[Result]]) -> list[str]:
    """For each arm, the entropy by layer at some points of training, as the mean over its seeds."""
    charts = []
    for arm, results in arms.items():
        rows = results[0]["attention"]
        if not rows:
            continue
        alike = [one["attention"] for one in results if len(one["attention"]) == len(rows)]
        chosen = sorted({round(i * (len(rows) - 1) / (POINTS - 1)) for i in range(POINTS)})
        lines = []
        for colour, i in enumerate(chosen):
            shares = zip(*(seed[i]["entropy_share"] for seed in alike), strict=True)
            points = list(zip(rows[i]["layer"], [100 * fmean(share) for share in shares], strict=True))
            lines.append(Line(f"epoch {rows[i]['epoch']:.0f}", points, colour))
        charts.append(line_chart(arm, lines, "layer", "entropy (% of its maximum)", y_range=(0.0, 100.0), whole_x=True))
    return charts


def collapse(arms: Mapping[str, Sequence[Result]]) -> str:
    """Which arms trained: the accuracy of every seed, and the epoch at which collapse was first seen."""
    body = []
    for arm, results in arms.items():
        for one in results:
            seen = [row["epoch"] for row in one["attention"] if collapsed_layers(row)]
            failed = bool(one["attention"]) and bool(collapsed_layers(one["attention"][-1]))
            state = "failed" if failed else "recovered" if seen else "trains"
            first = f"{seen[0]:.0f}" if seen else ""
            body.append([arm, str(one["seed"]), f"{one['clean']['accuracy']:.2f}", first, state])
    return table(["arm", "seed", "accuracy (%)", "collapse first seen (epoch)", "outcome"], body)
