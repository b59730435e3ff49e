"""Progress on stderr: a bar with the time left on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from vitfocus.core.errors import printable


class Progress:
    """Shows how much of a long operation is done.

    Args:
        title: Printed before the bar and before each line.
        total: The number of steps, or None if it is not known.
        done: The number of steps done before, in an operation that is resumed.
        announcement: A line printed at the start if stderr is not a terminal.
        every: The least number of seconds between two lines if stderr is not a terminal.
        transient: Remove the bar at the end.
        show: Print anything at all; usually False on all processes but the first.

    Example:
        >>> with Progress("fog", total=2, show=False) as progress:
        ...     progress.advance(2, "severity 1")
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        done: int = 0,
        *,
        announcement: str = "",
        every: float = 60.0,
        transient: bool = True,
        show: bool = True,
    ) -> None:
        self.title, self.total, self.done = title, total, done
        self.announcement, self.every, self.transient, self.show = announcement, every, transient, show
        self._bar: Any = None
        self._note = ""

    def start(self) -> None:
        """Show the bar, or print the announcement line."""
        self._began, self._first = time.monotonic(), self.done
        self._printed = self._began
        if not self.show:
            return
        if not sys.stderr.isatty():
            if self.announcement:
                self.say(self.announcement)
            return
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}", markup=False),
            console=Console(stderr=True),
            transient=self.transient,
        )
        self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, note="")
        self._bar.start()

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Count some more steps; the `note` is shown beside the bar."""
        self.update(self.done + steps, note)

    def update(self, done: int, note: str = "") -> None:
        """Set the number of steps done."""
        finished = self.done != done == self.total and bool(note)
        self.done, self._note = done, note or self._note
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=self._note)
            return
        now = time.monotonic()
        if self.show and (now - self._printed >= self.every or finished):
            self._printed = now
            self.say(f"{self.title}: {self._done_text(now)}{self._note and f' ({self._note})'}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        text = text if text.isprintable() else printable(text)
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self.show:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _done_text(self, now: float) -> str:
        """The number of steps done, and the time left."""
        if self.total is None:
            return f"{self.done:,}"
        taken = self.done - self._first
        amount = f"{self.done:,} of {self.total:,}"
        if taken <= 0 or self.done >= self.total:
            return amount
        return f"{amount}, {_format_time((now - self._began) * (self.total - self.done) / taken)} left"


def _format_time(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    >>> _format_time(3725)
    '1:02:05'
    """
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
