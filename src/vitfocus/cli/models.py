"""`vitfocus models`: list the model families and the treatments that each accepts, found by applying them."""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from vitfocus.core.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        help="only families whose library, name or model names contain this (or match it: swin*); or a model as for "
        "the other commands, such as the folder of a saved one",
    )
    parser.add_argument("--names", action="store_true", help="list the model names of these families")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _matches(pattern: str, text: str) -> bool:
    """Whether a text contains the pattern or, if the pattern has wildcards, matches it as a whole."""
    return fnmatchcase(text, pattern) if set(pattern) & set("*?[") else pattern in text


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    from vitfocus.anatomy import families, model_names
    from vitfocus.core.errors import VitfocusError
    from vitfocus.treatments.surgery import columns, support

    library, _, pattern = args.pattern.lower().partition("+")[0].rpartition(":")  # as in torchvision:vit_b_16+cb
    named = [(family, model_names(family)) for family in families()]
    chosen = [
        (family, names)
        for family, names in named
        if any(_matches(pattern, text) for text in (f"{family.library} {family.name}".lower(), family.name, *names))
        and library in ("", family.library)
    ]
    holds_a_model = any(Path(args.pattern, inner, "config.json").is_file() for inner in ("", "model"))
    # Path("") is the current folder, and a folder may have the name of a family.
    if args.pattern and Path(args.pattern).is_dir() and (holds_a_model or not chosen):
        from vitfocus.anatomy import anatomy
        from vitfocus.cli.common import open_named_model

        body = anatomy(open_named_model(args.pattern))
        kind = (type(body.root).__module__.partition(".")[0], body.family)
        chosen = [(family, names) for family, names in named if (family.library, family.name) == kind]
    if not chosen:
        raise VitfocusError(f"No family or model matches {args.pattern!r}; `vitfocus models` lists the families.")
    rows = []
    with Progress("Trying treatments", len(chosen)) as progress:
        for family, _ in chosen:
            rows.append(support(family))
            progress.advance()
    if args.names:
        for row, (_, names) in zip(rows, chosen, strict=True):
            row["names"] = names
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0

    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(box=None, header_style="bold", pad_edge=False)
    tried = columns()
    for heading in ("library", "family", "attention", *tried):
        table.add_column(heading, justify="center" if heading in tried else "left", no_wrap=True)
    for row in rows:
        marks = [{True: "+", False: "-", None: "."}[row["treatments"][spec]] for spec in tried.values()]
        table.add_row(row["library"], row["family"], ", ".join(row["attention"]), *marks)
    console.print(table)
    console.print("\n+ supported   - not supported   . library not installed")
    short = [f"{heading}: {spec}" for heading, spec in tried.items() if heading != spec]
    console.print("   ".join(short), highlight=False)
    for row in rows if args.names else ():
        console.print(f"\n[bold]{row['family']}[/]: {', '.join(row['names']) or 'any model of this class'}")
    return 0
