"""How much the papers' numbers depend on values that they do not state: DeiT-Ti on photographs of ImageNet.

    python benchmarks/assumed_values.py --weights deit_tiny_patch16_224.safetensors --images DIR   # about 15 minutes
    python benchmarks/assumed_values.py                                                            # print the table

measures top-1 accuracy (or the stability of attention) with each candidate, on the same images, and writes
benchmarks/results/assumed-values-cpu.json; the table in docs/reproducing.md is printed from it. Differences from the
value that vitfocus assumes have paired 95 % intervals. Values of training (the layers that are "upper", the start of
CB_S's scales) are tried by inserting the treatment into the trained weights, without training it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import vitfocus as vf
from vitfocus.core.environment import versions
from vitfocus.core.statistics import evenly_spaced, repeat_interval
from vitfocus.data.image_files import as_images, read_rgb, to_tensor
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.suites.occlusion_and_attacks import fgsm, occlude_centre
from vitfocus.robustness.suites.segmentation import add_noise

OUT = Path(__file__).parent / "results" / "assumed-values-cpu.json"
MODEL = "deit_tiny_patch16_224"
MEAN = (124, 116, 104)  # ImageNet's mean, in levels
DIAGNOSED, GROUPS = 40, 8

Images = Callable[[nn.Module, Tensor, Tensor], Tensor]


_steps: dict[int, Tensor] = {}


def attacked(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    """FGSM at several epsilons for the price of one gradient: a step of 255 shows its signs."""
    key = hash(labels.numpy().tobytes())
    if key not in _steps:
        _steps[key] = (fgsm(model, images, labels, 255.0) - images / 255).sign().to(torch.int8)
    return (images / 255 + _steps[key] * (eps / 255)).clamp(0, 1)


def scaled(start: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        vf.treat_(model, "cbs")
        for name, scale in model.named_parameters():
            if name.endswith("context_scale"):
                nn.init.constant_(scale, start)

    return change


#: Images changed before the model sees them, by (assumed value, candidate); None: as they are.
CHANGED: dict[tuple[str, str], Images | None] = {
    ("", "nothing"): None,
    **{
        ("ε of FGSM", f"{eps}/255"): lambda model, x, y, eps=eps: attacked(model, x, y, float(eps))
        for eps in ("0.5", "1", "2", "4", "8")
    },
    ("fill of occlusion", "black"): lambda model, x, y: occlude_centre(x, 112),
    ("fill of occlusion", "ImageNet's mean"): lambda model, x, y: occlude_centre(x, 112, fill=MEAN),
    **{
        ("photons of shot noise", str(count)): lambda model, x, y, count=count: add_noise(x, "shot", photons=count)
        for count in (255, 120, 60, 25)
    },
    ("photons of shot noise", "Gaussian noise of 10 levels instead"): lambda model, x, y: add_noise(x, "gaussian/10"),
}
#: The model changed before it sees the images.
INSERTED: dict[tuple[str, str], Callable[[nn.Module], Any]] = {
    **{
        ("layers that are upper", f"the last {count}"): lambda m, count=count: vf.treat_(m, f"cb(layers=upper:{count})")
        for count in (6, 3, 4, 8, 12)
    },
    **{("start of Λ", f"{start:g}"): scaled(start) for start in (0.0, 0.1, 0.5, 1.0)},
}
#: What vitfocus assumes.
ASSUMED = {
    "ε of FGSM": "1/255",
    "fill of occlusion": "black",
    "photons of shot noise": "255",
    "severity of noise": "3",
    "layers that are upper": "the last 6",
    "start of Λ": "0",
}


def measure(weights: Path, folder: Path, limit: int) -> dict[str, Any]:
    """Every candidate's hits, image by image, as a share and as a paired difference from the assumed one."""
    files = as_images(folder) or []
    pick = [files[index] for index in evenly_spaced(len(files), limit)]
    classes = sorted({Path(file).parent.name for file in files})  # one WordNet folder per class of ImageNet
    if len(classes) != 1000:
        raise SystemExit(f"{folder} holds {len(classes)} class folders; expected ImageNet's 1,000.")
    labels = torch.tensor([classes.index(Path(file).parent.name) for file in pick])
    images = torch.stack([to_tensor(read_rgb(file)) for file in pick])
    hits: dict[tuple[str, str], Tensor] = {}
    for key, change in CHANGED.items():
        hits[key] = right(opened(weights), images, labels, change)
        print(*key, f"{100 * hits[key].mean():.1f} %", flush=True)
    for key, insert in INSERTED.items():
        model = opened(weights)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", vf.VitfocusWarning)
            insert(model)
        hits[key] = right(model, images, labels, None)
        print(*key, f"{100 * hits[key].mean():.1f} %", flush=True)
    values: dict[str, Any] = {}
    for (name, candidate), found in hits.items():
        values.setdefault(name, {})[candidate] = summary(found, hits[name, ASSUMED[name]] if name else found)
    values["severity of noise"] = stability(opened(weights), images[list(evenly_spaced(len(images), DIAGNOSED))])
    return values


def opened(weights: Path) -> nn.Module:
    return vf.open_model(MODEL, weights=weights).eval()


@torch.no_grad()
def right(model: nn.Module, images: Tensor, labels: Tensor, change: Images | None) -> Tensor:
    """Whether each image's class is found: (N,) of 0 and 1."""
    pixels = PixelModel(MODEL, model)
    found = []
    for start in range(0, len(images), 16):
        x, y = images[start : start + 16], labels[start : start + 16]
        found.append(pixels(change(pixels, x, y) if change else x).argmax(1) == y)
    return torch.cat(found).double()


def summary(found: Tensor, assumed: Tensor) -> dict[str, float]:
    """Top-1 in percent, and its difference from the assumed value's with the half-width of a paired 95 % interval."""
    difference = found - assumed
    return {
        "top1": 100 * float(found.mean()),
        "difference": 100 * float(difference.mean()),
        "interval": 196 * float(difference.std()) / math.sqrt(len(found)),
    }


def stability(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """The mean over the layers of the cosine between clean and noisy maps, by severity; intervals over groups."""
    groups: dict[str, list[float]] = {}
    for severity in range(1, 6):
        for some in images.chunk(GROUPS):
            rows = vf.diagnose(model, some, f"gaussian_noise/{severity}").rows
            groups.setdefault(str(severity), []).append(fmean(row["stability"] for row in rows))
        print("severity of noise", severity, f"{fmean(groups[str(severity)]):.3f}", flush=True)
    found = {}
    for severity, values in groups.items():
        apart = [one - usual for one, usual in zip(values, groups[ASSUMED["severity of noise"]], strict=True)]
        difference, interval = repeat_interval(apart)
        found[severity] = {"stability": fmean(values), "difference": difference, "interval": interval}
    return found


def table(result: dict[str, Any]) -> str:
    """The result as the table of docs/reproducing.md."""
    lines = ["| not stated | assumed | measured with it | with another value instead |", "|---|---|---|---|"]
    for name, assumed in ASSUMED.items():
        values = result["values"][name]
        others = [f"{one}: {moved(found)}" for one, found in values.items() if one != assumed]
        found = values[assumed]
        with_it = f"{found['top1']:.1f} %" if "top1" in found else f"stability {found['stability']:.3f}"
        lines.append(f"| {name} | {assumed} | {with_it} | {'; '.join(others)} |")
    return "\n".join(lines)


def moved(found: dict[str, float]) -> str:
    if "top1" in found:
        return f"{found['difference']:+.1f} ± {found['interval']:.1f}"
    return f"{found['difference']:+.3f} ± {found['interval']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help=f"file with the published weights of {MODEL}")
    parser.add_argument("--images", type=Path, help="folder of 224-pixel photographs, one folder per class")
    parser.add_argument("--limit", type=int, default=1000, help="number of photographs, evenly spaced")
    args = parser.parse_args()
    if args.weights and args.images:
        start = time.process_time()
        values = measure(args.weights, args.images, args.limit)
        facts = {
            "model": MODEL,
            "images": args.limit,
            "images_of_stability": DIAGNOSED,
            "clean": values.pop("")["nothing"],
        }
        facts |= {"versions": versions("torch", "timm"), "cpu": platform.machine()}
        facts["cpu_seconds"] = round(time.process_time() - start)
        OUT.write_text(json.dumps(facts | {"values": values}, indent=1, ensure_ascii=False) + "\n")
    print(table(json.loads(OUT.read_text())))


if __name__ == "__main__":
    main()
