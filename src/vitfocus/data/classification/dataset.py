"""What a classification data set is here: numbered images with labels, either in memory or read one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from PIL import Image
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.data.image_files import rgb_picture


class Images(Protocol):
    """A numbered set of labelled images."""

    classes: Sequence[str]

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """The image, RGB, and its label; any exception means that it is broken."""

    def name(self, index: int) -> str:
        """What to call it in a message."""

    def digest(self) -> str:
        """A SHA-256 that changes when the set does."""


@dataclass
class ArrayImages:
    """Images in memory: uint8 (N, 3, H, W), and their labels (N,)."""

    pixels: Tensor
    labels: Tensor
    classes: Sequence[str]
    title: str = "image"

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """One image as Pillow has it."""
        return Image.fromarray(self.pixels[index].permute(1, 2, 0).contiguous().numpy()), int(self.labels[index])

    def name(self, index: int) -> str:
        """Its number."""
        return f"{self.title} {index}"

    def digest(self) -> str:
        """Of pixels and labels."""
        digest = hashlib.sha256(self.pixels.contiguous().numpy().data)
        digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()


@dataclass
class Broken:
    """An image that could not be read, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass
class BrokenLog:
    """Counts the unreadable images of a run, or stops at the first."""

    fatal: bool
    found: dict[str, str] = field(default_factory=dict)

    def add(self, broken: Sequence[Broken]) -> list[Broken]:
        """Note these; returns those not seen before."""
        if broken and self.fatal:
            raise VitfocusError(f"An image cannot be read: {broken[0]}. data.broken=skip leaves such images out.")
        new = {one.name: one for one in broken if one.name not in self.found}  # a batch may hold copies of one
        self.found.update({one.name: one.reason for one in new.values()})
        return list(new.values())


def read_or_broken(images: Images, index: int) -> tuple[Image.Image, int] | Broken:
    """One image in RGB, fully decoded, or what is wrong with it."""
    try:
        image, label = images.read(index)
        return rgb_picture(image), label
    except Exception as error:  # decoders raise what they like
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Broken(images.name(index), reason)


def as_rgb(pixels: Tensor, size: int) -> Tensor:
    """Grey (N, 1, H, W) or colour images as three channels, with zeros around where they are smaller than `size`.

    >>> as_rgb(torch.ones(2, 1, 28, 28, dtype=torch.uint8), 32).shape
    torch.Size([2, 3, 32, 32])
    """
    if pixels.shape[1] == 1:
        pixels = pixels.expand(-1, 3, -1, -1)
    down, across = size - pixels.shape[2], size - pixels.shape[3]
    if down > 0 or across > 0:
        room = (across // 2, across - across // 2, down // 2, down - down // 2)
        pixels = torch.nn.functional.pad(pixels, [max(0, side) for side in room])
    return pixels.contiguous()
