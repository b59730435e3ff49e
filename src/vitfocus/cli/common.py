"""Shared by several commands: options, labels of models, opening a model by name, and the report of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitfocus.core.arguments import OnlyWith, parse_digits
from vitfocus.core.errors import VitfocusError, printable
from vitfocus.core.tables import unique_label

if TYPE_CHECKING:
    from torch import nn

#: Folders that hold a run's weights; the run itself is the folder above.
_WEIGHTS = frozenset({"model", "best"})

WITH_EXPLORER = OnlyWith(lambda args: args.explore, "is for the attention explorer: add --explore")


def positive(text: str) -> int:
    """Parse a positive integer, as the `type` of an option."""
    number = parse_digits(text.strip())
    if not number:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")
    return number


def whole(text: str) -> int:
    """Parse an integer, as the `type` of an option."""
    number = parse_digits(text.strip().removeprefix("-"))
    if number is None:
        raise argparse.ArgumentTypeError(f"expected a whole number, not {text!r}")
    return -number if text.strip()[0] == "-" else number


def positive_float(text: str) -> float:
    """Parse a positive number, as the `type` of an option."""
    try:
        number = float("nan" if "_" in text or not text.isascii() else text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {text!r}")
    return number


def add_device(parser: argparse.ArgumentParser) -> None:
    """Declare --device."""
    parser.add_argument("--device", help="device such as cpu or cuda (default: a GPU if there is one)")


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Declare --weights and --pretrained."""
    parser.add_argument(
        "--weights",
        metavar="FILE",
        action="append",
        help="checkpoint (safetensors, or a state_dict); give it once, or once per model ('none' for no weights)",
    )
    parser.add_argument(
        "--pretrained",
        action="store_true",
        help="load the pretrained weights of the model's library, which may download them",
    )


def add_budget(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare --budget, the size of the explorer's maps."""
    add_option(
        parser,
        WITH_EXPLORER,
        "--budget",
        type=positive_float,
        default=64.0,
        metavar="MB",
        help="with --explore: maximum size of all maps, in the page and in the folder beside it (default: 64)",
    )


def add_option(parser: argparse._ActionsContainer, condition: OnlyWith, flag: str, **options: Any) -> None:
    """Declare an option that has an effect only under a condition on the parsed arguments."""
    parser.add_argument(flag, **options).condition = condition  # type: ignore[attr-defined]


def refuse_unused(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse the first option that was given but has no effect."""
    for action in parser._actions:
        condition = getattr(action, "condition", None)
        if condition is None or getattr(args, action.dest) in (action.default, None, []):
            continue
        name = action.option_strings[-1] if action.option_strings else str(action.metavar)
        if why := condition.refusal(name, args):
            raise VitfocusError(why)


def refuse_empty(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse empty text, which an unset shell variable may cause; only a title may be empty."""
    for action in parser._actions:
        given = getattr(args, action.dest, None)
        if given == action.default or action.dest == "title":
            continue
        if "" in (given if isinstance(given, list) else [given]):
            name = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
            raise VitfocusError(f"{name} is empty: give it a value, or leave it out.")


def open_named_model(
    name: str, weights: str | None = None, treat: str | None = None, *, pretrained: bool = False, quiet: bool = False
) -> nn.Module:
    """Open a model by name or folder, in eval mode; unless `quiet`, print a note if its weights are random.

    `pretrained` has no effect on a folder, which contains its weights.
    """
    from vitfocus.treatments.save_load import is_pushed, open_model

    if pretrained and weights is not None:
        raise VitfocusError("--weights names a file and --pretrained the library's own weights: give one of them.")
    saved = Path(name).is_dir() or is_pushed(name)
    fetched = {"pretrained": True} if pretrained and not saved else {}
    model = open_model(name, weights=weights, treat=treat, **fetched)
    if weights is None and not (pretrained or quiet or saved):
        say(f"{name} has random weights: give --weights FILE or --pretrained for trained ones.")
    return model


def label_models(args: argparse.Namespace, treat: str | None = None) -> dict[str, tuple[str, str | None]]:
    """The models of a command line as (name, file of weights), by label.

    --weights is given once, or once per model, with 'none' for a model without weights.

    >>> args = argparse.Namespace(model=["a", "b", "b"], weights=["none", "w", "v"], pretrained=False)
    >>> label_models(args)
    {'a': ('a', None), 'b': ('b', 'w'), 'b #2': ('b', 'v')}
    """
    files = [None if file == "none" else file for file in args.weights or ["none"]]
    if len(files) not in (1, len(args.model)):
        raise VitfocusError(
            f"--weights is given {len(files)} times for {len(args.model)} models; give it once, or once per model."
        )
    if args.pretrained and all(Path(name).is_dir() for name in args.model):
        raise VitfocusError("The folder of a saved model contains its weights: leave --pretrained out.")
    labelled: dict[str, tuple[str, str | None]] = {}
    for name, file in zip(args.model, files * len(args.model) if len(files) == 1 else files, strict=True):
        label = model_label(name) + (f"+{treat}" if treat else "")
        labelled[unique_label(label, labelled)] = (name, file)
    return labelled


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


def finish_run(folder: str | Path, models: Mapping[str, nn.Module] | None = None, gallery: bool | None = None) -> None:
    """Write the cards of the given models and the run's report, and print the report's path.

    A report that fails does not fail the run, which may have taken days: the error is printed instead.
    """
    from vitfocus.report import report
    from vitfocus.report.model_card import write_cards

    try:
        if models:
            write_cards(folder, models)
        say(f"Report: {report(folder, gallery=gallery).path}")
    except Exception as error:
        say(f"The report could not be written: {error}")


def say(text: str) -> None:
    """Print a line on stderr; stdout is for results."""
    print(printable(text), file=sys.stderr, flush=True)
