"""Detection and instance segmentation on COCO's layout, scored as COCO scores: average precision of boxes and masks."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitfocus.core.environment import versions
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.core.modules import eval_mode
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.detection.dataset import CocoDetections, Detections, ShapesDetections, mask_tools
from vitfocus.data.shapes.dataset import shapes_named
from vitfocus.robustness.pixels import PixelModel
from vitfocus.robustness.plan import Summary
from vitfocus.robustness.request import Request
from vitfocus.robustness.results import Scores
from vitfocus.robustness.turns import Measure, in_turns
from vitfocus.tasks.detection.inference import PictureWriter, Searcher
from vitfocus.tasks.detection.metric import coco_scores
from vitfocus.treatments.save_load import task_of

NAME = "detection"
_SHAPES = 1000  # pictures, unless there is a limit


def measure(asked: Request, split: str = "", pictures: str | Path | None = None) -> Scores:
    """COCO's average precisions, in percent, of one detector or several; nothing is drawn, so the seed does not matter.

    The data is a folder in COCO's layout, of which `split` ("val2017") is taken, the word "shapes", or a set such as
    `CocoDetections`. With `out`, all that was found is written there too, as the official server takes it; `pictures`
    is a folder for drawings of what was found.
    """
    mask_tools()  # says what to install where it is missing
    models = asked.models
    images = open_set(asked.data, split, asked.first_model)
    places = evenly_spaced(len(images), asked.limit)
    size = asked.batch_size or 4
    fingerprint: dict[str, Any] = {
        "suite": asked.suite,
        "protocol": {"precision": asked.precision, "split": split},
        "data": {"digest": images.digest(), "limit": asked.limit, "images": len(places)},
        "libraries": versions("faster_coco_eval"),
        "models": {name: PixelModel(name, model).describe() for name, model in models.items()},
    }
    begun = fingerprint | {"options": {"batch_size": size, "pictures": str(pictures or "")}}
    summaries: dict[str, Summary] = {}
    with asked.claimed(begun) as folder:
        if (stored := asked.stored(folder)) is not None:
            return stored
        for name, model in models.items():
            check_classes(name, model, images)
        truth = _about(images.truth(), {images.image_id(place) for place in places})
        endings = {name: f"-{number}" if len(models) > 1 else "" for number, name in enumerate(models)}
        searches = {
            name: _search(asked, model, images, size, f"{pictures}{endings[name]}" if pictures else None)
            for name, model in models.items()
        }
        turns = in_turns(asked, folder, places, size, searches)
        with torch.inference_mode(False), eval_mode(*models.values(), device=asked.device), closing(turns):
            for name, by_picture in turns:
                found = [one for some in by_picture for one in some]
                scores = asked.processes.agree(coco_scores(truth, found) if asked.processes.first else {})
                scores = {key: 100 * value for key, value in scores.items()}
                summaries[name] = {**scores, "cells": {"clean": scores}}
                if folder is not None and asked.processes.first:
                    write_text(folder.folder / f"detections{endings[name]}.json", json.dumps(found) + "\n")
    note = "COCO's average precision; crowds do not count."
    return asked.kept(Scores(asked.suite, len(places), summaries, (note,), fingerprint))


def _search(asked: Request, model: nn.Module, images: Detections, size: int, pictures: str | None) -> Measure:
    """What a detector finds on some pictures, drawn where a folder is named for that."""
    search = Searcher(images, asked.device, size, asked.workers)
    if pictures is not None:
        search.watch = PictureWriter(pictures, images)
    return lambda places: search.each(model, places, asked.autocast)


def open_set(data: Any, split: str, model: nn.Module) -> Detections:
    """A folder in COCO's layout, Shapes at the size that the model takes, or a set as it is."""
    if (length := shapes_named(data, _SHAPES)) is not None:
        sides: Any = getattr(getattr(model, "transform", None), "min_size", (64,))
        return ShapesDetections("val", length, int(sides[-1]))
    if isinstance(data, str | Path):
        return CocoDetections(data, "val", split)
    if not hasattr(data, "truth"):
        raise VitfocusError(f"{NAME} takes a folder in COCO's layout, not a {type(data).__name__}.")
    found: Detections = data
    return found


def _about(truth: dict[str, Any], numbers: set[int]) -> dict[str, Any]:
    """The part of COCO's json that is about these pictures."""
    images = [one for one in truth["images"] if one["id"] in numbers]
    return {**truth, "images": images, "annotations": [a for a in truth["annotations"] if a["image_id"] in numbers]}


def check_classes(name: str, model: nn.Module, images: Detections) -> None:
    """Refuse a model whose labels are not the data's."""
    if not hasattr(model, "roi_heads"):
        raise VitfocusError(f"{name} is a {type(model).__name__}, and {NAME} measures detectors (maskrcnn:NAME).")
    known = task_of(model).get("classes")
    if known and list(known) != list(images.classes):
        odd = sorted(set(known) ^ set(images.classes))[:3]
        raise VitfocusError(f"{name} was trained on other classes than the data's: {', '.join(odd)}.")
    predictor: Any = model.roi_heads
    count = predictor.box_predictor.cls_score.out_features - 1
    if count != len(images.classes):
        raise VitfocusError(f"{name} knows {count} classes, and the data has {len(images.classes)}.")
