"""Detection and instance segmentation on COCO's layout, scored as COCO scores: average precision of boxes and masks."""

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
from vitfocus.robustness.engine import Condition, EvaluationArguments, EvaluationPlan, Group, Outcome, Reduced
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.run_folder import Columns
from vitfocus.robustness.sources import Collated, EvaluationBatch, ItemSource
from vitfocus.robustness.suites.options import DataForm
from vitfocus.tasks.detection.evaluation import DetectionWriter, coco_results, coco_scores
from vitfocus.treatments.save_load import task_of

_SHAPES = 1000  # pictures, unless the data names a number


def detection(arguments: EvaluationArguments) -> EvaluationPlan:
    """COCO's average precisions, in percent; nothing is drawn at random, so the seed does not matter.

    The data is a folder in COCO's layout, of which `split` ("val2017") is taken, the word "shapes", or a set such as
    `CocoDetections`. With `out`, everything that was found is written there as the official server takes it; `pictures`
    is a folder for drawings of what was found.
    """
    mask_tools()  # says what to install where it is missing
    options = arguments.options
    arguments.refuse_unused(DataForm(drawn=shapes_named(arguments.data, 1) is not None))
    images = open_detections(arguments.data, options.split, arguments.models[0].model)
    for model in arguments.models:
        _check_classes(model.name, model.model, images)
    pick = evenly_spaced(len(images), arguments.limit)
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
        ("COCO's average precision; crowds do not count.",),
        batch_sizes=(4, 4),
        libraries=("faster_coco_eval",),
    )


def open_detections(data: Any, split: str, model: nn.Module) -> DetectionDataset:
    """A folder in COCO's layout, Shapes at the size that the model takes, or a set as it is."""
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
    """Refuse a model whose labels are not the data's."""
    if not hasattr(model, "roi_heads"):
        raise VitfocusError(f"{name} is a {type(model).__name__}, and detection measures detectors (maskrcnn:NAME).")
    known = task_of(model).get("classes")
    if known and list(known) != list(images.classes):
        odd = sorted(set(known) ^ set(images.classes))[:3]
        raise VitfocusError(f"{name} was trained on other classes than the data's: {', '.join(odd)}.")
    predictor: Any = model.roi_heads
    count = predictor.box_predictor.cls_score.out_features - 1
    if count != len(images.classes):
        raise VitfocusError(f"{name} knows {count} classes, and the data has {len(images.classes)}.")


def _collate(images: list[Tensor]) -> list[Collated]:
    """Images of different sizes stay apart."""
    return [Collated(range(len(images)), images, None)]


def _detect(
    images: DetectionDataset,
    pick: Sequence[int],
    normalise: Mapping[str, Normalise],
    writers: Mapping[str, DetectionWriter],
    model: PixelModel,
    pictures: list[Tensor],
    batch: EvaluationBatch,
) -> Outcome:
    """Everything that was found on each picture, as COCO's results have it, in json."""
    with model.autocast(batch.positions.device):
        findings = model.model([normalise[model.name](picture) for picture in pictures])
    lines = []
    for position, picture, finding in zip(batch.positions.tolist(), pictures, findings, strict=True):
        index = pick[position]
        lines.append(json.dumps(coco_results([finding], [images.image_id(index)], images.category_ids)))
        if model.name in writers:
            writers[model.name](index, picture, finding)
    return {"detections": lines}


def _reduce(images: DetectionDataset, pick: Sequence[int], outcomes: Mapping[str, Columns], seed: int) -> Reduced:
    found = [one for line in outcomes["clean"]["detections"] for one in json.loads(line)]
    truth, ids = images.truth(), {images.image_id(index) for index in pick}
    truth = {
        **truth,
        "images": [one for one in truth["images"] if one["id"] in ids],
        "annotations": [one for one in truth["annotations"] if one["image_id"] in ids],
    }
    scores = {name: 100 * value for name, value in coco_scores(truth, found).items()}
    return Reduced({**scores, "cells": {"clean": scores}}, files={"detections": found})
