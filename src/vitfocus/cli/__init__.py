"""The command line: one file per command, imported only when the command is used.

Exit codes: 0 success, 1 unexpected failure (with a traceback), 2 invalid input (one sentence on stderr), 130
interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from vitfocus.cli.common import refuse_empty, refuse_unused
from vitfocus.core import __version__
from vitfocus.core.errors import VitfocusError, VitfocusWarning, nearest, reason
from vitfocus.core.files import writable_path
from vitfocus.core.tables import listing

#: The commands, grouped by purpose.
GROUPS = {
    "Look": {
        "diagnose": "measure what each attention layer of a model does",
        "serve": "open a local page that shows where a model looks in your pictures, as you change them",
        "report": "write one HTML page that compares runs, with figures and the attention explorer",
    },
    "Treat": {
        "models": "list the supported model families and the treatments each one accepts",
        "train": "train or fine-tune a model from a recipe",
    },
    "Evaluate": {
        "evaluate": "measure accuracy and robustness on a standard suite, or compare two runs",
        "reproduce": "run a table or figure of the papers and print the papers' numbers beside ours",
        "bench": "measure the time and memory that each treatment costs",
    },
    "Get started": {
        "demo": "train, diagnose and evaluate three tiny models on built-in data, one at too high a rate",
        "completion": "print a shell completion script for bash, zsh, fish or tcsh",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}

_HELP = """vitfocus shows where a vision transformer looks, fixes it, and proves the difference.

usage: vitfocus COMMAND [options]
       vitfocus --version    print the version

{commands}

Run `vitfocus COMMAND --help` for the options of a command. Every command accepts --json. To start: `vitfocus demo`.
Exit codes: 0 success, 1 unexpected failure, 2 invalid input, 130 interrupted."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence with the nearest option, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise a VitfocusError instead of printing the usage and exiting."""
        what, _, words = message.partition("unrecognized arguments: ")
        unknown = words.split(" ")[0].partition("=")[0]
        if not what and unknown.startswith("-"):
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            raise VitfocusError(f"{self.prog} has no option {unknown}: {nearest(unknown, flags, prefix='--')}")
        raise VitfocusError(f"{message}; see `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # not every terminal can print every file name
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", VitfocusWarning)
            shown = warnings.showwarning
            warnings.showwarning = lambda message, category, *where: (
                print(f"vitfocus: {message}", file=sys.stderr)
                if issubclass(category, VitfocusWarning)
                else shown(message, category, *where)
            )
            return _run(words)
    except VitfocusError as error:
        return _refuse(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        where = f": {error.filename}" if error.filename else ""
        return _refuse(f"{error.strerror or error}{where}")
    except (MemoryError, RuntimeError) as error:  # RuntimeError: torch's allocators
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        return _refuse(f"There is not enough memory for this: {reason(error)}.")
    except KeyboardInterrupt:
        print("vitfocus: interrupted", file=sys.stderr)
        return 130


def build_parser(command: str) -> tuple[argparse.ArgumentParser, ModuleType]:
    """The parser of a command, and the module that runs it."""
    about = COMMANDS[command]
    parser = Parser(prog=f"vitfocus {command}", description=f"{about[0].upper()}{about[1:]}.")
    return parser, add_command(command, parser)


def add_command(command: str, parser: argparse.ArgumentParser) -> ModuleType:
    """Declare the arguments of a command; returns its module."""
    module = importlib.import_module(f"vitfocus.cli.{command}")
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return module


def _run(words: list[str]) -> int:
    asked = [word for word in words if word != "--json"]
    if not asked or asked[0] in ("-h", "--help", "help", "--version"):
        version = asked[:1] == ["--version"]
        if "--json" in words:
            print(json.dumps({"version": __version__} if version else {"commands": COMMANDS}, indent=2))
        else:
            print(f"vitfocus {__version__}" if version else _help())
        return 0
    command, *rest = words
    if command not in COMMANDS:
        return _refuse(f"There is no command {command!r}: {nearest(command, COMMANDS)}")
    parser, module = build_parser(command)
    args = parser.parse_intermixed_args(rest)
    refuse_unused(parser, args)
    refuse_empty(parser, args)
    if out := getattr(args, "out", None):  # before any slow work; a report is a file, or goes into a folder
        writable_path(out, folder=command != "report" or Path(out).is_dir())
    return int(module.run(args) or 0)


def _help() -> str:
    lines = listing(COMMANDS, indent="  ").splitlines()
    for group, commands in GROUPS.items():
        first = next(iter(commands))
        at = next(index for index, line in enumerate(lines) if line.startswith(f"  {first} "))
        lines[at:at] = [*([""] if at else []), group]
    return _HELP.format(commands="\n".join(lines))


def _refuse(reason: str) -> int:
    print(f"vitfocus: {VitfocusError(reason)}", file=sys.stderr)
    return 2
