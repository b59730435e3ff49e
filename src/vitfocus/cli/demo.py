"""`vitfocus demo`: the whole idea in a few minutes on a laptop, with nothing downloaded.

It trains a plain and a treated tiny ViT on the embedded Shapes, diagnoses both, evaluates both on the same corrupted
images, prints one table and writes a report. Interrupting it is harmless: what is finished is kept and not done again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

MODEL = "vit_tiny_patch16_224"
TREATMENTS = "cbs+tap+adl"
CORRUPTION = "gaussian_noise/3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder for everything (default: runs/demo)"
    )
    parser.add_argument("--treat", default=TREATMENTS, metavar="SPEC", help=f"the treatment (default: {TREATMENTS})")
    parser.add_argument("--epochs", type=int, default=4, help="how long to train each model (default: 4)")
    parser.add_argument("--images", type=int, default=250, metavar="N", help="images to evaluate on (default: 250)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Train, diagnose, evaluate, show."""
    import sys

    from vitfocus import diagnose, load
    from vitfocus.data.shapes import Shapes, shapes_batch
    from vitfocus.report.overview import overview
    from vitfocus.robustness import evaluate
    from vitfocus.train import train
    from vitfocus.treatments.spec import parse_treatments

    parse_treatments(args.treat)
    models, runs = {}, {}
    for name, spec in (("plain", MODEL), ("treated", f"{MODEL}+{args.treat}")):
        print(f"training the {name} model ({spec}) on the embedded Shapes", file=sys.stderr)
        overrides = [f'model.spec="{spec}"', f"schedule.epochs={args.epochs}"]
        runs[name] = train("shapes", out=args.out / name, resume="auto", overrides=overrides)
        if not runs[name]["finished"]:
            return 130
        models[name] = load(args.out / name / "model")
    print(f"diagnosing both, clean and under {CORRUPTION}", file=sys.stderr)
    images = shapes_batch(range(64), split="val", size=32)[0]
    diagnoses = {name: diagnose(model, images, CORRUPTION, name=name) for name, model in models.items()}
    for name, diagnosis in diagnoses.items():
        diagnosis.save(args.out / name / "diagnosis")
    print("evaluating both on the same corrupted images", file=sys.stderr)
    data = Shapes("val", length=args.images, size=32)
    scores = evaluate(models, "cifar10-c", data, out=args.out / "evaluation", resume=True)
    report = args.out / "report.html"
    facts = overview(args.treat, runs, diagnoses, scores, report)
    if args.json:
        print(json.dumps({"rows": facts, "report": str(report)}, indent=2))
        return 0
    _show(facts)
    print(f"\nreport: {report}")
    return 0


def _show(facts: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("", "plain", "treated"):
        table.add_column(heading, justify="left" if not heading else "right")
    for fact in facts:
        table.add_row(fact["what"], fact["plain"], fact["treated"])
    Console().print(table)
