"""Attention among few tokens: is it right, how fast are its kernels, and what does it save in the engine's step?

    python benchmarks/short_attention.py               # needs a GPU, and takes about 90 seconds
    python benchmarks/short_attention.py --more        # further cases of the step, and tuned kernels

First the kernels are compared with float64. Then they and torch's attention are timed as CUDA graphs, forward and
backward, from the projection's output to its gradient. Last come the recorded steps of ViT-S/4 and ViT-Ti/4 on 32 px as
the cifar100 recipe runs them (Muon, batch 512), with each change on and off, in turns. Every case gets ready in a
process of its own. Results go to benchmarks/results/short-attention-cuda.json, part by part.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _turns import Turns
from epoch_time import IMAGES, KINDS, running
from torch import Tensor
from torch.nn import functional as F

from vitfocus.kernels.short_attention import op

#: Tokens, channels of a head, dtype.
CHECKED = [
    (65, 64, torch.bfloat16),
    (65, 64, torch.float16),
    (50, 64, torch.bfloat16),
    (1, 16, torch.bfloat16),
    (7, 32, torch.float16),
    (81, 48, torch.bfloat16),
    (127, 64, torch.bfloat16),
    (128, 128, torch.bfloat16),
]
#: Largest relative error of the output and of the gradients, by the norm of the whole tensor.
ALLOWED = {torch.bfloat16: (6e-3, 1.2e-2), torch.float16: (1e-3, 2e-3)}
#: Tokens, then the lengths of both tiles and the warps of a program; the first of each is in use.
TILES = {65: [(64, 16, 4), (64, 16, 8), (128, 0, 4), (128, 0, 8)], 50: [(64, 0, 4), (64, 0, 8)]}
HEADS, BATCH, SETS = (6, 3), 512, 4
SMALL, TINY = "deit_small_patch16_224", "deit_tiny_patch16_224"
TREATED = f"{SMALL}+tap(branches=4)+adl"


@dataclass(frozen=True)
class Case:
    """A step: which model, and which of the changes are on."""

    spec: str = SMALL
    batch: int = 512
    optimiser: str = "muon"
    tokens: int = 128  # the most for our attention
    outside: bool = True
    tuned: bool = False  # by the compiler, kernel by kernel
    compiled: str = "blocks"


STEPS = {
    "ViT-S/4, as before": Case(tokens=0, outside=False),
    "ViT-S/4, attention": Case(outside=False),
    "ViT-S/4, attention and outside": Case(),
    "ViT-Ti/4, as before": Case(TINY, tokens=0, outside=False),
    "ViT-Ti/4, attention and outside": Case(TINY),
    "ViT-S/4 + tap + adl, as before": Case(TREATED, tokens=0, outside=False),
    "ViT-S/4 + tap + adl, both": Case(TREATED),
}
MORE = {
    "ViT-S/4, both, AdamW, batch 1024": Case(batch=1024, optimiser="adamw"),
    "ViT-Ti/4, both, AdamW, batch 1024": Case(TINY, batch=1024, optimiser="adamw"),
    "ViT-S/4, both, tuned": Case(tuned=True),
    "ViT-S/4, attention, compiled as a whole": Case(compiled="yes"),
}
#: Asks for a profile of the step instead of its time.
PROFILE = -1
RESULTS = Path(__file__).parent / "results" / "short-attention-cuda.json"


def packed(count: int, heads: int, width: int, dtype: torch.dtype, batch: int) -> Tensor:
    """Queries, keys and values as a projection leaves them, (3, B, H, N, D)."""
    made = torch.randn(batch, count, 3, heads, width, device="cuda", dtype=torch.float32) * 1.5
    return made.to(dtype).permute(2, 0, 3, 1, 4).requires_grad_()


def check(count: int, width: int, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of the output, the normalisers and the three gradients, against float64."""
    given, scale = packed(count, 3, width, dtype, 5), width**-0.5
    gradient = torch.randn(5, 3, count, width, device="cuda").to(dtype)
    made = op.packed_attention(given, scale=scale)
    (gradients,) = torch.autograd.grad(made, given, gradient)
    _, lse = op.short_attention(*given.detach().unbind(), scale=scale)
    exact = given.detach().double().requires_grad_()
    logits = exact[0] @ exact[1].mT * scale
    expected = logits.softmax(-1) @ exact[2]
    (wanted,) = torch.autograd.grad(expected, exact, gradient.double())
    pairs = {"out": (made, expected), "lse": (lse, logits.logsumexp(-1))}
    pairs |= {name: (gradients[place], wanted[place]) for place, name in enumerate(("dq", "dk", "dv"))}
    found = {}
    for name, (one, other) in pairs.items():
        error = float((one.detach().double() - other.detach()).norm() / other.detach().norm().clamp(min=1e-12))
        silent = count == 1 and name in ("dq", "dk")  # exactly 0: what is left is rounding
        allowed = 1e-4 if name == "lse" else ALLOWED[dtype][name != "out"]
        ok = float(one.detach().abs().max()) < 1e-2 if silent else error < allowed
        found[name] = 0.0 if silent else error
        if not ok:
            found["wrong"] = 1.0
    return found


def microseconds(call: Callable[[Tensor], Any], sets: list[Tensor], repeats: int = 20) -> float:
    """One call, as part of a CUDA graph of one for each set, the least of a few replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for one in sets:
                call(one)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in sets:
            call(one)
    best = float("inf")
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / (3 * len(sets)))
    return best


def timed(count: int, heads: int, attend: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Microseconds forward, and forward and backward."""
    sets = [packed(count, heads, 64, torch.bfloat16, BATCH) for _ in range(SETS)]
    gradient = torch.randn(BATCH, count, heads * 64, device="cuda", dtype=torch.bfloat16)

    def mixed(one: Tensor) -> Tensor:
        return attend(one).transpose(1, 2).flatten(2)

    def forward(one: Tensor) -> Tensor:
        with torch.no_grad():
            return mixed(one)

    return microseconds(forward, sets), microseconds(lambda one: torch.autograd.grad(mixed(one), one, gradient), sets)


def time_kernels() -> dict[str, dict[str, float]]:
    """Every choice of tiles and warps, and torch's attention, at each size."""
    found: dict[str, dict[str, float]] = {}
    tiles, warps = op.tiles, op.WARPS
    for count, choices in TILES.items():
        for heads in HEADS:
            rows: dict[str, Callable[[Tensor], Tensor]] = {
                "torch": lambda one: F.scaled_dot_product_attention(*one.unbind())
            }
            rows |= {str(choice): lambda one: op.packed_attention(one, scale=0.125) for choice in choices}
            for name, attend in rows.items():
                if name != "torch":
                    main, tail, number = choices[list(rows).index(name) - 1]
                    op.tiles = lambda *_, pair=(main, tail): pair  # type: ignore[assignment,misc]
                    op.WARPS = {"forward": (number, number), "backward": (number, number)}
                label = f"N={count}, {heads} heads, {name}"
                try:
                    forward, both = timed(count, heads, attend)
                except Exception as error:  # does not fit
                    print(f"{label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                    continue
                finally:
                    op.tiles, op.WARPS = tiles, warps
                found[label] = {"forward": forward, "backward": both - forward}
                print(f"{label:<36} forward {forward:7.1f}  backward {both - forward:7.1f} us", flush=True)
    return found


def prepare(case: Case, profile_to: str) -> tuple[Any, Callable[[int], float]]:
    """A run whose step is compiled and recorded, with these changes, and how to time or profile it."""
    from torch._inductor import config as inductor
    from torch.profiler import ProfilerActivity, profile

    from vitfocus.train import compile as compiling
    from vitfocus.treatments.cost import seconds_per_call

    op.MOST_TOKENS, compiling.OUTSIDE = case.tokens, case.outside
    inductor.coordinate_descent_tuning = case.tuned
    began = time.perf_counter()
    trainer, batches, folder = running(case.spec, case.batch, f"compile={case.compiled}", optimiser=case.optimiser)
    ready = time.perf_counter() - began

    def step() -> None:
        trainer.train_step(batches)
        trainer.after_step(0)

    def seconds(steps: int, held: Any = folder) -> float:
        if steps != PROFILE:
            return seconds_per_call(step, "cuda", steps)
        with profile(activities=[ProfilerActivity.CUDA]) as taken:
            for _ in range(4):
                trainer.train_step(batches)
            torch.cuda.synchronize()
        kinds, kernels = dict.fromkeys(KINDS, 0.0), {}
        for event in taken.key_averages():
            if spent := event.self_device_time_total / 4:
                kind = next(kind for kind, marks in KINDS.items() if any(mark in event.key for mark in marks))
                kinds[kind] += spent / 1e3
                kernels[event.key[:110]] = {"us": round(spent, 1), "launches": event.count / 4}
        kernels = dict(sorted(kernels.items(), key=lambda item: -item[1]["us"])[:60])
        Path(profile_to).write_text(json.dumps({"ms_by_kind": kinds, "kernels": kernels}))
        return 0.0

    loss = float(trainer._loss_sums.sum()) / max(1, trainer.record.window_steps)
    return {"mean_loss_of_first_steps": loss, "seconds_until_ready": ready}, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--more", action="store_true", help="further cases of the step")
    parser.add_argument("--kernels-only", action="store_true", help="no steps")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("short_attention measures a GPU, and there is no CUDA device here; skipped.")
        return
    from vitfocus.core.environment import device_name, versions

    result: dict[str, Any] = {"device": device_name(torch.device("cuda")), "versions": versions("triton", "python")}

    def keep(name: str, value: Any) -> None:
        result[name] = value
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")
    profile_to = args.out.with_suffix(".profile")
    cases = {} if args.kernels_only else STEPS | (MORE if args.more else {})
    started: list[Turns] = []
    starting = threading.Thread(
        target=lambda: started.append(Turns(prepare, {name: (case, str(profile_to)) for name, case in cases.items()}))
    )
    starting.start()  # while they compile, nothing is timed
    errors = {}
    for count, width, dtype in CHECKED:
        name = f"N={count}, {width} channels, {str(dtype).removeprefix('torch.')}"
        try:
            errors[name] = check(count, width, dtype)
        except Exception as error:
            errors[name] = {"wrong": 1.0}
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        shown = "  ".join(f"{key} {value:.1e}" for key, value in errors[name].items())
        print(f"{name:<36}{'WRONG ' if 'wrong' in errors[name] else ''}{shown}", flush=True)
    keep("relative_errors", errors)
    starting.join()
    keep("kernels_us", time_kernels())
    turns = started[0]
    best: dict[str, float] = {}
    for _ in range(args.rounds):
        for name in turns.said:
            taken = turns.seconds(name, 15_000 // cases[name].batch) * 1e3
            best[name] = min(best.get(name, float("inf")), taken)
    steps = {
        name: {"ms_a_step": ms, "seconds_an_epoch": ms / 1e3 * IMAGES / cases[name].batch, **turns.said[name]}
        for name, ms in best.items()
    }
    keep("steps", steps)
    for name in turns.said:
        if cases[name].batch == 512:
            turns.seconds(name, PROFILE)
            keep(f"profile of {name}", json.loads(profile_to.read_text()))
            profile_to.unlink()
    turns.close()
    for name, row in steps.items():
        print(f"{name:<36}{row['ms_a_step']:7.2f} ms a step {row['seconds_an_epoch']:6.2f} s an epoch", flush=True)
    if any("wrong" in row for row in errors.values()):
        raise SystemExit("A kernel is wrong: set MOST_TOKENS = 0 in vitfocus/kernels/short_attention/op.py.")


if __name__ == "__main__":
    main()
