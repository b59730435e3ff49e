"""Seconds an epoch of CIFAR-100 takes, 50,000 images of 32 px, by the engine as the cifar100 recipe runs it.

    python benchmarks/epoch_time.py                    # ViT-Ti/4 and ViT-S/4, batches of 512 and 1024; needs a GPU
    python benchmarks/epoch_time.py --kernels          # and where the time of ViT-Ti's step goes, by kind of kernel

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _turns import SETTLE, Job, gpu_name, take_turns

CASES = {
    f"{name}, batch {batch}": (spec, batch)
    for name, spec in (("ViT-Ti/4", "deit_tiny_patch16_224"), ("ViT-S/4", "deit_small_patch16_224"))
    for batch in (512, 1024)
}
IMAGES = 50_000
DRAWN = 8_192  # as many as are drawn: a step takes as long whichever images it meets
RESULTS = Path(__file__).parent / "results" / "epoch-time-cuda.json"
#: What a kernel's name shows it to be; the first that fits.
KINDS = {
    "matrix products": ("nvjet", "gemm", "splitKreduce", "cutlass"),
    "attention": ("sdpa", "flash", "fmha", "cudnn::fusion"),
    "optimiser, clipping": ("multi_tensor_apply", "fused_adam"),
    "activations, normalisation, residuals, augmentation (compiled)": ("triton_",),
    "filling and copying": ("Memset", "Memcpy"),
    "the rest, launched by torch one by one": ("",),
}


def running(spec: str, batch: int, *keys: str) -> tuple[Any, Any, tempfile.TemporaryDirectory[str]]:
    """A trainer whose step is compiled, what its steps take their batches from, and its folder."""
    from vitfocus.train import load_recipe
    from vitfocus.train.run import assemble_run

    overrides = [
        "name=adamw",
        "source=shapes",
        f"train_length={DRAWN}",
        "val_length=100",
        f"batch={batch}",
        f"spec={spec}",
    ]
    recipe = load_recipe("cifar100", [*overrides, "model.arguments.num_classes=100", "checkpoint_minutes=0", *keys])
    folder = tempfile.TemporaryDirectory()
    trainer = assemble_run(recipe, folder.name)
    batches = trainer.start(stop=10_000)
    for _ in range(10):
        trainer.train_step(batches)
    torch.cuda.synchronize()
    return trainer, batches, folder


def prepare(spec: str, batch: int, compiled: str, rounds: int) -> Callable[[], float]:
    """A run whose step is compiled and captured; measuring returns the seconds of an epoch, the best of the rounds."""
    from vitfocus.treatments.cost import seconds_per_call

    trainer, batches, folder = running(spec, batch, f"compile={compiled}")

    def step() -> None:
        trainer.train_step(batches)
        trainer.after_step(0)

    def measure(held: Any = folder) -> float:
        steps = max(20, 15_000 // batch)
        return min(seconds_per_call(step, "cuda", steps) for _ in range(rounds)) * IMAGES / batch

    return measure


def by_kind(trainer: Any, batches: Any, steps: int = 4) -> dict[str, float]:
    """Milliseconds of a step, by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        for _ in range(steps):
            trainer.train_step(batches)
        torch.cuda.synchronize()
    found = dict.fromkeys(KINDS, 0.0)
    for event in taken.key_averages():
        kind = next(kind for kind, marks in KINDS.items() if any(mark in event.key for mark in marks))
        found[kind] += event.self_device_time_total / 1e3 / steps
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--whole", action="store_true", help="compile a model as one program")
    parser.add_argument("--kernels", action="store_true", help="a step of ViT-Ti/4 at batch 512 by kind of kernel")
    parser.add_argument("--pause", default="", help="stop processes whose command line contains this while measuring")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not gpu_name():
        print("epoch_time measures a GPU, and there is no CUDA device here; skipped.")
        return
    from vitfocus.core.environment import device_name, versions

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")
    compiled = "yes" if args.whole else "blocks"
    jobs = {name: Job(prepare, (*case, compiled, args.rounds)) for name, case in CASES.items()}
    best: dict[str, float] = {}
    for measured in take_turns(jobs, len(jobs), pause=args.pause, settle=SETTLE):
        if measured.error:
            print(f"{measured.name}: {measured.error}", flush=True)
        else:
            best[measured.name] = measured.value
    for name, seconds in best.items():
        print(f"{name:<24}{seconds:6.2f} s an epoch")
    result: dict[str, Any] = {
        "seconds_an_epoch": best,
        "compiled": compiled,
        "device": device_name(torch.device("cuda")),
        "versions": versions("accelerate", "python"),
    }
    if args.kernels:
        trainer, batches, folder = running(*CASES["ViT-Ti/4, batch 512"], f"compile={compiled}", "record=no")
        result["ms_of_a_step"] = by_kind(trainer, batches)
        for kind, taken in result["ms_of_a_step"].items():
            print(f"{taken:8.2f} ms  {kind}")
        folder.cleanup()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
