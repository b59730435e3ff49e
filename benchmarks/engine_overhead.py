"""The overhead of the training engine per step on the CPU, compared with a hand-written loop.

    OMP_NUM_THREADS=1 python benchmarks/engine_overhead.py

Both use the same model, images and optimiser, and alternate every few steps, so that other work on the machine affects
both equally. The medians of CPU time are compared. The engine logs as it does in a run. The attention readings that it
logs at every evaluation are timed separately and reported as a share of the training steps of an epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from vitfocus.core.environment import device_name, versions
from vitfocus.data.classification.augmentation import Augmenter
from vitfocus.data.classification.batches import ResidentBatches
from vitfocus.data.loader import BatchPartition, SampleOrder
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.tasks.base import build_model, model_arguments
from vitfocus.train import Recipe, load_recipe
from vitfocus.train.optimiser import create_optimiser
from vitfocus.train.run import assemble_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4, help="steps a round")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "engine-overhead-cpu.json")
    parser.add_argument("overrides", nargs="*", default=[], help="of the shapes recipe")
    args = parser.parse_intermixed_args()
    count = (args.rounds + 2) * args.steps
    recipe = load_recipe(
        "shapes",
        ["device=cpu", "train_length=2000", "val_length=100", "checkpoint_minutes=0", "epochs=1000", *args.overrides],
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = assemble_run(recipe, folder)
        batches = trainer.start(stop=count)

        def engine_step() -> None:
            trainer.train_step(batches)
            trainer.after_step(0)

        bare_step = by_hand(recipe)
        times: dict[str, list[float]] = {"engine": [], "bare": []}
        for _ in range(args.rounds + 2):
            for name, step in (("bare", bare_step), ("engine", engine_step)):
                times[name] += [clock(step) for _ in range(args.steps)]
        reading = [clock(lambda: trainer.attention.row(trainer.unwrapped, 0, 0.0)) for _ in range(8)][1:]
        steps_per_epoch = trainer.schedule.images / recipe.data.batch
    medians = {name: statistics.median(values[2 * args.steps :]) for name, values in times.items()}
    overhead = medians["engine"] / medians["bare"] - 1
    result = {
        "what": f"CPU time of a step, {recipe.model.spec} {recipe.model.arguments}, batch {recipe.data.batch}",
        "bare_ms": 1000 * medians["bare"],
        "engine_ms": 1000 * medians["engine"],
        "overhead": overhead,
        "attention_log_ms": 1000 * statistics.median(reading),
        "attention_log_of_an_epoch": statistics.median(reading) / (medians["engine"] * steps_per_epoch),
        "epoch_images": trainer.schedule.images,
        "steps": args.rounds * args.steps,
        "device": device_name(torch.device("cpu")),
        "versions": versions("accelerate", "python"),
    }
    print(json.dumps(result, indent=1))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n")


def by_hand(recipe: Recipe) -> Callable[[], None]:
    """The loop a person would write: the same images, augmentation, model and optimiser, and nothing else."""
    model = build_model(recipe, model_arguments(recipe, 10)).train()
    optimiser = create_optimiser(model, recipe.optimiser, torch.device("cpu"))
    pixels, labels = shapes_batch(range(recipe.data.train_length), size=recipe.data.size)
    order = SampleOrder(len(labels), recipe.data.batch)
    augmenter = Augmenter(recipe.augment, (0.5,) * 3, (0.5,) * 3, "cpu", True)
    batches = ResidentBatches(pixels, labels, order, augmenter, BatchPartition(recipe.data.batch)).iterate(0, 10**9)

    def step() -> None:
        batch = next(batches)
        loss = F.cross_entropy(model(batch.images), batch.labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def clock(step: Callable[[], None]) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
