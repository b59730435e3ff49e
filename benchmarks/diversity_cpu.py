"""The diversification loss on the CPU, forward and backward: the chunked form against one that stores whole maps.

    python benchmarks/diversity_cpu.py [--turns 7] [--note "what else ran"]

DeiT-S's heads (6 heads of 64 channels), float32, one thread. The two forms alternate, and the minimum CPU time is
reported, because other work on the machine only adds time. Memory is the peak of torch's allocator without queries and
keys. The results must agree, otherwise nothing is written. Writes benchmarks/results/diversity-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from vitfocus.core.files import write_text
from vitfocus.kernels.backends import backend
from vitfocus.kernels.diversity.op import diversity

#: Tokens and images.
SIZES = ((50, 256), (197, 64), (785, 8), (2000, 1), (4097, 1))
#: Options of the loss.
FORMS: dict[str, dict[str, Any]] = {
    "official": {},
    "paper": {"variant": "paper"},
    "each head": {"heads": "each"},
    "256 rows": {"rows": 256},
}
HEADS, WIDTH = 6, 64
#: Maps that the naive form may make, in numbers; beyond it the chunks run alone.
MOST = 1 << 25
RESULTS = Path(__file__).parent / "results" / "diversity-cpu.json"


def tokens(count: int, images: int) -> Tensor:
    """Queries or keys (B, H, N, D) as a projection leaves them."""
    return torch.randn(images, count, HEADS, WIDTH).transpose(1, 2).requires_grad_()


def step(name: str, query: Tensor, key: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """The loss and its gradients by one backend."""
    with backend(name):
        loss = diversity(query, key, scale=WIDTH**-0.5, **options)
        return loss.detach(), *torch.autograd.grad(loss, (query, key))


def seconds(name: str, query: Tensor, key: Tensor, options: dict[str, Any]) -> float:
    """CPU time of one step."""
    start = time.process_time()
    step(name, query, key, options)
    return time.process_time() - start


def peak_megabytes(call: Callable[[], Any]) -> float:
    """Most memory that the tensors made by a call held at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak / 2**20


def measure(count: int, images: int, form: str, turns: int) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(0)
    query, key, options = tokens(count, images), tokens(count, images), dict(FORMS[form])
    rows = options.get("rows")
    if rows is not None:
        options["rows"] = torch.randperm(count)[:rows]
    naive = images * HEADS * count * (rows or count) <= MOST
    names = ["reference", "chunked"] if naive else ["chunked"]
    if naive:
        for one, two in zip(*(step(name, query, key, options) for name in names), strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-3)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(turns):
        for name in names:
            times[name].append(seconds(name, query, key, options))
    result: dict[str, Any] = {"tokens": count, "images": images, "form": form}
    for name in names:
        result[f"{name}_ms"] = round(1e3 * min(times[name]), 2)
        result[f"{name}_peak_mb"] = round(peak_megabytes(partial(step, name, query, key, options)), 2)
    if naive:
        result["times_faster"] = round(min(times["reference"]) / min(times["chunked"]), 3)
    print(result, flush=True)
    return result


def processor() -> str:
    """The CPU's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--note", default="", help="what else ran on the machine")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [(count, images, form) for count, images in SIZES for form in FORMS if form != "256 rows" or count > 256]
    rows = [measure(*size, args.turns if size[0] < 1000 else max(2, args.turns // 2)) for size in sizes]
    record = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": processor(), "cores": os.cpu_count(), "threads_used": 1},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "note": args.note,
        "results": rows,
    }
    write_text(RESULTS, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
