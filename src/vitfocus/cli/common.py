"""What several commands share: opening a named model, checking numbers, and finishing a run with its report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vitfocus.core.arguments import OnlyWith
from vitfocus.core.errors import VitfocusError

if TYPE_CHECKING:
    from torch import nn

#: Folders that hold a run's weights; the run itself is the folder above.
_WEIGHTS = frozenset({"model", "best"})


def add_pretrained(parser: argparse.ArgumentParser) -> None:
    """Declare --pretrained."""
    parser.add_argument(
        "--pretrained",
        action="store_true",
        help="load the pretrained weights of the model's library, which may download them",
    )


def add_budget(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare --budget, the size of the explorer's maps."""
    budget = parser.add_argument(
        "--budget",
        type=float,
        default=64.0,
        metavar="MB",
        help="with --explore: the most megabytes of maps, in the page and in the folder beside it (default: 64)",
    )
    only_with(budget, OnlyWith(lambda args: args.explore, "is for the attention explorer: add --explore"))


def only_with(action: argparse.Action, condition: OnlyWith) -> None:
    """Declare that an option has an effect only under a condition on the parsed arguments."""
    action.condition = condition  # type: ignore[attr-defined]


def refuse_unused(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse the first option that was given where it has no effect."""
    for action in parser._actions:
        condition = getattr(action, "condition", None)
        if condition is None or getattr(args, action.dest) in (action.default, None, []):
            continue
        name = action.option_strings[-1] if action.option_strings else str(action.metavar)
        if why := condition.refusal(name, args):
            raise VitfocusError(why)


def refuse_empty(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse empty text, such as that of an unset shell variable: it must not count as absent. A title may be empty."""
    for action in parser._actions:
        given = getattr(args, action.dest, None)
        if given == action.default or action.dest == "title":
            continue
        if "" in (given if isinstance(given, list) else [given]):
            name = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
            raise VitfocusError(f"{name} is empty: give it a value, or leave it out.")


def require_positive(args: argparse.Namespace, *names: str) -> None:
    """Refuse values below 1 in options that count something; None means that an option was not given."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise VitfocusError(f"--{name.replace('_', '-')} must be at least 1, but is {value}.")


def open_named_model(
    name: str, weights: str | None = None, treat: str | None = None, *, pretrained: bool = False, quiet: bool = False
) -> nn.Module:
    """Open a model by name or folder, in eval mode; unless `quiet`, say so when its weights are random."""
    from vitfocus.treatments.save_load import is_pushed, open_model

    if pretrained and weights is not None:
        raise VitfocusError("--weights names a file and --pretrained the library's own weights: give one of them.")
    saved = Path(name).is_dir() or is_pushed(name)
    if pretrained and saved:
        raise VitfocusError(f"{name} is a folder that contains its weights: leave --pretrained out.")
    model = open_model(name, weights=weights, treat=treat, **({"pretrained": True} if pretrained else {}))
    if weights is None and not (pretrained or quiet or saved):
        print(
            f"Neither --weights nor --pretrained is given: {name} has random weights and is untrained.", file=sys.stderr
        )
    return model


def weights_per_model(models: list[str], weights: list[str] | None) -> list[str | None]:
    """The file of each model, from --weights given once, or once per model, with 'none' for a model without.

    >>> weights_per_model(["a", "b"], ["w"]), weights_per_model(["a", "b"], ["none", "w"])
    (['w', 'w'], [None, 'w'])
    """
    files = [None if file == "none" else file for file in weights or ["none"]]
    if len(files) not in (1, len(models)):
        raise VitfocusError(
            f"--weights is given {len(files)} times for {len(models)} models; give it once, or once per model."
        )
    return files * len(models) if len(files) == 1 else files


def model_label(name: str) -> str:
    """The label of a model in tables, from its spec or folder: "a" for runs/a/model.

    >>> model_label("deit_tiny_patch16_224+cb"), model_label("runs/a/model"), model_label("runs/a/best")
    ('deit_tiny_patch16_224+cb', 'a', 'a (best)')
    """
    path = Path(name)
    if path.name not in _WEIGHTS or not path.resolve().parent.name:
        return path.name
    run = path.resolve().parent.name
    return run if path.name == "model" else f"{run} ({path.name})"


def finish_run(
    folder: str | Path, models: Mapping[str, nn.Module] | None = None, gallery: bool | None = None
) -> Path | None:
    """Write the cards of the given models and the run's report, and print the report's path.

    A report that fails does not fail the run, which may have taken days: the error is printed instead.
    """
    from vitfocus.report import report
    from vitfocus.report.model_card import write_cards

    try:
        if models:
            write_cards(folder, models)
        written = report(folder, gallery=gallery)
    except Exception as error:
        print(f"The report could not be written: {error}", file=sys.stderr)
        return None
    print(f"Report: {written.path}", file=sys.stderr)
    return written.path
