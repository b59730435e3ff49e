"""The cost of `diagnose`, compared with a plain forward pass, with stored maps and with `output_attentions`.

DeiT-Ti on the CPU with the same weights everywhere, N = 197, 1025 and 4097 tokens, all readings but stability. Writes
`results/diagnose_cost.json`. Target: at N = 197 and 1025, at most 3x the time of the plain forward pass and 1.3x its
peak memory, and memory that grows linearly from N = 1025 to 4097.

- `forward`: the plain model with fused attention.
- `diagnose`: `vitfocus.diagnose`.
- `materialised`: stores every map (`attention_maps`) and computes the readings from the maps by definition.
- `output_attentions`: transformers' ViT with eager attention and `output_attentions=True`; computes no readings.

Times come from one process per size, in which the four alternate; the minimum wall-clock and CPU times are reported.
Memory comes from one process per size and kind: `tensors` is the peak of torch's allocator, including weights;
`process` is the peak resident memory of the process, including libraries.

    python benchmarks/diagnose_cost.py [--turns 5] [--threads 1 2] [--note "what else ran"]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
WEIGHTS = (
    Path(os.environ.get("VITFOCUS_TEST_DATA") or HERE.parents[1] / "shared") / "data/deit_tiny_patch16_224.safetensors"
)
SIZES = {197: (224, 8), 1025: (512, 2), 4097: (1024, 1)}  # tokens: image side, images at a time
KINDS = ("forward", "diagnose", "materialised", "output_attentions")


def build(side: int):
    import timm
    import torch
    from safetensors.torch import load_file
    from timm.models.vision_transformer import checkpoint_filter_fn

    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", img_size=side).eval()
    if WEIGHTS.is_file():
        model.load_state_dict(checkpoint_filter_fn(load_file(WEIGHTS), model))
    return model


def build_transformers(model, side: int):
    """The same weights in transformers' ViT."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    config = ViTConfig(image_size=side, patch_size=16, layer_norm_eps=1e-6, attn_implementation="eager", **sizes)
    twin = ViTModel(config, add_pooling_layer=False).eval()
    state = {
        "embeddings.cls_token": model.cls_token,
        "embeddings.position_embeddings": model.pos_embed,
        "embeddings.patch_embeddings.projection.weight": model.patch_embed.proj.weight,
        "embeddings.patch_embeddings.projection.bias": model.patch_embed.proj.bias,
    }
    for index, block in enumerate(model.blocks):
        parts = {"layernorm_before": block.norm1, "layernorm_after": block.norm2, "attention.o_proj": block.attn.proj}
        parts |= {"mlp.fc1": block.mlp.fc1, "mlp.fc2": block.mlp.fc2}
        for kind in ("weight", "bias"):
            state |= {f"layers.{index}.{name}.{kind}": getattr(part, kind) for name, part in parts.items()}
            for name, piece in zip("qkv", getattr(block.attn.qkv, kind).chunk(3), strict=True):
                state[f"layers.{index}.attention.{name}_proj.{kind}"] = piece
    state |= {"layernorm.weight": model.norm.weight, "layernorm.bias": model.norm.bias}
    twin.load_state_dict(state)
    return twin


def explicit_readings(maps, grid: tuple[int, int]) -> dict[str, float]:
    from vitfocus.attention.layer_readings import Quantiles
    from vitfocus.kernels.statistics.reference import (
        effective_tokens,
        head_similarity,
        overfocus,
        received,
        relative_distance,
        row_diversity,
        row_entropy,
        softmax_gradient,
    )

    entropy, got, pool = row_entropy(maps), received(maps), Quantiles()
    pool.add(entropy)
    p15, p85 = pool.quantiles(0.15, 0.85)
    values = {
        "entropy": entropy.mean(),
        "entropy_p15": p15,
        "entropy_p85": p85,
        "entropy_cls": entropy[..., 0].mean(),
        "gradient": softmax_gradient(maps).mean(),
        "distance": relative_distance(maps, grid, prefix_tokens=1).mean(),
        "overfocus": overfocus(got).mean(),
        "effective_tokens": effective_tokens(got).mean(),
        "head_similarity": head_similarity(maps).mean(),
        "diversity_official": row_diversity(maps, "official"),
        "diversity_paper": row_diversity(maps, "paper"),
    }
    return {key: float(value) for key, value in values.items()}


def works(side: int, images: int, kinds: tuple[str, ...] = KINDS) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    import torch

    from vitfocus.attention.diagnosis import diagnose
    from vitfocus.attention.maps import attention_maps

    torch.set_grad_enabled(False)
    model = build(side)
    twin = build_transformers(model, side) if "output_attentions" in kinds else None
    pixels = torch.randn(images, 3, side, side)

    def materialised() -> list[dict[str, float]]:
        maps = attention_maps(model, pixels, layers=None, limit=1 << 40)
        return [explicit_readings(layer, (side // 16, side // 16)) for layer in maps]

    every: dict[str, Callable[[], object]] = {
        "forward": lambda: model(pixels),
        "diagnose": lambda: diagnose(model, pixels).rows,
        "materialised": materialised,
        "output_attentions": lambda: twin(pixels, output_attentions=True).attentions if twin is not None else None,
    }
    return {kind: every[kind] for kind in kinds}


def measure_time(tokens: int, turns: int) -> dict[str, dict[str, float]]:
    side, images = SIZES[tokens]
    every = works(side, images)
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in every}
    for turn in range(turns + 1):
        for kind, work in every.items():
            wall, cpu = time.perf_counter(), time.process_time()
            result = work()
            if turn:  # the first turn warms up
                taken[kind].append((time.perf_counter() - wall, time.process_time() - cpu))
            del result
    agree(every)
    return {
        kind: {"wall_s": min(wall for wall, _ in times), "cpu_s": min(cpu for _, cpu in times)}
        for kind, times in taken.items()
    }


def agree(every: dict[str, Callable[[], object]]) -> None:
    """A benchmark of things that compute something else would be worth nothing."""
    for streamed, explicit in zip(every["diagnose"](), every["materialised"](), strict=True):  # type: ignore[call-overload]
        for key, value in explicit.items():
            assert abs(streamed[key] - value) <= 1e-3 * abs(value) + 1e-6, (
                streamed["layer"],
                key,
                streamed[key],
                value,
            )


def measure_memory(tokens: int, kind: str) -> dict[str, float]:
    import torch

    side, images = SIZES[tokens]
    work = works(side, images, (kind,))[kind]
    work()  # what is made once (thread pools, packed weights) is made here
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = work()
        del result
    weights = sum(parameter.numel() * 4 for parameter in build(side).parameters())
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert peak > 0, "the profiler reported no allocation"
    return {"activations_mb": peak / 2**20, "tensors_mb": (peak + weights) / 2**20, "process_mb": process / 2**20}


def child(threads: int, *arguments: str) -> dict:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, *arguments]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(out.splitlines()[-1])


def versions() -> dict[str, str]:
    import timm
    import torch
    import transformers

    return {"torch": torch.__version__, "timm": timm.__version__, "transformers": transformers.__version__}


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--time", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.time:
        print(json.dumps(measure_time(args.time, args.turns)))
        return
    if args.memory:
        print(json.dumps(measure_memory(int(args.memory[0]), args.memory[1])))
        return
    results = {}
    for tokens, (side, images) in SIZES.items():
        turns = args.turns if tokens < 4000 else max(1, args.turns // 2)
        memory = {kind: child(1, "--memory", str(tokens), kind) for kind in KINDS}
        taken = {kind: {} for kind in KINDS}
        for threads in args.threads:
            for kind, times in child(threads, "--time", str(tokens), "--turns", str(turns)).items():
                taken[kind] |= {f"{threads}_threads_{key}": value for key, value in times.items()}
        results[tokens] = {"images": images, "side": side}
        for kind in KINDS:
            base, measured = taken["forward"] | memory["forward"], taken[kind] | memory[kind]
            ratios = {f"{key.rpartition('_')[0]}_ratio": round(value / base[key], 3) for key, value in measured.items()}
            results[tokens][kind] = {key: round(value, 4) for key, value in measured.items()} | ratios
            print(tokens, kind, results[tokens][kind], flush=True)
    growth = {
        kind: round(
            (results[4097][kind]["activations_mb"] / results[4097]["images"])
            / (results[1025][kind]["activations_mb"] / results[1025]["images"]),
            2,
        )
        for kind in KINDS
    }
    record = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": processor(), "cores": os.cpu_count()},
        "versions": versions(),
        "weights": "deit_tiny_patch16_224" if WEIGHTS.is_file() else "random",
        "note": args.note,
        "activations_per_image_from_1025_to_4097_tokens": growth | {"linear_would_be": round(4097 / 1025, 2)},
        "results": results,
    }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/diagnose_cost.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
