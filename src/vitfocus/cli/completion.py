"""`vitfocus completion bash|zsh|fish`: a script that completes commands, options, recipes, suites and corruptions.

The script is written out of the commands' own parsers, so it knows every option; it calls nothing while one types.
"""

from __future__ import annotations

import argparse
import ast
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

SHELLS = ("bash", "zsh", "fish")

#: Names that live beside heavy code, repeated here so that a shell starts quickly (a test compares them with it).
CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    *("speckle_noise", "gaussian_blur", "spatter", "saturate"),
)
TREATMENTS = ("cb", "cbs", "tap", "adl", "uniform", "se", "extra")


@dataclass(frozen=True)
class Option:
    """One flag as it is typed, what follows it (nothing, one of `words`, or a path) and what it is."""

    flag: str
    takes_value: bool
    words: tuple[str, ...]
    about: str


@dataclass(frozen=True)
class Command:
    """One command: its options, and the words that can stand without a flag."""

    name: str
    about: str
    options: tuple[Option, ...]
    words: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("shell", choices=SHELLS, help='which shell; for bash: eval "$(vitfocus completion bash)"')
    parser.add_argument("--json", action="store_true", help="print the words as JSON instead of a script")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    commands = known_commands()
    if args.json:
        words = {c.name: {"words": c.words, "options": {o.flag: o.words for o in c.options}} for c in commands}
        print(json.dumps({"shell": args.shell, "commands": words}, indent=2))
    else:
        print(WRITERS[args.shell](commands), end="")
    return 0


def known_commands() -> list[Command]:
    """Every command with its options and words, read from its parser."""
    from vitfocus.cli import COMMANDS, build_parser

    found = []
    for name, about in COMMANDS.items():
        parser, _ = build_parser(name)
        options: list[Option] = []
        words: list[str] = []
        for action in parser._actions:
            values = _values(action)
            for flag in action.option_strings:
                options.append(Option(flag, action.nargs != 0, values, _plain(action.help or "")))
            if not action.option_strings:
                words += values
        found.append(Command(name, about, tuple(options), tuple(words)))
    return found


def recipes(folder: str = "") -> list[str]:
    """The shipped recipes' names, those of a subfolder with it: "cb/table1".

    >>> "shapes" in recipes()
    True
    """
    names = []
    for entry in (resources.files("vitfocus") / "recipes" / folder).iterdir():
        inner = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_dir():
            names += recipes(inner)
        elif inner.endswith(".toml"):
            names.append(inner.removesuffix(".toml"))
    return sorted(names)


def suites() -> list[str]:
    """The suites' names, read from the source of their registry: importing it would cost every shell start seconds.

    >>> "imagenet-c" in suites()
    True
    """
    source = (resources.files("vitfocus") / "robustness" / "suites" / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "SUITES":
            keys = node.value.keys if isinstance(node.value, ast.Dict) else []
            return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    return []


def _values(action: argparse.Action) -> tuple[str, ...]:
    """What can stand for an argument; empty where only the user knows."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    kinds: dict[str, Callable[[], list[str]]] = {
        "suite": lambda: [*suites(), "list"],
        "recipe": lambda: [name for name in recipes() if "/" not in name],
        "item": lambda: [name for name in recipes() if "/" in name],
        "against": lambda: [f"{name}/{severity}" for name in CORRUPTIONS for severity in range(1, 6)],
        "corruptions": lambda: list(CORRUPTIONS),
        "severities": lambda: list("12345"),
        "treat": lambda: list(TREATMENTS),
        "device": lambda: ["cpu", "cuda", "mps"],
        "precision": lambda: ["float32", "bfloat16", "float16"],
        "scale": lambda: ["smoke", "cifar100", "imagenet"],
    }
    return tuple(kinds[action.dest]()) if action.dest in kinds else ()


def _plain(text: str) -> str:
    return text.replace("%%", "%")


def _bash(commands: list[Command]) -> str:
    cases = []
    for command in commands:
        flags = " ".join(option.flag for option in command.options)
        values = [
            f"            {option.flag}) {_bash_words(option.words)}; return;;"
            for option in command.options
            if option.takes_value
        ]
        cases.append(
            f"        {command.name})\n            case $previous in\n"
            + "\n".join("    " + line for line in values)
            + f"\n            esac\n            if [[ $current == -* ]]; then words={shlex.quote(flags)}; "
            + f"else words={shlex.quote(' '.join(command.words))}; fi;;"
        )
    names = " ".join(command.name for command in commands)
    return f"""# bash completion of vitfocus; in ~/.bashrc: eval "$(vitfocus completion bash)"
_vitfocus() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W {shlex.quote(names + " --help --version --json")} -- "$current"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{chr(10).join(cases)}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [[ $current == -* ]] || COMPREPLY+=($(compgen -f -- "$current"))
}}
complete -o filenames -F _vitfocus vitfocus
"""


def _bash_words(words: tuple[str, ...]) -> str:
    kind = f"-W {shlex.quote(' '.join(words))}" if words else "-f"
    return f'COMPREPLY=($(compgen {kind} -- "$current"))'


def _zsh(commands: list[Command]) -> str:
    names = "\n".join(f"        {_zsh_pair(command.name, command.about)}" for command in commands)
    cases = []
    for command in commands:
        lines = [_zsh_option(option) for option in command.options]
        names_too = f'{{_alternative "words:name:({" ".join(command.words)})" "files:file:_files"}}'
        lines.append(f"'*: :{names_too if command.words else '_files'}'")
        body = " \\\n                ".join(lines)
        cases.append(f"        {command.name})\n            _arguments \\\n                {body} ;;")
    return f"""#compdef vitfocus
# zsh completion of vitfocus; in ~/.zshrc, after compinit: eval "$(vitfocus completion zsh)"
_vitfocus() {{
    local -a commands
    commands=(
{names}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{chr(10).join(cases)}
    esac
}}
compdef _vitfocus vitfocus
"""


def _zsh_pair(name: str, about: str) -> str:
    return shlex.quote(f"{name}:{about.replace(':', ' -')}")


def _zsh_option(option: Option) -> str:
    about = "".join(" " if mark in "[]:'\"`$\\" else mark for mark in option.about)
    value = ""
    if option.takes_value:
        value = f":value:({' '.join(option.words)})" if option.words else ":value:_files"
    return f"'*{option.flag}[{about}]{value}'"


def _fish(commands: list[Command]) -> str:
    lines = ["# fish completion of vitfocus; once: vitfocus completion fish > ~/.config/fish/completions/vitfocus.fish"]
    begins = "complete -c vitfocus"
    for command in commands:
        lines.append(f"{begins} -f -n __fish_use_subcommand -a {command.name} -d {_fish_quote(command.about)}")
        inside = f"{begins} -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"{inside} -a {_fish_quote(' '.join(command.words))}")
        for option in command.options:
            flag = f"-l {option.flag[2:]}" if option.flag.startswith("--") else f"-s {option.flag[1:]}"
            value = " -r" if option.takes_value else ""
            if option.words:
                value = f" -x -a {_fish_quote(' '.join(option.words))}"
            lines.append(f"{inside} {flag}{value} -d {_fish_quote(option.about)}")
    return "\n".join(lines) + "\n"


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


WRITERS: dict[str, Callable[[list[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
