"""metrics.jsonl: one JSON object a line, and TensorBoard beside it where the recipe asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitfocus.core.files import write_text
from vitfocus.train.appending import Appender
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


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
