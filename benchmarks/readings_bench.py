"""Readings: the two dense passes by variant, then the whole measurement before and after. LIMIT (seconds) in all.

    python3 .device-data/readings/bench.py          # with TRITON_INTERPRET=1 and --toy, on a CPU
"""

import json, multiprocessing, os, select, statistics as stats, subprocess, sys, threading, time
from pathlib import Path

START, LIMIT = time.time(), float(os.environ.get("LIMIT", "50"))
HERE = Path(__file__).resolve().parent
TOY, CHILD = "--toy" in sys.argv, "--child" in sys.argv
BEFORE = Path(os.environ.get("BEFORE_SRC", HERE.parents[1] / "src"))
SRC = BEFORE if "before" in sys.argv else Path(os.environ.get("SRC", HERE / "src"))
sys.path.insert(0, str(SRC))

import torch

import vitfocus as vf

SIZES = {4097: (1024, 8), 1025: (512, 64), 197: (224, 256)} if not TOY else {26: (80, 2), 17: (64, 2)}
DEVICE = "cpu" if TOY else "cuda"
HALF = torch.float16 if TOY else torch.bfloat16


def left():
    return LIMIT - (time.time() - START)


def short(error):
    return f"{type(error).__name__} {' '.join(str(error).split())[:160]}"


# A program's own side, the other side, warps, stages, most registers, one loop, TMA. Best guesses first.
VARIANTS = {
    "rows": {
        "default": None,
        "128x64,8w,tma1,r128": (128, 64, 8, 3, 128, True, True),
        "64x64,tma1,r128": (64, 64, 4, 3, 128, True, True),
        "64x32,tma1,r80": (64, 32, 4, 3, 80, True, True),
        "128x64,8w,plain1,r128": (128, 64, 8, 3, 128, True, False),
        "64x64,plain1,r128": (64, 64, 4, 3, 128, True, False),
        "128x64,8w,tma2,r128": (128, 64, 8, 3, 128, False, True),
        "64x32,plain1": (64, 32, 4, 3, None, True, False),
        "128x32,8w,tma1": (128, 32, 8, 3, None, True, True),
        "64x64,tma2,r128": (64, 64, 4, 3, 128, False, True),
    },
    "columns": {
        "default": None,
        "64x32,tma1": (64, 32, 4, 3, None, True, True),
        "128x32,8w,tma1": (128, 32, 8, 3, None, True, True),
        "128x64,8w,tma1,r128": (128, 64, 8, 3, 128, True, True),
        "64x32,plain1": (64, 32, 4, 3, None, True, False),
        "64x64,tma1": (64, 64, 4, 3, None, True, True),
        "128x32,8w,plain1": (128, 32, 8, 3, None, True, False),
        "64x64,tma1,r128": (64, 64, 4, 3, 128, True, True),
        "128x64,8w,plain1,r128": (128, 64, 8, 3, 128, True, False),
        "64x64,8w,tma1": (64, 64, 8, 3, None, True, True),
    },
}
KERNELS = {"rows": "row_pass", "columns": "column_pass"}


def load():
    from vitfocus.kernels.statistics import triton as kernels

    return kernels


def settings_of(kind, name):
    """What goes into `FASTEST` for this variant."""
    if VARIANTS[kind][name] is None:
        return {}
    own, other, warps, stages, most, one_loop, tma = VARIANTS[kind][name]
    bm, bn = (own, other) if kind == "rows" else (other, own)
    made = {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages, "ONE_LOOP": one_loop, "TMA": tma}
    return made | ({"maxnreg": most} if most else {})


class using:
    """Within it, each kind in `chosen` is launched as that variant."""

    def __init__(self, kernels, chosen):
        self.kernels, self.chosen = kernels, {kind: settings_of(kind, name) for kind, name in chosen.items()}

    def __enter__(self):
        self.original = self.kernels.block_settings
        self.kernels.block_settings = lambda kind, *rest: self.original(kind, *rest) | self.chosen.get(kind, {})

    def __exit__(self, *_):
        self.kernels.block_settings = self.original


def inputs(count, batch):
    """Queries and keys as a projection lays them out; all queries like some keys, so some entries are above τ/K."""
    torch.manual_seed(0)
    whole = torch.randn(batch, count, 3, 6, 64, device=DEVICE, dtype=HALF)
    whole[:, :, 1] += 3 * (torch.rand(batch, count, 1, 1, device=DEVICE) < 0.1).to(HALF)
    whole[:, :, 0] += 0.2
    return whole.permute(2, 0, 3, 1, 4)[:2].unbind()


def call(kernels, query, key, lse=None):
    side = int((query.shape[2] - 1) ** 0.5)
    top = max(1, round(0.05 * query.shape[2]))
    return kernels.statistics((query, key, None, lse), 0.125, [side] * 4 + [1], 2.0, top)


def launch_of(kernels, kind, name, query, key, lse):
    """The kernel, its arguments and keywords as it would be launched; without a name, as the source has it."""
    calls, one = [], type(kernels.row_pass)
    original = one.run
    one.run = lambda self, *args, **keywords: calls.append((self, args, keywords))
    try:
        with using(kernels, {kind: name} if name else {}):
            call(kernels, query, key, lse)
    finally:
        one.run = original
    return next(one for one in calls if one[0].fn.__name__ == KERNELS[kind])


def compile_some(cases):
    for count, kind, name in cases:
        try:
            kernels = load()
            query, key = inputs(count, 1)
            kernel, args, keywords = launch_of(kernels, kind, name, query, key, torch.zeros(1, 6, count, device=DEVICE))
            _ = kernel.run(*args, **keywords | {"warmup": True}).run
        except Exception as error:
            print(f"COMPILE {kind} {name}: {short(error)}", flush=True)


def microseconds(kernel, args, keywords):
    if TOY:
        begin = time.perf_counter()
        kernel.run(*args, **keywords)
        return 1e6 * (time.perf_counter() - begin)
    for _ in range(2):
        kernel.run(*args, **keywords)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            kernel.run(*args, **keywords)
    graph.replay()
    times = []
    for _ in range(7):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(); graph.replay(); last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 250)
    return stats.median(times)


def time_passes(kernels, count, names):
    """Microseconds by kind and variant, with inputs of the measurement's size. `names` gives a kind's variants."""
    from vitfocus.kernels.tiles import lower_norms, normalisers

    found = {"rows": {}, "columns": {}}
    query, key = inputs(count, SIZES[count][1])
    lse = normalisers(query, key, None, 0.125)
    norms = lower_norms(lse)
    for kind in found:
        for name in names(kind):
            if left() < LIMIT * 0.24 and not TOY:
                print("  out of time for variants", flush=True)
                break
            try:
                kernel, args, keywords = launch_of(kernels, kind, name, query, key, lse)
                args[2].copy_(norms)
                if kind == "columns":
                    args[4].fill_(1.0), args[5].fill_(1.0)
                found[kind][name] = microseconds(kernel, args, keywords)
            except Exception as error:
                print(f"  FAILS {kind} {name} N={count}: {short(error)}", flush=True)
    return found


def reference(query, key):
    from vitfocus.kernels.statistics.reference import Grids, map_statistics

    side, count = int((query.shape[2] - 1) ** 0.5), query.shape[2]
    maps = (query.double() @ key.double().mT * 0.125).softmax(-1)
    grids = Grids((side, side), (side, side), 1)
    return map_statistics(maps, None, grids=grids, threshold=2.0, top=max(1, round(0.05 * count)))


def errors(made, wanted):
    entropy, numbers = made
    worst = [float((entropy.double() - wanted.entropy).abs().max())]
    for one, other in zip(numbers.double(), wanted.numbers):
        worst.append(float((one - other).norm() / other.norm().clamp_min(1e-9)))
    return worst


def verdict(kernels, chosen, query, key, wanted, base):
    """`ok`, or what is wrong with these variants, against float64 and twice the same bits."""
    try:
        with using(kernels, chosen):
            made, again = call(kernels, query, key), call(kernels, query, key)
        if not all(torch.equal(a, b) for a, b in zip(made, again)):
            return "NOT REPEATABLE"
        wrong = [f"{a:.0e}" for a, b in zip(errors(made, wanted), base) if not a <= max(3 * b, 2e-5)]
        return f"WRONG {wrong}" if wrong else "ok"
    except Exception as error:
        return f"FAILS {short(error)}"


def check(kernels, count, found):
    """By kind: the fastest variant that is right, of the first four, and its verdict."""
    query, key = inputs(count, 1 if count > 2000 else 2)
    wanted = reference(query, key)
    base = errors(call(kernels, query, key), wanted)
    print(f"N={count} default vs float64:", " ".join(f"{one:.0e}" for one in base), flush=True)
    result = {}
    for kind, times in found.items():
        for name in sorted(times, key=times.get)[:4]:
            said = verdict(kernels, {kind: name}, query, key, wanted, base)
            result.setdefault(kind, (name, said))
            if said == "ok":
                result[kind] = name, said
                break
            print(f"  {kind} {name} N={count}: {said}", flush=True)
    return result


def summary(times, present, checked):
    """A line per pass and size: what a reader needs to choose."""
    lines = []
    for kind in VARIANTS:
        for count in SIZES:
            found = times.get(count, {}).get(kind, {})
            if found:
                name = min(found, key=found.get)
                name, said = checked.get(count, {}).get(kind, (name, "not checked"))
                was = present.get(f"{kind} {count}")
                lines.append(
                    f"SUMMARY {KERNELS[kind]} N={count}: present {was and round(was, 1)} µs, new default"
                    f" {round(found.get('default', float('nan')), 1)}, best {name} {found[name]:.1f}, check {said}"
                )
    return "\n".join(lines)


def child():
    """Answers commands, one JSON a line: `time` the present passes; `measure` as `prepare_statistics` does."""
    models = {}
    for count, (size, batch) in SIZES.items():
        model = vf.create_model("deit_small_patch16_224", img_size=size).to(DEVICE).eval().to(HALF)
        models[count] = model, torch.randn(batch, 3, size, size, device=DEVICE, dtype=HALF)
        vf.diagnose(model, [models[count][1][:1]] * 2)
    print("ready", flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        if given["do"] == "time":
            made = {}
            for count in SIZES:
                try:
                    for kind, times in time_passes(load(), count, lambda kind: [None]).items():
                        made |= {f"{kind} {count}": one for one in times.values()}
                except Exception as error:
                    print(f"  FAILS present N={count}: {short(error)}", flush=True)
            print("times " + json.dumps(made), flush=True)
            continue
        label, end = sys.argv[-1], time.time() + given["seconds"]
        print(f"{label}: {vf.__file__}", flush=True)
        for count, (model, images) in models.items():
            if time.time() > end - 2 and not TOY:
                print(f"out of time for {label} N={count}", flush=True)
                break
            best = {kind: given["best"][f"{kind} {count}"] for kind in VARIANTS if f"{kind} {count}" in given["best"]}
            try:
                with using(load(), best):
                    measure(f"{label} {'/'.join(best.values())}", count, model, images)
            except Exception as error:
                print(f"FAILS {label} N={count}: {short(error)}", flush=True)
        break


def timed(call):
    if not TOY:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if not TOY:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(label, count, model, images):
    batches = 1 if TOY else 8

    def forward():
        with torch.no_grad():
            for _ in range(batches):
                model(images)

    def diagnose():
        vf.diagnose(model, [images] * batches)

    if not TOY:
        diagnose(), forward(), diagnose()
    pairs = [(timed(forward), timed(diagnose)) for _ in range(1 if TOY else 3)]
    alone = stats.median(one for one, _ in pairs)
    extra = stats.median(two / one for one, two in pairs) - 1
    wall = 1e6 * alone * extra / (12 * batches)
    print(f"{label} N={count}: forward {1e3 * alone:.1f} ms, extra {extra:.3f}, µs per layer {wall:.0f}", flush=True)
    if TOY:
        return
    took = {}
    for kind, one in (("forward", forward), ("diagnose", diagnose)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            one()
            torch.cuda.synchronize()
        took[kind] = {e.key[:28]: e.device_time_total for e in seen.key_averages() if e.device_time_total}
    more = {k: (v - took["forward"].get(k, 0)) / (12 * batches) for k, v in took["diagnose"].items()}
    order = sorted(more, key=lambda k: -more[k])[:8]
    print(f"   kernels {sum(more.values()):.0f}: " + ", ".join(f"{k} {more[k]:.1f}" for k in order), flush=True)


def start(which):
    paths = [str(BEFORE if which == "before" else SRC), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, __file__, *(["--toy"] if TOY else []), "--child", which]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ready(one, seconds):
    """Waits so long for the process; False if it has failed. One that is late is used all the same."""
    timer = threading.Timer(left() + 6 if not TOY else 900, one.kill)
    timer.daemon = True
    timer.start()
    if not select.select([one.stdout], [], [], max(0.1, seconds) if not TOY else None)[0]:
        print("a process is late: its work on the GPU may disturb the first times", flush=True)
        return True
    return one.stdout.readline() == "ready\n"


def ask(one, **given):
    one.stdin.write(json.dumps(given) + "\n")
    one.stdin.flush()


def compile_ahead():
    """In forked processes, before this one touches the GPU. N = 197 has a grid's side of its own in the row pass."""
    cases = [(count, kind, name) for kind in VARIANTS for count in ((1025, 197) if kind == "rows" else (1025,))
             for name in VARIANTS[kind]]  # fmt: skip
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=compile_some, args=(cases[part::14],)) for part in range(14)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(max(0.1, left() - LIMIT * 0.6))
        if one.is_alive():
            one.kill()


def main():
    times, present, checked = {}, {}, {}
    children = {which: start(which) for which in ("before", "after")}
    try:
        if not TOY:
            compile_ahead()
    except Exception as error:
        print(f"COMPILE: {short(error)}", flush=True)
    print(f"compiled at {time.time() - START:.0f} s; {vf.__file__}", flush=True)
    for which, one in list(children.items()):  # until they are ready, they use the GPU
        if not ready(one, left() - LIMIT * 0.5):
            print(f"{which}: the process failed", flush=True)
            one.kill()
            del children[which]
    print(f"ready at {time.time() - START:.0f} s", flush=True)
    kernels = load()
    for count in SIZES:
        try:
            times[count] = time_passes(kernels, count, VARIANTS.get)
            for kind, found in times[count].items():
                listed = "; ".join(f"{name} {found[name]:.1f}" for name in sorted(found, key=found.get))
                print(f"N={count} {kind}: {listed}", flush=True)
        except Exception as error:
            print(f"STOPPED N={count}: {short(error)}", flush=True)
    if "before" in children:
        try:
            ask(children["before"], do="time")
            for line in children["before"].stdout:
                if line.startswith("times "):
                    present = json.loads(line[6:])
                    break
                if line != "ready\n":
                    print(line, end="", flush=True)
        except Exception as error:
            print(f"present: {short(error)}", flush=True)
    print(f"swept at {time.time() - START:.0f} s", flush=True)
    for count in SIZES:
        try:
            checked[count] = check(kernels, count, times.get(count, {}))
        except Exception as error:
            print(f"STOPPED check N={count}: {short(error)}", flush=True)
    print(summary(times, present, checked), flush=True)
    print(f"checked at {time.time() - START:.0f} s", flush=True)
    best = {f"{kind} {count}": name for count, kinds in checked.items() for kind, (name, said) in kinds.items()
            if said == "ok"}  # fmt: skip
    try:
        torch.cuda.empty_cache()
    except Exception as error:
        print(f"after the checks: {short(error)}", flush=True)
    for number, (which, one) in enumerate(children.items()):
        try:
            seconds = max(5.0, (left() - 1) / (len(children) - number))
            given = {"do": "measure", "best": best if which == "after" else {}, "seconds": seconds}
            out, _ = one.communicate(json.dumps(given) + "\n", timeout=max(8.0, left() + 5) if not TOY else None)
            print(out.removeprefix("ready\n"), end="", flush=True)
        except Exception as error:
            one.kill()
            print(f"{which}: {short(error)}", flush=True)
    print(summary(times, present, checked), flush=True)
    for kind in VARIANTS:
        for count in SIZES:
            if f"{kind} {count}" in best:
                print(f"FASTEST {kind} N={count}: {settings_of(kind, best[f'{kind} {count}'])}")
    print(f"done at {time.time() - START:.0f} s", flush=True)


if __name__ == "__main__":
    child() if CHILD else main()
