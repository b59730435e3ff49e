"""What a person sees while a run goes on: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from typing import Any

_QUIET_SECONDS = 10.0


class Progress:
    """Shows steps, images a second, losses, the last score and the time left; silent on all processes but the first."""

    def __init__(self, total: int, shown: bool = True) -> None:
        self.total, self.shown = total, shown
        self.score = ""  # the last evaluation's
        self._bar: Any = None
        self._task: Any = None
        self._last = 0.0

    def start(self, done: int) -> None:
        """Begin, some steps being done already."""
        self._began, self._first = time.perf_counter(), done
        if self.shown and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("training", total=self.total, completed=done, note="")

    def update(self, step: int, row: dict[str, Any]) -> None:
        """Show the latest numbers after so many steps."""
        if not self.shown:
            return
        parts = [f"{row['images_per_second']:.0f} images/s", f"loss {row['loss']:.4f}"]
        shown = ("kind", "step", "epoch", "loss", "ce", "lr", "images_per_second")
        parts += [f"{key} {value:.4f}" for key, value in row.items() if key not in shown]
        parts += [self.score] if self.score else []
        if self._bar is not None:
            self._bar.update(self._task, completed=step, note=", ".join(parts))
        elif time.perf_counter() - self._last >= _QUIET_SECONDS or step == self.total:
            self._last = time.perf_counter()
            self.say(f"step {step}/{self.total}, epoch {row['epoch']:.2f}, {', '.join(parts)}{self._left(step)}")

    def advance(self, step: int) -> None:
        """Move the bar alone."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """One line that stays."""
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _left(self, step: int) -> str:
        done = step - self._first
        if not done or step == self.total:
            return ""
        seconds = round((time.perf_counter() - self._began) / done * (self.total - step))
        hours, rest = divmod(seconds, 3600)
        return f", {hours}:{rest // 60:02d}:{rest % 60:02d} left"
