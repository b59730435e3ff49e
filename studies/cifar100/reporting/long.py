"""The page of the long study: how far it went, comparisons, all measures by arm, gain by epoch, attention by depth.

`write_report` writes report.md and SVG files into the folder of results. It shows what is finished and nothing else;
the number of seeds is beside every mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from reporting.intervals import estimate
from reporting.pictures import beside
from reporting.readme import table
from reporting.sections.limits import KEPT_IMAGES
from vitfocus.core.files import write_text
from vitfocus.report.charts import Line, Reference, line_chart
from vitfocus.report.page import minus
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
#: The same of attention at the end, as means over layers.
READINGS: dict[str, Callable[[Result], float]] = {
    "entropy (nats)": lambda one: fmean(one["reading"]["entropy"]),
    "overfocus (%)": lambda one: 100 * fmean(one["reading"]["overfocus"]),
    "head similarity": lambda one: fmean(one["reading"]["head_similarity"]),
    "diagonal share (%)": lambda one: 100 * fmean(one["reading"]["diagonal"]),
    "stability under noise": lambda one: one["stability"]["gaussian_noise"]["mean"],
}
#: Settings of a training step whose cost is measured: as the study trains, and as a user's own loop has it.
SETTINGS = {
    "recorded": "recorded by `vitfocus train`",
    "compiled": "own loop, blocks compiled",
    "eager": "own loop, eager",
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


def write_report(
    folder: Path,
    runs: Sequence[Planned],
    found: Results,
    rows: Sequence[Mapping[str, Any]],
    costs: Mapping[str, Any] | None = None,
) -> Path:
    """Write report.md and its figures.

    Args:
        folder: The folder of results.
        runs: All planned runs.
        found: The finished ones, by group, arm and seed.
        rows: The analysed comparisons of `tiers.analyse`.
        costs: The content of cost.json, which `tiers.py cost` writes.

    Returns:
        The path of report.md.
    """
    parts = ["# The long study", how_far(runs, found), "## Comparisons", comparisons(rows), RULE]
    parts.append(f"{KEPT_IMAGES} On CamVid, both are all images.")
    for group in dict.fromkeys(run.group for run in runs):
        arms = list(dict.fromkeys(run.arm for run in runs if run.group == group))
        here = {arm: [one for (g, a, _), one in sorted(found.items()) if (g, a) == (group, arm)] for arm in arms}
        here = {arm: results for arm, results in here.items() if results}
        if not here:
            continue
        parts += [f"## {TITLES.get(group, group)}", measures(here, MEASURES)]
        if any("reading" in one and "stability" in one for results in here.values() for one in results):
            parts += ["Attention of the final models, means over layers:", measures(here, READINGS)]
        parts += step_costs(group, costs or {})
        figures = [("training", "Learning curves and gain over plain", curves(group, here))]
        figures += [("attention", "Entropy of attention by depth during training", attention(here, "entropy_share"))]
        if group != "collapse":
            figures += [("overfocus", "Overfocus by depth during training", attention(here, "overfocus"))]
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
        groups.append(f"{sum(key in found for key in planned)} of {len(planned)} ({TITLES.get(group, group)})")
    return "Finished runs: " + ", ".join(groups) + ". `tiers.py report` writes this page from the result files."


RULE = (
    "Differences are those of the additive model arm + seed over all arms of the group that have the same seeds, with "
    "(arms − 1) × (seeds − 1) degrees of freedom (d.f.). Higher and lower: significant after Holm's correction at 5 % "
    "over all comparisons of the plan, run or not. Within ±0.5 points: all planned seeds are finished and the 90 % "
    "interval (not corrected) lies between these bounds. Undecided: neither. With one common seed there is neither an "
    "interval nor a claim."
)


def comparisons(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every comparison with its baseline and interval."""
    body = []
    for row in rows:
        plain = f"{row['plain']:.2f}" if "plain" in row else ""
        effect, freedom, p_value = difference(row), "", ""
        if "difference" in row:
            freedom, p_value = (
                str(row["degrees_of_freedom"]),
                f"{row['p_value']:.4f}" if row["p_value"] >= 0.0001 else "< 0.0001",
            )
        body.append(
            [
                row["claim"],
                row["group"],
                plain,
                effect,
                f"{row['seeds']} of {row['planned']}",
                freedom,
                p_value,
                row["outcome"],
            ]
        )
    headings = ["claim", "group", "plain", "difference [95 % interval]", "seeds", "d.f.", "p", "outcome"]
    return table(headings, body)


def difference(row: Mapping[str, Any]) -> str:
    """A difference with its interval; empty if there is none.

    >>> difference({"difference": 1.0, "interval": (-0.5, 2.5)})
    '+1.00 [−0.50, +2.50]'
    """
    if "difference" not in row:
        return ""
    low, high = row["interval"]
    return minus(f"{row['difference']:+.2f} [{low:+.2f}, {high:+.2f}]")


def step_costs(group: str, costs: Mapping[str, Any]) -> list[str]:
    """The training step of each arm as a multiple of plain's, in every setting that was measured."""
    if not costs.get(group):
        return []
    settings = {"recorded": costs[group]} | {
        name: costs[f"{group}, {name}"] for name in SETTINGS if f"{group}, {name}" in costs
    }
    body = [
        [
            arm,
            *(f"{arms[arm]['ms']:.1f} ({arms[arm]['ratio']:.2f})" if arm in arms else "" for arms in settings.values()),
        ]
        for arm in costs[group]
    ]
    title = f"A training step alone on {costs['device']}, in ms (× plain):"
    return [title, table(["arm", *(SETTINGS[name] for name in settings)], body)]


def measures(arms: Mapping[str, Sequence[Result]], columns: Mapping[str, Callable[[Result], float]]) -> str:
    """Some measures of the arms of a group: means over seeds with 95 % intervals."""

    def value(read: Callable[[Result], float], results: Sequence[Result]) -> str:
        try:
            found = estimate(read(one) for one in results)
        except KeyError:
            return ""
        between = f" [{found.interval[0]:.2f}, {found.interval[1]:.2f}]" if found.interval else ""
        return f"{found.mean:.2f}{between}"

    found = {name: [value(read, results) for results in arms.values()] for name, read in columns.items()}
    shown = {name: cells for name, cells in found.items() if any(cells)}
    body = [
        [arm, str(len(results)), *(cells[i] for cells in shown.values())]
        for i, (arm, results) in enumerate(arms.items())
    ]
    return table(["arm", "seeds", *shown], body)


def curves(group: str, arms: Mapping[str, Sequence[Result]]) -> list[str]:
    """Validation score by epoch, and each arm's gain over plain on the seeds that both have, if as many epochs."""
    score = "mIoU" if group == "camvid" else "accuracy"
    lines, gains = [], []
    plain = {one["seed"]: one for one in arms.get("plain", ())}
    for colour, (arm, results) in enumerate(arms.items()):
        lines.append(Line(_counted(arm, len(results)), _mean([_curve(one) for one in results]), colour, marked=False))
        pairs = [(one, plain[one["seed"]]) for one in results if one["seed"] in plain]
        shared = [
            {epoch: value - _curve(base)[epoch] for epoch, value in _curve(one).items() if epoch in _curve(base)}
            for one, base in pairs
            if abs(one.get("epochs", 0) - base.get("epochs", 0)) < 0.5
        ]
        if arm != "plain" and (points := _mean(shared)):
            band = [(x, min(one[x] for one in shared), max(one[x] for one in shared)) for x, _ in points]
            gains.append(
                Line(_counted(arm, len(shared)), points, colour, band[: len(band) * (len(shared) > 1)], marked=False)
            )
    charts = [line_chart("Learning curves", lines, "epoch", f"{score} (%)")] if any(one.points for one in lines) else []
    if gains:
        level = [Reference("plain", level=0.0)]
        axis = "points (mean; range of seeds)" if any(one.band for one in gains) else "points"
        charts.append(line_chart("Gain over plain at the same epoch", gains, "epoch", axis, references=level))
    return charts


def _counted(arm: str, seeds: int) -> str:
    """An arm with its number of seeds."""
    return f"{arm} ({seeds} seed{'s' if seeds > 1 else ''})"


def _curve(result: Result) -> dict[float, float]:
    return {row["epoch"]: row.get("top1", row.get("miou")) for row in result["curve"]}


def _mean(curves: Sequence[Mapping[float, float]]) -> list[tuple[float, float]]:
    """The mean of curves at the epochs that all have."""
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return [(epoch, fmean(curve[epoch] for curve in curves)) for epoch in sorted(common)]


#: What is drawn of a row of readings: the label of the axis.
AXES = {"entropy_share": "entropy (% of its maximum)", "overfocus": "attention on the top 5 % (%)"}


def attention(arms: Mapping[str, Sequence[Result]], key: str) -> list[str]:
    """For each arm, a reading by layer at some points of training, as the mean over its seeds."""
    charts = []
    for arm, results in arms.items():
        rows = results[0]["attention"]
        if not rows:
            continue
        alike = [one["attention"] for one in results if len(one["attention"]) == len(rows)]
        chosen = sorted({round(i * (len(rows) - 1) / (POINTS - 1)) for i in range(POINTS)})
        lines = []
        for colour, i in enumerate(chosen):
            shares = zip(*(seed[i][key] for seed in alike), strict=True)
            points = list(zip(rows[i]["layer"], [100 * fmean(share) for share in shares], strict=True))
            lines.append(Line(f"epoch {rows[i]['epoch']:.0f}", points, colour))
        title = _counted(arm, len(alike))
        if "reading" in results[0] and "fgsm" not in results[0]:  # what these runs are about: which arms train
            scores = ", ".join(f"{one['clean']['accuracy']:.1f}" for one in results)
            title = f"{arm}: {scores} %, {_states(results)}"
        charts.append(line_chart(title, lines, "layer", AXES[key], y_range=(0.0, 100.0), whole_x=True))
    return charts


def collapse(arms: Mapping[str, Sequence[Result]]) -> str:
    """Which arms trained: the accuracy of every seed, and the epoch at which collapse was first seen."""
    body = []
    for arm, results in arms.items():
        for one in results:
            seen = [row["epoch"] for row in one["attention"] if collapsed_layers(row)]
            first = f"{seen[0]:.0f}" if seen else ""
            body.append([arm, str(one["seed"]), f"{one['clean']['accuracy']:.2f}", first, state(one)])
    return table(["arm", "seed", "accuracy (%)", "collapse first seen (epoch)", "outcome"], body)


def state(one: Result) -> str:
    """How a run's attention ended."""
    if not one["attention"] or not any(collapsed_layers(row) for row in one["attention"]):
        return "trains"
    return "failed" if collapsed_layers(one["attention"][-1]) else "recovered"


def _states(results: Sequence[Result]) -> str:
    return " and ".join(dict.fromkeys(state(one) for one in results))
