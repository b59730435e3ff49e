"""The scores of the tasks' smoke recipes on the built-in data, and the CPU time of each complete run.

    python benchmarks/smoke_tasks.py                       # all four, about eight minutes
    python benchmarks/smoke_tasks.py shapes_detect

Each run is one `vitfocus train RECIPE` in a separate process with one thread: threads that wait for each other use CPU
time too, and change the order of summation. Results go to benchmarks/results/smoke-tasks-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPES = ("shapes", "shapes_segment", "shapes_detect", "shapes_answer")
RESULTS = Path(__file__).parent / "results" / "smoke-tasks-cpu.json"


def processor_seconds() -> float:
    """What finished child processes have taken so far, on all cores together."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(recipe: str) -> dict[str, Any]:
    """Train a recipe; its last scores, and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        before = processor_seconds()
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "vitfocus", "train", recipe, "device=cpu", "--out", str(out)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        last = json.loads((out / "results.json").read_text())["last"]
    scores = {key: value for key, value in last.items() if isinstance(value, float)}
    return {"processor_seconds": round(processor_seconds() - before), "scores": scores}


def main() -> None:
    from vitfocus.core.environment import versions

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_intermixed_args()
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    runs = result.get("runs", {})
    for recipe in args.recipes:
        runs[recipe] = run(recipe)
        scores = ", ".join(f"{key} {value:.3f}" for key, value in runs[recipe]["scores"].items())
        print(f"{recipe}: {runs[recipe]['processor_seconds']} s of CPU time; {scores}", flush=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    result = {"cores": cores, "machine": platform.machine(), "versions": versions("accelerate", "python"), "runs": runs}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
