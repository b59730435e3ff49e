"""Draws docs/images/step-cost.svg from benchmarks/results/step-cost-cuda.json: what each treatment costs a step.

python benchmarks/step_cost_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vitfocus.core.files import atomic_path

HERE = Path(__file__).parent
RESULTS, PICTURE = HERE / "results" / "step-cost-cuda.json", HERE.parent / "docs" / "images" / "step-cost.svg"
CASES = {
    "deit-197": ("DeiT-S, 197 tokens", "o", "#0072B2"),
    "deit-1025": ("DeiT-S, 1025 tokens", "s", "#D55E00"),
    "deit-4097": ("DeiT-S, 4097 tokens", "D", "#009E73"),
    "swin-t": ("Swin-T", "^", "#CC79A7"),
    "fan-s-hybrid": ("FAN-S-Hybrid", "v", "#56606b"),
}
NAMES = {
    "cb": "CB",
    "tap": "TAP",
    "adl": "ADL",
    "adl-256": "ADL, 256 rows",
    "all": "CB + TAP + ADL, 256 rows",
    "released-tap": "TAP as released",
    "released-adl": "ADL as released",
}


def draw(result: dict[str, Any]) -> Figure:
    """One row a treatment, one mark a model; a tick where the target is. What blocks lack is from whole programs."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    steps = {case: result["steps_as_one_program"].get(case, {}) | result["steps"].get(case, {}) for case in CASES}
    steps = {case: row for case, row in steps.items() if row}
    variants = [name for name in NAMES if any(name in row for row in steps.values())]
    for place, (case, row) in enumerate(steps.items()):
        label, marker, colour = CASES[case]
        shift = (place - (len(steps) - 1) / 2) * 0.16
        found = [(row[name]["ratio"], index + shift) for index, name in enumerate(variants) if name in row]
        axes.plot(*zip(*found, strict=True), marker, color=colour, label=label, markersize=5.5)
        if case.startswith("deit"):
            which = list(CASES).index(case)
            for index, name in enumerate(variants):
                if name in result["targets"]:
                    axes.plot(result["targets"][name][which], index + shift, "|", color=colour, markersize=9)
    axes.set_xscale("log")
    ticks = [1, 1.2, 1.5, 2, 3]
    axes.set_xticks(ticks, [f"{tick:g} ×" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(variants)), [NAMES[name] for name in variants])
    axes.set_ylim(len(variants) - 0.4, -0.6)
    axes.axvline(1, color="#24292f", linewidth=0.8)
    axes.grid(axis="x", color="#d0d7de", linewidth=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.supxlabel(
        f"time of a training step over the plain model's, {result['device']}; upright bars: targets", fontsize=9
    )
    axes.legend(fontsize=8, frameon=False, loc="center right")
    return figure


def main() -> None:
    figure = draw(json.loads(RESULTS.read_text()))
    with atomic_path(PICTURE) as path:
        figure.savefig(path, format="svg", metadata={"Date": None})
    print(f"written: {PICTURE}")


if __name__ == "__main__":
    main()
