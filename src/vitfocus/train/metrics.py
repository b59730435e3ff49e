"""metrics.jsonl: one JSON object a line, and TensorBoard beside it where the recipe asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitfocus.errors import VitfocusError
from vitfocus.files import write_text


class Metrics:
    """Appends rows. On resuming, rows past the step resumed from are dropped: they will be written again."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = False) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [line for line in self._lines() if json.loads(line)["step"] <= step] if step else []
        write_text(self.path, "".join(line + "\n" for line in kept))
        self._board = _open_board(folder / "tensorboard", step) if tensorboard else None

    def add(self, row: dict[str, Any]) -> None:
        """Write one row."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._board is not None:
            for key, value in row.items():
                if key not in ("step", "kind"):
                    self._board.add_scalar(f"{row['kind']}/{key}", value, row["step"])

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far."""
        return [json.loads(line) for line in self._lines()]

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._board is not None:
            self._board.close()

    def _lines(self) -> list[str]:
        """The whole lines; a crash may have left half of one at the end."""
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        return text[: text.rfind("\n") + 1].splitlines()


def _open_board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise VitfocusError("engine.tensorboard=true needs the extra vitfocus[track].") from None
    return SummaryWriter(str(folder), purge_step=step or None)
