"""Test-time registers without training: what they change in two small models with outlier tokens.

    python studies/registers/study.py --photos DIR --weights DIR [--frost DIR]     # measure, and write results.json
    python studies/registers/study.py --models vit_tiny_patch16_224 ...            # some; the others' results stay
    python studies/registers/study.py --pretrained --models NAME --photos DIR      # weights from the hub
    python studies/registers/study.py table                                        # print what was measured

DIR of photographs holds ImageNet's validation images in class folders, DIR of weights the files NAME.safetensors. The
register neurons are found on the first photographs (`--find`, 100) and everything is measured on the others: accuracy,
generated ImageNet-C, high-norm tokens, overfocus, and the stability of attention maps under noise, each for the plain
model and with `ttr`. Both models see the same corrupted images, and differences have paired intervals.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import vitfocus as vf
from vitfocus.core.environment import default_device, device_name, versions
from vitfocus.core.files import write_text
from vitfocus.core.tables import Table

RESULTS = Path(__file__).resolve().parent / "results.json"
MODELS = ("deit_tiny_patch16_224", "vit_tiny_patch16_224")
READINGS = ("high_norm", "norm_ratio", "overfocus", "stability")
AGAINST = "gaussian_noise/3"


def measure(
    model: nn.Module,
    find: Sequence[Path],
    photos: Sequence[Path],
    neurons: int,
    *,
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    frost: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One model, plain and with test-time registers.

    Args:
        model: A trained model of ImageNet's classes.
        find: The photographs on which the neurons are found.
        photos: Other photographs, in class folders, on which everything is measured.
        neurons: How many neurons are moved.
        severities: Severities of the generated corruptions.
        frost: The folder of frost overlays.
        **options: Further options of `vitfocus.evaluate`.

    Returns:
        The spec, and by variant (plain, ttr) the scores and the readings by layer.
    """
    record = vf.find_registers(model, list(find), neurons)
    treated = vf.treat_(copy.deepcopy(model), record)
    models = {"plain": model, "ttr": treated}
    labels = class_numbers(photos)
    scores = vf.evaluate(
        models, "imagenet-c", (list(photos), labels), severities=list(severities), frost=frost, seed=0, **options
    )
    found: dict[str, Any] = {"spec": str(record)}
    for name, one in models.items():
        rows = vf.diagnose(one, list(photos), against=AGAINST).rows
        summary = scores.models[name]
        kept = ("top1", "top1_interval", "mce", "mce_interval")
        found[name] = {key: summary[key] for key in kept if key in summary}
        found[name]["readings"] = {key: [row.get(key) for row in rows] for key in READINGS}
    found["comparison"] = scores.compare("plain", "ttr").to_dict()
    return found


def class_numbers(photos: Sequence[Path]) -> list[int]:
    """ImageNet's class of each photograph, by the name of its folder."""
    from vitfocus.robustness.classification import wordnet_ids

    numbers = {name: number for number, name in enumerate(wordnet_ids())}
    return [numbers[photo.parent.name] for photo in photos]


def table(results: Mapping[str, Any]) -> Table:
    """Scores, and the readings of the last layer and at their largest."""
    rows = []
    for name, found in results["models"].items():
        for variant in ("plain", "ttr"):
            one = found[variant]
            readings = {key: [v for v in values if v is not None] for key, values in one["readings"].items()}
            cells = [_with_interval(one, "top1"), _with_interval(one, "mce") if "mce" in one else "–"]
            cells += [f"{100 * max(readings['high_norm']):.2f} %", f"{max(readings['norm_ratio']):.1f}"]
            cells += [f"{100 * readings['overfocus'][-1]:.1f} %", f"{readings['stability'][-1]:.3f}"]
            rows.append([f"{name} {variant}", *cells])
    columns = ["model", "accuracy", "mCE", "high-norm tokens (most)", "norm ratio (most)", "overfocus (last)"]
    caption = f"{results['photographs']} photographs, stability under {AGAINST}; {results['device']}"
    return Table("Test-time registers", [*columns, "stability (last)"], rows, caption)


def differences(results: Mapping[str, Any]) -> list[str]:
    """What `ttr` changes in accuracy and mCE, with paired 95 % intervals, one line per model."""
    lines = []
    for name, found in results["models"].items():
        rows = {row["name"]: row for row in found["comparison"]["rows"]}
        parts = []
        for title, key in (("accuracy", "clean"), ("mCE", "mCE")):
            if key in rows:
                low, high = rows[key]["interval"]
                parts.append(f"{title} {rows[key]['difference']:+.1f} [{low:+.1f}, {high:+.1f}]")
        lines.append(f"{name}, ttr against plain: {', '.join(parts)}")
    return lines


def _with_interval(summary: Mapping[str, Any], key: str) -> str:
    low, high = summary[f"{key}_interval"]
    return f"{summary[key]:.1f} [{low:.1f}, {high:.1f}]"


def report(path: Path) -> None:
    """Print the table and the differences."""
    results = json.loads(path.read_text())
    print(table(results))
    print("\n".join(differences(results)))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("measure", "table"), default="measure")
    parser.add_argument("--photos", type=Path, default=Path("data/imagenet/val"))
    parser.add_argument("--weights", type=Path, default=Path("data"))
    parser.add_argument("--pretrained", action="store_true", help="use the library's weights, which it may download")
    parser.add_argument("--frost", type=Path)
    parser.add_argument("--find", type=int, default=100, help="photographs on which the neurons are found")
    parser.add_argument("--neurons", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.command == "table":
        report(args.out)
        return
    photos = sorted(args.photos.glob("*/*"))
    find = photos[:: max(1, len(photos) // args.find)][: args.find]
    others = [photo for photo in photos if photo not in set(find)]
    models = json.loads(args.out.read_text())["models"] if args.out.is_file() else {}
    for name in args.models:
        model = vf.create_model(name, pretrained=args.pretrained)
        if not args.pretrained:
            vf.load_weights(model, args.weights / f"{name}.safetensors")
        model.to(default_device()).eval()
        models[name] = measure(model, find, others, args.neurons, frost=args.frost)
        results = {
            "models": models,
            "photographs": len(others),
            "found_on": len(find),
            "device": device_name(default_device()),
            "versions": versions("python"),
        }
        write_text(args.out, json.dumps(results, indent=1) + "\n")  # what is measured stays if a later model fails
        print(f"{name}: {models[name]['spec']}", flush=True)
    report(args.out)


if __name__ == "__main__":
    main()
