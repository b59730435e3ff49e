"""metrics.jsonl: one JSON object a line, and TensorBoard beside it where the recipe asks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vitfocus.errors import VitfocusError
from vitfocus.files import write_text


class Metrics:
    """Appends rows. On resuming, rows past the step resumed from are dropped: they will be written again."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = False) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [row for row in self.rows() if row["step"] <= step] if step else []
        self._late: list[str] = []
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self._board = _open_board(folder / "tensorboard", step) if tensorboard else None

    def add(self, row: dict[str, Any]) -> None:
        """Write one row."""
        self._late.append(json.dumps(row) + "\n")
        try:
            self._write_late()
        except OSError:  # a full disk, of which the checkpoints speak: the row is written with a later one
            return
        if self._board is not None:
            for key, value in row.items():
                if key not in ("step", "kind"):
                    self._board.add_scalar(f"{row['kind']}/{key}", value, row["step"])

    def _write_late(self) -> None:
        """Append what is not written yet, whole lines or none."""
        size = self.path.stat().st_size
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(self._late)
        except OSError:
            os.truncate(self.path, size)
            raise
        self._late.clear()

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far; a crash may have left half of one, or a disk a damaged one."""
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
        return [row for line in text.splitlines() if (row := _row(line)) is not None]

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._board is not None:
            self._board.close()


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _open_board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise VitfocusError("engine.tensorboard=true needs the extra vitfocus[track].") from None
    return SummaryWriter(str(folder), purge_step=step or None)
