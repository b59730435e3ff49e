"""ImageNet-P from its published video files, through PyAV or OpenCV, whichever is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.robustness.folders import Entry


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
