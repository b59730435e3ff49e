"""ImageNet-P: how often predictions flip along a sequence of frames, from videos or generated on the fly.

Generated sequences follow the published parameters of the ten test perturbations.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.core.arguments import as_list, check_int
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.statistics import evenly_spaced
from vitfocus.corruptions.base import Draws, Setting, to_uint8
from vitfocus.corruptions.digital import brightness
from vitfocus.corruptions.filters import clipped_zoom, streak
from vitfocus.corruptions.noise_and_blur import gaussian_noise, shot_noise
from vitfocus.data.image_files import digest_of, list_classes
from vitfocus.robustness.batches import EvaluationBatch, ImageSamples, ItemSource, collate_images
from vitfocus.robustness.classification import (
    classification_plan,
    num_classes,
    open_labelled_images,
    top5_classes,
)
from vitfocus.robustness.engine import Condition, EvaluationArguments, EvaluationPlan, Group, Outcome
from vitfocus.robustness.metrics import ALEXNET_FLIPS, flip_share, perturbation_summary, top5_distance
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.robustness.suites import DataForm

_VIDEOS = frozenset({".mp4", ".avi", ".mkv"})
_FRAMES_AT_ONCE = 128


def imagenet_p(arguments: EvaluationArguments) -> EvaluationPlan:
    """ImageNet-P, from published videos or generated from clean images."""
    options = arguments.options
    names = as_list("perturbations", PERTURBATIONS if options.perturbations is None else options.perturbations)
    for name in names:
        if name not in PERTURBATIONS:
            raise VitfocusError(f"There is no perturbation {name!r}: {nearest(str(name), PERTURBATIONS)}")
    difficulty, reference = check_int("difficulty", options.difficulty, 1, 3), options.t5d_reference
    if reference is not None and set(PERTURBATIONS) - set(reference):
        raise VitfocusError(f"t5d_reference lacks {', '.join(sorted(set(PERTURBATIONS) - set(reference)))}.")
    classes, root = num_classes(arguments), arguments.folder
    published = root is not None and any(
        (root / folder).is_dir() for n in PERTURBATIONS for folder in (n, _folder(n, difficulty))
    )
    build = _from_videos if published else _generated
    groups, protocol, notes = build(arguments, classes, names, difficulty)
    if reference is None:
        notes.append("Top-5 distances are not divided by AlexNet's, which we did not find in any published file.")
    if difficulty != 1:
        notes.append("AlexNet's flip probabilities are published for difficulty 1 only, so there is no mFR.")
    summarise = partial(perturbation_summary, difficulty=difficulty, t5d=reference)
    protocol["difficulty"] = difficulty
    return classification_plan(arguments, groups, classes, protocol, summarise, notes, resize=published)


def flips(noise: bool, stride: int, model: PixelModel, sequence: Tensor, batch: EvaluationBatch) -> Outcome:
    """How often the prediction changes along a sequence of frames per image, (B, frames, 3, H, W)."""
    logits = [model(part) for part in sequence.flatten(0, 1).split(_FRAMES_AT_ONCE)]
    ranking = torch.cat([top5_classes(part) for part in logits]).view(*sequence.shape[:2], -1)
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
    arguments.refuse_unused(DataForm(published=True, resized=False))
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
        samples = ImageSamples(VideoFiles(folders.root, files, frame_count(name)), None, files)
        digest = digest_of(f"{folders.entries[i].name} {folders.entries[i].size}" for i in pick)
        options: dict[str, Any] = {"ids": files, "digest": digest, "uniform": True}
        source = ItemSource(samples, pick, collate_images, workers=arguments.workers, **options)
        groups.append(Group(name, source, (Condition(name, _score(name, difficulty)),)))
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise VitfocusError(
            f"{root} is only half extracted: the perturbations hold different numbers of videos ({listed})."
        )
    decoder = require_decoder()
    version = importlib.import_module(decoder).__version__
    protocol = {"mode": "published", "preprocessing": "none", "decoder": f"{decoder} {version}"}
    return groups, protocol, ["ImageNet-P's published videos were read, without any resizing."]


def _generated(arguments: EvaluationArguments, classes: int, names: list[str], difficulty: int) -> Layout:
    images = open_labelled_images(
        arguments, classes, "bilinear", labels=lambda folders: (dict.fromkeys(folders.classes, 0), ()), crop=False
    )
    protocol = {**images.protocol, "mode": "generated", "seed": arguments.seed, "sequences": VERSION}
    notes = ["Sequences were generated on the fly, without the published videos' H.264 compression.", *images.notes]
    if not arguments.options.resize:
        notes.append("If an image was not resized and has no pixels outside the crop, black pixels move in.")
    size = arguments.models[0].size
    conditions = [
        Condition(name, _score(name, difficulty), partial(_frames, name, size, difficulty, arguments.seed))
        for name in names
    ]
    return [Group("generated", images.source, tuple(conditions))], protocol, notes


def _frames(name: str, crop: tuple[int, int], difficulty: int, seed: int, batch: EvaluationBatch) -> Tensor:
    return frames(batch.images, name, crop, sizes=batch.sizes, difficulty=difficulty, seed=seed, ids=batch.ids)


def require_decoder() -> str:
    """The name of an installed decoder; the error says how to install one."""
    for name in ("av", "cv2"):
        if importlib.util.find_spec(name) is not None:
            return name
    raise VitfocusError("Reading ImageNet-P's videos needs a decoder: pip install av (or opencv-python-headless).")


def read_video(path: str | Path) -> Tensor:
    """All frames of a video, RGB: uint8 (frames, 3, height, width)."""
    path = str(path)
    arrays = (_with_av if require_decoder() == "av" else _with_opencv)(path)
    if not arrays:
        raise VitfocusError(f"{path} cannot be read as a video: fetch it again or remove it.")
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()


def _with_av(path: str) -> list[np.ndarray]:
    import av

    try:
        with av.open(path, options={"protocol_whitelist": "file"}) as container:
            return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    except (av.FFmpegError, OSError, IndexError):
        return []


def _with_opencv(path: str) -> list[np.ndarray]:
    import cv2

    capture, frames = cv2.VideoCapture(path), []
    while (read := capture.read())[0]:
        frames.append(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB))
    capture.release()
    return frames


@dataclass(frozen=True)
class VideoFiles:
    """Videos as (frames, 0): a sequence needs no label."""

    root: Path
    names: Sequence[str]
    frames: int

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.root / self.names[index]
        video = read_video(path)
        if len(video) != self.frames:
            raise VitfocusError(f"{path} has {len(video)} frames; its perturbation has {self.frames}.")
        return video, 0


VERSION = 1
"""Incremented whenever any frame changes."""

PERTURBATIONS: tuple[str, ...] = tuple(ALEXNET_FLIPS)
NOISE = {"gaussian_noise": (0.03, 0.05, 0.08), "shot_noise": (300, 120, 60)}  # by difficulty 1 to 3

Crop = tuple[int, int]


def frame_count(name: str) -> int:
    """How many frames a sequence has.

    >>> frame_count("translate"), frame_count("snow")
    (41, 31)
    """
    return 41 if name == "translate" else 31


def frames(
    images: Tensor,
    name: str,
    crop: Crop,
    *,
    sizes: Tensor | None = None,
    difficulty: int = 1,
    seed: int = 0,
    ids: Tensor | None = None,
) -> Tensor:
    """The sequence of one perturbation for every image: uint8 (B, 3, H, W) to uint8 (B, frames, 3, *crop).

    `sizes` (B, 2) are the heights and widths of padded images; random draws depend on (seed, id).

    >>> frames(torch.zeros(2, 3, 40, 48, dtype=torch.uint8), "translate", (32, 32)).shape
    torch.Size([2, 41, 3, 32, 32])
    """
    if images.dtype != torch.uint8:
        images = images.mul(255).round().clamp(0, 255).to(torch.uint8)
    if sizes is None:
        sizes = torch.tensor(images.shape[-2:], device=images.device).expand(len(images), 2)
    ids = torch.arange(len(images), device=images.device) if ids is None else ids
    if not has_float64(images.device):
        made = frames(images.cpu(), name, crop, sizes=sizes.cpu(), difficulty=difficulty, seed=seed, ids=ids.cpu())
        return made.to(images.device)
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        if name in NOISE:
            sequence = _noisy(_centre(images, sizes, crop), name, difficulty, seed, ids)
        elif name in _WEATHER:
            sequence = _WEATHER[name](_centre(images, sizes, crop), Draws(seed, f"sequence {name}", 0, ids))
        elif name == "zoom_blur":
            sequence = _zoom_blur(images, sizes, crop)
        else:
            sequence = [_warp(images, sizes, crop, _MOTIONS[name](i, sizes)) for i in range(frame_count(name))]
            sequence = [frame.add_(0.5).to(torch.uint8) for frame in sequence]
    return torch.stack(sequence, dim=1)


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in double precision; Apple's does not."""
    return device.type in ("cpu", "cuda")


def _offsets(sizes: Tensor, crop: Crop) -> Tensor:
    """Where the central crop begins, (B, 2), as torchvision rounds it."""
    return torch.round((sizes - torch.tensor(crop, device=sizes.device)).double() / 2).long()


def _centre(images: Tensor, sizes: Tensor, crop: Crop) -> Tensor:
    """The central crop of every image, without resampling."""
    start = _offsets(sizes, crop)
    rows = start[:, :1] + torch.arange(crop[0], device=images.device)
    columns = start[:, 1:] + torch.arange(crop[1], device=images.device)
    if int(start.min()) < 0:
        raise VitfocusError(f"An image is smaller than the crop of {crop[0]}x{crop[1]} pixels.")
    index = (rows[:, :, None] * images.shape[-1] + columns[:, None, :]).flatten(1)
    picked = images.flatten(2).gather(2, index[:, None].expand(-1, images.shape[1], -1))
    return picked.view(len(images), images.shape[1], *crop)


def _noisy(images: Tensor, name: str, difficulty: int, seed: int, ids: Tensor) -> list[Tensor]:
    """The clean image, then thirty independent draws."""
    effect = gaussian_noise if name == "gaussian_noise" else shot_noise
    setting = Setting(NOISE[name][difficulty - 1], "imagenet")
    label = f"sequence {name} {difficulty}"
    return [images, *(effect(images, setting, Draws(seed, label, i, ids)) for i in range(1, 31))]


def _motion_blur(images: Tensor, draws: Draws) -> list[Tensor]:
    turned = [torch.full((len(images),), 4.0 * (i - 30), device=images.device) for i in range(31)]
    return [to_uint8(streak(images, 10, 3, angle) + 0.5) for angle in turned]


def _snow(images: Tensor, draws: Draws) -> list[Tensor]:
    """One layer of flakes, whose streaks turn from frame to frame."""
    height, width = images.shape[-2:]
    layer = draws.normal((1, height, width)).mul_(0.3).add_(0.05)
    layer = clipped_zoom(layer, 3)
    layer = torch.where(layer < 0.5, 0.0, layer).clamp_(0, 1).mul_(255).floor_()
    image = images.float()
    grey = (image * torch.tensor([0.299, 0.587, 0.114], device=images.device).view(1, 3, 1, 1)).sum(1, keepdim=True)
    whitened = 0.85 * image + 0.15 * torch.maximum(image, 1.5 * grey + 127.5)
    sequence = []
    for i in range(31):
        angle = torch.full((len(images),), 4.0 * i - 150, device=images.device)
        flakes = streak(layer, 14, 4, angle).add_(0.5).floor_()
        sequence.append(to_uint8(whitened + flakes + flakes.flip(-2, -1)))
    return sequence


def _brightness(images: Tensor, draws: Draws) -> list[Tensor]:
    return [brightness(images, Setting((i - 15) * 0.02, "imagenet"), draws) for i in range(31)]


_WEATHER = {"motion_blur": _motion_blur, "snow": _snow, "brightness": _brightness}


def _zoom_blur(images: Tensor, sizes: Tensor, crop: Crop) -> list[Tensor]:
    """The running mean of ever larger zooms."""
    total = _centre(images, sizes, crop).float()
    sequence = [total.to(torch.uint8)]
    for i in range(1, 31):
        total = total + _warp(images, sizes, crop, _scaled(1 + 0.004 * i, sizes)).round_()
        sequence.append(to_uint8(total / (i + 1)))
    return sequence


def _about_centre(matrix: Tensor, sizes: Tensor) -> Tensor:
    """A 2x2 map from output to input about the centre of each image, as homogeneous (B, 3, 3) in pixel edges."""
    middle = sizes.flip(1).double() / 2
    result = torch.eye(3, dtype=torch.float64, device=sizes.device).repeat(len(sizes), 1, 1)
    result[:, :2, :2] = matrix.to(sizes.device)
    result[:, :2, 2] = middle - middle @ matrix.to(sizes.device).mT
    return result


def _scaled(factor: float, sizes: Tensor) -> Tensor:
    return _about_centre(torch.eye(2, dtype=torch.float64) / factor, sizes)


def _scale(i: int, sizes: Tensor) -> Tensor:
    return _scaled((40 + 2.5 * i) / 100, sizes)


def _rotate(i: int, sizes: Tensor) -> Tensor:
    """Clockwise by i - 15 degrees; from output to input, the angle is reversed."""
    angle = math.radians(i - 15)
    back = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
    return _about_centre(torch.tensor(back, dtype=torch.float64), sizes)


def _translate(i: int, sizes: Tensor) -> Tensor:
    result = _about_centre(torch.eye(2, dtype=torch.float64), sizes)
    result[:, 0, 2] -= i - 20
    return result


def _tilt(i: int, sizes: Tensor) -> Tensor:
    """A 3D rotation about both axes by i - 15 degrees, seen from a diagonal away, with pixel centres at integers."""
    angle = math.radians(i - 15)
    cos, sin = math.cos(angle), math.sin(angle)
    height, width = sizes.double().unbind(1)
    focal = (height**2 + width**2).sqrt()
    one, nil = torch.ones_like(focal), torch.zeros_like(focal)

    def matrix(*rows: tuple[Tensor | float, ...]) -> Tensor:
        return torch.stack([torch.stack([value * one for value in row], dim=-1) for row in rows], dim=-2)

    lift = matrix((1, 0, -width / 2), (0, 1, -height / 2), (0, 0, 1), (0, 0, 1))
    about_x = matrix((1, 0, 0, 0), (0, cos, -sin, 0), (0, sin, cos, 0), (0, 0, 0, 1))
    about_y = matrix((cos, 0, -sin, 0), (0, 1, 0, 0), (sin, 0, cos, 0), (0, 0, 0, 1))
    away = matrix((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, focal), (0, 0, 0, 1))
    project = matrix((focal, nil, width / 2, 0), (nil, focal, height / 2, 0), (0, 0, 1, 0))
    half = torch.tensor([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]], dtype=torch.float64, device=sizes.device)
    return half @ torch.linalg.inv(project @ away @ about_x @ about_y @ lift) @ torch.linalg.inv(half)


_MOTIONS = {"translate": _translate, "rotate": _rotate, "tilt": _tilt, "scale": _scale}


def _warp(images: Tensor, sizes: Tensor, crop: Crop, back: Tensor) -> Tensor:
    """Sample the central crop bilinearly through maps from output to input: floats, 0..255, black outside."""
    start = _offsets(sizes, crop).double()
    rows = start[:, :1] + torch.arange(crop[0], device=images.device) + 0.5
    columns = start[:, 1:] + torch.arange(crop[1], device=images.device) + 0.5
    y = rows[:, :, None].expand(-1, -1, crop[1])
    x = columns[:, None, :].expand(-1, crop[0], -1)
    mapped = torch.stack([x, y, torch.ones_like(x)], dim=-1) @ back.mT.unsqueeze(1)
    x, y = mapped[..., 0] / mapped[..., 2], mapped[..., 1] / mapped[..., 2]
    height, width = (sizes[:, axis].double().view(-1, 1, 1) for axis in (0, 1))
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x, y = torch.minimum(x.clamp_min(0.5), width - 0.5), torch.minimum(y.clamp_min(0.5), height - 0.5)
    grid = torch.stack([2 * x / images.shape[-1] - 1, 2 * y / images.shape[-2] - 1], dim=-1).float()
    sampled = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return sampled * inside.unsqueeze(1)
