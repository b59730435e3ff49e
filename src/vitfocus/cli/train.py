"""`vitfocus train`: carry a recipe out, or go on with a run that was stopped."""

from __future__ import annotations

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("recipe", nargs="?", help="a shipped recipe's name, or a .toml file; none: list those shipped")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values to change: epochs=10 data.root=/data")
    parser.add_argument("--out", metavar="RUN", help="the run's folder (default: runs/RECIPE)")
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="go on from the newest sound checkpoint, or from this one"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Train, and say how it went. Stopped by Ctrl-C: 130; by SIGTERM, which schedulers send: 0."""
    from vitfocus.train.recipe import load_recipe, shipped_recipes

    if args.recipe is None and (args.out or args.resume):
        from vitfocus.core.errors import VitfocusError

        run = args.out or "RUN"
        raise VitfocusError(f"Which recipe? A run goes on by its own: vitfocus train {run}/config.toml --out {run} ...")
    if args.recipe is None:
        recipes = shipped_recipes()
        width = max(map(len, recipes))
        print(json.dumps(recipes) if args.json else "\n".join(f"{n:<{width}}  {about}" for n, about in recipes.items()))
        return 0
    recipe = load_recipe(args.recipe, args.overrides)

    from vitfocus.train.run import is_main_process, train

    results = train(recipe, out=args.out, resume=args.resume)
    if not is_main_process():
        return 0
    if results["finished"]:
        from vitfocus.cli.closing import close_run

        close_run(args.out or f"runs/{recipe.name}")
    if args.json:
        print(json.dumps(results, indent=1))
    elif results["finished"]:
        from vitfocus.core.tables import counted

        model = f"{args.out or f'runs/{recipe.name}'}/model"
        print(
            f"{recipe.name}: {results['headline']} after {counted(results['epochs'], 'epoch', '.4g')} "
            f"({results['seconds']:.0f} s, {results['images_per_second']:.0f} images/s). The model: {model}"
        )
    sys.stdout.flush()
    return 130 if results.get("signal") == 2 else 0
