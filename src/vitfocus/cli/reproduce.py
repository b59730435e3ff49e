"""`vitfocus reproduce`: train and measure a table or figure of the papers, and print their numbers beside ours."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitfocus.cli.common import add_option, positive, say
from vitfocus.core.arguments import OnlyWith, parse_digits
from vitfocus.core.errors import VitfocusError
from vitfocus.core.tables import bullet, terminal_width
from vitfocus.reproduce.items import PAPERS, SCALES, item_names, load_item
from vitfocus.reproduce.jobs import CLUSTERS, job_script, plan_jobs, submit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("item", nargs="?", help="table or figure, such as cb/table4a; without it, list them")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values to change in the recipe of every row")
    parser.add_argument(
        "--list",
        action="store_true",
        help="list every table and figure, or the one named, and how its protocol compares with the paper's",
    )
    parser.add_argument("--scale", default="smoke", help="smoke, cifar100 or imagenet (default: smoke)")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="folder that contains the data sets by name, or one data set; may be repeated",
    )
    parser.add_argument(
        "--out", default="runs/reproduce", metavar="DIR", help="folder for runs and results (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", type=_numbers, default=[], metavar="N,N", help="only these rows, numbered from 1, such as 1,3"
    )
    trained = OnlyWith(lambda args: not args.count, "has no effect with --count, which evaluates nothing: drop --count")
    images = "evaluate and diagnose trained models on at most N images"
    add_option(parser, trained, "--images", type=positive, metavar="N", help=images)
    parser.add_argument(
        "--weights",
        action="append",
        default=[],
        metavar="ROW=FILE",
        help="measure a row, by number or label, with these weights instead of training it; may be repeated",
    )
    parser.add_argument(
        "--pretrained",
        action="store_true",
        help="measure rows with the pretrained weights of their library, which may download them, and train nothing",
    )
    parser.add_argument("--count", action="store_true", help="only count parameters and FLOPs, without training")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="SUITE.NAME=VALUE",
        help="option of an evaluation suite, such as fgsm.eps=2 or cityscapes-c.types=all; may be repeated",
    )
    alone = OnlyWith(
        lambda args: not (args.count or args.plan or args.train or args.submit),
        "cannot be combined with --count, --plan, --train or --submit",
    )
    calibrate = "measure rows of --weights or --pretrained with each candidate of values that the paper does not state"
    add_option(parser, alone, "--calibrate", action="store_true", help=calibrate)
    parser.add_argument(
        "--plan", action="store_true", help="print the runs and measurements as commands with their dependencies"
    )
    parser.add_argument("--train", metavar="RUN", help="only train this run of the plan, and those it depends on")
    add_option(
        parser,
        OnlyWith(lambda args: not (args.count or args.train), "cannot be combined with --count or --train"),
        "--submit",
        nargs="?",
        const="slurm",
        choices=CLUSTERS,
        help="submit the plan to Slurm, or run it on this machine, with submitit; pre-empted jobs are requeued",
    )
    add_option(
        parser,
        OnlyWith(lambda args: bool(args.submit), "is for --submit: add it"),
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="parameter of submitit for --submit, such as gpus_per_node=8, timeout_min=1440 or slurm_partition=gpu",
    )


def run(args: argparse.Namespace) -> int:
    """Print the list, or run an item; 130 when stopped, and the same command resumes."""
    if args.item is None and not args.list and (args.data or args.rows or args.images or args.count):
        raise VitfocusError(
            "The table or figure is missing (such as cb/table4a); `vitfocus reproduce --list` lists them."
        )
    if args.list or args.item is None:
        return _list(args.json, args.item)
    from vitfocus.core.environment import is_main_process
    from vitfocus.reproduce.plan import plan_item
    from vitfocus.reproduce.run import Stopped, reproduce, train_planned

    chosen = {name: getattr(args, name) for name in ("data", "out", "overrides", "rows", "weights", "pretrained")}
    if args.plan or args.submit:
        return _plan(args, chosen)
    if args.calibrate:
        return _calibrate(args, chosen)
    try:
        if args.train:
            train_planned(args.train, plan_item(args.item, args.scale, **chosen))
            return 0
        outcomes = reproduce(
            args.item, args.scale, images=args.images, count_only=args.count, options=args.option, **chosen
        )
    except Stopped as stopped:
        say(f"vitfocus: stopped in {stopped}; run the same command again to resume.")
        return 130
    if not is_main_process():
        return 0
    if args.json:
        found = [outcome.to_dict() for outcome in outcomes]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1, ensure_ascii=False))
    else:
        for outcome in outcomes:
            print(outcome, *(f"figure: {figure}" for figure in outcome.figures), sep="\n")
    return 0


def _plan(args: argparse.Namespace, chosen: dict[str, Any]) -> int:
    """Print the jobs of an item, or submit them."""
    words = ["--scale", args.scale, "--out", args.out, *args.overrides]
    for name in ("data", "weights", "option"):
        words += [word for one in getattr(args, name) for word in (f"--{name}", one)]
    words += ["--pretrained"] * args.pretrained + (["--images", str(args.images)] if args.images else [])
    jobs = plan_jobs(args.item, args.scale, words, **chosen)
    ids = {}
    if args.submit:
        options = dict(_setting(text) for text in args.slurm)
        found = submit(jobs, Path(args.out) / "jobs", args.submit, options)
        ids = {name: job.job_id for name, job in found.items()}
    if args.json:
        print(json.dumps([{**job.to_dict(), "id": ids.get(job.name)} for job in jobs], indent=1, ensure_ascii=False))
    elif args.submit:
        for number, job in enumerate(jobs, 1):
            print(f"{number}  {job.name}: {f'submitted as {ids[job.name]}' if job.name in ids else 'already done'}")
    else:
        print(job_script(jobs))
    return 0


def _calibrate(args: argparse.Namespace, chosen: dict[str, Any]) -> int:
    """Measure with each candidate of a value that the paper does not state, and print the results."""
    from vitfocus.core.environment import is_main_process
    from vitfocus.reproduce.run import calibrate, calibration_text

    trials = calibrate(args.item, args.scale, images=args.images, options=args.option, **chosen)
    if is_main_process():
        as_data = [{**asdict(one), "off": one.off, "agrees": one.agrees} for one in trials]
        print(json.dumps(as_data, indent=1, ensure_ascii=False) if args.json else calibration_text(trials))
    return 0


def _setting(text: str) -> tuple[str, int | str]:
    key, equals, value = text.partition("=")
    if not (equals and key):
        raise VitfocusError(f"--slurm {text} is not KEY=VALUE, such as gpus_per_node=8.")
    number = parse_digits(value)
    return key, value if number is None else number


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,3") from None


_KINDS = {"exact": "exactly the paper's:", "assumed": "assumed, not stated:", "differs": "different:"}


def _list(as_json: bool, name: str | None = None) -> int:
    """Print the items, or one of them, with the parts of the protocol that are exact, assumed, or different."""
    named = [] if name is None else [name, *load_item(name).parts]
    items = [load_item(one) for one in item_names() if not named or one in named]
    if as_json:
        listed: list[dict[str, Any]] = [
            {"item": item.name, "paper": item.paper, "title": item.title, "data": item.data}
            | {"rows": [row.label for row in item.rows], "parts": list(item.parts), "protocol": item.protocol}
            for item in items
        ]
        print(json.dumps({"items": listed, "scales": SCALES}, indent=1, ensure_ascii=False))
        return 0
    width, wide = max(len(item.name) for item in items), terminal_width()
    for paper, title in PAPERS.items():
        found = [item for item in items if item.name.startswith(f"{paper}/")]
        if found:
            print(title)
        for item in found:
            parts = f" ({' and '.join(part.partition('/')[2] for part in item.parts)})" if item.parts else ""
            print(f"  {item.name:<{width}}  {item.title}{parts}")
            for kind, texts in item.protocol.items():
                if texts:
                    print(f"      {_KINDS[kind]}")
                for text in texts:
                    print(textwrap.indent(bullet(text, wide and wide - 6), " " * 6))
    print("Scales")
    for scale, about in SCALES.items():
        print(f"  {scale:<{width}}  {about}")
    return 0
