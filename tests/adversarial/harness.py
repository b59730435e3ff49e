"""Attacks are counted here: an attempt holds if it ends in time with a result or with one sentence for the person.

Anything else is a failure: another exception, a message of several lines or with control characters, a command that
prints a traceback, more than 60 seconds, code of the attacker's that ran, or a run that was lost or changed.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import signal
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from vitfocus.cli import main
from vitfocus.core.environment import device_name, versions
from vitfocus.core.errors import VitfocusError, printable
from vitfocus.core.files import write_text

#: Seconds after which an attempt counts as a hang.
PATIENCE = 60
_LONGEST = 3000  # characters of a message


class Hang(BaseException):
    """An attempt that does not end; no `except Exception` may swallow it."""


@dataclass
class Tally:
    """Attempts by category, with what failed; `marker` is the file that a payload would leave."""

    seed: int = 0
    marker: Path | None = None
    tried: Counter[str] = field(default_factory=Counter)
    failed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def attempt(self, category: str, what: str, call: Callable[[], Any]) -> None:
        """Try a call, which must return, or raise a `VitfocusError` of one sentence."""
        problem = ""
        try:
            with limited(), quiet():
                call()
        except VitfocusError as error:
            problem = fault_of(str(error))
        except Hang:
            problem = f"no end after {PATIENCE} s"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {str(error)[:200]} ({Path(place.filename).name}:{place.lineno})"
        self.count(category, what, problem)

    def command(self, category: str, words: list[str]) -> None:
        """Try a command: its exit code is 0, 2 or 130, and after 2 the last line is the reason."""

        def call() -> None:
            shown, printed = io.StringIO(), io.StringIO()
            with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(printed):
                try:
                    code = main(words)
                except SystemExit as end:  # --help
                    code = int(end.code or 0)
            said = shown.getvalue()
            assert "Traceback" not in said, said[-300:]
            assert "\x1b" not in said + printed.getvalue(), "control characters reach the terminal"
            assert code in (0, 2, 130), f"exit code {code}: {said[-200:]}"
            last = said.rstrip("\n").split("\n")[-1]
            if code == 2:
                assert last.startswith("vitfocus: "), f"the last line is {last[:200]!r}"
                assert not (problem := fault_of(last)), problem

        self.attempt(category, f"vitfocus {' '.join(words)}"[:300], call)

    def count(self, category: str, what: str, problem: str = "") -> None:
        """Count one attempt, and its problem if it has one."""
        if self.marker is not None and self.marker.exists():
            self.marker.unlink()
            problem = "code of the attacker's ran"
        self.tried[category] += 1
        if problem:
            self.failed[category].append(f"{what}: {problem}")

    def table(self, kept: str = "") -> str:
        """Tried, held and failed, by category, as Markdown; rows of an earlier table are kept."""
        found = re.findall(r"^\| ([^|]+) \| ([\d,]+) \| [\d,]+ \| ([\d,]+) \| (\d+) \|", kept, re.M)
        rows = {name: (int(a.replace(",", "")), int(b.replace(",", "")), seed) for name, a, b, seed in found}
        rows |= {name: (self.tried[name], len(self.failed[name]), str(self.seed)) for name in self.tried}
        rows.pop("all", None)
        lines = ["| category | tried | held | failed | seed |", "|---|---:|---:|---:|---:|"]
        lines += [f"| {name} | {a:,} | {a - b:,} | {b:,} | {seed} |" for name, (a, b, seed) in sorted(rows.items())]
        tried, failed = (sum(row[place] for row in rows.values()) for place in (0, 1))  # type: ignore[misc]
        return "\n".join([*lines, f"| all | {tried:,} | {tried - failed:,} | {failed:,} | |"])

    def keep(self, file: Path) -> None:
        """Write the table, with the versions that were attacked and the processor."""
        known = file.read_text() if file.is_file() else ""
        present = ", ".join(f"{name} {version}" for name, version in versions("timm", "transformers").items())
        about = "What `make test-adversarial` tried, and what held: it ended in time with a result or one sentence."
        where = f"with {present}, on a CPU ({device_name(torch.device('cpu'))})"
        write_text(file, f"# Attacks\n\n{about}\n\n{self.table(known)}\n\nLast run {where}.\n")


def fault_of(message: str) -> str:
    """What is wrong with a message for a person; "" where it is one sentence."""
    if not message.strip():
        return "an empty message"
    if "\n" in message.strip():
        return f"a message of several lines: {message[:200]!r}"
    if message != printable(message):
        return f"control characters in a message: {message[:200]!r}"
    return f"a message of {len(message):,} characters: {message[:100]!r}" if len(message) > _LONGEST else ""


def waited(process: int | str = "self") -> float:
    """Seconds that a process was ready to run while others had the processor; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


@contextlib.contextmanager
def limited(seconds: int = PATIENCE) -> Iterator[None]:
    """Raise `Hang` in the block when the time is over, without that in which other processes had the processor."""
    began, before_waiting = time.monotonic(), waited()

    def stop(number: int, frame: FrameType | None) -> None:
        left = seconds - (time.monotonic() - began - (waited() - before_waiting))
        if left <= 0:
            raise Hang
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.1))

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without output and warnings."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(io.StringIO()):
            yield


def explore(strategy: SearchStrategy[Any], tries: int, number: int, check: Callable[[Any], None]) -> None:
    """Let hypothesis draw that many examples and pass each to `check`, which counts instead of raising."""

    @seed(number)
    @settings(
        max_examples=tries,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def examples(example: Any) -> None:
        check(example)

    examples()


def flip(content: bytes, bit: int) -> bytes:
    """The content with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut off, cut out, doubled, overwritten, or zeroed."""
    if not content:
        return bytes(draw.randrange(256) for _ in range(draw.randrange(20)))
    start = draw.randrange(len(content))
    stop = min(len(content), start + draw.choice((1, 2, 8, 64, 512)))
    kind = draw.randrange(7)
    if kind == 0:
        return flip(content, draw.randrange(8 * len(content)))
    if kind == 1:
        return content[:start]
    if kind == 2:
        return content[:start] + content[stop:]
    if kind == 3:
        return content[:stop] + content[start:]
    if kind == 4:
        return content[:start] + bytes(draw.randrange(256) for _ in range(stop - start)) + content[stop:]
    if kind == 5:
        return content[:start] + bytes(stop - start) + content[stop:]
    for _ in range(draw.randrange(2, 30)):
        content = flip(content, draw.randrange(8 * len(content)))
    return content
