"""`vitfocus demo`: three tiny models trained, diagnosed and compared, in minutes on a laptop without downloads.

It trains three tiny ViTs on the built-in data set Shapes: `plain`; `treated`, which differs by its treatments; and
`high-rate`, plain with a learning rate that is too high. It diagnoses all three, evaluates them on the same corrupted
images, says what it found, and writes a report with the attention explorer. An interrupted demo resumes when run
again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitfocus.cli.common import positive, positive_float, say, whole
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import lock_folder, require_run_folder
from vitfocus.core.tables import Table, bullet

if TYPE_CHECKING:
    from vitfocus.attention.diagnosis import Diagnosis
    from vitfocus.report import WrittenReport

MODEL = "vit_tiny_patch16_224"
TREATMENTS = "tap+adl"
RATE, HIGH_RATE = 1e-3, 1e-2  # the recipe's learning rate, and one that is too high
CORRUPTION = "gaussian_noise/3"
EPOCHS = 2.0
EXPLORED = 8
WARMUP = 0.5  # epochs, as in the recipe; shorter if the run is shorter than one epoch

#: Readings in the table, averaged over the layers.
READINGS = {
    "entropy": "attention entropy, mean over layers (nats)",
    "overfocus": "overfocus: attention on the top 5 % of tokens",
    "stability": f"stability of the maps under {CORRUPTION} (cosine)",
    "head_similarity": "similarity between heads (cosine)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="output folder (default: runs/demo)")
    parser.add_argument(
        "--treat", default=TREATMENTS, metavar="SPEC", help=f"treatment of the treated model (default: {TREATMENTS})"
    )
    parser.add_argument(
        "--epochs", type=positive_float, default=EPOCHS, metavar="N", help="epochs per model (default: 2)"
    )
    parser.add_argument(
        "--images", type=positive, default=250, metavar="N", help="number of evaluation images (default: 250)"
    )
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="training seed (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Train, diagnose, evaluate and report, in a folder of this process alone."""
    args.out = Path(args.out)
    require_run_folder(args.out, arms(), "vitfocus demo")
    with lock_folder(args.out):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from vitfocus import diagnose, load
    from vitfocus.data.shapes.dataset import Shapes, shapes_batch
    from vitfocus.report import report
    from vitfocus.report.explorer import explorer_data
    from vitfocus.report.runs import write_data_source
    from vitfocus.robustness import evaluate
    from vitfocus.train import train
    from vitfocus.train.log import by_layer
    from vitfocus.treatments.spec import parse_treatments

    if not parse_treatments(args.treat):
        raise VitfocusError(f"--treat names no treatment to compare with the plain model: try {TREATMENTS}.")
    models, runs = {}, {}
    for name, (spec, rate) in arms(args.treat).items():
        say(f"training {name}: {spec}, learning rate {rate:g}, on the built-in data set Shapes")
        overrides = recipe_changes(spec, rate, args.epochs, args.seed)
        runs[name] = train("shapes", out=args.out / name, resume="auto", overrides=overrides)
        if not runs[name]["finished"]:
            return 130
        models[name] = load(args.out / name / "model")
    models = {name: models[name] for name in ("plain", "treated", "high-rate")}  # plain is the baseline
    say(f"diagnosing them, clean and under {CORRUPTION}")
    images = shapes_batch(range(64), split="val", size=32)[0]
    diagnoses = {name: diagnose(model, images, CORRUPTION, name=name) for name, model in models.items()}
    digest = hashlib.sha256(images.numpy().data).hexdigest()
    for name, diagnosis in diagnoses.items():
        diagnosis.save(args.out / name / "diagnosis")
        write_data_source(args.out / name / "diagnosis", "Shapes", digest)
    say("evaluating them on the same corrupted images")
    data = Shapes("val", length=args.images, size=32)
    evaluate(models, "cifar10-c", data, out=args.out / "evaluation", resume=True)
    collapses = _collapses(diagnoses)
    written = report(
        *(args.out / name for name in (*models, "evaluation")),
        out=args.out / "report.html",
        title="Three tiny vision transformers: plain, treated, and trained with a learning rate that is too high",
        about=f"Three tiny ViTs, trained for {args.epochs:g} epochs on the built-in data set Shapes: plain, with a "
        f"learning rate of {RATE:g}; treated, the same with {args.treat}; and high-rate, plain with a learning rate of "
        f"{HIGH_RATE:g}, which is too high. {' '.join(collapses)} All were measured on the same {args.images:,} images "
        "of Shapes, clean and with the corruptions of CIFAR-10-C (the suite cifar10-c), generated from the same seed. "
        f"Nothing was downloaded. The learning rate of {RATE:g} is the recipe's and was tuned for neither model: tiny "
        "models on a toy data set show how the tool works, not how good the treatments are.",
        explorer=explorer_data(models, images[:EXPLORED], CORRUPTION),
    )
    facts = _facts(written, runs, diagnoses)
    sentences = [*collapses, *_differences(written)]
    if args.json:
        attention = {name: by_layer(one) for name, one in diagnoses.items()}
        print(json.dumps({"rows": facts, "found": sentences, "attention": attention, **written.to_dict()}, indent=2))
        return 0
    columns = list(models)
    print(Table("", ["", *columns], [[fact["what"], *(fact.get(name, "") for name in columns)] for fact in facts]))
    print("\n".join(map(bullet, sentences)))
    print(f"\nreport: {written.path}")
    return 0


def arms(treat: str = TREATMENTS) -> dict[str, tuple[str, float]]:
    """The spec and the learning rate of each model, by name."""
    return {"high-rate": (MODEL, HIGH_RATE), "plain": (MODEL, RATE), "treated": (f"{MODEL}+{treat}", RATE)}


def recipe_changes(spec: str, rate: float, epochs: float = EPOCHS, seed: int = 0) -> list[str]:
    """The overrides of the recipe `shapes` for one model.

    >>> recipe_changes("vit_tiny_patch16_224", 1e-2)[1:]
    ['optimiser.lr=0.01', 'schedule.epochs=2', 'schedule.warmup_epochs=0.5', 'engine.seed=0']
    """
    lengths = [f"schedule.epochs={epochs:g}", f"schedule.warmup_epochs={min(WARMUP, epochs / 2):g}"]
    return [f'model.spec="{spec}"', f"optimiser.lr={rate:g}", *lengths, f"engine.seed={seed}"]


def _collapses(diagnoses: Mapping[str, Diagnosis]) -> list[str]:
    """Which models have collapsed attention, and which do not."""
    from vitfocus.train.log import by_layer, describe_collapse

    found = {name: describe_collapse(by_layer(one)) for name, one in diagnoses.items()}
    healthy = [name for name, text in found.items() if not text]
    listed = " and ".join(filter(None, [", ".join(healthy[:-1]), *healthy[-1:]]))
    collapsed = [f"In {name}, {text[:1].lower()}{text[1:]}" for name, text in found.items() if text]
    return [*collapsed, *([f"Attention has not collapsed in {listed}."] if healthy else [])]


def _differences(written: WrittenReport) -> list[str]:
    """What the report says about the differences between the models on the same images."""
    compared = [row for row in written.rows if row.headline and "training" not in row.test]
    return [text for row in compared for text in row.sentences()]


def _facts(
    written: WrittenReport, runs: Mapping[str, Mapping[str, Any]], diagnoses: Mapping[str, Diagnosis]
) -> list[dict[str, str]]:
    """The rows of the table: the report's main results, and the readings averaged over the layers."""
    facts = [
        {"what": "parameters", **{name: f"{one['parameters']:,}" for name, one in runs.items()}},
        {"what": "training time (s)", **{name: f"{one['seconds']:.0f}" for name, one in runs.items()}},
    ]
    for row in written.rows:
        if row.headline:
            shown = {name: value.text(".1f") for name, value in row.values.items()}
            where = " at the end of training" if "training" in row.test else ""
            facts.append({"what": f"{row.measure}{where} ({row.unit})", **shown})
    for key, what in READINGS.items():
        means = {name: [row[key] for row in one.rows if key in row] for name, one in diagnoses.items()}
        if all(means.values()):
            facts.append({"what": what, **{name: f"{sum(v) / len(v):.2f}" for name, v in means.items()}})
    return facts
