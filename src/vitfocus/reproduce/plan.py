"""The plan of an item at a scale: for each row its recipe, its run folder, its model and its data.

A run folder is named by the digest of the recipe, so rows of different tables with the same recipe share one run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchvision.transforms.v2 import functional as F

from vitfocus.anatomy import anatomy
from vitfocus.attention.diagnosis import Diagnosis, diagnose
from vitfocus.core.environment import default_device
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.files import digest as file_digest
from vitfocus.core.files import home_path, write_text
from vitfocus.core.statistics import evenly_spaced
from vitfocus.core.tables import counted
from vitfocus.data.classification.dataset import ArrayImages, open_images
from vitfocus.data.image_files import evaluation_preprocessing, find_split, to_tensor
from vitfocus.data.segmentation.dataset import open_masks
from vitfocus.recipes import SECTIONS, Distill, Recipe, changed, is_changeable
from vitfocus.report.runs import read_metrics
from vitfocus.reproduce.items import MEASURES, SCALES, Item, ModelSetup, TableRow, load_item, model_setups
from vitfocus.tasks import find_task
from vitfocus.tasks.base import model_arguments
from vitfocus.train.recipe import apply_overrides, full_key, load_recipe, why_unused
from vitfocus.treatments.builder import split_library
from vitfocus.treatments.save_load import create_model, load, remember_task
from vitfocus.treatments.spec import is_record, split_spec
from vitfocus.treatments.weights import load_weights, treatment_differences

#: Severity of the Gaussian noise in diagnoses, unless --option diagnosis.severity is given.
SEVERITY = 3
#: Number of images of a diagnosis, unless --images is given; all at ImageNet scale, as in the papers.
DIAGNOSED = {"smoke": 64, "cifar100": 256, "imagenet": None}
PRETRAINED = "pretrained"

#: Number of classes of each data source.
CLASSES = {"shapes": 10, "folder": 1000, "cifar100": 100, "ade20k": 150, "cityscapes": 19, "coco": 80, "vqav2": 3129}
#: Data sets by a recipe's source: their usual name, and the folder's name below --data.
DATA_SETS = {
    "shapes": ("Shapes", ""),
    "folder": ("ImageNet-1k", "imagenet"),
    "cifar100": ("CIFAR-100", "cifar100"),
    "ade20k": ("ADE20K", "ade20k"),
    "cityscapes": ("Cityscapes", "cityscapes"),
    "coco": ("COCO", "coco"),
    "vqav2": ("VQAv2", "vqav2"),
}
#: Every data set that --data can name, including those that only evaluations read.
DATA_NAMES = {name for _, name in DATA_SETS.values() if name} | {
    suite.data for measure in MEASURES.values() for suite in measure.suites.values() if suite.data
}


@dataclass(frozen=True)
class DataFolders:
    """The folders of data sets: `named` ones, and a `root` that contains them by name or is the data set itself."""

    root: Path | None = None
    named: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Sequence[str | Path]) -> DataFolders:
        """From the command line: "DIR" or "NAME=DIR", any number of times.

        >>> DataFolders.read(["/", "imagenet-c=/tmp"]).named
        {'imagenet-c': PosixPath('/tmp')}
        """
        root, named = None, {}
        for one in map(str, given):
            name, equals, folder = one.partition("=")
            if equals and name not in DATA_NAMES:
                raise VitfocusError(f"--data {one} names no data set {name!r}: {nearest(name, DATA_NAMES)}")
            path = home_path(folder if equals else one)
            if not path.is_dir():
                raise VitfocusError(f"There is no folder {path}: --data takes a folder, or NAME=FOLDER.")
            if equals:
                named[name] = path
            elif root is not None:
                raise VitfocusError(
                    f"--data names two folders, {root} and {path}: say which data set each is, NAME=DIR."
                )
            else:
                root = path
        return cls(root, named)

    def find(self, name: str, allow_root: bool = False) -> Path | None:
        """A data set's folder, or None; with `allow_root`, the root itself may be the data set."""
        if name in self.named:
            return self.named[name]
        if self.root is None:
            return None
        if (self.root / name).is_dir():
            return self.root / name
        collection = any((self.root / folder).is_dir() for _, folder in DATA_SETS.values() if folder)
        return self.root if allow_root and not collection else None


@dataclass(frozen=True)
class PlannedRun:
    """A row at a scale, ready to be trained; `recipe` is None if the model is only counted.

    With `weights` it is measured with these instead of being trained: a file, a saved folder, or "pretrained" for the
    weights of the library.
    """

    row: TableRow
    scale: str
    setup: ModelSetup
    recipe: Recipe | None
    folder: Path
    digest: str
    prerequisites: tuple[PlannedRun, ...] = ()  # trained first: a teacher, or the model whose weights it starts from
    weights: str = ""

    @property
    def spec(self) -> str:
        """The model with its treatment."""
        return with_treatment(self.setup.spec, self.row.treat)

    def with_prerequisites(self) -> list[PlannedRun]:
        """The runs that are trained before it, in order, and itself."""
        return [*(run for first in self.prerequisites for run in first.with_prerequisites()), self]


def with_treatment(spec: str, treat: str) -> str:
    """The spec of a model with a treatment appended."""
    return f"{spec}+{treat}" if treat else spec


def setup_of(item: Item, model: str, scale: str) -> ModelSetup:
    """How a model is built at a scale; an error if it is not defined at that scale."""
    known = model_setups()[model]
    if scale not in known:
        others = " or ".join(f"--scale {name}" for name in SCALES if name in known)
        raise VitfocusError(f"{item.name} has no {model} at the scale {scale} ({item.data}): use {others}.")
    return known[scale]


def plan_row(
    item: Item, row: TableRow, scale: str, folders: DataFolders | None, out: Path, overrides: Sequence[str] = ()
) -> PlannedRun | None:
    """The run of a row; None for models that are only counted, at ImageNet scale.

    Without `folders` no data are needed: the model is counted, not trained.
    """
    setups = model_setups().get(row.model, {})
    if scale not in setups and not any(setup.recipe for setup in setups.values()):
        return None
    return _plan(item, row, scale, folders, out, overrides)


def _plan(
    item: Item, row: TableRow, scale: str, folders: DataFolders | None, out: Path, overrides: Sequence[str]
) -> PlannedRun:
    setup = setup_of(item, row.model, scale)
    if not setup.recipe:
        return PlannedRun(row, scale, setup, None, out, "")
    base = (row.recipe if scale == "imagenet" else "") or (setup.treated if row.treat else "") or setup.recipe
    changes = [*setup.set, *row.set, f"model.spec={with_treatment(setup.spec, row.treat)}"]
    before: dict[str, PlannedRun] = {}
    if setup.teacher:
        before["teacher"] = _plan(item, TableRow(row.label, setup.teacher), scale, folders, out, overrides)
        changes.append("distill.kind=hard")
    if setup.start:
        first = TableRow(row.label, setup.start, row.start_treat or row.treat)
        before["start"] = _plan(item, first, scale, folders, out, ())
    source = load_recipe(base).data.source
    title, name = DATA_SETS.get(source, (source, source))
    if name and folders is not None:
        folder = folders.find(name, allow_root=True)
        if folder is None:
            raise VitfocusError(
                f"{item.name} at the scale {scale} trains on {title}: give its folder with --data {name}=DIR, "
                "or a folder that contains all data sets by name with --data DIR."
            )
        changes.append(f"data.root={folder.resolve()}")
    recipe, _ = apply_overrides(base, [*changes, *overrides])
    if "start" in before:
        recipe = replace(recipe, model=replace(recipe.model, weights="", pretrained=False))
    digest = recipe_digest(recipe, *(f"{role} {run.digest}" for role, run in before.items()))
    if "teacher" in before:
        distill = replace(recipe.distill, teacher=str(before["teacher"].folder / "model"))
        recipe = replace(recipe, distill=distill)
    if "start" in before:
        model = replace(recipe.model, weights=str(before["start"].folder / "model"))
        recipe = replace(recipe, model=model)
    run_name = _run_name(row, digest)
    about = f"{with_treatment(row.model, row.treat)} at {scale} scale, as in {item.paper}."
    recipe = replace(recipe, name=run_name, about=about)
    return PlannedRun(row, scale, setup, recipe, out / run_name, digest, tuple(before.values()))


def _run_name(row: TableRow, digest: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", with_treatment(row.model, row.treat).lower()).strip("-")
    return f"{slug}-{digest[:10]}"


def with_weights(run: PlannedRun, weights: str) -> PlannedRun:
    """The row measured with given weights instead of being trained."""
    assert run.recipe is not None
    content = weights
    if weights != PRETRAINED:
        path = home_path(weights)
        if (path / "model" / "config.json").is_file():  # a run's folder
            path = path / "model"
        file = path / "model.safetensors" if path.is_dir() else path
        if not file.is_file():
            raise VitfocusError(f"There are no weights {weights}: give a file, or a folder that vitfocus.save wrote.")
        weights, content = str(path), file_digest(file)
    model = replace(run.recipe.model, weights="", pretrained=weights == PRETRAINED)
    recipe = replace(run.recipe, model=model, distill=Distill())
    digest = recipe_digest(recipe, f"weights {content}")
    recipe = replace(recipe, name=_run_name(run.row, digest), about=f"{run.row.label} with the weights {weights}.")
    folder = run.folder.parent / recipe.name
    return dataclasses.replace(run, recipe=recipe, folder=folder, digest=digest, prerequisites=(), weights=weights)


def why_not_pretrained(run: PlannedRun) -> str:
    """Why a row cannot be measured with the weights of its library, or ""."""
    library, name = split_library(split_spec(run.spec)[0])
    if run.row.treat:
        return f"no library has weights of {run.spec}: give them with --weights"
    if run.recipe is None or run.recipe.task != "classify" or library != "timm":
        return f"no library has trained weights of {run.spec} for this task: give them with --weights"
    import timm

    import vitfocus.models  # noqa: F401  registers FAN, RVT, PVT and LocalViT

    return "" if timm.is_model_pretrained(name) else f"timm has no weights of {name}: give them with --weights"


def _given_model(run: PlannedRun) -> nn.Module:
    """The model of a row that is measured with given weights."""
    assert run.recipe is not None
    treats = [run.row.treat] if run.row.treat else []
    if Path(run.weights).is_dir():
        model = load(Path(run.weights))
        if differences := treatment_differences(model, treats):
            raise VitfocusError(f"{run.weights} is not the model of {run.row.label!r}: {'; '.join(differences)}.")
        return model
    if run.recipe.task == "classify":
        arguments = model_arguments(run.recipe, CLASSES[run.recipe.data.source])
        model = create_model(run.spec, run.weights == PRETRAINED, **arguments)
        remember_task(model, {"task": "classify"})
    else:
        task = find_task(run.recipe.task)(run.recipe)
        task.open_data()
        model = task.build_model()
        remember_task(model, task.card())
    if run.weights != PRETRAINED:
        lacking = [name for name in load_weights(model, run.weights, trained_with=treats).new if not is_record(name)]
        if lacking:
            raise VitfocusError(f"{run.weights} is not the model of {run.row.label!r}: it has no {lacking[0]}.")
    return model.eval()


def recipe_digest(recipe: Recipe, *before: str) -> str:
    """The identity of a run: every setting that affects its outcome and differs from the default, not its name.

    >>> recipe = load_recipe("shapes")
    >>> renamed = replace(recipe, name="other", about="")
    >>> recipe_digest(recipe) == recipe_digest(renamed), recipe_digest(recipe) == recipe_digest(recipe, "a teacher")
    (True, False)
    """
    sections = {
        section: {
            name: value
            for name, value in changed(getattr(recipe, section)).items()
            if not is_changeable(f"{section}.{name}")
        }
        for section in SECTIONS
    }
    described = json.dumps([recipe.task, sections, before], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()


def describe_data(run: PlannedRun, images: tuple[int, int] | None = None) -> str:
    """Scale and data, such as "smoke: Shapes, 32 px, 12,000 + 2,000 images, 4 epochs"."""
    assert run.recipe is not None
    data, schedule = run.recipe.data, run.recipe.schedule
    parts = [DATA_SETS.get(data.source, (data.source,))[0], f"{data.size} px"]
    if images:
        parts.append(f"{images[0]:,} + {images[1]:,} images")
    trained = f"{schedule.steps:,} steps" if schedule.steps else counted(schedule.epochs, "epoch", "g")
    parts.append(f"not trained here, weights {Path(run.weights).name}" if run.weights else trained)
    return f"{run.scale}: {', '.join(parts)}"


@dataclass(frozen=True)
class PlannedItem:
    """An item with the rows to run and every row's run; without `folders`, nothing is trained or measured."""

    item: Item
    rows: list[TableRow]
    folders: DataFolders | None
    runs: dict[str, PlannedRun | None]
    pretrained: bool = False

    @property
    def trained(self) -> list[PlannedRun]:
        """The runs to train, each after those that it depends on; rows that share a run have it once."""
        if self.folders is None or self.pretrained:
            return []
        lasts = [run for row in self.rows if (run := self.runs[row.label]) and run.recipe and not run.weights]
        return list({run.digest: run for last in lasts for run in last.with_prerequisites()}.values())


def plan_item(
    name: str,
    scale: str = "smoke",
    data: Sequence[str | Path] | str | Path = (),
    out: str | Path = "runs/reproduce",
    overrides: Sequence[str] = (),
    rows: Sequence[int] = (),
    count_only: bool = False,
    weights: Sequence[str] = (),
    pretrained: bool = False,
) -> list[PlannedItem]:
    """Resolve an item, or each of its parts, before anything is trained; the arguments are those of `reproduce`."""
    if scale not in SCALES:
        raise VitfocusError(f"There is no scale {scale!r}: {nearest(scale, SCALES)}")
    item = load_item(name)
    if scale == "smoke" and data:
        others = " or ".join(f"--scale {other}" for other in SCALES if other != scale)
        raise VitfocusError(f"The smoke scale draws its own images and reads no --data: leave it out, or use {others}.")
    if pretrained and scale != "imagenet":
        raise VitfocusError("--pretrained measures the libraries' ImageNet-1k weights: use --scale imagenet.")
    folders = DataFolders.read([data] if isinstance(data, str | Path) else data)
    picked = [(one, _picked(one, rows)) for one in ([load_item(part) for part in item.parts] or [item])]
    planned = []
    for one, chosen in picked:
        needed = None if count_only or not needs_training(one) else folders
        # Every row is planned before the first is trained, so that missing data are reported at once. Untreated rows
        # that others are compared with are included, picked or not, to count what a treatment adds.
        baselines = [row for row in map(one.baseline, chosen) if row is not None and row not in chosen]
        runs = {
            row.label: plan_row(one, row, scale, None if row in baselines else needed, Path(out) / scale, overrides)
            for row in (*chosen, *baselines)
        }
        if needed is not None:
            runs |= given_weights(one, runs, weights, pretrained)
        planned.append(PlannedItem(one, chosen, needed, runs, pretrained))
    _refuse_unused(overrides, [run for one in planned for run in one.runs.values() if run is not None])
    return planned


def given_weights(
    item: Item, runs: Mapping[str, PlannedRun | None], weights: Sequence[str], pretrained: bool
) -> dict[str, PlannedRun | None]:
    """The runs of rows that are measured with given weights, or with their library's."""
    found: dict[str, PlannedRun | None] = {}
    for text in weights:
        row = next((r for n, r in enumerate(item.rows, 1) if text.startswith((f"{n}=", f"{r.label}="))), None)
        if row is None or row.label not in runs:
            labels = ", ".join(f"{n} ({r.label})" for n, r in enumerate(item.rows, 1) if r.label in runs)
            raise VitfocusError(
                f"--weights {text} names no row of {item.name}: write ROW=FILE with ROW one of {labels}."
            )
        run = runs[row.label]
        if run is None or run.recipe is None:
            raise VitfocusError(f"{row.label} of {item.name} is not measured: leave its --weights out.")
        file = text.removeprefix(f"{row.label}=").removeprefix(f"{item.rows.index(row) + 1}=")
        found[row.label] = with_weights(run, file)
    if pretrained:
        for label, run in runs.items():
            if run is not None and run.recipe is not None and label not in found and not why_not_pretrained(run):
                found[label] = with_weights(run, PRETRAINED)
    return found


def _refuse_unused(overrides: Sequence[str], runs: Sequence[PlannedRun]) -> None:
    """Refuse an override that has no effect on any run."""
    planned = [run.recipe for last in runs for run in last.with_prerequisites() if run.recipe is not None]
    for key in (text.partition("=")[0].strip() for text in overrides):
        whys = [why_unused(recipe, full_key(key, recipe.task)) for recipe in planned if key != "task"]
        if whys and all(whys):
            raise VitfocusError(whys[0])


def needs_training(item: Item) -> bool:
    """Whether an item needs trained models: it has figures, or measures more than can be counted."""
    return bool(item.figures) or any(MEASURES[name].source not in ("counted", "computed") for name in item.measures)


def _picked(item: Item, rows: Sequence[int]) -> list[TableRow]:
    for number in rows:
        if not 1 <= number <= len(item.rows):
            raise VitfocusError(f"{item.name} has rows 1 to {len(item.rows)}, not {number}.")
    return [row for number, row in enumerate(item.rows, 1) if not rows or number in rows]


def training_metrics(run: PlannedRun) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [row for row in read_metrics(run.folder) if "kind" in row and "epoch" in row]


def diagnosis_of(run: PlannedRun, limit: int | None = None, severity: int = SEVERITY) -> Diagnosis:
    """The diagnosis of a run's model on validation images, clean and under noise; saved in the run's folder."""
    count = limit or DIAGNOSED[run.scale]
    folder = run.folder / f"diagnosis-{count or 'all'}{f'-noise-{severity}' if severity != SEVERITY else ''}"
    if (folder / "diagnosis.json").is_file():
        return Diagnosis.load(folder)
    model = model_of(run)
    trunk = [block.depth for block in anatomy(model).trunk]  # without class attention, as in FAN's last layers
    images = validation_batches(run, count)
    found = diagnose(model, images, f"gaussian_noise/{severity}", layers=trunk, name=run.row.label)
    write_text(folder / "diagnosis.json", found.to_json())
    return found


def model_of(run: PlannedRun) -> nn.Module:
    """The trained model, or the model with the given weights, on a GPU if there is one."""
    return (_given_model(run) if run.weights else load(run.folder / "model")).to(default_device())


def validation_images(run: PlannedRun, count: int) -> Tensor:
    """Evenly spaced validation images of the run's data, uint8 (count, 3, size, size)."""
    return torch.cat(list(validation_batches(run, count)))


def validation_batches(run: PlannedRun, count: int | None, size: int = 32) -> Iterator[Tensor]:
    """Evenly spaced validation images, or all, in batches: uint8 (B, 3, size, size)."""
    assert run.recipe is not None
    data = run.recipe.data
    images: Any = open_masks(data, "val") if run.recipe.task == "segment" else open_images(data, "val")
    preprocessing = evaluation_preprocessing((data.size, data.size), data.interpolation, data.crop, keep=False)
    pick = list(evenly_spaced(len(images), count))
    for start in range(0, len(pick), size):
        some = pick[start : start + size]
        if isinstance(images, ArrayImages):
            yield images.pixels[some]
        elif run.recipe.task == "segment":
            yield torch.stack([centre_of(images.read(index)[0], data.size) for index in some])
        else:
            yield torch.stack([preprocessing.apply(images.read(index)[0]) for index in some])


def centre_of(picture: Any, size: int) -> Tensor:
    """The centre of a street scene or room, uint8 (3, size, size); a small picture is enlarged first."""
    pixels = to_tensor(picture)
    if min(pixels.shape[-2:]) < size:
        pixels = F.resize(pixels, [size], antialias=True)
    return F.center_crop(pixels, [size, size])


def validation_data(run: PlannedRun) -> Any:
    """The run's validation data as `evaluate` takes them."""
    assert run.recipe is not None
    data = run.recipe.data
    if data.source == "folder":
        return find_split(Path(data.root), "val", data.val_split)
    if data.source not in ("shapes", "cifar100"):
        return data.root
    if run.recipe.task != "classify":
        return "shapes"
    images = open_images(data, "val")
    if not isinstance(images, ArrayImages):
        raise VitfocusError(f"{data.root} holds no CIFAR-100 in the layout of torchvision or vitfocus.")
    return TensorDataset(images.pixels, images.labels)
