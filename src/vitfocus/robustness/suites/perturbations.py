"""ImageNet-P: how often predictions flip along a sequence of frames, from videos or generated on the fly."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitfocus.core.arguments import several, whole
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.image_files import ClassFolders, Entry, list_classes
from vitfocus.robustness.classification import (
    classification_plan,
    num_classes,
    open_images,
    top_classes,
)
from vitfocus.robustness.engine import Condition, EvaluationArguments, Group, Outcome, Plan
from vitfocus.robustness.metrics import flip_share, perturbation_summary, top5_distance
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.sequences import NOISE, PERTURBATIONS, VERSION, frame_count, frames, has_float64
from vitfocus.robustness.sources import EvaluationBatch, ImageSamples, ItemSource, collate_images, digest_of
from vitfocus.robustness.suites.options import DataForm, refuse_unused

_VIDEOS = frozenset({".mp4", ".avi", ".mkv"})
_FRAMES_AT_ONCE = 128


def imagenet_p(arguments: EvaluationArguments) -> Plan:
    """ImageNet-P, in whichever form the data is."""
    options = arguments.options
    names = several("perturbations", PERTURBATIONS if options.perturbations is None else options.perturbations)
    for name in names:
        if name not in PERTURBATIONS:
            raise VitfocusError(f"There is no perturbation {name!r}: {nearest(str(name), PERTURBATIONS)}")
    difficulty, reference = whole("difficulty", options.difficulty, 1, 3), options.t5d_reference
    if reference is not None and set(PERTURBATIONS) - set(reference):
        raise VitfocusError(f"t5d_reference lacks {', '.join(sorted(set(PERTURBATIONS) - set(reference)))}.")
    classes, root = num_classes(arguments), arguments.folder
    published = root is not None and any(
        (root / folder).is_dir() for n in PERTURBATIONS for folder in (n, _folder(n, difficulty))
    )
    build = _from_videos if published else _generated
    groups, protocol, notes = build(arguments, classes, names, difficulty)
    if reference is None:
        notes.append("Top-5 distances are not divided by AlexNet's, which are in no published file we found.")
    if difficulty != 1:
        notes.append("AlexNet's flip probabilities are published for difficulty 1 only, so there is no mFR.")
    summarise = partial(perturbation_summary, difficulty=difficulty, t5d=reference)
    protocol["difficulty"] = difficulty
    return classification_plan(groups, classes, protocol, summarise, notes, resize=published)


def flips(noise: bool, stride: int, model: PixelModel, sequence: Tensor, batch: EvaluationBatch) -> Outcome:
    """How often a model's answer changes along a sequence of frames per image, (B, frames, 3, H, W)."""
    logits = [model(part) for part in sequence.flatten(0, 1).split(_FRAMES_AT_ONCE)]
    ranking = torch.cat([top_classes(part, 5) for part in logits]).view(*sequence.shape[:2], -1)
    broken = torch.cat([part.isnan().any(1) for part in logits]).view(*sequence.shape[:2]).any(1)
    if not has_float64(ranking.device):
        ranking, broken = ranking.cpu(), broken.cpu()
    changed = flip_share(ranking, noise, stride).masked_fill(broken, torch.nan)
    return {"flip": changed, "top5_distance": top5_distance(ranking, noise, stride)}


def _folder(name: str, difficulty: int) -> str:
    return f"{name}_{difficulty}" if name in NOISE and difficulty > 1 else name


def _score(name: str, difficulty: int) -> Any:
    return partial(flips, name in NOISE, 1 if name in NOISE else difficulty)


Layout = tuple[list[Group], dict[str, Any], list[str]]


def _from_videos(arguments: EvaluationArguments, classes: int, names: list[str], difficulty: int) -> Layout:
    root = arguments.require_folder("ImageNet-P's videos")
    missing = [_folder(name, difficulty) for name in names if not (root / _folder(name, difficulty)).is_dir()]
    if missing:
        raise VitfocusError(
            f"{root} looks like ImageNet-P but lacks {', '.join(missing)}: it is only half extracted "
            "(name the ones you have with perturbations=, --perturbations)."
        )
    refuse_unused(arguments.options, DataForm(published=True, resized=False))
    groups, counts = [], {}
    for name in names:
        folders = list_classes(root / _folder(name, difficulty), _VIDEOS)
        counts[name] = len(folders.entries)
        pick = evenly_spaced(len(folders.entries), arguments.limit)
        first = folders.root / folders.entries[0].name
        video = read_video(first)
        if len(video) != frame_count(name):
            raise VitfocusError(f"{first} has {len(video)} frames; {name} has {frame_count(name)}.")
        files = [entry.name for entry in folders.entries]
        source = ItemSource(
            ImageSamples(VideoFiles(folders.root, folders.entries, frame_count(name)), None, files),
            pick,
            collate_images,
            ids=files,
            digest=digest_of(f"{folders.entries[i].name} {folders.entries[i].size}" for i in pick),
            uniform=True,
            workers=arguments.workers,
        )
        groups.append(Group(name, source, (Condition(name, _score(name, difficulty)),)))
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise VitfocusError(
            f"{root} is only half extracted: the perturbations hold different numbers of videos ({listed})."
        )
    protocol = {"mode": "published", "preprocessing": "none", "decoder": decoder_version()}
    return groups, protocol, ["ImageNet-P's published videos were read, without any resizing."]


def _generated(arguments: EvaluationArguments, classes: int, names: list[str], difficulty: int) -> Layout:
    images = open_images(arguments, classes, "bilinear", labels=_no_labels, crop=False)
    protocol = {**images.protocol, "mode": "generated", "seed": arguments.seed, "sequences": VERSION}
    notes = ["Sequences were generated on the fly, without the published videos' H.264 compression.", *images.notes]
    if not arguments.options.resize:
        notes.append("Where a picture that was not resized ends with the crop, what moves in is black.")
    size = arguments.models[0].size
    conditions = [
        Condition(name, _score(name, difficulty), partial(_frames, name, size, difficulty, arguments.seed))
        for name in names
    ]
    return [Group("generated", images.source, tuple(conditions))], protocol, notes


def _no_labels(folders: ClassFolders) -> tuple[dict[str, int], tuple[str, ...]]:
    """A sequence needs no label."""
    return dict.fromkeys(folders.classes, 0), ()


def _frames(name: str, crop: tuple[int, int], difficulty: int, seed: int, batch: EvaluationBatch) -> Tensor:
    return frames(batch.images, name, crop, sizes=batch.sizes, difficulty=difficulty, seed=seed, ids=batch.ids)


def require_decoder() -> str:
    """The name of the decoder that is installed, or how to get one."""
    for name in ("av", "cv2"):
        if importlib.util.find_spec(name) is not None:
            return name
    raise VitfocusError("Reading ImageNet-P's videos needs a decoder: pip install av (or opencv-python-headless).")


def decoder_version() -> str:
    """The decoder and its version, for the fingerprint."""
    name = require_decoder()
    return f"{name} {importlib.import_module(name).__version__}"


def read_video(path: str | Path) -> Tensor:
    """All frames of a video, RGB: uint8 (frames, 3, height, width)."""
    path = str(path)
    pictures = (_with_av if require_decoder() == "av" else _with_opencv)(path)
    if not pictures:
        raise VitfocusError(f"{path} cannot be read as a video: fetch it again or remove it.")
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def _with_av(path: str) -> list[np.ndarray]:
    import av

    try:
        with av.open(path) as container:
            return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    except (av.FFmpegError, OSError, IndexError):
        return []


def _with_opencv(path: str) -> list[np.ndarray]:
    import cv2

    capture, pictures = cv2.VideoCapture(path), []
    while True:
        more, frame = capture.read()
        if not more:
            break
        pictures.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
    capture.release()
    return pictures


class VideoFiles:
    """Videos as (frames, 0): a sequence needs no label."""

    def __init__(self, root: Path, entries: Sequence[Entry], frames: int) -> None:
        self.root, self.names, self.frames = root, [entry.name for entry in entries], frames

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.root / self.names[index]
        video = read_video(path)
        if len(video) != self.frames:
            raise VitfocusError(f"{path} has {len(video)} frames; its perturbation has {self.frames}.")
        return video, 0
