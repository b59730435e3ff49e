"""`vitfocus models`: list the model families and the treatments that each accepts, found by applying them.

With `--all`, every attention model of timm, torchvision and transformers is tried, also those without a record.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitfocus.cli.common import open_named_model
from vitfocus.core.errors import VitfocusError
from vitfocus.core.progress import Progress
from vitfocus.core.tables import Table

if TYPE_CHECKING:
    from torch import nn


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
        "dissected, by record or by structure, and which can be read (takes minutes); the pattern is a library",
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

    listed = list(every_model(args.pattern))
    if not listed:
        raise VitfocusError(f"--all takes timm, torchvision, transformers or nothing, not {args.pattern!r}.")
    rows, tried = [], set[str]()
    with Progress("Dissecting", len(listed)) as progress:
        for library, family, name, build in listed:
            # Treatments depend on the family and are tried on one model of it.
            specs = () if f"{library} {family}" in tried else TRIED
            row = row_of(library, family, name, build, specs)
            if row is not None:
                tried.add(f"{library} {family}")
                rows.append(row)
            progress.advance()
    shares = fractions(rows)
    if args.json:
        print(json.dumps({"versions": versions("transformers"), "fractions": shares, "models": rows}, indent=1))
        return 0
    lines = [[one["name"], one["library"], one["found_by"] or "-", f"{one['confidence']:.2f}"] for one in rows]
    print(Table("Attention models", ["name", "library", "found by", "confidence"], lines))
    for library, share in shares.items():
        print(f"{library}: {share['models']} models, {share['dissected']:.1%} dissected, {share['read']:.1%} read")
    return 0


def every_model(library: str = "") -> Iterator[tuple[str, str, str, Callable[[], nn.Module]]]:
    """Every attention model of the libraries: (library, family, name, a function that builds it without memory).

    timm's are all names whose modules contain attention; those of transformers are the model types that take images or
    videos, of which there is a default configuration, cut to two layers; torchvision's are its attention models. Which
    contain attention is told from the classes of their modules (`has_attention`) after they have been built.
    """
    if library in ("", "timm"):
        import timm
        from timm.models import _registry

        for name in sorted(timm.list_models(), key=lambda one: (_registry._model_to_module[one], one)):
            family = _registry._model_to_module[name]
            spec = importlib.util.find_spec(f"timm.models.{family}")  # None for our own models
            if spec is not None and _ATTENTION.search(Path(spec.origin or "").read_text(encoding="utf-8")):
                yield "timm", family, name, partial(timm.create_model, name)
    if library in ("", "torchvision"):
        from torchvision import models

        for name in models.list_models():
            if any(word in name for word in ("vit", "swin")):
                yield "torchvision", name.partition("_")[0], name, partial(models.get_model, name)
    if library in ("", "transformers"):
        from vitfocus.anatomy.transformers import build_small, vision_types

        for kind, cls in vision_types().items():
            yield "transformers", kind, kind, partial(build_small, cls)


#: The papers' treatments, which `--all` tries.
TRIED = ("cb", "cbs", "tap", "adl")

#: Words in the names of classes that attend; gates of channels and pixels in convolutional networks do not.
_ATTENTION = re.compile(r"[Aa]ttention|Attn|[MS]HSA|SHMA|MLA\b")
_GATES = ("SplitAttn", "SelectiveKernelAttn", "BatNonLocalAttn", "BilinearAttnTransform", "SpatialAttention")


def has_attention(model: nn.Module) -> bool:
    """Whether a model contains a module of attention, by the names of the classes."""
    return any(_ATTENTION.search(name) for m in model.modules() if (name := type(m).__name__) not in _GATES)


def row_of(library: str, family: str, name: str, build: Callable[[], nn.Module], specs: Sequence[str]) -> Any:
    """A model's row of the table; None if it cannot be built from its defaults, or contains no attention."""
    import torch

    from vitfocus.treatments.surgery import support_of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                model = build().eval()
        except Exception:  # no default, or another library is missing
            return None
        if not has_attention(model):
            return None
        row: dict[str, Any] = {"library": library, "family": family, "name": name}
        try:
            return row | support_of(model, specs)
        except VitfocusError as error:
            return row | {"found_by": None, "confidence": 0.0, "reading": False, "reasons": {"anatomy": str(error)}}


def fractions(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each library: how many attention models there are, and the shares that are dissected and can be read."""
    counted: dict[str, dict[str, float]] = {}
    for library in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == library]
        dissected, read = (sum(bool(row[key]) for row in own) / len(own) for key in ("found_by", "reading"))
        counted[library] = {"models": len(own), "dissected": round(dissected, 4), "read": round(read, 4)}
    return counted
