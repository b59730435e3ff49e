"""Attacks on runs: kills at every file operation and at any time, flipped bits, two runs in one folder, two processes.

Runs are forked from this process, which has imported everything already; a run that is killed dies by SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from adversarial.harness import PATIENCE, Tally, damaged, flip, quiet, waited
from adversarial.words import SMALL, tiny_images
from helpers.train_tools import rows, start, start_many, tiny
from safetensors.torch import load_file

import vitfocus as vf
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import LOCK, write_text
from vitfocus.train.checkpoint import Checkpoint, Checkpoints, OptimiserState, RunRecord, RunState, read_checkpoint
from vitfocus.train.run import train

torch.set_num_threads(1)  # a fork has none of the threads that its parent's pool waits for

#: Python's audit events of operations that change files.
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod"}
#: The file in which a child that was not killed leaves what it returned, or the sentence with which it was refused.
_ANSWER = "answer.json"


def forked(call: Callable[[], Any], answer: Path, kill_at: int | None = None, below: Path | None = None) -> int:
    """Start a call in a fork that dies at its `kill_at`-th change of a file below a folder; returns the process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if kill_at is not None:
            _die_at(kill_at, str(below))
        with quiet():
            write_text(answer, json.dumps({"result": call()}, default=str))
        code = 0
    except VitfocusError as error:
        answer.write_text(json.dumps({"refused": str(error)}))
        code = 2
    except BaseException:
        answer.write_text(json.dumps({"crashed": traceback.format_exc()[-600:]}))
    finally:
        os._exit(code)


def _die_at(count: int, below: str) -> None:
    left = count

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "open":
            writes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        else:
            writes = event in _CHANGES
        if writes and arguments and str(arguments[0]).startswith(below) and LOCK not in str(arguments[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def ended(child: int, patience: float = PATIENCE) -> int:
    """Wait for a child: its exit code, the negative signal that ended it, or 124 after a hang."""
    began = time.monotonic()
    while time.monotonic() - began - waited(child) < patience:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def said_by(answer: Path) -> str:
    """What a child that failed left, for the report."""
    return answer.read_text()[-400:] if answer.is_file() else "nothing"


def tiny_state(step: int) -> Checkpoint:
    optimiser = OptimiserState([{"params": ["a"], "weight_decay": 0.05, "betas": [0.9, 0.999]}], {"a": {"step": step}})
    record = RunRecord(best={"step": step, "top1": 51.5}, seconds=2.5, window=[1.0, 2.0], window_steps=3)
    state = RunState(step, "[engine]\nseed = 1\n", 88, record, {"scale": 65536.0}, optimiser)
    return Checkpoint(state, {"model/a": torch.arange(6.0) + step, "ema/a": torch.ones(3)})


def flips(tally: Tally, tries: int, folder: Path) -> None:
    """One or several bits of a checkpoint, bytes cut off, or a file gone: the one before is used, and nothing else."""
    draw = random.Random(tally.seed)
    kept = Checkpoints(folder / "flips")
    kept.write(tiny_state(1))
    newest = kept.write(tiny_state(2))
    files = sorted(newest.iterdir())
    sound = {file: file.read_bytes() for file in files}

    for number in range(tries):
        file = draw.choice(files)
        kind = draw.random()
        bit = draw.randrange(8 * len(sound[file]))
        made = flip(sound[file], bit) if kind < 0.8 else damaged(sound[file], draw)
        if made == sound[file]:
            made = flip(sound[file], bit)
        if kind > 0.98:
            file.unlink()
        else:
            file.write_bytes(made)

        def read() -> None:
            said: list[str] = []
            found = kept.newest(said.append)
            assert found is not None and found.state.step == 1 and len(said) == 1, f"{found and found.state.step}"
            assert torch.equal(found.tensors["model/a"], tiny_state(1).tensors["model/a"])

        tally.attempt("flipped bits", f"{file.name} no. {number}, bit {bit}", read)
        file.write_bytes(sound[file])
    assert read_checkpoint(newest).state == tiny_state(2).state


def checkpoint_kills(tally: Tally, tries: int, folder: Path) -> None:
    """Killed at each file operation of writing a checkpoint: the old or the new one is there, whole."""
    place = folder / "kills"
    operation, step = 0, 2
    Checkpoints(place).write(tiny_state(1))
    for number in range(tries):
        answer = folder / _ANSWER
        code = ended(forked(lambda step=step: Checkpoints(place).write(tiny_state(step)), answer, operation, place))
        found = Checkpoints(place).newest(lambda _: None)
        problem = ""
        if code not in (0, -signal.SIGKILL):
            problem = f"exit {code}: {said_by(answer)}"
        elif found is None or found.state.step not in (step - 1, step):
            problem = f"the newest checkpoint is {found and found.state.step}"
        elif not torch.equal(found.tensors["model/a"], tiny_state(found.state.step).tensors["model/a"]):
            problem = "other weights"
        tally.count("kills in checkpoints", f"operation {operation} of step {step}, no. {number}", problem)
        if code == 0:  # every operation was tried: the next checkpoint, beside what is there
            operation, step = 0, step + 1
        else:
            operation += 1
            if found is not None and found.state.step == step:
                step += 1
    left = [one.name for one in place.iterdir() if not one.name.isdigit()]
    Checkpoints(place).write(tiny_state(step + 1))
    assert len(left) <= 2, left


def evaluation_kills(tally: Tally, tries: int, folder: Path) -> None:
    """Killed at a file operation of an evaluation, again and again: the resumed run has the same results."""
    draw = random.Random(tally.seed)
    images = tiny_images(folder / "images")
    torch.manual_seed(0)
    model = vf.create_model("vit_tiny_patch16_224", **SMALL).eval()
    options: dict[str, Any] = {"device": "cpu", "workers": 0, "progress": False, "batch_size": 1}

    def run(out: Path) -> Any:
        return vf.evaluate(model, "clean", images, out=out, resume=True, **options).models

    whole = json.dumps(run(folder / "whole"), default=str)
    place, tried = folder / "killed", 0
    while tried < tries:
        shutil.rmtree(place, ignore_errors=True)
        operation = draw.randrange(30)
        for attempt in range(40):
            answer = folder / _ANSWER
            answer.unlink(missing_ok=True)
            at = operation + attempt if attempt < 38 else None
            code = ended(forked(lambda: run(place), answer, at, place))
            problem = ""
            if code not in (0, -signal.SIGKILL):
                problem = f"exit {code}: {said_by(answer)}"
            elif code == 0 and (left := [path.name for path in place.rglob(".*")]):
                problem = f"left behind: {', '.join(left)}"
            elif code == 0 and json.dumps(json.loads(answer.read_text())["result"]) != json.dumps(json.loads(whole)):
                problem = "other results"
            tried += 1
            tally.count("kills in evaluations", f"operation {at}, attempt {attempt}", problem)
            if code != -signal.SIGKILL or tried >= tries:
                break


TRAINED = ["epochs=1", "checkpoint_steps=1", "train_length=64", "val_length=8"]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def _same(one: Path, other: Path) -> str:
    first, second = _weights(one), _weights(other)
    if first.keys() != second.keys() or not all(torch.equal(first[key], second[key]) for key in first):
        return "other weights"
    keys = ("step", "kind", "loss")
    lines = [
        [[row.get(key) for key in keys] for row in rows(run, kind)]
        for run in (one, other)
        for kind in ("train", "eval")
    ]
    if lines[:2] != lines[2:]:
        return "other rows of metrics"
    left = [str(path.relative_to(other)) for path in other.rglob(".*")]
    return f"left behind: {', '.join(left)}" if left else ""


def training_kills(tally: Tally, tries: int, folder: Path) -> None:
    """Killed at a random file operation or at a random time, and resumed, until the end: bit for bit the same model."""
    draw = random.Random(tally.seed)
    recipe = tiny(*TRAINED)
    answer, whole, place = folder / _ANSWER, folder / "whole", folder / "killed"
    began = time.monotonic()
    assert ended(forked(lambda: train(recipe, out=whole), answer)) == 0, said_by(answer)
    length = time.monotonic() - began
    tried = 0
    while tried < tries:
        shutil.rmtree(place, ignore_errors=True)
        for attempt in range(8):
            answer.unlink(missing_ok=True)
            by_time = attempt < 7 and draw.random() < 0.4
            operation = None if by_time or attempt == 7 else draw.randrange(60)
            child = forked(lambda: train(recipe, out=place, resume="auto"), answer, operation, place)
            if by_time:
                time.sleep(draw.uniform(0, length))
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            code = ended(child)
            problem = "" if code in (0, -signal.SIGKILL) else f"exit {code}: {said_by(answer)}"
            if code == 0:
                problem = _same(whole, place)
            tried += 1
            tally.count("kills in training", f"operation {operation}, attempt {attempt}", problem)
            if code != -signal.SIGKILL:
                break


def concurrent(tally: Tally, tries: int, folder: Path) -> None:
    """Two or three runs in one folder at once: one goes on as if alone, the others are told who holds the folder.

    Every second one is an evaluation.
    """
    draw = random.Random(tally.seed)
    recipe = tiny(*TRAINED)
    whole = folder / "whole"
    assert ended(forked(lambda: train(recipe, out=whole), folder / _ANSWER)) == 0, said_by(folder / _ANSWER)
    images = tiny_images(folder / "images")
    model = vf.create_model("vit_tiny_patch16_224", **SMALL).eval()

    def measure(out: Path) -> Any:
        options: dict[str, Any] = {"device": "cpu", "workers": 0, "progress": False, "batch_size": 1}
        return vf.evaluate(model, "clean", images, out=out, resume=True, **options).models

    measured = json.dumps(measure(folder / "measured"), default=str)

    def compare(place: Path, answers: list[Path]) -> str:
        if number % 2:
            said = [json.loads(answer.read_text()) for answer in answers]
            return "" if all(json.dumps(one["result"]) == measured for one in said) else "other results"
        return _same(whole, place)

    for number in range(tries):
        place = folder / f"shared-{number}"
        children = []
        for part in range(draw.choice((2, 2, 3))):
            time.sleep(draw.uniform(0, 0.05))
            answer = folder / f"{part}-{_ANSWER}"
            answer.unlink(missing_ok=True)
            run = measure if number % 2 else lambda out: train(recipe, out=out, resume="auto")
            children.append((forked(lambda place=place, run=run: run(place), answer), answer))
        ends = [(ended(child), answer) for child, answer in children]
        problem = "" if any(code == 0 for code, _ in ends) else "none finished"
        for code, answer in ends:
            if code not in (0, 2) or (code == 2 and "is in use by process" not in said_by(answer)):
                problem = f"exit {code}: {said_by(answer)}"
        finished = [answer for code, answer in ends if code == 0]
        tally.count("concurrent runs", f"no. {number}", problem or compare(place, finished))
        shutil.rmtree(place, ignore_errors=True)


SPECS = [
    "cbs+adl(threshold=0.5)",
    "tap+adl(threshold=0.5)",
    "cb+tap",
    "tap(mode=kernel)+adl(threshold=0.5,variant=paper)",
]


def processes(tally: Tally, tries: int, folder: Path) -> None:
    """Two processes (gloo) against one: the same losses and weights, with pooling and active diversification."""
    for number in range(tries):
        spec = SPECS[number % len(SPECS)]
        words = [
            f"spec=vit_tiny_patch16_224+{spec}",
            "model.arguments.patch_size=4",
            "epochs=1",
            "log_every=2",
            f"seed={number}",
        ]
        one, two = folder / f"one-{number}", folder / f"two-{number}"
        problem = ""
        try:
            start(one, *words).results()
            for process in start_many(two, *words):
                process.results()
            first, second = _weights(one), _weights(two)
            off = max(float((first[key].double() - second[key].double()).abs().max()) for key in first)
            losses = [[row["loss"] for row in rows(run)] for run in (one, two)]
            apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
            if "adl" in spec and not all(row["adl"] > 0 for row in rows(one)):
                problem = "the diversification loss is not active"
            elif off > 1e-4 or apart > 1e-5:
                problem = f"weights differ by {off:.1e}, losses by {apart:.1e}"
        except (AssertionError, TimeoutError) as error:
            problem = str(error)[:300]
        tally.count("two processes", f"{spec} no. {number}", problem)
