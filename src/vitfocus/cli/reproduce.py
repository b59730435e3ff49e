"""`vitfocus reproduce`: train and measure a table or figure of the papers, and print their numbers beside ours."""

from __future__ import annotations

import argparse
import json
import sys

from vitfocus.cli.common import only_with
from vitfocus.core.arguments import OnlyWith


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("item", nargs="?", help="table or figure, such as cb/table4a; without it, list them")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values to change in the recipe of every row")
    parser.add_argument("--list", action="store_true", help="list every table and figure of both papers")
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
        "--rows", type=_numbers, default=[], metavar="N,N", help="only these rows, counted from 1, such as 1,3"
    )
    images = parser.add_argument(
        "--images", type=int, metavar="N", help="evaluate and diagnose trained models on at most N images"
    )
    only_with(
        images,
        OnlyWith(lambda args: not args.count, "has no effect with --count, which evaluates nothing: leave --count out"),
    )
    parser.add_argument("--count", action="store_true", help="only count parameters and FLOPs, without training")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the list, or run an item; 130 when stopped, and the same command resumes."""
    from vitfocus.core.errors import VitfocusError

    if args.item is None and not args.list and (args.data or args.rows or args.images or args.count):
        raise VitfocusError(
            "The table or figure is missing (such as cb/table4a); `vitfocus reproduce --list` lists them."
        )
    if args.list or args.item is None:
        return _list(args.json)
    from vitfocus.core.environment import is_main_process
    from vitfocus.reproduce.run import Stopped, reproduce

    if args.images is not None and args.images < 1:
        raise VitfocusError(f"--images must be at least 1, but is {args.images}.")
    try:
        outcomes = reproduce(
            args.item,
            args.scale,
            data=args.data,
            out=args.out,
            overrides=args.overrides,
            rows=args.rows,
            images=args.images,
            count_only=args.count,
        )
    except Stopped as stopped:
        print(f"vitfocus: stopped in {stopped}; run the same command again to resume.", file=sys.stderr)
        return 130
    if not is_main_process():
        return 0
    if args.json:
        found = [outcome.to_dict() for outcome in outcomes]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1, ensure_ascii=False))
        return 0
    for outcome in outcomes:
        print(outcome)
        for figure in outcome.figures:
            print(f"figure: {figure}")
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,3") from None


def _list(as_json: bool) -> int:
    from vitfocus.reproduce.items import PAPERS, SCALES, item_names, load_item

    items = [load_item(name) for name in item_names()]
    if as_json:
        listed = [
            {
                "item": item.name,
                "paper": item.paper,
                "title": item.title,
                "data": item.data,
                "rows": [row.label for row in item.rows],
                "parts": list(item.parts),
            }
            for item in items
        ]
        print(json.dumps({"items": listed, "scales": SCALES}, indent=1, ensure_ascii=False))
        return 0
    width = max(len(item.name) for item in items)
    for paper, title in PAPERS.items():
        print(title)
        for item in items:
            if item.name.startswith(f"{paper}/"):
                parts = f" ({' and '.join(part.partition('/')[2] for part in item.parts)})" if item.parts else ""
                print(f"  {item.name:<{width}}  {item.title}{parts}")
    print("Scales")
    for scale, about in SCALES.items():
        print(f"  {scale:<{width}}  {about}")
    return 0
