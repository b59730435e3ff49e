"""Never lose a run: kills, signals, damage, full disks, NaN and changed recipes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.train_tools import AUGMENTED, KILL_AT, rows, start, tiny
from msgspec.structs import replace
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file

import vitfocus as vf
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import digest
from vitfocus.train import checkpoint, load_recipe
from vitfocus.train.run import train
from vitfocus.train.trainer import Trainer
from vitfocus.treatments import save_load as store

EVERYTHING = [
    "spec=vit_tiny_patch16_224+cbs+tap+adl(threshold=0.5)",
    "drop_path=0.2",
    "ema=0.9",
    "accumulate=2",
    "clip=1.0",
    *AUGMENTED,
]

KILL_IN_CHECKPOINT = """
import os, signal
import vitfocus.train.checkpoint as checkpoint
def dying(tensors, path):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save_file = dying
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of everything at once that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    start(folder, *EVERYTHING).results()
    return folder


def test_a_killed_run_ends_bit_for_bit_as_one_that_was_not(whole: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of an epoch, between checkpoints and while one is being written."""
    folder = tmp_path / "killed"
    for code in (KILL_AT.format(at=5, signal="SIGKILL"), KILL_IN_CHECKPOINT, KILL_AT.format(at=8, signal="SIGKILL")):
        assert start(folder, *EVERYTHING, code=code).wait() == -signal.SIGKILL
    results = start(folder, *EVERYTHING).results()
    assert results["finished"] and results["steps"] == 11
    for name in ("model/model.safetensors", "best/model.safetensors", "checkpoints/00000011/state.safetensors"):
        one, other = load_file(whole / name), load_file(folder / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    without_speed = [{k: v for k, v in row.items() if k != "images_per_second"} for row in rows(folder)]
    assert without_speed == [{k: v for k, v in row.items() if k != "images_per_second"} for row in rows(whole)]
    assert rows(folder, "eval") == rows(whole, "eval")
    assert all(row["loss"] == pytest.approx(row["ce"] + row["adl"]) for row in rows(folder))
    vf.load(folder / "model")


def test_sigterm_checkpoints_and_exits_cleanly(tmp_path: Path) -> None:
    results = start(tmp_path, code=KILL_AT.format(at=4, signal="SIGTERM")).results()
    assert not results["finished"] and results["steps"] == 5 and not (tmp_path / "model").exists()
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["00000003", "00000005"]
    elsewhere = train(tiny(), tmp_path / "elsewhere", resume=tmp_path / "checkpoints" / "00000003")
    results = train(tiny(), tmp_path, resume="auto")
    assert results["finished"] and results["model_sha256"] == elsewhere["model_sha256"]


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = train(tiny(), tmp_path / "a")
    start(tmp_path / "b", code=KILL_AT.format(at=7, signal="SIGTERM")).results()
    newest = tmp_path / "b" / "checkpoints" / "00000008" / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5] ^= 1
    newest.write_bytes(content)
    results = train(tiny(), tmp_path / "b", resume="auto")
    said = capfd.readouterr().err
    assert "00000008 is damaged" in said and "Resuming from step 6" in said
    assert results["model_sha256"] == expected["model_sha256"]
    assert train(tiny(), tmp_path / "b", resume="auto") == json.loads((tmp_path / "b" / "results.json").read_text())


def test_half_a_checkpoint_does_not_count(tmp_path: Path) -> None:
    kept = checkpoint.Checkpoints(tmp_path)
    optimiser = checkpoint.OptimiserState(groups=[], scalars={})
    state = checkpoint.RunState(
        step=1, recipe="", images=1, record=checkpoint.RunRecord(), scaler={}, optimiser=optimiser
    )
    written = kept.write(checkpoint.Checkpoint(state, {"a": torch.ones(3)}))
    content = json.loads((written / "state.json").read_text())
    for key in ("step", "recipe", "images", "record", "scaler", "optimiser"):
        folder = tmp_path / key
        shutil.copytree(written, folder)
        (folder / "state.json").write_text(json.dumps({k: value for k, value in content.items() if k != key}))
        names = ("state.json", "state.safetensors")
        (folder / "SHA256SUMS").write_text("".join(f"{digest(folder / name)}  {name}\n" for name in names))
        with pytest.raises(VitfocusError, match=f"state.json was not written.*lacks the key '{key}'"):
            checkpoint.read_checkpoint(folder)
    for name, files in ((".00000002.new", ("state.safetensors",)), ("00000003", ("state.json",)), ("00000004", ())):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("{")
    said: list[str] = []
    newest = kept.newest(said.append)
    assert newest is not None and newest.state.step == 1 and len(said) == 2


def test_a_full_disk_is_reported_and_destroys_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    written = []

    def fill(tensors: Any, path: Path) -> None:
        if len(written) == 1:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        real(tensors, path)

    real = checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", fill)
    with pytest.raises(VitfocusError, match=r"No space left.*of step 3, is untouched"):
        train(tiny(), tmp_path)
    assert "Training continues" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000003"]
    monkeypatch.undo()
    assert train(tiny(), tmp_path, resume="auto")["finished"]


def test_a_real_write_error_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """The kernel refuses a file above 100 kB, as a full disk would, from the second checkpoint on."""
    limit = """
import resource
import vitfocus.train.checkpoint as checkpoint
write = checkpoint.Checkpoints.write
def limited(self, one):
    if one.state.step > 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return write(self, one)
checkpoint.Checkpoints.write = limited
"""
    process = start(tmp_path, code=limit)
    assert process.wait() == 1
    assert "refused: The checkpoint of step 11 cannot be written" in process.error
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000003"]


def test_a_disk_too_full_for_the_best_model_or_a_row_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full = {"now": True}

    def fill(*arguments: Any, **options: Any) -> None:
        if full["now"]:
            raise SafetensorError("I/O error: No space left on device")
        save(*arguments, **options)

    def opened(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if path.name == "metrics.jsonl" and mode == "ab" and full["now"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_open(path, mode, *arguments, **options)

    save, real_open = store.save_file, Path.open
    monkeypatch.setattr(store, "save_file", fill)
    monkeypatch.setattr(Path, "open", opened)

    def free(step: int) -> None:
        full["now"] = step < 8

    recipe = tiny("evaluate_steps=2")
    assert train(recipe, tmp_path / "full", before_step=free)["finished"]
    assert "The best model so far cannot be saved" in capfd.readouterr().err
    monkeypatch.undo()
    train(recipe, tmp_path / "empty")
    for name in ("model/model.safetensors", "metrics.jsonl"):
        one, two = ((tmp_path / run / name).read_bytes() for run in ("full", "empty"))
        assert one == two if name.startswith("model") else one.count(b"\n") == two.count(b"\n")


def test_a_damaged_row_of_metrics_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    recipe = tiny()
    whole = train(recipe, tmp_path / "whole")

    def stop(step: int) -> None:
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run", before_step=stop)
    file = tmp_path / "run" / "metrics.jsonl"
    first, rest = file.read_bytes().split(b"\n", 1)
    file.write_bytes(first + b'\n\x00\xff{"st\n' + rest + b'{"kind": "tr')
    assert train(recipe, tmp_path / "run", resume="auto")["model_sha256"] == whole["model_sha256"]
    steps = [[json.loads(line)["step"] for line in (tmp_path / run / file.name).open()] for run in ("whole", "run")]
    assert steps[0] == steps[1]


def test_a_finished_run_without_its_checkpoints_is_not_trained_again(tmp_path: Path) -> None:
    recipe = tiny("epochs=0.2", "warmup_epochs=0.1")
    results = train(recipe, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    before = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns
    assert train(recipe, tmp_path, resume="auto") == json.loads(json.dumps(results))
    with pytest.raises(VitfocusError, match=r"engine\.seed: 0 -> 1"):
        train(tiny("epochs=0.2", "warmup_epochs=0.1", "seed=1"), tmp_path, resume="auto")
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    recipe = tiny("lr=1e30", "warmup_lr=1e-6", "checkpoint_steps=1", "warmup_epochs=1")
    with pytest.raises(VitfocusError, match=r"diverged by step \d+ \(.*last good checkpoint is .*checkpoints"):
        train(recipe, tmp_path)
    state = checkpoint.Checkpoints(tmp_path / "checkpoints").newest()
    assert state is not None and all(value.isfinite().all() for value in state.tensors.values())


def test_a_changed_recipe_is_refused_with_the_difference(tmp_path: Path) -> None:
    recipe = tiny("epochs=0.2", "warmup_epochs=0.1")
    train(recipe, tmp_path)
    with pytest.raises(VitfocusError, match="holds a run already"):
        train(recipe, tmp_path)
    changed = replace(recipe, optimiser=replace(recipe.optimiser, lr=0.5))
    with pytest.raises(VitfocusError, match=r"optimiser\.lr: 0\.001 -> 0\.5"):
        train(changed, tmp_path, resume="auto")
    newest = checkpoint.Checkpoints(tmp_path / "checkpoints").newest()
    assert newest is not None
    newest.state.images = 7
    checkpoint.Checkpoints(tmp_path / "other" / "checkpoints").write(newest)
    with pytest.raises(VitfocusError, match="began with 7 training images and there are 88 now"):
        train(recipe, tmp_path / "other", resume="auto")
    harmless = replace(recipe, engine=replace(recipe.engine, log_every=7))
    assert train(harmless, tmp_path, resume="auto")["finished"]


#: A tiny run of every task, with several batches of validation.
TASKS = {
    "shapes": ["model.arguments={patch_size=8,embed_dim=24,depth=2,num_heads=2}", "size=16", "train_length=8"],
    "shapes_segment": [
        "model.arguments={img_size=32,patch_size=8,embed_dim=24,depth=4,num_heads=2,channels=8,auxiliary_channels=4}",
        "size=32",
        "train_length=8",
    ],
    "shapes_detect": [
        "model.arguments={patch_size=8,embed_dim=24,depth=4,num_heads=2,channels=8,box_width=16,mask_layers=1,"
        "rpn_post_nms_top_n_train=20,rpn_post_nms_top_n_test=20,box_detections_per_img=4}",
        "size=32",
        "train_length=8",
    ],
    "shapes_answer": ["model.arguments={hidden_size=24,num_hidden_layers=1}", "size=32", "train_length=8"],
}


@pytest.mark.parametrize(("name", "number"), [*((name, signal.SIGTERM) for name in TASKS), ("shapes", signal.SIGINT)])
def test_a_signal_during_validation_stops_the_run_at_the_next_batch(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is written, and the validation is made up for when the run is resumed."""
    always = ["val_length=8", "batch=4", "epochs=2", "warmup_epochs=0", "evaluate_every=1", "device=cpu", "ema=0.5"]
    recipe = load_recipe(name, [*TASKS[name], *always, "workers=0", "log_every=1"])
    whole = train(recipe, tmp_path / "whole")
    calls: list[int] = []

    def scores(self: Trainer) -> dict[str, float]:
        def count(*arguments: Any) -> None:
            calls.append(self.step)
            if not self.stop.signal:  # a second one would end the process
                os.kill(os.getpid(), number)

        hook = self.unwrapped.register_forward_pre_hook(count)
        try:
            return real(self)
        finally:
            hook.remove()

    real = Trainer._scores
    monkeypatch.setattr(Trainer, "_scores", scores)
    folder = tmp_path / "run"
    stopped = train(recipe, folder)
    first = whole["steps"] // 2
    assert calls == [first] and not stopped["finished"] and stopped["signal"] == number and stopped["steps"] == first
    assert rows(folder, "eval") == [] and [one.name for one in (folder / "checkpoints").iterdir()] == [f"{first:08d}"]
    assert not train(recipe, folder, resume="auto")["finished"]  # stopped in the same validation again
    monkeypatch.setattr(Trainer, "_scores", real)
    results = train(recipe, folder, resume="auto")
    assert results["finished"] and results["model_sha256"] == whole["model_sha256"]
    assert rows(folder, "eval") == rows(tmp_path / "whole", "eval") and results["best"] == whole["best"]


def test_a_run_asked_to_stop_does_not_begin_a_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny("epochs=1")
    whole = train(recipe, tmp_path / "whole")

    def ask(step: int) -> None:
        if step == 5:  # the last one, after which the model is always evaluated
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = train(recipe, tmp_path / "run", before_step=ask)
    assert not stopped["finished"] and stopped["steps"] == 6 and not rows(tmp_path / "run", "eval")
    results = train(recipe, tmp_path / "run", resume="auto")
    assert results["finished"] and results["model_sha256"] == whole["model_sha256"] and results["last"] == whole["last"]


WAIT_AT_4 = """
import pathlib, time
import vitfocus.train.trainer as trainer
step = trainer.Trainer.train_step
def waiting(self, parts):
    if self.step == 4:
        pathlib.Path({told!r}).touch()
        time.sleep(60)
    return step(self, parts)
trainer.Trainer.train_step = waiting
"""


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    expected = train(tiny(), tmp_path / "alone")
    folder, told = tmp_path / "run", tmp_path / "told"
    first = start(folder, code=WAIT_AT_4.format(told=str(told)))
    while not told.exists():
        assert first.process.is_alive(), first.error
        time.sleep(0.05)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    second = start(folder)
    assert second.wait() == 1 and f"{folder} is in use by process {first.process.pid} on " in second.error
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    first.process.kill()
    first.wait()
    results = start(folder).results()
    assert results["finished"] and results["model_sha256"] == expected["model_sha256"]
    assert [row["step"] for row in rows(folder)] == [row["step"] for row in rows(tmp_path / "alone")]
    assert not (folder / ".lock").exists()


def test_an_image_that_cannot_be_validated_loses_no_training(tmp_path: Path) -> None:
    """The error comes after the last checkpoint by time, which may be long ago."""
    for split in ("train", "val"):
        for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
            (tmp_path / split / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), "red" if name[0] == "a" else "blue").save(tmp_path / split / name)
    (tmp_path / "val/b/1.png").rename(tmp_path / "whole.png")
    (tmp_path / "val/b/1.png").write_bytes(b"damaged")
    data = ["source=folder", f"root={tmp_path}", "workers=0", "train_length=0", "val_length=0", "batch=2", "epochs=3"]
    recipe, steps = tiny(*data, "checkpoint_steps=0", "checkpoint_minutes=0"), []
    with pytest.raises(VitfocusError, match=r"b/1\.png"):
        train(recipe, tmp_path / "run", before_step=steps.append)
    assert steps == [0, 1]
    (tmp_path / "whole.png").rename(tmp_path / "val/b/1.png")
    resumed = train(recipe, tmp_path / "run", resume="auto", before_step=steps.append)
    assert steps == [0, 1, 2, 3, 4, 5]
    evaluated = [row["step"] for row in rows(tmp_path / "run", "eval")]
    assert evaluated == [2, 4, 6]
    assert resumed["model_sha256"] == train(recipe, tmp_path / "other")["model_sha256"]
