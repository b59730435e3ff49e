"""The cost of the treatments on a CPU: a training step of the demo's model with each, relative to the plain model's.

    python benchmarks/step_cost_cpu.py [--rounds 40] [--note "what else ran"]

The model, batch and optimiser are those of the recipe `shapes`, with images of the data set, float32, one thread. The
diversification loss is active (`_activity.py`); its value and the share of entries above the threshold are printed.
Models alternate step by step in one process; a ratio is the median over rounds of consecutive CPU times. `plain-again`
is a second plain model and shows the noise. Memory is the peak of what a step allocates. Writes
benchmarks/results/step-cost-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _activity import activate_diversity, share_above
from diversity_cpu import peak_megabytes, processor
from torch.nn import functional as F

import vitfocus as vf
from vitfocus.core.files import write_text
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.train import load_recipe
from vitfocus.treatments import TREATMENTS

VARIANTS = {
    "plain": "",
    "plain-again": "",
    "cbs": "cbs",
    "cb": "cb",
    "tap": "tap",
    "adl": "adl(threshold=1.0)",
    "all": "cbs+tap+adl(threshold=1.0)",
}
#: Every other registered treatment by its name; a uniform head has other weights to activate, and test-time registers
#: need the neurons of a trained model.
VARIANTS |= {name: name for name in TREATMENTS if name not in ("cb", "tap", "adl", "uniform", "ttr")}
RESULTS = Path(__file__).parent / "results" / "step-cost-cpu.json"


class Step:
    """A training step of a variant; a call returns its CPU time in seconds."""

    def __init__(self, variant: str) -> None:
        recipe = load_recipe("shapes")
        torch.manual_seed(0)
        spec = "+".join(filter(None, [recipe.model.spec, VARIANTS[variant]]))
        images, self.labels = shapes_batch(range(recipe.data.batch), split="train", size=recipe.data.size)[:2]
        self.images = images.float() / 127.5 - 1
        sizes: dict[str, Any] = {"num_classes": int(self.labels.max()) + 1, "img_size": recipe.data.size}
        self.model = vf.create_model(spec, **sizes, **recipe.model.arguments).train()
        activate_diversity(self.model, self.images)
        self.share = share_above(self.model, self.images)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.extra = 0.0

    def __call__(self) -> float:
        start = time.process_time()
        loss = F.cross_entropy(self.model(self.images), self.labels)
        extra = vf.auxiliary_loss(self.model)
        (loss + extra).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        taken = time.process_time() - start
        self.extra = float(extra.detach())
        return taken


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = {name: Step(name) for name in dict.fromkeys(["plain", *args.variants])}
    for step in steps.values():
        step(), step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            times[name].append(step())
    memory = {name: peak_megabytes(step) for name, step in steps.items()}
    rows = {}
    for name, step in steps.items():
        ratios = [mine / plain for mine, plain in zip(times[name], times["plain"], strict=True)]
        row = {"ms": 1e3 * statistics.median(times[name]), "ratio": statistics.median(ratios)}
        row |= {"mb": memory[name], "memory": memory[name] / memory["plain"]}
        if "adl" in VARIANTS[name]:
            row |= {"loss": step.extra, "share": step.share}
            if not (step.extra >= 0.1 and step.share >= 0.2):
                raise SystemExit(f"{name}: inactive, the loss is {step.extra:.3f}, the share {step.share:.3f}.")
        rows[name] = {key: round(value, 3) for key, value in row.items()}
        print(f"{name:<12}", "  ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    record = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": processor(), "cores": os.cpu_count(), "threads_used": 1},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "note": args.note,
        "rounds": args.rounds,
        "steps": rows,
    }
    write_text(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
