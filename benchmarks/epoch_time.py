"""Seconds an epoch of CIFAR-100 takes, 50,000 images of 32 px, by the engine as the cifar100 recipe runs it.

    python benchmarks/epoch_time.py                    # ViT-Ti/4 and ViT-S/4, batches of 512 and 1024; needs a GPU

Everything is in the time: augmentation on the device, forward, backward, clipping, optimiser, logging; the step is
compiled and recorded as one CUDA graph. The images are drawn, for speed does not depend on what they show. Each case
gets ready in a process of its own; then one at a time has the device. Results go to
benchmarks/results/epoch-time-cuda.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

CASES = {
    f"{name}, batch {batch}": (spec, batch)
    for name, spec in (("ViT-Ti/4", "deit_tiny_patch16_224"), ("ViT-S/4", "deit_small_patch16_224"))
    for batch in (512, 1024)
}
IMAGES = 50_000
RESULTS = Path(__file__).parent / "results" / "epoch-time-cuda.json"


def serve(spec: str, batch: int, pipe: Any) -> None:
    """Get a run ready, then time steps on request."""
    from vitfocus.train import load_recipe
    from vitfocus.train.run import assemble_run
    from vitfocus.train.signals import StopWish

    overrides = ["source=shapes", f"train_length={IMAGES}", "val_length=100", f"batch={batch}", f"spec={spec}"]
    recipe = load_recipe("cifar100", [*overrides, "model.arguments.num_classes=100", "checkpoint_minutes=0"])
    with tempfile.TemporaryDirectory() as folder:
        engine, wish = assemble_run(recipe, folder), StopWish()
        parts = engine.begin(stop=10_000)
        for _ in range(10):
            engine.one_step(parts)
        torch.cuda.synchronize()
        pipe.send(True)
        while steps := pipe.recv():
            begin = time.perf_counter()
            for _ in range(steps):
                engine.one_step(parts)
                engine.after_step(0, wish)
            torch.cuda.synchronize()
            pipe.send((time.perf_counter() - begin) / steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("epoch_time measures a GPU, and there is no CUDA device here; skipped.")
        return
    from vitfocus.train.results import device_name, versions

    spawn = multiprocessing.get_context("spawn")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")
    pipes, processes = {}, []
    for name, case in CASES.items():
        pipes[name], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(*case, theirs)))
        processes[-1].start()
        theirs.close()
    for pipe in pipes.values():
        pipe.recv()
    best: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, (_, batch) in CASES.items():
            pipes[name].send(max(20, 15_000 // batch))
            best[name] = min(best.get(name, float("inf")), pipes[name].recv() * IMAGES / batch)
    for name, seconds in best.items():
        print(f"{name:<24}{seconds:6.2f} s an epoch")
        pipes[name].send(0)
    for process in processes:
        process.join()
    result = {"seconds_an_epoch": best, "device": device_name(torch.device("cuda")), "versions": versions()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
