"""`vitfocus report`: one HTML page about runs of train, evaluate and diagnose."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitfocus.cli.common import WITH_EXPLORER, add_budget, add_option, positive, say
from vitfocus.core.errors import VitfocusError
from vitfocus.core.tables import counted

if TYPE_CHECKING:
    from torch import Tensor

    from vitfocus.report.runs import ReportModel

#: The number of models that are explored; two of them are shown side by side.
_EXPLORED = 4
_IMAGES = 8
_CORRUPTION = "gaussian_noise/3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder written by train, evaluate or diagnose, or a folder of those; the first model is the baseline",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="output file (default: RUN/report.html; for several runs: report.html)"
    )
    parser.add_argument("--title", help="title of the page (default: the names of the models)")
    parser.add_argument(
        "--gallery",
        action=argparse.BooleanOptionalAction,
        help="one sortable table with a row per model (default: for three or more models that were only diagnosed)",
    )
    explorer = parser.add_argument_group("attention explorer")
    explorer.add_argument(
        "--explore", action="store_true", help="load the trained models and add the interactive attention explorer"
    )
    images = "folder of images to explore (default: the run's validation data)"
    add_option(explorer, WITH_EXPLORER, "--images", metavar="DIR", help=images)
    limit = f"use at most N images (default: {_IMAGES})"
    add_option(explorer, WITH_EXPLORER, "--limit", type=positive, metavar="N", help=limit)
    against = f"corruption shown beside the clean images, or 'none' (default: {_CORRUPTION})"
    add_option(explorer, WITH_EXPLORER, "--against", metavar="NAME/SEVERITY", help=against)
    add_budget(explorer)


def run(args: argparse.Namespace) -> int:
    """Collect the runs, add the explorer if asked for, write the page and print its path."""
    from vitfocus.core.modules import insertions_sentence
    from vitfocus.report import report

    data = _explore(args) if args.explore else None
    written = report(*args.runs, out=args.out, title=args.title, explorer=data, gallery=args.gallery)
    if args.json:
        print(json.dumps(written.to_dict(), indent=2))
    else:
        print(f"{', '.join(written.models)}: {written.path} ({_size(written.size)})")
        if written.insertions:
            print(insertions_sentence(written.insertions))
    return 0


def _size(count: int) -> str:
    """A number of bytes as text.

    >>> _size(48_200), _size(3_140_000)
    ('48 kB', '3.1 MB')
    """
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def _explore(args: argparse.Namespace) -> Any:
    from vitfocus.report.explorer import explorer_data
    from vitfocus.report.runs import collect_models
    from vitfocus.treatments.save_load import load

    found = [model for model in collect_models(args.runs) if model.model_folder is not None]
    if not found:
        raise VitfocusError(
            "None of these runs contains a model that can be loaded; to explore a model: vitfocus diagnose MODEL "
            "--out DIR --explore."
        )
    chosen = found[:_EXPLORED]
    if len(found) > _EXPLORED:
        say(f"Exploring {' and '.join(model.name for model in chosen)}, the first {_EXPLORED}.")
    models = {model.name: load(model.model_folder) for model in chosen if model.model_folder is not None}
    limit, against = args.limit or _IMAGES, args.against or _CORRUPTION
    images, names = _images(args.images, limit, chosen[0], next(iter(models.values())))
    say(f"Reading {counted(len(images), 'image')} with {counted(len(models), 'model')}.")
    compared = None if against == "none" else against
    return explorer_data(models, images, compared, names=names, limit=limit, budget=args.budget)


def _images(folder: str | None, limit: int, found: ReportModel, model: Any) -> tuple[Tensor, list[str]]:
    """The images of a folder, or validation images of the model's run, as uint8, and their names."""
    import torch

    from vitfocus.anatomy import anatomy
    from vitfocus.cli.diagnose import image_files
    from vitfocus.core.statistics import evenly_spaced
    from vitfocus.data.classification.dataset import open_images
    from vitfocus.data.image_files import evaluation_preprocessing, read_image
    from vitfocus.train.recipe import build_recipe, refuse_downloads

    size = anatomy(model).build_size
    if folder:
        files = image_files(Path(folder), limit)
        return torch.stack([read_image(file, size) for file in files]), [file.name for file in files]
    assert found.training is not None
    try:
        recipe = build_recipe(found.training.recipe)
        refuse_downloads(recipe, "its recipe", sections=("data",))
        images = open_images(recipe.data, "val")
    except (VitfocusError, OSError, TypeError, KeyError) as error:
        raise VitfocusError(
            f"The validation images of {found.name} cannot be opened ({error}): give images with --images DIR."
        ) from None
    preprocessing = evaluation_preprocessing(size, recipe.data.interpolation, recipe.data.crop)
    picked = evenly_spaced(len(images), limit)
    return torch.stack([preprocessing.apply(images.read(i)[0]) for i in picked]), [images.name(i) for i in picked]
