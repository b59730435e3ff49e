"""How often a prediction changes along a sequence of frames: ImageNet-P's flip probability and top-5 distance.

A noise sequence is compared with its first frame, which is clean; every other sequence frame by frame. At difficulty d,
sequences other than noise are read with stride d, from each of the d phases.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def frame_pairs(frames: int, noise: bool, stride: int = 1) -> Iterator[tuple[int, int]]:
    """The frames that are compared, earlier first.

    >>> list(frame_pairs(4, noise=True)), list(frame_pairs(4, noise=False)), list(frame_pairs(4, False, stride=2))
    ([(0, 1), (0, 2), (0, 3)], [(0, 1), (1, 2), (2, 3)], [(0, 2), (1, 3)])
    """
    if noise:
        yield from ((0, frame) for frame in range(1, frames))
        return
    for phase in range(stride):
        yield from ((frame - stride, frame) for frame in range(phase + stride, frames, stride))


def flip_share(ranking: Tensor, noise: bool, stride: int = 1) -> Tensor:
    """The share of compared frames whose top-1 differs: (videos,), from rankings (videos, frames, 5 or more)."""
    first, second = _pairs(ranking, noise, stride)
    return (first[..., 0] != second[..., 0]).double().mean(1)


def top5_distance(ranking: Tensor, noise: bool, stride: int = 1) -> Tensor:
    """The mean distance of compared frames' top-5 lists: (videos,), from rankings (videos, frames, 5).

    The reference's rule: a class at place i of the earlier frame's five and at place j of the later frame, anything
    below fifth place counting as 6, costs |i - min(j, 6)|; the five costs are added.
    """
    first, second = _pairs(ranking[..., :5], noise, stride)
    same = first.unsqueeze(-1) == second.unsqueeze(-2)  # (videos, pairs, place before, place after)
    places = torch.arange(1, first.shape[-1] + 1, device=ranking.device)
    later = torch.where(same.any(-1), (same * places).sum(-1), 6)
    return (later - places).abs().sum(-1).double().mean(1)


def _pairs(ranking: Tensor, noise: bool, stride: int) -> tuple[Tensor, Tensor]:
    pairs = torch.tensor(list(frame_pairs(ranking.shape[1], noise, stride)), device=ranking.device)
    return ranking[:, pairs[:, 0]], ranking[:, pairs[:, 1]]
