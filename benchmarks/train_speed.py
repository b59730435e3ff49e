"""Images per second of training ViT-S/4 at 32 px: our engine, the bare model, and timm's own loop.

    python benchmarks/train_speed.py                     # the GPU at hand: bf16, compiled, batch 512
    python benchmarks/train_speed.py --tiny              # a few steps of a tiny model on the CPU, to see that it runs
    python benchmarks/train_speed.py --recipes deit_s deit_s_cb deit_b fan_b_hybrid_tap_adl    # for docs/cluster.md

* `synthetic`: the same compiled model, loss and optimiser on one fixed batch: the upper limit.
* `engine`: the cifar100 recipe unchanged, with images on the device, every augmentation and logging.
* `timm`: the loop of timm's train.py, made of timm's loader (worker processes, prefetcher), RandAugment, erasing,
  mixup, optimiser and autocast, on the same images, model and precision.

With `--recipes`, a synthetic step on one GPU takes an eighth of each recipe's batch, and the hours of the whole recipe
on 8 such GPUs are extrapolated from it, without the cost of loading and communication.

The 50,000 images, as many as in CIFAR, are drawn (Shapes): nothing is downloaded, and speed does not depend on their
content.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from timm.data import FastCollateMixup, create_loader
from timm.loss import SoftTargetCrossEntropy
from torch.utils.data import Dataset

from vitfocus.core.environment import device_name, versions
from vitfocus.data.classification.augmentation import ClassificationBatch
from vitfocus.data.classification.batches import fix_posterize
from vitfocus.data.classification.dataset import open_images
from vitfocus.recipes import Data
from vitfocus.tasks.base import build_model, model_arguments
from vitfocus.tasks.classification import supervised_terms
from vitfocus.train import Recipe, load_recipe
from vitfocus.train.compile import compile_mode
from vitfocus.train.optimiser import create_optimiser
from vitfocus.train.run import assemble_run
from vitfocus.treatments import auxiliary_loss
from vitfocus.treatments.cost import seconds_per_call

TINY = ["model.arguments={patch_size=8,embed_dim=24,depth=2,num_heads=2}", "batch=32", "train_length=512"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, help="timed steps (default: 200, tiny: 10)")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many is taken")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of timm's loader")
    parser.add_argument("--compile", choices=("auto", "yes", "no"), default="auto")
    parser.add_argument("--only", nargs="*", default=["synthetic", "engine", "timm"])
    parser.add_argument("--spec", default="", help="another model or treatments, such as deit_small_patch16_224+cb")
    parser.add_argument("--recipes", nargs="*", default=[], help="ImageNet recipes to measure instead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.recipes:
        return imagenet(args)
    overrides = [
        "source=shapes",
        "train_length=50000",
        "val_length=100",
        f"batch={args.batch}",
        f"compile={args.compile}",
    ]
    overrides += ["model.arguments.num_classes=100", "checkpoint_minutes=0", f"workers={args.workers}"]
    overrides += [f"spec={args.spec}"] if args.spec else []
    recipe = load_recipe("cifar100", [*overrides, *([*TINY, "device=cpu"] if args.tiny else [])])
    steps = args.steps or (10 if args.tiny else 200)
    device = torch.device("cpu" if args.tiny or not torch.cuda.is_available() else "cuda")
    makers = {"synthetic": synthetic_step, "engine": engine_step, "timm": timm_step}
    speeds = {}
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            step = makers[name](recipe, device, steps * (args.rounds + 1) + 30, folder)
            speeds[name] = measure(step, recipe.data.batch, steps, args.rounds, device)
        print(f"{name:<10}{speeds[name]:>12.0f} images/s", flush=True)
        torch._dynamo.reset()
    result: dict[str, Any] = {
        "what": f"training, {recipe.model.spec} {recipe.model.arguments}, 32 px, batch {recipe.data.batch}",
        "images_per_second": speeds,
        "device": device_name(device),
        "cores": os.cpu_count(),
        "workers": args.workers,
        "precision": "bf16" if device.type == "cuda" else "fp32",
        "compiled": compile_mode(recipe, device.type == "cuda"),
        "versions": versions("accelerate", "python"),
    }
    if {"engine", "synthetic"} <= set(speeds):
        result["engine_over_synthetic"] = speeds["engine"] / speeds["synthetic"]
    if {"engine", "timm"} <= set(speeds):
        result["engine_over_timm"] = speeds["engine"] / speeds["timm"]
    path = (
        args.json or Path(__file__).parent / "results" / f"train-speed-{'tiny-cpu' if args.tiny else device.type}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if "over" in key}), f"written: {path}")


def imagenet(args: argparse.Namespace) -> None:
    """Images per second and memory of one GPU at an eighth of the recipe's batch; hours for 8, extrapolated."""
    device = torch.device("cpu" if args.tiny else "cuda")
    rows = []
    for name in args.recipes:
        whole = load_recipe(name)
        share = 8 if args.tiny else whole.data.batch // 8
        recipe = load_recipe(name, [f"batch={share}", f"compile={args.compile}", "model.pretrained=false"])
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        speed = measure(synthetic_step(recipe, device, 0, ""), share, args.steps or 30, args.rounds, device)
        hours = whole.schedule.epochs * 1_281_167 / (8 * speed) / 3600
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        rows.append(
            {"recipe": name, "batch": share, "images_per_second": speed, "memory_gib": memory, "hours_on_8": hours}
        )
        print(rows[-1], flush=True)
        torch._dynamo.reset()
    result = {
        "what": "training step on a fixed batch, one device; hours_on_8 is extrapolated, not measured",
        "rows": rows,
    }
    result |= {"device": device_name(device), "versions": versions("accelerate", "python")}
    path = args.json or Path(__file__).parent / "results" / "train-imagenet-cuda.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def measure(step: Callable[[], None], batch: int, steps: int, rounds: int, device: torch.device) -> float:
    """Images per second of the best round, after a warm-up in which everything is compiled."""
    best = 0.0
    for _ in range(min(20, steps)):
        step()
    for _ in range(rounds):
        best = max(best, batch / seconds_per_call(step, device, steps))
    return best


def prepare(recipe: Recipe, device: torch.device) -> tuple[Any, torch.optim.Optimizer, Any]:
    """The model, its optimiser, and what is called: the model or its compiled form."""
    model = build_model(recipe, model_arguments(recipe, 100)).to(device).train()
    mode = compile_mode(recipe, device.type == "cuda")
    return model, create_optimiser(model, recipe.optimiser, device), torch.compile(model, mode=mode) if mode else model


def synthetic_step(recipe: Recipe, device: torch.device, total: int, folder: str) -> Callable[[], None]:
    model, optimiser, call = prepare(recipe, device)
    size, count = recipe.data.size, recipe.data.batch
    labels = torch.randint(100, (count,), device=device)
    batch = ClassificationBatch(
        torch.randn(count, 3, size, size, device=device),
        labels,
        labels.flip(0),
        *torch.tensor([0.7, 0.3], device=device),
    )

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            output = call(batch.images)
        (sum(supervised_terms(output.float(), batch, recipe.loss.smoothing)) + auxiliary_loss(model)).backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def engine_step(recipe: Recipe, device: torch.device, total: int, folder: str) -> Callable[[], None]:
    trainer = assemble_run(recipe, folder)
    batches = trainer.start(stop=total)

    def step() -> None:
        trainer.train_step(batches)
        trainer.after_step(0)

    return step


class Pictures(Dataset[Any]):
    """The images as timm's loader takes them: Pillow's, through the transform that the loader sets."""

    def __init__(self, length: int, size: int) -> None:
        self.images = open_images(Data(source="shapes", train_length=length, size=size), "train")
        self.transform: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.images.read(index)
        return (self.transform(image) if self.transform else image), label


def timm_step(recipe: Recipe, device: torch.device, total: int, folder: str) -> Callable[[], None]:
    _, optimiser, call = prepare(recipe, device)
    augment, data = recipe.augment, recipe.data
    loader = create_loader(
        Pictures(data.train_length, data.size),
        input_size=(3, data.size, data.size),
        batch_size=data.batch,
        is_training=True,
        use_prefetcher=True,
        re_prob=augment.erase,
        re_mode="pixel",
        auto_augment=augment.randaugment,
        num_workers=data.workers,
        collate_fn=FastCollateMixup(
            augment.mixup, augment.cutmix, label_smoothing=recipe.loss.smoothing, num_classes=100
        ),
        device=device,
        persistent_workers=data.workers > 0,
    )
    fix_posterize(loader.dataset.transform)
    criterion = SoftTargetCrossEntropy()

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    source = batches()

    def step() -> None:
        images, targets = next(source)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            output = call(images)
            loss = criterion(output, targets)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


if __name__ == "__main__":
    main()
