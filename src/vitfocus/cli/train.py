"""`vitfocus train`: train a model from a recipe, or resume a run that was stopped."""

from __future__ import annotations

import argparse
import json
import sys

from vitfocus.cli.common import finish_run
from vitfocus.core.errors import VitfocusError
from vitfocus.core.tables import counted, listing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "recipe", nargs="?", help="name of a built-in recipe, or a .toml file; without it, list the built-in recipes"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="recipe values to change, such as epochs=10 data.root=/data"
    )
    parser.add_argument("--out", metavar="RUN", help="folder of the run (default: runs/RECIPE)")
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="resume from the newest valid checkpoint, or from this one"
    )


def run(args: argparse.Namespace) -> int:
    """Train and print the result; 130 when stopped by Ctrl-C, 0 when stopped by SIGTERM (which schedulers send)."""
    from vitfocus.train.recipe import load_recipe, shipped_recipes

    if args.recipe is None and (args.out or args.resume):
        run = args.out or "RUN"
        raise VitfocusError(
            f"The recipe is missing; to resume a run: vitfocus train {run}/config.toml --out {run} --resume auto."
        )
    if args.recipe is None:
        recipes = shipped_recipes()
        print(json.dumps(recipes) if args.json else listing(recipes))
        return 0
    recipe = load_recipe(args.recipe, args.overrides)

    from vitfocus.core.environment import is_main_process
    from vitfocus.tasks import items_of
    from vitfocus.train.run import train

    results = train(recipe, out=args.out, resume=args.resume)
    if not is_main_process():
        return 0
    out = args.out or f"runs/{recipe.name}"
    if results["finished"]:
        finish_run(out)
    if args.json:
        print(json.dumps(results, indent=1))
    elif results["finished"]:
        speed = f"{results['images_per_second']:.0f} {items_of(recipe.task)}/s"
        print(
            f"{recipe.name}: {results['headline']} after {counted(results['epochs'], 'epoch', '.4g')} "
            f"({results['seconds']:.0f} s, {speed}). Model: {out}/model"
        )
    sys.stdout.flush()
    return 130 if results.get("signal") == 2 else 0
