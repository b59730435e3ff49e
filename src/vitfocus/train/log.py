"""The log of a run: metrics.jsonl (one JSON object per line), its copies in TensorBoard and trackers, results.json.

At every evaluation the attention of each layer is logged too, and a message says if it collapses or stops changing.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

from vitfocus.anatomy import anatomy
from vitfocus.attention.diagnosis import Diagnosis, diagnose
from vitfocus.core.errors import VitfocusError, reason
from vitfocus.core.files import Appender, writable_path, write_text
from vitfocus.core.modules import running_eagerly
from vitfocus.core.records import Count, OpenDict, parse_json, read_json
from vitfocus.core.tables import ranges

if TYPE_CHECKING:
    from accelerate import Accelerator

    from vitfocus.tasks.base import Task

#: Trackers by the name of their package: what users call them, and what to do if a run cannot be started.
TRACKERS = {
    "wandb": ("W&B", "log in with `wandb login`, or set WANDB_MODE=offline"),
    "mlflow": ("MLflow", "set MLFLOW_TRACKING_URI to a server or a database, such as sqlite:///mlflow.db"),
}


class Metrics:
    """Appends rows. A resumed run drops the rows after its checkpoint, since it writes them again.

    If the disk is full, rows are kept in memory and written later.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool = False) -> None:
        self.path = folder / "metrics.jsonl"
        before = self.rows() if step else []
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in before if row["step"] <= step))
        self._file = Appender(self.path)
        self._board = TensorBoard(folder / "tensorboard", step) if tensorboard else None
        self._tracker: ExperimentTracker | None = None
        self._tracked = {(row.get("kind"), row["step"]) for row in before}  # already sent to the tracker

    def track(self, tracker: ExperimentTracker) -> None:
        """Also send rows to a tracker, except those that it received before the run was resumed."""
        self._tracker = tracker

    def add(self, row: dict[str, Any]) -> None:
        """Write one row."""
        self._file.add((json.dumps(row) + "\n").encode())
        if self._board is not None:
            self._board.add([row])
        if self._tracker is not None and (row["kind"], row["step"]) not in self._tracked:
            self._tracker.add(row)

    def close(self) -> None:
        """Write delayed rows, and end the tracker's run."""
        self.catch_up()
        if self._tracker is not None:
            self._tracker.finish()

    def catch_up(self) -> None:
        """Write the rows that a full disk has delayed, if that is possible now."""
        self._file.catch_up()
        if self._board is not None and not self._board.sound():
            self._board.replace(self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """All rows of the file; a crash may have left an incomplete one, or a disk a damaged one."""
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
        return [row for line in text.splitlines() if (row := _row(line)) is not None]


class TensorBoard:
    """TensorBoard's copy of the rows; `purge_step` hides the rows that an earlier run wrote after `step`.

    torch's `SummaryWriter` writes in a thread that ends at the first error, such as a full disk. The rows are then
    written again, into a new file, as soon as that is possible.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            raise VitfocusError("engine.tensorboard=true needs the extra vitfocus[track].") from None
        self.folder = folder
        self._writer: Any = None
        self._open(step + 1)

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write these rows, unless an error has ended the writer."""
        if self._writer is None:
            return
        try:
            for row in rows:
                for key, value in scalars(row).items():
                    self._writer.add_scalar(f"{row['kind']}/{key}", value, row["step"])
            self._writer.flush()
        except OSError:
            self._drop()

    def sound(self) -> bool:
        """Whether all rows so far were written."""
        self.add([])
        return self._writer is not None

    def replace(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write these rows in place of all earlier ones."""
        self._open(0)
        self.add(rows)

    def _open(self, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(writable_path(self.folder, folder=True)), purge_step=purge_step)
            self._writer.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        writer, self._writer = self._writer, None
        with suppress(OSError):
            if writer is not None:
                writer.close()


class ExperimentTracker:
    """A run in W&B or MLflow, through accelerate's trackers.

    `tracker.json` keeps the id of that run, so that a resumed run continues it. If the tracker fails, no more rows are
    sent, and training continues.
    """

    def __init__(
        self,
        name: str,
        accelerator: Accelerator,
        folder: Path,
        settings: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self.accelerator, self.say = accelerator, say
        self.label, hint = TRACKERS[name]
        file = folder / "tracker.json"
        ids: dict[str, str] = read_json(file, dict[str, str], writer="vitfocus train") if file.is_file() else {}
        if name == "wandb":
            ids.setdefault(name, secrets.token_hex(4))
            options = {"id": ids[name], "resume": "allow", "name": folder.name, "dir": str(folder)}
        else:
            options = {"run_id": ids[name]} if name in ids else {"run_name": folder.name}
        project = os.environ.get("WANDB_PROJECT", "vitfocus")
        try:
            accelerator.init_trackers(project, dict(settings), init_kwargs={name: options})
        except Exception as error:  # each tracker has its own kinds
            raise VitfocusError(f"{self.label} cannot start a run ({reason(error)}): {hint}.") from None
        if name == "mlflow":
            ids[name] = accelerator.get_tracker(name, unwrap=True).info.run_id
        write_text(file, json.dumps(ids) + "\n")
        self._open = True

    def add(self, row: dict[str, Any]) -> None:
        """Send one row."""
        if self._open:
            values = {f"{row['kind']}/{key}": value for key, value in scalars(row).items()}
            self._attempt(lambda: self.accelerator.log(values, step=row["step"]))

    def finish(self) -> None:
        """End the run in the tracker."""
        if self._open:
            self._attempt(lambda: [one.finish() for one in self.accelerator.trackers])

    def _attempt(self, send: Callable[[], Any]) -> None:
        try:
            send()
        except Exception as error:
            self._open = False
            self.say(f"{self.label} gets no more rows ({reason(error)}); all rows are in metrics.jsonl.")


def require_tracker(name: str) -> None:
    """Refuse a tracker whose package is not installed."""
    if find_spec(name) is None:
        raise VitfocusError(f"engine.track={name} needs the extra vitfocus[{name}].")


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row; lists with one value per layer get one name per layer.

    >>> scalars({"kind": "attention", "step": 8, "layer": [0, 3], "entropy": [3.9, 2.5]})
    {'entropy/layer_00': 3.9, 'entropy/layer_03': 2.5}
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, list) and key != "layer":
            found |= {f"{key}/layer_{layer:02d}": one for layer, one in zip(row["layer"], value, strict=True)}
        elif key not in ("kind", "step", "layer"):
            found[key] = value
    return found


def row_text(row: dict[str, Any], score: str = "", items: str = "images") -> str:
    """A training row for the progress line: speed, loss and its terms, and the `score` of the last evaluation.

    >>> row_text({"images_per_second": 512.3, "loss": 2.5, "epoch": 1.25, "adl": 0.2}, "top1 0.4000")
    'epoch 1.25, 512 images/s, loss 2.5000, adl 0.2000, top1 0.4000'
    """
    parts = [f"epoch {row['epoch']:.2f}", f"{row['images_per_second']:.0f} {items}/s", f"loss {row['loss']:.4f}"]
    shown = ("kind", "step", "epoch", "loss", "ce", "lr", "images_per_second")
    parts += [f"{key} {value:.4f}" for key, value in row.items() if key not in shown]
    return ", ".join([*parts, score] if score else parts)


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line, "metrics.jsonl")
    except VitfocusError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


#: Validation images that are read. The readings are means over images, heads and rows, so a few images are enough.
IMAGES = 32
#: A layer has collapsed if its rows have at most this share of the largest entropy, ...
COLLAPSED_ENTROPY = 0.5
#: ... and the most attended 5 % of the tokens receive at least this share of all attention.
COLLAPSED_OVERFOCUS = 0.5
#: A collapse in at least this share of the layers is reported.
COLLAPSED_LAYERS = 1 / 3
#: Attention has stopped changing if no layer's share of the largest entropy moves more than this between evaluations.
UNCHANGED = 0.002


class AttentionLog:
    """Reads a model's attention on the task's first validation images. Rows go to metrics.jsonl."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task = task
        self.images: Any = None
        self.readable = _is_readable(model)
        self._before: dict[str, Any] | None = None
        self._moving = False  # whether it changed between the last two rows

    def row(self, model: nn.Module, step: int, epoch: float) -> dict[str, Any] | None:
        """The readings by layer; None for a model without attention that can be read."""
        if self.readable and self.images is None:
            self.images = self.task.sample_images(IMAGES)
            self.readable = self.images is not None
        if not self.readable:
            return None
        with running_eagerly():
            return {"kind": "attention", "step": step, "epoch": epoch, **by_layer(diagnose(model, self.images))}

    def sentence(self, row: dict[str, Any], rate: float) -> str:
        """A message about a new row, or ""; `rate` is the learning rate as a share of its peak."""
        before, self._before = self._before, row
        moved, self._moving = self._moving, bool(before) and not _is_unchanged(row, before)
        if collapsed_layers(row) and not (before and collapsed_layers(before)):
            return (
                f"{describe_collapse(row)} A lower optimiser.lr or a longer warm-up may help; vitfocus diagnose shows "
                "the maps."
            )
        if moved and not self._moving and rate > 0.1:
            return (
                "Attention has stopped changing: since the last evaluation no layer's entropy moved by more than "
                f"{UNCHANGED:.1%} of its maximum, although the learning rate is still {rate:.0%} of its peak."
            )
        return ""


def by_layer(diagnosis: Diagnosis) -> dict[str, list[Any]]:
    """What is logged of a diagnosis: lists with one value per layer."""
    rows = [row for row in diagnosis.rows if "overfocus" in row]
    return {
        "layer": [row["layer"] for row in rows],
        "entropy": [round(row["entropy"], 4) for row in rows],
        "entropy_share": [round(row["entropy"] / row["entropy_bound"], 4) for row in rows],
        "overfocus": [round(row["overfocus"], 4) for row in rows],
    }


def describe_collapse(row: Mapping[str, Any]) -> str:
    """Where attention has collapsed, in a sentence; empty if it has not.

    >>> describe_collapse({"layer": [0, 1], "entropy_share": [0.9, 0.3], "overfocus": [0.1, 0.7]}).partition(":")[0]
    'Attention has collapsed in 1 of 2 layers (1)'
    """
    collapsed = collapsed_layers(row)
    if not collapsed:
        return ""
    shares, tops = ([row[key][row["layer"].index(one)] for one in collapsed] for key in ("entropy_share", "overfocus"))
    return (
        f"Attention has collapsed in {len(collapsed)} of {len(row['layer'])} layers ({', '.join(ranges(collapsed))}): "
        f"its entropy is {_percent(shares)} of the maximum, and 5 % of the tokens receive {_percent(tops)} of it."
    )


def _percent(values: Sequence[float]) -> str:
    low, high = f"{100 * min(values):.0f}", f"{100 * max(values):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def collapsed_layers(row: Mapping[str, Any]) -> list[int]:
    """The layers whose attention has collapsed, if they are at least a third of all.

    >>> collapsed_layers({"layer": [0, 1, 2], "entropy_share": [0.9, 0.3, 0.8], "overfocus": [0.1, 0.7, 0.2]})
    [1]
    """
    values = zip(row["layer"], row["entropy_share"], row["overfocus"], strict=True)
    found = [layer for layer, share, top in values if share <= COLLAPSED_ENTROPY and top >= COLLAPSED_OVERFOCUS]
    return found if len(found) >= COLLAPSED_LAYERS * len(row["layer"]) else []


def _is_unchanged(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> bool:
    before = before or row
    changes = [abs(a - b) for a, b in zip(row["entropy_share"], before["entropy_share"], strict=True)]
    return bool(changes) and max(changes) <= UNCHANGED


def _is_readable(model: nn.Module) -> bool:
    try:
        anatomy(model)
    except VitfocusError:
        return False
    return not any(hasattr(parameter, "full_tensor") for parameter in model.parameters())  # FSDP reads all together


class _RowFields(msgspec.Struct):
    kind: str = ""


class EvaluationRow(OpenDict):
    """One evaluation: step, epoch and scores."""

    fields, numbers = _RowFields, True


class _ResultFields(msgspec.Struct):
    recipe: str = ""
    spec: str = ""
    headline: str = ""
    device: str = ""
    precision: str = ""
    task: str = ""
    steps: Count = 0
    parameters: Count = 0
    processes: Count = 0
    train_images: Count = 0
    val_images: Count = 0
    epochs: float = 0.0
    seconds: float = 0.0
    images_per_second: float = 0.0
    peak_memory_bytes: float = 0.0
    finished: bool = False
    last: EvaluationRow = msgspec.field(default_factory=EvaluationRow)
    best: EvaluationRow = msgspec.field(default_factory=EvaluationRow)
    versions: dict[str, str] = {}
    data_sha256: dict[str, str] = {}


class TrainingResults(OpenDict):
    """results.json of a training run."""

    fields = _ResultFields
