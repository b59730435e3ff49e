"""A recipe small enough for the tests, and runs of it in separate processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.processes import Started, what_each_is_told
from helpers.processes import start as start_process
from vitfocus.train import Recipe, load_recipe

TINY = [
    "model.arguments={patch_size=8,embed_dim=24,depth=2,num_heads=2}",
    "size=16",
    "train_length=88",
    "val_length=20",
    "batch=16",
    "epochs=2",
    "warmup_epochs=0.5",
    "log_every=1",
    "checkpoint_steps=3",
    "device=cpu",
]
AUGMENTED = ["mixup=0.8", "cutmix=1.0", "erase=0.5", "randaugment=rand-m9-mstd0.5-inc1", "padding=2", "smoothing=0.1"]


def tiny(*overrides: str) -> Recipe:
    return load_recipe("shapes", [*TINY, *overrides])


def start(folder: Path, *overrides: str, code: str = "", **environment: str) -> Started:
    """`vitfocus train --resume auto` in a separate process; `code` runs in it first."""
    arguments = ["shapes", *TINY, *overrides, "--out", str(folder), "--json", "--resume", "auto"]
    return start_process(_train, arguments, code, **environment)


def _train(arguments: list[str], code: str) -> int | str:
    exec(code, {})
    from vitfocus.cli import build_parser
    from vitfocus.core.errors import VitfocusError

    parser, command = build_parser("train")
    try:
        return command.run(parser.parse_args(arguments))
    except VitfocusError as error:
        return f"refused: {error}"


def start_many(folder: Path, *overrides: str, codes: tuple[str, str] = ("", ""), **more: str) -> list[Started]:
    """Two processes of one run, joined by gloo."""
    told = what_each_is_told()
    return [start(folder, *overrides, code=code, **{**one, **more}) for code, one in zip(codes, told, strict=True)]


def rows(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


# In a child process: die by SIGKILL as step `at` begins.
KILL_AT = """
import os, signal
import vitfocus.train.trainer as trainer
step = trainer.Trainer.train_step
def dying(self, parts):
    if self.step == {at}:
        os.kill(os.getpid(), signal.{signal})
    return step(self, parts)
trainer.Trainer.train_step = dying
"""
