"""Hiding parts of an image: its centre, or random cells of a grid, set to black before normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions.draws import Draws

GRID = 14


def occlude_centre(images: Tensor, side: int, base: int = 224) -> Tensor:
    """Black out the central square of `side` pixels, measured on an image of `base`: (B, C, H, W) of any dtype.

    >>> images = occlude_centre(torch.ones(1, 1, 8, 8), side=4, base=8)
    >>> int(images.sum()), float(images[0, 0, 2, 2]), float(images[0, 0, 1, 2])
    (48, 0.0, 1.0)
    """
    if not 0 <= side <= base:
        raise VitfocusError(f"A centre of {side} pixels cannot be hidden; expected 0 to {base}.")
    height, width = images.shape[-2:]
    tall, wide = round(side * height / base), round(side * width / base)
    top, left = (height - tall) // 2, (width - wide) // 2
    hidden = images.clone()
    hidden[..., top : top + tall, left : left + wide] = 0
    return hidden


def drop_patches(images: Tensor, count: int, ids: Tensor, seed: int = 0, grid: int = GRID) -> Tensor:
    """Black out `count` random cells of a `grid` x `grid` grid, drawn for each image from (seed, id): (B, C, H, W).

    >>> images = drop_patches(torch.ones(2, 1, 28, 28), 98, ids=torch.tensor([5, 6]))
    >>> images.sum(dim=(1, 2, 3)).tolist()
    [392.0, 392.0]
    """
    if not 0 <= count <= grid * grid:
        raise VitfocusError(f"{count} cells of a {grid}x{grid} grid cannot be dropped; expected 0 to {grid * grid}.")
    draws = Draws(seed, "patch drop", count, ids).uniform((grid * grid,))
    keep = (draws.argsort(dim=1).argsort(dim=1) >= count).view(-1, 1, grid, grid)
    rows = torch.arange(images.shape[-2], device=images.device) * grid // images.shape[-2]
    columns = torch.arange(images.shape[-1], device=images.device) * grid // images.shape[-1]
    return images * keep[:, :, rows][:, :, :, columns].to(images.dtype)
