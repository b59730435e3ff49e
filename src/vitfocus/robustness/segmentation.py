"""Segmentation suites: as it is, under the noise of Context Broadcasting's Table 9, Cityscapes-C, and ACDC's weather.

Every condition is scored by mIoU, mAcc and aAcc over a confusion matrix that is added up batch by batch. A random noise
is drawn anew for each repeat, and its mean is given with the 95 % interval of the repeats; a blur draws nothing and
runs once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitfocus.anatomy import unwrap
from vitfocus.anatomy.registry import family_of
from vitfocus.core.arguments import several, whole
from vitfocus.core.environment import versions
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.modules import eval_mode
from vitfocus.core.processes import Processes
from vitfocus.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt, fingerprint
from vitfocus.data.segmentation.classes import IGNORE
from vitfocus.data.segmentation.layouts import CONDITIONS
from vitfocus.robustness.noise import NOISES, REPEATS, add_noise, repeat_interval
from vitfocus.robustness.pixels import PixelModel
from vitfocus.robustness.plan import Summary
from vitfocus.robustness.request import Request
from vitfocus.robustness.results import Scores
from vitfocus.robustness.runfolder import RunFolder, keeping
from vitfocus.robustness.segmentation_data import Pictures, open_pictures
from vitfocus.robustness.sources import digest_of
from vitfocus.robustness.stored_corruptions import stored_corruptions
from vitfocus.tasks.segmentation.inference import Protocol, predict, write_pictures
from vitfocus.tasks.segmentation.metric import confusion, iou_by_class, scores_of
from vitfocus.treatments.save_load import task_of

ALL = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
Change = Callable[[Tensor, list[Any]], Tensor]
_SHOW_AFTER = 2.0  # seconds between lines of progress


def mean_iou(matrix: Tensor) -> float:
    """mIoU of a confusion matrix (truth by prediction), over the classes that occur in either, in percent.

    >>> mean_iou(torch.tensor([[3, 1, 0], [1, 3, 0], [0, 0, 0]]))
    60.0
    """
    return 100 * scores_of(matrix)["miou"]


class _Done(NamedTuple):
    """The pictures that an interrupted run had gone through, and their digest."""

    pictures: int = 0
    digest: str = ""


_OTHER_DATA = "The data is not what this run began with, so it cannot be resumed: name another folder."


@dataclass
class Run:
    """One call of a suite: the models behind their normalisation, and how pictures are read and tested."""

    suite: str
    models: list[PixelModel]
    protocol: Protocol
    processes: Processes
    seed: int
    ignore: int
    progress: bool
    names: tuple[str, ...] = ()
    pictures: str | None = None
    source: str = ""
    folder: RunFolder | None = None
    digests: list[str] = field(default_factory=list)
    images: int = 0
    passes: int = 0
    _began: float = field(default_factory=time.monotonic)

    def matrices(self, data: Pictures, conditions: Mapping[str, Change | None]) -> dict[str, dict[str, Tensor]]:
        """Every model's confusion matrix in every condition, over the data once: model -> condition -> matrix.

        What an interrupted run has counted of this pass is read over, and not measured again. Processes take turns with
        the batches; each reads all of them, because the digest is of all.
        """
        self.passes += 1
        before, found = self._kept(conditions)
        reached = before

        def keep() -> None:
            if reached != before:
                self._keep(reached, found)

        with keeping(keep) as now_and_then:
            for number, (images, masks, ids) in enumerate(data):
                if data.count <= before.pictures:
                    if data.count == before.pictures and data.digest != before.digest:
                        raise VitfocusError(_OTHER_DATA)
                    continue
                if data.count - len(images) < before.pictures:
                    raise VitfocusError(_OTHER_DATA)
                if number % self.processes.world != self.processes.rank:
                    continue
                for model, counted in self._counted(images, masks, ids, conditions).items():
                    found[model] = {name: found[model].get(name, 0) + matrix for name, matrix in counted.items()}
                reached = _Done(data.count, data.digest)
                self._say(data)
                now_and_then()
        if data.count < before.pictures:
            raise VitfocusError(_OTHER_DATA)
        self.digests.append(data.digest)
        self.images = data.count
        return self._together(found)

    def _together(self, found: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """What all processes counted, added up; one may have had no batch."""
        whole: dict[str, dict[str, Tensor]] = {one.name: {} for one in self.models}
        for part in self.processes.gather(found):
            for model, counted in part.items():
                whole[model] |= {name: whole[model].get(name, 0) + matrix for name, matrix in counted.items()}
        return whole

    @torch.no_grad()
    def _counted(
        self, images: Tensor, masks: Tensor, ids: list[Any], conditions: Mapping[str, Change | None]
    ) -> dict[str, dict[str, Tensor]]:
        """The confusion matrices of one batch."""
        device = self.processes.device
        images, masks = images.to(device), masks.to(device)
        found: dict[str, dict[str, Tensor]] = {one.name: {} for one in self.models}
        for name, change in conditions.items():
            changed = images if change is None else change(images, ids)
            for place, one in enumerate(self.models):
                scores = self._scores(one, changed, masks.shape[-2:])
                found[one.name][name] = self._count(one, masks, scores)
                if self.pictures and name and change is None and place == 0:
                    self._write(ids, images, scores, masks)
        return found

    def _keep(self, reached: _Done, found: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write down what was counted so far of the pass."""
        if self.folder is not None:
            counted = {str(place): torch.stack(list(by.values())).numpy() for place, by in enumerate(found.values())}
            state = {"pictures": np.array(reached.pictures), "digest": np.array(reached.digest), **counted}
            self.folder.write_state(self._part, state)

    def _kept(self, conditions: Iterable[str]) -> tuple[_Done, dict[str, dict[str, Tensor]]]:
        """How many pictures of the pass are done, and what was counted over them."""
        state = self.folder.read_state(self._part) if self.folder is not None else None
        if state is None:
            return _Done(), {one.name: {} for one in self.models}
        counted = (torch.from_numpy(state[str(place)]) for place in range(len(self.models)))
        found = {
            one.name: dict(zip(conditions, matrices, strict=True))
            for one, matrices in zip(self.models, counted, strict=True)
        }
        return _Done(int(state["pictures"]), str(state["digest"])), found

    @property
    def _part(self) -> str:
        """What this process's share of the pass is kept as."""
        return f"pass{self.passes}-{self.processes.rank}of{self.processes.world}"

    def _scores(self, model: PixelModel, images: Tensor, size: Sequence[int]) -> Tensor:
        try:
            return predict(model, images, self.protocol, size)
        except (VitfocusError, torch.OutOfMemoryError):
            raise
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            height, width = images.shape[-2:]
            raise VitfocusError(f"{model.name} does not take pictures of {height}x{width} pixels: {reason}") from error

    def _count(self, model: PixelModel, masks: Tensor, scores: Tensor) -> Tensor:
        try:
            return confusion(masks, scores.argmax(1), scores.shape[1], self.ignore).cpu()
        except VitfocusError as error:
            raise VitfocusError(str(error).replace("the model", model.name)) from None

    def _write(self, ids: list[Any], images: Tensor, scores: Tensor, masks: Tensor) -> None:
        assert self.pictures is not None
        for name, image, guess, truth in zip(ids, images, scores.argmax(1), masks, strict=True):
            plain = name.rpartition(".")[0].replace("/", "_") if isinstance(name, str) else f"{name:05d}"
            write_pictures(self.pictures, plain, image, guess, truth, scores.shape[1], self.source)

    def _say(self, data: Pictures) -> None:
        if self.progress and time.monotonic() - self._began > _SHOW_AFTER:
            self._began = time.monotonic()
            total = f" of {data.total}" if data.total else ""
            print(f"{self.suite}: {data.count}{total} pictures", file=sys.stderr, flush=True)


def measure(asked: Request, **options: Any) -> Scores:
    """Run one of the suites below on one model or several; the first model's card says what the options leave open."""
    suite, device = asked.suite, asked.device
    card = task_of(asked.first_model)
    test: dict[str, Any] = {
        **card.get("test", {}),
        **{key: options[key] for key in ("window", "stride", "flip") if key in options},
    }
    short_side = options.get("short_side", test.pop("short_side", 0))
    if "window" in options and "stride" not in options:
        test["stride"] = 0
    ignore = options.get("ignore", IGNORE)
    for name, module in asked.models.items():
        _refuse_other_tasks(name, module, suite)
    wrapped = [PixelModel(name, module, asked.precision) for name, module in asked.models.items()]
    protocol = Protocol(**test, short_side=short_side)

    def opened(condition: str = "", where: Any = None) -> Pictures:
        return open_pictures(
            suite,
            asked.data if where is None else where,
            source="acdc" if suite == "acdc" else options.get("source", ""),
            trained_on=str(card.get("source", "")),
            split=options.get("split", ""),
            size=int(card.get("size", 0)),
            condition=condition,
            limit=asked.limit,
            batch_size=asked.batch_size or (8 if short_side or device.type == "cuda" else 4),
            workers=asked.workers,
            short_side=short_side,
            ignore=ignore,
        )

    pictures = opened()
    drawings = options.get("pictures")
    run = Run(suite, wrapped, protocol, asked.processes, asked.seed, ignore, asked.progress, pictures.classes, drawings)
    run.source = pictures.source or str(card.get("source", ""))
    fingerprint: dict[str, Any] = {
        "suite": suite,
        "protocol": {
            "seed": asked.seed,
            "ignore": ignore,
            "precision": asked.precision,
            "test": vars(protocol),
        },
        "libraries": versions(),
        "models": {one.name: one.describe() for one in wrapped},
    }
    given = {key: str(value) for key, value in options.items()}
    begun = fingerprint | {"options": given, "data": _how_read(pictures, asked.processes)}
    with asked.claimed(begun) as run.folder:
        if (scores := asked.stored(run.folder)) is not None:
            return _checked(scores, opened(CONDITIONS[0]) if suite == "acdc" else pictures, asked.out)
        with torch.inference_mode(False), eval_mode(*asked.models.values(), device=device):
            summaries, notes, more = _SUITES[suite](run, opened, options)
    fingerprint["protocol"] |= more
    fingerprint["data"] = {
        "digest": digest_of(sorted(set(run.digests))),
        "first_pass": run.digests[0],
        "limit": asked.limit,
        "images": run.images,
    }
    return asked.kept(Scores(suite, run.images, summaries, tuple(notes), fingerprint))


def _refuse_other_tasks(name: str, model: nn.Module, suite: str) -> None:
    """Refuse a model that is no segmenter: trained for another task, or a bare transformer, which classifies."""
    task = task_of(model).get("task", "segment")
    cls = type(unwrap(model))
    # A class of one's own may derive from a transformer and segment.
    bare = family_of(unwrap(model)) is not None and cls.__module__.partition(".")[0] in ("timm", "torchvision")
    if task != "segment" or bare:
        kind = f"a {cls.__name__}" if bare else f"a model of the task {task}"
        raise VitfocusError(f"{name} is {kind}, and {suite} measures segmenters (upernet:NAME, segformer:NAME).")


def _checked(scores: Scores, pictures: Pictures, out: Any) -> Scores:
    """A finished run's scores, once its first pass is known to have read these pictures."""
    for _ in pictures:
        pass
    if pictures.digest != scores.fingerprint["data"].get("first_pass"):
        raise VitfocusError(f"{out} holds a finished run on other data: name another folder.")
    return scores


def _how_read(pictures: Pictures, processes: Processes) -> dict[str, Any]:
    """What decides which pictures come together in which batch, and who takes it."""
    return {"limit": pictures.limit, "batch_size": pictures.batch_size, "processes": processes.world}


Outcome = tuple[dict[str, Summary], Sequence[str], dict[str, Any]]


def _plain(run: Run, opened: Callable[..., Pictures], options: Mapping[str, Any]) -> Outcome:
    """The pictures as they are, with every class's IoU."""
    found = run.matrices(opened(), {"clean": None})
    return {name: _clean(matrices["clean"], run.names) for name, matrices in found.items()}, (), {}


def _noise(run: Run, opened: Callable[..., Pictures], options: Mapping[str, Any]) -> Outcome:
    """Five kinds of noise, the random ones repeated."""
    repeats = options.get("repeats", REPEATS)
    if not isinstance(repeats, int) or repeats < 2:
        raise VitfocusError(f"{run.suite} needs repeats of at least 2 for an interval, not {repeats!r}.")
    repeat_interval([0.0] * repeats)  # refuses a number it has no interval for, before anything is measured
    pictures = opened()
    measured: dict[str, dict[str, list[float]]] = {one.name: {} for one in run.models}
    first: dict[str, dict[str, Tensor]] = {}
    for repeat in range(repeats):
        cells: dict[str, Change | None] = {"clean": None} if repeat == 0 else {}
        for noise in NOISES:
            if repeat == 0 or not noise.startswith("blur"):
                cells[noise] = _noisy(noise, run.seed + repeat)
        found = run.matrices(pictures, cells)
        first = first or found
        for name, matrices in found.items():
            for cell, matrix in matrices.items():
                measured[name].setdefault(cell, []).append(mean_iou(matrix))
    note = f"Random noises: mean and 95 % interval of {repeats} repeats; clean and blur draw nothing and ran once."
    summaries = {
        name: {**_clean(first[name]["clean"], run.names), "cells": {cell: _repeated(v) for cell, v in values.items()}}
        for name, values in measured.items()
    }
    return summaries, (note,), {"repeats": repeats}


def _corrupted(run: Run, opened: Callable[..., Pictures], options: Mapping[str, Any]) -> Outcome:
    """Corruptions of any-size pictures at five severities: generated, or read where the folder holds them."""
    names = several("corruptions", options.get("corruptions", ALL))
    for name in names:
        if name not in ALL:
            raise VitfocusError(f"There is no corruption {name!r}: {nearest(str(name), ALL)}")
    severities = [whole("severity", s, 1, 5) for s in several("severities", options.get("severities", range(1, 6)))]
    clean, frost = opened(), options.get("frost")
    stored = stored_corruptions(options["corrupted_data"], clean.data) if "corrupted_data" in options else None
    if stored is None:
        cells: dict[str, Change | None] = {"clean": None}
        cells |= {f"{n}/{s}": _corruption(n, s, run.seed, frost) for n in names for s in severities}
        found = run.matrices(clean, cells)
        how: dict[str, Any] = {"corruptions": fingerprint("any", frost)}
        notes = ["Corruptions were generated here, by the any-size flavour."]
    else:
        missing = [f"{name} at severity {s}" for name in names for s in severities if (name, s) not in stored]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise VitfocusError(
                f"{options['corrupted_data']} holds no pictures of {', '.join(missing[:3])}{more}; name those it has "
                "with --corruptions and --severities."
            )
        found = run.matrices(clean, {"clean": None})
        for name in names:
            for severity in severities:
                corrupted = replace(clean, data=stored[name, severity])
                for model, matrices in run.matrices(corrupted, {"": None}).items():
                    found[model][f"{name}/{severity}"] = matrices[""]
        how, notes = {"corruptions": "stored files"}, ["Corrupted pictures were read from files."]
    return {m: _by_corruption(matrices, names, severities, run.names) for m, matrices in found.items()}, notes, how


def _weather(run: Run, opened: Callable[..., Pictures], options: Mapping[str, Any]) -> Outcome:
    """ACDC's four conditions, each and together."""
    found: dict[str, dict[str, Tensor]] = {one.name: {} for one in run.models}
    counts = []
    for condition in CONDITIONS:
        for name, matrices in run.matrices(opened(condition), {condition: None}).items():
            found[name] |= matrices
        counts.append(run.images)
    run.images = sum(counts)
    summaries = {}
    for name, matrices in found.items():
        total = torch.stack(list(matrices.values())).sum(0)
        cells = {cell: _percent(matrix) for cell, matrix in (*matrices.items(), ("all", total))}
        summaries[name] = {**_clean(total, run.names), "cells": cells}
    return summaries, ("Together: one confusion matrix over all four conditions.",), {"conditions": list(CONDITIONS)}


_SUITES: dict[str, Callable[[Run, Callable[..., Pictures], Mapping[str, Any]], Outcome]] = {
    "segmentation": _plain,
    "segmentation-noise": _noise,
    "cityscapes-c": _corrupted,
    "acdc": _weather,
}


def _noisy(name: str, seed: int) -> Change:
    return lambda images, ids: add_noise(images, name, seed=seed, ids=ids)


def _corruption(name: str, severity: int, seed: int, frost: str | None) -> Change:
    return lambda images, ids: corrupt(images, name, severity, seed=seed, ids=ids, flavour="any", frost=frost)


def _percent(matrix: Tensor) -> dict[str, float]:
    return {key: 100 * value for key, value in scores_of(matrix).items()}


def _clean(matrix: Tensor, names: Sequence[str]) -> Summary:
    scores = _percent(matrix)
    labels = [names[k] if k < len(names) else f"class {k}" for k in range(len(matrix))]
    classes = {name: None if v is None else 100 * v for name, v in iou_by_class(matrix, labels).items()}
    return {**scores, "classes": classes, "cells": {"clean": scores}}


def _repeated(values: Sequence[float]) -> Summary:
    if len(values) == 1:
        return {"miou": values[0]}
    mean, half = repeat_interval(values)
    return {"miou": mean, "miou_interval": [mean - half, mean + half], "repeats": list(values)}


def _by_corruption(
    matrices: Mapping[str, Tensor], names: Sequence[str], severities: Sequence[int], classes: Sequence[str]
) -> Summary:
    cells: dict[str, Summary] = {"clean": _percent(matrices["clean"])}
    for name in names:
        by_severity = {str(s): mean_iou(matrices[f"{name}/{s}"]) for s in severities}
        cells[name] = {"miou": sum(by_severity.values()) / len(by_severity), "severities": by_severity}
    mean = sum(cells[name]["miou"] for name in names) / len(names)
    return {**_clean(matrices["clean"], classes), "miou_corrupted": mean, "cells": cells}
