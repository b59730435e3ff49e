"""row_pass and column_pass of the statistics: as they are (base), or tiles and heads in one loop (one: by hand, flat: by the
compiler), with several tiles. Checks against float64, times on the GPU, and what diagnose costs. 60 s. --toy: interpreter."""
from __future__ import annotations
import multiprocessing, os, sys, time, traceback
T0 = time.time()
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
TOY = "--toy" in sys.argv
LIMIT = 60
NAME = os.path.join(os.environ.get("OUT", "/tmp"), "read.txt")
SIZES = {197: (256, 14), 1025: (64, 32), 4097: (8, 64)}
TILES = [(64, 64, 4, 3), (64, 64, 4, 3, 128), (128, 64, 8, 3), (64, 64, 4, 2, 128), (64, 32, 4, 3), (128, 64, 8, 3, 128), (64, 64, 4, 3, 168), (128, 32, 4, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 4)]
FORMS = ["base", "one", "flat"]
CHOICES = [(f, t) for t in TILES for f in FORMS if f != "flat" or t in TILES[:4]]
if TOY:
    SIZES, CHOICES = {65: (1, 8)}, [(f, t) for f in FORMS for t in ((16, 32, 4, 3, 128),)]


def say(*words):
    line = " ".join(map(str, words))
    print(f"[{time.time() - T0:5.1f}] {line}", flush=True)
    with open(NAME, "a") as file:
        file.write(line + "\n")


def put(kind, form, tile):
    """Use this form and tile of "rows" or "columns"; for columns a tile is (keys, rows)."""
    import cand
    from vitfocus.kernels.statistics import triton as st
    if not hasattr(st, "_kept"):
        st._kept = (st.row_pass, st.column_pass, st.block_settings)
    st.row_pass, st.column_pass, settings = st._kept
    name = {"rows": "row_pass", "columns": "column_pass"}[kind]
    if form != "base":
        setattr(st, name, getattr(cand, f"{name}_{form}"))
    sizes = tile if kind == "rows" else (tile[1], tile[0], *tile[2:])
    def chosen(which, *rest):
        made = settings(which, *rest)
        return made | dict(zip(("BM", "BN", "num_warps", "num_stages", "maxnreg"), sizes)) if which == kind else made
    st.block_settings = chosen
    return st


def inputs(count, batch, heads=6, width=64):
    import torch
    torch.manual_seed(0)
    made = torch.randn(batch, count, 3, heads, width, device="cpu" if TOY else "cuda")
    q, k, v = (1.5 * made).to(torch.float16 if TOY else torch.bfloat16).permute(2, 0, 3, 1, 4)
    return q, k, v


def call(st, count, batch, side):
    import torch
    q, k, v = inputs(count, batch)
    lse = torch.zeros(q.shape[:3], device=q.device) if TOY else torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=0.125)[1].detach()
    return lambda: st.statistics((q, k, None, lse), 0.125, [side] * 4 + [1], 2.0, 10)


def ahead(part, parts):
    if TOY: return
    import torch
    for number, (form, tile) in enumerate(CHOICES):
        for kind_number, kind in enumerate(("rows", "columns")):
            if (2 * number + kind_number) % parts != part: continue
            try:
                st = put(kind, form, tile)
                for count, (_, side) in SIZES.items():
                    call(st, count, 1, side)()
                torch.cuda.synchronize()
            except Exception as error:
                print("ahead", kind, form, tile, type(error).__name__, str(error)[:200], flush=True)


def check(kind, form, tile):
    import torch
    from vitfocus.kernels.statistics.reference import Grids, map_statistics
    worst, same = 0.0, True
    for count, side, batch, heads, width in [(65, 8, 1, 3, 16)] if TOY else [(197, 14, 2, 6, 64), (1025, 32, 1, 6, 64), (130, 11, 2, 5, 64), (50, 7, 3, 12, 32)]:
        q, k, _ = inputs(count, batch, heads, width)
        scale, prefix = width**-0.5, count - side * side
        exact = map_statistics((q.double() @ k.double().mT * scale).softmax(-1), grids=Grids((side, side), (side, side), prefix), top=3)
        run = lambda: put(kind, form, tile).statistics((q, k, None, None), scale, [side] * 4 + [prefix], 2.0, 3)
        one, two = run(), run()
        base = put(kind, "base", tile).statistics((q, k, None, None), scale, [side] * 4 + [prefix], 2.0, 3)
        if not all(torch.equal(a, b) for a, b in zip(one, two)):
            return f"FAIL {kind} {form} {tile}: not reproducible"
        same = same and all(torch.equal(a, b) for a, b in zip(one, base))
        worst = max([worst, float((one[0].double() - exact.entropy).abs().max() / exact.entropy.abs().max())] + [float((a.double() - b).abs().max() / b.abs().max().clamp_min(0.1)) for a, b in zip(one[1], exact.numbers)])
        q = q.clone(); q[0, 0, 1, 2] = float("nan")
        if not bool(put(kind, form, tile).statistics((q, k, None, None), scale, [side] * 4 + [prefix], 2.0, 3)[1][:, 0, 0].isnan()[[0, 1, 3, 4, 6, 7, 8]].all()):
            return f"FAIL {kind} {form} {tile}: NaN hidden"
    return f"{'PASS' if worst < 5e-6 else 'FAIL'} {kind} {form} {tile}: worst {worst:.1e}, bitwise as base {same}"


def micros(run, name, repeats=4):
    import torch
    if TOY:
        run(); return 1.0
    run(); torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats): run()
        torch.cuda.synchronize()
    return sum(e.device_time_total for e in seen.key_averages() if e.key.startswith(name)) / repeats


def diagnoses(end):
    import statistics, timm, torch, vitfocus as vf
    from vitfocus.treatments.cost import seconds_per_call
    device = "cpu" if TOY else "cuda"
    for count, (batch, side) in SIZES.items():
        if time.time() - T0 > end: return
        model = timm.create_model("vit_tiny_patch16_224" if TOY else "deit_small_patch16_224", img_size=side * 16, **({"depth": 2} if TOY else {})).to(device).eval()
        model = model if TOY else model.bfloat16()
        images = torch.randn(batch, 3, side * 16, side * 16, device=device, dtype=next(model.parameters()).dtype)
        def forward():
            with torch.no_grad():
                for _ in range(8): model(images)
        def diagnose(): vf.diagnose(model, [images] * 8)
        peaks = []
        for one in (forward, diagnose):
            one()
            if not TOY:
                torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); one(); peaks.append(torch.cuda.max_memory_allocated())
        pairs = [[seconds_per_call(one, device, 1 if TOY else 2) for one in (forward, diagnose)] for _ in range(1 if TOY else 3)]
        say(f"diagnose N={count}: {statistics.median(r / f for f, r in pairs) - 1:.3f} forwards more ({1e3 * statistics.median(f for f, _ in pairs):.1f} ms), memory {peaks[1] / peaks[0] if peaks else 0:.3f}")
        if not TOY:
            tables = []
            for one in (forward, diagnose):
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                    one(); torch.cuda.synchronize()
                table = {}
                for e in seen.key_averages():
                    if e.device_time_total: table[e.key] = table.get(e.key, 0) + e.device_time_total
                tables.append(table)
            more = {n: (t - tables[0].get(n, 0)) / 96 for n, t in tables[1].items()}
            say(f"  N={count} us per layer more, all {sum(tables[1].values()) / 96 - sum(tables[0].values()) / 96:.0f}: " + ", ".join(f"{n[:60]} {more[n]:.1f}" for n in sorted(more, key=lambda n: -more[n])[:12]))


def main():
    open(NAME, "w").close()
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=ahead, args=(part, 14)) for part in range(0 if TOY else 14)]
    for one in workers: one.start()
    for one in workers:
        one.join(max(0.0, 24 - (time.time() - T0)))
        if one.is_alive(): one.kill(); one.join()
    say("compiled")
    best = {}
    order = [(kind, form, tile) for form, tile in CHOICES for kind in ("rows", "columns")]
    for kind, form, tile in order:
        if time.time() - T0 > LIMIT - 18 and not TOY: say("stopped early"); break
        try:
            if form != "base" and tile in [t for _, t in CHOICES][:1] or TOY: say(check(kind, form, tile))
            times = []
            for count, (batch, side) in SIZES.items():
                taken = micros(call(put(kind, form, tile), count, batch, side), {"rows": "row_pass", "columns": "column_pass"}[kind])
                best.setdefault((kind, count), []).append((taken, form, tile)); times.append(f"N={count} {taken:7.1f}")
            say(f"{kind:<8}{form:<5}{str(tile):<22}", "  ".join(times))
        except Exception as error:
            say(f"{kind} {form} {tile}: {type(error).__name__}: {str(error)[:200]}")
    for (kind, count), found in sorted(best.items()):
        first = found and [f for f in found if f[1:] == ("base", CHOICES[0][1])]
        say(f"best {kind} N={count}:", *sorted(found)[:3], " now:", first and round(first[0][0], 1))
    for kind in ("rows", "columns"):  # checks of the winners
        for form, tile in {f[1:] for (k, _), found in best.items() if k == kind for f in sorted(found)[:1]}:
            try: say(check(kind, form, tile))
            except Exception as error: say(f"FAIL {kind} {form} {tile}: {type(error).__name__} {str(error)[:200]}")
    from vitfocus.kernels.statistics import triton as st
    if hasattr(st, "_kept"): st.row_pass, st.column_pass, st.block_settings = st._kept
    try: diagnoses(1e9 if TOY else LIMIT - 6)
    except Exception: say("diagnose:", traceback.format_exc()[-600:])


if __name__ == "__main__":
    main()
