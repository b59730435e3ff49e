"""`vitfocus models`: list the model families and the treatments that each accepts, found by applying them.

With `--all`, every attention model of timm, torchvision and transformers is tried, also those without a record.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from vitfocus.cli.common import open_named_model
from vitfocus.core.errors import VitfocusError
from vitfocus.core.progress import Progress
from vitfocus.core.tables import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "pattern",
        nargs="?",
        help="only families whose library, name or model names contain this (or match it: swin*); or a model as for "
        "the other commands, such as the folder of a saved one",
    )
    parser.add_argument("--names", action="store_true", help="list the model names of these families")
    parser.add_argument(
        "--all",
        action="store_true",
        help="try every attention model of timm, torchvision and transformers by its name, and print which are "
        "dissected, by record or by structure, and of which attention was read (takes half an hour); the pattern is a "
        "library",
    )


def _matches(pattern: str, text: str) -> bool:
    """Whether a text contains the pattern or, if the pattern has wildcards, matches it as a whole."""
    return fnmatchcase(text, pattern) if set(pattern) & set("*?[") else pattern in text


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    args.pattern = args.pattern or ""
    if args.all:
        return _run_all(args)
    from vitfocus.anatomy import anatomy, families, model_names
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
    tried, marks = columns(), {True: "+", False: "-", None: "."}
    cells = [
        [
            f"{row['library']} {row['family']}",
            ", ".join(row["attention"]),
            *(marks[row["treatments"][spec]] for spec in tried.values()),
        ]
        for row in rows
    ]
    print(Table("", ["family", "attention", *tried], cells))
    print("+ supported   - not supported   . library not installed")
    print("   ".join(f"{heading}: {spec}" for heading, spec in tried.items() if heading != spec))
    for row in rows if args.names else ():
        print(f"\n{row['family']}: {', '.join(row['names']) or 'any model of this class'}")
    return 0


def _run_all(args: argparse.Namespace) -> int:
    from vitfocus.core.environment import versions
    from vitfocus.treatments.coverage import every_model, fractions, row_of

    listed = list(every_model(args.pattern)) if args.pattern in ("", *_LIBRARIES) else []
    if not listed:
        raise VitfocusError(f"--all takes {', '.join(_LIBRARIES)} or nothing, not {args.pattern!r}.")
    rows = []
    with Progress("Dissecting", len(listed)) as progress, contextlib.redirect_stdout(sys.stderr):
        for named in listed:  # libraries print what they build
            if (row := row_of(named)) is not None:
                rows.append(row)
            progress.advance()
    shares = fractions(rows)
    if args.json:
        print(json.dumps({"versions": versions("transformers"), "fractions": shares, "models": rows}, indent=1))
        return 0
    lines = [[one["name"], one["library"], one["found_by"] or "-", "yes" if one["reading"] else "-"] for one in rows]
    print(Table("Attention models", ["name", "library", "found by", "read"], lines))
    for library, share in shares.items():
        print(f"{library}: {share['models']} models, {share['dissected']:.1%} dissected, {share['read']:.1%} read")
    return 0


_LIBRARIES = ("timm", "torchvision", "transformers")
