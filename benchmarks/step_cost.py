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

Each variant has a process of its own, in which it and the plain model get ready, so that an error on the GPU spoils no
other and a time limit holds. `--seconds` leaves out what does not fit; the cases of `ORDER` come first. With
`--at-once 6` so many processes compile at the same time; they are stopped while one of them measures (`_turns.py`), and
so is what `--pause` names. Results go into benchmarks/results/step-cost-cuda.json, one variant at a time; what is there
already stays, unless it is measured again. `--toy` tests the script itself: all of it with tiny models on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
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
from _turns import SETTLE, Job, Result, gpu_name, take_turns
from torch.nn import functional as F

import vitfocus as vf
from vitfocus.core.files import write_text
from vitfocus.treatments.cost import seconds_per_call

#: What is measured first if time is limited: setting, model, tokens and variants.
ORDER = (
    ("recorded", "deit_s", 197, ("cb", "tap", "adl", "all")),
    ("compiled", "deit_s", 197, ("cb", "tap", "adl", "all")),
    ("eager", "deit_s", 197, ("cb", "tap", "adl", "adl-paper", "all")),
    ("recorded", "vit_ti4", 65, ("tap", "adl", "tap+adl")),
    ("recorded", "deit_s", 1025, ("adl", "all", "tap", "cb")),
    ("recorded", "deit_s", 4097, ("adl", "all", "tap", "cb")),
    ("first", "deit_s", 197, ("adl", "all", "tap", "cb")),
    ("eager", "deit_s", 1025, ("adl", "all", "tap", "cb")),
    ("recorded", "vit_b", 197, ("adl", "tap", "all", "cb")),
    ("recorded", "swin_t", 3136, ("adl", "tap", "all", "cb")),
    ("recorded", "fan_s", 196, ("adl", "tap", "all", "cb")),
    ("eager", "vit_b", 197, ("adl", "tap", "all", "cb")),
    ("eager", "swin_t", 3136, ("adl", "tap", "all", "cb")),
    ("eager", "fan_s", 196, ("adl", "tap", "all", "cb")),
    ("eager", "deit_s", 4097, ("adl", "all", "tap", "cb")),
)
DEFAULT = ("cb", "tap", "adl", "adl-paper", "all")
PARTS = ("steps", "first", "kernels", "statistics")
#: Batches of a diagnosis.
BATCHES = 8
RESULTS = Path(__file__).parent / "results" / "step-cost-cuda.json"


class Case(NamedTuple):
    """Variants of one model at one size, in one setting, or their first calls."""

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
        result |= {"device": gpu_name(), "versions": versions}
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


def prepare_step(setting: str, model: str, tokens: int, variant: str, rounds: int, device: str) -> Callable[[], Any]:
    """A variant and the plain model, ready to be timed; measuring returns the results of both."""
    torch.set_float32_matmul_precision("high")
    plain = Step(model, tokens, "plain", setting, device)
    base = plain.prepare(setting)
    if setting == "recorded":  # the plain model's graph needs no compiled code any more
        torch._dynamo.reset()
    step = Step(model, tokens, variant, setting, device)
    cell: dict[str, Any] = step.prepare(setting)
    if "memory" in cell:
        cell["memory_ratio"] = cell["memory"] / base["memory"]

    def measure() -> tuple[dict[str, Any], dict[str, Any]]:
        with step.backend():
            cell.update(compare(plain, step, rounds))
        cell["measured"] = datetime.now(UTC).isoformat(timespec="seconds")
        return cell, base | {"ms": cell["plain_ms"], "ratio": 1.0, "memory_ratio": 1.0}

    return measure


def save_step(result: Result, place: tuple[str, str, int, str], device: str, out: Path) -> None:
    """Write what was measured of a variant, and print it as a row."""
    setting, model, tokens, variant = place
    cell, base = result.value
    cell["ready_s"] = result.ready_seconds
    case = ("steps", setting, f"{model}-{tokens}")
    save(out, device, cell, *case, variant)
    save(out, device, base, *case, "plain")
    active = f"  loss {cell['loss']:.3f} share {cell['share']:.2f}" if "loss" in cell else ""
    print(
        f"{model:<9}{tokens:<6}{setting:<10}{variant:<13}{cell['ms']:8.2f} ms {cell['ratio']:7.3f} ×  memory "
        f"{cell.get('memory_ratio', math.nan):.3f} ×  ready {result.ready_seconds:5.1f} s{active}",
        flush=True,
    )


def compare(plain: Step, step: Step, rounds: int) -> dict[str, float]:
    """Times of a step and the plain one, in turns."""
    for one in (plain, step):
        seconds_per_call(one, one.device, 2)  # the first call after another model's may compile again
    repeats = 1 if plain.device == "cpu" else max(2, round(0.1 / seconds_per_call(plain, plain.device, 2)))
    pairs = [[seconds_per_call(one, one.device, repeats) for one in (plain, step)] for _ in range(rounds)]
    ratios = [mine / theirs for theirs, mine in pairs]
    plain_ms, ms = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
    return {"ms": ms, "ratio": statistics.median(ratios), "plain_ms": plain_ms, "spread": max(ratios) - min(ratios)}


def prepare_first_call(variant: str, device: str) -> Callable[[], float]:
    """Seconds that the first eager step takes longer than the second, with an empty Triton cache.

    A plain model's step has been taken before, and the model is built with plain operations, so that the step meets
    every kernel for the first time.
    """
    from vitfocus.kernels.backends import backend

    folder = tempfile.TemporaryDirectory()
    os.environ["TRITON_CACHE_DIR"] = folder.name
    with backend("chunked"):
        plain, step = (Step("deit_s", 197, name, "eager", device) for name in ("plain", variant))
    plain.take()

    def measure() -> float:
        with folder:
            return seconds_per_call(step.take, device) - seconds_per_call(step.take, device)

    return measure


def save_first_call(result: Result, variant: str, device: str, out: Path) -> None:
    """Write the seconds of a first call."""
    print(f"first call of {variant} with an empty cache: {result.value:.1f} s longer", flush=True)
    save(out, device, result.value, "first_call_s", variant)
    save(out, device, [name for name in read(out).get("stale_first_calls", []) if name != variant], "stale_first_calls")


def prepare_statistics(tokens: int) -> Callable[[], dict[str, Any]]:
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

    result: dict[str, Any] = {}
    for label, call in (("forward", forward), ("diagnose", diagnose)):
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        result[f"{label}_memory"] = float(torch.cuda.max_memory_allocated())
    result["memory_ratio"] = result["diagnose_memory"] / result["forward_memory"]

    def measure() -> dict[str, Any]:
        pairs = [[seconds_per_call(call, "cuda", 2) for call in (forward, diagnose)] for _ in range(3)]
        result["forward_ms"] = 1e3 * statistics.median(forward for forward, _ in pairs)
        result["extra_over_forward"] = statistics.median(read / forward for forward, read in pairs) - 1
        alone, both = kernel_times(forward, 1), kernel_times(diagnose, 1)
        extra = {name: (taken - alone.get(name, 0.0)) / (12 * BATCHES) for name, taken in both.items()}
        result["extra_us_per_layer"] = dict(sorted(extra.items(), key=lambda item: -item[1])[:12])
        return result

    return measure


def save_statistics(result: Result, tokens: int, out: Path) -> None:
    """Write what readings cost, and print it."""
    more, memory = result.value["extra_over_forward"], result.value["memory_ratio"]
    print(f"statistics at {tokens}: {more:.2f} × a forward more, memory {memory:.3f} ×", flush=True)
    for kernel, taken in result.value["extra_us_per_layer"].items():
        print(f"      {taken:8.1f} us per layer and batch  {kernel}", flush=True)
    save(out, "cuda", result.value, "statistics", str(tokens))


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


def prepare_kernels(count: int) -> Callable[[], dict[str, Any]]:
    """The operations alone at one of DeiT-S's sizes, forward and backward: microseconds by kernel."""
    from vitfocus.kernels.context.op import share_mean
    from vitfocus.kernels.diversity.op import diversity
    from vitfocus.kernels.pooling.op import pool_tokens

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
    scale, shift = torch.ones(4, device="cuda").requires_grad_(), torch.zeros(4, device="cuda").requires_grad_()

    def attend() -> None:
        F.scaled_dot_product_attention(query, key, value).sum().backward()

    def diversify() -> None:
        diversity(query, key, scale=0.125, lse=lse).backward()

    def pool() -> None:
        mixed, _ = pool_tokens(tokens, first, (scale, shift, 1e-5), second, (side, side))
        mixed.backward(mixed.detach())

    def share() -> None:
        mixed = share_mean(tokens)
        mixed.backward(mixed.detach())

    calls = {"sdpa": attend, "adl": diversify, "tap": pool, "cb": share}
    for call in calls.values():
        call()

    def measure() -> dict[str, Any]:
        rates = {name: kernel_times(call) for name, call in calls.items()}
        return {"rates": rates, "ceiling": ceiling(), "loss": float(diversity(query, key, scale=0.125, lse=lse))}

    return measure


def save_kernels(result: Result, count: int, out: Path) -> None:
    """Write the times of the kernels, and print the longest."""
    print(f"N={count}: loss {result.value['loss']:.3f}", flush=True)
    for name, found in result.value["rates"].items():
        print(f"N={count} {name}: {sum(found.values()):8.1f} us in kernels", flush=True)
        for kernel, taken in list(found.items())[:9]:
            print(f"      {taken:8.1f}  {kernel}", flush=True)
    save(out, "cuda", result.value["ceiling"], "ceiling")
    save(out, "cuda", result.value["rates"], "kernels", f"N={count}")


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
    parser.add_argument("--at-once", type=int, default=1, help="processes that get ready at a time")
    parser.add_argument("--pause", default="", help="stop processes whose command line contains this while measuring")
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
    if device == "cuda" and not gpu_name():
        print("step_cost measures GPU kernels, and there is no CUDA device here; skipped.")
        return
    known = read(args.out)
    jobs: dict[str, Job] = {}
    savers: dict[str, Callable[[Result], None]] = {}
    for setting, model, tokens, variants in cases(args, known):
        for variant in variants if setting == "first" else (*variants, "plain-again"):
            name = f"first call of {variant}" if setting == "first" else f"{model} {tokens} {setting} {variant}"
            if setting == "first":
                jobs[name] = Job(prepare_first_call, (variant, device))
                savers[name] = partial(save_first_call, variant=variant, device=device, out=args.out)
            else:
                jobs[name] = Job(prepare_step, (setting, model, tokens, variant, args.rounds, device))
                savers[name] = partial(save_step, place=(setting, model, tokens, variant), device=device, out=args.out)
    for tokens in [size for size in MODELS["deit_s"][3] if device == "cuda" and (not sizes or size in sizes)]:
        for part, prepare, saver in (
            ("kernels", prepare_kernels, partial(save_kernels, count=tokens)),
            ("statistics", prepare_statistics, partial(save_statistics, tokens=tokens)),
        ):
            there = known.get(part, {}).get(f"N={tokens}" if part == "kernels" else str(tokens))
            if part in args.parts and not (args.missing and there is not None and "stale" not in there):
                jobs[f"{part} at {tokens}"] = Job(prepare, (tokens,))
                savers[f"{part} at {tokens}"] = partial(saver, out=args.out)
    settle = SETTLE if args.at_once > 1 or args.pause else 0.0
    failed = []
    for result in take_turns(jobs, args.at_once, time.time() + args.seconds, args.pause, settle):
        if result.error:
            print(f"{result.name}: {result.error}", flush=True)
            failed += [result.name] * ("no time" not in result.error)
        else:
            savers[result.name](result)
    if failed:
        raise SystemExit("Not everything could be measured: " + "; ".join(failed))


if __name__ == "__main__":
    main()
