"""metrics.jsonl: one JSON object a line, and TensorBoard beside it where the recipe asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitfocus.core.files import Appender, write_text
from vitfocus.train.tensorboard import Board


class Metrics:
    """Appends rows. On resuming, rows past the step resumed from are dropped: they will be written again.

    A full disk, of which the checkpoints speak, only delays a row.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool = False) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [row for row in self.rows() if row["step"] <= step] if step else []
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = Appender(self.path)
        self._board = Board(folder / "tensorboard", step) if tensorboard else None

    def add(self, row: dict[str, Any]) -> None:
        """Write one row."""
        self._file.add((json.dumps(row) + "\n").encode())
        if self._board is not None:
            self._board.add(row)

    def catch_up(self) -> None:
        """Write what a full disk has delayed, if it lets it now."""
        self._file.catch_up()
        if self._board is not None:
            self._board.file.catch_up()

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far; a crash may have left half of one, or a disk a damaged one."""
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
        return [row for line in text.splitlines() if (row := _row(line)) is not None]


def row_text(row: dict[str, Any], score: str = "") -> str:
    """A training row for the progress line: speed, loss and its terms, and the `score` of the last evaluation.

    >>> row_text({"images_per_second": 512.3, "loss": 2.5, "epoch": 1.25, "adl": 0.2}, "top1 0.4000")
    'epoch 1.25, 512 images/s, loss 2.5000, adl 0.2000, top1 0.4000'
    """
    parts = [f"epoch {row['epoch']:.2f}", f"{row['images_per_second']:.0f} images/s", f"loss {row['loss']:.4f}"]
    shown = ("kind", "step", "epoch", "loss", "ce", "lr", "images_per_second")
    parts += [f"{key} {value:.4f}" for key, value in row.items() if key not in shown]
    return ", ".join([*parts, score] if score else parts)


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
