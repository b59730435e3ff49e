"""A recipe small enough for the tests, and runs of it in processes of their own."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from two_processes import what_each_is_told

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


@dataclass
class Started:
    """A process and the files its output goes to."""

    process: Any
    output: Path

    def wait(self) -> int:
        self.process.join(60)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"still running after 60 s: {self.error}")
        return int(self.process.exitcode)

    @property
    def error(self) -> str:
        return self.output.with_suffix(".err").read_text()

    def results(self) -> dict[str, Any]:
        """Its JSON, provided that it ended well."""
        assert self.wait() == 0, self.error
        text = self.output.with_suffix(".out").read_text()
        return json.loads(text) if text.strip() else {}


def start(folder: Path, *overrides: str, code: str = "", **environment: str) -> Started:
    """`vitfocus train --resume auto` in its own process, forked from one that has imported torch; `code` runs first."""
    output = Path(tempfile.mkdtemp()) / "child"
    arguments = ["shapes", *TINY, *overrides, "--out", str(folder), "--json", "--resume", "auto"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vitfocus.train.run"])
    process = context.Process(target=_child, args=(output, arguments, code, environment))
    process.start()
    return Started(process, output)


def _child(output: Path, arguments: list[str], code: str, environment: dict[str, str]) -> None:
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(output.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # for data loaders, as in a program of its own
    torch.set_num_threads(1)
    exec(code, {})
    from vitfocus.cli.train import add_arguments, run
    from vitfocus.core.errors import VitfocusError

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    try:
        sys.exit(run(parser.parse_args(arguments)))
    except VitfocusError as error:
        sys.exit(f"refused: {error}")


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
