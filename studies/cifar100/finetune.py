"""The trained DeiT-Ti, treated and fine-tuned on CIFAR-100 enlarged to its own size; and what insertion alone changes.

CB_S begins with a scale of 0 and ADL changes no answer, so both leave the model's logits as they were, to the last bit
where the arithmetic is the same. TAP's near-identity start gives e⁻¹² ≈ 6e-6 of each token's weight to each of its
other branches. `TOLERANCES` is what either may do to a logit; the run's JSON says what it did.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
from arms import SHARED, TINY, Run
from measure import corruption
from one_run import described, in_short, keep_model, trained, write_result
from setting import Setting, evenly, test_images
from slots import Slot
from torch import Tensor, nn

import vitfocus as vf
from vitfocus.core.environment import default_device
from vitfocus.core.errors import VitfocusError
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.tasks.base import start_from
from vitfocus.train import Recipe, load_recipe

TOLERANCES = {"rounding": 1e-4, "near_identity": 0.01}
INSERTION_IMAGES = 256

#: A short, usual fine-tuning, the same for every arm; tuned for none.
KEYS = (
    "model.arguments={}",
    *SHARED,
    "batch=256",
    "lr=3e-4",
    "head_lr=5",
    "weight_decay=0.05",
    "min_lr=1e-6",
    "mixup=0",
    "cutmix=0",
    "erase=0",
    "randaugment=rand-m9-mstd0.5-inc1",
    "smoothing=0.1",
)


def recipe_of(run: Run, setting: Setting) -> Recipe:
    """The `cifar100` recipe's data and augmentation, with the model's own size and weights and a short schedule."""
    scale = setting.scale
    keys = [
        *KEYS,
        f"spec={run.arm.spec}",
        f"model.weights={starting_weights(setting)}",
        f"seed={run.seed}",
        f"epochs={scale.finetune_epochs}",
        f"warmup_epochs={scale.finetune_epochs / 10}",
        "evaluate_every=0",
        "checkpoint_minutes=2",
        *setting.data_keys(),
        *scale.recipe,
        *scale.finetune,
    ]
    return load_recipe("cifar100", keys)


def run_finetuning(run: Run, setting: Setting) -> str:
    """Insert, fine-tune, measure clean and corrupted accuracy, write the run's JSON."""
    began = time.monotonic()
    recipe = recipe_of(run, setting)
    inserted = insertion(run, setting)
    images, labels = test_images(setting)
    scale = setting.scale
    some, their = evenly(images, labels, scale.finetune_corrupted_images)
    with Slot(setting.work, setting.slots) as slot:
        results = trained(recipe, setting.work / run.place, slot)
        slot.take()
        model = vf.load(setting.work / run.place / "model").to(default_device())
        clean = clean_accuracy(model, images, labels)
        severities = scale.finetune_severities
        corrupted = corruption(model, some, their, scale.corruptions, severities, setting.frost, batch=500)
    content: dict[str, Any] = {
        **described(run, scale.finetune_epochs, recipe, results, setting),
        "insertion": inserted,
        "clean": clean,
        "corruption": corrupted,
        "protocol": {
            "test_images": len(images),
            "corrupted_images": len(some),
            "severities": list(scale.finetune_severities),
            "corrupted_at": "32 px, with CIFAR-C's constants, then enlarged (bicubic)",
        },
    }
    write_result(setting, run.place, content, results, began)
    keep_model(run, setting)
    return in_short(content)


@torch.no_grad()
def clean_accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy on test images (N, 3, 32, 32), enlarged to the model's size as the corrupted ones are, in float32."""
    pixels, device = PixelModel("model", model, resize=True), default_device()
    best = torch.cat([pixels(part.to(device)).topk(5).indices.cpu() for part in images.split(500)])
    right = best == labels[:, None]
    return {"accuracy": 100 * float(right[:, 0].double().mean()), "top5": 100 * float(right.any(1).double().mean())}


@torch.no_grad()
def insertion(run: Run, setting: Setting) -> dict[str, Any]:
    """The trained model's logits on some test images before and after the treatments are inserted, nothing trained."""
    device = default_device()
    model = base_model(setting).to(device).eval()
    treated = copy.deepcopy(model)
    if run.arm.treatments:
        vf.treat_(treated, run.arm.treatments).eval()
    images = test_images(setting)[0][:INSERTION_IMAGES]
    before, after = (
        torch.cat([PixelModel("model", one, resize=True)(part.to(device)).double() for part in images.split(64)])
        for one in (model, treated)
    )
    largest = float((after - before).abs().max())
    tolerance = TOLERANCES["near_identity" if "near_identity" in run.arm.treatments else "rounding"]
    if largest > tolerance:
        raise VitfocusError(
            f"Inserting {run.arm.treatments} changed a logit by {largest:.3g}, more than {tolerance:g}."
        )
    return {
        "largest_logit_change": largest,
        "decisions_changed": int((after.argmax(1) != before.argmax(1)).sum()),
        "images": len(images),
        "classes": before.shape[1],
        "spread_of_logits": float(before.std()),
        "tolerance": tolerance,
    }


def base_model(setting: Setting) -> nn.Module:
    """The trained DeiT-Ti with its own 1,000 classes; at smoke scale, a small one with random weights."""
    if setting.scale.name != "smoke":
        model = vf.create_model(TINY)
        start_from(model, str(starting_weights(setting)))
        return model
    return vf.load(starting_weights(setting))


def starting_weights(setting: Setting) -> Path:
    """The weights' file, or what to do without it."""
    if setting.scale.name == "smoke":
        return small_weights(setting)
    if setting.weights is None or not setting.weights.is_file():
        raise VitfocusError("Fine-tuning starts from the trained DeiT-Ti: name its file with --weights.")
    return setting.weights


def small_weights(setting: Setting) -> Path:
    """A model of two layers with random weights and 1,000 classes, drawn once, for the smoke scale."""
    folder = setting.work / "small-model"
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        model = vf.create_model(TINY, img_size=64, patch_size=16, embed_dim=24, depth=2, num_heads=3)
        nn.init.normal_(model.get_submodule("head").weight, std=0.2)  # type: ignore[arg-type]
        vf.save(model, folder)
    return folder
