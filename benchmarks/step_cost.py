"""What the treatments cost: a training step of a treated model as a multiple of the plain model's, in the same process.

    python benchmarks/step_cost.py                          # everything; needs a GPU and an hour
    python benchmarks/step_cost.py --missing --seconds 300  # what the results file lacks, as far as the time allows
    python benchmarks/step_cost.py --models deit_s --sizes 197 --settings eager,compiled --variants tap,all

A step is forward, loss, backward and AdamW (fused), under bf16 autocast, in three settings: `eager`; `compiled`, with
`torch.compile(model)` and nothing else; `recorded`, compiled block by block and recorded as one CUDA graph, as the
engine does it. A variant and the plain model take turns, and the ratio is the median over rounds of times that follow
each other. `plain-again`, a second plain model, shows the noise.

The diversification loss is active (`_activity.py`). The loss and the share of entries above the threshold are printed;
a variant with less than 0.1 and 0.2 fails, like one that raises an error: the others are measured all the same, and the
exit status says that one failed. `--check` only builds every model and variant with few images, on the CPU, and prints
both numbers. `released` variants are the papers' published formulations: poolings by unfold, attention maps in full.

Each model, size and setting has a process of its own, so that an error on the GPU spoils no other and a time limit
holds. `--seconds` leaves out what does not fit; the cases of `ORDER` come first. `--ahead 12` first compiles so many
variants in parallel processes, which fills the compiler's caches (`ready_s` is then not the time of a cold start).
Results go into benchmarks/results/step-cost-cuda.json, one variant at a time; what is there already stays, unless it is
measured again. `--toy` tests the script itself: all of it with tiny models on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Kernels that are alike then have the same source in all variants, and are compiled once. torch reads it when imported.
os.environ.setdefault("TORCHINDUCTOR_UNIQUE_KERNEL_NAMES", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")

import timm
import torch
from _activity import share_above
from _step import LEAST_LOSS, LEAST_SHARE, MODELS, SETTINGS, VARIANTS, Step, build
from torch.nn import functional as F

import vitfocus as vf
from vitfocus.core.files import write_text
from vitfocus.treatments.cost import seconds_per_call

#: What is measured first if time is limited: setting, model, tokens and variants.
ORDER = (
    ("recorded", "deit_s", 197, ("adl", "all")),
    ("eager", "deit_s", 1025, ("adl", "all", "adl-paper")),
    ("recorded", "deit_s", 1025, ("adl", "all")),
    ("eager", "deit_s", 197, ("adl", "all", "adl-paper")),
    ("compiled", "deit_s", 197, ("tap", "adl", "all", "cb")),
    ("recorded", "vit_ti4", 65, ("tap", "adl", "tap+adl")),
    ("first", "deit_s", 197, ("adl", "all", "tap", "cb")),
    ("recorded", "deit_s", 4097, ("adl",)),
    ("eager", "vit_b", 197, ("adl", "tap", "all")),
    ("eager", "swin_t", 3136, ("adl", "tap", "all")),
    ("eager", "fan_s", 196, ("adl", "tap", "all")),
)
DEFAULT = ("cb", "tap", "adl", "adl-paper", "all")
PARTS = ("steps", "first", "kernels", "statistics")
#: Batches of a diagnosis.
BATCHES = 8
RESULTS = Path(__file__).parent / "results" / "step-cost-cuda.json"


class Case(NamedTuple):
    """What one process measures: variants of one model at one size, in one setting, or their first calls."""

    setting: str
    model: str
    tokens: int
    variants: tuple[str, ...]


def check(names: list[str], sizes: list[int], variants: list[str]) -> int:
    """Build all of them with few images, wherever we are, and print loss and share; how many are not active."""
    failed = 0
    for name in names:
        for tokens in [size for size in MODELS[name][3] if not sizes or size in sizes]:
            for variant in [variant for variant in variants if "adl" in VARIANTS[variant]]:
                made, images = build(MODELS[name], tokens, variant, "cpu", max(2, 1000 // tokens))
                share = share_above(made, images)
                with torch.no_grad():
                    made(images)
                loss = float(vf.auxiliary_loss(made))
                print(f"{name:<9}{tokens:<6}{variant:<13} loss {loss:.3f} share {share:.3f}", flush=True)
                failed += not (loss >= LEAST_LOSS and share >= LEAST_SHARE)
    return failed


def read(out: Path) -> dict[str, Any]:
    """The results so far."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    return found


def save(out: Path, device: str, value: Any, *place: str) -> None:
    """Write one result to its place in the file; dictionaries are merged with what is there."""
    result = read(out)
    if device == "cuda":
        import triton

        versions = {"torch": torch.__version__, "triton": triton.__version__, "timm": timm.__version__}
        result |= {"device": torch.cuda.get_device_name(), "versions": versions}
    inner = result
    for name in place[:-1]:
        inner = inner.setdefault(name, {})
    inner[place[-1]] = value
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, json.dumps(result, indent=1) + "\n")


def cases(args: argparse.Namespace, known: dict[str, Any]) -> Iterator[Case]:
    """All cases that are asked for, those of `ORDER` first; with `--missing`, those without a result."""
    sizes = [int(size) for size in args.sizes or []]
    settings = [*args.settings * ("steps" in args.parts), *["first"] * ("first" in args.parts)]
    rest = [
        (setting, model, tokens, args.variants)
        for setting in SETTINGS
        for model in args.models
        for tokens in MODELS[model][3]
    ]
    done: set[tuple[Any, ...]] = set()
    for setting, model, tokens, variants in [*ORDER, *rest]:
        if setting not in settings or model not in args.models or (sizes and tokens not in sizes):
            continue
        there = known.get("steps", {}).get(setting, {}).get(f"{model}-{tokens}", {})
        if setting == "first":
            old = known.get("stale_first_calls", [])
            there = {name: {"stale": ""} if name in old else {} for name in known.get("first_call_s", {})}
        wanted = []
        for name in variants:
            is_new = (setting, model, tokens, name) not in done and (args.asked is None or name in args.asked)
            if (
                is_new
                and not name.startswith("plain")
                and not (args.missing and name in there and "stale" not in there[name])
            ):
                wanted.append(name)
            done.add((setting, model, tokens, name))
        if wanted:
            yield Case(setting, model, tokens, tuple(wanted))


def measure_case(case: Case, rounds: int, device: str, out: Path, deadline: float, cached: bool) -> None:
    """Times and peak memory of the variants of one case; exits with the number of those that failed."""
    setting, model, tokens, variants = case
    torch.set_float32_matmul_precision("high")
    label = f"{model} {tokens} {setting}"
    began, failed, longest = time.time(), 0, 0.0
    plain = Step(model, tokens, "plain", setting, device)
    base = plain.prepare(setting)
    print(f"{label} plain: ready after {time.time() - began:.1f} s", flush=True)
    for name in dict.fromkeys([*variants, "plain-again"]):
        began = time.time()
        if began + longest > deadline:
            print(f"{label} {name}: left out, no time", flush=True)
            continue
        try:
            if setting == "recorded":  # the plain model's graph needs no compiled code any more
                torch._dynamo.reset()
            step = Step(model, tokens, name, setting, device)
            cell: dict[str, Any] = step.prepare(setting)
            ready = time.time() - began
            with step.backend():
                cell |= compare(plain, step, rounds)
        except Exception as error:  # one variant that fails must not hide the others
            print(f"{label} {name}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
            failed += 1
            continue
        cell["ready_cached_s" if cached else "ready_s"] = ready
        cell["measured"] = datetime.now(UTC).isoformat(timespec="seconds")
        if "memory" in cell:
            cell["memory_ratio"] = cell["memory"] / base["memory"]
        place = ("steps", setting, f"{model}-{tokens}")
        save(out, device, cell, *place, name)
        save(out, device, base | {"ms": cell["plain_ms"], "ratio": 1.0, "memory_ratio": 1.0}, *place, "plain")
        active = f"  loss {cell['loss']:.3f} share {cell['share']:.2f}" if "loss" in cell else ""
        print(
            f"{model:<9}{tokens:<6}{setting:<10}{name:<13}{cell['ms']:8.2f} ms {cell['ratio']:7.3f} ×  memory "
            f"{cell.get('memory_ratio', math.nan):.3f} ×  ready {ready:5.1f} s{active}",
            flush=True,
        )
        del step
        if device == "cuda":
            torch.cuda.empty_cache()
        longest = max(longest, time.time() - began)
    sys.exit(min(failed, 100))


def compare(plain: Step, step: Step, rounds: int) -> dict[str, float]:
    """Times of a step and the plain one, in turns."""
    for one in (plain, step):
        seconds_per_call(one, one.device, 2)  # the first call after another model's may compile again
    repeats = 1 if plain.device == "cpu" else max(2, round(0.15 / seconds_per_call(plain, plain.device, 2)))
    pairs = [[seconds_per_call(one, one.device, repeats) for one in (plain, step)] for _ in range(rounds)]
    ratios = [mine / theirs for theirs, mine in pairs]
    plain_ms, ms = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
    return {"ms": ms, "ratio": statistics.median(ratios), "plain_ms": plain_ms, "spread": max(ratios) - min(ratios)}


def compile_one(setting: str, model: str, tokens: int, variant: str, device: str) -> None:
    """Take one step, so that the caches hold what it compiles."""
    torch.set_float32_matmul_precision("high")
    Step(model, tokens, variant, setting, device).take()


def first_call(variant: str, device: str, out: Path) -> None:
    """Seconds that the first eager step takes longer than the second, with an empty Triton cache.

    A plain model's step has been taken before, and the model is built with plain operations, so that the step meets
    every kernel for the first time.
    """
    from vitfocus.kernels.backends import backend

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        with backend("chunked"):
            plain, step = (Step("deit_s", 197, name, "eager", device) for name in ("plain", variant))
        plain.take()
        longer = seconds_per_call(step.take, device) - seconds_per_call(step.take, device)
    print(f"first call of {variant} with an empty cache: {longer:.1f} s longer", flush=True)
    save(out, device, longer, "first_call_s", variant)
    save(out, device, [name for name in read(out).get("stale_first_calls", []) if name != variant], "stale_first_calls")


class Processes:
    """Runs functions in processes of their own until a deadline; `failed` names those that did not succeed."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.failed: list[str] = []

    def start(self, call: Callable[..., Any], *args: Any) -> Any:
        """Forked, which saves importing everything again; the parent never touches the GPU."""
        process = multiprocessing.get_context("fork").Process(target=call, args=args)
        process.start()
        return process

    def wait(self, process: Any, label: str, deadline: float = math.inf) -> None:
        """Wait for a process; stop it at the deadline."""
        end = min(self.deadline, deadline)
        process.join(None if end == math.inf else max(end - time.time(), 0))
        if process.is_alive():
            process.kill()
            process.join()
            print(f"{label}: stopped, no time left", flush=True)
        elif process.exitcode:
            self.failed.append(label)

    def run(self, label: str, call: Callable[..., Any], *args: Any) -> None:
        """Run one function, if there is time."""
        if time.time() > self.deadline:
            print(f"{label}: left out, no time", flush=True)
        else:
            self.wait(self.start(call, *args), label)


def compile_ahead(planned: list[Case], most: int, device: str, processes: Processes) -> None:
    """Fill the compiler's caches in parallel, for at most 0.4 of the time."""
    jobs = [
        (case.setting, case.model, case.tokens, variant)
        for case in planned
        if case.setting in ("compiled", "recorded")
        for variant in ("plain", *case.variants)
    ]
    began, left = time.time(), processes.deadline - time.time()
    running = [(job, processes.start(compile_one, *job, device)) for job in jobs[:most]]
    for job, process in running:
        processes.wait(process, f"compiling ahead {job}", began + 0.4 * left)
    processes.failed.clear()  # what cannot be compiled will fail again when it is measured
    print(f"compiled {len(running)} ahead in {time.time() - began:.1f} s", flush=True)


def statistics_cost(tokens: int, out: Path) -> None:
    """Reading every layer of some batches of DeiT-S, against the forward passes alone: time and peak memory."""
    name, _, _, sizes = MODELS["deit_s"]
    size, batch = sizes[tokens]
    model = vf.create_model(name, img_size=size).cuda().eval().bfloat16()
    images = torch.randn(batch, 3, size, size, device="cuda", dtype=torch.bfloat16)

    def forward() -> None:
        with torch.no_grad():
            for _ in range(BATCHES):
                model(images)

    def diagnose() -> None:
        vf.diagnose(model, [images] * BATCHES)

    result: dict[str, float] = {}
    for label, call in (("forward", forward), ("diagnose", diagnose)):
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        result[f"{label}_memory"] = float(torch.cuda.max_memory_allocated())
    pairs = [[seconds_per_call(call, "cuda", 2) for call in (forward, diagnose)] for _ in range(3)]
    result["forward_ms"] = 1e3 * statistics.median(forward for forward, _ in pairs)
    result["extra_over_forward"] = statistics.median(read / forward for forward, read in pairs) - 1
    result["memory_ratio"] = result["diagnose_memory"] / result["forward_memory"]
    more, memory = result["extra_over_forward"], result["memory_ratio"]
    print(f"statistics at {tokens}: {more:.2f} × a forward more, memory {memory:.3f} ×", flush=True)
    alone, both = kernel_times(forward, 1), kernel_times(diagnose, 1)
    extra = {name: (taken - alone.get(name, 0.0)) / (12 * BATCHES) for name, taken in both.items()}
    extra = dict(sorted(extra.items(), key=lambda item: -item[1])[:12])
    for kernel, taken in extra.items():
        print(f"      {taken:8.1f} us per layer and batch  {kernel}", flush=True)
    result["extra_us_per_layer"] = extra  # type: ignore[assignment]
    save(out, "cuda", result, "statistics", str(tokens))


def ceiling() -> dict[str, float]:
    """What the device does at best here: copying, and multiplying bf16 matrices."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    one, two = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    target.copy_(source), one @ two
    copy = seconds_per_call(lambda: target.copy_(source), "cuda", 20)
    product = seconds_per_call(lambda: one @ two, "cuda", 20)
    return {"copy_GB_per_s": 2 * source.numel() / copy / 1e9, "bf16_TFLOP_per_s": 2 * 8192**3 / product / 1e12}


def kernel_times(call: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Microseconds of each kernel that a call launches, on the device, by name."""
    for _ in range(min(3, repeats)):
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in seen.key_averages():
        if event.device_time_total:
            times[event.key[:48]] = times.get(event.key[:48], 0.0) + event.device_time_total / repeats
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def kernel_rates(count: int, out: Path) -> None:
    """The operations alone at one of DeiT-S's sizes, forward and backward: microseconds by kernel."""
    from vitfocus.kernels.context.op import share_mean
    from vitfocus.kernels.diversity.op import diversity
    from vitfocus.kernels.pooling.op import mix_dilated, predict_hidden

    save(out, "cuda", ceiling(), "ceiling")
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

    def attend() -> None:
        F.scaled_dot_product_attention(query, key, value).sum().backward()

    def diversify() -> None:
        diversity(query, key, scale=0.125, lse=lse).backward()

    def pool() -> None:
        hidden = predict_hidden(tokens, first, (side, side))
        mixed = mix_dilated(tokens, hidden, second)
        mixed.backward(mixed.detach())

    def share() -> None:
        mixed = share_mean(tokens)
        mixed.backward(mixed.detach())

    rates: dict[str, Any] = {}
    print(f"N={count}: loss {float(diversity(query, key, scale=0.125, lse=lse)):.3f}", flush=True)
    for name, call in {"sdpa": attend, "adl": diversify, "tap": pool, "cb": share}.items():
        rates[name] = found = kernel_times(call)
        print(f"N={count} {name}: {sum(found.values()):8.1f} us in kernels", flush=True)
        for kernel, taken in list(found.items())[:9]:
            print(f"      {taken:8.1f}  {kernel}", flush=True)
    save(out, "cuda", rates, "kernels", f"N={count}")


def main() -> None:
    def several(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=several, default=list(MODELS), help=",".join(MODELS))
    parser.add_argument("--sizes", type=several, help="tokens, such as 197,1025 (default: all that a model has)")
    parser.add_argument("--settings", type=several, default=list(SETTINGS), help=",".join(SETTINGS))
    parser.add_argument("--variants", type=several, dest="asked", help=",".join(VARIANTS))
    parser.add_argument("--parts", type=several, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many; finished results stay")
    parser.add_argument("--missing", action="store_true", help="only what the results lack, or have marked as stale")
    parser.add_argument("--ahead", type=int, default=0, help="compile so many variants first, in parallel")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="only build the models, and print how active the loss is")
    parser.add_argument("--toy", action="store_true", help="tiny models on the CPU, to test this script; needs --out")
    args = parser.parse_args()
    args.variants = list(DEFAULT if args.asked is None else args.asked)
    sizes = [int(size) for size in args.sizes or []]
    if args.check:
        raise SystemExit(check(args.models, sizes, args.variants) > 0)
    if args.toy and args.out == RESULTS:
        parser.error("--toy needs --out: its times are not results.")
    device = "cpu" if args.toy else "cuda"
    processes = Processes(time.time() + args.seconds)
    processes.run("looking for a GPU", look_for_gpu if device == "cuda" else os.getpid)
    if processes.failed:
        print("step_cost measures GPU kernels, and there is no CUDA device here; skipped.")
        return
    known = read(args.out)
    planned = list(cases(args, known))
    if args.ahead:
        compile_ahead(planned, args.ahead, device, processes)
    for case in planned:
        if case.setting == "first":
            for variant in case.variants:
                processes.run(f"first call of {variant}", first_call, variant, device, args.out)
        else:
            label = f"{case.model} {case.tokens} {case.setting}"
            rest = (args.rounds, device, args.out, processes.deadline, args.ahead > 0)
            processes.run(label, measure_case, case, *rest)
    for tokens in [size for size in MODELS["deit_s"][3] if device == "cuda" and (not sizes or size in sizes)]:
        for part, call in (("kernels", kernel_rates), ("statistics", statistics_cost)):
            key = f"N={tokens}" if part == "kernels" else str(tokens)
            there = known.get(part, {}).get(key)
            if part in args.parts and not (args.missing and there is not None and "stale" not in there):
                processes.run(f"{part} at {tokens}", call, tokens, args.out)
    if processes.failed:
        raise SystemExit("Not everything could be measured: " + "; ".join(processes.failed))


def look_for_gpu() -> None:
    """Exits with an error if there is no GPU."""
    sys.exit(not torch.cuda.is_available())


if __name__ == "__main__":
    main()
