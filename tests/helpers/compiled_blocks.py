"""What torch.compile does with blocks, counted in a new process, because the compiler's state outlives a test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import vitfocus as vf
from helpers.train_tools import tiny


def _only_the_front_half() -> None:
    """Keep the part of the compiler that decides what is compiled and how often; code generation takes minutes."""
    torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]


def _print_counts(**more: Any) -> None:
    from torch._dynamo.utils import counters

    print(json.dumps({"frames": counters["frames"], "graph_breaks": len(counters["graph_break"]), **more}))


def count_compilations(spec: str, depth: int, drop_path: float) -> None:
    """Print how many frames one training step of a model compiles."""
    from vitfocus.train.compile import compile_blocks

    _only_the_front_half()
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": depth, "num_heads": 2}
    model = vf.create_model(spec, **size, drop_path_rate=drop_path)
    names = list(model.state_dict())
    blocks = compile_blocks(model)
    model.train()(torch.randn(2, 3, 16, 16)).sum().backward()
    _print_counts(blocks=blocks, renamed=names != list(model.state_dict()))


def train_tiny(overrides: Sequence[str], folder: Path) -> None:
    """Train a tiny recipe, and print how many frames were compiled."""
    from vitfocus.train.run import train

    _only_the_front_half()
    _print_counts(compiled=train(tiny(*overrides), folder)["compiled"])
