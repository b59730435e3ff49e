"""`evaluate`: a model, a suite, some data; scores with intervals and the fingerprint of how they came about."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitfocus.core.arguments import whole
from vitfocus.core.environment import device_name, versions
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.modules import eval_mode
from vitfocus.core.processes import Processes, join_processes
from vitfocus.data.shapes.dataset import shapes_named
from vitfocus.robustness.pixels import PRECISIONS, PixelModel, named_models
from vitfocus.robustness.plan import Plan, Samples
from vitfocus.robustness.request import Request
from vitfocus.robustness.results import Scores, flatten, load_scores
from vitfocus.robustness.runfolder import RunFolder, claimed
from vitfocus.robustness.runner import read_digests, run
from vitfocus.robustness.sources import digest_of
from vitfocus.robustness.suites import Context, find_suite, measured


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
    **options: Any,
) -> Scores:
    """Measure a model, or several on the same images in one pass, on a suite.

    `data` is a folder (the suite's published layout, or class folders of images), a Dataset of (picture or tensor,
    label), or batches of (images, labels). Tensors are uint8 or floats in [0, 1], (B, 3, H, W), **not normalised**: the
    model's own mean and std are applied here, after any corruption.

    `limit` takes that many images, evenly spread. `out` keeps the run in a folder: `results.json`, every image's
    outcome, and, while it runs, the parts that are done, with which `resume` goes on. The remaining `options` are the
    suite's own.

    >>> import timm
    >>> from vitfocus.data.shapes.dataset import Shapes
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=10)
    >>> scores = evaluate(model, "clean", Shapes("val", length=8, size=32), progress=False)
    >>> scores.images, 0 <= scores["top1"] <= 100
    (8, True)
    """
    chosen = find_suite(suite, options)
    if precision not in PRECISIONS:
        raise VitfocusError(f"There is no precision {precision!r}: {nearest(str(precision), PRECISIONS)}")
    seed = whole("seed", seed, low=0)
    batch_size = None if batch_size is None else whole("batch_size", batch_size, low=1)
    limit = None if limit is None else whole("limit", limit, low=1)
    workers = None if workers is None else whole("workers", workers, low=0)
    processes = join_processes(device)
    modules = named_models(model)
    if chosen.plan is None:
        if shapes_named(data, 1) is not None:  # drawn, not read
            for name in ("split", "source"):
                if options.get(name) not in (None, "", "val", "shapes"):
                    raise VitfocusError(f"{name}={options[name]} is about a folder, but Shapes is drawn: leave it out.")
        asked = Request(
            models=modules,
            data=data,
            suite=suite,
            processes=processes,
            batch_size=batch_size,
            limit=limit,
            seed=seed,
            out=out,
            resume=resume,
            workers=_workers(processes.device) if workers is None else workers,
            precision=precision,
            progress=progress and processes.first,
        )
        return measured(chosen, asked, {name: value for name, value in options.items() if value is not None})
    models = [PixelModel(name, module, precision, chosen.resizes) for name, module in modules.items()]
    # attacks need gradients, even where the caller is in inference mode
    with torch.inference_mode(False), eval_mode(*modules.values(), device=processes.device):
        context = Context(
            suite=suite,
            data=data,
            models=models,
            classes=_classes(models, processes.device),
            size=models[0].size,
            small=chosen.resizes,
            device=processes.device,
            seed=seed,
            limit=limit,
            workers=_workers(processes.device) if workers is None else workers,
            show=progress and processes.first,
            options={name: value for name, value in options.items() if value is not None},
        )
        plan = chosen.plan(context)
        fingerprint = _fingerprint(context, plan, precision, processes)
        lasting = {key: value for key, value in fingerprint.items() if key != "environment"}
        folder = claimed(out, lasting, resume, processes)
        size = batch_size or (256 if processes.device.type == "cuda" else 32)
        if folder is not None and folder.finished:
            return _stored(folder, plan, processes, size)
        title = f"{suite}, {', '.join(modules)}"
        samples, digests = run(plan, models, context.classes, processes, size, folder, progress, title)
    fingerprint["data"] |= {"digest": _joined(digests), "images": _images(samples)}
    summaries = {
        name: plan.summarise({cell: columns[name] for cell, columns in samples.items()}, seed) for name in modules
    }
    scores = Scores(suite, _images(samples), summaries, plan.notes, fingerprint, samples)
    if folder is not None and processes.first:
        folder.finish(scores.to_dict(), flatten(samples))
    return scores


def _stored(folder: RunFolder, plan: Plan, processes: Processes, batch_size: int) -> Scores:
    """A finished run's scores, once it is sure that they are about the same data."""
    scores = load_scores(folder.folder)
    if _joined(read_digests(plan, processes, batch_size)) != scores.fingerprint.get("data", {}).get("digest"):
        raise VitfocusError(f"{folder.folder} holds a finished run on other data: name another folder.")
    return scores


def _classes(models: Sequence[PixelModel], device: torch.device) -> int:
    """The number of classes, which the models of one pass share, as they share the images' size."""
    counts = {model.name: model.classes(model.size, device) for model in models}
    sizes = {model.name: model.size for model in models}
    for what, found in (("classes", counts), ("image sizes", sizes)):
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name}: {value}" for name, value in found.items())
            raise VitfocusError(
                f"Models in one pass see the same images, but differ in {what} ({listed}): evaluate them apart."
            )
    return next(iter(counts.values()))


def _fingerprint(context: Context, plan: Plan, precision: str, processes: Processes) -> dict[str, Any]:
    return {
        "suite": context.suite,
        "protocol": {**plan.protocol, "precision": precision},
        "cells": plan.cells,
        "data": {
            "digest": _joined({group.name: group.source.digest for group in plan.groups}),
            "limit": context.limit,
            "images": max((group.source.count or 0 for group in plan.groups), default=0) or None,
        },
        "libraries": versions(),
        "models": {model.name: model.describe() for model in context.models},
        "environment": {"device": device_name(processes.device), "processes": processes.world},
    }


def _joined(digests: Mapping[str, str | None]) -> str:
    """One digest of all groups' data, as far as it is known."""
    return digest_of(f"{name} {digest}" for name, digest in digests.items())


def _images(samples: Samples) -> int:
    """How many images a condition saw, at most."""
    return max(len(next(iter(columns.values()))) for models in samples.values() for columns in models.values())


def _workers(device: torch.device) -> int:
    """Processes that read images: enough for a GPU, none where they would compete with the model."""
    return min(16, os.cpu_count() or 1) if device.type == "cuda" else 0
