"""`vitfocus demo`: the whole workflow in a few minutes on a laptop, without downloads.

It trains a plain and a treated tiny ViT on the built-in data set Shapes, diagnoses both, evaluates both on the same
corrupted images, prints one table and writes a report with the attention explorer. An interrupted demo resumes when run
again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitfocus.attention.diagnosis import Diagnosis
    from vitfocus.report import WrittenReport

MODEL = "vit_tiny_patch16_224"
TREATMENTS = "cbs+tap+adl"
CORRUPTION = "gaussian_noise/3"
EXPLORED = 8
WARMUP = 0.5  # epochs, as in the recipe; shorter if the training is shorter than one epoch

#: Readings in the table, averaged over the layers.
READINGS = {
    "entropy": "attention entropy, mean over layers (nats)",
    "overfocus": "overfocus: attention on the top 5 % of tokens",
    "stability": f"stability of the maps under {CORRUPTION} (cosine)",
    "head_similarity": "similarity between heads (cosine)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="output folder (default: runs/demo)"
    )
    parser.add_argument(
        "--treat", default=TREATMENTS, metavar="SPEC", help=f"treatment of the treated model (default: {TREATMENTS})"
    )
    parser.add_argument("--epochs", type=float, default=4.0, metavar="N", help="epochs per model (default: 4)")
    parser.add_argument(
        "--images", type=int, default=250, metavar="N", help="number of evaluation images (default: 250)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Train, diagnose, evaluate and report."""
    import sys

    from vitfocus import diagnose, load
    from vitfocus.core.errors import VitfocusError
    from vitfocus.data.shapes.dataset import Shapes, shapes_batch
    from vitfocus.report import report
    from vitfocus.report.explorer import explorer_data
    from vitfocus.report.runs import write_data_source
    from vitfocus.robustness import evaluate
    from vitfocus.train import train
    from vitfocus.treatments.spec import parse_treatments

    if args.images < 1:
        raise VitfocusError(f"--images must be at least 1, but is {args.images}.")
    if not parse_treatments(args.treat):
        raise VitfocusError(f"--treat names no treatment to compare with the plain model: try {TREATMENTS}.")
    models, runs = {}, {}
    for name, spec in (("plain", MODEL), ("treated", f"{MODEL}+{args.treat}")):
        print(f"training the {name} model ({spec}) on the built-in data set Shapes", file=sys.stderr)
        overrides = [f'model.spec="{spec}"', f"schedule.epochs={args.epochs:g}"]
        overrides.append(f"schedule.warmup_epochs={min(WARMUP, args.epochs / 2):g}")
        runs[name] = train("shapes", out=args.out / name, resume="auto", overrides=overrides)
        if not runs[name]["finished"]:
            return 130
        models[name] = load(args.out / name / "model")
    print(f"diagnosing both, clean and under {CORRUPTION}", file=sys.stderr)
    images = shapes_batch(range(64), split="val", size=32)[0]
    diagnoses = {name: diagnose(model, images, CORRUPTION, name=name) for name, model in models.items()}
    digest = hashlib.sha256(images.numpy().data).hexdigest()
    for name, diagnosis in diagnoses.items():
        diagnosis.save(args.out / name / "diagnosis")
        write_data_source(args.out / name / "diagnosis", "Shapes", digest)
    print("evaluating both on the same corrupted images", file=sys.stderr)
    data = Shapes("val", length=args.images, size=32)
    evaluate(models, "cifar10-c", data, out=args.out / "evaluation", resume=True)
    written = report(
        args.out,
        title="A plain and a treated vision transformer",
        about=f"Two tiny ViTs, trained alike on the built-in data set Shapes; the treated one has {args.treat}. "
        f"Both were measured on the same {args.images:,} images of Shapes, clean and with the corruptions of "
        "CIFAR-10-C (the suite cifar10-c), generated from the same seed. Nothing was downloaded. Tiny models on a toy "
        "data set show how the tool works, not how good the treatments are.",
        explorer=explorer_data(models, images[:EXPLORED], CORRUPTION),
    )
    facts = _facts(written, runs, diagnoses)
    if args.json:
        print(json.dumps({"rows": facts, "report": str(written.path)}, indent=2))
        return 0
    _show(facts)
    print(f"\nreport: {written.path}")
    return 0


def _facts(
    written: WrittenReport, runs: Mapping[str, Mapping[str, Any]], diagnoses: Mapping[str, Diagnosis]
) -> list[dict[str, str]]:
    """The rows of the table: the report's main results, and the readings averaged over the layers."""
    facts = [{"what": "parameters", **{name: f"{runs[name]['parameters']:,}" for name in runs}}]
    for row in written.rows:
        if row.headline:
            shown = {}
            for name, value in row.values.items():
                low, high = value.interval or (value.number, value.number)
                shown[name] = f"{value.number:.1f} [{low:.1f}, {high:.1f}]"
            where = " at the end of training" if "training" in row.test else ""
            facts.append({"what": f"{row.measure}{where} ({row.unit})", **shown})
    for key, what in READINGS.items():
        means = {name: [row[key] for row in one.rows if key in row] for name, one in diagnoses.items()}
        if all(means.values()):
            facts.append({"what": what, **{name: f"{sum(v) / len(v):.2f}" for name, v in means.items()}})
    return facts


def _show(facts: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("", "plain", "treated"):
        table.add_column(heading, justify="left" if not heading else "right")
    for fact in facts:
        table.add_row(fact["what"], fact.get("plain", ""), fact.get("treated", ""))
    Console().print(table)
