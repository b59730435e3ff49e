"""`vitfocus completion SHELL`: a completion script for commands, options, recipes, suites, corruptions and treatments.

shtab generates the script from the commands' own parsers; the names come from the registries.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import shtab

SHELLS = ("bash", "zsh", "fish", "tcsh")

#: Arguments with these metavars may be paths.
_PATHS = frozenset({"DIR", "FILE", "RUN", "MODEL", "[NAME=]DIR", "auto|PATH", "TEXT"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "shell",
        choices=SHELLS,
        help="your shell; for bash: vitfocus completion bash > ~/.local/share/bash-completion/completions/vitfocus",
    )


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    parser = build_full_parser(args.shell)
    if not args.json:
        print(shtab.complete(parser, args.shell))
        return 0
    commands = {}
    for name, command in _commands(parser).items():
        options = {flag: _names(action) for action in command._actions for flag in action.option_strings}
        words = [word for action in command._actions if not action.option_strings for word in _names(action)]
        commands[name] = {"words": words, "options": options}
    print(json.dumps({"shell": args.shell, "commands": commands}, indent=2))
    return 0


def build_full_parser(shell: str) -> argparse.ArgumentParser:
    """One parser with every command as a subparser, whose arguments have their valid names as choices."""
    from vitfocus.cli import COMMANDS, add_command

    parser = argparse.ArgumentParser(prog="vitfocus")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--json", action="store_true", help="print JSON")
    subparsers = parser.add_subparsers()
    names = known_names()
    if shell == "tcsh":  # whose rules are delimited by slashes
        names = {kind: [name for name in found if "/" not in name] for kind, found in names.items()}
    for command, about in COMMANDS.items():
        subparser = subparsers.add_parser(command, help=about)
        add_command(command, subparser)
        for action in subparser._actions:
            if action.choices is None and action.dest in names:
                action.choices = names[action.dest]
            if action.dest in ("recipe", "model"):
                action.complete = _names_and_files(action.dest, _names(action))  # type: ignore[attr-defined]
            elif action.choices is None and action.metavar in _PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def known_names() -> dict[str, list[str]]:
    """The valid names of an argument, by the argument's name.

    >>> known_names()["treat"]
    ['adl', 'cb', 'cbs', 'extra', 'gate', 'qknorm', 'registers', 'se', 'sigma', 'tap', 'ttr', 'uniform']
    """
    from vitfocus.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS
    from vitfocus.reproduce.items import SCALES, item_names
    from vitfocus.robustness.suites import SUITES
    from vitfocus.train.recipe import shipped_recipes
    from vitfocus.treatments import keywords

    corruptions = [*CORRUPTIONS, *EXTRA_CORRUPTIONS]
    return {
        "suite": [*SUITES, "list"],
        "recipe": list(shipped_recipes()),
        "item": list(item_names()),
        "against": [f"{name}/{severity}" for name in corruptions for severity in range(1, 6)],
        "corruptions": corruptions,
        "severities": list("12345"),
        "treat": sorted(keywords()),
        "device": ["cpu", "cuda", "mps"],
        "scale": list(SCALES),
    }


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: Any = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    return dict(found)


def _names(action: argparse.Action) -> list[str]:
    return [] if action.choices is None else list(map(str, action.choices))


def _names_and_files(kind: str, names: list[str]) -> dict[str, Any]:
    """How each shell completes an argument that is a name or a path."""
    words = " ".join(names)
    return {
        "bash": f"_vitfocus_{kind}_file",
        "zsh": f"_vitfocus_{kind}",
        "fish": f"{words} {shtab.FILE['fish']}".strip(),
        "tcsh": f"({words})" if words else shtab.FILE["tcsh"],
        "preamble": {
            "bash": f'_vitfocus_{kind}_file() {{ compgen -W "{words}" -- "$1"; compgen -f -- "$1"; }}',
            "zsh": f"_vitfocus_{kind}() {{ _alternative 'names:name:({words})' 'files:file:_files' }}",
        },
    }
