"""Finding the numbers of a trained row: in its results, its curve, a diagnosis, or an evaluation of its model.

What takes time is kept in the run's folder, under a name that says how it was measured, and not measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vitfocus.anatomy import anatomy
from vitfocus.attention.diagnosis import Diagnosis, diagnose
from vitfocus.core.environment import default_device
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.core.statistics import evenly_spaced, wilson_interval
from vitfocus.data.classification.dataset import ArrayImages
from vitfocus.data.classification.sources import open_images
from vitfocus.report.runs import read_metrics
from vitfocus.reproduce import counting
from vitfocus.reproduce.measures import MEASURES, Measure, Suite
from vitfocus.reproduce.planning import Places, Run
from vitfocus.robustness.evaluation import evaluate
from vitfocus.robustness.results import Scores, load_scores
from vitfocus.treatments.save_load import load

CORRUPTION = "gaussian_noise/3"
#: Images that a diagnosis looks at, by scale.
DIAGNOSED = {"smoke": 64, "cifar100": 256, "imagenet": 256}


@dataclass(frozen=True)
class Value:
    """A number, its 95 % interval's half-width where there is one, and how its heading differs at this scale."""

    number: float
    interval: float | None = None
    title: str = ""
    notes: tuple[str, ...] = ()
    images: int | None = None  # that it was measured on


@dataclass(frozen=True)
class Absent:
    """Why a number was not measured."""

    why: str


def measured(
    name: str, run: Run, results: Mapping[str, Any], places: Places, limit: int | None = None
) -> Value | Absent:
    """The number of a trained run. `limit` lowers the number of images of evaluations and diagnoses."""
    measure = MEASURES[name]
    if measure.source == "result":
        return _from_results(measure, results)
    if measure.source == "curve":
        return _from_curve(measure, curve(run))
    if measure.source == "diagnosis":
        return _from_diagnosis(measure, diagnosis_of(run, limit))
    if measure.source == "suite":
        suite = measure.suites.get(run.scale)
        if suite is None:
            return Absent(f"{measure.title} has no counterpart at the scale {run.scale}")
        return _from_suite(measure, suite, run, places, limit)
    raise AssertionError(f"{name} is not measured on a run")


def counted(name: str, run: Run, plain: Run | None) -> Value | Absent:
    """A number of the model itself; additions are to `plain`, the untreated model."""
    kind, _, added = name.partition("_")
    count, unit = (counting.parameters, 1e6) if kind == "parameters" else (counting.flops, 1e6 if added else 1e9)
    if not added:
        return Value(count(run) / unit)
    if plain is None:
        return Absent(f"{run.row.label} has no untreated row that anything could be added to")
    return Value((count(run) - count(plain)) / unit)


def curve(run: Run) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [row for row in read_metrics(run.folder) if "kind" in row and "epoch" in row]


def _from_curve(measure: Measure, rows: list[dict[str, Any]]) -> Value | Absent:
    """The mean over the last epoch."""
    logged = [row for row in rows if row["kind"] == "train" and isinstance(row.get(measure.key), int | float)]
    points = [(row["epoch"], row[measure.key]) for row in logged]
    if not points:
        return Absent("the run logged no such number")
    last = points[-1][0]
    return Value(_mean([value for epoch, value in points if epoch > last - 1]))


def _from_results(measure: Measure, results: Mapping[str, Any]) -> Value | Absent:
    last, images = results.get("last", {}), int(results.get("val_images", 0))
    if measure.key not in last:
        return Absent(f"the run's results hold no {measure.key}")
    share = float(last[measure.key])
    interval = None
    if measure.key in ("top1", "top5") and images:
        low, high = wilson_interval(share, images)
        interval = 50 * (high - low)
    return Value(measure.scale * share, interval, images=images or None)


def _from_diagnosis(measure: Measure, diagnosis: Diagnosis) -> Value | Absent:
    key, _, how = measure.key.partition("@")
    values = [row[key] for row in diagnosis.rows if key in row]
    if not values:
        return Absent(f"no layer has {measure.title}")
    half = len(values) // 2
    if how == "rise" and not half:
        return Absent("there is one layer alone")
    number = {
        "": lambda: _mean(values),
        "last": lambda: values[-1],
        "rise": lambda: _mean(values[half:]) - _mean(values[:half]),
    }[how]()
    return Value(measure.scale * number, images=diagnosis.images)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def diagnosis_of(run: Run, limit: int | None = None) -> Diagnosis:
    """The diagnosis of a run's model on validation images, clean and under noise; kept in the run's folder."""
    count = min(DIAGNOSED[run.scale], limit or DIAGNOSED[run.scale])
    folder = run.folder / f"diagnosis-{count}"
    if (folder / "diagnosis.json").is_file():
        return Diagnosis.load(folder)
    model = model_of(run)
    trunk = [
        block.depth for block in anatomy(model).trunk
    ]  # without layers that only read a class token, as FAN's last
    images = validation_images(run, count)
    found = diagnose(model, images, CORRUPTION, layers=trunk, batch_size=32, name=run.row.label)
    write_text(folder / "diagnosis.json", found.to_json())
    return found


def model_of(run: Run) -> nn.Module:
    """The trained model, on a GPU where there is one."""
    return load(run.folder / "model").to(default_device())


def validation_images(run: Run, count: int) -> Tensor:
    """So many validation images of the run's data, evenly picked, uint8 (count, 3, size, size)."""
    assert run.recipe is not None
    data = run.recipe.data
    if run.recipe.task == "segment":
        return _segmentation_images(data, count)
    images = open_images(data, "val")
    pick = list(evenly_spaced(len(images), count))
    if isinstance(images, ArrayImages):
        return images.pixels[pick]
    from timm.data import create_transform

    transform = create_transform(
        data.size, interpolation=data.interpolation, crop_pct=data.crop, use_prefetcher=True, is_training=False
    )
    return torch.stack([torch.as_tensor(transform(images.read(index)[0])) for index in pick])


def _segmentation_images(data: Any, count: int) -> Tensor:
    """Pictures of a segmentation set, cut to the training crop's size in their middle."""
    from torchvision.transforms.v2 import functional as F

    from vitfocus.data.segmentation.dataset import open_masks

    masks = open_masks(data, "val")
    pictures = []
    for index in evenly_spaced(len(masks), count):
        picture = F.pil_to_tensor(masks.read(index)[0])
        short = min(picture.shape[-2:])
        if short < data.size:
            picture = F.resize(picture, [data.size], antialias=True)
        pictures.append(F.center_crop(picture, [data.size, data.size]))
    return torch.stack(pictures)


def _from_suite(measure: Measure, suite: Suite, run: Run, places: Places, limit: int | None) -> Value | Absent:
    folder = places.find(suite.data) if suite.data else None
    if suite.data and folder is None and not suite.generated:
        return Absent(f"{measure.title} needs its images: --data {suite.data}=DIR")
    scores = _scores(suite, run, folder, limit)
    found: Any = next(iter(scores.models.values()))
    for step in suite.path:
        if not isinstance(found, Mapping) or step not in found:
            return Absent(f"the suite {suite.suite} gave no {' '.join(suite.path)}")
        holder, found = found, found[step]
    low, high = holder.get(f"{suite.path[-1]}_interval", (None, None))
    interval = None if low is None or high is None else (high - low) / 2
    return Value(float(found), interval, suite.title, scores.notes, scores.images)


def _scores(suite: Suite, run: Run, folder: Path | None, limit: int | None) -> Scores:
    images = min(suite.limit or limit or 0, limit or suite.limit or 0) or None
    options = dict(suite.options) | ({suite.folder_option: str(folder)} if suite.folder_option and folder else {})
    described = json.dumps([suite.suite, options, images, str(folder or "")], sort_keys=True)
    name = f"{suite.suite}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"
    out = run.folder / "evaluations" / name
    if (out / "results.json").is_file():
        return load_scores(out)
    data = folder if folder is not None and not suite.folder_option else _validation_data(run)
    models = {run.row.label: model_of(run)}
    return evaluate(models, suite.suite, data, limit=images, out=out, resume=True, **options)


def _validation_data(run: Run) -> Any:
    assert run.recipe is not None
    data = run.recipe.data
    if data.source not in ("shapes", "cifar100"):
        return data.root
    if run.recipe.task != "classify":
        return "shapes"
    images = open_images(data, "val")
    if not isinstance(images, ArrayImages):
        raise VitfocusError(f"{data.root} holds no CIFAR-100 as torchvision or vitfocus lay it out.")
    return TensorDataset(images.pixels, images.labels)
