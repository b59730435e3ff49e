"""The command line: one file a command, loaded only when it is asked for.

Exit codes: 0 done, 1 an unexpected failure (with its traceback), 2 bad input (one sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from vitfocus import __version__
from vitfocus.errors import VitfocusError, nearest

COMMANDS = {
    "diagnose": "show what a model's attention does, layer by layer",
    "evaluate": "measure accuracy and robustness on a standard suite",
    "train": "train or fine-tune a model by a recipe",
    "models": "list the families and which treatment each can take",
    "demo": "train, diagnose and evaluate a plain and a treated model on embedded data",
}

_HELP = """vitfocus shows where a vision transformer looks, mends it, and proves the difference.

usage: vitfocus COMMAND [options]

{commands}

`vitfocus COMMAND --help` explains a command. Every command takes --json.
Exit codes: 0 done, 1 unexpected failure, 2 bad input, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        listing = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
        print(_HELP.format(commands=listing), end="")
        return 0
    if words[0] == "--version":
        print(f"vitfocus {__version__}")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        return _refuse(f"there is no command {command!r}: {nearest(command, COMMANDS)}")
    module = importlib.import_module(f"vitfocus.cli.{command}")
    parser = argparse.ArgumentParser(prog=f"vitfocus {command}", description=_sentence(COMMANDS[command]))
    module.add_arguments(parser)
    try:
        return int(module.run(parser.parse_intermixed_args(rest)) or 0)
    except VitfocusError as error:
        return _refuse(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _refuse(f"{error.strerror or error}: {error.filename or 'a file'}")
    except KeyboardInterrupt:
        print("vitfocus: interrupted", file=sys.stderr)
        return 130


def _refuse(reason: str) -> int:
    print(f"vitfocus: {reason}", file=sys.stderr)
    return 2


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
