"""`vitfocus models`: the families and which treatment each can take, found out by trying."""

from __future__ import annotations

import argparse
import json
import sys

_HEADINGS = ("cb", "cbs", "gate", "msa", "tap", "adl", "se", "uniform", "extra")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        help="only families whose library or name contains this, or one of whose models is called so",
    )
    parser.add_argument("--names", action="store_true", help="list the models of these families by name")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from vitfocus.anatomy import families
    from vitfocus.errors import VitfocusError
    from vitfocus.treatments.support import TRIED, model_names, support

    pattern = args.pattern.lower()
    named = [(family, model_names(family.library, family.name)) for family in families()]
    chosen = [
        (family, names)
        for family, names in named
        if pattern in f"{family.library} {family.name}".lower() or any(pattern in name for name in names)
    ]
    if not chosen:
        raise VitfocusError(f"no family or model matches {args.pattern!r}; `vitfocus models` lists the families.")
    progress = Console(stderr=True)
    rows = [
        support(family)
        for family, _ in track(
            chosen, "trying treatments", console=progress, transient=True, disable=not progress.is_terminal
        )
    ]
    if args.names:
        for row, (_, names) in zip(rows, chosen, strict=True):
            row["names"] = names
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0

    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("library", "family", "attention", *_HEADINGS):
        table.add_column(heading, justify="center" if heading in _HEADINGS else "left", no_wrap=True)
    for row in rows:
        marks = [{True: "+", False: "-", None: "."}[row["treatments"][spec]] for spec in TRIED]
        table.add_row(row["library"], row["family"], ", ".join(row["attention"]), *marks)
    console.print(table)
    console.print("\n+ can be applied   - refused, with a sentence that says why   . library not installed")
    console.print("gate: cb(variant=gate)   msa: cb(site=attention)", highlight=False)
    for row in rows if args.names else ():
        console.print(f"\n[bold]{row['family']}[/]: {', '.join(row['names']) or 'any model of that class'}")
    return 0
