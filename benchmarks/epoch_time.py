"""Seconds an epoch of CIFAR-100 takes, 50,000 images of 32 px, by the engine as the cifar100 recipe runs it.

    python benchmarks/epoch_time.py                    # ViT-Ti/4 and ViT-S/4, batches of 512 and 1024; needs a GPU

Everything is in the time: augmentation on the device, forward, backward, clipping, optimiser, logging; the step is
compiled, block by block or with --whole as one program, and recorded as one CUDA graph. The images are drawn, for speed
does not depend on what they show. Each case gets ready in a process of its own; then one at a time has the device.
Results go to benchmarks/results/epoch-time-cuda.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _turns import Turns

CASES = {
    f"{name}, batch {batch}": (spec, batch)
    for name, spec in (("ViT-Ti/4", "deit_tiny_patch16_224"), ("ViT-S/4", "deit_small_patch16_224"))
    for batch in (512, 1024)
}
IMAGES = 50_000
DRAWN = 8_192  # as many as are drawn: a step takes as long whichever images it meets
RESULTS = Path(__file__).parent / "results" / "epoch-time-cuda.json"


def prepare(spec: str, batch: int, compiled: str) -> tuple[None, Callable[[int], float]]:
    """A run whose step is compiled and recorded, and how to time it."""
    from vitfocus.train import load_recipe
    from vitfocus.train.run import assemble_run
    from vitfocus.train.signals import StopWish

    overrides = ["source=shapes", f"train_length={DRAWN}", "val_length=100", f"batch={batch}", f"spec={spec}"]
    recipe = load_recipe(
        "cifar100", [*overrides, "model.arguments.num_classes=100", "checkpoint_minutes=0", f"compile={compiled}"]
    )
    folder = tempfile.TemporaryDirectory()
    engine, wish = assemble_run(recipe, folder.name), StopWish()
    parts = engine.begin(stop=10_000)
    for _ in range(10):
        engine.one_step(parts)
    torch.cuda.synchronize()

    def seconds(steps: int, held: Any = folder) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            engine.one_step(parts)
            engine.after_step(0, wish)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps

    return None, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--whole", action="store_true", help="compile a model as one program")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("epoch_time measures a GPU, and there is no CUDA device here; skipped.")
        return
    from vitfocus.train.results import device_name, versions

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")
    compiled = "yes" if args.whole else "blocks"
    turns = Turns(prepare, {name: (*case, compiled) for name, case in CASES.items()})
    best: dict[str, float] = {}
    for _ in range(args.rounds):
        for name in turns.said:
            batch = CASES[name][1]
            taken = turns.seconds(name, max(20, 15_000 // batch)) * IMAGES / batch
            best[name] = min(best.get(name, float("inf")), taken)
    turns.close()
    for name, seconds in best.items():
        print(f"{name:<24}{seconds:6.2f} s an epoch")
    result = {
        "seconds_an_epoch": best,
        "compiled": compiled,
        "device": device_name(torch.device("cuda")),
        "versions": versions(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
