"""What the documentation says a treatment costs, written from benchmarks/results/step-cost-cuda.json.

    python benchmarks/step_cost_report.py

draws docs/images/step-cost.svg, and writes the tables between the marks in docs/kernels.md and README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from vitfocus.core.files import atomic_path, write_text

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS, PICTURE = HERE / "results" / "step-cost-cuda.json", ROOT / "docs" / "images" / "step-cost.svg"
SETTINGS = {"eager": "eager", "compiled": "`torch.compile(model)`", "recorded": "recorded"}
#: Cases of the results, in the order of the tables.
CASES = {
    "deit_s-197": "DeiT-S, 197 tokens, batch 256",
    "deit_s-1025": "DeiT-S, 1025 tokens, batch 64",
    "deit_s-4097": "DeiT-S, 4097 tokens, batch 8",
    "vit_b-197": "ViT-B, 197 tokens, batch 128",
    "swin_t-3136": "Swin-T, 224 px, batch 128",
    "fan_s-196": "FAN-S-Hybrid, 224 px, batch 128",
    "vit_ti4-65": "ViT-Ti/4, 65 tokens, batch 128",
}
NAMES = {
    "plain-again": "plain, again",
    "cb": "CB",
    "tap": "TAP",
    "adl": "ADL",
    "adl-paper": "ADL, `variant=paper`",
    "tap+adl": "TAP + ADL",
    "all": "CB + TAP + ADL",
}
#: Targets of the design, by case, variant and setting.
TARGETS = {
    ("deit_s-197", "cb"): {"eager": 1.01, "compiled": 1.01, "recorded": 1.01},
    ("deit_s-197", "tap"): {"eager": 1.30, "compiled": 1.12, "recorded": 1.09},
    ("deit_s-197", "adl"): {"eager": 1.20, "compiled": 1.17, "recorded": 1.13},
    ("deit_s-197", "all"): {"eager": 1.5, "compiled": 1.25, "recorded": 1.20},
    ("deit_s-1025", "cb"): {"recorded": 1.01},
    ("deit_s-1025", "adl"): {"recorded": 1.30},
    ("deit_s-4097", "cb"): {"recorded": 1.01},
    ("deit_s-4097", "adl"): {"recorded": 1.65},
    ("vit_ti4-65", "tap"): {"recorded": 1.18},
    ("vit_ti4-65", "adl"): {"recorded": 1.09},
    ("vit_ti4-65", "tap+adl"): {"recorded": 1.25},
}
#: How the tables mark what is out of date or missing.
ITALICS = "Numbers in italics were measured with earlier kernels; a dash means not measured."
#: Setting and case drawn, with label, marker and colour.
DRAWN = {
    ("eager", "deit_s-197"): ("eager, 197 tokens", "o", "#0072B2"),
    ("compiled", "deit_s-197"): ("compiled, 197 tokens", "^", "#CC79A7"),
    ("recorded", "deit_s-197"): ("recorded, 197 tokens", "D", "#009E73"),
    ("recorded", "deit_s-1025"): ("recorded, 1025 tokens", "s", "#D55E00"),
}


def current(result: dict[str, Any], case: str, variant: str, setting: str) -> float | None:
    """A ratio for the picture; None if it was not measured, or with kernels that have changed since."""
    found = result["steps"].get(setting, {}).get(case, {}).get(variant)
    return None if found is None or "stale" in found else found.get("ratio")


def shown(result: dict[str, Any], case: str, variant: str, setting: str, key: str, form: str = "{:.2f}") -> str:
    """One number as the tables have it: in italics if it was measured with kernels that have changed since."""
    found = result["steps"].get(setting, {}).get(case, {}).get(variant, {})
    text = form.format(found[key]) if key in found else "–"
    return f"*{text}*" if "stale" in found and key in found else text


def times(result: dict[str, Any], case: str, variants: dict[str, str], targets: bool = True) -> Iterator[str]:
    """The rows of a table: the plain model in milliseconds, then each variant as a multiple of it."""
    yield f"| {CASES[case]} | " + " | ".join(SETTINGS.values()) + " |"
    yield "|---" * (len(SETTINGS) + 1) + "|"
    plain = [shown(result, case, "plain", setting, "ms", "{:.1f} ms") for setting in SETTINGS]
    yield f"| plain | {' | '.join(plain)} |"
    for variant, name in variants.items():
        row = [shown(result, case, variant, setting, "ratio") for setting in SETTINGS]
        if set(row) != {"–"}:
            goals = TARGETS.get((case, variant), {}) if targets else {}
            for place, setting in enumerate(SETTINGS):
                if setting in goals and row[place] != "–":
                    row[place] += f" ({goals[setting]:.2f})"
            yield f"| {name} | " + " | ".join(row) + " |"


def memory(result: dict[str, Any]) -> Iterator[str]:
    """Peak memory as a multiple of the plain model's: one row per treatment, one column per case and setting."""
    yield "| peak memory, × plain | CB | TAP | ADL | CB + TAP + ADL |"
    yield "|---|---|---|---|---|"
    for case in CASES:
        for setting in SETTINGS:
            row = [shown(result, case, name, setting, "memory_ratio") for name in ("cb", "tap", "adl", "all")]
            if set(row) != {"–"}:
                yield f"| {CASES[case].rsplit(',', 1)[0]}, {SETTINGS[setting]} | " + " | ".join(row) + " |"


def first_calls(result: dict[str, Any]) -> str:
    """A sentence about the first call."""
    stale = result.get("stale_first_calls", [])
    found = {NAMES[name]: s for name, s in result.get("first_call_s", {}).items() if name not in stale}
    if not found:
        return "The latency of the first call was not measured with these kernels."
    listed = ", ".join(f"{seconds:.1f} s with {name}" for name, seconds in found.items())
    return (
        f"The first eager step with an empty Triton cache takes longer by {listed}, because the kernels are compiled."
    )


def texts(result: dict[str, Any]) -> dict[Path, str]:
    """The text between the marks of each file."""
    about = f"NVIDIA {result['device'].removeprefix('NVIDIA ')}, torch {result['versions']['torch'].split('+')[0]}"
    about += f", Triton {result['versions']['triton']}"
    parts = [f"{about}. Times of a training step as multiples of the plain model's, targets in brackets.\n{ITALICS}"]
    for case in CASES:
        rows = list(times(result, case, NAMES))
        treated = any(not row.startswith("| plain") for row in rows[2:])
        parts += ["\n".join(rows)] if treated else []
    parts += ["\n".join(memory(result)), first_calls(result)]
    short = {name: NAMES[name] for name in ("plain-again", "cb", "tap", "adl", "all")}
    table = "\n".join(times(result, "deit_s-197", short, targets=False))
    return {
        ROOT / "docs" / "kernels.md": "\n\n".join(parts),
        ROOT / "README.md": f"{about}, bf16.\n{ITALICS}\n\n{table}",
    }


MARKS = "<!-- step cost: written by `step_cost_report.py` -->", "<!-- end of the step cost -->"


def updated(path: Path, text: str) -> str:
    """A file's content with the text between its marks."""
    begin, end = MARKS
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
    content, count = pattern.subn(lambda _: f"{begin}\n\n{text}\n\n{end}", path.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"{path} needs the marks {begin} and {end} once.")
    return content


def draw(result: dict[str, Any]) -> Figure:
    """One row per treatment, one mark per setting and size of DeiT-S."""
    figure = Figure(figsize=(7.2, 3.0), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    variants = [name for name in NAMES if name not in ("adl-paper", "tap+adl")]
    for place, ((setting, case), (label, marker, colour)) in enumerate(DRAWN.items()):
        shift = (place - (len(DRAWN) - 1) / 2) * 0.14
        ratios = [current(result, case, name, setting) for name in variants]
        found = [(ratio, index + shift) for index, ratio in enumerate(ratios) if ratio is not None]
        if found:
            axes.plot(*zip(*found, strict=True), marker, color=colour, label=label, markersize=5.5)
    axes.set_xscale("log")
    ticks = [1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8]
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
    result = json.loads(RESULTS.read_text())
    for path, text in texts(result).items():
        write_text(path, updated(path, text))
        print(f"updated: {path}")
    # Without a fixed salt, every run would give the elements other ids.
    with atomic_path(PICTURE) as path, matplotlib.rc_context({"svg.hashsalt": "step-cost"}):
        draw(result).savefig(path, format="svg", metadata={"Date": None})
    print(f"written: {PICTURE}")


if __name__ == "__main__":
    main()
