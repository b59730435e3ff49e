"""Which block sizes are fast: the kernels of ADL, TAP and the statistics with several, at DeiT-S's sizes, in
microseconds.

    python benchmarks/kernel_tiles.py                    # needs a GPU, and takes five minutes at most
    python benchmarks/kernel_tiles.py --kinds joint,query,key --sizes 197 --seconds 60 --ahead 14

Prints one row per choice, the one in use marked, and at the end the fastest of each kind. What does not fit, or comes
too late, is left out. `--ahead 14` first compiles the choices in so many processes. Results go to
benchmarks/results/kernel-tiles-cuda.json, row by row; what is there already stays, unless it is measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from step_cost import MODELS, kernel_times

from vitfocus.kernels.diversity import op as diversity_op
from vitfocus.kernels.pooling import mixing
from vitfocus.kernels.pooling.op import pool_tokens
from vitfocus.kernels.shared_memory import LARGE
from vitfocus.kernels.statistics import triton as statistics_kernels

#: Rows, columns, warps, stages; first the one in use (of the statistics, `in_use` says which it is).
DIVERSITY = {
    "mean": [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2), (128, 64, 8, 3)],
    "query": [(64, 32, 4, 4), (64, 32, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2)],
    "key": [(64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3), (64, 32, 4, 3)],
    "joint": [(32, 256, 8, 3), (32, 256, 8, 2), (32, 256, 8, 1), (16, 256, 8, 2)],
}
#: Rows and columns of tiles of the stored mean map.
MAPS = {
    "unit": [(16, 128), (32, 64), (32, 128), (16, 256)],
    "gradient": [(16, 256), (8, 256), (8, 512), (32, 128)],
}
#: A fifth number limits the registers of a thread.
STATISTICS: dict[str, list[tuple[int, ...]]] = {
    "rows": [
        *((64, 64, 4, stages) for stages in (3, 2, 4)),
        *((64, 32, 4, stages) for stages in (3, 4)),
        *((128, 64, 8, stages) for stages in (3, 2)),
        *((128, 32, warps, 3) for warps in (4, 8)),
        *((128, 128, 8, 2), (64, 128, 8, 2), (64, 128, 4, 2), (32, 64, 4, 3), (64, 64, 4, 3, 128), (64, 64, 8, 3)),
    ],
    "columns": [
        *((64, 64, 4, stages) for stages in (3, 2, 4)),
        *((32, 64, 4, stages) for stages in (3, 4)),
        *((64, 128, 8, stages) for stages in (3, 2)),
        *((32, 128, warps, 3) for warps in (4, 8)),
        *((128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 4, 2), (64, 32, 4, 3), (64, 64, 4, 3, 128), (64, 64, 8, 3)),
    ],
}
#: Patches, channels at a time, warps, stages; the first is in use for N=197 and the second for N=1025.
POOLING = {
    "mix": [(64, 64, 4, 3), (64, 64, 8, 2), (64, 64, 8, 3), (64, 32, 4, 3), (64, 32, 4, 4)],
    "unmix": [(64, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 2)],
    "score": [(64, 64, 8, 3), (64, 64, 8, 2), (64, 64, 4, 3), (64, 32, 4, 4), (64, 64, 8, 4)],
}
#: The kernels whose settings these are. The joint gradient replaces both others.
SHOWN = {
    "mean": ("mean_pass",),
    "unit": ("unit_pass",),
    "gradient": ("gradient_pass",),
    "query": ("query_gradient",),
    "key": ("key_gradient",),
    "joint": ("joint_gradient",),
    "rows": ("row_pass",),
    "columns": ("column_pass",),
    "mix": ("mix",),  # of both directions
    "unmix": ("mix",),
    "score": ("score_gradient",),
}
CHOICES = DIVERSITY | MAPS | STATISTICS | POOLING
#: What the numbers of a choice are; the last one may be absent.
SETTINGS = ("BM", "BN", "num_warps", "num_stages", "maxnreg")
RESULTS = Path(__file__).parent / "results" / "kernel-tiles-cuda.json"


def statistics_times(count: int, kind: str, choice: tuple[int, ...]) -> dict[str, float]:
    """Kernel times of the statistics of attention."""
    pixels, batch = MODELS["deit_s"][3][count]
    query, key, value = torch.randn(batch, count, 3, 6, 64, device="cuda", dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)
    lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=0.125)[1]
    settings = statistics_kernels.block_settings

    def chosen(which: str, *rest: Any) -> dict[str, Any]:
        made = settings(which, *rest)
        return made | dict(zip(SETTINGS, choice, strict=False)) if which == kind else made

    statistics_kernels.block_settings = chosen
    try:
        sides = [pixels // 16] * 4 + [1]
        return kernel_times(lambda: statistics_kernels.statistics((query, key, None, lse), 0.125, sides, 2.0, 3))
    finally:
        statistics_kernels.block_settings = settings


def diversity_times(count: int, kind: str, choice: tuple[int, ...]) -> dict[str, float]:
    """Kernel times of the loss and its gradient."""
    _, batch = MODELS["deit_s"][3][count]
    query, key, value = torch.randn(batch, count, 3, 6, 64, device="cuda", dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)
    # All queries like the same keys, so that a third of the columns is above the threshold.
    key = key + 3 * (torch.rand(batch, 1, count, 1, device="cuda") < 0.3).to(key.dtype)
    query, key = (query + 1).requires_grad_(), key.requires_grad_()
    lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=0.125)[1].detach()
    settings, joint, tiles = diversity_op._Launch.settings, diversity_op._Launch.joint, dict(diversity_op.MAP_TILES)

    def chosen(self: Any, which: str) -> dict[str, Any]:
        made = settings(self, which)
        return made | dict(zip(("BM", "BN", "num_warps", "num_stages"), choice, strict=True)) if which == kind else made

    diversity_op._Launch.settings = chosen  # type: ignore[method-assign]
    diversity_op._Launch.joint = property(  # type: ignore[method-assign]
        lambda self: self.keys <= 256 and kind not in ("query", "key")
    )
    if kind in MAPS:
        diversity_op.MAP_TILES[kind] = choice
    try:
        return kernel_times(lambda: diversity_op.diversity(query, key, scale=0.125, lse=lse).backward())
    finally:
        diversity_op._Launch.settings = settings  # type: ignore[method-assign]
        diversity_op._Launch.joint = joint  # type: ignore[method-assign]
        diversity_op.MAP_TILES.update(tiles)


def pooling_times(count: int, kind: str, choice: tuple[int, ...]) -> dict[str, float]:
    """Kernel times of the pooling and its gradient."""
    pixels, batch = MODELS["deit_s"][3][count]
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    tokens, first = draw(batch, count, 384).requires_grad_(), draw(4, 384, 3, 3).float()
    second, sizes = draw(4, 4, 3, 3).float(), mixing.tile_sizes
    norm = (torch.ones(4, device="cuda"), torch.zeros(4, device="cuda"), 1e-5)
    mixing.tile_sizes = lambda which, *rest: choice if which == kind else sizes(which, *rest)  # type: ignore

    def call() -> None:
        mixed, _ = pool_tokens(tokens, first, norm, second, (pixels // 16, pixels // 16))
        mixed.backward(mixed.detach())

    try:
        return kernel_times(call)
    finally:
        mixing.tile_sizes = sizes


def measure(count: int, kind: str, choice: tuple[int, ...]) -> dict[str, float]:
    """Microseconds of every kernel of the operation with this choice."""
    if kind in STATISTICS:
        return statistics_times(count, kind, choice)
    return (diversity_times if kind in DIVERSITY | MAPS else pooling_times)(count, kind, choice)


def in_use(count: int, kind: str) -> tuple[int, ...]:
    """The choice that the kernels make by themselves."""
    if kind not in STATISTICS:
        return CHOICES[kind][0]
    made = statistics_kernels.block_settings(kind, 64, 2, count, count, False, LARGE)
    return tuple(made[name] for name in SETTINGS if name in made)


def compile_some(wanted: list[tuple[int, str, tuple[int, ...]]]) -> None:
    """Run these once, for what they leave in the compiler's cache."""
    globals()["kernel_times"] = lambda call: call() or {}  # in this process alone
    for one in wanted:
        try:
            measure(*one)
        except Exception as error:  # the measurement itself will say so
            print(f"  ahead {one}: {type(error).__name__}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(one) for one in text.split(",")], default=[197, 1025])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(SHOWN), help=",".join(SHOWN))
    parser.add_argument("--seconds", type=float, default=300, help="no new choice is tried after so many")
    parser.add_argument("--ahead", type=int, default=0, help="compile in so many processes first")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    end = time.perf_counter() + args.seconds
    wanted = [
        (count, kind, choice)
        for count in args.sizes
        for kind in args.kinds
        if kind != "joint" or count <= 256
        for choice in CHOICES[kind]
    ]
    if args.ahead:  # forked before this process touches the GPU
        fork = multiprocessing.get_context("fork")
        processes = [
            fork.Process(target=compile_some, args=(wanted[part :: args.ahead],)) for part in range(args.ahead)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, end - args.seconds * 0.5 - time.perf_counter()))
            if process.is_alive():
                process.kill()
                process.join()
    if not torch.cuda.is_available():
        print("kernel_tiles measures GPU kernels, and there is no CUDA device here; skipped.")
        return
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    result: dict[str, dict[str, float]] = json.loads(args.out.read_text())["us"] if args.out.is_file() else {}
    best: dict[tuple[str, int], tuple[float, tuple[int, ...]]] = {}
    for count, kind, choice in wanted:
        if time.perf_counter() > end:
            break
        try:
            found = measure(count, kind, choice)
        except Exception as error:  # does not fit
            print(f"  {kind} {choice} N={count}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        mine = {name: found.get(name, 0.0) for name in SHOWN[kind]}
        result[f"{kind} {choice} N={count}"] = mine
        content = {"device": torch.cuda.get_device_name(), "versions": versions, "us": result}
        args.out.write_text(json.dumps(content, indent=1) + "\n")
        best[kind, count] = min(best.get((kind, count), (math.inf, choice)), (sum(mine.values()), choice))
        times = "  ".join(f"{name} {taken:8.1f}" for name, taken in mine.items())
        mark = "*" if choice == in_use(count, kind) else " "
        print(f"{mark} {kind:<9}{choice!s:<21} N={count:<5} {times}  all {sum(found.values()):8.1f}", flush=True)
    for (kind, count), (taken, choice) in best.items():
        print(f"fastest {kind:<9} N={count:<5} {choice!s:<18} {taken:8.1f} us")


if __name__ == "__main__":
    main()
