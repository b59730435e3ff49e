"""Detection and instance segmentation on COCO's layout: the average precision of boxes and masks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitfocus.core.errors import VitfocusError
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.detection.dataset import CocoDetections, DetectionDataset, ShapesDetections, mask_tools
from vitfocus.data.image_files import Normalise
from vitfocus.data.loader import Samples
from vitfocus.data.shapes.dataset import shapes_named
from vitfocus.robustness.batches import Collated, EvaluationBatch, ItemSource
from vitfocus.robustness.engine import Condition, EvaluationArguments, EvaluationPlan, Group, ModelResults, Outcome
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.run_folder import Columns
from vitfocus.robustness.suites import DataForm
from vitfocus.tasks.detection.evaluation import DetectionWriter, check_truth, coco_results, coco_scores
from vitfocus.treatments.save_load import task_of

_SHAPES = 1000  # scenes of "shapes" without a number


def detection(arguments: EvaluationArguments) -> EvaluationPlan:
    """COCO's average precision, in percent; nothing is random, so the seed has no effect.

    The data is a folder in COCO's layout, with `split` ("val2017"), the word "shapes", or a data set such as
    `CocoDetections`. With `out`, all detections are written there in the format of COCO's server; `pictures` is a
    folder for images with the detections.
    """
    mask_tools()  # raises an error if an extra is missing
    options = arguments.options
    arguments.refuse_unused(DataForm(drawn=shapes_named(arguments.data, 1) is not None))
    images = open_evaluation_images(arguments.data, options.split, arguments.models[0].model)
    for model in arguments.models:
        _check_classes(model.name, model.model, images)
    pick = evenly_spaced(len(images), arguments.limit)
    check_truth(_truth(images, pick))
    samples = Samples(images, read=images.image)
    source = ItemSource(samples, pick, _collate, digest=images.digest(), **arguments.reading)
    normalise = {model.name: Normalise(model.mean, model.std, arguments.device) for model in arguments.models}
    writers = {}
    for number, model in enumerate(arguments.models if options.pictures is not None else ()):
        ending = f"-{number}" if len(arguments.models) > 1 else ""
        writers[model.name] = DetectionWriter(f"{options.pictures}{ending}", images)
    condition = Condition("clean", partial(_detect, images, pick, normalise, writers))
    return EvaluationPlan(
        (Group("detection", source, (condition,)),),
        {"split": options.split},
        partial(_reduce, images, pick),
        ("COCO's average precision; crowds are ignored.",),
        batch_sizes=(4, 4),
        libraries=("faster_coco_eval",),
    )


def open_evaluation_images(data: Any, split: str, model: nn.Module) -> DetectionDataset:
    """A folder in COCO's layout, Shapes at the size of the model, or a data set as it is."""
    if (length := shapes_named(data, _SHAPES)) is not None:
        sides: Any = getattr(getattr(model, "transform", None), "min_size", (64,))
        return ShapesDetections("val", length, int(sides[-1]))
    if isinstance(data, str | Path):
        return CocoDetections(data, "val", split)
    if not hasattr(data, "truth"):
        raise VitfocusError(f"detection takes a folder in COCO's layout, not a {type(data).__name__}.")
    found: DetectionDataset = data
    return found


def _check_classes(name: str, model: nn.Module, images: DetectionDataset) -> None:
    """Refuse a model whose classes are not those of the data."""
    heads: Any = getattr(model, "roi_heads", None)
    if heads is None:
        raise VitfocusError(f"{name} is a {type(model).__name__}, but detection evaluates detectors (maskrcnn:NAME).")
    trained = task_of(model).get("classes")
    if trained and list(trained) != list(images.classes):
        differing = sorted(set(trained) ^ set(images.classes))[:3] or ["the same names in another order"]
        raise VitfocusError(f"{name} was trained on other classes than the data has: {', '.join(differing)}.")
    count = heads.box_predictor.cls_score.out_features - 1
    if count != len(images.classes):
        raise VitfocusError(f"{name} has {count} classes, and the data has {len(images.classes)}.")


def _collate(images: list[Tensor]) -> list[Collated]:
    """Images may have different sizes, so they are not stacked."""
    return [Collated(range(len(images)), images, None)]


def _detect(
    images: DetectionDataset,
    pick: Sequence[int],
    normalise: Mapping[str, Normalise],
    writers: Mapping[str, DetectionWriter],
    model: PixelModel,
    pixels: list[Tensor],
    batch: EvaluationBatch,
) -> Outcome:
    """The detections on each image in the format of COCO's results, as JSON."""
    with model.autocast(batch.positions.device):
        predictions = model.model([normalise[model.name](image) for image in pixels])
    lines = []
    for position, image, prediction in zip(batch.positions.tolist(), pixels, predictions, strict=True):
        index = pick[position]
        lines.append(json.dumps(coco_results([prediction], [images.image_id(index)], images.category_ids)))
        if model.name in writers:
            writers[model.name](index, image, prediction)
    return {"detections": lines}


def _truth(images: DetectionDataset, pick: Sequence[int]) -> dict[str, Any]:
    """The ground truth of some images."""
    truth, ids = images.truth(), {images.image_id(index) for index in pick}
    return {
        **truth,
        "images": [one for one in truth["images"] if one["id"] in ids],
        "annotations": [one for one in truth["annotations"] if one["image_id"] in ids],
    }


def _reduce(images: DetectionDataset, pick: Sequence[int], outcomes: Mapping[str, Columns], seed: int) -> ModelResults:
    found = [one for line in outcomes["clean"]["detections"] for one in json.loads(line)]
    scores = {name: 100 * value for name, value in coco_scores(_truth(images, pick), found).items()}
    return ModelResults({**scores, "cells": {"clean": scores}}, files={"detections": found})
