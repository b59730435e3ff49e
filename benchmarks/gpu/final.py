import os, sys, time
REPO = os.path.expanduser("~/keep/repo")
sys.path[:0] = [REPO + "/src", REPO + "/benchmarks"]
from functools import partial
from pathlib import Path
import step_cost as S, epoch_time as E
from _turns import Job, take_turns
OUT = Path(os.environ["OUT"]); cost = OUT / "step-cost-new.json"
jobs, savers = {}, {}
def step(setting, model, tokens, *names):
    for v in names:
        n = f"{v} {model} {tokens} {setting}"
        jobs[n] = Job(S.prepare_step, (setting, model, tokens, v, 5, "cuda")); savers[n] = partial(S.save_step, place=(setting, model, tokens, v), device="cuda", out=cost)
def epoch(name):
    jobs["epoch " + name] = Job(E.prepare, (*E.CASES[name], "blocks", 5)); savers["epoch " + name] = lambda r, n=name: (print(f"EPOCH {n}: {r.value:.3f} s", flush=True), S.save(cost, "cuda", r.value, "epoch", n))
def first(v):
    jobs["first " + v] = Job(S.prepare_first_call, (v, "cuda")); savers["first " + v] = partial(S.save_first_call, variant=v, device="cuda", out=cost)
step("recorded", "deit_s", 197, "all", "tap", "adl")
epoch("ViT-S/4, batch 1024"); epoch("ViT-Ti/4, batch 1024")
step("recorded", "vit_ti4", 65, "tap+adl", "adl", "tap")
step("compiled", "deit_s", 197, "all", "tap", "adl")
step("eager", "deit_s", 197, "all", "tap", "adl")
step("recorded", "deit_s", 1025, "adl", "all")
epoch("ViT-S/4, batch 512"); epoch("ViT-Ti/4, batch 512")
first("all"); first("adl"); first("tap")
step("recorded", "deit_s", 197, "cb")
step("recorded", "deit_s", 1025, "tap"); step("recorded", "deit_s", 4097, "adl", "all")
step("recorded", "vit_ti4", 65, "all", "cb"); step("compiled", "deit_s", 197, "cb")
began = time.time()
for r in take_turns(jobs, 7, began + float(os.environ["SECS"]), "", S.SETTLE):
    if r.error: print(f"{r.name}: {r.error[:160]}", flush=True)
    else: savers[r.name](r)
print(f"{time.time()-began:.0f} s")
