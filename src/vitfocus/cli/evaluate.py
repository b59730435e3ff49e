"""`vitfocus evaluate`: measure one or more models on a robustness suite, or compare two finished runs."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitfocus.cli.common import (
    add_device,
    add_weights,
    finish_run,
    label_models,
    open_named_model,
    positive,
    say,
    whole,
)
from vitfocus.core.arguments import OnlyWith
from vitfocus.core.errors import VitfocusError
from vitfocus.core.records import convert, read_json, read_toml
from vitfocus.core.tables import listing
from vitfocus.recipes import Data
from vitfocus.robustness.suites import SUITES, TASK_SUITES, find_suite, switches

if TYPE_CHECKING:
    from torch import Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        nargs="*",
        metavar="MODEL",
        help="a timm name, optionally with treatments (name+tap+cb), or the folder of a saved model",
    )
    parser.add_argument(
        "--suite",
        metavar="NAME",
        help="suite such as clean or imagenet-c; 'list' prints them all (default: the suite of the saved model's task)",
    )
    about = "folder of the suite as published, folder with a subfolder per class, or shapes:N"
    parser.add_argument("--data", metavar="DIR", help=about)
    add_weights(parser)
    parser.add_argument("--treat", metavar="SPEC", help="treatments to insert into every model first, such as tap+cb")
    parser.add_argument("--out", metavar="RUN", help="folder for results.json and, during the run, partial results")
    parser.add_argument("--resume", action="store_true", help="resume the run in --out")
    parser.add_argument("--limit", type=positive, metavar="N", help="use at most N images, evenly spaced")
    parser.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="batch size (default for classifiers: 256 on a GPU, 32 on a CPU)",
    )
    parser.add_argument("--workers", type=whole, metavar="N", help="number of processes that read images")
    parser.add_argument("--precision", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    add_device(parser)
    parser.add_argument("--seed", type=whole, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--compare", nargs=2, metavar=("RUN_A", "RUN_B"), help="compare two finished runs, paired by image"
    )
    parser.add_argument("--force", action="store_true", help="with --compare: compare even if the protocols differ")
    suites = parser.add_argument_group("options of individual suites")
    for name, (option, names) in switches().items():
        flag = f"--{'no-' if option.negate else ''}{name.replace('_', '-')}"
        text = (f"{', '.join(names)}: {option.help}" if len(names) <= 6 else option.help).replace("%", "%%")
        if option.type is bool:
            action = "store_false" if option.negate else "store_true"
            suites.add_argument(flag, dest=name, action=action, default=None, help=text)
        else:
            shape: dict[str, Any] = {"nargs": "+"} if option.several else {}
            shape |= {"type": whole, "metavar": "N"} if option.type is int else {"type": option.type}
            suites.add_argument(flag, help=text, **{"metavar": "X" if option.type is float else "TEXT"} | shape)
    why = "has no effect with --compare, which reads finished runs: leave --compare out"
    evaluating = OnlyWith(lambda args: not args.compare, why)
    comparing = OnlyWith(lambda args: bool(args.compare), "is for --compare RUN_A RUN_B: add that")
    for declared in parser._actions:
        if declared.dest not in ("help", "compare", "seed"):
            declared.condition = comparing if declared.dest == "force" else evaluating  # type: ignore[attr-defined]


def run(args: argparse.Namespace) -> int:
    """Evaluate or compare, and print the result; 130 when interrupted."""
    try:
        return _compare(args) if args.compare else _evaluate(args)
    except KeyboardInterrupt:
        kept = f"; partial results are in {args.out}, use --resume to continue" if args.out else ""
        say(f"vitfocus: interrupted{kept}")
        return 130


def _compare(args: argparse.Namespace) -> int:
    from vitfocus.core.environment import is_main_process
    from vitfocus.robustness.results import compare, load_scores

    first, second = map(load_scores, args.compare)
    if Path(args.compare[0]) == Path(args.compare[1]) and len(first.models) == 2:  # one run of two models
        first, second = (first.only(name) for name in first.models)
    comparison = compare(first, second, force=args.force, seed=args.seed)
    if is_main_process():
        print(json.dumps(comparison.to_dict(), indent=2) if args.json else comparison)
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from vitfocus.data.shapes.dataset import Shapes, image_size, shapes_named

    drawn_size = _fill_in_from_run(args) if args.model else None
    if args.suite == "list":
        about = {name: suite.description for name, suite in SUITES.items()}
        suites = {n: {"about": about[n], "options": [one.name for one in s.option_list]} for n, s in SUITES.items()}
        print(json.dumps(suites, indent=2) if args.json else listing(about))
        return 0
    needed = {"MODEL": args.model, "--suite": args.suite, "--data": args.data}
    if missing := [flag for flag, value in needed.items() if not value]:
        if args.model and "/" in args.model[0] and ":" not in args.model[0] and not Path(args.model[0]).is_dir():
            raise VitfocusError(f"There is no folder {args.model[0]}: name a run, or a folder with a saved model.")
        raise VitfocusError(f"{missing[0]} is missing: vitfocus evaluate MODEL --suite NAME --data DIR.")
    given = {name: getattr(args, name) for name in switches() if getattr(args, name) is not None}
    suite, _ = find_suite(args.suite, given)
    length = shapes_named(args.data, args.limit or 2000)
    if length is None and not Path(args.data).is_dir():
        raise VitfocusError(f"There is no folder {args.data}; --data expects the folder of the images, or shapes:N.")

    from vitfocus.anatomy import input_spec
    from vitfocus.core.environment import is_main_process
    from vitfocus.robustness.evaluation import evaluate

    models = {
        label: open_named_model(name, file, args.treat, pretrained=args.pretrained, quiet=not is_main_process())
        for label, (name, file) in label_models(args, args.treat).items()
    }
    data: Any = args.data
    if length is not None and suite.task == "classify" and drawn_size:  # as the run was trained
        sides = (32, 32) if suite.small_images else input_spec(next(iter(models.values()))).size
        drawn = image_size(drawn_size)
        data = Shapes("val", length=length, size=drawn, transform=None if drawn == sides else partial(_enlarge, sides))
    scores = evaluate(
        models,
        args.suite,
        data,
        device=args.device,
        batch_size=args.batch_size,
        limit=args.limit,
        seed=args.seed,
        out=args.out,
        resume=args.resume,
        workers=args.workers,
        precision=args.precision,
        **given,
    )
    if is_main_process():
        print(json.dumps(scores.to_dict(), indent=2) if args.json else scores, flush=True)
        if args.out:
            finish_run(args.out, models)
    return 0


def _enlarge(size: tuple[int, int], image: Tensor) -> Tensor:
    """Resize a small image as training with `data.enlarge` does: floats in [0, 1], (3, height, width)."""
    from torch.nn.functional import interpolate

    return interpolate(image[None].float() / 255, size=size, mode="bicubic", antialias=True)[0].clamp(0, 1)


def _fill_in_from_run(args: argparse.Namespace) -> int | None:
    """Fill in missing arguments from a run's folder: the suite of the model's task, and the data of its recipe.

    Returns:
        The size of the images that the run was trained on, if the data come from its recipe.
    """
    from vitfocus.treatments.save_load import SavedConfig

    folder = Path(args.model[0])
    saved = next((f for f in (folder / "config.json", folder / "model" / "config.json") if f.is_file()), None)
    if saved is None:
        return None
    try:
        suite = TASK_SUITES.get(read_json(saved, SavedConfig).task.get("task", ""))
    except VitfocusError:
        return None  # loading the model reports it
    args.suite = args.suite or suite
    recipe = next((f for f in (folder / "config.toml", folder.parent / "config.toml") if f.is_file()), None)
    if args.data is not None or recipe is None or args.suite != suite or suite is None:
        return None
    tree = read_toml(recipe).get("data", {})
    data = convert(tree, Data, recipe, writer="vitfocus train", hint="give --data instead")
    drawn = data.source == "shapes"
    args.data = f"shapes:{data.val_length}".removesuffix(":0") if drawn else data.root or None
    options = {option.name for option in SUITES[suite].option_list}
    if "source" in options and not drawn:
        args.source = args.source or data.source
    if "split" in options:
        args.split = args.split or data.val_split or None
        if data.holdout and not args.split and not drawn:
            raise VitfocusError(f"{recipe} holds out {data.holdout} images, which no suite can select: give --split.")
    elif args.data is not None and not drawn:
        args.data = _class_folders(recipe, data)
    return data.size


def _class_folders(recipe: Path, data: Data) -> str:
    """The folder of classes that a classifier was validated on; other kinds of data are an error."""
    root = Path(data.root)
    arrays = data.source in ("shards", "arrays", "fashion-mnist")
    if arrays or (data.source.startswith("cifar") and not (root / "train").is_dir()):
        raise VitfocusError(
            f"{recipe} has data.source={data.source}, but this suite reads one folder per class: give such a folder "
            "with --data."
        )
    return str(root / data.val_split)
