"""Check and time Token-aware Average Pooling on a GPU: python .device-data/tap_bench.py [path of an old src tree]"""
import os, subprocess, sys, time
HERE = os.path.dirname(os.path.abspath(__file__))
OLD = len(sys.argv) > 2 and sys.argv[1] == "--child"
ROOT = os.path.dirname(HERE)
sys.path[:0] = [sys.argv[2] if OLD else os.path.join(ROOT, "src"), os.path.join(ROOT, "tests")]
import torch
from torch.profiler import ProfilerActivity, profile
from vitfocus.kernels.pooling import mixing, op, predictor
from vitfocus.kernels.pooling.op import pool_tokens

SIZES = [(128, 8, 192), (512, 8, 384), (256, 14, 384)]
BEGAN = time.perf_counter()
LIMIT = float(os.environ.get("LIMIT", 28))
MINE = ("gather_taps", "mixing_weights", "mix", "score_gradient", "score_backward", "scatter_taps", "arrange_taps",
        "tap_products", "tap_gradient", "track_statistics")


def setup(batch, side, channels):
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device="cuda")
    tokens = draw(batch, side * side + 1, channels).bfloat16().requires_grad_()
    first = (draw(4, channels, 3, 3) * (9 * channels) ** -0.5).requires_grad_()
    second, gamma, beta = (one.requires_grad_() for one in (draw(4, 4, 3, 3), 1 + 0.2 * draw(4), draw(4)))
    slope = draw(*tokens.shape).bfloat16()
    flush = torch.empty(1 << 26, device="cuda")  # 256 MB: tokens come from memory, as in a training step

    def call(cold=True):
        mixed, _ = pool_tokens(tokens, first, (gamma, beta, 1e-5), second, (side, side))
        if cold:
            flush.zero_()
        return torch.autograd.grad(mixed, (tokens, first, second, gamma, beta), slope)

    return call


def times(call, runs=10):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    found = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "FillFunctor" not in event.name and "Memset" not in event.name:
            name = event.name if event.name in MINE else ("product" if "gemm" in event.name or "nvjet" in event.name or "cutlass" in event.name or "splitK" in event.name else "other")
            found.setdefault(name, []).append(event.device_time)
    return {name: sum(found[name]) / runs for name in sorted(found, key=lambda n: (MINE + ("product", "other", n)).index(n))}


def show(what, size, found, only=None):
    parts = {name: taken for name, taken in found.items() if only is None or name in only}
    print(f"{size[0]}x{size[1]}^2x{size[2]} {what:<38} all {sum(found.values()):6.1f} | "
          + " ".join(f"{name} {taken:.1f}" for name, taken in parts.items()), flush=True)


def out_of_time():
    return time.perf_counter() - BEGAN > LIMIT


def main():
    if OLD:
        for size in SIZES:
            show("old", size, times(setup(*size)))
        return
    from helpers.kernel_cases import Pooling, check_pooling_with_norm

    default, spread, products = predictor.SUMS, predictor.SPREAD, dict(predictor.PRODUCTS)
    for sums in (default, (64, 512, 4, True), (16, 3, 1, False), (16, 3, 1, True)):
        predictor.SUMS = sums
        for case in (Pooling("a", (8, 8), channels=192, batch=9, dtype=torch.bfloat16), Pooling("b", (14, 9), branches=3, channels=200), Pooling("c", (1, 7), branches=8, channels=384, prefix=0, dtype=torch.float16)):
            try:
                check_pooling_with_norm(case, seed=1, device="cuda")
            except Exception as error:
                print("WRONG", sums, case.name, type(error).__name__, str(error)[:200])
        if sums == default:
            print(f"checked after {time.perf_counter() - BEGAN:.0f} s", flush=True)
    predictor.SUMS = default
    mean, variance, batches = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda"), torch.tensor(3, device="cuda")
    norm = torch.nn.BatchNorm2d(4, momentum=0.3).cuda()
    image = torch.randn(5, 4, 6, 6, device="cuda") * 2 + 1
    norm(image)
    op.track((mean, variance, batches), torch.stack((image.mean((0, 2, 3)), image.var((0, 2, 3), correction=0))), 0.3, 180)
    torch.testing.assert_close((mean, variance, batches), (norm.running_mean, norm.running_var, torch.tensor(4, device="cuda")))
    calls = {size: setup(*size) for size in SIZES}
    for size in SIZES:
        show(f"new {default} {spread} {products[2]}", size, times(calls[size]))
    taken = {}
    for sums in ((64, 1024, 4, True), (64, 256, 4, True), (64, 1024, 4, False), (64, 256, 4, False), (128, 512, 8, False),
                 (32, 1024, 2, False)):
        predictor.SUMS = sums
        found = times(calls[SIZES[1]], 5)
        taken[sums] = found["score_backward"] + found["scatter_taps"]
        show(f"SUMS {sums}", SIZES[1], found, ("score_backward", "scatter_taps"))
    for sums in sorted(taken, key=taken.__getitem__)[:2]:
        predictor.SUMS = sums
        for size in (SIZES[0], SIZES[2]):
            show(f"SUMS {sums}", size, times(calls[size], 5), ("score_backward", "scatter_taps"))
    predictor.SUMS = default
    for choice in ((64, 4), (128, 8)):
        if out_of_time():
            break
        predictor.SPREAD = choice
        for size in SIZES[1:]:
            show(f"SPREAD {choice}", size, times(calls[size], 5), ("scatter_taps",))
    predictor.SPREAD = spread
    for choice in ((64, 128, 132, 4, 3), (64, 64, 264, 4, 4), (128, 128, 132, 8, 2)):
        if out_of_time():
            break
        predictor.PRODUCTS[2] = choice
        for size in SIZES[1:]:
            try:
                show(f"PRODUCTS {choice}", size, times(calls[size], 5), ("tap_products", "tap_gradient"))
            except Exception as error:
                print(choice, type(error).__name__, str(error)[:100])
    predictor.PRODUCTS[2] = products[2]
    print(f"{time.perf_counter() - BEGAN:.0f} s")


if len(sys.argv) == 2:  # the old code in a process of its own
    subprocess.run([sys.executable, __file__, "--child", sys.argv[1]], env={**os.environ, "PYTHONPATH": sys.argv[1]})
main()
