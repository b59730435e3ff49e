"""Everything that is measured of one finished model, as a run's JSON has it; shares are in percent.

All arms meet the same test images, corruptions, hidden parts and readings, drawn from one seed. Every number comes from
`vitfocus.evaluate` and `vitfocus.diagnose`; the diagonal share alone is computed here, from `vitfocus.attention_maps`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from setting import evenly
from torch import Tensor, nn

import vitfocus as vf
from vitfocus.core.environment import default_device

SEED = 0
#: Images at once: a GPU that several share is launched on less often, and its memory suffices for all of them.
BATCH = 5_000
EPSILONS = (1, 2)  # in 1/255
#: One corruption of each family, and the two other noises: what stability is read under.
STABILITY = ("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "fog", "jpeg_compression")
STABILITY_SEVERITY = 3
READINGS = ("entropy", "distance", "overfocus", "head_similarity")


class Batches(list[tuple[Tensor, Tensor]]):
    """Images and labels in memory as batches, which `vitfocus.evaluate` takes as they are."""

    def __init__(self, images: Tensor, labels: Tensor, size: int) -> None:
        super().__init__(zip(images.split(size), labels.split(size), strict=True))


def measure(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    corruptions: Sequence[str],
    severities: Sequence[int],
    frost: Path | None,
    corrupted_images: int,
    reading_images: int,
) -> dict[str, Any]:
    """A model of 100 classes at 32 px on test images, uint8 (N, 3, 32, 32), and their labels."""
    device = default_device()
    some, their = evenly(images, labels, corrupted_images)
    model.to(device).eval()
    seen = images[:reading_images].to(device)
    parts: dict[str, Callable[[], Any]] = {
        "clean": lambda: clean(model, Batches(images, labels, BATCH)),
        "corruption": lambda: corruption(model, some, their, corruptions, severities, frost),
        "fgsm": lambda: fgsm(model, images, labels),
        "occlusion": lambda: occlusion(model, images, labels),
        "reading": lambda: reading(model, seen),
        "stability": lambda: stability(model, seen, STABILITY, "cifar"),
    }
    found, seconds = {}, {}
    for name, part in parts.items():
        began = time.perf_counter()
        found[name] = part()
        seconds[name] = round(time.perf_counter() - began, 2)
    return {
        **found,
        "seconds": seconds,
        "protocol": {
            "test_images": len(images),
            "corrupted_images": len(some),
            "reading_images": len(seen),
            "severities": list(severities),
            "stability_severity": STABILITY_SEVERITY,
            "seed": SEED,
            "precision": {"clean": "float32", "fgsm": "float32", "corruption": half(), "occlusion": half()},
        },
    }


def half() -> str:
    """The precision of the many evaluations: training's own on a GPU."""
    return "bfloat16" if default_device().type == "cuda" else "float32"


def clean(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Accuracy on the images as they are."""
    scores = vf.evaluate(model, "clean", batches, progress=False)
    return {"accuracy": scores["top1"], "top5": scores["top5"], "ece": scores["ece"]}


def corruption(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    corruptions: Sequence[str],
    severities: Sequence[int],
    frost: Path | None,
    batch: int = BATCH,
) -> dict[str, Any]:
    """CIFAR-100-C, generated: the mean error, and by corruption and severity; larger models get the images enlarged."""
    scores = vf.evaluate(
        model,
        "cifar100-c",
        Batches(images, labels, batch),
        corruptions=list(corruptions),
        severities=list(severities),
        frost=frost,
        precision=half(),
        seed=SEED,
        progress=False,
    )
    by_corruption = {name: scores[name]["error"] for name in corruptions}
    made = scores.fingerprint["protocol"]["corruptions"]
    return {
        "mean_error": fmean(by_corruption.values()),
        "by_corruption": by_corruption,
        "by_severity": {
            str(severity): fmean(scores[f"{name}/{severity}"]["error"] for name in corruptions)
            for severity in severities
        },
        "images": len(images),
        "frost": made.get("frost", "not used"),
    }


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 500) -> dict[str, float]:
    """Accuracy under one gradient step of each length."""
    scores = vf.evaluate(model, "fgsm", Batches(images, labels, batch), eps=list(EPSILONS), seed=SEED, progress=False)
    return {f"{eps}/255": scores[f"fgsm/{eps}"]["top1"] for eps in EPSILONS}


def occlusion(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy with the centre or random cells hidden, by the suite's names of them."""
    batches = Batches(images, labels, BATCH)
    scores = vf.evaluate(model, "occlusion", batches, precision=half(), seed=SEED, progress=False)
    (summary,) = scores.models.values()
    return {name: cell["top1"] for name, cell in summary["cells"].items() if name != "clean"}


def reading(model: nn.Module, images: Tensor, batch: int = 500) -> dict[str, list[float]]:
    """What attention does, layer by layer, on images uint8 on the model's device."""
    rows = vf.diagnose(model, images, batch_size=batch).rows
    found = {key: [row[key] for row in rows] for key in READINGS if all(key in row for row in rows)}
    return {**found, "diagonal": diagonal(model, images, batch)}


def diagonal(model: nn.Module, images: Tensor, batch: int = 500) -> list[float]:
    """The share of attention that tokens pay to themselves: the mass on the mean map's diagonal, by layer.

    Rows of a map sum to one, so this is the mean over images, heads and tokens of a_ii; uniform attention has 1/N.
    """
    sums: Tensor | None = None
    for part in images.split(batch):
        maps = vf.attention_maps(model, part, layers=None)
        own = torch.stack([layer.diagonal(dim1=-2, dim2=-1).double().mean(dim=(1, 2)).sum() for layer in maps])
        sums = own if sums is None else sums + own
    assert sums is not None
    return (sums / len(images)).tolist()


def stability(
    model: nn.Module,
    images: Tensor,
    corruptions: Sequence[str],
    flavour: str,
    frost: Path | None = None,
    batch: int = 500,
) -> dict[str, Any]:
    """The cosine between clean and corrupted maps, by corruption: the mean, and by layer."""
    result = {}
    for name in corruptions:
        changed = vf.corrupt(images, name, STABILITY_SEVERITY, seed=SEED, flavour=flavour, frost=frost)
        rows = vf.diagnose(model, images, against=changed, batch_size=batch).rows
        layers = [row["stability"] for row in rows]
        result[name] = {"mean": fmean(layers), "by_layer": layers}
    return result
