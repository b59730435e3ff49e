"""`vitfocus diagnose`: measure what each attention layer of a model does with some images; print, save and explore."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitfocus.cli.common import (
    WITH_EXPLORER,
    add_budget,
    add_device,
    add_option,
    add_weights,
    finish_run,
    label_models,
    open_named_model,
    positive,
    say,
    whole,
)
from vitfocus.core import __version__
from vitfocus.core.arguments import OnlyWith
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import lock_folder, require_run_folder, writable_folder
from vitfocus.core.progress import Progress
from vitfocus.core.records import read_json, write_json
from vitfocus.core.statistics import evenly_spaced
from vitfocus.core.tables import counted

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitfocus.anatomy import Anatomy
    from vitfocus.attention.diagnosis import Diagnosis


_IMAGES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        nargs="+",
        metavar="MODEL",
        help="a timm name, optionally with treatments (name+tap+cb), or a folder of vitfocus, transformers or timm; "
        "several models get one folder each in --out and a gallery, and the command resumes if run again",
    )
    add_weights(parser)
    parser.add_argument(
        "--images",
        metavar="DIR",
        help="folder of images, read recursively; an image; or shapes:N (default: the built-in data set Shapes)",
    )
    parser.add_argument(
        "--against", metavar="NAME/SEVERITY", help="corruption for the stability reading, such as gaussian_noise/3"
    )
    parser.add_argument("--treat", metavar="SPEC", help="treatments to insert first, such as tap+cb")
    parser.add_argument("--limit", type=positive, metavar="N", help="use at most N images, evenly spaced (default: 64)")
    parser.add_argument("--batch-size", type=positive, default=16, metavar="N", help="batch size (default: 16)")
    parser.add_argument("--seed", type=whole, default=0, help="seed of the corruption (default: 0)")
    add_device(parser)
    parser.add_argument(
        "--out", metavar="DIR", help="folder for diagnosis.json, the table, the figures and report.html"
    )
    with_out = OnlyWith(lambda args: bool(args.out), "adds to the report, which needs a folder: add --out DIR")
    accuracy = "with --out: also measure the accuracy, for --images with one folder per class"
    add_option(parser, with_out, "--accuracy", action="store_true", help=accuracy)
    explore = "with --out: add the interactive attention explorer to the report"
    add_option(parser, with_out, "--explore", action="store_true", help=explore)
    explored = "with --explore: folder of the explorer's images (default: --images)"
    add_option(parser, WITH_EXPLORER, "--explore-images", metavar="DIR", help=explored)
    add_budget(parser)


@dataclass(frozen=True)
class _Request:
    """One model to diagnose, with its label and the folder of its diagnosis."""

    model: str
    weights: str | None
    label: str
    out: str | None

    def described(self, args: argparse.Namespace, files: list[Path] | None) -> dict[str, Any]:
        """Everything the diagnosis depends on, as plain data: if it is unchanged, the saved diagnosis is reused."""
        folder = Path(self.model)
        saved = sorted(folder.rglob("*.safetensors")) if folder.is_dir() else []
        read = [Path(self.weights)] if self.weights else saved
        given = {name: getattr(args, name) for name in _SETTINGS}
        images: Any = args.limit if files is None else [_stamp(file) for file in files]
        return given | {"model": self.model, "weights": [_stamp(f) for f in read], "of": images, "made": __version__}


#: The options that a diagnosis depends on, besides the images.
_SETTINGS = ("pretrained", "against", "treat", "seed", "accuracy", "explore", "explore_images", "budget")
_REQUEST, _DIAGNOSIS = "request.json", "diagnosis.json"


def _stamp(file: Path) -> list[Any]:
    known = file.stat() if file.is_file() else None
    return [file.name, known.st_size, known.st_mtime_ns] if known else [file.name]


def run(args: argparse.Namespace) -> int:
    """Diagnose, print the table, and save everything if --out is given."""
    drawn = _count_shapes(args)
    args.limit = args.limit or drawn or _IMAGES
    files = None if drawn else image_files(Path(args.images), args.limit)  # before any slow import
    if args.explore_images:
        image_files(Path(args.explore_images), 1)
    requests = _requests(args)
    if args.out:
        marks = {_DIAGNOSIS}
        if len(requests) > 1:
            folders = [Path(request.out) for request in requests if request.out]
            for folder in folders:
                require_run_folder(folder, marks, "vitfocus diagnose")
            marks |= {folder.name for folder in (*folders, *(f.parent for f in Path(args.out).glob(f"*/{_DIAGNOSIS}")))}
        require_run_folder(args.out, marks, "vitfocus diagnose")
    if args.against is not None:
        from vitfocus.corruptions import parse

        parse(args.against)
    with _locked(args.out):
        if args.out:
            writable_folder(args.out)  # before any slow work
        if len(requests) == 1:
            diagnosis = _diagnose(args, requests[0], files)
        else:
            found = _diagnose_many(args, requests, files)
    if len(requests) == 1:
        print(diagnosis.to_json() if args.json else diagnosis)
        return 0
    from vitfocus.report.attention import means_table

    print(json.dumps([one.to_dict() for one in found], indent=2) if args.json else means_table(found))
    if failed := len(requests) - len(found):
        raise VitfocusError(f"{failed} of {len(requests)} models could not be diagnosed, for the reasons above.")
    return 0


def _locked(out: str | None) -> AbstractContextManager[None]:
    """Lock the folder, if one is given."""
    return lock_folder(out) if out else nullcontext()


def _requests(args: argparse.Namespace) -> list[_Request]:
    """One request per model; several models have a folder each in --out."""
    requests = []
    for label, (model, file) in label_models(args, args.treat).items():
        subfolder = re.sub(r"[^\w.+=(),-]+", "_", label) if len(args.model) > 1 else ""
        requests.append(_Request(model, file, label, str(Path(args.out, subfolder)) if args.out else None))
    return requests


def _diagnose_many(args: argparse.Namespace, requests: list[_Request], files: list[Path] | None) -> list[Diagnosis]:
    """Diagnose several models; finished diagnoses in --out are reused, and models that fail are skipped."""
    from vitfocus.attention.diagnosis import Diagnosis

    found = []
    for number, request in enumerate(requests):
        wanted = request.described(args, files)
        file = Path(request.out) / _REQUEST if request.out else None
        say(f"{request.label} ({number + 1} of {len(requests)})")
        try:
            with _locked(request.out):
                if file is not None and file.is_file() and read_json(file, dict[str, Any]) == wanted:
                    found.append(Diagnosis.load(file.parent))
                    say(f"Already in {request.out}.")
                    continue
                if file is not None:
                    file.unlink(missing_ok=True)
                found.append(_diagnose(args, request, files))
                if file is not None:
                    write_json(file, wanted, indent=1)
        except VitfocusError as error:
            say(f"{request.label}: {error}")
    if args.out and found:
        finish_run(args.out, gallery=True)
    return found


def _diagnose(args: argparse.Namespace, request: _Request, files: list[Path] | None) -> Diagnosis:
    """Diagnose one model; save the diagnosis and its report if a folder is given."""
    from vitfocus.anatomy import anatomy
    from vitfocus.attention.diagnosis import diagnose
    from vitfocus.core.environment import usable_device
    from vitfocus.report.runs import write_data_source
    from vitfocus.treatments.save_load import task_of

    device = usable_device(args.device)
    model = open_named_model(request.model, request.weights, args.treat, pretrained=args.pretrained)
    model.to(device)
    body = anatomy(model)
    if task_of(model).get("task") == "segment":  # a segmenter takes larger images than its backbone
        body = replace(body, build_size=(task_of(model)["size"],) * 2)
    if body.text is not None and (asked := _questions(args, body)) is not None:
        count, batches = asked
    elif files is None:
        count = args.limit
        say(f"Using {count} images of the built-in data set Shapes, {_format_size(body.build_size)}.")
        batches = _shapes(count, args.batch_size, body)
    else:
        count = len(files)
        batches = _photographs(files, args.batch_size, body)
    digest = hashlib.sha256()
    watched = _with_progress(batches, count, digest)
    diagnosis = diagnose(model, watched, args.against, seed=args.seed, name=request.label)
    if request.out:
        written = diagnosis.save(request.out)
        write_data_source(request.out, "Shapes" if files is None else Path(args.images).name, digest.hexdigest())
        say(f"Saved {len(written)} files in {request.out}: {', '.join(file.name for file in written)}.")
        if args.accuracy:
            _evaluate(args, request, model)
        if args.explore:
            _explore(args, request, model, files, body)
        finish_run(request.out, {request.label: model})
    return diagnosis


def _evaluate(args: argparse.Namespace, request: _Request, model: nn.Module) -> None:
    """Measure the accuracy on the same images, in a folder inside that of the diagnosis."""
    from vitfocus.robustness.evaluation import evaluate

    assert request.out is not None
    data = args.images or f"shapes:{args.limit}"
    try:
        scores = evaluate({request.label: model}, "clean", data, limit=args.limit, seed=args.seed, device=args.device)
        scores.save(Path(request.out) / "evaluation")
    except VitfocusError as error:  # the diagnosis itself has succeeded
        say(f"The accuracy was not measured: {error}")


def _count_shapes(args: argparse.Namespace) -> int:
    """The number of images to draw from Shapes; 0 if --images names files."""
    if args.images is None:
        return args.limit or _IMAGES
    if not args.images.startswith("shapes"):  # the import below is slow
        return 0
    from vitfocus.data.shapes.dataset import shapes_named

    found = shapes_named(args.images, args.limit or _IMAGES) or 0
    return min(found, args.limit or found)


def image_files(folder: Path, limit: int) -> list[Path]:
    """At most `limit` of the image files in a folder and its subfolders, sorted and evenly spaced."""
    from vitfocus.data.image_files import as_images

    found = as_images(folder) or []
    return [found[index] for index in evenly_spaced(len(found), limit)]


def _photographs(files: list[Path], batch_size: int, body: Anatomy) -> Iterator[Tensor]:
    from vitfocus.attention.batches import Batches

    return (batch.pixels for batch in Batches(list(files), body, batch_size))


def _explore(
    args: argparse.Namespace, request: _Request, model: nn.Module, files: list[Path] | None, body: Anatomy
) -> None:
    """Save the explorer's data for a few images."""
    import torch

    from vitfocus.report.explorer import IMAGES, explorer_data, write_explorer

    assert request.out is not None
    files = image_files(Path(args.explore_images), IMAGES) if args.explore_images else files
    count = min(IMAGES, args.limit if files is None else len(files))
    if files is None:
        images, names = next(_shapes(count, count, body)), None
    else:
        few = [files[index] for index in evenly_spaced(len(files), count)]
        images, names = torch.cat(list(_photographs(few, count, body))), [file.name for file in few]
    against = args.against or "gaussian_noise/3"
    try:
        data = explorer_data({request.label: model}, images, against, names=names, budget=args.budget, seed=args.seed)
    except VitfocusError as error:  # the diagnosis itself has succeeded and gets its report
        say(f"The report has no explorer: {error}")
        return
    write_explorer(request.out, data)


def _questions(args: argparse.Namespace, body: Anatomy) -> tuple[int, Iterator[Any]] | None:
    """For a model that reads text: questions from a VQAv2 folder or from Shapes; None for images without questions."""
    from vitfocus.data.vqa.batches import diagnosis_batches
    from vitfocus.data.vqa.dataset import read_vqav2, shapes_questions, splits_in
    from vitfocus.tasks.vqa.evaluation import preprocessing_of

    if args.images:
        splits = splits_in(args.images) if Path(args.images).is_dir() else []
        if not splits:
            say("The folder has no questions: the text input is empty.")
            return None
        asked = read_vqav2(args.images, splits[0], annotated=False)
        say(f"Using the questions of the split {splits[0]}.")
    else:
        asked = shapes_questions("val", args.limit, min(body.build_size))
        say(f"No --images given: using questions about the built-in data set Shapes, {_format_size(body.build_size)}.")
    batches = diagnosis_batches(asked, preprocessing_of(body.root), args.limit, args.batch_size)
    return min(args.limit, len(asked)), batches


def _shapes(count: int, batch_size: int, body: Anatomy) -> Iterator[Tensor]:
    from vitfocus.data.shapes.dataset import shapes_batch

    for start in range(0, count, batch_size):
        yield shapes_batch(range(start, min(start + batch_size, count)), split="val", size=body.build_size)[0]


def _with_progress(batches: Iterator[Any], count: int, digest: Any) -> Iterator[Any]:
    """Yield the batches (tensors, or dicts with questions), show progress, and add each to a digest."""
    with Progress("Reading images", count, announcement=f"Reading {counted(count, 'image')}.") as progress:
        for batch in batches:
            pixels, questions = (batch["pixel_values"], batch["question"]) if isinstance(batch, dict) else (batch, ())
            digest.update(pixels.contiguous().numpy().data)
            digest.update("\n".join(questions).encode())
            yield batch
            progress.advance(len(pixels))


def _format_size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
