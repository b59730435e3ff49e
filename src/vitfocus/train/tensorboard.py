"""TensorBoard's copy of the rows of metrics.jsonl.

TensorBoard's own writer works in a thread that dies on the first full disk, taking with it what it was given last; so
its records are made here, and appended as the rows of metrics.jsonl are.
"""

from __future__ import annotations

import io
import os
import platform
import time
from pathlib import Path
from typing import Any

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import Appender


class Board:
    """Appends every number of a row to a file of events; what an earlier run showed past `step` is hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            raise VitfocusError("engine.tensorboard=true needs the extra vitfocus[track].") from None
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time():020.9f}.{platform.node()}.{os.getpid()}"
        self.file = Appender(folder / name)
        self.file.add(_beginning(step))

    def add(self, row: dict[str, Any]) -> None:
        """Show one row."""
        self.file.add(_events(row))


def _beginning(step: int) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = SessionLog(status=SessionLog.START)
    return _records([Event(file_version="brain.Event:2"), Event(step=step + 1, session_log=start)])


def _events(row: dict[str, Any]) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils.tensorboard.summary import scalar

    shown = {f"{row['kind']}/{key}": value for key, value in row.items() if key not in ("kind", "step")}
    now = time.time()
    return _records([Event(wall_time=now, step=row["step"], summary=scalar(tag, shown[tag])) for tag in shown])


def _records(events: list[Any]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    made = io.BytesIO()
    writer = RecordWriter(made)
    for event in events:
        writer.write(event.SerializeToString())
    return made.getvalue()
