"""Progress on stderr: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_LINE_EVERY = 60.0


class Advance(Protocol):
    """Call it with what was done: how many steps, and of which condition."""

    def __call__(self, steps: int, name: str) -> None: ...


@contextmanager
def progress(title: str, total: int | None, done: int = 0, show: bool = True) -> Iterator[Advance]:
    """Show how far a long run is; `total` and `done` count (image, condition) pairs.

    >>> with progress("fog", total=2, show=False) as advance:
    ...     advance(2, "fog/1")
    """
    if not show:
        yield lambda steps, name: None
    elif sys.stderr.isatty():
        yield from _bar(title, total, done)
    else:
        yield from _lines(title, total, done)


def _bar(title: str, total: int | None, done: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, completed=done)
        yield lambda steps, name: bar.update(task, advance=steps, description=f"{title}: {name}")


def _lines(title: str, total: int | None, done: int) -> Iterator[Advance]:
    began = spoke = time.monotonic()
    so_far = 0

    def advance(steps: int, name: str) -> None:
        nonlocal spoke, so_far
        so_far += steps
        now = time.monotonic()
        if now - spoke < _LINE_EVERY:
            return
        spoke = now
        left = (
            "" if total is None else f" of {total:,}, {_clock((now - began) * (total - done - so_far) / so_far)} left"
        )
        print(f"{title}: {done + so_far:,}{left} ({name})", file=sys.stderr, flush=True)

    amount = "" if total is None else f", {total - done:,} image evaluations"
    print(f"{title}{amount}.", file=sys.stderr, flush=True)
    yield advance


def _clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    >>> _clock(3725)
    '1:02:05'
    """
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
