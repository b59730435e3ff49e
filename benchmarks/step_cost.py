"""What the treatments cost: a training step of a treated model as a multiple of the plain model's, in the same run.

    python benchmarks/step_cost.py                       # the whole table; needs a GPU and some minutes
    python benchmarks/step_cost.py --cases deit-197 --variants cb tap --parts steps

A step is forward, loss, backward and AdamW (fused), under bf16 autocast, compiled (block by block, or with --whole as
one program, which takes minutes a model), and recorded as one CUDA graph, as the engine records it. Variants take
turns, round after round, and a ratio is the median over rounds of neighbouring times. `released` variants are the
papers' published formulations: poolings by unfold, attention maps in full. Results go to
benchmarks/results/step-cost-cuda.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

# Kernels that are alike then have the same source in all variants, and are compiled once. torch reads it when imported.
os.environ.setdefault("TORCHINDUCTOR_UNIQUE_KERNEL_NAMES", "0")

import torch
from _turns import Turns
from torch import Tensor, nn
from torch.nn import functional as F

#: Model, image size, batch.
CASES = {
    "deit-197": ("deit_small_patch16_224", 224, 256),
    "deit-1025": ("deit_small_patch16_224", 512, 64),
    "deit-4097": ("deit_small_patch16_224", 1024, 8),
    "swin-t": ("swin_tiny_patch4_window7_224", 224, 128),
    "fan-s-hybrid": ("fan_small_12_p4_hybrid", 224, 128),
}
#: The plain model twice, in two processes: how far apart two measurements of one thing lie.
VARIANTS = {
    "plain": "",
    "plain-again": "",
    "cb": "cb",
    "cb-upper": "cb(layers=upper)",
    "cbs": "cbs",
    "tap": "tap",
    "adl": "adl",
    "adl-256": "adl(rows=256)",
    "all": "cb+tap+adl(rows=256)",
    "released-tap": "tap",
    "released-adl": "adl",
}
TARGETS = {
    "cb": (1.01,) * 3,
    "tap": (1.10,) * 3,
    "adl": (1.20, 1.5, 2.2),
    "adl-256": (1.10,) * 3,
    "all": (1.20,) * 3,
}
#: The kernels alone, training steps, statistics of attention.
PARTS = ("kernels", "steps", "statistics")
#: Batches of a diagnosis.
BATCHES = 8
RESULTS = Path(__file__).parent / "results" / "step-cost-cuda.json"


class Step:
    """A model and its training step."""

    def __init__(self, case: str, variant: str, whole: bool = False) -> None:
        import vitfocus as vf
        from vitfocus.train.compile import compile_blocks

        name, size, batch = CASES[case]
        spec = "+".join(filter(None, [name, VARIANTS[variant]]))
        torch.manual_seed(0)
        with torch.device("cuda"):  # where weights are drawn in a moment
            self.model = vf.create_model(spec, img_size=size).train()
        self.released = variant.startswith("released")
        if variant == "released-tap":
            pool_by_unfold(self.model)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=True)
        self.images = torch.randn(batch, 3, size, size, device="cuda")
        self.labels = torch.randint(0, 1000, (batch,), device="cuda")
        self.loss = torch.compile(self._loss) if whole else self._loss
        if not whole:
            compile_blocks(self.model)

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        import vitfocus as vf

        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(self.model(images), labels) + vf.auxiliary_loss(self.model)

    def take(self) -> None:
        """One step, launched kernel by kernel."""
        self.loss(self.images, self.labels).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def record(self) -> None:
        """Record the step as one CUDA graph, as the engine does: from now on a call replays it."""
        from vitfocus.treatments.attention_diversification import forget_losses

        for _ in range(2):
            self.take()
        torch.cuda.synchronize()
        forget_losses(self.model)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.take()

    def __call__(self) -> None:
        self.graph.replay()

    def backend(self) -> Any:
        """What the step runs under."""
        from vitfocus.kernels.backends import backend

        return backend("reference") if self.released else nullcontext()


def pool_by_unfold(model: nn.Module) -> None:
    """Pool as the released code does: every neighbourhood unfolded, then averaged."""
    from vitfocus.treatments.token_aware_pooling import DilationPredictor

    def pool(self: Any, image: Tensor) -> Tensor:
        weights = self.proj(image).softmax(dim=1)
        mixed = weights[:, :1] * image
        for k in range(1, weights.shape[1]):
            near = F.unfold(image, 3, dilation=k, padding=k).unflatten(1, (image.shape[1], 9)).mean(dim=2)
            mixed = mixed + weights[:, k : k + 1] * near.view_as(image)
        return mixed

    for module in model.modules():
        if isinstance(module, DilationPredictor):
            module.pool = pool.__get__(module)  # type: ignore[method-assign]


def seconds(step: Any, repeats: int) -> float:
    """Time of one call."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        step()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000 / repeats


def prepare(case: str, variant: str, whole: bool) -> tuple[int, Callable[[int], float]]:
    """Compile and record a variant's step: the memory it takes, and how to time it."""
    torch.set_float32_matmul_precision("high")
    step = Step(case, variant, whole)
    with step.backend():
        step.take()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step.take()
        memory = torch.cuda.max_memory_allocated()
        step.record()
    return memory, partial(seconds, step)


def measure(case: str, variants: list[str], rounds: int, whole: bool) -> dict[str, Any]:
    """Times and peak memory of the variants of one case."""
    turns = Turns(prepare, {variant: (case, variant, whole) for variant in variants})
    memory = turns.said
    warm = {name: [turns.seconds(name, 2) for _ in range(2)][1] for name in memory}
    repeats = max(2, round(0.25 / warm["plain"]))
    times: dict[str, list[float]] = {name: [] for name in memory}
    for _ in range(rounds):
        for name in memory:
            times[name].append(turns.seconds(name, repeats))
    turns.close()
    row = {}
    for name in memory:
        ratio = statistics.median(mine / plain for mine, plain in zip(times[name], times["plain"], strict=True))
        taken = statistics.median(times[name])
        row[name] = {"ms": 1e3 * taken, "ratio": ratio, "memory_ratio": memory[name] / memory["plain"]}
        print(
            f"{case:<14}{name:<14}{1e3 * taken:9.2f} ms  {ratio:6.3f} ×   memory {row[name]['memory_ratio']:.3f} ×",
            flush=True,
        )
    return row


def statistics_cost(case: str) -> dict[str, float]:
    """Reading every layer of some batches, against the forward passes alone: time and peak memory."""
    import vitfocus as vf

    name, size, batch = CASES[case]
    model = vf.create_model(name, img_size=size).cuda().eval().bfloat16()
    images = torch.randn(batch, 3, size, size, device="cuda", dtype=torch.bfloat16)

    def forward() -> None:
        with torch.no_grad():
            for _ in range(BATCHES):
                model(images)

    def read() -> None:
        vf.diagnose(model, [images] * BATCHES)

    result = {}
    for label, call in (("forward", forward), ("diagnose", read)):
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        result[f"{label}_memory"] = float(torch.cuda.max_memory_allocated())
    pairs = [(seconds(forward, 2), seconds(read, 2)) for _ in range(3)]
    result["forward_ms"] = 1e3 * statistics.median(forward for forward, _ in pairs)
    result["extra_over_forward"] = statistics.median(read / forward for forward, read in pairs) - 1
    result["memory_ratio"] = result["diagnose_memory"] / result["forward_memory"]
    more, memory = result["extra_over_forward"], result["memory_ratio"]
    print(f"{case:<14}statistics: {more:.2f} × a forward more, memory {memory:.3f} ×", flush=True)
    return result


def ceiling() -> dict[str, float]:
    """What the device does at best here: copying, and multiplying bf16 matrices."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    one, two = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    target.copy_(source), one @ two
    copy, product = seconds(lambda: target.copy_(source), 20), seconds(lambda: one @ two, 20)
    return {"copy_GB_per_s": 2 * source.numel() / copy / 1e9, "bf16_TFLOP_per_s": 2 * 8192**3 / product / 1e12}


def recorded(call: Callable[[], Any]) -> float:
    """Seconds of one call on the device, however long the host takes to launch it."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            call()
    return seconds(graph.replay, 10) / 5


def kernel_rates() -> dict[str, Any]:
    """The kernels alone at DeiT-S's sizes: time, and work against the ceiling. docs/kernels.md counts the work."""
    import vitfocus.kernels.context.op
    import vitfocus.kernels.diversity.op
    import vitfocus.kernels.pooling.op  # noqa: F401  (they register the operators)

    ops, rates = torch.ops.vitfocus, {}
    form = (0.125, 0, True, False, 2.0)
    for batch, side in ((256, 14), (64, 32), (8, 64)):
        count = side * side + 1
        query, key, value = torch.randn(batch, count, 3, 6, 64, device="cuda", dtype=torch.bfloat16).permute(
            2, 0, 3, 1, 4
        )
        lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[1]
        made = ops.diversity(query, key, None, None, lse, *form)
        weight = torch.ones((), device="cuda")
        saved = (query, key, None, lse, None, *made[2:], *form, False)
        tokens, slope = torch.randn(2, batch, count, 384, device="cuda", dtype=torch.bfloat16).unbind()
        scores = torch.randn(batch, count - 1, 4, device="cuda", dtype=torch.bfloat16)
        weights = ops.mix_dilated(tokens, scores, side, side)[1]
        product, size = 2 * batch * count * count * 384, 2 * tokens.numel()
        calls: dict[str, tuple[Callable[[], Any], float, float]] = {
            "sdpa_forward": (partial(F.scaled_dot_product_attention, query, key, value), 2 * product, 4 * size),
            "adl_forward": (partial(ops.diversity, query, key, None, None, lse, *form), product, 2 * size),
            "adl_backward": (partial(ops.diversity_backward, weight, *saved), 4 * product, 4 * size),
            "tap_forward": (partial(ops.mix_dilated, tokens, scores, side, side), 0, 2 * size),
            "tap_backward": (
                partial(ops.mix_dilated_backward, slope, tokens, weights, side, side, torch.bfloat16), 0, 3 * size
            ),
            "cb_either_way": (partial(ops.share_mean, tokens, None, 0.5, torch.bfloat16), 0, 2 * size),
        }  # fmt: skip
        row = rates[f"N={count}"] = {}
        for name, (call, flops, moved) in calls.items():
            taken = recorded(call)
            row[name] = {"us": 1e6 * taken, "TFLOP_per_s": flops / taken / 1e12, "GB_per_s": moved / taken / 1e9}
            print(f"N={count:<6}{name:<16}", *(f"{key} {value:8.1f}" for key, value in row[name].items()), flush=True)
    return rates


def warm_caches(cases: list[str], variants: list[str], workers: int, whole: bool) -> None:
    """Compile everything in processes of their own, which leaves it in the compiler's cache; the plain models first."""
    rest = [(case, variant) for variant in variants for case in cases if variant not in ("plain", "plain-again")]
    for jobs in ([(case, "plain") for case in cases], rest):
        running: list[subprocess.Popen[bytes]] = []
        for case, variant in jobs:
            while sum(one.poll() is None for one in running) >= workers:
                time.sleep(0.1)
            command = [sys.executable, __file__, "--compile-only", "--cases", case, "--variants", variant]
            command += ["--whole"] if whole else []
            running.append(subprocess.Popen(command, env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3"}))
        for one in running:
            one.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=0, help="processes that compile ahead")
    parser.add_argument("--whole", action="store_true", help="compile a model as one program, not block by block")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="what is measured")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("step_cost measures GPU kernels, and there is no CUDA device here; skipped.")
        return
    torch.set_float32_matmul_precision("high")
    if args.compile_only:
        step = Step(args.cases[0], args.variants[0], args.whole)
        with step.backend():
            step.take()
        torch.cuda.synchronize()
        return
    if args.workers:
        warm_caches(args.cases, args.variants, args.workers, args.whole)
    import timm
    import triton

    variants = list(dict.fromkeys(["plain", "plain-again", *args.variants]))
    versions = {"torch": torch.__version__, "triton": triton.__version__, "timm": timm.__version__}
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    result |= {"device": torch.cuda.get_device_name(), "versions": versions, "targets": TARGETS}
    if "kernels" in args.parts:
        result["ceiling"], result["kernels"] = ceiling(), kernel_rates()
        print(result["ceiling"], flush=True)
    for case in args.cases:
        torch.cuda.empty_cache()
        if "steps" in args.parts:
            steps = result.setdefault("steps_as_one_program" if args.whole else "steps", {})
            steps[case] = steps.get(case, {}) | measure(case, variants, args.rounds, args.whole)
        if case.startswith("deit") and "statistics" in args.parts:
            result.setdefault("statistics", {})[case] = statistics_cost(case)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
