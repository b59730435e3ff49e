"""Batched Muon takes timm's steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from timm.optim.muon import Muon
from torch import nn

from vitfocus.train.optimiser import BatchedMuon


class Small(nn.Module):
    """Matrices of equal and of other shapes, tall and wide, a convolution, a position embedding, biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 12, 4)
        self.position = nn.Parameter(torch.randn(1, 5, 12))
        sizes = [(12, 12), (12, 12), (12, 36), (36, 12), (12, 12)]
        self.layers = nn.Sequential(*(nn.Linear(*size) for size in sizes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self.layers(self.patches(images).flatten(2).mean(-1)[:, None] + self.position)
        return tokens


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimiser.zero_grad()
        model(torch.randn(2, 3, 4, 4, generator=generator)).square().sum().backward()
        optimiser.step()


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": True}, {"weight_decay": 0.5}, {"adjust_lr_fn": "original"}], ids=str
)
def test_steps_equal_timms(options: dict[str, object]) -> None:
    ours, theirs = Small(), Small()
    train(ours, BatchedMuon(ours.parameters(), lr=1e-2, **options))
    train(theirs, Muon(theirs.parameters(), lr=1e-2, **options))
    start = Small()
    for (name, mine), other, before in zip(
        ours.named_parameters(), theirs.parameters(), start.parameters(), strict=True
    ):
        moved = (other - before).norm()
        assert moved > 0, name
        iterated = mine.ndim > 1 and name != "position"  # in bfloat16; the others are AdamW's
        assert (mine - other).norm() <= (0.05 if iterated else 1e-4) * moved, name


def test_state_moves_between_the_two() -> None:
    ours = Small()
    optimiser = BatchedMuon(ours.parameters(), lr=1e-2)
    train(ours, optimiser)
    theirs = copy.deepcopy(ours)
    other = Muon(theirs.parameters(), lr=1e-2)
    other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    train(ours, optimiser, 1)
    train(theirs, other, 1)
    for mine, parameter in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter, atol=1e-4, rtol=0)


def test_gradients_are_left_in_place() -> None:
    model = Small()
    train(model, BatchedMuon(model.parameters(), lr=1e-2), 1)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_batched_updates_lie_as_their_matrices_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each is a launch of its own: Newton-Schulz returns tall matrices transposed."""
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in ((48, 16), (48, 16), (16, 48))]
    optimiser = BatchedMuon(matrices, lr=1e-2)
    added, real = [], torch._foreach_add_

    def add(places: Any, values: Any, *rest: Any) -> None:
        added.extend((place.stride(), value.stride()) for place, value in zip(places, values, strict=True))
        real(places, values, *rest)

    monkeypatch.setattr(torch, "_foreach_add_", add)
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    optimiser.step()
    assert len(added) == 3 and all(place == value for place, value in added)
