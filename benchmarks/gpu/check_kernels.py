import os, sys, time
sys.path[:0] = [os.getcwd() + "/src", os.getcwd() + "/tests"]
import torch
from vitfocus.kernels.backends import backend
from helpers.kernel_cases import Attention, Pooling, check_joined, check_attention, check_pooling, check_pooling_with_norm
B16, F16 = torch.bfloat16, torch.float16
bad = 0; began = time.time()
def run(what, call, case, **k):
    global bad
    try:
        with backend("triton"): call(case, seed=len(case.name), device="cuda", **k)
    except AssertionError as e: bad += 1; print("WRONG", what, case, str(e)[:200], flush=True)
    except Exception as e: bad += 1; print("FAILED", what, case, type(e).__name__, str(e)[:200], flush=True)
for case in (Attention("n197", (24, 6, 197, 64), dtype=B16), Attention("paper", (24, 6, 211, 64), variant="paper", dtype=F16), Attention("k256", (24, 6, 256, 64), dtype=B16), Attention("k129", (24, 6, 129, 64), dtype=B16),
             Attention("ti", (48, 3, 197, 64), dtype=B16), Attention("patches", (24, 6, 197, 64), first=1, dtype=B16), Attention("w48", (48, 4, 197, 48), dtype=F16), Attention("x", (24, 6, 197, 64), spread=25.0, dtype=B16)):
    run("joined", check_joined, case)
for case in (Attention("n1025", (2, 6, 1025, 64), dtype=B16), Attention("n300", (4, 6, 300, 64), variant="paper", dtype=F16), Attention("rows", (4, 6, 785, 64), rows=100, dtype=B16), Attention("n197apart", (2, 6, 197, 64), dtype=B16), Attention("w80", (2, 4, 197, 80), dtype=B16), Attention("each", (4, 6, 197, 64), heads="each", dtype=B16)):
    run("attention", check_attention, case)
print(f"loss checked after {time.time()-began:.0f} s", flush=True)
for case in (Pooling("a", (14, 14), channels=384, dtype=B16), Pooling("b", (8, 8), channels=384, dtype=B16, batch=9), Pooling("c", (8, 8), channels=192, dtype=F16), Pooling("d", (15, 13), channels=384, dtype=B16), Pooling("e", (32, 32), channels=192, batch=1, dtype=B16), Pooling("f", (3, 130), prefix=5, channels=200), Pooling("g", (14, 9), branches=8, channels=192)):
    run("pooling", check_pooling, case)
for case in (Pooling("h", (8, 8), channels=384, dtype=B16, batch=9), Pooling("i", (14, 14), channels=200, branches=3, dtype=F16)):
    run("pooling with norm", check_pooling_with_norm, case)
print(f"bad {bad} after {time.time()-began:.0f} s", flush=True)
sys.exit(bad > 0)
