"""`vitfocus diagnose`: what every attention layer of a model does with some images: a table, sentences, figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from vitfocus.anatomy import Anatomy

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model", help="a timm name (treatments may follow: name+tap+cb), or a folder of vitfocus, transformers or timm"
    )
    parser.add_argument("--weights", metavar="FILE", help="a checkpoint to load (safetensors or a state_dict)")
    parser.add_argument(
        "--images", metavar="DIR", help="a folder of images, read recursively (default: the embedded Shapes)"
    )
    parser.add_argument(
        "--against", metavar="NAME/SEVERITY", help="a corruption to measure stability under: gaussian_noise/3"
    )
    parser.add_argument("--treat", metavar="SPEC", help="treatments to insert first: tap+cb")
    parser.add_argument(
        "--limit", type=int, default=64, metavar="N", help="at most N images, evenly picked (default: 64)"
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="images at a time (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the corruption (default: 0)")
    parser.add_argument("--device", default=None, help="where to run: cpu, cuda... (default: a GPU if there is one)")
    parser.add_argument("--out", metavar="DIR", help="save diagnosis.json, the table and every figure there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Diagnose, print, and save where asked to."""
    from vitfocus.errors import VitfocusError

    for name in ("limit", "batch_size"):
        if getattr(args, name) < 1:
            raise VitfocusError(f"--{name.replace('_', '-')} must be at least 1, but is {getattr(args, name)}.")
    files = image_files(Path(args.images), args.limit) if args.images else None
    if args.against:
        from vitfocus.corruptions import parse

        parse(args.against)

    from vitfocus.anatomy import anatomy
    from vitfocus.attention.diagnosis import diagnose
    from vitfocus.treatments.store import open_model

    model = open_model(args.model, weights=args.weights, treat=args.treat)
    model.to(_device(args.device))
    body = anatomy(model)
    if args.weights is None and not Path(args.model).is_dir():
        _say(f"No --weights: {args.model} starts from random weights, so this reads an untrained model.")
    if files is None:
        count = args.limit
        _say(f"No --images: using {count} scenes of the embedded Shapes, {_by(body.build_size)}.")
        batches = _shapes(count, args.batch_size, body)
    else:
        count = len(files)
        batches = _photographs(files, args.batch_size, body)
    name = f"{args.model}+{args.treat}" if args.treat else str(args.model)
    diagnosis = diagnose(model, _with_progress(batches, count), args.against, seed=args.seed, name=Path(name).name)
    if args.out:
        written = diagnosis.save(args.out)
        _say(f"Saved {len(written)} files in {args.out}: {', '.join(file.name for file in written)}.")
    if args.json:
        print(diagnosis.to_json())
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        console.print(diagnosis.table())
        for sentence in diagnosis.findings:
            console.print(f"- {sentence}", soft_wrap=True)
    return 0


def image_files(folder: Path, limit: int) -> list[Path]:
    """At most `limit` of the images under a folder, sorted and evenly picked."""
    from vitfocus.errors import VitfocusError

    if folder.is_file() and folder.suffix.lower() in SUFFIXES:
        return [folder]
    if not folder.is_dir():
        raise VitfocusError(f"There is no folder {folder}; --images wants a folder that holds images.")
    found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not found:
        kinds = ", ".join(sorted(suffix.lstrip(".") for suffix in SUFFIXES))
        raise VitfocusError(f"{folder} holds no image ({kinds}), nor does any folder in it.")
    return found if len(found) <= limit else [found[index * len(found) // limit] for index in range(limit)]


def read_image(file: Path, size: tuple[int, int], crop: float = 0.875, interpolation: str = "bicubic") -> Tensor:
    """One image as the model was evaluated: shorter side to size / crop, then the centre: uint8 (3, height, width)."""
    from PIL import Image, UnidentifiedImageError
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as T

    from vitfocus.errors import VitfocusError

    try:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise VitfocusError(f"{file} cannot be read as an image: {error}.") from error
    height, width = size
    # The smallest picture of its own shape that covers the frame out of which the centre is cut.
    frame, shape = (int(height / crop), int(width / crop)), (picture.height, picture.width)
    scale = max(least / side for least, side in zip(frame, shape, strict=True))
    resized = [max(int(side * scale), least) for side, least in zip(shape, frame, strict=True)]
    mode = InterpolationMode(interpolation if interpolation in ("bilinear", "bicubic") else "bicubic")
    return T.pil_to_tensor(T.center_crop(T.resize(picture, resized, mode), [height, width]))


def _photographs(files: list[Path], batch_size: int, body: Anatomy) -> Iterator[Tensor]:
    import torch

    config: Any = getattr(body.root, "pretrained_cfg", None) or {}
    crop, interpolation = config.get("crop_pct") or 0.875, config.get("interpolation") or "bicubic"
    for start in range(0, len(files), batch_size):
        chunk = files[start : start + batch_size]
        yield torch.stack([read_image(file, body.build_size, crop, interpolation) for file in chunk])


def _shapes(count: int, batch_size: int, body: Anatomy) -> Iterator[Tensor]:
    from vitfocus.data.shapes import shapes_batch

    for start in range(0, count, batch_size):
        yield shapes_batch(range(start, min(start + batch_size, count)), split="val", size=body.build_size)[0]


def _with_progress(batches: Iterator[Tensor], count: int) -> Iterator[Tensor]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        _say(f"Reading {count} images.")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Reading images", total=count)
        for batch in batches:
            yield batch
            progress.advance(task, len(batch))


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _device(name: str | None) -> Any:
    """The device named, or a GPU if there is one."""
    import torch

    from vitfocus.errors import VitfocusError

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise VitfocusError(f"There is no device {name!r} here: {str(error).splitlines()[0]}") from None
    return torch.device(name)
