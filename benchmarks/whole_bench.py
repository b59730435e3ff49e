"""Once on an H200: is the loss in one launch right, and what does it take? From the repository root:

PYTHONPATH=src python .device-data/whole_bench.py
"""

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from vitfocus.kernels import backends
from vitfocus.kernels.diversity import op
from vitfocus.kernels.diversity.op import diversity
from vitfocus.kernels.diversity.reference import row_similarity

BEGAN = time.time()
BF, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
KERNELS = ("whole_pass", "joint_gradient", "query_gradient", "key_gradient", "lower_kernel", "mean_pass", "unit_pass",
           "column_pass", "slope_pass", "gradient_pass", "log_sum_exp")  # fmt: skip


def inputs(batch, heads, count, dtype, width=64, spread=1.5, seed=0):
    draw = torch.Generator("cuda").manual_seed(seed)
    whole = torch.randn(batch, count, 3, heads, width, device="cuda", generator=draw)
    whole[:, :, 0] += 1  # so that a part of the columns is above the threshold
    query, key, _ = whole.to(dtype).permute(2, 0, 3, 1, 4)
    scale = spread * width**-0.5
    # In parts: the heads of 512 images in float64 are large, and torch has no other way to their exact normalisers.
    lse = torch.cat([(q.double() @ k.double().mT * scale).logsumexp(-1).float() for q, k in
                     zip(query.split(128), key.split(128), strict=True)])  # fmt: skip
    return query.detach().requires_grad_(), key.detach().requires_grad_(), lse, scale


def exact(query, key, scale, options):
    """Loss and gradients from whole maps in float64, in parts of the batch."""
    first, total, grads = options["first"], 0.0, []
    form = {name: value for name, value in options.items() if name != "first"}
    for q, k in zip(query.detach().split(64), key.detach().split(64), strict=True):
        q, k = q.double().requires_grad_(), k.double().requires_grad_()
        maps = (q @ k.mT * scale).softmax(-1)[:, :, first:, first:]
        loss = row_similarity(maps, **form) * (len(q) / len(query))
        grads.append(torch.autograd.grad(loss, (q, k)))
        total += loss.item()
    return (total, *(torch.cat(one) for one in zip(*grads, strict=True)))


def check(name, batch, heads, count, dtype, width=64, given=True, **options):
    options = {"variant": "official", "threshold": 1.5, "first": 0} | options
    query, key, lse, scale = inputs(batch, heads, count, dtype, width)
    wanted = exact(query, key, scale, options)
    loss = diversity(query, key, scale=scale, lse=lse if given else None, **options)
    made = torch.autograd.grad(loss * 1024, (query, key))
    again = diversity(query, key, scale=scale, lse=lse if given else None, **options)
    same = torch.equal(loss, again) and all(
        torch.equal(one, two) for one, two in zip(made, torch.autograd.grad(again * 1024, (query, key)), strict=True)
    )
    errors = [abs(loss.item() - wanted[0]) / wanted[0]]
    errors += [float((one.double() / 1024 - two).norm() / two.norm()) for one, two in zip(made, wanted[1:], strict=True)]
    near, slack = {SINGLE: (1e-5, 2e-4), HALF: (5e-5, 4e-3), BF: (5e-5, 3e-2)}[dtype]
    right = errors[0] <= near and max(errors[1:]) <= slack and same
    print(f"{name:26s} loss {wanted[0]:.4f}  errors: loss {errors[0]:.1e} q {errors[1]:.1e} k {errors[2]:.1e}"
          f"  {'repeats' if same else 'DOES NOT REPEAT'} {'ok' if right else 'WRONG'}", flush=True)  # fmt: skip


def times(name, batch, heads):
    """Microseconds per kernel, forward and backward."""
    query, key, lse, scale = inputs(batch, heads, 65, BF)

    def step():
        diversity(query, key, scale=scale, lse=lse, threshold=1.5).backward()
        query.grad = key.grad = None

    for label, most, warps in FORMS:
        op.WHOLE, op.WHOLE_WARPS = most, warps
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(20):
                step()
            torch.cuda.synchronize()
        taken, others = {}, 0.0
        for event in profile.key_averages():
            if event.key in KERNELS:
                taken[event.key] = event.self_device_time_total / 20
            else:
                others += event.self_device_time_total / 20
        split = "  ".join(f"{kernel} {taken[kernel]:.1f}" for kernel in KERNELS if kernel in taken)
        print(f"{name} {label:15s} {sum(taken.values()):7.1f} us: {split}  (others {others:.1f})", flush=True)
    op.WHOLE, op.WHOLE_WARPS = 128, (4, 8)


CHECKS = [
    ("ViT-Ti 65 bf16", 128, 3, 65, BF, 64, {}),
    ("ViT-Ti 65 bf16 paper", 128, 3, 65, BF, 64, {"variant": "paper"}),
    ("ViT-Ti 65 bf16 patches", 128, 3, 65, BF, 64, {"first": 1}),
    ("ViT-S 65 bf16", 512, 6, 65, BF, 64, {}),
    ("ViT-S 65 bf16, own lse", 512, 6, 65, BF, 64, {"given": False}),
    ("50 fp16", 64, 6, 50, HALF, 64, {}),
    ("128 fp16", 64, 6, 128, HALF, 64, {}),
    ("128 fp32", 16, 3, 128, SINGLE, 64, {}),
    ("65 fp32 paper, own lse", 16, 3, 65, SINGLE, 64, {"given": False, "variant": "paper", "threshold": 1.0}),
    ("81 bf16, heads of 32", 64, 6, 81, BF, 32, {}),
    ("few heads, 65 bf16", 4, 3, 65, BF, 64, {}),
    ("7 fp16", 128, 3, 7, HALF, 64, {}),
]
FORMS = (("six launches", 0, (4, 8)), ("whole, 4 warps", 128, (4, 4)), ("whole, 8 warps", 128, (4, 8)),
         ("whole, 16 warps", 128, (4, 16)))  # fmt: skip


def warm():
    """Compile all that is launched, at the same time."""
    calls = {}
    timed = [("", batch, heads, 65, BF, 64, {}) for batch, heads in ((128, 3), (512, 6))]
    for case in CHECKS + timed:
        _, batch, heads, count, dtype, width, form = case
        query, key, _ = torch.empty(batch, count, 3, heads, width, device="cuda", dtype=dtype).permute(2, 0, 3, 1, 4)
        lse = torch.empty(batch, heads, count, device="cuda") if form.get("given", True) else None
        rest = (form.get("first", 0), True, form.get("variant") == "paper", form.get("threshold", 1.5))
        for _, op.WHOLE, op.WHOLE_WARPS in FORMS if case in timed else FORMS[2:3]:
            options = op.LossOptions(width**-0.5, *rest)
            calls |= backends.launches_of(lambda: op._launch_all(query, key, None, None, lse, options, True))  # noqa: B023
    with ThreadPoolExecutor(16) as threads:
        for call in calls.values():
            threads.submit(backends._compile, torch.device("cuda"), *call)
    op.WHOLE, op.WHOLE_WARPS = 128, (4, 8)


if __name__ == "__main__":
    warm()
    print(f"compiled after {time.time() - BEGAN:.0f} s", flush=True)
    times("ViT-Ti/4", 128, 3)
    times("ViT-S/4 ", 512, 6)
    print(f"timed after {time.time() - BEGAN:.0f} s", flush=True)
    for *case, form in CHECKS:
        check(*case, **form)
    print(f"done after {time.time() - BEGAN:.0f} s", flush=True)
