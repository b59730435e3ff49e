"""What the treatments cost: a training step of a treated model as a multiple of the plain model's, in the same process.

    python benchmarks/step_cost.py                      # everything; needs a GPU and half an hour
    python benchmarks/step_cost.py --models deit_s --sizes 197 --settings eager,compiled --variants tap,all

A step is forward, loss, backward and AdamW (fused), under bf16 autocast, in three settings: `eager`; `compiled`, with
`torch.compile(model)` and nothing else; `recorded`, compiled block by block and recorded as one CUDA graph, as the
engine does it. Variants take turns, round after round, and a ratio is the median over rounds of times that follow each
other. The plain model is there twice: `plain-again` shows what a difference of nothing looks like.

The diversification loss is active (`_activity.py`). The loss and the share of entries above the threshold are printed;
a variant with less than 0.1 and 0.2 fails, like one that raises an error: the others are measured all the same, and the
exit status says that one failed. `--check` only builds every model and variant with few images, on the CPU, and prints
both numbers. `released` variants are the papers' published formulations: poolings by unfold, attention maps in full.
Results go to benchmarks/results/step-cost-cuda.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

# Kernels that are alike then have the same source in all variants, and are compiled once. torch reads it when imported.
os.environ.setdefault("TORCHINDUCTOR_UNIQUE_KERNEL_NAMES", "0")

import torch
from _activity import activate_diversity, patchy_images, share_above
from torch import Tensor, nn
from torch.nn import functional as F

#: By model: timm's name, further options, side of the bright squares, and by the number of tokens (pixels, batch).
MODELS: dict[str, tuple[str, dict[str, Any], int, dict[int, tuple[int, int]]]] = {
    "deit_s": ("deit_small_patch16_224", {}, 16, {197: (224, 256), 1025: (512, 64), 4097: (1024, 8)}),
    "vit_b": ("vit_base_patch16_224", {}, 16, {197: (224, 128)}),
    "swin_t": ("swin_tiny_patch4_window7_224", {}, 4, {3136: (224, 128)}),
    "fan_s": ("fan_small_12_p4_hybrid", {}, 16, {196: (224, 128)}),
    "vit_ti4": ("vit_tiny_patch16_224", {"patch_size": 4}, 4, {65: (32, 128)}),
}
SETTINGS = ("eager", "compiled", "recorded")
VARIANTS = {
    "plain": "",
    "plain-again": "",
    "cb": "cb",
    "cbs": "cbs",
    "tap": "tap",
    "adl": "adl(threshold=1.0)",
    "adl-paper": "adl(variant=paper,threshold=1.0)",
    "adl-256": "adl(rows=256,threshold=1.0)",
    "tap+adl": "tap+adl(threshold=1.0)",
    "all": "cb+tap+adl(threshold=1.0)",
    "all-256": "cb+tap+adl(rows=256,threshold=1.0)",
    "released-tap": "tap",
    "released-adl": "adl(threshold=1.0)",
}
DEFAULT = ("cb", "tap", "adl", "all")
PARTS = ("steps", "kernels", "first", "statistics")
#: The least loss, and share of entries above the threshold, of a diversification loss that counts as active.
LEAST_LOSS, LEAST_SHARE = 0.1, 0.2
#: What could not be measured.
FAILED: list[str] = []
#: Batches of a diagnosis.
BATCHES = 8
RESULTS = Path(__file__).parent / "results" / "step-cost-cuda.json"


def build(model: str, tokens: int, variant: str, device: str, batch: int | None = None) -> tuple[nn.Module, Tensor]:
    """A model in training mode in which the diversification loss is active, and its images."""
    import vitfocus as vf

    name, options, tile, sizes = MODELS[model]
    size, usual = sizes[tokens]
    torch.manual_seed(0)
    with torch.device(device):  # where weights are drawn in a moment
        made = vf.create_model("+".join(filter(None, [name, VARIANTS[variant]])), img_size=size, **options).train()
    images = patchy_images(batch or usual, size, size, tile).to(device)
    activate_diversity(made, few(images, tokens))
    return made, images


def few(images: Tensor, tokens: int) -> Tensor:
    """As many of the images as are enough to look at."""
    return images[: max(2, 2000 // tokens)]


def check_active(loss: float, share: float) -> None:
    """Raise an error if the diversification loss has nothing to do."""
    if not (loss >= LEAST_LOSS and share >= LEAST_SHARE):
        raise RuntimeError(f"inactive: the loss is {loss:.3f}, the share above the threshold {share:.3f}")


def check(models: list[str], sizes: list[int], variants: list[str]) -> int:
    """Build all of them with few images, wherever we are, and print loss and share; how many are not active."""
    import vitfocus as vf

    failed = 0
    for model in models:
        for tokens in [size for size in MODELS[model][3] if not sizes or size in sizes]:
            for variant in [name for name in variants if "adl" in VARIANTS[name]]:
                made, images = build(model, tokens, variant, "cpu", max(2, 1000 // tokens))
                share = share_above(made, images)
                with torch.no_grad():
                    made(images)
                loss = float(vf.auxiliary_loss(made))
                print(f"{model:<9}{tokens:<6}{variant:<13} loss {loss:.3f} share {share:.3f}", flush=True)
                failed += not (loss >= LEAST_LOSS and share >= LEAST_SHARE)
    return failed


class Step:
    """A model and its training step in one of the settings."""

    def __init__(self, model: str, tokens: int, variant: str, setting: str) -> None:
        from vitfocus.train.compile import compile_blocks

        self.model, self.images = build(model, tokens, variant, "cuda")
        self.labels = torch.randint(0, 1000, (len(self.images),), device="cuda")
        self.share = share_above(self.model, few(self.images, tokens))
        self.released, self.graph = variant.startswith("released"), None
        if variant == "released-tap":
            pool_by_unfold(self.model)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-7, fused=True, capturable=True)
        self.forward: Callable[[Tensor], Tensor] = self.model
        if setting == "compiled":
            self.forward = torch.compile(self.model)
        elif setting == "recorded":
            compile_blocks(self.model)

    def take(self) -> Tensor:
        """One step, launched kernel by kernel; returns the diversification loss."""
        import vitfocus as vf

        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(self.forward(self.images), self.labels)
        extra = vf.auxiliary_loss(self.model)
        (loss + extra).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return extra.detach()

    def record(self, pool: Any) -> None:
        """Record the step as one CUDA graph, as the engine does: from now on a call replays it."""
        from vitfocus.treatments.attention_diversification import reset_losses

        reset_losses(self.model)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.take()

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.take()

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


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Time of one call."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000 / repeats


def measure(model: str, tokens: int, setting: str, variants: list[str], rounds: int) -> dict[str, Any]:
    """Times and peak memory of the variants of one model, of one size, in one setting."""
    steps: dict[str, Step] = {}
    row: dict[str, Any] = {}
    pool = torch.cuda.graph_pool_handle()
    for name in variants:
        torch._dynamo.reset()
        began = time.perf_counter()
        try:
            step = Step(model, tokens, name, setting)
            with step.backend():
                for _ in range(3):
                    extra = step.take()
                if "adl" in VARIANTS[name]:
                    check_active(float(extra), step.share)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step.take()
                weights = 12 * sum(parameter.numel() for parameter in step.model.parameters())
                memory = torch.cuda.max_memory_allocated() - before + weights
                if setting == "recorded":
                    step.record(pool)
        except Exception as error:  # one variant that fails must not hide the others
            print(f"{model} {tokens} {setting} {name}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
            FAILED.append(f"{model} {tokens} {setting} {name}")
            continue
        row[name] = {"memory": memory, "ready_s": time.perf_counter() - began}
        print(f"{model} {tokens} {setting} {name}: ready after {row[name]['ready_s']:.1f} s", flush=True)
        if "adl" in VARIANTS[name]:
            row[name] |= {"loss": float(extra), "share": step.share}
        steps[name] = step
    if "plain" not in steps:
        return {}
    warm = {name: [seconds(step, 2) for _ in range(2)][1] for name, step in steps.items()}
    repeats = max(2, round(0.15 / warm["plain"]))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, repeats))
    for name in steps:
        ratio = statistics.median(mine / plain for mine, plain in zip(times[name], times["plain"], strict=True))
        made = row[name]
        made |= {"ms": 1e3 * statistics.median(times[name]), "ratio": ratio}
        made["memory_ratio"] = made["memory"] / row["plain"]["memory"]
        active = f"  loss {made['loss']:.3f} share {made['share']:.2f}" if "loss" in made else ""
        print(
            f"{model:<9}{tokens:<6}{setting:<10}{name:<13}{made['ms']:8.2f} ms {ratio:7.3f} ×  memory "
            f"{made['memory_ratio']:.3f} ×  ready {made['ready_s']:5.1f} s{active}",
            flush=True,
        )
    return row


def first_call(variant: str) -> float:
    """Seconds that the first eager step takes longer than the second; a plain model's step has been taken before."""
    plain, step = Step("deit_s", 197, "plain", "eager"), Step("deit_s", 197, variant, "eager")
    plain.take()
    return seconds(step.take, 1) - seconds(step.take, 1)


def first_calls(variants: list[str]) -> dict[str, float]:
    """`first_call` of some variants, each in a process with an empty Triton cache."""
    result = {}
    for variant in variants:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--first-call", variant]
            environment = os.environ | {"TRITON_CACHE_DIR": folder}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        result[variant] = float(done.stdout.split()[-1])
        print(f"first call of {variant} with an empty cache: {result[variant]:.1f} s", flush=True)
    return result


def statistics_cost(tokens: int) -> dict[str, float]:
    """Reading every layer of some batches of DeiT-S, against the forward passes alone: time and peak memory."""
    import vitfocus as vf

    name, _, _, sizes = MODELS["deit_s"]
    size, batch = sizes[tokens]
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
    print(f"statistics at {tokens}: {more:.2f} × a forward more, memory {memory:.3f} ×", flush=True)
    return result


def ceiling() -> dict[str, float]:
    """What the device does at best here: copying, and multiplying bf16 matrices."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    one, two = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    target.copy_(source), one @ two
    copy, product = seconds(lambda: target.copy_(source), 20), seconds(lambda: one @ two, 20)
    return {"copy_GB_per_s": 2 * source.numel() / copy / 1e9, "bf16_TFLOP_per_s": 2 * 8192**3 / product / 1e12}


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel that a call launches, on the device, by name."""
    for _ in range(3):
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in seen.key_averages():
        if event.device_time_total:
            times[event.key[:48]] = event.device_time_total / 5
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def kernel_rates(sizes: list[int]) -> dict[str, Any]:
    """The operations alone at DeiT-S's sizes, forward and backward: microseconds by kernel."""
    from vitfocus.kernels.context.op import share_mean
    from vitfocus.kernels.diversity.op import diversity
    from vitfocus.kernels.pooling.op import mix_dilated, predict_hidden

    rates: dict[str, Any] = {}
    for count in sizes:
        pixels, batch = MODELS["deit_s"][3][count]
        side = pixels // 16
        draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        query, key, value = draw(batch, count, 3, 6, 64).permute(2, 0, 3, 1, 4)
        # All queries like the same keys, so that a third of the columns is above the threshold.
        key = key + 3 * (torch.rand(batch, 1, count, 1, device="cuda") < 0.3).to(key.dtype)
        query, key = (query + 1).requires_grad_(), key.requires_grad_()
        lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=0.125)[1].detach()
        tokens = draw(batch, count, 384).requires_grad_()
        first, second = draw(4, 384, 3, 3).float().requires_grad_(), draw(4, 4, 3, 3).float().requires_grad_()

        def attend(query: Tensor = query, key: Tensor = key, value: Tensor = value) -> None:
            F.scaled_dot_product_attention(query, key, value).sum().backward()

        def diversify(query: Tensor = query, key: Tensor = key, lse: Tensor = lse) -> None:
            diversity(query, key, scale=0.125, lse=lse).backward()

        def pool(tokens: Tensor = tokens, first: Tensor = first, second: Tensor = second, side: int = side) -> None:
            hidden = predict_hidden(tokens, first, (side, side))
            mixed = mix_dilated(tokens, hidden, second)
            mixed.backward(mixed.detach())

        def share(tokens: Tensor = tokens) -> None:
            mixed = share_mean(tokens)
            mixed.backward(mixed.detach())

        print(f"N={count}: loss {float(diversity(query, key, scale=0.125, lse=lse)):.3f}", flush=True)
        for name, call in {"sdpa": attend, "adl": diversify, "tap": pool, "cb": share}.items():
            found = rates.setdefault(f"N={count}", {})[name] = kernel_times(call)
            print(f"N={count} {name}: {sum(found.values()):8.1f} us in kernels", flush=True)
            for kernel, taken in list(found.items())[:9]:
                print(f"      {taken:8.1f}  {kernel}", flush=True)
    return rates


def main() -> None:
    def several(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=several, default=list(MODELS), help=",".join(MODELS))
    parser.add_argument("--sizes", type=several, help="tokens, such as 197,1025 (default: all that a model has)")
    parser.add_argument("--settings", type=several, default=list(SETTINGS), help=",".join(SETTINGS))
    parser.add_argument("--variants", type=several, default=list(DEFAULT), help=",".join(VARIANTS))
    parser.add_argument("--parts", type=several, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--first-call", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="only build the models, and print how active the loss is")
    args = parser.parse_args()
    wanted = [int(size) for size in args.sizes or []]
    if args.check:
        raise SystemExit(check(args.models, wanted, args.variants) > 0)
    if not torch.cuda.is_available():
        print("step_cost measures GPU kernels, and there is no CUDA device here; skipped.")
        return
    torch.set_float32_matmul_precision("high")
    if args.first_call:
        print(first_call(args.first_call))
        return
    import timm
    import triton

    variants = list(dict.fromkeys(["plain", "plain-again", *args.variants]))
    versions = {"torch": torch.__version__, "triton": triton.__version__, "timm": timm.__version__}
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    result |= {"device": torch.cuda.get_device_name(), "versions": versions}

    def write() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    deit = [size for size in MODELS["deit_s"][3] if not wanted or size in wanted]
    if "kernels" in args.parts:
        result["ceiling"] = ceiling()
        result.setdefault("kernels", {}).update(kernel_rates(deit))
        write()
    for setting in args.settings if "steps" in args.parts else ():
        for model in args.models:
            for tokens in [size for size in MODELS[model][3] if not wanted or size in wanted]:
                torch.cuda.empty_cache()
                steps = result.setdefault("steps", {}).setdefault(setting, {})
                case = f"{model}-{tokens}"
                steps[case] = steps.get(case, {}) | measure(model, tokens, setting, variants, args.rounds)
                write()
    if "statistics" in args.parts:
        result.setdefault("statistics", {}).update({str(size): statistics_cost(size) for size in deit})
    if "first" in args.parts:
        result.setdefault("first_call_s", {}).update(first_calls([name for name in args.variants if name != "plain"]))
    write()
    if FAILED:
        raise SystemExit("These could not be measured: " + "; ".join(FAILED))


if __name__ == "__main__":
    main()
