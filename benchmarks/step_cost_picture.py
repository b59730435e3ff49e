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
#: Setting and case of the results, with label, marker and colour.
CASES = {
    ("eager", "deit_s-197"): ("eager, 197 tokens", "o", "#0072B2"),
    ("eager", "deit_s-1025"): ("eager, 1025 tokens", "s", "#D55E00"),
    ("recorded", "deit_s-197"): ("recorded, 197 tokens", "D", "#009E73"),
}
NAMES = {"plain-again": "plain, again", "cb": "CB", "tap": "TAP", "adl": "ADL", "all": "CB + TAP + ADL"}


def draw(result: dict[str, Any]) -> Figure:
    """One row per treatment, one mark per setting and size of DeiT-S."""
    figure = Figure(figsize=(7.2, 3.0), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    variants = list(NAMES)
    for place, ((setting, case), (label, marker, colour)) in enumerate(CASES.items()):
        row, shift = result["steps"][setting][case], (place - (len(CASES) - 1) / 2) * 0.16
        found = [(row[name]["ratio"], index + shift) for index, name in enumerate(variants) if name in row]
        axes.plot(*zip(*found, strict=True), marker, color=colour, label=label, markersize=5.5)
    axes.set_xscale("log")
    ticks = [1, 1.1, 1.2, 1.4, 1.6, 1.8]
    axes.set_xticks(ticks, [f"{tick:g} ×" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(variants)), [NAMES[name] for name in variants])
    axes.set_ylim(len(variants) - 0.4, -0.6)
    axes.axvline(1, color="#24292f", linewidth=0.8)
    axes.grid(axis="x", color="#d0d7de", linewidth=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.supxlabel(f"time of a training step of DeiT-S over the plain model's, {result['device']}", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="center right")
    return figure


def main() -> None:
    figure = draw(json.loads(RESULTS.read_text()))
    with atomic_path(PICTURE) as path:
        figure.savefig(path, format="svg", metadata={"Date": None})
    print(f"written: {PICTURE}")


if __name__ == "__main__":
    main()
