"""ImageNet-P: how often predictions flip along a sequence of frames, from videos or generated on the fly."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from vitfocus.core.arguments import several, whole
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.statistics import evenly_spaced
from vitfocus.robustness.cells import Watched
from vitfocus.robustness.folders import list_classes
from vitfocus.robustness.plan import Group, Plan
from vitfocus.robustness.sequences import NOISE, PERTURBATIONS, VERSION, frame_count, frames
from vitfocus.robustness.sources import Batch, ItemSource, digest_of
from vitfocus.robustness.suites.context import Context
from vitfocus.robustness.summaries import watched
from vitfocus.robustness.videos import VideoFiles, decoder_version, read_video

_VIDEOS = frozenset({".mp4", ".avi", ".mkv"})


def imagenet_p(context: Context) -> Plan:
    """ImageNet-P, in whichever form the data is."""
    names = several("perturbations", context.options.get("perturbations", PERTURBATIONS))
    for name in names:
        if name not in PERTURBATIONS:
            raise VitfocusError(f"There is no perturbation {name!r}: {nearest(str(name), PERTURBATIONS)}")
    difficulty = whole("difficulty", context.options.get("difficulty", 1), 1, 3)
    reference = context.options.get("t5d_reference")
    if reference is not None and set(PERTURBATIONS) - set(reference):
        raise VitfocusError(f"t5d_reference lacks {', '.join(sorted(set(PERTURBATIONS) - set(reference)))}.")
    if reference is None:
        context.notes.append("Top-5 distances are not divided by AlexNet's, which are in no published file we found.")
    if difficulty != 1:
        context.notes.append("AlexNet's flip probabilities are published for difficulty 1 only, so there is no mFR.")
    context.protocol["difficulty"] = difficulty
    summarise = partial(watched, difficulty=difficulty, t5d=reference)
    root = context.folder
    if root is not None and any(
        (root / folder).is_dir() for n in PERTURBATIONS for folder in (n, _folder(n, difficulty))
    ):
        groups = _from_videos(context, root, names, difficulty)
    else:
        groups = _generated(context, names, difficulty)
    return Plan(groups, context.protocol, summarise, tuple(context.notes))


def _folder(name: str, difficulty: int) -> str:
    return f"{name}_{difficulty}" if name in NOISE and difficulty > 1 else name


def _stride(name: str, difficulty: int) -> int:
    return 1 if name in NOISE else difficulty


def _from_videos(context: Context, root: Path, names: list[str], difficulty: int) -> tuple[Group, ...]:
    missing = [_folder(name, difficulty) for name in names if not (root / _folder(name, difficulty)).is_dir()]
    if missing:
        raise VitfocusError(
            f"{root} looks like ImageNet-P but lacks {', '.join(missing)}: it is only half extracted "
            "(name the ones you have with perturbations=, --perturbations)."
        )
    context.refuse_resizing("published videos, which are never resized")
    context.protocol |= {"mode": "published", "preprocessing": "none", "decoder": decoder_version()}
    context.notes.insert(0, "ImageNet-P's published videos were read, without any resizing.")
    groups, counts = [], {}
    for name in names:
        folders = list_classes(root / _folder(name, difficulty), _VIDEOS)
        counts[name] = len(folders.entries)
        pick = evenly_spaced(len(folders.entries), context.limit)
        first = folders.root / folders.entries[0].name
        video = read_video(first)
        if len(video) != frame_count(name):
            raise VitfocusError(f"{first} has {len(video)} frames; {name} has {frame_count(name)}.")
        for model in context.models:  # a model built for another size than the videos' scales them itself
            model.resize = True
        source = ItemSource(
            VideoFiles(folders.root, folders.entries, frame_count(name)),
            ids=[entry.name for entry in folders.entries],
            names=[entry.name for entry in folders.entries],
            pick=pick,
            digest=digest_of(f"{folders.entries[i].name} {folders.entries[i].size}" for i in pick),
            workers=context.workers,
        )
        cell = Watched(name, _as_read, name in NOISE, _stride(name, difficulty))
        groups.append(Group(name, source, (cell,)))
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise VitfocusError(
            f"{root} is only half extracted: the perturbations hold different numbers of videos ({listed})."
        )
    return tuple(groups)


def _as_read(batch: Batch) -> Tensor:
    return batch.images


def _generated(context: Context, names: list[str], difficulty: int) -> tuple[Group, ...]:
    source = context.images("bilinear", whole=True, labeller=lambda folders: dict.fromkeys(folders.classes, 0))
    context.protocol |= {"mode": "generated", "seed": context.seed, "sequences": VERSION}
    context.notes.insert(0, "Sequences were generated on the fly, without the published videos' H.264 compression.")
    if not context.options.get("resize"):
        context.notes.append("Where a picture that was not resized ends with the crop, what moves in is black.")
    cells = []
    for name in names:
        make = partial(_frames, name, context.size, difficulty, context.seed)
        cells.append(Watched(name, make, name in NOISE, _stride(name, difficulty)))
    return (Group("generated", source, tuple(cells)),)


def _frames(name: str, crop: tuple[int, int], difficulty: int, seed: int, batch: Batch) -> Tensor:
    return frames(batch.images, name, crop, sizes=batch.sizes, difficulty=difficulty, seed=seed, ids=batch.ids)
