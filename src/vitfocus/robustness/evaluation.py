"""`evaluate`: the scores of models on a suite, with intervals and a fingerprint of the protocol."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitfocus.core.arguments import check_int, checked
from vitfocus.core.environment import device_name, join_processes, versions
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.files import write_text
from vitfocus.core.modules import eval_mode
from vitfocus.data.image_files import digest_of
from vitfocus.data.shapes.dataset import Shapes, shapes_named
from vitfocus.robustness.batches import labelled_images
from vitfocus.robustness.engine import EvaluationArguments, EvaluationPlan, read_digests, run_plan
from vitfocus.robustness.pixel_model import PRECISIONS, PixelModel, models_by_name
from vitfocus.robustness.results import Scores, flatten, load_scores
from vitfocus.robustness.run_folder import RunFolder, claim_folder
from vitfocus.robustness.suites import find_suite

#: The number of scenes of "shapes" without a number.
_SHAPES = 2000


@checked
def evaluate(
    model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
    suite: str,
    data: Any,
    *,
    device: str | torch.device | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    precision: str = "float32",
    progress: bool = True,
    normalised: bool = False,
    **options: Any,
) -> Scores:
    """Measure a model, or several on the same images in one pass, on a suite.

    Args:
        model: A model, a list of models, or models by name.
        suite: The suite's name; `vitfocus evaluate --suite list` prints all.
        data: A folder (the suite's published layout, or class folders of images), "shapes" or "shapes:N", (images,
            labels), a Dataset or list of (image, label), or batches of (images, labels). Images are paths, PIL images,
            arrays (H, W, 3), or tensors (3, H, W) in uint8 or floats in [0, 1]; `evaluate` applies the mean and std of
            the model, after any corruption.
        device: Where to run; a GPU if there is one.
        batch_size: Images per batch; the default depends on the suite and the device.
        limit: At most this many images, evenly spaced.
        seed: Seed of all random draws.
        out: A folder for the run: `results.json`, the outcome of every image and, during the run, partial results. One
            that holds other files and no run is refused.
        resume: Measure only what is missing in `out`, with any batch size and number of processes.
        workers: Number of worker processes that read images.
        precision: "float32", "bfloat16" or "float16".
        progress: Whether to show progress on stderr.
        normalised: Whether the images are tensors that were already normalised for the model, which is undone first.
        options: Options of the suite.

    Returns:
        The scores of every model; see `Scores`.

    Raises:
        VitfocusError: If the suite, an option, the data, a model or the folder `out` is not valid.

    Example:
        >>> import timm
        >>> from vitfocus.data.shapes.dataset import Shapes
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=10)
        >>> scores = evaluate(model, "clean", Shapes("val", length=8, size=32), progress=False)
        >>> scores.images, 0 <= scores["top1"] <= 100
        (8, True)
    """
    chosen, typed_options = find_suite(suite, options)
    if precision not in PRECISIONS:
        raise VitfocusError(f"There is no precision {precision!r}: {nearest(str(precision), PRECISIONS)}")
    if resume and out is None:
        raise VitfocusError("Resuming needs the folder of the run: name it with the option out.")
    processes = join_processes(device)
    limit = None if limit is None else check_int("limit", limit, low=1)
    modules = models_by_name(model)
    models = tuple(PixelModel(name, module, precision, chosen.small_images) for name, module in modules.items())
    if normalised and (chosen.task != "classify" or isinstance(data, str | os.PathLike)):
        raise VitfocusError("normalised=True is for classifiers and data given as tensors: leave it out.")
    if chosen.task == "classify":  # suites of other tasks open their data themselves
        length = shapes_named(data, limit or _SHAPES) if isinstance(data, str) else None
        size = (32, 32) if chosen.small_images else models[0].size
        data = (labelled_images(data) or data) if length is None else Shapes("val", length=length, size=size)
    if workers is None:  # enough for a GPU, none where they would compete with the model
        workers = min(16, os.cpu_count() or 1) if processes.device.type == "cuda" else 0
    batch_size = None if batch_size is None else check_int("batch_size", batch_size, low=1)
    numbers = (batch_size, limit, check_int("seed", seed, low=0), check_int("workers", workers, low=0))
    shown = progress and processes.first
    arguments = EvaluationArguments(chosen, typed_options, models, data, processes, *numbers, shown, out, normalised)
    # Attacks need gradients, even if the caller is in inference mode.
    with torch.inference_mode(False), eval_mode(*modules.values(), device=processes.device):
        module, _, function = chosen.plan.partition(":")
        plan: EvaluationPlan = getattr(importlib.import_module(f"vitfocus.robustness.suites.{module}"), function)(
            arguments
        )
        fingerprint = _fingerprint(arguments, plan, precision)
        lasting = {key: value for key, value in fingerprint.items() if key != "environment"}
        if out is None:
            return _measure(arguments, plan, fingerprint, None)
        with processes.lock(out), claim_folder(out, lasting, resume, processes) as folder:
            return _measure(arguments, plan, fingerprint, folder)


def _measure(
    arguments: EvaluationArguments, plan: EvaluationPlan, fingerprint: dict[str, Any], folder: RunFolder | None
) -> Scores:
    """Run the plan and write the results, or read those of a finished run."""
    processes = arguments.processes
    size = arguments.batch_size or plan.batch_sizes[processes.device.type == "cuda"]
    if folder is not None and processes.broadcast(folder.finished):
        stored = load_scores(folder.folder)
        if _combined(read_digests(plan, processes, size)) != stored.fingerprint.get("data", {}).get("digest"):
            raise VitfocusError(f"{folder.folder} holds a finished run on other data: choose another folder.")
        return stored
    models = [model.resizing() for model in arguments.models] if plan.resize else arguments.models
    title = f"{arguments.suite.name}, {', '.join(model.name for model in models)}"
    outcomes, digests, images = run_plan(plan, models, processes, size, folder, arguments.progress, title)
    fingerprint["data"] |= {"digest": _combined(digests), "images": images}
    reduced = {
        model.name: plan.reduce({name: columns[model.name] for name, columns in outcomes.items()}, arguments.seed)
        for model in models
    }
    samples = {
        condition: {name: one.samples[condition] for name, one in reduced.items()}
        for condition in next(iter(reduced.values())).samples
    }
    summaries = {name: one.summary for name, one in reduced.items()}
    scores = Scores(arguments.suite.name, images, summaries, plan.notes, fingerprint, samples)
    if folder is not None and processes.first:
        for number, one in enumerate(reduced.values()):
            for name, content in one.files.items():
                file = f"{name}-{number}.json" if len(reduced) > 1 else f"{name}.json"
                write_text(folder.folder / file, json.dumps(content) + "\n")
        folder.finish(scores.to_dict(), flatten(samples))
    return scores


def _fingerprint(arguments: EvaluationArguments, plan: EvaluationPlan, precision: str) -> dict[str, Any]:
    return {
        "suite": arguments.suite.name,
        "protocol": {**plan.protocol, "precision": precision},
        "cells": plan.conditions,
        "data": {
            "digest": _combined({group.name: group.source.digest for group in plan.groups}),
            "limit": arguments.limit,
            "images": plan.total(group.source.count or 0 for group in plan.groups) or None,
        },
        "libraries": versions(*plan.libraries),
        "models": {model.name: model.describe() for model in arguments.models},
        "environment": {"device": device_name(arguments.device, threads=False), "processes": arguments.processes.world},
    }


def _combined(digests: Mapping[str, str | None]) -> str:
    """One digest of the data of all groups."""
    return digest_of(f"{name} {digest}" for name, digest in digests.items())
