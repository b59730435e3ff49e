"""`vitfocus models`: list the model families and the treatments that each accepts, found by applying them.

With `--all`, every attention model of timm, torchvision and transformers is tried. Each is built on the meta device,
which takes no memory, and dissected and treated there. A model that is small enough is then built in memory, and
`diagnose` must return finite numbers from maps of the expected shape; for larger models only the shapes are compared. A
model that its library cannot build with default arguments counts as not dissected, unless its code has no attention.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitfocus.cli.common import open_named_model
from vitfocus.core.errors import VitfocusError, reason
from vitfocus.core.progress import Progress
from vitfocus.core.tables import Table

if TYPE_CHECKING:
    from torch import nn

    from vitfocus.anatomy import Block
    from vitfocus.kernels.attention import Observation

_LIBRARIES = ("timm", "torchvision", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "pattern",
        nargs="?",
        help="only families whose library, name or model names contain this text or match this pattern (swin*); or a "
        "model, such as the folder of a saved one",
    )
    parser.add_argument("--names", action="store_true", help="list the model names of these families")
    parser.add_argument(
        "--all",
        action="store_true",
        help="try every attention model of timm, torchvision and transformers (slow), and print whose blocks are "
        "found, by record or by structure, and whose attention can be read; the pattern is then a library",
    )


def _matches(pattern: str, text: str) -> bool:
    """Whether a text contains the pattern, or matches it if it has wildcards."""
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


#: The treatments that are tried: those of the papers.
TRIED = ("cb", "cbs", "tap", "adl")

#: Models with more parameters are not built in memory.
MOST_PARAMETERS = 100_000_000

#: Class names of attention modules; the gates of convolutional networks have similar names but do not attend.
_ATTENTION = re.compile(r"[Aa]ttention|Attn|[MS]HSA|SHMA|MLA\b")
_GATES = ("SplitAttn", "SelectiveKernelAttn", "BatNonLocalAttn", "BilinearAttnTransform", "SpatialAttention")


class Named(NamedTuple):
    """A model that can be built by its name; `code` is the module that defines it."""

    library: str
    family: str
    name: str
    build: Callable[[], nn.Module]
    code: str


def every_model(library: str = "") -> Iterator[Named]:
    """All models of timm and torchvision, and transformers' model types that take images or videos.

    A type of transformers is built from its default configuration, with two layers per stack and images of at most
    448 pixels where that works.
    """
    if library in ("", "timm"):
        import timm
        from timm.models import _registry

        for name in sorted(timm.list_models(), key=lambda one: (_registry._model_to_module[one], one)):
            code = _registry._model_entrypoints[name].__module__
            if code.startswith("timm."):  # not our own models
                yield Named("timm", _registry._model_to_module[name], name, partial(timm.create_model, name), code)
    if library in ("", "torchvision"):
        from torchvision import models

        for name in models.list_models():
            build = models.get_model_builder(name)
            if any(word in name for word in ("vit", "swin")):
                yield Named("torchvision", name.partition("_")[0], name, build, build.__module__)
    if library in ("", "transformers"):
        from vitfocus.anatomy.transformers import vision_types

        for kind, cls in vision_types().items():
            yield Named("transformers", kind, kind, partial(_build_type, cls), cls.__module__)


def _build_type(cls: Any) -> nn.Module:
    """A model of transformers with two layers per stack, or with all if those have no attention."""
    from vitfocus.anatomy.transformers import build_small

    model = build_small(cls)
    return model if has_attention(model) else cls(cls.config_class())


def has_attention(model: nn.Module) -> bool:
    """Whether a model contains an attention module, by class name."""
    return any(_ATTENTION.search(name) for m in model.modules() if (name := type(m).__name__) not in _GATES)


def row_of(named: Named, specs: Sequence[str] = TRIED, most: int = MOST_PARAMETERS) -> dict[str, Any] | None:
    """A model's row of the table; None if it has no attention."""
    import torch

    from vitfocus.treatments.surgery import support_of

    row: dict[str, Any] = {"library": named.library, "family": named.family, "name": named.name, "found_by": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                model = named.build().eval()
        except Exception as error:  # no default, or another library is missing
            file = Path(inspect.getfile(sys.modules[named.code]))
            if not _ATTENTION.search(file.read_text(encoding="utf-8")):
                return None
            return row | {"reading": False, "reasons": {"anatomy": f"It is not built by default: {reason(error)}."}}
        if not has_attention(model):
            return None
        try:
            row |= support_of(model, specs)
        except VitfocusError as error:
            return row | {"reading": False, "reasons": {"anatomy": str(error)}}
        if row["reading"]:
            row |= _read(named, model, most)
            if not row["reading"]:
                row["reasons"]["reading"] = row.pop("problem")
    return row


def _read(named: Named, model: nn.Module, most: int) -> dict[str, Any]:
    """Whether and how the attention of a model can be read, and the problem if not."""
    from vitfocus.anatomy import anatomy

    read: dict[str, Any] = {"read_as": "shapes"}
    try:
        real = _in_memory(named, model, anatomy(model).root, most)
        read = {"read_as": "numbers"} if real is not None else read
        wrong = _wrong_shapes(real or model) or (_wrong_numbers(real) if real is not None else "")
    except Exception as error:  # other people's models raise anything
        wrong = f"{type(error).__name__}: {reason(error)}"
    return read | {"reading": not wrong} | ({"problem": wrong} if wrong else {})


def _in_memory(named: Named, model: nn.Module, root: nn.Module, most: int) -> nn.Module | None:
    """The model in memory, or only the tower that is read; None if both are too large."""
    import torch

    config: Any = getattr(root, "config", None)
    whole, part = (sum(p.numel() for p in module.parameters()) for module in (model, root))
    torch.manual_seed(0)
    if whole <= most:
        return named.build().eval()
    return type(root)(config).eval() if part <= 5 * most and config is not None else None


def _wrong_shapes(model: nn.Module) -> str:
    """A message about the first map whose shape differs from the anatomy's; empty if there is none."""
    import torch

    from vitfocus.anatomy import anatomy
    from vitfocus.anatomy.inputs import example_inputs
    from vitfocus.attention.capture import can_be_read, observing
    from vitfocus.core.modules import eval_mode

    body = anatomy(model)
    wrong, size = [], body.build_size

    def compare(block: Block, seen: Observation) -> None:
        for side, grid, count in zip(("queries", "keys"), block.attention_grids(size), seen.shape[-2:], strict=True):
            expected = math.prod(grid) and math.prod(grid) + block.prefix_tokens
            if block.attention_kind == "cross" or (block.attention_kind == "class" and side == "queries"):
                continue
            if expected and count != expected and body.text is None:  # text lies before the patches
                wrong.append(f"{block.name} has {count} {side}, and {expected} were expected.")

    def run(inputs: dict[str, Any]) -> None:
        nonlocal size
        images = [one for one in inputs.values() if isinstance(one, torch.Tensor) and one.ndim > 3]
        if images:
            size = (images[0].shape[-2], images[0].shape[-1])
        with eval_mode(body.root), torch.no_grad(), observing([one for one in body if can_be_read(one)], compare):
            body.root(**inputs)

    _first_that_runs(run, example_inputs(body.root))
    return wrong[0] if wrong else ""


def _wrong_numbers(model: nn.Module) -> str:
    """A message about the first reading that is missing or not finite; empty if there is none."""
    import torch

    from vitfocus.anatomy import anatomy
    from vitfocus.anatomy.inputs import example_inputs
    from vitfocus.attention.capture import can_be_read
    from vitfocus.attention.diagnosis import diagnose

    body = anatomy(model)
    images = torch.rand(1, len(body.mean), *body.build_size)
    alone = [next(iter(one.values())) if len(one) == 1 else one for one in example_inputs(body.root)]
    ways = [partial(diagnose, model, images), *(partial(diagnose, body.root, one) for one in alone)]
    rows = _first_that_runs(lambda way: way().rows, ways)
    unread = [row["name"] for row, block in zip(rows, body, strict=True) if can_be_read(block) and "entropy" not in row]
    if unread:
        return f"No numbers were read of {unread[0]}."
    strange = [
        name for row in rows for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)
    ]
    return f"{strange[0]} is not a finite number." if strange else ""


def _first_that_runs(function: Callable[[Any], Any], choices: Iterable[Any]) -> Any:
    """The result for the first choice that does not raise; if all do, the first exception is raised."""
    error: Exception | None = None
    for one in choices:
        try:
            return function(one)
        except Exception as problem:
            error = error or problem
    raise error or VitfocusError("No example input is known for this model.")


def fractions(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each library: the number of attention models, and the shares that are dissected and can be read.

    A model is dissected if its blocks were found and those that compute softmax attention were read.
    """
    shares: dict[str, dict[str, float]] = {}
    for library in dict.fromkeys(row["library"] for row in rows):
        listed = [row for row in rows if row["library"] == library]
        dissected = [row for row in listed if row["found_by"] and (row["reading"] or "read_as" not in row)]
        shares[library] = {
            "models": len(listed),
            "dissected": round(len(dissected) / len(listed), 4),
            "read": round(sum(row["reading"] for row in listed) / len(listed), 4),
        }
    return shares
