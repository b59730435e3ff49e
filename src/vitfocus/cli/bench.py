"""`vitfocus bench`: measure the time and memory that each treatment costs on this machine."""

from __future__ import annotations

import argparse
import copy
import json
import os
from typing import TYPE_CHECKING, Any

from vitfocus.cli.common import add_device, positive
from vitfocus.core.arguments import parse_digits
from vitfocus.core.errors import VitfocusError
from vitfocus.core.progress import Progress
from vitfocus.core.tables import Table

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Measured beside every treatment alone: all that the two papers propose.
TOGETHER = "cbs+tap+adl"
PRECISIONS = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default="deit_tiny_patch16_224",
        help="a timm name, or the folder of a saved model (default: deit_tiny_patch16_224)",
    )
    parser.add_argument(
        "--treat",
        metavar="SPEC",
        action="append",
        help=f"treatment to measure; may be repeated (default: every treatment alone, and {TOGETHER})",
    )
    parser.add_argument(
        "--size", metavar="PIXELS", help="image size, such as 224 or 512x1024 (height x width; default: the model's)"
    )
    parser.add_argument(
        "--batch-size", type=positive, metavar="N", help="batch size (default: 64 on a GPU, 8 on a CPU)"
    )
    parser.add_argument(
        "--mode",
        choices=("train", "infer"),
        default="train",
        help="measure a training step or a forward pass (default: train)",
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="autocast precision (default: bfloat16 on a GPU, float32 on a CPU)"
    )
    parser.add_argument("--compile", action="store_true", help="compile each model with torch.compile")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="timed steps per model (default: 5)")
    add_device(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print the table."""
    size = parse_size(args.size)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler that measures memory prints otherwise

    import torch

    from vitfocus.anatomy import anatomy
    from vitfocus.core.environment import usable_device
    from vitfocus.treatments.base import keywords
    from vitfocus.treatments.cost import compare_steps
    from vitfocus.treatments.spec import parse_treatments

    specs = args.treat or [*keywords(), TOGETHER]
    for spec in args.treat or ():
        if not parse_treatments(spec):
            raise VitfocusError(f"--treat {spec!r} names no treatment: try {TOGETHER}.")
    device = usable_device(args.device)
    precision = args.precision or ("bfloat16" if device.type == "cuda" else "float32")
    batch = args.batch_size or (64 if device.type == "cuda" else 8)
    model = _open(args.model, size)
    height, width = size or anatomy(model).build_size
    models, refused = _treated(model, specs, device)
    if args.treat and refused:
        raise VitfocusError(f"{refused[0]['name']} cannot be measured: {refused[0]['reason']}")
    if args.compile:
        # All models share the code of one class, and each is compiled once.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(models))
        models = {name: torch.compile(one) for name, one in models.items()}  # type: ignore[misc]
    images = torch.randn(batch, 3, height, width, device=device)
    warmup = 3 if args.compile else 2
    total = len(models) * (args.rounds + warmup + 1)
    with Progress("Measuring", total, announcement=f"Measuring: {total} steps.") as progress:
        rows = compare_steps(
            models,
            images,
            mode=args.mode,
            autocast=None if precision == "float32" else getattr(torch, precision),
            rounds=args.rounds,
            warmup=warmup,
            on_step=progress.advance,
        )
    result = {
        "model": args.model,
        "mode": args.mode,
        "size": [height, width],
        "batch_size": batch,
        "precision": precision,
        "compiled": args.compile,
        "rounds": args.rounds,
        "machine": _machine(device),
        "rows": rows,
        "refused": refused,
    }
    print(json.dumps(result, indent=2) if args.json else _text(result))
    return 0


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Parse the height and width in "224" or "512x1024".

    >>> parse_size("224"), parse_size("512x1024"), parse_size(None)
    ((224, 224), (512, 1024), None)
    """
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(0 < (parse_digits(side) or 0) <= 2**14 for side in sides):
        raise VitfocusError(f"--size expects a number of pixels, or height x width such as 512x1024, not {text!r}.")
    return int(sides[0]), int(sides[-1])


def _open(name: str, size: tuple[int, int] | None) -> nn.Module:
    """The model, built for the given size if its constructor accepts one."""
    from vitfocus.treatments.save_load import open_model

    if size is not None:
        try:
            return open_model(name, img_size=size)
        except VitfocusError as error:
            if "img_size" not in str(error):
                raise
    return open_model(name)


def _treated(
    model: nn.Module, specs: list[str], device: torch.device
) -> tuple[dict[str, nn.Module], list[dict[str, str]]]:
    from vitfocus.treatments import applied, treat_

    plain = "+".join(map(str, applied(model))) or "plain"
    models, refused = {plain: copy.deepcopy(model).to(device)}, []
    for spec in specs:
        try:
            models[spec] = treat_(copy.deepcopy(model), spec).to(device)
        except VitfocusError as error:
            refused.append({"name": spec, "reason": str(error)})
    return models, refused


def _machine(device: torch.device) -> dict[str, Any]:
    import platform

    import torch

    from vitfocus.core.environment import device_name

    facts: dict[str, Any] = {"device": device.type, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        return facts | {"name": device_name(device), "cuda": torch.version.cuda}
    return facts | {"name": device_name(device, threads=False), "threads": torch.get_num_threads()}


def _text(result: dict[str, Any]) -> str:
    machine, (height, width) = result["machine"], result["size"]
    step = "training step" if result["mode"] == "train" else "forward"
    compiled = ", compiled" if result["compiled"] else ""
    threads = f", {machine['threads']} threads" if "threads" in machine else ""
    images = f"{result['batch_size']} images of {height}x{width}, {result['precision']}{compiled}"
    title = f"{result['model']}: {step}, {images}; {machine['name']}{threads}, torch {machine['torch']}"
    rows = [
        [
            row["name"],
            f"{row['milliseconds']:.1f}",
            f"x{row['time_ratio']:.2f}",
            f"{row['megabytes']:.0f}",
            f"x{row['memory_ratio']:.2f}",
            f"{row['parameters']:,}",
        ]
        for row in result["rows"]
    ]
    lines = [str(Table(title, ["", "ms", "time", "MB", "memory", "parameters"], rows))]
    slower = max(row["milliseconds_median"] / row["milliseconds"] for row in result["rows"]) - 1
    if slower > 0.15:
        lines.append(f"The machine was busy: the median step took up to {100 * slower:.0f} % longer than the fastest.")
    return "\n".join([*lines, *(f"{row['name']} was not measured: {row['reason']}" for row in result["refused"])])
