"""A complete ImageNet-C evaluation with generated corruptions, compared with its forward passes alone, in one run.

    python benchmarks/robustness.py --images 2048 --batch-size 256 --precision bfloat16

Target on one H200 with DeiT-S at 224 px: the evaluation (decoded images in memory, 15 corruptions x 5 severities and
clean, scores) takes at most 1.5 times as long as the same number of forward passes on images already on the device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from torch import Tensor

import vitfocus
from vitfocus.core.files import write_text
from vitfocus.corruptions import CORRUPTIONS, corrupt
from vitfocus.robustness.evaluation import evaluate
from vitfocus.robustness.pixel_model import PixelModel


class Memory:
    """Decoded images as a loader would yield them: pinned uint8 batches."""

    def __init__(self, count: int, size: int, batch_size: int, pin: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(min(count, batch_size), 3, 16, 16, generator=generator)
        smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)
        self.images = (smooth * 255).to(torch.uint8)
        if pin:
            self.images = self.images.pin_memory()
        self.batches = count // len(self.images)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.batches):
            yield self.images, torch.zeros(len(self.images), dtype=torch.long)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--severities", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--frost", help="the folder of the published overlays")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    model = timm.create_model(args.model).to(device).eval()
    pixel = PixelModel(args.model, model, args.precision)
    memory = Memory(args.images, pixel.size[0], args.batch_size, pin=device.type == "cuda")
    images = memory.images.to(device)
    conditions = 1 + len(CORRUPTIONS) * len(args.severities)

    def bare() -> float:
        wait(device)
        began = time.perf_counter()
        with torch.no_grad():
            for _ in range(memory.batches * conditions):
                pixel(images)
        wait(device)
        return time.perf_counter() - began

    def whole() -> float:
        wait(device)
        began = time.perf_counter()
        evaluate(
            model,
            "imagenet-c",
            memory,
            device=device,
            precision=args.precision,
            severities=args.severities,
            frost=args.frost,
            progress=False,
        )
        wait(device)
        return time.perf_counter() - began

    with torch.no_grad():
        for _ in range(3):
            pixel(images)
    rates = {}
    for name in CORRUPTIONS:
        corrupt(images, name, 3, frost=args.frost)
        wait(device)
        began = time.perf_counter()
        for _ in range(3):
            corrupt(images, name, 3, frost=args.frost)
        wait(device)
        rates[name] = 3 * len(images) / (time.perf_counter() - began)
    small, memory.batches = memory.batches, 1
    whole()  # kernels, tables and caches
    memory.batches = small
    bare_s, whole_s = bare(), whole()
    evaluations = memory.batches * len(images) * conditions
    result = {
        "model": args.model,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "precision": args.precision,
        "evaluations": evaluations,
        "bare_images_per_s": evaluations / bare_s,
        "whole_images_per_s": evaluations / whole_s,
        "ratio": whole_s / bare_s,
        "corruption_images_per_s_severity_3": rates,
        "corruption_mean": len(rates) / sum(1 / rate for rate in rates.values()),
        "corruption_slowest": min(rates.items(), key=lambda item: item[1]),
    }
    result["versions"] = {"torch": torch.__version__, "timm": timm.__version__, "vitfocus": vitfocus.__version__}
    print(json.dumps(result, indent=2))
    target = Path(__file__).parent / "results" / f"robustness-{device.type}.json"
    write_text(target, json.dumps(result, indent=1) + "\n")
    print(f"written: {target}")


if __name__ == "__main__":
    main()
