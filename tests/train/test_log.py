"""Every row of a run reaches metrics.jsonl, TensorBoard and a tracker, once, though the disk is full now and then."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from helpers.train_tools import tiny

from vitfocus.core.errors import VitfocusError
from vitfocus.train import load_recipe, train
from vitfocus.train.log import ExperimentTracker, Metrics

Event = tuple[int, str, float]


class Disk:
    """Takes no more than `left` bytes of each piece appended to a file whose name holds `full`; "" lets all pass."""

    def __init__(self) -> None:
        self.full, self.left = "", 0

    def open(self, path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = real_open(path, mode, *arguments, **options)
        if self.full and self.full in path.name and mode == "ab":
            return Narrow(file, self.left)
        return file


class Narrow:
    """A file on a disk that has only so many bytes left."""

    def __init__(self, file: Any, left: int) -> None:
        self.file, self.left = file, left

    def __enter__(self) -> Narrow:
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.close()

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def write(self, piece: bytes) -> None:
        self.file.write(piece[: self.left])
        raise OSError(errno.ENOSPC, "No space left on device")


real_open = Path.open


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(Path, "open", lambda *arguments, **options: disk.open(*arguments, **options))
    gfile = pytest.importorskip("tensorboard.compat.tensorflow_stub.io.gfile")

    def write(self: Any, filename: bytes, content: bytes, mode: str) -> None:
        with disk.open(Path(os.fsdecode(filename)), "ab") as file:
            file.write(content)

    monkeypatch.setattr(gfile.LocalFileSystem, "_write", write)
    return disk


@pytest.fixture(autouse=True)
def numbered_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads files in the order of their names, which end in a number without leading zeros."""
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))


def rows(last: int, first: int = 1) -> list[dict[str, Any]]:
    """A training row each step, and an evaluation behind every second one; the numbers are exact in float32."""
    made: list[dict[str, Any]] = []
    for step in range(first, last + 1):
        made.append({"kind": "train", "step": step, "loss": step / 8, "lr": 0.5})
        if step % 2 == 0:
            made.append({"kind": "eval", "step": step, "top1": step / 4})
    return made


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def shown(folder: Path) -> list[Event]:
    """What TensorBoard itself finds in the folder."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return sorted((event.step, tag, event.value) for tag in found.Tags()["scalars"] for event in found.Scalars(tag))


def events(some: list[dict[str, Any]]) -> list[Event]:
    return sorted(
        (row["step"], f"{row['kind']}/{key}", row[key]) for row in some for key in row if key not in ("kind", "step")
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("late", [(4,), (4, 5, 6), range(10, 20)])
@pytest.mark.parametrize("left", [0, 25])
@pytest.mark.parametrize("full", ["metrics", "events", "e"])
def test_each_row_reaches_both_once(tmp_path: Path, disk: Disk, late: Collection[int], left: int, full: str) -> None:
    """One file or both cannot be written for a while, not at all or by half a row; the last rows wait for the end."""
    pytest.importorskip("tensorboard")
    metrics = Metrics(tmp_path, 0, tensorboard=True)
    disk.left = left
    for index, row in enumerate(rows(8)):
        disk.full = full if index in late else ""
        metrics.add(row)
    assert len(written(tmp_path)) == (10 if 10 in late and full != "events" else 12)
    disk.full = ""
    metrics.catch_up()
    assert written(tmp_path) == rows(8)
    assert shown(tmp_path) == events(rows(8))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_rows_are_kept_while_the_disk_is_full(tmp_path: Path, disk: Disk) -> None:
    pytest.importorskip("tensorboard")
    disk.full = "events"
    metrics = Metrics(tmp_path, 0, tensorboard=True)
    metrics.add(rows(1)[0])
    disk.full = ""
    metrics.catch_up()
    assert shown(tmp_path) == events(rows(1))


@pytest.mark.parametrize("step", [0, 4])
def test_a_resumed_run_writes_no_row_twice(tmp_path: Path, step: int) -> None:
    """It died after step 5; rows up to the checkpoint's step stay, the others are written again."""
    pytest.importorskip("tensorboard")
    first = Metrics(tmp_path, 0, tensorboard=True)
    for row in rows(5):
        first.add(row)
    again = Metrics(tmp_path, step, tensorboard=True)
    assert shown(tmp_path) == events(rows(step)) == events(written(tmp_path))
    for row in rows(7, first=step + 1):
        again.add(row)
    assert written(tmp_path) == rows(7)
    assert shown(tmp_path) == events(rows(7))


def stop_at(step: int) -> Callable[[int], None]:
    def before_step(now: int) -> None:
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return before_step


def test_mlflow_gets_each_row_of_a_resumed_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra [mlflow]")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    recipe = tiny("track=mlflow", "log_every=1", "checkpoint_steps=3")
    assert not train(recipe, tmp_path / "run", before_step=stop_at(4))["finished"]
    (tmp_path / "run" / "checkpoints" / "00000005" / "state.json").unlink()  # resumes from step 3
    results = train(recipe, tmp_path / "run", resume="auto")
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.info.run_name == "run" and run.info.status == "FINISHED" and run.data.params["data.batch"] == "16"
    client = mlflow.MlflowClient()
    for key, kind in (("loss", "train"), ("top1", "eval")):
        sent = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, f"{kind}/{key}")]
        assert sent == [(row["step"], row[key]) for row in written(tmp_path / "run") if row["kind"] == kind]
    assert sent[-1] == (results["steps"], results["last"]["top1"]) and "attention/entropy/layer_00" in run.data.metrics


def test_wandb_offline_continues_the_run_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the extra [wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe = tiny("track=wandb")
    assert not train(recipe, tmp_path, before_step=stop_at(2))["finished"]
    train(recipe, tmp_path, resume="auto")
    number = json.loads((tmp_path / "tracker.json").read_text())["wandb"]
    logs = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{number}.wandb"))
    assert logs and b"attention/overfocus/layer_00" in logs[-1].read_bytes()


class Unreachable:
    def init_trackers(self, *arguments: Any, **options: Any) -> None:
        """Begins, and fails later."""

    def log(self, values: dict[str, float], step: int) -> None:
        raise ConnectionError("no route to host\nTry again later")

    trackers = ()


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    metrics = Metrics(tmp_path, 0)
    metrics.track(ExperimentTracker("wandb", Unreachable(), tmp_path, {}, said.append))
    for row in rows(2):
        metrics.add(row)
    metrics.close()
    assert said == ["W&B gets no more rows (no route to host); all rows are in metrics.jsonl."]
    assert written(tmp_path) == rows(2)


def test_a_recipe_file_sends_nothing_unless_asked_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('extends = "shapes"\n[engine]\ntrack = "wandb"\n')
    with pytest.raises(VitfocusError, match=r"neither uses the network .* by itself: add engine\.track=wandb"):
        load_recipe(file)
    assert load_recipe(file, ["track=wandb"]).engine.track == "wandb"
