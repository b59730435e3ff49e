"""SIGTERM and Ctrl-C as a wish: the run ends at the next step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopWish:
    """Within the context, the first signal is noted and a second one acts as it usually would."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopWish:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self._before[number])
