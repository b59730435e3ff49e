"""The command line: one file a command, loaded only when it is asked for.

Exit codes: 0 done, 1 an unexpected failure (with its traceback), 2 bad input (one sentence on stderr), 130 interrupted.
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
from types import ModuleType
from typing import NoReturn

from vitfocus import __version__
from vitfocus.core.errors import VitfocusError, VitfocusWarning, nearest

#: The commands by what one wants: to look, to mend, to prove, and the rest.
GROUPS = {
    "Look": {
        "diagnose": "show what a model's attention does, layer by layer",
        "report": "one page to look at: runs compared, figures, the attention explorer",
    },
    "Mend": {
        "models": "list the families and which treatment each can take",
        "train": "train or fine-tune a model by a recipe",
    },
    "Prove": {
        "evaluate": "measure accuracy and robustness on a standard suite, or compare two runs",
        "reproduce": "run a table or figure of the papers, their numbers beside ours",
        "bench": "measure what each treatment costs in time and memory",
    },
    "Begin": {
        "demo": "train, diagnose and evaluate a plain and a treated model on embedded data",
        "completion": "print the completion script of bash, zsh or fish",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}

_HELP = """vitfocus shows where a vision transformer looks, mends it, and proves the difference.

usage: vitfocus COMMAND [options]

{commands}

`vitfocus COMMAND --help` explains a command; every command takes --json. `vitfocus demo` is a good first one.
Exit codes: 0 done, 1 unexpected failure, 2 bad input, 130 interrupted.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one sentence, with the nearest option, instead of its usage."""

    def error(self, message: str) -> NoReturn:
        """Refuse the words given."""
        what, _, words = message.partition("unrecognized arguments: ")
        unknown = words.split(" ")[0].partition("=")[0]
        if not what and unknown.startswith("-"):
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            raise VitfocusError(f"{self.prog} has no option {unknown}: {nearest(unknown, flags, prefix='--')}")
        raise VitfocusError(f"{message}; `{self.prog} --help` explains.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names hold any bytes, and terminals not every character
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
    except KeyboardInterrupt:
        print("vitfocus: interrupted", file=sys.stderr)
        return 130


def build_parser(command: str) -> tuple[argparse.ArgumentParser, ModuleType]:
    """A command's parser, and the module that carries it out."""
    module = importlib.import_module(f"vitfocus.cli.{command}")
    parser = Parser(prog=f"vitfocus {command}", description=_sentence(COMMANDS[command]))
    module.add_arguments(parser)
    return parser, module


def _run(words: list[str]) -> int:
    asked = [word for word in words if word != "--json"]
    if not asked or asked[0] in ("-h", "--help", "help", "--version"):
        facts = {"version": __version__} if asked[:1] == ["--version"] else {"commands": COMMANDS}
        if "--json" in words:
            print(json.dumps(facts, indent=2))
        else:
            print(f"vitfocus {__version__}" if "version" in facts else _help(), end="\n" if "version" in facts else "")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        return _refuse(f"there is no command {command!r}: {nearest(command, COMMANDS)}")
    parser, module = build_parser(command)
    return int(module.run(parser.parse_intermixed_args(rest)) or 0)


def _help() -> str:
    parts = [
        f"{group}\n" + "\n".join(f"  {name:<12}{text}" for name, text in commands.items())
        for group, commands in GROUPS.items()
    ]
    return _HELP.format(commands="\n\n".join(parts))


def _refuse(reason: str) -> int:
    print(f"vitfocus: {reason}", file=sys.stderr)
    return 2


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
