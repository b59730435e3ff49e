import os, sys, time
sys.path[:0] = [os.getcwd() + "/src", os.getcwd() + "/tests"]
import torch
from concurrent.futures import ThreadPoolExecutor
from vitfocus.kernels.short_attention import op
from vitfocus.kernels.backends import backend, launches_of, _compile
from helpers.kernel_cases import Attention, check_joined, check_short_attention
DEV = torch.device("cuda"); bad = 0
def data(B, H, N, D, dt=torch.bfloat16):
    g = torch.Generator("cuda").manual_seed(0)
    return torch.randn(B, N, 3, H, D, device="cuda", generator=g).to(dt).permute(2, 0, 3, 1, 4), torch.randn(B, N, H, D, device="cuda", generator=g).to(dt)
for count, width in ((65, 64), (65, 48), (65, 32), (33, 64), (50, 64), (128, 64)):
    for dt in (torch.bfloat16, torch.float16):
        try: check_short_attention(count, width, dt, device="cuda")
        except AssertionError as e: bad += 1; print("WRONG", count, width, dt, str(e)[:150], flush=True)
for i, case in enumerate((Attention("a", (48, 6, 65, 64), dtype=torch.bfloat16), Attention("b", (48, 6, 65, 64), variant="paper", dtype=torch.float16), Attention("c", (48, 3, 65, 64), first=1, dtype=torch.bfloat16))):
    try:
        with backend("triton"): check_joined(case, seed=1, device="cuda")
    except AssertionError as e: bad += 1; print("WRONG joined", case.name, str(e)[:150], flush=True)
torch.cuda.synchronize()
def timed(call, n=16):
    for _ in range(2): call()
    graph = torch.cuda.CUDAGraph(); torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(n): call()
    graph.replay(); torch.cuda.synchronize(); best = []
    for _ in range(5):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record(); torch.cuda.synchronize(); best.append(a.elapsed_time(b) / n * 1e3)
    return sorted(best)[2]
flush = torch.empty(1 << 25, device="cuda"); base = timed(lambda: flush.zero_())
for B, H, N in ((512, 6, 65), (128, 3, 65)):
    whole, r = data(B, H, N, 64); q, k, v = whole.unbind(); _, lse = op.launch_forward(q, k, v, 0.125)
    sl = op.Slope(torch.zeros(B, 80, 80, dtype=torch.float16, device=DEV), torch.ones(B, device=DEV), torch.ones((), device=DEV), 1e-3, 0)
    f = timed(lambda: (flush.zero_(), op.launch_forward(q, k, v, 0.125))) - base
    b = timed(lambda: (flush.zero_(), op.launch_backward(r, q, k, v, lse, 0.125))) - base
    s = timed(lambda: (flush.zero_(), op.launch_backward(r, q, k, v, lse, 0.125, sl))) - base
    print(f"B{B} H{H} N{N}: forward {f:.0f} backward {b:.0f} with slope {s:.0f} us", flush=True)
sys.exit(bad > 0)
