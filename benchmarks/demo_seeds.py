"""Whether the demo's training runs end in the same way with other seeds.

    python benchmarks/demo_seeds.py --seeds 0 1 2 --models high-rate plain treated

Trains the models of `vitfocus demo` for each seed, as the demo does, and diagnoses them on the same 64 images. A run
that was interrupted resumes. Prints the accuracy on the 2,000 validation images, entropy as a share of its maximum and
overfocus by layer, and the layers whose attention has collapsed. The result goes to benchmarks/results/demo-seeds.json,
beside those of other CPUs, whose rounding differs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from diversity_cpu import processor

import vitfocus as vf
from vitfocus.cli.demo import arms, recipe_changes
from vitfocus.core.environment import versions
from vitfocus.core.files import write_text
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.train import train
from vitfocus.train.log import by_layer, collapsed_layers

RESULTS = Path(__file__).parent / "results" / "demo-seeds.json"


def outcome(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train one model with one seed, and diagnose it."""
    spec, rate = arms()[name]
    results = train("shapes", out=folder, resume="auto", overrides=recipe_changes(spec, rate, seed=seed))
    read = by_layer(vf.diagnose(vf.load(folder / "model"), shapes_batch(range(64), split="val", size=32)[0]))
    found = {"seed": seed, "model": name, "spec": spec, "lr": rate, "top1": results["last"]["top1"]}
    return found | {"collapsed_layers": collapsed_layers(read), **read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--models", nargs="+", choices=list(arms()), default=list(arms()))
    parser.add_argument("--out", type=Path, default=Path("runs/demo-seeds"))
    args = parser.parse_args()
    runs = [outcome(name, seed, args.out / str(seed) / name) for seed in args.seeds for name in args.models]
    mine = {"cpu": processor(), "versions": versions("python"), "runs": runs}
    others = [one for one in json.loads(RESULTS.read_text()) if one["cpu"] != mine["cpu"]]
    write_text(RESULTS, json.dumps([*others, mine], indent=1) + "\n")
    for run in runs:
        print(f"seed {run['seed']}, {run['model']}: top-1 {run['top1']:.2%}, collapsed: {run['collapsed_layers']}, "
              f"share of the largest entropy {run['entropy_share']}, overfocus {run['overfocus']}")  # fmt: skip


if __name__ == "__main__":
    main()
