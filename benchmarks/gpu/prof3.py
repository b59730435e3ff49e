import json, os, sys, time
HERE = os.path.dirname(os.path.abspath(__file__)); ROOT = os.path.dirname(HERE)
sys.path[:0] = [os.path.join(ROOT, "src"), os.path.join(ROOT, "benchmarks")]
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")
OUT = os.environ["OUT"]
import torch
from _turns import Job, take_turns
SMALL = "deit_small_patch16_224"

def tune(options):
    import torch._inductor.config as c
    for k, v in options.items():
        *parts, last = k.split(".")
        o = c
        for part in parts: o = getattr(o, part)
        setattr(o, last, v)

def profiled(call, steps=4):
    from torch.profiler import ProfilerActivity, profile
    for _ in range(3): call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        for _ in range(steps): call()
        torch.cuda.synchronize()
    rows = []
    for e in taken.key_averages():
        if e.self_device_time_total:
            rows.append((e.self_device_time_total / 1e3 / steps, e.count / steps, e.key))
    return sorted(rows, reverse=True)

def epoch_profile(spec, batch, *keys):
    from epoch_time import running
    trainer, batches, folder = running(spec, batch, "compile=blocks", "record=no", *keys)
    def measure(held=folder):
        return profiled(lambda: trainer.train_step(batches))
    while not os.path.exists("/tmp/go"): time.sleep(0.2)
    return measure

def epoch_ms(spec, batch, options, *keys):
    from epoch_time import running
    from vitfocus.treatments.cost import seconds_per_call
    tune(options)
    trainer, batches, folder = running(spec, batch, "compile=blocks", *keys)
    def measure(held=folder):
        def step():
            trainer.train_step(batches); trainer.after_step(0)
        return min(seconds_per_call(step, "cuda", 20) for _ in range(5)) * 1e3
    while not os.path.exists("/tmp/go"): time.sleep(0.2)
    return measure

def deit_profile(variant, model="deit_s", tokens=197):
    from _step import Step
    torch.set_float32_matmul_precision("high")
    s = Step(model, tokens, variant, "recorded", "cuda")
    for _ in range(3): s.take()
    torch.cuda.synchronize()
    def measure():
        return profiled(s.take, 5)
    while not os.path.exists("/tmp/go"): time.sleep(0.2)
    return measure

MUON = ("name=muon", "lr=2e-3", "weight_decay=0.05")
jobs = {
 "ms plain": Job(epoch_ms, (SMALL, 512, {}, *MUON)),
 "ms tap+adl": Job(epoch_ms, (SMALL+"+tap(branches=4)+adl", 512, {}, *MUON)),
 "prof plain": Job(epoch_profile, (SMALL, 512, *MUON)),
 "prof tap+adl": Job(epoch_profile, (SMALL+"+tap(branches=4)+adl", 512, *MUON)),
 "ti4 plain": Job(deit_profile, ("plain", "vit_ti4", 65)),
 "ti4 tap+adl": Job(deit_profile, ("tap+adl", "vit_ti4", 65)),
}
found = {}
began = time.time()
for r in take_turns(jobs, 6, time.time() + float(os.environ.get("SECS", 150)), "", 0.5):
    print(f"{time.time()-began:.0f}s", r.name, f"ready {r.ready_seconds:.0f}", r.error or (r.value if isinstance(r.value, float) else f"sum {sum(x[0] for x in r.value):.2f} ms"), flush=True)
    found[r.name] = r.value if not r.error else r.error
    json.dump(found, open(OUT + "/prof.json", "w"))
