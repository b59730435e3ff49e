"""Images per second of every corruption at 224 px, severity 3, on the device at hand.

    python benchmarks/corruptions.py                                  # this machine, all corruptions
    python benchmarks/corruptions.py --device cuda --batch 256
    python benchmarks/corruptions.py --reference make_imagenet_c.py --reference-python other/bin/python

A reference is a Python file whose functions have the names of the corruptions and take (PIL image, severity), such as
the published generator in a form that can be imported. It is timed in its own interpreter, on the same image, one image
at a time, because it has no batches. Only measured numbers are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vitfocus.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt, fingerprint
from vitfocus.corruptions.base import Draws

_TIME_REFERENCE = """
import importlib.metadata, importlib.util, json, sys, time
import numpy as np
from PIL import Image
spec = importlib.util.spec_from_file_location("reference", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
image = Image.open(sys.argv[2]).convert("RGB")
seconds, result = float(sys.argv[4]), {}
for name in sys.argv[5].split(","):
    run = lambda: np.uint8(getattr(module, name)(image, int(sys.argv[3])))
    if not hasattr(module, name):
        continue
    run()
    times, start = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    result[name] = 1000 * min(times)
packages = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
names = ("numpy", "scipy", "scikit-image", "opencv", "pillow")
known = {name: version for name, version in packages.items() if name.startswith(names)}
print(json.dumps([result, known]))
"""


def photograph(size: int) -> torch.Tensor:
    """A smooth, coloured, noisy picture, (3, size, size) uint8: nothing here depends on what it shows."""
    draws = Draws(0, "benchmark", 0, torch.arange(1))
    picture = torch.zeros(1, 3, size, size)
    for octave in range(5):
        noise = draws.normal((3, 3 << octave, 3 << octave), stream=octave)
        picture += torch.nn.functional.interpolate(noise, size=(size, size), mode="bicubic") * 0.6**octave
    return (picture[0] * 55 + 120).clamp(0, 255).to(torch.uint8)


def measure(image: torch.Tensor, name: str, args: argparse.Namespace) -> float:
    """Milliseconds an image: the best batch, the one least disturbed by other work on the machine."""
    images = image.to(args.device).expand(args.batch, -1, -1, -1).contiguous()
    ids = torch.arange(args.batch, device=images.device)
    cuda = images.device.type == "cuda"

    def run() -> float:
        begin = time.perf_counter()
        corrupt(images, name, args.severity, ids=ids, frost=args.frost)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    run(), run()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < args.seconds:
        times.append(run())
    return 1000 * min(times) / args.batch


def reference_times(
    image: torch.Tensor, names: list[str], args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds an image of the reference, in its own interpreter, and the versions of what it stands on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.png"
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        command = [args.reference_python, "-c", _TIME_REFERENCE, args.reference, str(path), str(args.severity)]
        command += [str(args.seconds), ",".join(names)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"The reference {args.reference!r} does not run: {done.stderr.strip().splitlines()[-1]}")
    times, versions = json.loads(done.stdout.strip().splitlines()[-1])
    return times, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="images a call: 256 on a GPU, 16 on a CPU")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--severity", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each corruption")
    parser.add_argument("--only", nargs="*", help="some corruptions")
    parser.add_argument("--frost", help="folder of frost overlays")
    parser.add_argument("--reference", help="Python file of the reference generator")
    parser.add_argument("--reference-python", default=sys.executable)
    parser.add_argument("--json", type=Path, help="where the results go (default: benchmarks/results/)")
    args = parser.parse_args()
    args.batch = args.batch or (256 if args.device.startswith("cuda") else 16)

    image = photograph(args.size)
    names = args.only or [*CORRUPTIONS, *EXTRA_CORRUPTIONS]
    reference, versions = reference_times(image, names, args) if args.reference else ({}, {})
    rows: list[dict[str, Any]] = []
    print(f"{'corruption':<20}{'images/s':>10}{'ms/image':>10}{'reference ms':>14}{'times faster':>14}")
    for name in names:
        ms = measure(image, name, args)
        row: dict[str, Any] = {"corruption": name, "ms": ms, "images_per_second": 1000 / ms}
        line = f"{name:<20}{1000 / ms:>10.0f}{ms:>10.3f}"
        if name in reference:
            row |= {"reference_ms": reference[name], "speedup": reference[name] / ms}
            line += f"{reference[name]:>14.1f}{row['speedup']:>14.1f}"
        print(line, flush=True)
        rows.append(row)
    test = [row["ms"] for row in rows if row["corruption"] in CORRUPTIONS]
    summary = {}
    if len(test) == len(CORRUPTIONS):
        summary = {"images_per_second": 1000 * len(test) / sum(test), "slowest": 1000 / max(test)}
        print(f"the 15 test corruptions: {summary['images_per_second']:.0f} images/s, slowest {summary['slowest']:.0f}")

    cuda = args.device.startswith("cuda")
    result = {
        "what": f"corruptions, severity {args.severity}, {args.size} px, batch {args.batch}",
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "fingerprint": fingerprint("imagenet", args.frost),
        "reference": args.reference and {"file": Path(args.reference).name, **versions},
        "the_15": summary,
        "rows": rows,
    }
    path = args.json or Path(__file__).parent / "results" / f"corruptions-{'cuda' if cuda else 'cpu'}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
