"""The gate: find a recipe with which a plain ViT-S/4 reaches the paper's accuracy on CIFAR-100 (74.73 %, Table S4).

    python studies/cifar100/gate.py --data DIR pilot [NAME ...]     # candidates, 5,000 training images held out
    python studies/cifar100/gate.py --data DIR final NAME           # one candidate on all training images, and tested
    python studies/cifar100/gate.py table                           # what has been run

Candidates are compared on the plain model alone, by validation accuracy at the end of a complete schedule. `final` also
logs the test accuracy every 5 epochs; it reports the last one, and nothing is chosen by the others.
Each run is one process and leaves one JSON file with its learning curve in results/gate.
Runs that were interrupted resume from their checkpoints in --work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mosaics

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gate"
#: The paper's accuracy of the plain model (CB supplement, Table S4).
TARGET = 74.73
HOLDOUT = 5_000
PILOT_EPOCHS, FINAL_EPOCHS = 100, 200
#: Keys that change in the shipped `cifar100` recipe.
SHARED = ("spec=deit_small_patch16_224", "compile=blocks", "evaluate_every=5", "checkpoint_minutes=1", "keep=1")
CANDIDATES: dict[str, tuple[str, ...]] = {
    "adamw-b256": ("name=adamw", "lr=5e-4", "batch=256", "clip=1", "weight_decay=0.05"),
    "muon-1e-3": ("name=muon", "lr=1e-3", "batch=512", "weight_decay=0.05"),
    "muon-2e-3": ("name=muon", "lr=2e-3", "batch=512", "weight_decay=0.05"),
    "muon-4e-3": ("name=muon", "lr=4e-3", "batch=512", "weight_decay=0.05"),
    "muon-2e-3-b256": ("name=muon", "lr=2e-3", "batch=256", "weight_decay=0.05"),
    "muon-2e-3-wd": ("name=muon", "lr=2e-3", "batch=512", "weight_decay=0.25"),
}


def overrides(name: str, kind: str, epochs: float, seed: int, data: Path, work: Path) -> list[str]:
    """The recipe's keys of one run."""
    holdout = HOLDOUT if kind == "pilot" else 0
    return [
        *SHARED,
        *CANDIDATES[name],
        f"epochs={epochs}",
        f"seed={seed}",
        f"holdout={holdout}",
        *mosaics.data_keys(data, work),
    ]


def run_one(name: str, kind: str, epochs: float, seed: int, data: Path, work: Path) -> None:
    """Train in this process and write the run's JSON."""
    from vitfocus.core.files import write_text
    from vitfocus.train import load_recipe, train

    keys = overrides(name, kind, epochs, seed, data, work)
    place = f"{kind}-{name}-{epochs:g}-seed{seed}"
    results = train(load_recipe("cifar100", keys), work / place, resume="auto")
    if not results["finished"]:
        sys.exit(f"{place} stopped at step {results['steps']}; run the command again to resume it.")
    rows = [json.loads(line) for line in (work / place / "metrics.jsonl").read_text().splitlines()]
    content = {
        "kind": kind,
        "candidate": name,
        "overrides": [key for key in keys if not key.startswith("root=")],
        "epochs": epochs,
        "seed": seed,
        "accuracy": 100 * results["last"]["top1"],
        "measured_on": "5,000 held-out training images" if kind == "pilot" else "the 10,000 test images",
        "curve": [
            {"epoch": row["epoch"], "top1": round(100 * row["top1"], 3)} for row in rows if row["kind"] != "train"
        ],
        "loss": [{"step": row["step"], "loss": round(row["loss"], 4)} for row in rows if row["kind"] == "train"][::10],
        "seconds": results["seconds"],
        "images_per_second": results["images_per_second"],
        "device": results["device"],
        "versions": results["versions"],
    }
    write_text(RESULTS / f"{place}.json", json.dumps(content, indent=1) + "\n")


def run_many(script: str, jobs: Sequence[Sequence[str]], at_once: int, log: Path) -> None:
    """Run jobs as processes, some at a time: one compiles while another trains."""
    waiting, running = list(jobs), []
    log.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            name = "-".join(part.strip("-").replace("/", "-") for part in job[:2])
            name += f"-{job[-1]}" if job[-2] == "--seeds" else ""
            print("begun:", name, flush=True)
            with (log / f"{name}.log").open("w") as output:
                running.append((name, subprocess.Popen([sys.executable, script, *job], stdout=output, stderr=output)))
        time.sleep(1)
        for entry in [entry for entry in running if entry[1].poll() is not None]:
            running.remove(entry)
            print("ended:", entry[0], "exit code", entry[1].returncode, flush=True)


def table() -> str:
    """Every finished run, best first."""
    found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    lines = [f"{'run':<34}{'accuracy':>9}  measured on"]
    for run in sorted(found, key=lambda run: -run["accuracy"]):
        title = f"{run['kind']} {run['candidate']}, {run['epochs']:g} epochs, seed {run['seed']}"
        lines.append(f"{title:<46}{run['accuracy']:6.2f} %  {run['measured_on']}; {run['seconds']:.0f} s")
    return "\n".join([*lines, f"target: {TARGET} % on the test images"])


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pilot", "final", "table"))
    parser.add_argument("names", nargs="*", help=f"candidates: {', '.join(CANDIDATES)}")
    parser.add_argument("--data", type=Path, default=Path("data/cifar100"))
    parser.add_argument("--work", type=Path, default=Path("runs/gate"))
    parser.add_argument("--epochs", type=float, help=f"default: {PILOT_EPOCHS} (pilot), {FINAL_EPOCHS} (final)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--at-once", type=int, default=2, help="processes at a time")
    parser.add_argument("--here", action="store_true", help="run in this process; one candidate, one seed")
    args = parser.parse_intermixed_args()  # names may follow options
    if args.command == "table":
        print(table())
        return
    names = args.names or list(CANDIDATES)
    if unknown := [name for name in names if name not in CANDIDATES]:
        parser.error(f"there is no candidate {unknown[0]!r}: choose from {', '.join(CANDIDATES)}")
    epochs = args.epochs or (PILOT_EPOCHS if args.command == "pilot" else FINAL_EPOCHS)
    if args.here:
        run_one(names[0], args.command, epochs, args.seeds[0], args.data, args.work)
        return
    common = ["--here", "--epochs", f"{epochs:g}", "--data", str(args.data.resolve()), "--work", str(args.work)]
    jobs = [[args.command, name, *common, "--seeds", str(seed)] for name in names for seed in args.seeds]
    from mps import shared_gpu

    with shared_gpu(args.at_once > 1):
        run_many(__file__, jobs, args.at_once, args.work / "logs")
    print(table())


if __name__ == "__main__":
    main()
